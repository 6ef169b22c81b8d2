"""Partial results of attention over shards of the keys, combined."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    r"""Attention over all keys from attention over disjoint shards of them, of any kind of weight.

    .. math::
        \mathrm{lse} = \log \sum_s e^{\mathrm{lse}_s},\qquad o = \sum_s e^{\mathrm{lse}_s - \mathrm{lse}}\, o_s

    Args:
        outs: results (..., N, Dv), one a shard.
        lses: logarithms of the denominators (..., N), as ``geodesic_attention(..., return_lse=True)`` gives them. A
            shard in which a row has no key (lse -inf) counts for nothing there.

    Returns:
        (out, lse), differentiable; the same as of one call over all keys, in any order of the shards. Dropout commutes
        with it; values aggregated on a manifold (``value_manifold``) do not.

    Raises:
        ValueError: no shards, lists of different length, or shapes that differ.

    Source: Milakov and Gimelshein (2018), Online normalizer calculation for softmax.
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge takes one lse for every out and at least one of each, got {len(outs)} and {len(lses)}")
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            shapes = [(tuple(o.shape), tuple(s.shape)) for o, s in zip(outs, lses, strict=True)]
            raise ValueError(f"merge takes outs (..., N, Dv) of one shape with lses (..., N), got {shapes}")
    stacked = torch.stack(lses)
    top = stacked.detach().amax(0)
    top = torch.where(top.isinf(), 0.0, top)
    shares = torch.exp(stacked - top)
    den = shares.sum(0)
    empty = den == 0
    safe = torch.where(empty, 1.0, den)
    out = (torch.stack(outs) * (shares / safe).unsqueeze(-1)).sum(0)
    return out.to(outs[0].dtype), torch.where(empty, -torch.inf, torch.log(safe) + top)

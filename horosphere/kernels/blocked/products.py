"""Products of a tile with features, added to kept sums."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate(into: Tensor, g: Tensor, features: Tensor) -> None:
    """into (E, R, F) += g (E, R, C) features (E or 1, C, F)."""
    if into.shape[0] == 1:
        into[0].addmm_(g[0], features[0])
    else:
        into.baddbmm_(g, features.expand(g.shape[0], -1, -1))


def append(t: Tensor, last: float | Tensor) -> Tensor:
    """t (..., F) with one more column."""
    out = t.new_empty(*t.shape[:-1], t.shape[-1] + 1)
    out[..., :-1], out[..., -1] = t, last
    return out


def product_into(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out (E, R, C) = a (E, R, F) b (E or 1, C, F)^T."""
    if out.shape[0] == 1:
        torch.mm(a[0], b[0].mT, out=out[0])
    else:
        torch.bmm(a, b.expand(out.shape[0], -1, -1).mT, out=out)
    return out

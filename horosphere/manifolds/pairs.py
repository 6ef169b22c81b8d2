"""Exact squared distances of single pairs, whatever the manifold offers."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.reference.sqdist import arc2_of, difference_chord2
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import chords, resolve


def pair_dist2(manifold: geoopt.Manifold, x: Tensor, y: Tensor) -> Tensor:
    """Squared distance of broadcast pairs x, y (..., D) -> (...), in float64 where the manifold allows.

    Takes, in this order: the manifold's own ``pair_dist2`` (the optional hook that works from raw coordinates), the
    differences of its chord features, its ``dist``.
    """
    resolved, has_chord = resolve(manifold)
    if has_chord and _owns_hook(resolved):
        return resolved.pair_dist2(x, y)
    if has_chord:
        wide = _numerics.compute_dtype(x.dtype)
        parts_x, parts_y = chords(resolved, x.to(wide)), chords(resolved, y.to(wide))
        if parts_x is not None and parts_y is not None:
            terms = [
                arc2_of(
                    difference_chord2(a, b),
                    a.kappa[..., None] if isinstance(a.kappa, Tensor) and a.kappa.dim() else a.kappa,
                )
                for a, b in zip(parts_x, parts_y, strict=True)
            ]
            return torch.stack(torch.broadcast_tensors(*terms)).sum(0)
    return resolved.dist(x, y).to(_numerics.compute_dtype(x.dtype)) ** 2


def _owns_hook(manifold: geoopt.Manifold) -> bool:
    """Whether the hook belongs to the chord: a class with a chord of its own does not use an inherited hook."""
    for cls in type(manifold).__mro__:
        if "pair_dist2" in cls.__dict__:
            return True
        if "chord" in cls.__dict__:
            return False
    return False

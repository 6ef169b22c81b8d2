"""Nearest neighbours from chords, the plain form."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.reference.sqdist import arc2_of, product_chord2


def lower_bound(xs: Sequence, ys: Sequence) -> Tensor:
    """(..., N, M) what the squared distances of all pairs are at least: the product form less its error bound."""
    total = None
    for x, y in zip(xs, ys, strict=True):
        u, size = product_chord2(x, y)
        error = 4 * (x.features.shape[-1] + 2) ** 0.5 * _numerics.unit_roundoff(u.dtype)
        kappa = x.kappa[..., None, None] if isinstance(x.kappa, Tensor) and x.kappa.dim() else x.kappa
        d2 = arc2_of(u - error * size, kappa)
        total = d2 if total is None else total + d2
    return total


def nearest(xs: Sequence, ys: Sequence, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest lower bounds of every row, ascending, and their indices; equal ones by index. Both (..., N, k)."""
    values, indices = lower_bound(xs, ys).sort(dim=-1, stable=True)
    return values[..., :k], indices[..., :k]

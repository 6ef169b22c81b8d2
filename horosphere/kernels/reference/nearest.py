"""Nearest neighbours from chords, the plain form."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.reference.sqdist import arc2_of, bounding, product_chord2


def lower_bound(xs: Sequence, ys: Sequence) -> Tensor:
    """(..., N, M) what the squared distances of all pairs are at least: the product form less its error bound."""
    return functools.reduce(operator.add, (_part_bound(x, y) for x, y in zip(xs, ys, strict=True)))


def _part_bound(x, y) -> Tensor:
    u, size = product_chord2(x, y)
    error = 4 * (x.features.shape[-1] + 2) ** 0.5 * _numerics.unit_roundoff(u.dtype)
    kappa = x.kappa[..., None, None] if isinstance(x.kappa, Tensor) and x.kappa.dim() else x.kappa
    size = bounding(size)
    # nothing is known of points that are too far for the type
    far = size.isnan() & _finite(x).unsqueeze(-1) & _finite(y).unsqueeze(-2)
    return torch.where(far, 0.0, arc2_of(u - error * size, kappa))


def _finite(x) -> Tensor:
    return x.features.isfinite().all(-1)


def nearest(xs: Sequence, ys: Sequence, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest lower bounds of every row, ascending, and their indices; equal ones by index. Both (..., N, k)."""
    values, indices = lower_bound(xs, ys).sort(dim=-1, stable=True)
    return values[..., :k], indices[..., :k]

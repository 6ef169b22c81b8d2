"""Squared distances and nearest neighbours from chords: the plain form that every faster one is measured against."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere import _numerics

# A chord is any tuple (features, weight, time_dims, kappa), see horosphere.manifolds.Chord: kernels know no manifold.


def _kappa_of_matrix(kappa: float | Tensor, like: Tensor) -> float | Tensor:
    if not isinstance(kappa, Tensor):
        return kappa
    return kappa.to(like.dtype) if kappa.dim() == 0 else kappa.to(like.dtype)[..., None, None]


def arc2_of(u: Tensor, kappa: float | Tensor) -> Tensor:
    """arc2 of squared chords after the clamp to [0, 4/kappa] that rounding makes necessary."""
    u = u.clamp(min=0.0)
    if not isinstance(kappa, Tensor):
        return _numerics.arc2(u.clamp(max=4 / kappa) if kappa > 0 else u, kappa)
    kappa = kappa.to(u.dtype)
    return _numerics.arc2(torch.where(kappa * u > 4, 4 / torch.where(kappa > 0, kappa, 1.0), u), kappa)


def product_chord2(x, y) -> tuple[Tensor, Tensor]:
    """u of all pairs in inner-product form, and the size of what was subtracted to get it, both (..., N, M).

    ``u_ij = w_i w_j (<f_i,f_i>_J + <f_j,f_j>_J - 2 <f_i,f_j>_J)``; on the hyperboloid the first two are 1/kappa.
    The error of u is at most ``4 sqrt(F) unit_roundoff`` times the second result, ``w_i w_j (|f_i|^2 + |f_j|^2)``.
    """
    dtype = _numerics.fast_dtype(torch.promote_types(x.features.dtype, y.features.dtype))
    fx, fy = x.features.to(dtype), y.features.to(dtype)
    nx, ny = (fx * fx).sum(-1), (fy * fy).sum(-1)
    size = nx.unsqueeze(-1) + ny.unsqueeze(-2)
    if x.time_dims:
        kappa = _kappa_of_matrix(x.kappa, fx)
        flipped = torch.cat((-fy[..., : x.time_dims], fy[..., x.time_dims :]), -1)
        s = 2 / kappa - 2 * (fx @ flipped.mT)
    else:
        s = size - 2 * (fx @ fy.mT)
    if x.weight is not None:
        w = x.weight.to(dtype).unsqueeze(-1) * y.weight.to(dtype).unsqueeze(-2)
        s, size = s * w, size * w
    return s, size


def bounding(size: Tensor) -> Tensor:
    """What error bounds multiply for the size that :func:`product_chord2` gives.

    NaN, which nothing exceeds, where u may leave the range of the type.
    """
    least, most = _numerics.range_of_squares(size.dtype)
    return torch.where(size < most, size.clamp(min=least), math.nan)


def difference_chord2(x, y) -> Tensor:
    """u of broadcast pairs from differences of features (..., F) -> (...)."""
    delta = x.features - y.features
    squares = delta * delta
    if x.time_dims:
        s = squares[..., x.time_dims :].sum(-1) - squares[..., : x.time_dims].sum(-1)
    else:
        s = squares.sum(-1)
    return s if x.weight is None else s * x.weight * y.weight


def sqdist(xs: Sequence, ys: Sequence) -> tuple[Tensor, Tensor]:
    """Squared distances of all pairs from chord parts in inner-product form, and which of them it does not resolve.

    Returns:
        d2: (..., N, M), the sum of the parts' arc2.
        near: (..., N, M) bool, pairs whose relative error may exceed the promised tolerance, near coincidence or near
            the antipode of a part: the caller computes them from differences.
    """
    total, doubt, near = _part(xs[0], ys[0])
    for x, y in zip(xs[1:], ys[1:], strict=True):
        d2, part_doubt, part_near = _part(x, y)
        total, doubt = total + d2, doubt + part_doubt
        if part_near is not None:
            near = part_near if near is None else near | part_near
    close = ~(total.detach() >= doubt)
    return total, close if near is None else close | near


def _part(x, y) -> tuple[Tensor, Tensor, Tensor | None]:
    """arc2 of one part, what d2 it does not resolve, and its pairs near the antipode where it may have any."""
    u, size = product_chord2(x, y)
    kappa = _kappa_of_matrix(x.kappa, u)
    d2 = arc2_of(u, kappa)
    with torch.no_grad():
        # theta: where the error bound of u reaches 2 tol u, that is tol in d
        theta = (
            2
            * math.sqrt(x.features.shape[-1])
            * _numerics.unit_roundoff(u.dtype)
            / _numerics.promised_tolerance(u.dtype)
        )
        limit = theta * bounding(size)
        slope = torch.where(u > 0, d2 / torch.where(u > 0, u, 1.0), 1.0)
        near = kappa * u > 4 - kappa * limit if isinstance(kappa, Tensor) or kappa > 0 else None
    return d2, slope * limit, near


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

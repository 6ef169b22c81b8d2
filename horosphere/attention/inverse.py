"""What the patterns share: inverse-distance weights of small sets of pairs, and the checks of their arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.attention.arguments import checked
from horosphere.kernels.chord.product_form import arc2, left, right, size
from horosphere.kernels.operators import as_scalar
from horosphere.kernels.reference import attention as reference
from horosphere.kernels.reference.attention import PAIRS, kappa_against, of_pairs
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import Chord, chords
from horosphere.manifolds.pairwise import cdist

# d^2 / u is at most pi^2 / 4, at antipodes: an error of u is at most so much larger in d^2.
ARC_SLOPE = 2.5


def row_weights(d2: Tensor, eps: float | Tensor, power: float | Tensor, mask: Tensor | None = None) -> Tensor:
    r""":math:`(d_{ij}^2 + \epsilon)^{-p}` of squared distances (..., H, N, M), each row up to a factor of its own.

    eps and power are () or (H,); where mask, broadcastable and bool, is False the weight is 0. Results that are
    quotients of two sums over a row do not see the factor, which keeps large powers from overflowing.
    """
    d2 = d2.to(_numerics.fast_dtype(d2.dtype))
    if isinstance(power, Tensor) or power != 1:
        return reference.weights(d2, as_scalar(eps, d2), as_scalar(power, d2), mask, None, "inverse")[0]
    w = (d2 + by_head(eps, d2.dtype)).reciprocal()
    return w if mask is None else torch.where(mask, w, 0.0)


def by_head(value: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """A scalar of every head, (H,), shaped to go with (..., H, N, M)."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(dtype)
    return value[..., None, None] if value.dim() else value


def weights_to(
    x: Tensor,
    y: Tensor,
    manifold: geoopt.Manifold,
    eps: float | Tensor,
    power: float | Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """:func:`row_weights` (..., N, M) of points x (..., N, D) to a small set y (..., M, D)."""
    xs, ys = chords(manifold, x), chords(manifold, y)
    if xs is None or ys is None:
        return row_weights(cdist(x, y, manifold, squared=True), eps, power, mask)
    return row_weights(_squared_distances(xs, ys, by_head(eps, torch.float64)), eps, power, mask)


def closeness(x: Tensor, y: Tensor, manifold: geoopt.Manifold) -> Tensor:
    """(..., N, M) numbers that grow with the distance from x to y; exactly 0 for identical points."""
    xs, ys = chords(manifold, x), chords(manifold, y)
    if xs is None or ys is None:
        return cdist(x, y, manifold, squared=True)
    if len(xs) == 1 and not xs[0].time_dims:
        xs, ys = ((p[0]._replace(kappa=0.0),) for p in (xs, ys))  # the chord itself, without its arc
    return _squared_distances(xs, ys, 0.0)


def _squared_distances(xs: Sequence[Chord], ys: Sequence[Chord], eps: float | Tensor) -> Tensor:
    """d^2 (..., N, M) from chords; where the product form does not resolve ``d^2 + eps``, from differences."""
    if torch.compiler.is_compiling() or _numerics.transformed():
        # pairs cannot be looked at one by one there, and differences of all of them are N M D numbers
        return reference.squared_distances(xs, ys, eps, False)
    pairs = list(zip(xs, ys, strict=True))
    total = functools.reduce(torch.add, (arc2(left(x) @ right(y).mT, kappa_against(x, 2)) for x, y in pairs))
    if not total.numel():
        return total
    with torch.no_grad():  # the largest error bound of every row
        sizes = ((x, size(x, 1), size(y, -1).amax(-2, keepdim=True)) for x, y in pairs)
        parts = (error_factor(x, total.dtype) * (p * q).sum(-1, keepdim=True) for x, p, q in sizes)
        bound = functools.reduce(torch.add, parts)
        rows = (total.amin(-1, keepdim=True) + eps < bound).flatten().nonzero().squeeze(-1)
        if not rows.numel():
            return total
        picked = _unresolved(xs, ys, total, rows, eps)
    if not picked.numel():
        return total
    exact = torch.cat([of_pairs(total.shape, xs, ys, some) for some in picked.split(PAIRS)])
    return total.flatten().index_put((picked,), exact.to(total.dtype)).view(total.shape)


def error_factor(x: Chord, dtype: torch.dtype) -> float:
    """What :func:`size` is multiplied by for the error bound of d^2."""
    return ARC_SLOPE * _numerics.weight_theta(x.features.shape[-1], dtype)


def _unresolved(xs: Sequence[Chord], ys: Sequence[Chord], total: Tensor, rows: Tensor, eps: float | Tensor) -> Tensor:
    """Flat indices of the unresolved pairs among the given rows of the matrix, counted through the batch."""
    n, m = total.shape[-2:]

    def part(x: Chord, y: Chord) -> Tensor:
        p, q = size(x, 1).reshape(-1, 1, 2), size(y, -1).reshape(-1, m, 2)
        return error_factor(x, total.dtype) * (p[rows] * q[rows // n]).sum(-1)

    bound = functools.reduce(torch.add, (part(x, y) for x, y in zip(xs, ys, strict=True)))
    some = (total + eps).reshape(-1, m)[rows] if isinstance(eps, Tensor) else total.reshape(-1, m)[rows] + eps
    row, column = (some < bound).nonzero(as_tuple=True)
    return rows[row] * m + column


def safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator (..., Dv) / denominator (..., 1), 0 where nothing took part; so is the gradient."""
    nothing = denominator == 0
    return torch.where(nothing, 0.0, numerator / torch.where(nothing, 1.0, denominator))


def with_ones(value: Tensor) -> Tensor:
    """[v, 1]: one product with it gives numerator and denominator."""
    return torch.cat((value, torch.ones_like(value[..., :1])), -1)


def checked_tokens(
    query: Tensor, key: Tensor, value: Tensor, eps: float | Tensor, power: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """query (*batch, N, D), key (*batch, M, D) and value (*batch, M, Dv), checked and broadcast to one batch.

    ValueError or TypeError for what does not fit, as in geodesic_attention.
    """
    args = checked(query, key, value, eps=eps, power=power)
    batch = args.query.shape[:-2]
    key, value = (t.expand(*batch, *t.shape[-2:]) for t in (args.key, args.value))
    return args.query, key, value


def check_same_length(query: Tensor, key: Tensor, what: str) -> None:
    """ValueError where query and key are not the same tokens."""
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{what} takes query and key of the same tokens, got {query.shape[-2]} and {key.shape[-2]} of them"
        )


def checked_key_mask(mask: Any, key: Tensor) -> Tensor | None:
    """A bool mask that broadcasts to (..., M), expanded; True takes part; None stays None."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        found = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"key_mask must be a bool tensor, True where a key takes part; got {found}")
    shape = key.shape[:-1]
    try:
        fits = torch.broadcast_shapes(mask.shape, shape) == shape and mask.shape[-1:] == shape[-1:]
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"key_mask of shape {tuple(mask.shape)} does not broadcast to the keys' {tuple(shape)}")
    return mask.expand(shape)

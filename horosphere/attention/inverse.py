"""What the patterns share: inverse-distance weights of small sets of pairs, and the checks of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.attention.arguments import checked
from horosphere.kernels.chord.product_form import arc2, left, right, size
from horosphere.kernels.operators import as_scalar
from horosphere.kernels.reference import attention as reference
from horosphere.kernels.reference.attention import PAIRS, kappa_against, of_pairs
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import chords
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
    d2 = _squared_distances(chords(manifold, x), chords(manifold, y), by_head(eps, torch.float64))
    return row_weights(cdist(x, y, manifold, squared=True) if d2 is None else d2, eps, power, mask)


def closeness(x: Tensor, y: Tensor, manifold: geoopt.Manifold) -> Tensor:
    """(..., N, M) numbers that grow with the distance from x to y; exactly 0 for identical points."""
    parts = [chords(manifold, x), chords(manifold, y)]
    if parts[0] is not None and len(parts[0]) == 1 and not parts[0][0].time_dims:
        parts = [(p[0]._replace(kappa=0.0),) for p in parts]  # the chord itself, without its arc
    d2 = _squared_distances(*parts, 0.0)
    return cdist(x, y, manifold, squared=True) if d2 is None else d2


def _squared_distances(xs, ys, eps: float | Tensor) -> Tensor | None:
    """d^2 (..., N, M) from chords; where the product form does not resolve ``d^2 + eps``, from differences."""
    if xs is None:
        return None
    if torch.compiler.is_compiling() or _numerics.transformed():
        # pairs cannot be looked at one by one there, and differences of all of them are N M D numbers
        return reference.squared_distances(xs, ys, eps, False)
    total = bound = None
    for x, y in zip(xs, ys, strict=True):
        d2 = arc2(left(x) @ right(y).mT, kappa_against(x, 2))
        total = d2 if total is None else total + d2
        with torch.no_grad():  # the largest error bound of every row
            p, q = size(x, 1), size(y, -1)
            theta = ARC_SLOPE * _numerics.weight_theta(x.features.shape[-1], d2.dtype)
            part = theta * (p * q.amax(-2, keepdim=True)).sum(-1, keepdim=True)
            bound = part if bound is None else bound + part
    if not total.numel():
        return total
    with torch.no_grad():
        rows = (total.amin(-1, keepdim=True) + eps < bound).flatten().nonzero().squeeze(-1)
        if not rows.numel():
            return total
        picked = _unresolved(xs, ys, total, rows, eps)
    if not picked.numel():
        return total
    exact = torch.cat([of_pairs(total.shape, xs, ys, some) for some in picked.split(PAIRS)])
    return total.flatten().index_put((picked,), exact.to(total.dtype)).view(total.shape)


def _unresolved(xs, ys, total: Tensor, rows: Tensor, eps: float | Tensor) -> Tensor:
    """Flat indices of the unresolved pairs among the given rows of the matrix, counted through the batch."""
    n, m = total.shape[-2:]
    bound = None
    for x, y in zip(xs, ys, strict=True):
        p, q = size(x, 1), size(y, -1)
        whole = (p.reshape(-1, 1, 2)[rows] * q.reshape(-1, m, 2)[rows // n]).sum(-1)
        part = ARC_SLOPE * _numerics.weight_theta(x.features.shape[-1], total.dtype) * whole
        bound = part if bound is None else bound + part
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
    plain = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False, "weight": "inverse"}
    args = checked(query, key, value, eps=eps, power=power, precision="auto", batched_curvature=False, **plain)
    batch = args.query.shape[:-2]
    return args.query, args.key.expand(*batch, *args.key.shape[-2:]), args.value.expand(*batch, *args.value.shape[-2:])


def check_same_length(query: Tensor, key: Tensor, what: str) -> None:
    """ValueError where query and key are not the same tokens."""
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{what} takes query and key of the same tokens, got {query.shape[-2]} and {key.shape[-2]} of them"
        )


def checked_key_mask(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """A bool mask that broadcasts to (..., M), expanded; True takes part."""
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

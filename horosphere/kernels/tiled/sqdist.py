r"""Distance matrices tile by tile: each tile stays in cache from the matrix product to the finished distance.

Their gradient works the tiles again: no memory beyond the tile and the points. With t = <a_i, b_j> and G = dL/dt the
gradients of the augmented features are G b and G^T a; the rest is per point. For one point and one side this is the
formula of docs/chord.md: dL/df_i = 2 J (f_i sum_j r_ij - sum_j r_ij f_j), r = dL/du w_i w_j.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere.kernels.chord import arcs
from horosphere.kernels.chord.augment import (
    Augmented,
    augment,
    batch_scalars,
    flat,
    key_gradient,
    query_gradient,
    tile_product,
    without_far,
)
from horosphere.kernels.chord.pair import ChordPair, batch_of, dtype_of
from horosphere.kernels.tiled.tiles import group_width, mirror_, tile_size, tiles
from horosphere.kernels.tiled.unresolved import Search
from horosphere.kernels.tiled.workspace import prefer_large


def sqdist(parts: Sequence[ChordPair], squared: bool, resolve: bool, same: bool = False) -> tuple[Tensor, Tensor]:
    """Distances (..., N, M), or their squares, and the pairs that the product form does not resolve.

    ``same``: both sides are one set; half of the matrix is worked, the other half is its mirror image.

    Returns:
        the matrix, in the products' type;
        flat indices (P,) into it where ``resolve``; else empty. Their entries hold nothing of use: the caller replaces
        them. The pairs are at least those of the reference's rule; of one set those on and above the diagonal.
    """
    batch, dtype, device = batch_of(parts), dtype_of(parts), parts[0].x.device
    n, m = parts[0].x.shape[-2], parts[0].y.shape[-2]
    result = prefer_large(torch.empty(*batch, n, m, dtype=dtype, device=device))
    out = result.view(batch.numel(), n, m)
    width = group_width(m)
    made = [augment(p, batch, dtype, pad=-m % width) for p in parts]
    wide = [may_overflow(a) for a in made]
    size = max(tile_size(device, len(made)), width)
    padded = m + -m % width
    buffers = torch.empty(len(made) + 2, min(size, max(1, out.shape[0] * n * padded)), dtype=dtype, device=device)
    search = Search(made, n, m, width, wide, size) if resolve else None
    for e, i, j in tiles(out.shape[0], n, padded, size, width, all_alike(made), same):
        # where pairs are looked for, the weights of columns are multiplied in afterwards
        ts = [tile_product(a.a[e, i], (a.plain_b if resolve else a.b)[e, j], buffers[k]) for k, a in enumerate(made)]
        log = search is not None and search.look(ts, e, i, j)
        tile = out[e, i, j]
        if len(made) == 1:
            _finish_one(made[0], ts[0], e, squared, wide[0], log, resolve, buffers[-1], tile)
        else:
            _finish_sum(made, ts, e, squared, wide, buffers, tile)
        if same and j.stop >= m:
            mirror_(out[e], i)
    picked = torch.empty(0, dtype=torch.int64, device=device) if search is None else search.result(device)
    return result, picked


def may_overflow(a: Augmented) -> bool:
    """Whether t^2 may leave the range of the type on negative curvature; |t| is at most F + 2 products."""
    if not any(s < 0 for s in a.signs) or not a.a.numel() or not a.b.numel():
        return False
    return arcs.overflows(float(a.a.abs().amax()) * float(a.b.abs().amax()) * a.a.shape[-1], a.a.dtype)


def all_alike(made: Sequence[Augmented]) -> bool:
    """Whether all batch entries have curvatures of one sign, so that they can share a tile."""
    return all(s == a.signs[0] for a in made for s in a.signs)


def runs(made: Sequence[Augmented]) -> list[slice]:
    """Batch entries that are worked at once: all, or one at a time where curvatures differ in sign."""
    entries = len(made[0].signs)
    return [slice(0, entries)] if all_alike(made) else [slice(e, e + 1) for e in range(entries)]


def _finish_one(
    a: Augmented,
    t: Tensor,
    e: slice,
    squared: bool,
    wide: bool,
    log: bool,
    resolved: bool,
    scratch: Tensor,
    tile: Tensor,
) -> None:
    """The tile's distances, from t to the result. Unresolved pairs are not clamped: they are replaced."""
    sign = a.signs[e.start]
    if not resolved:
        arcs.clamp_(t, sign)
    m = tile.shape[-1]
    if sign == 0:
        tile.copy_(t[..., :m]) if squared else torch.sqrt(t[..., :m], out=tile)
        return
    d = arcs.arc_(t, sign, scratch[: t.numel()].view(t.shape), wide, log)[..., :m]
    factor = a.factor[e]
    if squared:
        torch.mul(d.mul_(factor), d, out=tile)
    else:
        torch.mul(d, factor, out=tile)


def _finish_sum(
    made: Sequence[Augmented],
    ts: Sequence[Tensor],
    e: slice,
    squared: bool,
    wide: Sequence[bool],
    buffers: Tensor,
    tile: Tensor,
) -> None:
    """The tile's sum over the parts."""
    total, scratch = (b[: ts[0].numel()].view(ts[0].shape) for b in buffers[-2:])
    total.zero_()
    for a, t, w in zip(made, ts, wide, strict=True):
        d = arcs.arc_(arcs.clamp_(t, a.signs[e.start]), a.signs[e.start], scratch, w).mul_(a.factor[e])
        total.addcmul_(d, d)
    m = tile.shape[-1]
    tile.copy_(total[..., :m]) if squared else torch.sqrt(total[..., :m], out=tile)


def sqdist_backward(grad: Tensor, parts: Sequence[ChordPair], squared: bool, curvature: bool) -> list[Tensor]:
    """Gradients of the packed tensors; that of kappa is 0 unless ``curvature`` asks for it."""
    batch, dtype = batch_of(parts), dtype_of(parts)
    grad = flat(grad, batch, 2)
    made = [without_far(augment(p, batch, dtype)) for p in parts]
    wide = [may_overflow(a) for a in made]
    da, db = [torch.zeros_like(a.a) for a in made], [torch.zeros_like(a.b) for a in made]
    dk = [torch.zeros(batch.numel(), dtype=torch.float64, device=grad.device) for _ in made]
    n, m = grad.shape[-2:]
    width = group_width(m)
    size = max(tile_size(grad.device), width)
    buffers = torch.empty(3, min(size, max(1, grad.numel())), dtype=dtype, device=grad.device)
    single = len(made) == 1
    for e, i, j in tiles(batch.numel(), n, m, size, width, all_alike(made)):
        upper = grad[e, i, j]
        if not single:
            upper = upper.to(dtype) if squared else _through_root(made, wide, upper, e, i, j, buffers)
        for k, a in enumerate(made):
            t = tile_product(a.a[e, i], a.b[e, j], buffers[0])
            sign, square = a.signs[e.start], squared or not single
            scratch = buffers[1, : t.numel()].view(t.shape)
            factor = a.factor[e] ** 2 if square else a.factor[e]
            if curvature:
                change = arcs.masked_(arcs.curvature_slope(t, sign, square) * upper, t, sign)
                dk[k][e] += change.sum((-1, -2)).to(torch.float64)
            g = arcs.slope(t, sign, square, scratch, wide[k]).mul_(upper)
            arcs.masked_(g, t, sign)
            if sign:
                g.mul_(factor)
            _accumulate(da[k][e, i], g, a.b[e, j])
            _accumulate(db[k][e, j], g.mT, a.a[e, i])
    grads = []
    for part, a_sum, b_sum, k_sum in zip(parts, da, db, dk, strict=True):
        grads += per_point(part, batch, a_sum, b_sum, k_sum, squared or not single, curvature)
    return grads


def _through_root(made, wide, upper: Tensor, e: slice, i: slice, j: slice, buffers: Tensor) -> Tensor:
    """dL/d(d^2) of a product from dL/dd: the squares of all parts are summed first."""
    total = torch.zeros_like(upper, dtype=buffers.dtype)
    for a, w in zip(made, wide, strict=True):
        t = arcs.clamp_(tile_product(a.a[e, i], a.b[e, j], buffers[0]), a.signs[e.start])
        d = arcs.arc_(t, a.signs[e.start], buffers[1, : t.numel()].view(t.shape), w).mul_(a.factor[e])
        total.addcmul_(d, d)
    out = total.rsqrt().mul_(0.5).mul_(upper)
    return arcs.masked_(out, total, 0)


def _accumulate(into: Tensor, g: Tensor, features: Tensor) -> None:
    if g.shape[0] == 1:
        into[0].addmm_(g[0], features[0])
    else:
        into.baddbmm_(g, features)


def per_point(
    part: ChordPair, batch: torch.Size, da: Tensor, db: Tensor, dk: Tensor, square: bool, curvature: bool
) -> list[Tensor]:
    """From the gradients of augmented features to those of features, curvature and weights."""
    kappa = batch_scalars(part.kappa, batch).to(da.device)
    curved = kappa != 0
    c = torch.where(curved, kappa.abs() / 2, 1.0)[:, None]
    x, y = flat(part.x, batch, 2).to(torch.float64), flat(part.y, batch, 2).to(torch.float64)
    da, db = da.to(torch.float64), db.to(torch.float64)
    wx, wy = (None if w is None else flat(w, batch, 1).to(torch.float64) for w in (part.wx, part.wy))
    # with time coordinates norms enter the comparison only, not the distance
    (x1, x2), (y1, y2) = ((None, None) if part.time_dims else (d[..., -2], d[..., -1]) for d in (da, db))
    gx, gwx = query_gradient(x, wx, da[..., :-2].clone(), x1, x2, c, part.time_dims)
    gy, gwy = key_gradient(y, wy, db[..., :-2].clone(), y1, y2, part.time_dims)
    gk = torch.zeros_like(kappa)
    if curvature:
        power = torch.where(curved, kappa.abs(), 1.0)
        gk = dk / (power**2 if square else power**1.5)
        if part.time_dims:  # u = 2/kappa - 2 <x, y>_J
            gk = gk - 2 / kappa**2 * (c * da[..., x.shape[-1]]).sum(-1)
    gk = gk.to(part.kappa.device)
    found = ((gx, part.x), (gy, part.y), (gk, part.kappa), (gwx, part.wx), (gwy, part.wy))
    return [_fold(g, like, batch) for g, like in found if g is not None and like is not None]


def _fold(g: Tensor, like: Tensor, batch: torch.Size) -> Tensor:
    """g (B, ...) in the shape and type of ``like``, summed over what was broadcast."""
    return g.reshape((*batch, *g.shape[1:])).sum_to_size(like.shape).to(like.dtype)

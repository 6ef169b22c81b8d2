"""Distance matrices tile by tile: each tile stays in cache from the matrix product to the finished distance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere.kernels.blocked import arcs
from horosphere.kernels.blocked.augment import Augmented, augment, tile_product
from horosphere.kernels.blocked.tiles import tile_size, tiles
from horosphere.kernels.parts import Part, batch_of, dtype_of


def sqdist(parts: Sequence[Part], squared: bool, resolve: bool) -> tuple[Tensor, Tensor]:
    """Distances (..., N, M), or their squares, and the pairs that the product form does not resolve.

    Returns:
        the matrix, in the products' type;
        flat indices (P,) into it, ascending within a tile, where ``resolve``; else empty. Their entries hold nothing
        of use: the caller replaces them. The pairs are at least those of the reference's rule.
    """
    batch, dtype = batch_of(parts), dtype_of(parts)
    n, m = parts[0].x.shape[-2], parts[0].y.shape[-2]
    made = [augment(p, batch, dtype) for p in parts]
    device = parts[0].x.device
    result = torch.empty(*batch, n, m, dtype=dtype, device=device)
    out = result.view(batch.numel(), n, m)
    size = tile_size(device)
    buffers = torch.empty(3 if len(made) > 1 else 2, min(size, max(1, out.numel())), dtype=dtype, device=device)
    wide = [may_overflow(a) for a in made]
    found = []
    alike = all(s == a.signs[0] for a in made for s in a.signs)
    for e, i, j in tiles(*out.shape, size, alike):
        tile, doubtful = out[e, i, j], None
        for k, a in enumerate(made):
            t = tile_product(a.a[e, i], a.b[e, j], buffers[0])
            sign = a.signs[e.start]
            if resolve:
                rows = doubtful_rows(a, t, sign, e, i, j)
                doubtful = rows if doubtful is None else doubtful | rows
            if not resolve or len(made) > 1:
                arcs.clamp_(t, sign)
            _finish(a, t, sign, e, k, len(made), squared, wide[k], buffers, tile)
        if resolve and bool(doubtful.any()):
            found.append(unresolved(made, doubtful, wide, e, i, j, n, m))
    picked = torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=device)
    return result, picked


def may_overflow(a: Augmented) -> bool:
    """Whether t^2 may leave the range of the type on negative curvature; t <= 2 |a_i| |b_j|."""
    if not any(s < 0 for s in a.signs) or not a.a.numel() or not a.b.numel():
        return False
    return arcs.overflows(4 * float(a.a.abs().amax()) * float(a.b.abs().amax()) * a.a.shape[-1], a.a.dtype)


def _finish(
    a: Augmented, t: Tensor, sign: int, e: slice, k: int, parts: int, squared: bool, wide: bool, buffers: Tensor, tile: Tensor
) -> None:
    """The tile's distances written to the result, or added to the sum of squares while other parts follow."""
    scratch = buffers[1, : t.numel()].view(t.shape)
    if parts == 1 and sign == 0:
        tile.copy_(t) if squared else torch.sqrt(t, out=tile)
        return
    d = arcs.arc_(t, sign, scratch, wide)
    factor = a.factor[e]
    if parts == 1:
        if squared:
            torch.mul(d.mul_(factor), d, out=tile)
        else:
            torch.mul(d, factor, out=tile)
        return
    total = buffers[2, : t.numel()].view(t.shape)
    d.mul_(factor)
    if k == 0:
        torch.mul(d, d, out=total)
    elif k < parts - 1:
        total.addcmul_(d, d)
    else:
        total.addcmul_(d, d)
        tile.copy_(total) if squared else torch.sqrt(total, out=tile)


def doubtful_rows(a: Augmented, t: Tensor, sign: int, e: slice, i: slice, j: slice) -> Tensor:
    """(B', R) rows of the tile that may hold a pair that the product does not resolve: one reduction of the tile."""
    wy, wn = (v[e, j].amax(-1, keepdim=True) for v in (a.wy, a.wn))
    limit = a.p[e, i] * wy + a.q[e, i] * wn
    rows = ~(t.amin(-1) >= limit)  # NaN counts
    return rows | ~(t.amax(-1) <= 2 - limit) if sign > 0 else rows


def unresolved(
    made: Sequence[Augmented], doubtful: Tensor, wide: Sequence[bool], e: slice, i: slice, j: slice, n: int, m: int
) -> Tensor:
    """Flat indices of the unresolved pairs in the doubtful rows of a tile."""
    entries, rows = doubtful.nonzero(as_tuple=True)
    found = []
    for entry in entries.unique().tolist() if doubtful.shape[0] > 1 else (0,):
        chosen = rows[entries == entry] if doubtful.shape[0] > 1 else rows
        one = e.start + entry
        near = _unresolved_of_one(made, chosen + i.start, wide, one, j)
        at, column = near.nonzero(as_tuple=True)
        found.append((one * n + chosen[at] + i.start) * m + column + j.start)
    return torch.cat(found)


def _unresolved_of_one(
    made: Sequence[Augmented], rows: Tensor, wide: Sequence[bool], entry: int, j: slice
) -> Tensor:
    """(R, C) bool by the reference's rule: the sum of the parts' errors exceeds the tolerance, or one is near its antipode."""
    total = doubt = far = None
    for a, w in zip(made, wide, strict=True):
        b, sign = a.b[entry, j].mT, a.signs[entry]
        margin = a.near_a[entry, rows] @ b  # t less theta times the size of what was subtracted
        if sign > 0:
            antipodal = ~(a.far_a[entry, rows] @ b <= 2)
            far = antipodal if far is None else far | antipodal
        if len(made) == 1:
            near = ~(margin >= 0)
            return near if far is None else near | far
        t = arcs.clamp_(a.a[entry, rows] @ b, sign)
        limit = t - margin
        d2 = (arcs.arc_(t.clone(), sign, torch.empty_like(t), w) * a.factor[entry]) ** 2
        # slope d^2 / t; at t = 0 the limit itself, in units of d^2
        part = torch.where(t > 0, d2 / torch.where(t > 0, t, 1.0), 2 * a.factor[entry] ** 2 if sign else 1.0) * limit
        total, doubt = (d2, part) if total is None else (total + d2, doubt + part)
    near = ~(total >= doubt)
    return near if far is None else near | far

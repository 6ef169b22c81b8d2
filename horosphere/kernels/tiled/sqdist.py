"""Distance matrices tile by tile: each tile stays in cache from the matrix product to the finished distance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere.kernels.chord import arcs
from horosphere.kernels.chord.augment import Augmented, augment, tile_product
from horosphere.kernels.chord.parts import Part, batch_of, dtype_of
from horosphere.kernels.tiled.huge_pages import prefer_large
from horosphere.kernels.tiled.tiles import group_width, mirror_, tile_size, tiles
from horosphere.kernels.tiled.unresolved import Search


def sqdist(parts: Sequence[Part], squared: bool, resolve: bool, same: bool = False) -> tuple[Tensor, Tensor]:
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

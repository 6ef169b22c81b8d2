"""Launchers of the Triton distance kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from horosphere.kernels.chord.augment import augment, flat, without_far
from horosphere.kernels.chord.parts import Part, batch_of, dtype_of
from horosphere.kernels.tiled.sqdist import runs
from horosphere.kernels.tiled.sqdist_backward import per_point
from horosphere.kernels.triton import sqdist_kernels as kernels

# Rows and columns of a tile.
TILE = 64


def options_for(dtype: torch.dtype) -> dict:
    """Tile sizes, terms of the series, and that a multiplication and an addition may be one instruction."""
    wide = dtype == torch.float64
    tile = TILE // 2 if wide else TILE
    return {"R": tile, "C": tile, "TERMS": 14 if wide else 6, "num_warps": 8, "enable_fp_fusion": True}


def sqdist(parts: Sequence[Part], squared: bool, resolve: bool) -> tuple[Tensor, Tensor]:
    """As horosphere.kernels.tiled.sqdist.sqdist. Products hold one more matrix where ``resolve``."""
    batch, dtype, device = batch_of(parts), dtype_of(parts), parts[0].x.device
    n, m = parts[0].x.shape[-2], parts[0].y.shape[-2]
    several = len(parts) > 1
    result = (torch.zeros if several else torch.empty)(*batch, n, m, dtype=dtype, device=device)
    out = result.view(batch.numel(), n, m)
    doubt = torch.zeros_like(out) if several and resolve else out
    made = [augment(p, batch, dtype) for p in parts]
    options = options_for(dtype)
    if out.numel():
        for a in made:
            left, right = a.a.mT.contiguous(), a.plain_b.mT.contiguous()
            p, q, norms, factor = (t.contiguous() for t in (a.p, a.q, a.n, a.factor.reshape(-1)))
            wy = norms if a.wy is None else a.wy.contiguous()
            for e in runs(made):
                grid = ((e.stop - e.start) * triton.cdiv(n, options["R"]) * triton.cdiv(m, options["C"]),)
                kernels.forward[grid](
                    *(t[e] for t in (left, right, wy, norms, p, q, factor, out, doubt)),
                    n,
                    m,
                    left.shape[1],
                    SIGN=a.signs[e.start],
                    SQUARED=squared,
                    WEIGHTED=a.wy is not None,
                    RESOLVE=resolve,
                    ADD=several,
                    **options,
                )
    picked = torch.empty(0, dtype=torch.int64, device=device)
    if resolve:
        near = ~(out >= doubt) if several else out < 0
        picked = near.view(-1).nonzero().squeeze(-1)
    if several and not squared:
        result.sqrt_()
    return result, picked


def sqdist_backward(grad: Tensor, parts: Sequence[Part], squared: bool, curvature: bool) -> list[Tensor]:
    """As horosphere.kernels.tiled.sqdist_backward.sqdist_backward. Products of distances hold two more matrices."""
    batch, dtype = batch_of(parts), dtype_of(parts)
    n, m = grad.shape[-2:]
    made = [without_far(augment(p, batch, dtype)) for p in parts]
    upper = flat(grad, batch, 2).to(dtype)
    if len(parts) > 1 and not squared:
        total = flat(sqdist(parts, squared=False, resolve=False)[0], batch, 2)
        upper = torch.where(total > 0, upper * 0.5 / torch.where(total > 0, total, 1.0), 0.0)
    upper = upper.contiguous()
    square = squared or len(parts) > 1
    options = options_for(dtype)
    grads = []
    for part, a in zip(parts, made, strict=True):
        left, right = a.a.mT.contiguous(), a.b.mT.contiguous()
        da, db = torch.zeros_like(left), torch.zeros_like(right)
        dk = torch.zeros(left.shape[0], n, dtype=dtype, device=grad.device)
        factor = (a.factor**2 if square else a.factor).reshape(-1).contiguous()
        sides = (left, right, da, n, m, m, 1), (right, left, db, m, n, 1, m)
        for e in runs(made) if upper.numel() else ():
            for own, other, into, rows, columns, row_stride, column_stride in sides:
                kernels.backward[((e.stop - e.start) * triton.cdiv(rows, options["R"]),)](
                    *(t[e] for t in (own, other, upper, factor, into, dk)),
                    rows,
                    columns,
                    left.shape[1],
                    row_stride,
                    column_stride,
                    SIGN=a.signs[e.start],
                    SQUARED=square,
                    CURVATURE=curvature and own is left,
                    **options,
                )
        sums = dk.sum(-1, dtype=torch.float64)
        grads += per_point(part, batch, da.mT, db.mT, sums, square, curvature)
    return grads

"""Launchers of the Triton kernels of per-token metrics."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from horosphere.kernels.blocked.metric_tiles import MetricTiles, Side
from horosphere.kernels.fibres import Fibres
from horosphere.kernels.triton import metric_kernels as kernels

# Rows and columns of a tile.
TILE = 32


def options_for(dtype: torch.dtype) -> dict:
    """Tile sizes and settings."""
    return {"R": TILE, "C": TILE, "num_warps": 4 if dtype == torch.float32 else 8, "enable_fp_fusion": True}


def features(made: MetricTiles) -> tuple[list[Tensor], list[Tensor]]:
    """(scales, features, columns, points) of queries and of keys as the kernels read them, transposed."""
    found = []
    for features, side, points in ((made.a, made.query, made.x), (made.b, made.key, made.y)):
        if side is None:  # no metric: nothing to read
            side = Side(points.new_zeros(0, *points.shape), points.new_zeros(points.shape[:-1]))
        found.append([t.contiguous() for t in (side.scales, features.mT, side.columns.mT, points.mT)])
    return found[0], found[1]


def sqdist(f: Fibres, dtype: torch.dtype, tolerance: float | None) -> Tensor:
    """As horosphere.kernels.blocked.metric_sqdist.sqdist. Holds two more matrices where there is a tolerance."""
    batch, n, m = f.batch, f.q.shape[-2], f.k.shape[-2]
    made = MetricTiles(f, batch, dtype, tolerance)
    out = torch.empty(batch.numel(), n, m, dtype=dtype, device=f.q.device)
    if out.numel():
        (s, a, u, x), (t, b, v, y) = features(made)
        options = options_for(dtype)
        grid = (out.shape[0] * triton.cdiv(n, options["R"]) * triton.cdiv(m, options["C"]),)
        kernels.forward[grid](
            a, b, s, t, u, x, v, y, out, n, m, a.shape[1], out.shape[0], u.shape[0], v.shape[0],
            OWN=made.query is not None, OTHER=made.key is not None, **options,
        )  # fmt: skip
        if tolerance is not None:
            made.rework_(out, slice(0, out.shape[0]), slice(0, n), slice(0, m), None)
    return out.view(*batch, n, m).to(f.dtype)


def sqdist_backward(grad: Tensor, f: Fibres, dtype: torch.dtype) -> list[Tensor]:
    """As horosphere.kernels.blocked.metric_sqdist.sqdist_backward."""
    n, m = f.q.shape[-2], f.k.shape[-2]
    made = MetricTiles(f, f.batch, dtype, None)
    made.prepare_gradients()
    upper = grad.reshape(f.batch.numel(), n, m).to(dtype).contiguous()
    if upper.numel():
        sides = features(made)
        options = options_for(dtype)
        for swapped in (False, True):
            (s, a, u, x), (t, b, v, y) = sides[::-1] if swapped else sides
            rows, columns = (m, n) if swapped else (n, m)
            da, ds, du, dx = (torch.zeros_like(into) for into in (a, s, u, x))
            own, other = (made.key, made.query) if swapped else (made.query, made.key)
            kernels.backward[(upper.shape[0] * triton.cdiv(rows, options["R"]),)](
                a, b, s, t, u, x, v, y, upper, da, ds, du, dx, rows, columns, a.shape[1], upper.shape[0], u.shape[0],
                v.shape[0], *((1, m) if swapped else (m, 1)), OWN=own is not None, OTHER=other is not None, **options,
            )  # fmt: skip
            made.take_gradients(swapped, da.mT, None if own is None else Side(du.mT, ds), dx.mT)
    return made.gradients()

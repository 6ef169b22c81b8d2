"""Launchers of the Triton kernels of per-token metrics."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from horosphere.kernels.low_rank.fibres import Fibres
from horosphere.kernels.tiled.metric_tiles import MetricTiles, Side
from horosphere.kernels.triton import metric_kernels as kernels
from horosphere.kernels.triton.attention import backend, precision_of

# Rows and columns of a tile.
TILE = 32
# Features that a product with sums takes at a time.
SLAB = 32


def options_for(dtype: torch.dtype) -> dict:
    """Tile sizes and settings."""
    return {"R": TILE, "C": TILE, "num_warps": 4 if dtype == torch.float32 else 8, "enable_fp_fusion": True}


def sums_for(size: int, dtype: torch.dtype, on: str) -> dict:
    """How sums over the columns of a tile are worked, of ``size`` features."""
    return {"F": max(16, min(triton.next_power_of_2(size), SLAB)), "PRECISION": precision_of(dtype, on)}


class Tokens:
    """Points and metrics of both sides as the kernels read them, transposed, and what becomes of their gradients."""

    def __init__(self, made: MetricTiles):
        self.made = made
        self.sides = []
        for features, side, points in ((made.a, made.query, made.x), (made.b, made.key, made.y)):
            if side is None:  # no metric: nothing to read
                side = Side(points.new_zeros(0, *points.shape), points.new_zeros(points.shape[:-1]))
            self.sides.append([t.contiguous() for t in (features.mT, side.scales, side.columns.mT, points.mT)])
        self.entries, self.features, self.n = self.sides[0][0].shape
        self.m = self.sides[1][0].shape[-1]

    def lengths(self, swapped: bool) -> tuple[int, int]:
        """Rows and columns; here and below ``swapped``: the keys own the rows."""
        return (self.m, self.n) if swapped else (self.n, self.m)

    def arguments(self, swapped: bool, e: slice) -> list[Tensor]:
        """What the kernels read of some batch entries."""
        (a, s, u, x), (b, t, v, y) = self.sides[::-1] if swapped else self.sides
        return [a[e], b[e], s[e], t[e], u[:, e], x[e], v[:, e], y[e]]

    def sizes(self, swapped: bool) -> tuple[int, int, int, int]:
        """Features, all batch entries, ranks of the rows' and of the columns' metrics."""
        own, other = (side[2].shape[0] for side in (self.sides[::-1] if swapped else self.sides))
        return self.features, self.entries, own, other

    def constants(self, swapped: bool) -> dict:
        """Whose metrics measure."""
        own, other = (side is not None for side in (self.made.query, self.made.key))
        return {"OWN": other, "OTHER": own} if swapped else {"OWN": own, "OTHER": other}

    def zeros(self, swapped: bool) -> list[Tensor]:
        """For the gradients of features, scales, columns and points of the rows."""
        return [torch.zeros_like(t) for t in self.sides[swapped]]

    def take(self, swapped: bool, da: Tensor, dscales: Tensor, dcolumns: Tensor, dpoints: Tensor) -> None:
        """Those gradients, for :meth:`MetricTiles.gradients`."""
        side = Side(dcolumns.mT, dscales) if self.constants(swapped)["OWN"] else None
        self.made.take_gradients(swapped, da.mT, side, dpoints.mT)


def sqdist(f: Fibres, dtype: torch.dtype, tolerance: float | None) -> Tensor:
    """As horosphere.kernels.tiled.metric_sqdist.sqdist. Holds two more matrices where there is a tolerance."""
    batch, n, m = f.batch, f.q.shape[-2], f.k.shape[-2]
    made = MetricTiles(f, batch, dtype, tolerance)
    out = torch.empty(batch.numel(), n, m, dtype=dtype, device=f.q.device)
    if out.numel():
        tokens, everything = Tokens(made), slice(0, out.shape[0])
        options = options_for(dtype)
        grid = (out.shape[0] * triton.cdiv(n, options["R"]) * triton.cdiv(m, options["C"]),)
        kernels.forward[grid](
            *tokens.arguments(False, everything), out, n, m, *tokens.sizes(False), **tokens.constants(False), **options
        )
        if tolerance is not None:
            made.rework_(out, everything, slice(0, n), slice(0, m), None)
    return out.view(*batch, n, m).to(f.dtype)


def sqdist_backward(grad: Tensor, f: Fibres, dtype: torch.dtype) -> list[Tensor]:
    """As horosphere.kernels.tiled.metric_sqdist.sqdist_backward."""
    n, m = f.q.shape[-2], f.k.shape[-2]
    tokens = Tokens(MetricTiles(f, f.batch, dtype, None))
    upper = grad.reshape(f.batch.numel(), n, m).to(dtype).contiguous()
    options = options_for(dtype) | sums_for(f.q.shape[-1], dtype, backend())
    for swapped in (False, True):
        into, (rows, columns) = tokens.zeros(swapped), tokens.lengths(swapped)
        if upper.numel():
            kernels.backward[(upper.shape[0] * triton.cdiv(rows, options["R"]),)](
                *tokens.arguments(swapped, slice(0, upper.shape[0])), upper, *into, rows, columns,
                *tokens.sizes(swapped), *((1, m) if swapped else (m, 1)), **tokens.constants(swapped), **options,
            )  # fmt: skip
        tokens.take(swapped, *into)
    return tokens.made.gradients()

"""Per-token metrics as a geometry of the streaming loops, see horosphere.kernels.tiled.scores."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.low_rank.fibres import Fibres
from horosphere.kernels.tiled.metric_tiles import MetricTiles, Tile
from horosphere.kernels.tiled.products import Buffers
from horosphere.kernels.tiled.scores import Group, Scores
from horosphere.kernels.tiled.workspace import Lent


class MetricScores(Scores):
    """d^2 + eps under per-token metrics.

    Args:
        f: points and metrics.
        batch: the batch dimensions of the result.
        dtype: the type of tiles.
        resolve: work unresolved pairs from differences.
    """

    tensors = 2

    def __init__(self, f: Fibres, batch: torch.Size, dtype: torch.dtype, *, resolve: bool):
        self.batch, self.dtype, self.device = batch, dtype, f.q.device
        self.n, self.m = f.q.shape[-2], f.k.shape[-2]
        self.lent = Lent(dtype, self.device)
        self.signs = [0] * batch.numel()
        self.tiles = MetricTiles(f, batch, dtype, _numerics.weight_tolerance(dtype) if resolve else None)
        self.scale = torch.zeros(batch.numel(), dtype=torch.float64, device=self.device)

    def group(self, e: slice, shift: Tensor) -> MetricGroup:
        return MetricGroup(self, e, shift)

    def prepare_gradients(self) -> None:
        self.tiles.prepare_gradients()

    def gradients(self) -> list[Tensor]:
        """Of the fibres' tensors, in their order."""
        self.lent.back()
        return self.tiles.gradients(self.scale)


class MetricGroup(Group):
    """Some batch entries."""

    def __init__(self, scores: MetricScores, e: slice, shift: Tensor):
        self.scores, self.tiles, self.e = scores, scores.tiles, e
        self.shift = shift.to(scores.dtype)[:, None, None]
        self.last: Tile | None = None

    def extent(self) -> float:
        return self.tiles.extent()

    def tile(self, i: slice, j: slice, buffers: Buffers, keep: bool) -> Tensor:
        self.buffers = buffers
        self.last = self.tiles.tile(self.e, i, j, self.shift, buffers[0], buffers[1])
        return self.last.z

    def pull(self, i: slice, j: slice, g: Tensor) -> None:
        self.tiles.add_gradient(g, self.last, self.e, i, j, self.buffers[0], self.buffers[1])

    def rows_done(self, i: slice, scale: Tensor) -> None:
        """Sums are kept for all rows; everything is scaled at the end."""

    def finish(self, scale: Tensor) -> None:
        self.scores.scale[self.e] = scale

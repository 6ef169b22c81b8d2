"""Distance matrices under per-token metrics, and these as scores of the streaming loops, by the same tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.low_rank.pair import MetricPair
from horosphere.kernels.tiled.metric_tiles import MetricTiles, Tile
from horosphere.kernels.tiled.products import Buffers
from horosphere.kernels.tiled.scores import Group, Scores
from horosphere.kernels.tiled.tiles import tile_size, tiles
from horosphere.kernels.tiled.workspace import Workspace, prefer_large


class MetricScores(Scores):
    """d^2 + eps under per-token metrics.

    Args:
        f: points and metrics.
        batch: the batch dimensions of the result.
        dtype: the type of tiles.
        resolve: work unresolved pairs from differences.
    """

    tensors = 2

    def __init__(self, f: MetricPair, batch: torch.Size, dtype: torch.dtype, *, resolve: bool):
        self.batch, self.dtype, self.device = batch, dtype, f.q.device
        self.n, self.m = f.q.shape[-2], f.k.shape[-2]
        self.workspace = Workspace(dtype, self.device)
        self.signs = [0] * batch.numel()
        self.tiles = MetricTiles(f, batch, dtype, _numerics.weight_tolerance(dtype) if resolve else None)
        self.scale = torch.zeros(batch.numel(), dtype=torch.float64, device=self.device)

    def group(self, e: slice, shift: Tensor) -> MetricGroup:
        return MetricGroup(self, e, shift)

    def prepare_gradients(self) -> None:
        self.tiles.prepare_gradients()

    def gradients(self) -> list[Tensor]:
        """Of the pair's tensors, in their order."""
        self.workspace.back()
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

    def backward(self, i: slice, j: slice, g: Tensor) -> None:
        self.tiles.add_gradient(g, self.last, self.e, i, j, self.buffers[0], self.buffers[1])

    def rows_done(self, i: slice, scale: Tensor) -> None:
        """Sums are kept for all rows; everything is scaled at the end."""

    def finish(self, scale: Tensor) -> None:
        self.scores.scale[self.e] = scale


def sqdist(f: MetricPair, dtype: torch.dtype, tolerance: float | None) -> Tensor:
    """(..., N, M) squared distances, worked in ``dtype`` and stored in the type of the pair."""
    batch, n, m = f.batch, f.q.shape[-2], f.k.shape[-2]
    result = prefer_large(torch.empty(*batch, n, m, dtype=f.dtype, device=f.q.device))
    out = result.view(batch.numel(), n, m)
    made = MetricTiles(f, batch, dtype, tolerance)
    size = tile_size(out.device)
    buffers = torch.empty(2, min(size, max(1, out.numel())), dtype=dtype, device=out.device)
    for e, i, j in tiles(batch.numel(), n, m, size, 1, True):
        out[e, i, j] = made.tile(e, i, j, None, *buffers).z
    return result


def sqdist_backward(grad: Tensor, f: MetricPair, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of the pair's tensors.

    From the product form: where the forward pass used differences it runs in float64, whose gradient is q_i - k_j to
    2^-53 of the points.
    """
    n, m = f.q.shape[-2], f.k.shape[-2]
    entries = f.batch.numel()
    grad = grad.reshape(entries, n, m)
    made = MetricTiles(f, f.batch, dtype, None)
    made.prepare_gradients()
    size = tile_size(grad.device)
    buffers = torch.empty(3, min(size, max(1, grad.numel())), dtype=dtype, device=grad.device)
    for e, i, j in tiles(entries, n, m, size, 1, True):
        upper = grad[e, i, j]
        g = buffers[2, : upper.numel()].view(upper.shape)
        g.copy_(upper)
        made.add_gradient(g, None, e, i, j, *buffers[:2])
    return made.gradients()

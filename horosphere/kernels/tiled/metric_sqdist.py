"""Distance matrices under per-token metrics, tile by tile, and their gradients by recomputing the tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere.kernels.low_rank.fibres import Fibres
from horosphere.kernels.tiled.huge_pages import prefer_large
from horosphere.kernels.tiled.metric_tiles import MetricTiles
from horosphere.kernels.tiled.tiles import tile_size, tiles


def sqdist(f: Fibres, dtype: torch.dtype, tolerance: float | None) -> Tensor:
    """(..., N, M) squared distances, worked in ``dtype`` and stored in the type of the fibres."""
    batch, n, m = f.batch, f.q.shape[-2], f.k.shape[-2]
    result = prefer_large(torch.empty(*batch, n, m, dtype=f.dtype, device=f.q.device))
    out = result.view(batch.numel(), n, m)
    made = MetricTiles(f, batch, dtype, tolerance)
    size = tile_size(out.device)
    buffers = torch.empty(2, min(size, max(1, out.numel())), dtype=dtype, device=out.device)
    for e, i, j in tiles(batch.numel(), n, m, size, 1, True):
        out[e, i, j] = made.tile(e, i, j, None, *buffers).z
    return result


def sqdist_backward(grad: Tensor, f: Fibres, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of the fibres' tensors.

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

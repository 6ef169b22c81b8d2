"""The tokens of all replicas, the same on each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gathered"]


def gathered(rows: Tensor, all_gather: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Rows (L, ...) of every replica, one replica's behind the other's; L may differ.

    ``all_gather`` does it where it is given; otherwise torch.distributed where a process group is initialised;
    otherwise there is one replica.
    """
    if all_gather is not None:
        return all_gather(rows)
    if not (dist.is_available() and dist.is_initialized()):
        return rows
    world = dist.get_world_size()
    length = torch.tensor([len(rows)], device=rows.device)
    lengths = [torch.zeros_like(length) for _ in range(world)]
    dist.all_gather(lengths, length)
    sizes = [int(n) for n in lengths]
    padded = torch.cat((rows, rows.new_zeros(max(sizes) - len(rows), *rows.shape[1:]))).contiguous()
    pieces = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(pieces, padded)
    return torch.cat([piece[:n] for piece, n in zip(pieces, sizes, strict=True)])

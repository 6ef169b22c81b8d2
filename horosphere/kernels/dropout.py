"""Which weights dropout keeps, as a function of seed and place alone: every form of attention, and its backward pass,
finds the same mask tile by tile without storing it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# murmur3's finaliser; its multipliers, and two odd ones that spread rows and columns, as signed 32-bit numbers.
_M1, _M2 = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
_ROW, _COLUMN = 0x9E3779B1 - 2**32, 0x27D4EB2F


def _mixed(x: Tensor) -> Tensor:
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _M1
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * _M2
    return x ^ ((x >> 16) & 0xFFFF)


def row_keys(seed: Tensor, entries: int, rows: int) -> Tensor:
    """(B, N) int32, one of every row of a batch of matrices; seed () int64."""
    low, high = (seed & 0x7FFFFFFF).to(torch.int32), (seed >> 31).to(torch.int32)
    place = torch.arange(entries * rows, dtype=torch.int32, device=seed.device).view(entries, rows)
    return _mixed(_mixed(place * _ROW + low) + high)


def kept(keys: Tensor, start: int, stop: int, p: float) -> Tensor:
    """(..., stop - start) bool: the columns from start to stop that rows with the given keys keep."""
    columns = torch.arange(start, stop, dtype=torch.int32, device=keys.device) * _COLUMN
    return _mixed(keys.unsqueeze(-1) ^ _mixed(columns)) >= round(p * 2**32) - 2**31


def keep_mask(seed: Tensor, shape: torch.Size, p: float) -> Tensor:
    """The whole mask (..., N, M) of a seed () int64; an entry is kept with probability 1 - p."""
    *batch, n, m = shape
    entries = torch.Size(batch).numel()
    return kept(row_keys(seed, entries, n), 0, m, p).view(shape)

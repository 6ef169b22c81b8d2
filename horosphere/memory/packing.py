"""Small numbers of a few bits each, laid end to end in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

__all__ = ["BitLayout"]


class BitLayout:
    """Where each of a row's numbers lies in its bytes: number i takes ``widths[i]`` bits, the lowest first.

    Args:
        widths: bits of each number, 1 to 16.
    """

    def __init__(self, widths: Sequence[int]):
        bits = torch.tensor(widths, dtype=torch.int64, device="cpu")
        starts = bits.cumsum(0) - bits
        self.nbytes = (int(bits.sum()) + 7) // 8
        self.shifts = (starts % 8).to(torch.int32)
        self.masks = ((1 << bits) - 1).to(torch.int32)
        # A number of up to 16 bits reaches over up to three bytes; past the end of the row the last one is read
        # again, and the mask leaves nothing of it.
        reach = int((self.shifts + bits + 7).max()) // 8
        self.bytes = [(starts // 8 + k).clamp(max=self.nbytes - 1) for k in range(reach)]

    def pack(self, numbers: Tensor) -> Tensor:
        """(..., len(widths)) whole numbers, each in the range of its width, to (..., nbytes) of uint8."""
        device = numbers.device
        words = numbers.to(torch.int32) << self.shifts.to(device)
        out = torch.zeros(*numbers.shape[:-1], self.nbytes, dtype=torch.int32, device=device)
        for k, at in enumerate(self.bytes):  # every bit has one owner: adding is the same as setting
            out.index_add_(-1, at.to(device), (words >> (8 * k)) & 255)
        return out.to(torch.uint8)

    def unpack(self, packed: Tensor) -> Tensor:
        """(..., nbytes) of uint8 to (..., len(widths)) of int32."""
        device = packed.device
        parts = (packed.index_select(-1, at.to(device)).to(torch.int32) << (8 * k) for k, at in enumerate(self.bytes))
        words = reduce(torch.bitwise_or, parts)
        return (words >> self.shifts.to(device)) & self.masks.to(device)

"""Coded rows in bytes, which more rows can follow."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Packed"]


class Packed:
    """Rows of keys or values as bytes, with what their code needs to read them.

    Room grows by an eighth at a time, so that n rows appended one by one are copied O(n) times in all.

    Attributes:
        data: (..., N, bytes a row) uint8.
        kind: "keys" or "values".
        dtype: the type that the numbers came in and are decoded to.
        low, high: (..., 1, 1) float32, range of the radii; None where the code has none.
        signature: settings of the code that wrote it.
    """

    def __init__(
        self,
        data: Tensor,
        kind: str,
        dim: int,
        dtype: torch.dtype,
        signature: tuple,
        low: Tensor | None,
        high: Tensor | None,
    ):
        self._room, self._rows, self._dim = data, data.shape[-2], dim
        self.kind, self.dtype, self.signature = kind, dtype, signature
        self.low, self.high = low, high

    @property
    def data(self) -> Tensor:
        return self._room[..., : self._rows, :]

    @property
    def radii(self) -> tuple[Tensor, Tensor]:
        """The range (low, high); ValueError where the code has none."""
        if self.low is None or self.high is None:
            raise ValueError(f"{self!r} has no range of radii")
        return self.low, self.high

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, D) of the numbers that were coded."""
        return (*self._room.shape[:-2], self._rows, self._dim)

    @property
    def device(self) -> torch.device:
        return self._room.device

    @property
    def nbytes(self) -> int:
        """Bytes of the coded rows and their range; room kept for later rows is in :attr:`allocated`."""
        return self.data.numel() + self._range_bytes()

    @property
    def allocated(self) -> int:
        """Bytes held, room for later rows included."""
        return self._room.numel() + self._range_bytes()

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"Packed({self.kind}, shape={self.shape}, {self.dtype}, {self.nbytes} bytes)"

    def extend_(self, data: Tensor) -> None:
        """Put coded rows (..., M, bytes a row) behind these."""
        rows = self._rows + data.shape[-2]
        if rows > self._room.shape[-2]:
            room = self._room.new_empty(*self._room.shape[:-2], max(rows, self._rows + self._rows // 8), data.shape[-1])
            room[..., : self._rows, :] = self.data
            self._room = room
        self._room[..., self._rows : rows, :] = data
        self._rows = rows

    def select(self, index: Tensor) -> Packed:
        """The rows of the batch entries ``index`` of the first dimension, copied (beams that are kept)."""
        low, high = (None if t is None else t.index_select(0, index) for t in (self.low, self.high))
        data = self.data.index_select(0, index)
        return Packed(data, self.kind, self._dim, self.dtype, self.signature, low, high)

    def _range_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.low, self.high) if t is not None)

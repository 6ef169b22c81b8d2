"""Batch entries of broadcast tensors, some at a time, without making the broadcast."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from horosphere.kernels.chord.pair import ChordPair

# Numbers up to which a tensor that is no plain stack of its entries is copied as a whole.
SMALL = 2**18


class Entries:
    """t (..., its last ``own`` dimensions) as the B entries of ``batch``, to which its batch dimensions broadcast."""

    def __init__(self, t: Tensor, batch: torch.Size, own: int):
        self.t, self.own = t, own
        shape, inner = t.shape[: t.dim() - own], t.shape[t.dim() - own :]
        self.shape = (*[1] * (len(batch) - len(shape)), *shape)
        self.batch = batch
        self.whole: Tensor | None = None
        self.alike = all(s == 1 for s in self.shape)
        if self.alike:
            self.whole = t.reshape(1, *inner)
        elif self.shape == tuple(batch) and (t.is_contiguous() or batch.numel() * inner.numel() <= SMALL):
            self.whole = t.reshape(batch.numel(), *inner)
        elif batch.numel() * inner.numel() <= SMALL:
            self.whole = t.expand(*batch, *inner).reshape(batch.numel(), *inner)
        self.own_memory = t.is_contiguous() and self.shape == tuple(batch)
        self.view = t.view(*self.shape, *inner) if len(self.shape) else t

    def place(self, entry: int) -> tuple[int, ...]:
        """Index of an entry into the tensor's own batch dimensions, of which it has as many as the batch."""
        found = []
        for size, own in zip(reversed(self.batch), reversed(self.shape), strict=True):
            found.append(entry % size if own > 1 else 0)
            entry //= size
        return tuple(reversed(found))

    def __getitem__(self, e: slice) -> Tensor:
        """(E or 1, ...): the entries of a slice, a view where there is one."""
        if self.whole is not None:
            return self.whole if self.alike else self.whole[e]
        found = [self.view[self.place(k)] for k in range(e.start, e.stop)]
        return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)

    def zeros(self, dtype: torch.dtype) -> Entries:
        """Of the same shape, each in one piece."""
        return Entries(torch.zeros(self.t.shape, dtype=dtype, device=self.t.device), self.batch, self.own)

    def memory(self, e: slice) -> Tensor | None:
        """(E, ...): the entries of a slice in their own memory; None where they share it."""
        return self.whole[e] if self.whole is not None and self.own_memory else None

    def block(self, e: slice, i: slice, j: slice) -> Tensor:
        """(E or 1, R or 1, C or 1): of matrices that may be broadcast themselves, the part of rows i and columns j."""
        rows = i if self.view.shape[-2] > 1 else slice(None)
        columns = j if self.view.shape[-1] > 1 else slice(None)
        if self.whole is not None:
            return self.whole[slice(None) if self.alike else e, rows, columns]
        return torch.stack([self.view[self.place(k)][rows, columns] for k in range(e.start, e.stop)])

    def add_(self, e: slice, g: Tensor, rows: slice) -> None:
        """Add g (E, R, ...) to these rows of the entries; what is broadcast is summed."""
        if self.whole is not None and self.alike:
            self.whole[0, rows] += g.sum(0)
        elif self.whole is not None and self.own_memory:
            self.whole[e, rows] += g
        else:
            for k, part in zip(range(e.start, e.stop), g.unbind(0), strict=True):
                self.view[self.place(k)][rows] += part


class PartEntries(NamedTuple):
    """The points and weights of a chord part."""

    x: Entries
    y: Entries
    wx: Entries | None
    wy: Entries | None

    @classmethod
    def of(cls, part: ChordPair, batch: torch.Size) -> PartEntries:
        wx, wy = (None if w is None else Entries(w, batch, 1) for w in (part.wx, part.wy))
        return cls(Entries(part.x, batch, 2), Entries(part.y, batch, 2), wx, wy)

    def zeros(self, dtype: torch.dtype) -> PartEntries:
        wx, wy = (None if w is None else w.zeros(dtype) for w in (self.wx, self.wy))
        return PartEntries(self.x.zeros(dtype), self.y.zeros(dtype), wx, wy)

    def part(self, e: slice, kappa: Tensor, time_dims: int) -> ChordPair:
        """Some entries, with their curvatures (E,)."""
        wx, wy = (None if w is None else w[e] for w in (self.wx, self.wy))
        return ChordPair(self.x[e], self.y[e], kappa, wx, wy, time_dims)

"""Products of a tile with features, added to kept sums."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere.kernels.tiled.workspace import Workspace


def append(t: Tensor, last: float | Tensor) -> Tensor:
    """t (..., F) with one more column."""
    out = t.new_empty(*t.shape[:-1], t.shape[-1] + 1)
    out[..., :-1], out[..., -1] = t, last
    return out


class Blocks:
    """Blocks of rows of t (E or 1, N, F), each made once: in a loop over tiles a view costs as much as a small sum.

    A batch of one is a matrix, whose product starts faster.
    """

    def __init__(self, t: Tensor, entries: int, transposed: bool = False):
        self.t = t[0] if entries == 1 else t.expand(entries, -1, -1)
        self.transposed = transposed
        self.made: dict[int, Tensor] = {}

    def __getitem__(self, at: slice) -> Tensor:
        found = self.made.get(at.start)
        if found is None:
            found = self.t[..., at, :]
            found = self.made[at.start] = found.mT if self.transposed else found
        return found


class Buffers:
    """Kept memory of tiles: ``buffers[k]`` flat, ``buffers.tile(k, e, r, c)`` as a tile (E, R, C) and as what products
    of :class:`Blocks` go into.
    """

    def __init__(self, workspace: Workspace, count: int, numbers: int):
        self.flat = workspace("tiles", count, numbers)
        self.views: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}

    def __getitem__(self, k: int) -> Tensor:
        return self.flat[k]

    def tile(self, k: int, e: int, r: int, c: int) -> tuple[Tensor, Tensor]:
        key = k, e, r, c
        found = self.views.get(key)
        if found is None:
            whole = self.flat[k, : e * r * c].view(e, r, c)
            found = self.views[key] = whole, whole[0] if e == 1 else whole
        return found


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, matrices or batches of them."""
    if a.dim() == 2:
        torch.mm(a, b, out=out)
    else:
        torch.bmm(a, b, out=out)


def add_product(into: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> None:
    """into = beta into + a b, matrices or batches of them; with beta 0 whatever is in it."""
    if a.dim() == 2:
        into.addmm_(a, b, beta=beta)
    else:
        into.baddbmm_(a, b, beta=beta)


def one(t: Tensor) -> Tensor:
    """A batch of one matrix as the matrix; others as they are."""
    return t[0] if t.shape[0] == 1 else t

r"""Augmented features of one chord part in the type of the tiles, for several batch entries at a time.

As in horosphere.kernels.chord.augment, t = <a_i, b_j> = |kappa| u / 2 (u on flat space), without its float64
intermediates: they would cost more than the tiles of a short sequence. What is one number a batch entry stays a number
of the host, since a tensor of eight numbers takes the time of one of eight thousand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.chord.augment import valid_weight
from horosphere.kernels.chord.pair import ChordPair

ROOT2 = math.sqrt(2.0)


class ChordFeatures:
    """The part with tensors (E or 1, ...) and kappa (E,), whose signs are ``sign``."""

    a: Tensor  # augmented features, once they were made by ``augment``
    b: Tensor

    def __init__(self, part: ChordPair, sign: int, work: torch.dtype):
        self.part, self.sign, self.work = part, sign, work
        kappas = part.kappa.tolist()
        self.c = [abs(k) / 2 if k else 1.0 for k in kappas]
        # d^2 is square phi^2
        self.square = [(4.0 if sign > 0 else 1.0) / (abs(k) or 1.0) for k in kappas]
        e = self.entries = len(kappas)
        self.nx, self.ny = (
            torch.linalg.vector_norm(p.to(work), dim=-1).square_().expand(e, -1) for p in (part.x, part.y)
        )
        self.wx, self.wy = (None if w is None else valid_weight(w.to(work)) for w in (part.wx, part.wy))
        c = self.nx.new_tensor(self.c[:1] if alike(self.c) else self.c)[:, None]
        self.scaled = (c if self.wx is None else c * self.wx).expand(e, self.nx.shape[1])
        if self.wy is None:
            self.n, self.w = self.ny, self.ny.new_ones(1, 1).expand(e, self.ny.shape[1])
        else:
            self.w, self.n = self.wy.expand(e, -1), self.ny * self.wy
        # a pair is unresolved where t + c eps is less than (p_i + q_i |f_j|^2) w_j = p_i w_j + q_i n_j
        self.theta = _numerics.weight_theta(part.x.shape[-1], work)
        self.q = (self.theta * (c if self.wx is None else self.scaled)).expand(e, self.nx.shape[1])
        self.p = self.q * self.nx
        self.maxima: dict[tuple[str, int], list[float]] = {}
        everything = slice(None)
        # bounds of t; NaN where there are points without distances
        self.largest = [2 * t / self.theta + bool(part.time_dims) for t in self.limits(everything, everything)]
        self.augmented = False

    def augment(self, a: Tensor, b: Tensor) -> None:
        """Make the augmented features in the memory given."""
        part, e, f = self.part, self.entries, self.part.x.shape[-1]
        x, y = (p.to(self.work).expand(e, -1, -1) for p in (part.x, part.y))
        torch.mul(x, (-2 * self.scaled).unsqueeze(-1), out=a[..., :f])
        if part.time_dims:
            a[..., : part.time_dims].neg_()
            a[..., f], a[..., f + 1] = float(self.sign), 0.0  # 2 c / kappa
        else:
            torch.mul(self.nx, self.scaled, out=a[..., f])
            a[..., f + 1] = self.scaled
        if self.wy is None:
            b[..., :f] = y
        else:
            torch.mul(y, self.wy.unsqueeze(-1), out=b[..., :f])
        b[..., f], b[..., f + 1] = self.w, self.n
        self.a, self.b, self.augmented = a, b, True

    def limits(self, i: slice, j: slice) -> list[float]:
        """(E,) bounds of p_i w_j + q_i n_j in a block."""
        bounds = (self._most(name, at) for name, at in (("p", i), ("q", i), ("n", j), ("w", j)))
        return [p * w + q * n for p, q, n, w in zip(*bounds, strict=True)]

    def _most(self, which: str, at: slice) -> list[float]:
        t = getattr(self, which)
        if t.stride(1) == 0:  # one number for all
            at = slice(0, 1)
        key = which, at.start
        if key not in self.maxima:
            block = t[:, at]
            self.maxima[key] = block.amax(-1).tolist() if block.numel() else [0.0] * block.shape[0]
        return self.maxima[key]

    def extent(self, s: slice) -> float:
        """A bound of d^2 of the entries of a slice."""
        found = []
        for t, square in zip(self.largest[s], self.square[s], strict=True):
            if self.sign:
                phi = math.pi / 2 if self.sign > 0 else math.log1p(t + math.sqrt(t) * math.sqrt(t + 2))
                found.append(square * phi**2)
            else:
                found.append(t)
        return max(found) if all(x == x for x in found) else math.nan


def alike(numbers: Sequence[float]) -> bool:
    return all(x == numbers[0] for x in numbers)

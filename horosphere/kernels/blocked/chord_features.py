r"""Augmented features of one chord part in the type of the tiles, for several batch entries at a time.

As in horosphere.kernels.blocked.augment, t = <a_i, b_j> = |kappa| u / 2 (u on flat space), without its float64
intermediates: they would cost more than the tiles of a short sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.blocked.augment import valid_weight
from horosphere.kernels.parts import Part

ROOT2 = math.sqrt(2.0)


class ChordFeatures:
    """The part with tensors (E or 1, ...) and kappa (E,), whose signs are ``sign``; a and b lie in ``memory`` where it
    is large enough.
    """

    def __init__(self, part: Part, sign: int, work: torch.dtype, memory: tuple[Tensor, Tensor]):
        self.part, self.sign, self.work = part, sign, work
        kappa = self.kappa = part.kappa.to(part.x.device)
        curved = kappa != 0
        size = torch.where(curved, kappa.abs(), 1.0)
        self.c = torch.where(curved, size / 2, 1.0)
        # d^2 is square phi^2, dd^2/dt gain phi / r, and d(d^2)/dkappa at fixed u the bend of arcs over kappa^2
        self.square = (4.0 if sign > 0 else 1.0) / size
        self.gain = (2 * ROOT2 if sign > 0 else ROOT2 if sign < 0 else 1.0) / size
        self.bend_unit = 1 / size**2
        e, f = kappa.numel(), part.x.shape[-1]
        c = self.c.to(work)[:, None]
        x, y = part.x.to(work), part.y.to(work)
        self.nx, self.ny = (torch.linalg.vector_norm(p, dim=-1).square_().expand(e, -1) for p in (x, y))
        self.wx, self.wy = (None if w is None else valid_weight(w.to(work)) for w in (part.wx, part.wy))
        self.scaled = (c if self.wx is None else c * self.wx).expand(e, x.shape[1])
        if memory[0].shape[0] < e:
            memory = tuple(t.new_empty(e, *t.shape[1:]) for t in memory)
        self.a, self.b = (t[:e] for t in memory)
        torch.mul(x, -2 * self.scaled.unsqueeze(-1), out=self.a[..., :f])
        if part.time_dims:
            self.a[..., : part.time_dims].neg_()
            self.a[..., f] = c * (2 / kappa).to(work)[:, None]
            self.a[..., f + 1] = 0
        else:
            torch.mul(self.nx, self.scaled, out=self.a[..., f])
            self.a[..., f + 1] = self.scaled
        if self.wy is None:
            self.b[..., :f], self.b[..., f], self.b[..., f + 1] = y, 1.0, self.ny
            self.n, self.w = self.ny, torch.ones_like(self.ny)
        else:
            torch.mul(y.expand(e, -1, -1), self.wy.unsqueeze(-1), out=self.b[..., :f])
            self.w, self.n = self.wy.expand(e, -1), self.ny * self.wy
            self.b[..., f], self.b[..., f + 1] = self.w, self.n
        # a pair is unresolved where t + c eps is less than (p_i + q_i |f_j|^2) w_j = p_i w_j + q_i n_j
        self.q = _numerics.weight_theta(f, work) * self.scaled
        self.p = self.q * self.nx
        self.largest = self._largest()
        self.maxima: dict[tuple[str, int], list[float]] = {}

    def _largest(self) -> list[float]:
        """(E,) bounds of t; NaN where there are points without distances."""
        if not self.a.numel() or not self.b.numel():
            return [0.0] * self.kappa.numel()
        if self.part.time_dims:
            a, b = (t.abs().amax((1, 2)).to(torch.float64) for t in (self.a, self.b))
            return (2 * self.a.shape[-1] * a * b).tolist()
        norms, scales, n, w = (t.amax(-1).to(torch.float64) for t in (self.a[..., -2], self.scaled, self.n, self.w))
        return (2 * (norms * w + scales * n)).tolist()

    def most(self, which: str, at: slice) -> list[float]:
        """(E,) largest p, q (of rows) or n, w (of columns) of a block."""
        key = which, at.start
        if key not in self.maxima:
            block = getattr(self, which)[:, at]
            self.maxima[key] = block.amax(-1).tolist() if block.numel() else [0.0] * block.shape[0]
        return self.maxima[key]

    def extent(self, s: slice) -> float:
        """A bound of d^2 of the entries of a slice."""
        found = []
        for t, square in zip(self.largest[s], self.square[s].tolist(), strict=True):
            if self.sign:
                phi = math.pi / 2 if self.sign > 0 else math.log1p(t + math.sqrt(t) * math.sqrt(t + 2))
                found.append(square * phi**2)
            else:
                found.append(t)
        return max(found) if all(x == x for x in found) else math.nan

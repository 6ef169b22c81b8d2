r"""Which pairs of a tile the product form does not resolve: one reduction, and a closer look where it says so.

By the rule of the reference a pair is unresolved where the error bound of u reaches the promised tolerance,
:math:`t < \theta c\, w_i w_j (|f_i|^2 + |f_j|^2) = (p_i + q_i |f_j|^2) w_j`; with several parts where the sum of d^2 is
less than the sum of slope times bound, which needs at least one part to be unresolved by itself; and near antipodes.
Rows of the tile are cut into groups of columns: a group whose smallest t / w_j is above its largest bound holds no such
pair. (w_j stays out of the comparison, and is multiplied in afterwards: near the rim of a ball weights differ by orders
of magnitude within a group.)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from horosphere.kernels.chord import arcs
from horosphere.kernels.chord.augment import Augmented

# Largest share of the groups of a tile that may be doubtful where entries below arcs.PLAIN_LOG count as unresolved.
FEW = 1 / 16


class Weights(NamedTuple):
    """Weights of columns cut into G groups."""

    w: Tensor  # (B G, width)
    most: Tensor  # (B, 1, G)
    least: Tensor  # (B, 1, G)

    @classmethod
    def of(cls, wy: Tensor, width: int) -> Weights:
        w = wy.unflatten(-1, (-1, width))
        return cls(w.reshape(-1, width), w.amax(-1)[:, None], w.amin(-1)[:, None])


class Bound(NamedTuple):
    """What the bound of one part needs, columns cut into G groups."""

    p: Tensor  # (B N)
    q: Tensor  # (B N)
    n: Tensor  # (B G, width)
    weights: Weights | None
    largest: Tensor  # (B, N, G), of t / w_j

    @classmethod
    def of(cls, a: Augmented, width: int) -> Bound:
        n = a.n.unflatten(-1, (-1, width))
        largest = a.p[..., None] + a.q[..., None] * n.amax(-1)[:, None]
        weights = None if a.wy is None else Weights.of(a.wy, width)
        return cls(a.p.reshape(-1), a.q.reshape(-1), n.reshape(-1, width), weights, largest)


class Search:
    """Collects doubtful groups from tile to tile and looks at their pairs some tiles' worth at a time."""

    def __init__(self, made: Sequence[Augmented], n: int, m: int, width: int, wide: Sequence[bool], capacity: int):
        self.made, self.bounds, self.wide = made, [Bound.of(a, width) for a in made], wide
        self.n, self.m, self.width, self.groups = n, m, width, self.bounds[0].largest.shape[-1]
        self.capacity, self.waiting = capacity, 0
        self.pending: list[tuple[Tensor, ...]] = []
        self.found: list[Tensor] = []
        self.signs: list[int] = []

    def look(self, ts: Sequence[Tensor], e: slice, i: slice, j: slice) -> bool:
        """Note the doubtful groups of a tile, whose ts come without the weights of columns, which are multiplied in.

        Returns whether log may take the place of log1p in this tile: where t is below arcs.PLAIN_LOG in few groups, its
        entries there count as unresolved.
        """
        signs = [a.signs[e.start] for a in self.made]
        if signs != self.signs:
            self.flush()
            self.signs = signs
        groups = slice(j.start // self.width, j.stop // self.width)
        cut = [t.unflatten(-1, (-1, self.width)) for t in ts]
        log = False
        parts = []
        for sign, b, t in zip(signs, self.bounds, cut, strict=True):
            limit = b.largest[e, i, groups]
            lows = t.amin(-1)
            here = ~(lows >= limit)  # NaN counts
            if b.weights is not None:
                t.mul_(b.weights.w.view(-1, 1, self.groups, self.width)[e, :, groups])
            if sign > 0:
                most = 1.0 if b.weights is None else b.weights.most[e, :, groups]
                here |= ~(t.amax(-1) <= 2 - limit * most)
            elif sign < 0 and len(ts) == 1:
                small = lows * (1.0 if b.weights is None else b.weights.least[e, :, groups]) < arcs.PLAIN_LOG
                small |= here
                log = int(small.sum()) <= FEW * small.numel()
                here = small if log else here
            parts.append(here)
        doubtful = functools.reduce(operator.or_, parts)
        entry, row, group = doubtful.nonzero(as_tuple=True)
        if entry.numel():
            at = (entry * doubtful.shape[1] + row) * doubtful.shape[2] + group
            rows = (entry + e.start) * self.n + row + i.start
            picked = [t.reshape(-1, self.width).index_select(0, at) for t in cut]
            least = torch.full((len(rows), 1), arcs.PLAIN_LOG if log else 0.0, dtype=ts[0].dtype, device=ts[0].device)
            self.pending.append((rows, group + groups.start, least, *picked))
            self.waiting += picked[0].numel()
            if self.waiting > self.capacity:
                self.flush()
        return log

    def flush(self) -> None:
        """Apply the rule to every pair of the groups collected."""
        if not self.pending:
            return
        rows, group, least, *ts = (torch.cat(column) for column in zip(*self.pending, strict=True))
        self.pending, self.waiting = [], 0
        entry = rows // self.n
        own = entry * self.groups + group
        limits = [self._limit(b, rows, own) for b in self.bounds]
        picked = [~(t <= 2 - limit) for t, limit, sign in zip(ts, limits, self.signs, strict=True) if sign > 0]
        if len(ts) == 1:
            picked.append(~(ts[0] >= torch.maximum(limits[0], least)))
        else:
            picked.append(self._near(entry, ts, limits))
        which, column = functools.reduce(operator.or_, picked).nonzero(as_tuple=True)
        column = column + group[which] * self.width
        real = column < self.m  # the last columns repeat the last point
        self.found.append((rows[which] * self.m + column)[real])

    def _limit(self, b: Bound, rows: Tensor, own: Tensor) -> Tensor:
        """The bound of t of every pair of groups ``own``, in these rows."""
        limit = torch.addcmul(b.p[rows].unsqueeze(-1), b.q[rows].unsqueeze(-1), b.n.index_select(0, own))
        return limit if b.weights is None else limit.mul_(b.weights.w.index_select(0, own))

    def _near(self, entry: Tensor, ts: Sequence[Tensor], limits: Sequence[Tensor]) -> Tensor:
        """Pairs whose sum of d^2 is less than that of slope times bound; the ts are clamped."""
        squares, doubts = [], []
        for a, sign, t, limit, w in zip(self.made, self.signs, ts, limits, self.wide, strict=True):
            arcs.clamp_(t, sign)
            unit = a.factor[entry, 0] ** 2
            d2 = unit * arcs.arc_(t.clone(), sign, torch.empty_like(t), w) ** 2
            # slope of d^2 by t: d^2 / t, and its limit at 0
            slope = torch.where(t > 0, d2 / torch.where(t > 0, t, 1.0), 2 * unit if sign else 1.0)
            squares.append(d2)
            doubts.append(slope * limit)
        return ~(functools.reduce(operator.add, squares) >= functools.reduce(operator.add, doubts))

    def result(self, device: torch.device) -> Tensor:
        """Flat indices (P,) of the unresolved pairs."""
        self.flush()
        return torch.cat(self.found) if self.found else torch.empty(0, dtype=torch.int64, device=device)

r"""Which pairs of a tile the product form does not resolve: one reduction, and a closer look where it says so.

By the rule of the reference a pair is unresolved where the error bound of u reaches the promised tolerance,
:math:`t < \theta c\, w_i w_j (|f_i|^2 + |f_j|^2) = (p_i + q_i |f_j|^2) w_j`; with several parts where the sum of d^2 is
less than the sum of slope times bound, which needs at least one part to be unresolved by itself; and near antipodes.
Rows of the tile are cut into groups of columns: a group whose smallest t / w_j is above its largest bound holds no such
pair. (w_j stays out of the comparison, and is multiplied in afterwards: near the rim of a ball weights differ by orders
of magnitude within a group.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from horosphere.kernels.chord import arcs
from horosphere.kernels.chord.augment import Augmented

# Largest share of the groups of a tile that may be doubtful where entries below arcs.PLAIN_LOG count as unresolved.
FEW = 1 / 16


class Bound(NamedTuple):
    """What the bound of one part needs, columns cut into G groups."""

    p: Tensor  # (B N)
    q: Tensor  # (B N)
    n: Tensor  # (B G, width)
    w: Tensor | None  # (B G, width)
    largest: Tensor  # (B, N, G), of t / w_j
    most_w: Tensor | float  # (B, 1, G)
    least_w: Tensor | float  # (B, 1, G)

    @classmethod
    def of(cls, a: Augmented, width: int) -> Bound:
        n = a.n.unflatten(-1, (-1, width))
        largest = a.p[..., None] + a.q[..., None] * n.amax(-1)[:, None]
        w, most, least = None, 1.0, 1.0
        if a.wy is not None:
            w = a.wy.unflatten(-1, (-1, width))
            most, least = w.amax(-1)[:, None], w.amin(-1)[:, None]
            w = w.reshape(-1, width)
        return cls(a.p.reshape(-1), a.q.reshape(-1), n.reshape(-1, width), w, largest, most, least)


class Search:
    """Collects doubtful groups from tile to tile and looks at their pairs some tiles' worth at a time."""

    def __init__(self, made: Sequence[Augmented], n: int, m: int, width: int, wide: Sequence[bool], capacity: int):
        self.made, self.bounds, self.wide = made, [Bound.of(a, width) for a in made], wide
        self.n, self.m, self.width, self.groups = n, m, width, self.bounds[0].largest.shape[-1]
        self.capacity, self.pending, self.waiting, self.found = capacity, [], 0, []
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
        doubtful, log = None, False
        for sign, b, t in zip(signs, self.bounds, cut, strict=True):
            limit = b.largest[e, i, groups]
            lows = t.amin(-1)
            here = ~(lows >= limit)  # NaN counts
            if b.w is not None:
                t.mul_(b.w.view(-1, 1, self.groups, self.width)[e, :, groups])
            if sign > 0:
                most = b.most_w[e, :, groups] if b.w is not None else b.most_w
                here |= ~(t.amax(-1) <= 2 - limit * most)
            elif sign < 0 and len(ts) == 1:
                small = lows * (b.least_w[e, :, groups] if b.w is not None else 1.0) < arcs.PLAIN_LOG
                small |= here
                log = int(small.sum()) <= FEW * small.numel()
                here = small if log else here
            doubtful = here if doubtful is None else doubtful | here
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
        far = total = doubt = None
        for a, sign, b, t, w in zip(self.made, self.signs, self.bounds, ts, self.wide, strict=True):
            limit = torch.addcmul(b.p[rows].unsqueeze(-1), b.q[rows].unsqueeze(-1), b.n.index_select(0, own))
            if b.w is not None:
                limit.mul_(b.w.index_select(0, own))
            if sign > 0:
                antipodal = ~(t <= 2 - limit)
                far = antipodal if far is None else far | antipodal
            if len(ts) == 1:
                total, doubt = t, torch.maximum(limit, least)
                break
            t = arcs.clamp_(t, sign)
            unit = a.factor[entry, 0] ** 2
            d2 = unit * arcs.arc_(t.clone(), sign, torch.empty_like(t), w) ** 2
            # slope of d^2 by t: d^2 / t, and its limit at 0
            slope = torch.where(t > 0, d2 / torch.where(t > 0, t, 1.0), 2 * unit if sign else 1.0)
            total, doubt = (d2, slope * limit) if total is None else (total + d2, doubt + slope * limit)
        near = ~(total >= doubt)
        which, column = (near if far is None else near | far).nonzero(as_tuple=True)
        column = column + group[which] * self.width
        real = column < self.m  # the last columns repeat the last point
        self.found.append((rows[which] * self.m + column)[real])

    def result(self, device: torch.device) -> Tensor:
        """Flat indices (P,) of the unresolved pairs."""
        self.flush()
        return torch.cat(self.found) if self.found else torch.empty(0, dtype=torch.int64, device=device)

r"""From sums over tiles to the gradients of one chord part, for all batch entries whose features were made together.

Tiles add up G b and G^T a, G = dL/dt, for the augmented features a and b; what is left is linear in these sums and done
once. Without weights the last two columns of a and b are constants, and one sum of G stands for both.

In x sum_j G_ij - sum_j G_ij y_j near pairs cancel, and in the gradient of the weights once more: near the rim of a ball
the error grows like w^3. So unresolved pairs take no part in these sums. With s = <x - y, x - y>_J they add up

    sum_j w_j G_ij (x_i - y_j) and sum_j w_j G_ij s_ij,        dL/dx_i = 2 c w_i J (the first), dL/dw_i = c (the second)

in float64, from differences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere.kernels.chord.augment import key_gradient, minkowski, query_gradient
from horosphere.kernels.tiled.chord_features import ROOT2, ChordFeatures
from horosphere.kernels.tiled.entries import Entries, PartEntries
from horosphere.kernels.tiled.near import Unresolved, pair_differences, with_own_time
from horosphere.kernels.tiled.products import add_product, one

# Unresolved pairs worked at a time: 2^14 in 64 dimensions take 17 MB.
PAIRS = 2**14


class Side:
    """Sums of one side, entries ``ready`` of the batch; those of features lie where their gradient will.

    Args:
        features, weights: where their gradients are added up; without weights the last two columns are constants.
        ready: the batch entries.
        entries, rows, f: of the sums.
    """

    def __init__(self, features: Entries, weights: Entries | None, ready: slice, entries: int, rows: int, f: int):
        self.features, self.weights, self.ready = features, weights, ready
        like, place = features.t, features.memory(ready)
        self.in_place = place is not None
        self.main = like.new_zeros(entries, rows, f) if place is None else place
        self.first = like.new_zeros(entries, rows)
        self.second = None if weights is None else like.new_zeros(entries, rows)
        self.unresolved: Tensor | None = None  # (entries, rows, f + 1) in float64, of unresolved pairs

    def block(self, s: slice, at: slice) -> Block:
        return Block(self, s, at)

    def finish(self, features: Tensor, weights: Tensor | None) -> None:
        """Take the gradients of features, made of the sums, and of weights."""
        if not self.in_place:
            self.features.add_(self.ready, features, slice(None))
        if self.weights is not None and weights is not None:
            self.weights.add_(self.ready, weights, slice(None))

    def add_unresolved(self, entry: int, rows: Tensor, g: Tensor, delta: Tensor, square: Tensor) -> None:
        """Of pairs (P,), at rows of an entry: g times their differences (P, F) and squared differences (P, 1)."""
        if self.unresolved is None:
            shape = self.first.shape
            self.unresolved = delta.new_zeros(*shape, delta.shape[-1] + 1)
        self.unresolved[entry].index_add_(0, rows, g.unsqueeze(-1) * torch.cat((delta, square), -1))


class Block:
    """Sums of a block of rows of entries s.

    Those of one entry without weights are in place; others have memory of their own until ``store``, where products run
    over all entries at once, and with weights over the last two columns too.
    """

    def __init__(self, side: Side, s: slice, at: slice):
        self.side, self.s, self.at = side, s, at
        target = side.main[s, at]
        e, r, f = target.shape
        self.weighted, self.alone = side.second is not None, e == 1 and side.second is None
        self.main = target if self.alone else target.new_zeros(e, r, f + 2 * self.weighted)
        self.into = one(self.main)
        self.first = side.first[s, at]

    def add(self, g: Tensor, features: Tensor) -> None:
        """g (E, R, C) times features, of which all or, without weights, all but two columns are given."""
        add_product(self.into, one(g), features)
        if not self.weighted:
            self.first += g.sum(-1)

    def store(self) -> None:
        second = self.side.second
        if second is not None:
            self.side.main[self.s, self.at] = self.main[..., :-2]
            self.side.first[self.s, self.at] = self.main[..., -2]
            second[self.s, self.at] = self.main[..., -1]
        elif not self.alone:
            self.side.main[self.s, self.at] = self.main


class ChordGradients:
    """The sums of both sides of a part.

    Args:
        features: of the entries ``ready``.
        into: of the part.
    """

    def __init__(self, features: ChordFeatures, into: PartEntries, ready: slice):
        self.features = features
        entries, f = features.entries, features.part.x.shape[-1]
        self.queries = Side(into.x, into.wx, ready, entries, features.nx.shape[1], f)
        self.keys = Side(into.y, into.wy, ready, entries, features.ny.shape[1], f)
        curved = features.part.kappa != 0
        size = torch.where(curved, features.part.kappa.abs(), 1.0)
        self.c = torch.where(curved, size / 2, 1.0)
        # dd^2/dt is gain phi / r, and d(d^2)/dkappa at fixed u the curvature_slope of arcs over kappa^2
        self.gain = (2 * ROOT2 if features.sign > 0 else ROOT2 if features.sign < 0 else 1.0) / size
        self.curvature_unit = 1 / size**2
        self.scale = self.c.new_zeros(entries)
        self.curvature_slope = self.c.new_zeros(entries)
        self.compiled = False  # whether the sums are those of compiled loops

    def finish(self) -> None:
        """Everything that was summed in the type of the tiles."""
        if self.compiled:
            self._finish_compiled()
        else:
            self._finish_resolved()
        self._finish_unresolved()

    def _finish_resolved(self) -> None:
        f = self.features
        work, part = f.work, f.part
        factor = (self.scale * self.gain).to(work)[:, None]
        c = self.c.to(work)[:, None] * factor
        q, k = self.queries, self.keys
        self.queries.finish(*query_gradient(part.x.to(work), f.wx, q.main, q.first, q.second, c, part.time_dims))
        k.main.mul_(factor.unsqueeze(-1))
        first, second = k.first * factor, k.first * c if k.second is None else k.second * factor
        self.keys.finish(*key_gradient(part.y.to(work), f.wy, k.main, first, second, part.time_dims))

    def _finish_compiled(self) -> None:
        """Of loops that sum H, the gradient of |x_i - y_j|^2, and G t for the weights: dL/dw_i = sum_j G_ij t_ij / w_i.
        Their slope of d^2 by t is phi over sqrt(t (2 + t)) or sqrt(t (2 - t)), with phi the whole angle.
        """
        f = self.features
        factor = (self.scale / self.c).to(f.work)[:, None]
        for side, points, w in ((self.queries, f.part.x, f.wx), (self.keys, f.part.y, f.wy)):
            gradient, _ = query_gradient(points.to(f.work), None, side.main, side.first, None, factor, 0)
            side.finish(gradient, None if w is None or side.second is None else side.second * factor / w)

    def take_unresolved(self, s: slice, i: slice, j: slice, some: Unresolved, g: Tensor) -> None:
        """Add up what unresolved pairs of a tile of entries s give; their g (E, R, C) becomes 0."""
        part, entry = self.features.part, s.start + some.k
        at, column = some.pairs.nonzero(as_tuple=True)
        row = some.rows[at]
        upper = g[some.k, row, column].to(torch.float64)
        g[some.k, row, column] = 0.0
        kappa = part.kappa[entry : entry + 1]

        def of(t: Tensor, at: Tensor) -> Tensor:
            return t[entry if t.shape[0] > 1 else 0].index_select(0, at)

        for r, c, u in zip(*(t.split(PAIRS) for t in (row + i.start, column + j.start, upper)), strict=True):
            x, y = (
                with_own_time(of(t, at).unsqueeze(0), kappa, part.time_dims)[0] for t, at in ((part.x, r), (part.y, c))
            )
            delta = pair_differences(x, y, part.time_dims)
            square = (minkowski(delta, part.time_dims) * delta).sum(-1, keepdim=True)
            by_y, by_x = (u if w is None else u * of(w, at) for w, at in ((part.wy, c), (part.wx, r)))
            self.queries.add_unresolved(entry, r, by_y, delta, square)
            self.keys.add_unresolved(entry, c, by_x, delta.neg_(), square)

    def _finish_unresolved(self) -> None:
        time = self.features.part.time_dims
        unit = self.scale * self.gain * self.c
        for side, w in ((self.queries, self.features.part.wx), (self.keys, self.features.part.wy)):
            if side.unresolved is None:
                continue
            own = unit[:, None] if w is None else unit[:, None] * w.to(torch.float64)
            gradients = (
                2 * own.unsqueeze(-1) * minkowski(side.unresolved[..., :-1], time),
                unit[:, None] * side.unresolved[..., -1],
            )
            for into, gradient in zip((side.features, side.weights), gradients, strict=True):
                if into is not None:
                    into.add_(side.ready, gradient.to(self.features.work), slice(None))


def _of(t: Tensor, s: slice) -> Tensor:
    """Entries of a slice, of a tensor that has one for all of them perhaps."""
    return t if t.shape[0] == 1 else t[s]

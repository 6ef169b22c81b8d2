r"""From sums over tiles to the gradients of one chord part, for all batch entries whose features were made together.

Tiles add up G b and G^T a, G = dL/dt, for the augmented features a and b; what is left is linear in these sums and done
once. Without weights the last two columns of a and b are constants, and one sum of G stands for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere.kernels.chord.augment import key_gradient, query_gradient
from horosphere.kernels.tiled.chord_features import ROOT2, ChordFeatures
from horosphere.kernels.tiled.entries import Entries
from horosphere.kernels.tiled.near import with_own_time
from horosphere.kernels.tiled.products import add_product, one


class Side:
    """Sums of one side, entries ``ready`` of the batch; those of features lie where their gradient will.

    Args:
        into: where the gradients of features and of weights are added up.
        ready: the batch entries.
        entries, rows, f: of the sums.
        weighted: whether the last two columns are no constants.
    """

    def __init__(self, into: list[Entries | None], ready: slice, entries: int, rows: int, f: int, weighted: bool):
        self.into, self.ready = into, ready
        like = into[0].t
        self.in_place = into[0].own_memory
        self.main = into[0].whole[ready] if self.in_place else like.new_zeros(entries, rows, f)
        self.first = like.new_zeros(entries, rows)
        self.second = like.new_zeros(entries, rows) if weighted else None
        self.apart: list[tuple[slice, slice, Tensor, Tensor | None]] = []

    def block(self, s: slice, at: slice) -> Block:
        return Block(self, s, at)

    def finish(self, gradient: tuple[Tensor, Tensor | None]) -> None:
        """Add up the gradients of features and weights, and those that were made apart."""
        features, weights = gradient
        everything = slice(None)
        if not self.in_place:
            self.into[0].add_(self.ready, features, everything)
        if weights is not None:
            self.into[1].add_(self.ready, weights, everything)
        for s, at, gf, gw in self.apart:
            e = slice(self.ready.start + s.start, self.ready.start + s.stop)
            self.into[0].add_(e, gf.to(features.dtype), at)
            if gw is not None:
                self.into[1].add_(e, gw.to(features.dtype), at)


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
        self.exact: Tensor | None = None

    def add(self, g: Tensor, features: Tensor) -> None:
        """g (E, R, C) times features, of which all or, without weights, all but two columns are given."""
        add_product(self.into, one(g), features)
        if not self.weighted:
            self.first += g.sum(-1)

    def in_float64(self) -> Tensor:
        """Sums (E, R, F + 2) beside the others, in float64."""
        if self.exact is None:
            e, r, f = self.side.main[self.s, self.at].shape
            self.exact = self.main.new_zeros(e, r, f + 2, dtype=torch.float64)
        return self.exact

    def store(self) -> None:
        if self.weighted:
            self.side.main[self.s, self.at] = self.main[..., :-2]
            self.side.first[self.s, self.at] = self.main[..., -2]
            self.side.second[self.s, self.at] = self.main[..., -1]
        elif not self.alone:
            self.side.main[self.s, self.at] = self.main

    def taken(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The sums in float64; they are 0 afterwards."""
        wide = self.main.to(torch.float64)
        first = self.first.to(torch.float64)
        self.main.zero_()
        self.first.zero_()
        return (wide[..., :-2], wide[..., -2], wide[..., -1]) if self.weighted else (wide, first, None)


class ChordGradients:
    """The sums of both sides of a part.

    Args:
        features: of the entries ``ready``.
        into: x, y, wx, wy of the part.
    """

    def __init__(self, features: ChordFeatures, into: list[Entries | None], ready: slice):
        self.features = features
        entries, f, weighted = features.entries, features.part.x.shape[-1], features.wy is not None
        self.queries = Side([into[0], into[2]], ready, entries, features.nx.shape[1], f, weighted)
        self.keys = Side([into[1], into[3]], ready, entries, features.ny.shape[1], f, weighted)
        curved = features.part.kappa != 0
        size = torch.where(curved, features.part.kappa.abs(), 1.0)
        self.c = torch.where(curved, size / 2, 1.0)
        # dd^2/dt is gain phi / r, and d(d^2)/dkappa at fixed u the bend of arcs over kappa^2
        self.gain = (2 * ROOT2 if features.sign > 0 else ROOT2 if features.sign < 0 else 1.0) / size
        self.bend_unit = 1 / size**2
        self.scale = self.c.new_zeros(entries)
        self.bend = self.c.new_zeros(entries)
        self.compiled = False  # whether the sums are those of compiled loops

    def finish(self) -> None:
        """Everything that was summed in the type of the tiles."""
        f = self.features
        work, part = f.work, f.part
        if self.compiled:
            self._finish_compiled()
            return
        factor = (self.scale * self.gain).to(work)[:, None]
        c = self.c.to(work)[:, None] * factor
        q, k = self.queries, self.keys
        self.queries.finish(query_gradient(part.x.to(work), f.wx, q.main, q.first, q.second, c, part.time_dims))
        k.main.mul_(factor.unsqueeze(-1))
        first, second = k.first * factor, k.first * c if k.second is None else k.second * factor
        self.keys.finish(key_gradient(part.y.to(work), f.wy, k.main, first, second, part.time_dims))

    def _finish_compiled(self) -> None:
        """Of loops that sum H, the gradient of |x_i - y_j|^2, and G t for the weights: dL/dw_i = sum_j G_ij t_ij / w_i.
        Their slope of d^2 by t is phi over sqrt(t (2 + t)) or sqrt(t (2 - t)), with phi the whole angle.
        """
        f = self.features
        factor = (self.scale / self.c).to(f.work)[:, None]
        for side, points, w in ((self.queries, f.part.x, f.wx), (self.keys, f.part.y, f.wy)):
            gradient, _ = query_gradient(points.to(f.work), None, side.main, side.first, None, factor, 0)
            side.finish((gradient, None if w is None else side.second * factor / w))

    def query_apart(self, block: Block) -> None:
        """The gradient of rows with sums in float64."""
        f, s, at = self.features, block.s, block.at
        main, first, second = block.taken()
        exact = block.exact
        main, first = exact[..., :-2].add_(main), exact[..., -2] + first
        second = None if second is None else exact[..., -1] + second
        factor = (self.scale[s] * self.gain[s])[:, None]
        w = None if f.wx is None else _of(f.wx, s)[:, at].to(torch.float64)
        x = with_own_time(_of(f.part.x, s)[:, at], f.part.kappa[s], f.part.time_dims)
        gx, gw = query_gradient(x, w, main, first, second, self.c[s][:, None] * factor, f.part.time_dims)
        self.queries.apart.append((s, at, gx, gw))

    def key_apart(self, block: Block) -> None:
        f, s, at = self.features, block.s, block.at
        main, total, second = block.taken()
        exact = block.exact
        c, kappa = self.c[s][:, None], f.part.kappa[s][:, None]
        factor = (self.scale[s] * self.gain[s])[:, None]
        if f.wy is not None:
            first, second = exact[..., -2] + total, exact[..., -1] + second
        else:  # the last columns of a are |x|^2 c and c, with a time coordinate 2 c/kappa and 0
            first, second = None, c * total + (exact[..., -2] * kappa / 2 if f.part.time_dims else exact[..., -1])
        main = exact[..., :-2].add_(main).mul_(factor.unsqueeze(-1))
        w = None if f.wy is None else _of(f.wy, s)[:, at].to(torch.float64)
        y = with_own_time(_of(f.part.y, s)[:, at], f.part.kappa[s], f.part.time_dims)
        first = None if first is None else first * factor
        gy, gw = key_gradient(y, w, main, first, second * factor, f.part.time_dims)
        self.keys.apart.append((s, at, gy, gw))


def _of(t: Tensor, s: slice) -> Tensor:
    """Entries of a slice, of a tensor that has one for all of them perhaps."""
    return t if t.shape[0] == 1 else t[s]

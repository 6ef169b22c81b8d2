r"""One chord part of a group of batch entries: t = |kappa| u / 2 of a tile, its arc, and the gradient to the points.

Augmented features as in horosphere.kernels.blocked.augment, formed in the type of the tiles. With r = sqrt(t + t^2/2)

    kappa < 0:  phi = log(1 + t + sqrt2 r),      d^2 = phi^2 / |kappa|,     dd^2/dt = (sqrt2 / |kappa|) phi / r
    kappa > 0:  phi = asin sqrt(t/2),            d^2 = 4 phi^2 / kappa,     dd^2/dt = (2 sqrt2 / kappa) phi / r

with t - t^2/2 in r for kappa > 0; constant factors are left to the points. With a time coordinate the gradient by the
features is that of <x - y, x - y>_J, where the product has 2/kappa for <x, x>_J + <y, y>_J: it differs from that of the
product by a multiple of J x, across the hyperboloid, and does not cancel when it is pulled back to the points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from horosphere.kernels.blocked import arcs
from horosphere.kernels.blocked.augment import key_gradient, minkowski, query_gradient, tile_product
from horosphere.kernels.blocked.chord_features import ROOT2, ChordFeatures
from horosphere.kernels.blocked.near import TINY, Near, Rows, with_own_time
from horosphere.kernels.blocked.products import accumulate

if TYPE_CHECKING:
    from horosphere.kernels.blocked.chord_scores import ChordScores


class PartTiles:
    """Entries s of a part's features; ``inside``: eps, shift (E,), is added to t by the matrix product."""

    def __init__(self, features: ChordFeatures, s: slice, scores: ChordScores, shift: Tensor, inside: bool):
        self.features, self.s, self.inside, self.curvature = features, s, inside, scores.curvature
        self.part, self.sign, self.work = features.part, features.sign, features.work
        self.a, self.b = features.a[s], features.b[s]
        if inside:
            torch.add(features.nx[s], shift.to(self.work)[:, None], out=self.a[..., -2])
        squares = features.square[s].tolist()
        alike = all(q == squares[0] for q in squares)
        self.factor = squares[0] if alike else features.square[s].sqrt().to(self.work)[:, None, None]
        self.wide = self.sign < 0 and any(arcs.overflows(t, self.work) for t in features.largest[s])
        self.near = Near(features, s, shift, inside) if scores.resolve else None
        self.least = max(float(shift.min()), TINY) if inside else TINY
        self.flagged: list[Rows] = []
        self.slope: Tensor | None = None
        self.bend: Tensor | None = None
        # sums of gradients by a (of the rows at hand) and b (by the first column of a block); in float64 for Rows
        self.da: Sums | None = None
        self.db: dict[int, Sums] = {}
        self.exact_da: Tensor | None = None
        self.exact_db: dict[int, Tensor] = {}
        self.dkappa = shift.new_zeros(shift.shape)

    def product(self, i: slice, j: slice, buffer: Tensor) -> Tensor:
        """t (E, R, C), in its range; plus eps where that is inside."""
        t = tile_product(self.a[:, i], self.b[:, j], buffer)
        self.flagged, self.low = [], math.inf
        if self.near is not None and not self.near.never:
            self.low = float(t.amin())
            if not self.low >= self.near.limit(i, j):
                self.flagged = self.near.rework_(t, i, j)
                self.low = 0.0
        elif self.near is None or not self.inside:
            self.low = float(t.amin())
        if not self.low >= self.least:
            t.clamp_(min=self.least)
        return t

    def arc_(self, t: Tensor, buffer: Tensor, keep: bool) -> Tensor:
        """phi in place of t; ``keep`` makes and keeps the slope, in buffer."""
        scratch = buffer[: t.numel()].view(t.shape)
        if self.curvature:
            self.bend = arcs.curvature_slope(t, self.sign, True) if keep else None
        if self.sign == 0:
            self.slope = None
            return t
        if self.sign < 0:
            root = self._root(t, scratch)
            t.add_(root, alpha=ROOT2)
            phi = t.add_(1).log_() if self.low >= arcs.PLAIN_LOG else t.log1p_()
            self.slope = torch.div(phi, root, out=root) if keep else None
            return phi
        antipodal = t >= 2 if not float(t.amax()) < 2 else None
        if antipodal is not None:
            t.clamp_(max=2.0)
        root = self._root(t, scratch) if keep else None
        phi = t.mul_(0.5).sqrt_().asin_()
        self.slope = torch.div(phi, root, out=root) if keep else None
        if keep and antipodal is not None:
            self.slope.masked_fill_(antipodal, 0.0)
        return phi

    def _root(self, t: Tensor, out: Tensor) -> Tensor:
        if self.wide:
            return torch.add(t, 2, out=out).mul_(0.5).sqrt_().mul_(t.sqrt())
        return torch.addcmul(t, t, t, value=-0.5 if self.sign > 0 else 0.5, out=out).sqrt_()

    def add_to(self, total: Tensor, phi: Tensor, out: Tensor) -> Tensor:
        """total + d^2, from phi."""
        if self.sign == 0:
            return torch.add(total, phi, out=out)
        if isinstance(self.factor, float):
            return torch.addcmul(total, phi, phi, value=self.factor, out=out)
        phi.mul_(self.factor)
        return torch.addcmul(total, phi, phi, out=out)

    def pull(self, i: slice, j: slice, g: Tensor) -> None:
        """Sums of the gradients of a and b from dL/d(d^2), g (E, R, C), of the last tile, whose slope was kept."""
        if self.bend is not None:
            self.dkappa += torch.einsum("erc,erc->e", self.bend, g).to(torch.float64)
        if self.slope is not None:
            g.mul_(self.slope)
        for k, rows, exact_a, exact_b in self.flagged:
            upper = g[k].index_select(0, rows).to(torch.float64)
            if self.exact_da is None:
                self.exact_da = upper.new_zeros(self.a[:, i].shape)
            if j.start not in self.exact_db:
                self.exact_db[j.start] = upper.new_zeros(self.b[:, j].shape)
            self.exact_da[k].index_add_(0, rows, upper @ exact_b)
            self.exact_db[j.start][k].addmm_(upper.mT, exact_a)
            g[k].index_fill_(0, rows, 0.0)
        if self.da is None:
            self.da = Sums(self.a[:, i])
        if j.start not in self.db:
            self.db[j.start] = Sums(self.b[:, j])
        weighted = self.features.wy is not None
        # without weights b holds the keys themselves, whose rows lie closer
        whole = not weighted and self.part.y.dtype == self.work
        keys = _of(self.part.y, self.s)[:, j] if whole else self.b[:, j, :-2]
        self.da.add(g, keys, *((self.b[:, j, -2], self.b[:, j, -1]) if weighted else (None, None)))
        ends = (self.a[:, i, -2], self.a[:, i, -1]) if weighted else (None, None)
        self.db[j.start].add(g.mT, self.a[:, i, :-2], *ends)

    def query_gradient(self, i: slice, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of the features and weights of rows i, from the sums of all their tiles, times scale (E,)."""
        sums, exact = self.da, self.exact_da
        self.da = self.exact_da = None
        da = self.a.new_zeros(self.a[:, i].shape) if sums is None else sums.together(1.0, 0.0)
        x = _of(self.part.x, self.s)[:, i]
        w = None if self.features.wx is None else _of(self.features.wx, self.s)[:, i]
        da, x, w, c = self._summed(da, exact, x, w, scale)
        gx, gw = query_gradient(x, w, da, c, self.part.time_dims)
        if self.part.time_dims:
            gx.addcmul_(minkowski(x, self.part.time_dims), da[..., -2:-1] * (2 * c.unsqueeze(-1)))
        return gx.to(self.work), None if gw is None else gw.to(self.work)

    def key_gradients(self, scale: Tensor) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Of the features and weights of every block of columns."""
        c, kappa = (t[self.s].to(self.work)[:, None] for t in (self.features.c, self.features.kappa))
        for start, sums in self.db.items():
            # without weights the last columns of a are constants: 2 c/kappa and 0 with a time coordinate, else |x|^2, c
            db = sums.together(2 * c / kappa, 0.0) if self.part.time_dims else sums.together(0.0, c)
            j = slice(start, start + db.shape[1])
            y = _of(self.part.y, self.s)[:, j]
            w = None if self.features.wy is None else _of(self.features.wy, self.s)[:, j]
            db, y, w, _ = self._summed(db, self.exact_db.get(start), y, w, scale)
            gy, gw = key_gradient(y, w, db, self.part.time_dims)
            if self.part.time_dims:
                gy.addcmul_(minkowski(y, self.part.time_dims), db[..., -2:-1] * kappa.to(db.dtype).unsqueeze(-1))
            yield j, gy.to(self.work), None if gw is None else gw.to(self.work)

    def _summed(self, sums: Tensor, exact: Tensor | None, points: Tensor, w: Tensor | None, scale: Tensor):
        """Everything in one type; sums times all constant factors."""
        features, s = self.features, self.s
        dtype = self.work if exact is None else torch.float64
        if exact is None:
            points = points.to(dtype)
        else:
            sums, points = exact.add_(sums), with_own_time(points, features.kappa[s], self.part.time_dims)
        sums.mul_((scale * features.gain[s]).to(dtype)[:, None, None])
        return sums, points, None if w is None else w.to(dtype), features.c[s].to(dtype)[:, None]

    def kappa_gradient(self, scale: Tensor) -> Tensor:
        """(E,), from the sums over all tiles."""
        return scale * self.dkappa * self.features.bend_unit[self.s]


class Sums:
    """sum_j g_ij b_j for augmented b (E, C, F + 2), whose last two columns are apart.

    A product with F + 2 columns takes a third longer than one with 64; a single column is next to nothing.
    """

    def __init__(self, like: Tensor):
        e, r, f = like.shape
        self.main, self.first, self.second = like.new_zeros(e, r, f - 2), like.new_zeros(e, r), None

    def add(self, g: Tensor, main: Tensor, first: Tensor | None, second: Tensor | None) -> None:
        """``first`` and ``second`` (E or 1, C), None where they are constants, known at the end."""
        accumulate(self.main, g, main)
        if first is None:
            self.first += g.sum(-1)
            return
        self.first += _times(g, first)
        self.second = _times(g, second) if self.second is None else self.second.add_(_times(g, second))

    def together(self, first: float | Tensor, second: float | Tensor) -> Tensor:
        """(E, R, F + 2); the constants, (E, 1), where the last columns are constant."""
        out = self.main.new_empty(*self.main.shape[:-1], self.main.shape[-1] + 2)
        out[..., :-2] = self.main
        constant = self.second is None
        out[..., -2] = self.first * first if constant else self.first
        out[..., -1] = self.first * second if constant else self.second
        return out


def _of(t: Tensor, s: slice) -> Tensor:
    """Entries of a slice, of a tensor that has one for all of them perhaps."""
    return t if t.shape[0] == 1 else t[s]


def _times(g: Tensor, column: Tensor) -> Tensor:
    """g (E, R, C) column (E or 1, C) -> (E, R)."""
    if g.shape[0] <= 4:
        return torch.stack([torch.mv(m, c) for m, c in zip(g, column.expand(g.shape[0], -1), strict=True)])
    return torch.bmm(g, column.expand(g.shape[0], -1).unsqueeze(-1)).squeeze(-1)

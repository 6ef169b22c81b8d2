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
from horosphere.kernels.blocked.augment import key_gradient, minkowski, query_gradient, tile_product, valid_weight
from horosphere.kernels.blocked.near import TINY, Near, Rows, with_own_time
from horosphere.kernels.parts import Part

if TYPE_CHECKING:
    from horosphere.kernels.blocked.chord_scores import ChordScores

ROOT2 = math.sqrt(2.0)


class PartTiles:
    """The part with tensors (E or 1, ...); ``inside``: eps is added to t by the matrix product."""

    def __init__(self, part: Part, sign: int, scores: ChordScores, shift: Tensor, inside: bool):
        self.part, self.sign, self.inside, self.curvature = part, sign, inside, scores.curvature
        work = self.work = scores.dtype
        kappa = self.kappa = part.kappa.to(part.x.device)
        self.c = torch.where(kappa != 0, kappa.abs() / 2, 1.0)
        unit = torch.where(kappa != 0, 1 / torch.where(kappa != 0, kappa.abs(), 1.0), 1.0)
        # d(d^2)/dkappa at fixed u is the bend divided by kappa^2
        self.kappa_unit = unit * unit
        # d^2 is square phi^2, and dd^2/dt is gain phi / r
        self.square = unit * (4.0 if sign > 0 else 1.0)
        self.gain = unit * (2 * ROOT2 if sign > 0 else ROOT2 if sign < 0 else 1.0)
        squares = self.square.tolist()
        alike = all(s == squares[0] for s in squares)
        self.factor = squares[0] if alike else self.square.sqrt().to(work)[:, None, None]
        c = self.c.to(work)[:, None]
        e, f = len(squares), part.x.shape[-1]
        x, y = part.x.to(work), part.y.to(work)
        self.nx, self.ny = ((p * p).sum(-1).expand(e, -1) for p in (x, y))
        self.wx = None if part.wx is None else valid_weight(part.wx.to(work))
        self.wy = None if part.wy is None else valid_weight(part.wy.to(work))
        self.scaled = (c if self.wx is None else c * self.wx).expand(e, x.shape[1])
        self.a, self.b = x.new_empty(e, x.shape[1], f + 2), y.new_empty(e, y.shape[1], f + 2)
        torch.mul(x, -2 * self.scaled.unsqueeze(-1), out=self.a[..., :f])
        if part.time_dims:
            self.a[..., : part.time_dims].neg_()
            self.a[..., f] = c * (2 / kappa).to(work)[:, None]
            self.a[..., f + 1] = 0
        else:
            torch.mul(self.nx, self.scaled, out=self.a[..., f])
            self.a[..., f + 1] = self.scaled
        if inside:
            self.a[..., f] += shift.to(work)[:, None]
        if self.wy is None:
            self.b[..., :f], self.b[..., f], self.b[..., f + 1] = y, 1.0, self.ny
        else:
            torch.mul(y, self.wy.unsqueeze(-1), out=self.b[..., :f])
            self.b[..., f] = self.wy
            torch.mul(self.ny, self.wy, out=self.b[..., f + 1])
        self.wide = sign < 0 and arcs.overflows(self.largest(), work)
        self.near = Near(self, shift) if scores.resolve else None
        self.least = max(float(shift.min()), TINY) if inside else TINY
        self.flagged: list[Rows] = []
        self.slope: Tensor | None = None
        self.bend: Tensor | None = None
        # sums of gradients by a (of the rows at hand) and b (by the first column of a block); in float64 for Rows
        self.da: Tensor | None = None
        self.db: dict[int, Tensor] = {}
        self.exact_da: Tensor | None = None
        self.exact_db: dict[int, Tensor] = {}
        self.dkappa = torch.zeros_like(kappa)

    def largest(self) -> float:
        """A bound of t; NaN where there are points without distances."""
        if not self.a.numel() or not self.b.numel():
            return 0.0
        if self.part.time_dims:
            return 2 * float(self.a.abs().amax()) * float(self.b.abs().amax()) * self.a.shape[-1]
        most = 1.0 if self.wy is None else float(self.wy.amax())
        return 2 * (float((self.scaled * self.nx).amax()) + float(self.scaled.amax()) * float(self.ny.amax())) * most

    def extent(self) -> float:
        """A bound of d^2."""
        square = float(self.square.amax())
        if self.sign > 0:
            return square * math.pi**2 / 4
        largest = self.largest()
        return square * (
            math.log1p(largest + math.sqrt(largest) * math.sqrt(largest + 2)) ** 2 if self.sign else largest
        )

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
            self.dkappa += torch.einsum("erc,erc->e", self.bend, g).to(torch.float64) * self.kappa_unit
        if self.slope is not None:
            g.mul_(self.slope)
        a, b = self.a[:, i], self.b[:, j]
        if self.da is None:
            self.da = a.new_zeros(a.shape)
        if j.start not in self.db:
            self.db[j.start] = b.new_zeros(b.shape)
        for k, rows, exact_a, exact_b in self.flagged:
            upper = g[k].index_select(0, rows).to(torch.float64)
            if self.exact_da is None:
                self.exact_da = a.new_zeros(a.shape, dtype=torch.float64)
            if j.start not in self.exact_db:
                self.exact_db[j.start] = b.new_zeros(b.shape, dtype=torch.float64)
            self.exact_da[k].index_add_(0, rows, upper @ exact_b)
            self.exact_db[j.start][k].addmm_(upper.mT, exact_a)
            g[k].index_fill_(0, rows, 0.0)
        _accumulate(self.da, g, b)
        _accumulate(self.db[j.start], g.mT, a)

    def query_gradient(self, i: slice, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of the features and weights of rows i, from the sums of all their tiles, times scale (E,)."""
        da, exact = self.da, self.exact_da
        self.da = self.exact_da = None
        if da is None:
            da = self.a[:, i].new_zeros(self.a[:, i].shape)
        x, w, c = self.part.x[:, i], None if self.wx is None else self.wx[:, i], self.c[:, None]
        da, x, w, c = self._summed(da, exact, x, w, c, scale)
        gx, gw = query_gradient(x, w, da, c, self.part.time_dims)
        if self.part.time_dims:
            gx.addcmul_(minkowski(x, self.part.time_dims), da[..., x.shape[-1] :][..., :1] * (2 * c.unsqueeze(-1)))
        return gx.to(self.work), None if gw is None else gw.to(self.work)

    def key_gradients(self, scale: Tensor) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Of the features and weights of every block of columns."""
        for start, db in self.db.items():
            j = slice(start, start + db.shape[1])
            y, w = self.part.y[:, j], None if self.wy is None else self.wy[:, j]
            db, y, w, _ = self._summed(db, self.exact_db.get(start), y, w, self.c, scale)
            gy, gw = key_gradient(y, w, db, self.part.time_dims)
            if self.part.time_dims:
                kappa = self.kappa.to(y.dtype)[:, None, None]
                gy.addcmul_(minkowski(y, self.part.time_dims), db[..., y.shape[-1] :][..., :1] * kappa)
            yield j, gy.to(self.work), None if gw is None else gw.to(self.work)

    def _summed(self, sums: Tensor, exact: Tensor | None, points: Tensor, w: Tensor | None, c: Tensor, scale: Tensor):
        """Everything in one type; sums times all constant factors."""
        dtype = self.work if exact is None else torch.float64
        if exact is None:
            points = points.to(dtype)
        else:
            sums, points = exact.add_(sums), with_own_time(points, self.kappa, self.part.time_dims)
        sums.mul_((scale * self.gain).to(dtype)[:, None, None])
        return sums, points, None if w is None else w.to(dtype), c.to(dtype)

    def kappa_gradient(self, scale: Tensor) -> Tensor:
        """(E,), from the sums over all tiles."""
        return scale * self.dkappa


def _accumulate(into: Tensor, g: Tensor, features: Tensor) -> None:
    if into.shape[0] == 1:
        into[0].addmm_(g[0], features[0])
    else:
        into.baddbmm_(g, features)

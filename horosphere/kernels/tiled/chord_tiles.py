r"""One chord part of a group of batch entries: t = |kappa| u / 2 of a tile, its arc, and the gradient to the points.

Augmented features as in horosphere.kernels.chord.augment, formed in the type of the tiles. With r = sqrt(t + t^2/2)

    kappa < 0:  phi = log(1 + t + sqrt2 r),      d^2 = phi^2 / |kappa|,     dd^2/dt = (sqrt2 / |kappa|) phi / r
    kappa > 0:  phi = asin sqrt(t/2),            d^2 = 4 phi^2 / kappa,     dd^2/dt = (2 sqrt2 / kappa) phi / r

with t - t^2/2 in r for kappa > 0; constant factors are left to the points. With a time coordinate the gradient by the
features is that of <x - y, x - y>_J, where the product has 2/kappa for <x, x>_J + <y, y>_J: it differs from that of the
product by a multiple of J x, across the hyperboloid, and does not cancel when it is pulled back to the points.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.chord import arcs
from horosphere.kernels.tiled.chord_features import ROOT2, ChordFeatures, alike
from horosphere.kernels.tiled.chord_gradients import Block, ChordGradients
from horosphere.kernels.tiled.near import Near, Unresolved
from horosphere.kernels.tiled.products import Blocks, Buffers, multiply

if TYPE_CHECKING:
    from horosphere.kernels.tiled.chord_scores import ChordScores


class PartTiles:
    """Entries s of a part's features; ``inside``: eps, shift (E,), is added to t by the matrix product."""

    sums: ChordGradients  # where gradients are wanted: given before the first of them

    def __init__(self, features: ChordFeatures, s: slice, scores: ChordScores, shift: Tensor, inside: bool):
        self.features, self.s, self.inside, self.curvature = features, s, inside, scores.curvature
        self.part, self.sign, self.work = features.part, features.sign, features.work
        self.a, self.b, self.e = features.a[s], features.b[s], s.stop - s.start
        if inside:
            torch.add(features.nx[s], shift.to(self.work)[:, None], out=self.a[..., -2])
        squares = features.square[s]
        roots = [math.sqrt(q) for q in squares]
        self.factor = squares[0] if alike(squares) else self.a.new_tensor(roots)[:, None, None]
        self.wide = self.sign < 0 and any(arcs.overflows(t, self.work) for t in features.largest[s])
        self.near = Near(features, s, shift, inside) if scores.resolve else None
        self.least = max(float(shift.min()), _numerics.SMALLEST_CHORD2) if inside else _numerics.SMALLEST_CHORD2
        self.flagged: list[Unresolved] = []
        self.slope: Tensor | None = None
        self.curvature_slope: Tensor | None = None
        # sums of gradients by a, of the rows at hand, and by b, of blocks by their first column
        self.da: Block | None = None
        self.db: dict[int, Block] = {}
        self.rows, self.columns = Blocks(self.a, self.e), Blocks(self.b, self.e, transposed=True)
        # what gradients are summed over: without weights the last two columns are constants
        weighted = features.wy is not None
        self.keys, self.queries = (Blocks(t if weighted else t[..., :-2], self.e) for t in (self.b, self.a))

    def product(self, i: slice, j: slice, buffers: Buffers, k: int) -> Tensor:
        """t (E, R, C) in buffer k, in its range; plus eps where that is inside."""
        t, into = buffers.tile(k, self.e, i.stop - i.start, j.stop - j.start)
        multiply(self.rows[i], self.columns[j], into)
        self.flagged, self.low = [], math.inf
        if self.near is not None and not self.near.never:
            self.low = t.amin().item()
            if not self.near.resolved(self.low, i, j):
                self.flagged = self.near.rework_(t, i, j)
                self.low = 0.0
        elif self.near is None or not self.inside:
            self.low = t.amin().item()
        if not self.low >= self.least:
            t.clamp_(min=self.least)
        return t

    def arc_(self, t: Tensor, buffers: Buffers, k: int, keep: bool) -> Tensor:
        """phi in place of t; ``keep`` makes and keeps the slope, in buffer k."""
        scratch = buffers.tile(k, *t.shape)[0]
        if self.curvature:
            self.curvature_slope = arcs.curvature_slope(t, self.sign, True) if keep else None
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
        if not keep:
            self.slope = None
            return t.mul_(0.5).sqrt_().asin_()
        root = self._root(t, scratch)
        phi = t.mul_(0.5).sqrt_().asin_()
        self.slope = torch.div(phi, root, out=root)
        if antipodal is not None:
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

    def backward(self, i: slice, j: slice, g: Tensor) -> None:
        """Add up the gradients of a and b from dL/d(d^2), g (E, R, C), of the last tile, whose slope was kept."""
        if self.curvature_slope is not None:
            self.sums.curvature_slope[self.s] += torch.einsum("erc,erc->e", self.curvature_slope, g).to(torch.float64)
        if self.slope is not None:
            g.mul_(self.slope)
        if self.da is None:
            self.da = self.sums.queries.block(self.s, i)
        db = self.db.get(j.start)
        if db is None:
            db = self.db[j.start] = self.sums.keys.block(self.s, j)
        for some in self.flagged:
            self.sums.take_unresolved(self.s, i, j, some, g)
        self.da.add(g, self.keys[j])
        db.add(g.mT, self.queries[i])

    def rows_done(self, scale: Tensor) -> None:
        self.sums.scale[self.s] = scale
        if self.da is not None:
            self.da.store()
        self.da = None

    def finish(self) -> None:
        for block in self.db.values():
            block.store()

"""Squared distances of chord parts, tile by tile, and what their gradient does to the points: a geometry of the
streaming loops, see horosphere.kernels.tiled.scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere.kernels.chord.augment import batch_scalars
from horosphere.kernels.chord.pair import ChordPair
from horosphere.kernels.tiled.chord_features import ChordFeatures
from horosphere.kernels.tiled.chord_gradients import ChordGradients
from horosphere.kernels.tiled.chord_tiles import PartTiles
from horosphere.kernels.tiled.entries import PartEntries
from horosphere.kernels.tiled.products import Buffers
from horosphere.kernels.tiled.scores import Group, Scores
from horosphere.kernels.tiled.workspace import Workspace

# Numbers of augmented features that are made at a time where a group has fewer: 8 MiB in float32.
READY = 2**21


class ChordScores(Scores):
    """d^2 + eps of chord parts.

    Args:
        parts: of both sides.
        batch: the batch dimensions of the result.
        dtype: the type of tiles.
        resolve: work rows with unresolved pairs again in float64, see horosphere.kernels.tiled.near.
        curvature: whether the gradient of kappa is wanted.
    """

    signs: list[tuple[int, ...]]

    def __init__(
        self,
        parts: Sequence[ChordPair],
        batch: torch.Size,
        dtype: torch.dtype,
        *,
        resolve: bool,
        curvature: bool = False,
    ):
        self.parts, self.batch, self.dtype = parts, batch, dtype
        self.resolve, self.curvature = resolve, curvature
        self.n, self.m = parts[0].x.shape[-2], parts[0].y.shape[-2]
        self.device = parts[0].x.device
        self.tensors = 2 if len(parts) == 1 else 3
        self.kappas = [batch_scalars(p.kappa, batch).to(self.device) for p in parts]
        self.signs = list(zip(*([(k > 0) - (k < 0) for k in kappa.tolist()] for kappa in self.kappas), strict=True))
        self.sides = [PartEntries.of(p, batch) for p in parts]
        self.into: list[PartEntries] = []
        self.slopes: list[Tensor] = []
        self.ready = slice(0, 0)
        self.features: list[ChordFeatures] = []
        self.sums: list[ChordGradients] = []
        self.workspace = Workspace(dtype, self.device)

    def group(self, e: slice, shift: Tensor) -> ChordGroup:
        self.make_ready(e)
        for k, f in enumerate(self.features):
            if not f.augmented:
                shapes = (f.entries, self.n), (f.entries, self.m)
                width = f.part.x.shape[-1] + 2
                f.augment(*(self.workspace(f"features {k} {at}", *rows, width) for at, rows in enumerate(shapes)))
        s = slice(e.start - self.ready.start, e.stop - self.ready.start)
        return ChordGroup(self, e, s, shift)

    def make_ready(self, e: slice) -> None:
        """Features of these entries and of some that follow, and where their gradients are summed."""
        if self.ready.start <= e.start and e.stop <= self.ready.stop:
            return
        self._finish()
        each = sum((self.n + self.m) * (p.x.shape[-1] + 2) for p in self.parts)
        size = e.stop - e.start  # whole groups, which are of one size
        last = min(len(self.signs), e.start + size * max(1, READY // max(1, size * each)))
        stop = e.stop
        while stop < last and self.signs[stop] == self.signs[e.start]:
            stop += 1
        self.ready, self.features = slice(e.start, stop), []
        signs = self.signs[e.start]
        for part, sides, kappa, sign in zip(self.parts, self.sides, self.kappas, signs, strict=True):
            one = sides.part(self.ready, kappa[self.ready], part.time_dims)
            self.features.append(ChordFeatures(one, sign, self.dtype))
        self.sums = [ChordGradients(f, into, self.ready) for f, into in zip(self.features, self.into, strict=False)]

    def _finish(self) -> None:
        for sums, slope in zip(self.sums, self.slopes, strict=False):
            sums.finish()
            slope[self.ready] += sums.scale * sums.curvature_slope * sums.curvature_unit
        self.sums = []

    def prepare_gradients(self) -> None:
        self.into = [sides.zeros(self.dtype) for sides in self.sides]
        self.slopes = [torch.zeros_like(k) for k in self.kappas]

    def gradients(self) -> list[Tensor]:
        """Of x, y, kappa and any weights, part by part, as they are packed."""
        self._finish()
        self.workspace.back()
        found = []
        for part, into, slope in zip(self.parts, self.into, self.slopes, strict=True):
            gx, gy, *weights = (g.t for g in into if g is not None)
            kappa = slope.view(self.batch).sum_to_size(part.kappa.shape)
            likes = (part.x, part.y, part.kappa, *((part.wx, part.wy) if weights else ()))
            found += [g.to(like) for g, like in zip((gx, gy, kappa, *weights), likes, strict=True)]
        return found


class ChordGroup(Group):
    """Some batch entries, whose curvatures have one sign in every part."""

    def __init__(self, scores: ChordScores, e: slice, s: slice, shift: Tensor):
        self.scores, self.e, self.s, self.features = scores, e, s, scores.features
        one = self.features[0]
        # flat features take eps into the matrix product
        self.inside = len(self.features) == 1 and one.sign == 0 and one.wx is None and not scores.curvature
        self.parts = [PartTiles(f, s, scores, shift, self.inside) for f in self.features]
        for part, sums in zip(self.parts, scores.sums, strict=False):
            part.sums = sums
        self.shift = shift.to(scores.dtype)[:, None, None]

    def extent(self) -> float:
        return sum(f.extent(self.s) for f in self.features)

    def tile(self, i: slice, j: slice, buffers: Buffers, keep: bool) -> Tensor:
        if len(self.parts) == 1:
            (part,) = self.parts
            t = part.product(i, j, buffers, 0)
            if self.inside:
                return t
            return part.add_to(self.shift, part.arc_(t, buffers, 1, keep), out=t)
        self.buffers = buffers
        z = buffers.tile(0, self.e.stop - self.e.start, i.stop - i.start, j.stop - j.start)[0].copy_(self.shift)
        for part in self.parts:
            t = part.product(i, j, buffers, 1)
            part.add_to(z, part.arc_(t, buffers, 2, False), out=z)
        return z

    def backward(self, i: slice, j: slice, g: Tensor) -> None:
        if len(self.parts) == 1:
            self.parts[0].backward(i, j, g)
            return
        for part in self.parts:  # a part's tile is made again: kept ones would leave the cache
            part.arc_(part.product(i, j, self.buffers, 1), self.buffers, 2, True)
            part.backward(i, j, self.buffers.tile(1, *g.shape)[0].copy_(g))

    def rows_done(self, i: slice, scale: Tensor) -> None:
        for part in self.parts:
            part.rows_done(scale)

    def finish(self, scale: Tensor) -> None:
        for part in self.parts:
            part.finish()

"""Chords as Triton kernels read them: tiles of squared distances, and the gradient of each point.

Augmented features (horosphere.kernels.chord.augment) give t = |kappa| u / 2 of resolved pairs in one product, features
in float64 that of the others by differences. Features of all parts of a product lie one below the other. With
g = dL/d(d^2), what a part's own points get is

    sum_j r_ij (x_i - x_j),   r_ij = g d(d^2)/dt |kappa| w_i w_j / 2

of resolved pairs from one product of the tile with x_j, of the others from differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.chord.augment import augment, batch_scalars, flat, minkowski, valid_weight
from horosphere.kernels.chord.pair import ChordPair
from horosphere.kernels.tiled.near import with_own_time
from horosphere.kernels.triton.arcs import curvature_slope, slope, square
from horosphere.kernels.triton.tiles import both, columns_of, inside, product, some, terms_of


class ChordSide(NamedTuple):
    """What kernels read of the queries or of the keys; of B entries, P parts, F features of all parts, K augmented."""

    augmented: Tensor  # (B, K, N)
    features: Tensor  # (B, F, N)
    weights: Tensor  # (B, P, N), times |kappa| / 2 on the queries' side
    norms: Tensor  # (B, P, N), squared norms times theta

    def entries(self, e: slice) -> ChordSide:
        """Of some batch entries."""
        return ChordSide(*(t[e] for t in self))


class Chords(NamedTuple):
    """The side that has the rows of a tile and the side that has its columns."""

    own: ChordSide
    other: ChordSide
    unit: Tensor  # (B, P), 1/|kappa|
    length: int
    others: int


class ChordSums(NamedTuple):
    """Gradients of what one part's rows own, as the kernels sum them."""

    points: Tensor  # (B, N, features of the part)
    weights: Tensor  # (B, N), sum of g d(d^2)/dt t
    kappa: Tensor  # (B, N), where curvature is wanted

    def entries(self, e: slice) -> ChordSums:
        """Of some batch entries."""
        return ChordSums(*(t[e] for t in self))


class ChordShape(NamedTuple):
    """What is compiled into a kernel."""

    features: tuple[int, ...]  # of every part
    signs: tuple[int, ...]  # of the parts' curvatures
    times: tuple[int, ...]  # time coordinates of every part
    all: int  # features of all parts
    terms: int  # of series
    resolve: bool
    part: int = -1  # whose gradient is wanted
    before: int = 0  # features of the parts before it
    slabs: int = 1  # blocks of features, each summed by a program of its own
    curvature: bool = False  # whether its gradient is wanted
    precision: str = "ieee"  # of products with sums


@triton.jit
def side_of_entry(side, entry, length, SHAPE: tl.constexpr):
    """Where a batch entry has one side."""
    few, every = entry * len(SHAPE.signs), entry * SHAPE.all
    return ChordSide(
        side.augmented + (every + 2 * few) * length,
        side.features + every * length,
        side.weights + few * length,
        side.norms + few * length,
    )


@triton.jit
def of_entry(space, entry, SHAPE: tl.constexpr):
    """Where a batch entry has its points."""
    length = tl.cast(space.length, tl.int64)  # where it is 1 the compiler is given a constant, which has no .to
    others = tl.cast(space.others, tl.int64)
    own, other = side_of_entry(space.own, entry, length, SHAPE), side_of_entry(space.other, entry, others, SHAPE)
    return Chords(own, other, space.unit + entry * len(SHAPE.signs), length, others)


@triton.jit
def differences(own, other, tile, F: tl.constexpr, TIME: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """(s, difference of times) of a tile, from differences of features in float64; see horosphere.kernels.reference."""
    s = tl.zeros((R, C), tl.float64)
    along = tl.zeros((R, C), tl.float64)
    a = own + TIME * tile.length
    b = other + TIME * tile.others
    for _ in range(0, F - TIME):
        left = tl.load(a + tile.rows, mask=tile.rows < tile.length, other=0.0).to(tl.float64)
        right = tl.load(b + tile.columns, mask=tile.columns < tile.others, other=0.0).to(tl.float64)
        delta = left[:, None] - right[None, :]
        s += delta * delta
        if TIME:
            along += delta * (left[:, None] + right[None, :])
        a += tile.length
        b += tile.others
    if TIME:
        left = tl.load(own + tile.rows, mask=tile.rows < tile.length, other=1.0).to(tl.float64)
        right = tl.load(other + tile.columns, mask=tile.columns < tile.others, other=1.0).to(tl.float64)
        along = along / (left[:, None] + right[None, :])
        s -= along * along
    return s, along  # [R, C]


@triton.jit
def score(space, eps, tile, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """(d^2 of a tile [R, C], which pairs were worked from differences, t of the wanted part, its weights' product)."""
    total = tl.zeros((R, C), space.unit.dtype.element_ty)
    doubt = total
    chosen = total
    scale = total
    a, b = space.own.augmented, space.other.augmented
    for p in tl.static_range(len(SHAPE.signs)):
        left, right = both(space.own.weights + p * tile.length, space.other.weights + p * tile.others, tile)
        weight = left * right
        unit = tl.load(space.unit + p)
        t, d2 = square(product(a, b, tile, SHAPE.features[p] + 2, R, C), unit, SHAPE.signs[p], SHAPE.terms)
        total += d2
        if SHAPE.resolve:
            left, right = both(space.own.norms + p * tile.length, space.other.norms + p * tile.others, tile)
            change = tl.where(t > 0, d2 / tl.where(t > 0, t, 1.0), unit * 2 if SHAPE.signs[p] != 0 else 1.0)
            doubt += change * weight * (left + right)
        if p == SHAPE.part:
            chosen = t
            scale = tl.zeros((R, C), total.dtype) + weight
        a += (SHAPE.features[p] + 2) * tile.length
        b += (SHAPE.features[p] + 2) * tile.others
    near = total < 0
    if SHAPE.resolve:
        near = (total + eps < doubt) & inside(tile)
        if some(near):
            exact = tl.zeros((R, C), total.dtype)
            x, y = space.own.features, space.other.features
            for p in tl.static_range(len(SHAPE.signs)):
                left, right = both(space.own.weights + p * tile.length, space.other.weights + p * tile.others, tile)
                s, _ = differences(x, y, tile, SHAPE.features[p], SHAPE.times[p], R, C)
                t = (s * (left * right)).to(total.dtype)
                t, d2 = square(t, tl.load(space.unit + p), SHAPE.signs[p], SHAPE.terms)
                exact += d2
                if p == SHAPE.part:
                    chosen = tl.where(near, t, chosen)
                x += SHAPE.features[p] * tile.length
                y += SHAPE.features[p] * tile.others
            total = tl.where(near, exact, total)
    return total, near, chosen, scale


@triton.jit
def start(sums, space, entry, SHAPE: tl.constexpr, R: tl.constexpr, F: tl.constexpr):
    """(where gradients go, sums of a block of rows: of points [R, F], and three of numbers [R])."""
    none = tl.zeros((R,), space.unit.dtype.element_ty)
    return sums, (tl.zeros((R, F), none.dtype), none, none, none)


@triton.jit
def add(
    state, sums, space, g, found, tile, slab, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, F: tl.constexpr
):  # fmt: skip
    """The sums with what g = dL/d(d^2) [R, C] of a tile gives to the features from slab on."""
    points, far_sum, t_sum, kappa_sum = state
    _d2, near, t, scale = found
    size: tl.constexpr = SHAPE.features[SHAPE.part]
    sign: tl.constexpr = SHAPE.signs[SHAPE.part]
    time: tl.constexpr = SHAPE.times[SHAPE.part]
    proper = t > 0  # coincident points and antipodes have gradient 0
    if sign > 0:
        proper = proper & (t < 2)
    safe = tl.where(proper, t, 1.0)
    if SHAPE.curvature:
        kappa_sum += tl.sum(tl.where(proper, g * curvature_slope(safe, sign, True, SHAPE.terms), 0.0), 1)
    g = tl.where(proper, g * slope(safe, sign, True, SHAPE.terms), 0.0)
    if sign != 0:
        g = g * tl.load(space.unit + SHAPE.part)
    t_sum += tl.sum(g * safe, 1)
    g = g * scale
    far = tl.where(near, 0.0, g)
    far_sum += tl.sum(far, 1)
    x = space.own.features + SHAPE.before * tile.length
    y = space.other.features + SHAPE.before * tile.others
    feature = slab + tl.arange(0, F)
    there = (tile.columns < tile.others)[:, None] & (feature < size)[None, :]
    right = tl.load(y + feature[None, :] * tile.others + tile.columns[:, None], mask=there, other=0.0)  # [C, F]
    points -= tl.dot(far, right, input_precision=SHAPE.precision, out_dtype=points.dtype)
    if SHAPE.resolve:
        if some(near):
            g = tl.where(near, g, 0.0)
            if time:
                _s, step = differences(x, y, tile, size, time, R, C)
            for k in range(0, tl.minimum(F, size - slab)):
                own, other = x + (slab + k) * tile.length, y + (slab + k) * tile.others
                left = tl.load(own + tile.rows, mask=tile.rows < tile.length, other=0.0).to(tl.float64)
                one = tl.load(other + tile.columns, mask=tile.columns < tile.others, other=0.0).to(tl.float64)
                delta = left[:, None] - one[None, :]
                if time:
                    delta = tl.where(slab + k == 0, step, delta)
                column = tl.sum(g * delta.to(g.dtype), 1)
                points += tl.where((feature == slab + k)[None, :], column[:, None], 0.0)
    return points, far_sum, t_sum, kappa_sum


@triton.jit
def store(state, sums, space, entry, rows, slab, SHAPE: tl.constexpr, F: tl.constexpr):
    """Write the sums of a block of rows."""
    points, far_sum, t_sum, kappa_sum = state
    size: tl.constexpr = SHAPE.features[SHAPE.part]
    feature = slab + tl.arange(0, F)[None, :]
    there = (rows < space.length)[:, None] & (feature < size)
    own = space.own.features + SHAPE.before * space.length
    x = tl.load(own + feature * space.length + rows[:, None], mask=there, other=0.0)  # [R, F]
    row = entry * space.length + rows
    tl.store(sums.points + row[:, None] * size + feature, points + x * far_sum[:, None], mask=there)
    if slab == 0:
        tl.store(sums.weights + row, t_sum, mask=rows < space.length)
        if SHAPE.curvature:
            tl.store(sums.kappa + row, kappa_sum, mask=rows < space.length)


def runs(signs: Sequence[tuple[int, ...]]) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Batch entries that one launch serves, and their signs: those of the parts' curvatures are compiled."""
    first = 0
    for alike, run in groupby(signs):
        last = first + len(list(run))
        yield slice(first, last), alike
        first = last


class Points:
    """Chords of both sides in the layout of the kernels, and their gradients.

    Args:
        parts: the chords.
        batch: the batch dimensions of the result.
        dtype: type of the kernels' numbers.
        resolve: whether pairs that the product does not resolve are worked from differences.
        curvature: whether gradients of curvatures are wanted.
    """

    of_entry, score, start, add, store = of_entry, score, start, add, store
    sums_values = False

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
        self.n, self.m, self.count = parts[0].x.shape[-2], parts[0].y.shape[-2], len(parts)
        self.sizes = tuple(p.x.shape[-1] for p in parts)
        self.resolve, self.curvature = resolve, curvature
        self.kappas = [batch_scalars(p.kappa, batch).to(parts[0].x.device) for p in parts]
        made = [augment(p, batch, dtype) for p in parts]
        self.signs = list(zip(*(a.signs for a in made), strict=True))
        self.unit = torch.cat([a.factor.view(-1, 1) ** 2 for a in made], 1).contiguous()
        scales = [torch.where(k != 0, k.abs() / 2, 1.0)[:, None] for k in self.kappas]
        queries = self._side([a.a for a in made], [(p.x, p.wx) for p in parts], scales)
        ones = [torch.ones_like(s) for s in scales]
        self.sides = queries, self._side([a.b for a in made], [(p.y, p.wy) for p in parts], ones)
        self._found: list[ChordSums] = []

    def _side(
        self,
        augmented: Sequence[Tensor],
        points: Sequence[tuple[Tensor, Tensor | None]],
        scales: Sequence[Tensor],
    ) -> ChordSide:
        features, weights, norms = [], [], []
        for part, (x, w), scale, kappa in zip(self.parts, points, scales, self.kappas, strict=True):
            x = with_own_time(flat(x, self.batch, 2), kappa, part.time_dims)
            w = scale.expand(x.shape[:2]) if w is None else scale * valid_weight(flat(w, self.batch, 1).double())
            features.append(x)
            weights.append(w)
            norms.append(_numerics.weight_theta(x.shape[-1], self.dtype) * (x * x).sum(-1))
        return ChordSide(
            torch.cat(list(augmented), -1).mT.contiguous(),
            torch.cat(features, -1).to(self.dtype).mT.contiguous(),
            torch.stack(weights, 1).to(self.dtype).contiguous(),
            torch.stack(norms, 1).to(self.dtype).contiguous(),
        )

    def lengths(self, swapped: bool) -> tuple[int, int]:
        """Rows and columns; here and below ``swapped``: the keys own the rows."""
        return (self.m, self.n) if swapped else (self.n, self.m)

    def space(self, swapped: bool, e: slice) -> Chords:
        """What kernels read of some batch entries."""
        own, other = (side.entries(e) for side in (self.sides[::-1] if swapped else self.sides))
        return Chords(own, other, self.unit[e], *self.lengths(swapped))

    def runs(self, swapped: bool, precision: str, part: int = -1) -> Iterator[tuple[slice, ChordShape]]:
        """Batch entries that one launch serves, and what is compiled: curvatures of equal signs."""
        times, terms = tuple(p.time_dims for p in self.parts), terms_of(self.dtype)
        for run, signs in runs(self.signs):
            shape = ChordShape(self.sizes, signs, times, sum(self.sizes), terms, self.resolve, precision=precision)
            if part >= 0:
                slabs = triton.cdiv(self.sizes[part], self.columns(part))
                curvature = self.curvature and not swapped
                shape = shape._replace(part=part, before=sum(self.sizes[:part]), slabs=slabs, curvature=curvature)
            yield run, shape

    def columns(self, part: int) -> int:
        """Features that a program sums."""
        return columns_of(self.sizes[part], self.dtype)

    def sums(self, swapped: bool, part: int) -> ChordSums:
        """Zeros for the gradient of one part of the rows; :meth:`gradients` expects each part's queries, then keys."""
        entries, length = len(self.signs), self.lengths(swapped)[0]
        points, *numbers = (self.unit.new_zeros(entries, length, *f) for f in ((self.sizes[part],), (), ()))
        self._found.append(ChordSums(points, *numbers))
        return self._found[-1]

    def gradients(self) -> list[Tensor]:
        """Of the packed tensors."""
        found: list[Tensor] = []
        for part, kappa, *sums in zip(self.parts, self.kappas, self._found[::2], self._found[1::2], strict=True):
            power = torch.where(kappa != 0, kappa.abs(), 1.0) ** 2
            gradients = [2 * minkowski(s.points, part.time_dims) for s in sums]
            gradients.append(sums[0].kappa.sum(-1, dtype=torch.float64) / power)
            likes = [part.x, part.y, part.kappa]
            for s, w in zip(sums, (part.wx, part.wy), strict=True):
                if w is not None:
                    gradients.append(s.weights / flat(w, self.batch, 1))
                    likes.append(w)
            found += [
                g.view((*self.batch, *g.shape[1:])).sum_to_size(like.shape).to(like)
                for g, like in zip(gradients, likes, strict=True)
            ]
        return found

"""Per-token metrics as Triton kernels read them: tiles of squared distances, and the gradient of each token.

Features are those of MetricTiles, K = D + 2 of points and E = D + 1 of the columns of metrics. Gradients are sums kept
in memory, where no other program has their rows: they are too many for registers, and their order is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.low_rank.pair import MetricPair
from horosphere.kernels.tiled.metric_tiles import MetricTiles
from horosphere.kernels.tiled.metric_tiles import Side as Gradients
from horosphere.kernels.triton.tiles import add as add_rows
from horosphere.kernels.triton.tiles import (
    add_products,
    add_products_singly,
    both,
    product,
    some,
)

# Features that a product with sums takes at a time.
SLAB = 32


class MetricSide(NamedTuple):
    """What kernels read of one side, of B entries and R columns of its metric; R = 0 where it has none."""

    features: Tensor  # (B, K, N)
    scales: Tensor  # (B, N)
    columns: Tensor  # (R, B, E, N)
    points: Tensor  # (B, E, N)
    norms: Tensor  # (B, N), |q|^2, and the limits of MetricTiles; both are read where pairs are resolved
    limits: Tensor  # (B, N)
    rank: int  # R
    step: int  # from one column of a metric to the next

    def entries(self, e: slice) -> MetricSide:
        """Of some batch entries."""
        return self._replace(
            features=self.features[e], scales=self.scales[e], columns=self.columns[:, e], points=self.points[e],
            norms=self.norms[e], limits=self.limits[e],
        )  # fmt: skip


class Metrics(NamedTuple):
    """The side that has the rows of a tile and the side that has its columns."""

    own: MetricSide
    other: MetricSide
    dim: int  # D
    length: int
    others: int


class MetricSums(NamedTuple):
    """Gradients of what the rows own, as the kernels sum them; zero on entry."""

    features: Tensor  # (B, K, N)
    scales: Tensor  # (B, N), of the scale's square
    columns: Tensor  # (R, B, E, N), half the gradient
    points: Tensor  # (B, E, N), half the gradient, without the last feature

    def entries(self, e: slice) -> MetricSums:
        """Of some batch entries."""
        return MetricSums(self.features[e], self.scales[e], self.columns[:, e], self.points[e])


class MetricShape(NamedTuple):
    """What is compiled into a kernel."""

    own: bool  # whether the metrics of the rows measure
    other: bool
    share: float  # what each metric counts
    swapped: bool  # whether the rows are keys
    resolve: bool
    precision: str  # of products with sums
    slabs: int = 1  # blocks of features that have a program of their own


@triton.jit
def side_of_entry(side, entry, dim, length):
    """Where a batch entry has one side."""
    row, point = entry * length, entry * (dim + 1) * length
    return MetricSide(
        side.features + entry * (dim + 2) * length, side.scales + row, side.columns + point, side.points + point,
        side.norms + row, side.limits + row, side.rank, tl.cast(side.step, tl.int64),
    )  # fmt: skip


@triton.jit
def of_entry(space, entry, SHAPE: tl.constexpr):
    """Where a batch entry has its points and metrics."""
    length = tl.cast(space.length, tl.int64)  # where it is 1 the compiler is given a constant, which has no .to
    others = tl.cast(space.others, tl.int64)
    own, other = (
        side_of_entry(space.own, entry, space.dim, length), side_of_entry(space.other, entry, space.dim, others)
    )  # fmt: skip
    return Metrics(own, other, space.dim, length, others)


@triton.jit
def scales(space, tile, SHAPE: tl.constexpr):
    """What |delta|^2 of a tile is multiplied with, [R or 1, C or 1]."""
    one, two = both(space.own.scales, space.other.scales, tile)
    if SHAPE.own and SHAPE.other:
        return one + two
    elif SHAPE.own:
        return one
    else:
        return two


@triton.jit
def chord(space, tile, R: tl.constexpr, C: tl.constexpr):
    """|delta|^2 of a tile."""
    u = product(space.own.features, space.other.features, tile, space.dim + 2, R, C)
    return tl.where(u < 0, 0.0, u)  # [R, C]


@triton.jit
def distances(space, tile, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """(d^2 of a tile in product form, |delta|^2, what that is multiplied with)."""
    own, other = space.own, space.other
    u = chord(space, tile, R, C)
    factor = scales(space, tile, SHAPE)
    d2 = u * factor
    for r in range(0, own.rank):
        t = product(own.columns + r * own.step, other.points, tile, space.dim + 1, R, C)
        d2 += t * t
    for r in range(0, other.rank):
        t = product(own.points, other.columns + r * other.step, tile, space.dim + 1, R, C)
        d2 += t * t
    return d2, u, factor


@triton.jit
def difference(space, f, tile, SHAPE: tl.constexpr):
    """own - other of a tile in one feature, in float64: the queries' features hold -2 q, the keys' k, both exact."""
    own, other = space.own.features + f * tile.length, space.other.features + f * tile.others
    left = tl.load(own + tile.rows, mask=tile.rows < tile.length, other=0.0).to(tl.float64)
    right = tl.load(other + tile.columns, mask=tile.columns < tile.others, other=0.0).to(tl.float64)
    if SHAPE.swapped:
        right = right * -0.5
    else:
        left = left * -0.5
    return left[:, None] - right[None, :]  # [R, C]


@triton.jit
def along(space, column, OWN: tl.constexpr, tile, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """One column of the metrics times the difference of a tile, in float64; OWN: those of the rows."""
    total = tl.zeros((R, C), tl.float64)
    for f in range(0, space.dim):
        delta = difference(space, f, tile, SHAPE)
        if OWN:
            u = tl.load(column + f * tile.length + tile.rows, mask=tile.rows < tile.length, other=0.0)
            total += delta * u.to(tl.float64)[:, None]
        else:
            u = tl.load(column + f * tile.others + tile.columns, mask=tile.columns < tile.others, other=0.0)
            total += delta * u.to(tl.float64)[None, :]
    return total


@triton.jit
def exact_distances(space, factor, tile, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """d^2 of a tile from differences of points, in float64."""
    total = tl.zeros((R, C), tl.float64)
    for f in range(0, space.dim):
        delta = difference(space, f, tile, SHAPE)
        total += delta * delta
    total = total * factor.to(tl.float64)
    for r in range(0, space.own.rank):
        t = along(space, space.own.columns + r * space.own.step, True, tile, SHAPE, R, C)
        total += t * t * SHAPE.share
    for r in range(0, space.other.rank):
        t = along(space, space.other.columns + r * space.other.step, False, tile, SHAPE, R, C)
        total += t * t * SHAPE.share
    return total


@triton.jit
def score(space, eps, tile, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """(d^2 of a tile [R, C], which pairs were worked from differences, and of the product form |delta|^2 and its
    factor).
    """
    d2, u, factor = distances(space, tile, SHAPE, R, C)
    near = d2 < 0
    if SHAPE.resolve:
        left, right = both(space.own.norms, space.other.norms, tile)
        one, two = both(space.own.limits, space.other.limits, tile)
        near = (d2 + eps >= (left + right) * (one + two)) == 0
        # inside(tile), which spills 120 bytes on sm_80 when it is taken in one
        near = near & (tile.rows < tile.length)[:, None] & (tile.columns < tile.others)[None, :]
        if some(near):
            exact = exact_distances(space, factor, tile, SHAPE, R, C)
            d2 = tl.where(near, exact.to(d2.dtype), d2)
    return d2, near, u, factor


@triton.jit
def start(sums, space, entry, SHAPE: tl.constexpr, R: tl.constexpr, F: tl.constexpr):
    """(where gradients go, at this batch entry but for the scales, that of the scales [R])."""
    point = entry * (space.dim + 1) * space.length
    sums = MetricSums(
        sums.features + entry * (space.dim + 2) * space.length,
        sums.scales,
        sums.columns + point,
        sums.points + point,
    )
    return sums, tl.zeros((R,), space.own.scales.dtype.element_ty)


@triton.jit
def add_far(sums, space, g, factor, tile, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, F: tl.constexpr):
    """Add what g = dL/d(d^2) of a tile gives to its rows in product form; the scales are the caller's."""
    own, other, dim = space.own, space.other, space.dim
    h = g * factor
    add_products(sums.features, h, other.features, tile, dim, SHAPE, F)
    add_products_singly(sums.features + dim * tile.length, h, other.features + dim * tile.others, tile, 2)
    for r in range(0, own.rank):
        into = sums.columns + r * own.step
        h = g * product(own.columns + r * own.step, other.points, tile, dim + 1, R, C)
        add_products(into, h, other.points, tile, dim, SHAPE, F)
        add_products_singly(into + dim * tile.length, h, other.points + dim * tile.others, tile, 1)
    for r in range(0, other.rank):
        column = other.columns + r * other.step
        h = g * product(own.points, column, tile, dim + 1, R, C)
        add_products(sums.points, h, column, tile, dim, SHAPE, F)


@triton.jit
def add_near(sums, space, g, factor, tile, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, F: tl.constexpr):
    """Add what g = dL/d(d^2) of a tile gives to its rows, from differences of points; sums of g |delta|^2 are returned.

    What points get joins the sums of the columns' metrics, which are taken 2 sqrt(share) times, and what metrics get
    leaves alone their last feature, which is what the product form is corrected by.
    """
    own, other = space.own, space.other
    root: tl.constexpr = SHAPE.share**0.5
    wide = g.to(tl.float64)
    flat = wide * factor.to(tl.float64) / root
    square = tl.zeros((R, C), tl.float64)
    for f in range(0, space.dim):
        delta = difference(space, f, tile, SHAPE)
        square += delta * delta
        add_rows(sums.points + f * tile.length, tl.sum(flat * delta, 1), tile.rows, tile.length)
    for r in range(0, own.rank):
        column = own.columns + r * own.step
        h = wide * along(space, column, True, tile, SHAPE, R, C)
        total = tl.sum(h, 1) * root
        for f in range(0, space.dim):
            delta = difference(space, f, tile, SHAPE)
            into = sums.columns + r * own.step + f * tile.length
            add_rows(into, tl.sum(h * delta, 1) * SHAPE.share, tile.rows, tile.length)
            u = tl.load(column + f * tile.length + tile.rows, mask=tile.rows < tile.length, other=0.0)
            add_rows(sums.points + f * tile.length, u.to(tl.float64) * total, tile.rows, tile.length)
    for r in range(0, other.rank):
        column = other.columns + r * other.step
        h = wide * along(space, column, False, tile, SHAPE, R, C) * root
        add_products(sums.points, h.to(g.dtype), column, tile, space.dim, SHAPE, F)
    return tl.sum(wide * square, 1).to(g.dtype)


@triton.jit
def add(
    state, sums, space, g, found, tile, slab, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, F: tl.constexpr
):  # fmt: skip
    """Add what g = dL/d(d^2) [R, C] of a tile gives to its rows; the gradient of the scales is returned."""
    _d2, near, u, factor = found
    if SHAPE.resolve:
        if some(near):
            state += add_near(sums, space, tl.where(near, g, 0.0), factor, tile, SHAPE, R, C, F)
        g = tl.where(near, 0.0, g)
    if SHAPE.own:
        state += tl.sum(g * u, 1)
    add_far(sums, space, g, factor, tile, SHAPE, R, C, F)
    return state


@triton.jit
def matrix(space, out, at, tile, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """d^2 of a tile of a distance matrix."""
    d2, _, _ = distances(space, tile, SHAPE, R, C)
    return d2


@triton.jit
def add_matrix(state, sums, space, g, tile, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, F: tl.constexpr):
    """As :func:`add`, of a distance matrix."""
    u = tl.zeros((R, C), g.dtype)
    if SHAPE.own:
        u = chord(space, tile, R, C)
    return add(state, sums, space, g, (u, u, u, scales(space, tile, SHAPE)), tile, 0, SHAPE, R, C, F)


@triton.jit
def store(state, sums, space, entry, rows, slab, SHAPE: tl.constexpr, F: tl.constexpr):
    """Write the gradient of the scales of a block of rows."""
    if SHAPE.own:
        tl.store(sums.scales + entry * space.length + rows, state, mask=rows < space.length)


class Tokens:
    """Points and metrics of both sides in the layout of the kernels, and their gradients.

    Args:
        f: the pair.
        batch: the batch dimensions of the result.
        dtype: type of the kernels' numbers.
        resolve: whether kernels work pairs that the product form does not resolve against a weight from differences.
        tolerance: that of distances, where the caller works such pairs.
    """

    of_entry, score, start, add, store = of_entry, score, start, add, store
    sums_values = True
    count = 1

    def __init__(
        self,
        f: MetricPair,
        batch: torch.Size,
        dtype: torch.dtype,
        *,
        resolve: bool = False,
        tolerance: float | None = None,
    ):
        self.batch, self.dtype, self.resolve = batch, dtype, resolve
        self.made = MetricTiles(f, batch, dtype, _numerics.weight_tolerance(dtype) if resolve else tolerance)
        limits = self.made.limits if resolve else self.made.norms  # not read
        self.sides = [
            self._side(self.made.a, self.made.query, self.made.x, self.made.norms[0], limits[0]),
            self._side(self.made.b, self.made.key, self.made.y, self.made.norms[1], limits[1]),
        ]
        self._found: dict[bool, MetricSums] = {}
        self.n, self.m = self.sides[0].scales.shape[-1], self.sides[1].scales.shape[-1]

    def _side(
        self, features: Tensor, side: Gradients | None, points: Tensor, norms: Tensor, limits: Tensor
    ) -> MetricSide:
        if side is None:  # no metric: nothing to read
            side = Gradients(points.new_zeros(0, *points.shape), points.new_zeros(points.shape[:-1]))
        features, columns, points = (t.mT.contiguous() for t in (features, side.columns, points))
        scales, norms, limits = (t.contiguous() for t in (side.scales, norms, limits))
        return MetricSide(features, scales, columns, points, norms, limits, columns.shape[0], columns.stride(0))

    def lengths(self, swapped: bool) -> tuple[int, int]:
        """Rows and columns; here and below ``swapped``: the keys own the rows."""
        return (self.m, self.n) if swapped else (self.n, self.m)

    def space(self, swapped: bool, e: slice) -> Metrics:
        """What kernels read of some batch entries."""
        own, other = (side.entries(e) for side in (self.sides[::-1] if swapped else self.sides))
        return Metrics(own, other, own.features.shape[1] - 2, *self.lengths(swapped))

    def runs(self, swapped: bool, precision: str, part: int = -1) -> Iterator[tuple[slice, MetricShape]]:
        """Batch entries that one launch serves, all, and what is compiled."""
        own, other = (side is not None for side in (self.made.query, self.made.key))
        if swapped:
            own, other = other, own
        shape = MetricShape(own, other, self.made.pair.share, swapped, self.resolve, precision)
        yield slice(0, self.batch.numel()), shape

    def columns(self, part: int) -> int:
        """Features that a product with sums takes at a time."""
        return columns_of(self.sides[0].features.shape[1] - 2)

    def sums(self, swapped: bool, part: int) -> MetricSums:
        """Zeros for the gradient of the rows."""
        features, scales, columns, points = (torch.zeros_like(t) for t in self.sides[swapped][:4])
        self._found[swapped] = MetricSums(features, scales, columns, points)
        return self._found[swapped]

    def gradients(self) -> list[Tensor]:
        """Of the pair's tensors."""
        for swapped, sums in self._found.items():
            has_metric = (self.made.key if swapped else self.made.query) is not None
            side = Gradients(sums.columns.mT, sums.scales) if has_metric else None
            self.made.take_gradients(swapped, sums.features.mT, side, sums.points.mT)
        return self.made.gradients()


def columns_of(dim: int) -> int:
    """Features that a product with sums takes at a time."""
    return max(16, min(triton.next_power_of_2(dim), SLAB))

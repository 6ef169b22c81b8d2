"""Distance matrices and their gradient: one kernel each, whatever the geometry, and their launchers.

As in horosphere.kernels.triton.attention a geometry gives its pointers and compile-time functions; those of chords are
here, over augmented features (horosphere.kernels.chord.augment), those of metrics with the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from horosphere.kernels.chord.augment import Augmented, augment, flat, without_far
from horosphere.kernels.chord.pair import ChordPair, batch_of, dtype_of
from horosphere.kernels.low_rank.pair import MetricPair
from horosphere.kernels.tiled.sqdist import per_point
from horosphere.kernels.triton import metric
from horosphere.kernels.triton.arcs import curvature_slope, phi, slope
from horosphere.kernels.triton.chord import runs
from horosphere.kernels.triton.tiles import (
    Tile,
    add_products_singly,
    backend,
    inside,
    options_for,
    precision_of,
    product,
    program,
    terms_of,
)

# Rows and columns of a tile of chords in float32, half as many in float64.
TILE = 64
WARPS = 8


class Products(NamedTuple):
    """The side that has the rows of a matrix and the side that has its columns."""

    own: Tensor  # (B, K, N), augmented features
    other: Tensor  # (B, K, M)
    unit: Tensor  # (B,), 1/sqrt|kappa|, of the gradient squared where SQUARED
    size: int  # K
    length: int
    others: int

    def entries(self, e: slice) -> Products:
        """Of some batch entries."""
        return self._replace(own=self.own[e], other=self.other[e], unit=self.unit[e])


class Bounded(NamedTuple):
    """Products, and what tells which pairs their products do not resolve."""

    chords: Products  # without the weights of the columns
    weights: Tensor  # (B, M)
    norms: Tensor  # (B, M)
    p: Tensor  # (B, N)
    q: Tensor  # (B, N)
    doubt: Tensor  # (B, N, M), read and written where ADDED

    def entries(self, e: slice) -> Bounded:
        """Of some batch entries."""
        return Bounded(self.chords.entries(e), *(t[e] for t in self[1:]))


class ProductSums(NamedTuple):
    """Gradients of what the rows own; zero on entry."""

    features: Tensor  # (B, K, N)
    kappa: Tensor  # (B, N), where curvature is wanted

    def entries(self, e: slice) -> ProductSums:
        """Of some batch entries."""
        return ProductSums(self.features[e], self.kappa[e])


class ProductShape(NamedTuple):
    """What is compiled into a kernel of chords."""

    sign: int  # of the curvature
    terms: int  # of series
    squared: bool
    weighted: bool = False
    resolve: bool = False
    added: bool = False  # the square is added to the matrix, which other parts share
    curvature: bool = False  # whether its gradient is wanted


@triton.jit
def products_of_entry(space, entry, SHAPE: tl.constexpr):
    """Where a batch entry has its points."""
    length = tl.cast(space.length, tl.int64)  # where it is 1 the compiler is given a constant, which has no .to
    others = tl.cast(space.others, tl.int64)
    own, other = space.own + entry * space.size * length, space.other + entry * space.size * others
    return Products(own, other, space.unit + entry, space.size, length, others)


@triton.jit
def bounded_of_entry(space, entry, SHAPE: tl.constexpr):
    """Where a batch entry has its points and bounds."""
    chords = products_of_entry(space.chords, entry, SHAPE)
    own, other = entry * chords.length, entry * chords.others
    doubt = space.doubt + own * chords.others
    return Bounded(chords, space.weights + other, space.norms + other, space.p + own, space.q + own, doubt)


@triton.jit
def matrix(space, out, at, tile, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """d or d^2 of a tile, -1 where its pairs are not resolved; ADDED: the sum of d^2 with what is in out, and the error
    of the sum in doubt.
    """
    t = product(space.chords.own, space.chords.other, tile, space.chords.size, R, C)
    w = tl.zeros((C,), t.dtype) + 1
    if SHAPE.weighted:
        w = tl.load(space.weights + tile.columns, mask=tile.columns < tile.others, other=1.0)
        t = t * w[None, :]
    if SHAPE.resolve:
        one = tl.load(space.p + tile.rows, mask=tile.rows < tile.length, other=0.0)
        two = tl.load(space.q + tile.rows, mask=tile.rows < tile.length, other=0.0)
        norm = tl.load(space.norms + tile.columns, mask=tile.columns < tile.others, other=0.0)
        limit = (one[:, None] + two[:, None] * norm[None, :]) * w[None, :]
        near = (t >= limit) == 0  # NaN counts
        if SHAPE.sign > 0:
            far = (t <= 2 - limit) == 0
            near = near | far
    unit = tl.load(space.chords.unit)
    outside = t != t
    t = tl.where(t > 0, t, 0.0)
    if SHAPE.sign > 0:
        t = tl.where(t < 2, t, 2.0)
    d = tl.where(outside, float("nan"), phi(t, SHAPE.sign, SHAPE.terms) * unit)
    if SHAPE.added:
        there = inside(tile)
        if SHAPE.resolve:
            start = 2 * unit * unit if SHAPE.sign != 0 else 1.0
            change = tl.where(t > 0, d * d / tl.where(t > 0, t, 1.0), start) * limit
            if SHAPE.sign > 0:
                change = tl.where(far, float("inf"), change)
            tl.store(space.doubt + at, tl.load(space.doubt + at, mask=there) + change, mask=there)
        d = tl.load(out + at, mask=there) + d * d
    else:
        if SHAPE.squared:
            d = d * d
        if SHAPE.resolve:
            d = tl.where(near, -1.0, d)
    return d  # [R, C]


@triton.jit
def start(sums, space, entry, SHAPE: tl.constexpr, R: tl.constexpr, F: tl.constexpr):
    """(where gradients go, features at this batch entry, that of the curvature [R])."""
    sums = ProductSums(sums.features + entry * space.size * space.length, sums.kappa)
    return sums, tl.zeros((R,), space.own.dtype.element_ty)


@triton.jit
def add(state, sums, space, upper, tile, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, F: tl.constexpr):
    """Add what the gradient of a tile [R, C] gives to its rows; that of the curvature is returned."""
    t = product(space.own, space.other, tile, space.size, R, C)
    proper = t > 0  # coincident points and antipodes have gradient 0, as what lies beyond the last row and column
    if SHAPE.sign > 0:
        proper = proper & (t < 2)
    t = tl.where(proper, t, 1.0)
    g = tl.where(proper, slope(t, SHAPE.sign, SHAPE.squared, SHAPE.terms) * upper, 0.0)
    if SHAPE.sign != 0:
        g = g * tl.load(space.unit)
    if SHAPE.curvature:
        change = curvature_slope(t, SHAPE.sign, SHAPE.squared, SHAPE.terms)
        state += tl.sum(tl.where(proper, change * upper, 0.0), 1)
    add_products_singly(sums.features, g, space.other, tile, space.size)
    return state


@triton.jit
def store(state, sums, space, entry, rows, slab, SHAPE: tl.constexpr, F: tl.constexpr):
    """Write the gradient of the curvature of a block of rows."""
    if SHAPE.curvature:
        tl.store(sums.kappa + entry * space.length + rows, state, mask=rows < space.length)


@triton.jit
def forward(
    space,  # the pointers of a geometry
    out,  # (B, N, M)
    length,
    others,
    OF_ENTRY: tl.constexpr,  # functions of the geometry
    MATRIX: tl.constexpr,
    SHAPE: tl.constexpr,  # what the geometry compiles
    R: tl.constexpr,
    C: tl.constexpr,
):
    entry, row, block = program(length, tl.cdiv(others, C), R)
    length = tl.cast(length, tl.int64)
    others = tl.cast(others, tl.int64)
    tile = Tile(row + tl.arange(0, R), block * C + tl.arange(0, C), length, others)
    space = OF_ENTRY(space, entry, SHAPE)
    out += entry * length * others
    at = tile.rows[:, None] * others + tile.columns[None, :]
    tl.store(out + at, MATRIX(space, out, at, tile, SHAPE, R, C), mask=inside(tile))


@triton.jit
def backward(
    space,  # the pointers of a geometry
    upper,  # gradient of pair (i, j) at entry * n * m + i * row_stride + j * column_stride
    row_stride,
    column_stride,
    sums,  # where the geometry sums its gradient
    OF_ENTRY: tl.constexpr,  # functions of the geometry
    START: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    SHAPE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    F: tl.constexpr,
):
    """What a block of rows owns gets of the gradient of a matrix."""
    entry, row, _ = program(space.length, 1, R)
    space = OF_ENTRY(space, entry, SHAPE)
    upper += entry * space.length * space.others
    rows = row + tl.arange(0, R)
    sums, state = START(sums, space, entry, SHAPE, R, F)
    for first in range(space.others * 0, space.others, C):
        tile = Tile(rows, first + tl.arange(0, C), space.length, space.others)
        at = tile.rows[:, None] * row_stride + tile.columns[None, :] * column_stride
        state = ADD(state, sums, space, tl.load(upper + at, mask=inside(tile), other=0.0), tile, SHAPE, R, C, F)
    STORE(state, sums, space, entry, rows, 0, SHAPE, F)


def chord_options(dtype: torch.dtype) -> dict[str, int | bool]:
    """Tiles of chords."""
    return options_for(TILE // 2 if dtype == torch.float64 else TILE, WARPS)


def metric_options(dtype: torch.dtype) -> dict[str, int | bool]:
    """Tiles of metrics."""
    return options_for(32, 4 if dtype == torch.float32 else 8)


def bounded(a: Augmented, doubt: Tensor) -> Bounded:
    """A part as :func:`matrix` reads it."""
    left, right = a.a.mT.contiguous(), a.plain_b.mT.contiguous()
    chords = Products(left, right, a.factor.reshape(-1), left.shape[1], left.shape[2], right.shape[2])
    norms = a.n.contiguous()
    return Bounded(
        chords, norms if a.wy is None else a.wy.contiguous(), norms, a.p.contiguous(), a.q.contiguous(), doubt
    )


def sqdist(parts: Sequence[ChordPair], squared: bool, resolve: bool) -> tuple[Tensor, Tensor]:
    """As horosphere.kernels.tiled.sqdist.sqdist. Products hold one more matrix where ``resolve``."""
    batch, dtype, device = batch_of(parts), dtype_of(parts), parts[0].x.device
    n, m = parts[0].x.shape[-2], parts[0].y.shape[-2]
    several = len(parts) > 1
    result = (torch.zeros if several else torch.empty)(*batch, n, m, dtype=dtype, device=device)
    out = result.view(batch.numel(), n, m)
    doubt = torch.zeros_like(out) if several and resolve else out
    options = chord_options(dtype)
    for part in parts if out.numel() else ():
        a = augment(part, batch, dtype)
        space = bounded(a, doubt)
        for e, (sign,) in runs([(sign,) for sign in a.signs]):
            shape = ProductShape(sign, terms_of(dtype), squared, a.wy is not None, resolve, several)
            grid = ((e.stop - e.start) * triton.cdiv(n, options["R"]) * triton.cdiv(m, options["C"]),)
            forward[grid](space.entries(e), out[e], n, m, bounded_of_entry, matrix, shape, **options)
    picked = torch.empty(0, dtype=torch.int64, device=device)
    if resolve:
        near = ~(out >= doubt) if several else out < 0
        picked = near.view(-1).nonzero().squeeze(-1)
    if several and not squared:
        result.sqrt_()
    return result, picked


def sqdist_backward(grad: Tensor, parts: Sequence[ChordPair], squared: bool, curvature: bool) -> list[Tensor]:
    """As horosphere.kernels.tiled.sqdist.sqdist_backward. Products of distances hold two more matrices."""
    batch, dtype = batch_of(parts), dtype_of(parts)
    n, m = grad.shape[-2:]
    upper = flat(grad, batch, 2).to(dtype)
    if len(parts) > 1 and not squared:
        total = flat(sqdist(parts, squared=False, resolve=False)[0], batch, 2)
        upper = torch.where(total > 0, upper * 0.5 / torch.where(total > 0, total, 1.0), 0.0)
    upper = upper.contiguous()
    square = squared or len(parts) > 1
    options = chord_options(dtype)
    grads: list[Tensor] = []
    for part in parts:
        a = without_far(augment(part, batch, dtype))
        left, right = a.a.mT.contiguous(), a.b.mT.contiguous()
        unit = (a.factor**2 if square else a.factor).reshape(-1).contiguous()
        queries = Products(left, right, unit, left.shape[1], n, m)
        keys = Products(right, left, unit, left.shape[1], m, n)
        kappa = left.new_zeros(left.shape[0], n)
        found = [ProductSums(torch.zeros_like(left), kappa), ProductSums(torch.zeros_like(right), right.new_zeros(0))]
        for space, sums, strides in (queries, found[0], (m, 1)), (keys, found[1], (1, m)):
            for e, (sign,) in runs([(sign,) for sign in a.signs]) if upper.numel() else ():
                shape = ProductShape(sign, terms_of(dtype), square, curvature=curvature and space is queries)
                backward[((e.stop - e.start) * triton.cdiv(space.length, options["R"]),)](
                    space.entries(e), upper[e], *strides, sums.entries(e), products_of_entry, start, add, store, shape,
                    F=0, **options,
                )  # fmt: skip
        da, db = (sums.features.mT for sums in found)
        grads += per_point(part, batch, da, db, kappa.sum(-1, dtype=torch.float64), square, curvature)
    return grads


def metric_sqdist(f: MetricPair, dtype: torch.dtype, tolerance: float | None) -> Tensor:
    """As horosphere.kernels.tiled.metric.sqdist. Holds two more matrices where there is a tolerance."""
    tokens = metric.Tokens(f, f.batch, dtype, tolerance=tolerance)
    n, m, everything = tokens.n, tokens.m, slice(0, f.batch.numel())
    out = torch.empty(everything.stop, n, m, dtype=dtype, device=f.q.device)
    if out.numel():
        options = metric_options(dtype)
        grid = (out.shape[0] * triton.cdiv(n, options["R"]) * triton.cdiv(m, options["C"]),)
        for e, shape in tokens.runs(False, precision_of(dtype, backend())):
            forward[grid](tokens.space(False, e), out, n, m, metric.of_entry, metric.matrix, shape, **options)
        if tolerance is not None:
            tokens.made.rework_(out, everything, slice(0, n), slice(0, m), None)
    return out.view(*f.batch, n, m).to(f.dtype)


def metric_sqdist_backward(grad: Tensor, f: MetricPair, dtype: torch.dtype) -> list[Tensor]:
    """As horosphere.kernels.tiled.metric.sqdist_backward."""
    tokens = metric.Tokens(f, f.batch, dtype)
    upper = grad.reshape(f.batch.numel(), tokens.n, tokens.m).to(dtype).contiguous()
    options = metric_options(dtype)
    for swapped in (False, True):
        sums, (length, others) = tokens.sums(swapped, 0), tokens.lengths(swapped)
        strides = (1, length) if swapped else (others, 1)
        for e, shape in tokens.runs(swapped, precision_of(dtype, backend())) if upper.numel() else ():
            backward[(upper.shape[0] * triton.cdiv(length, options["R"]),)](
                tokens.space(swapped, e), upper, *strides, sums, metric.of_entry, metric.start, metric.add_matrix,
                metric.store, shape, F=tokens.columns(0), **options,
            )  # fmt: skip
    return tokens.gradients()

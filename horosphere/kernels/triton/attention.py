"""Attention by distance, whatever the geometry: a kernel for what one side takes of the other, and one of the gradient.

A :class:`Geometry` (horosphere.kernels.triton.chord, .metric) gives its pointers as a tuple, and compile-time
functions of them. A block of rows runs along the other side tile by tile: rows are queries or, SWAPPED, keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from horosphere.kernels.chord.augment import flat
from horosphere.kernels.inputs import Inputs, Results
from horosphere.kernels.triton.tiles import (
    Tile,
    add_products,
    backend,
    columns_of,
    options_for,
    precision_of,
    product,
    program,
)
from horosphere.kernels.triton.weights import (
    PAIRS,
    Kind,
    Mask,
    Rates,
    Tally,
    add_to_bias,
    kept,
    kind_of,
    mask_of,
    mask_of_entry,
    masked,
    measure,
    pairs_of,
    rates_of,
    settled,
    span,
    tallied,
    write_tally,
)

# Rows and columns of a tile: with more rows registers spill.
TILE = 32
WARPS = 8


class Given(NamedTuple):
    """What the average reads and writes beside points and mask."""

    value: Tensor  # (B, M, V), of the others
    lse: Tensor  # (B, queries), read where SWAPPED and written elsewhere
    out: Tensor  # (B, N, V)
    width: int  # V

    def entries(self, e: slice) -> Given:
        """Of some batch entries."""
        return Given(self.value[e], self.lse[e], self.out[e], self.width)


class Upper(NamedTuple):
    """What the gradient reads beside points and mask."""

    own: Tensor  # (B, V, N), gradients of the results where the rows are queries, values elsewhere
    other: Tensor  # (B, V, M)
    lse: Tensor  # (B, queries)
    mean: Tensor  # (B, queries), sum of weight times gradient along the keys
    width: int  # V

    def entries(self, e: slice) -> Upper:
        """Of some batch entries."""
        return Upper(self.own[e], self.other[e], self.lse[e], self.mean[e], self.width)


@triton.jit
def raised(logits, top, den, sums):
    """(weights [R, C] of another tile, the maximum with it [R], denominators [R] and sums [R, V]), all against that
    maximum.
    """
    higher = tl.maximum(top, tl.max(logits, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp(top - base)
    w = tl.exp(logits - base[:, None])
    return w, higher, den * shrink + tl.sum(w, 1), sums * shrink[:, None]


@triton.jit
def divided(sums, den, top, lse, there, first):
    """sums over denominators; the first of a row's programs writes lse too. Rows without keys have 0 and -inf."""
    found = den != 0  # NaN counts
    den = tl.where(found, den, 1.0)
    if first:
        tl.store(lse, tl.where(found, tl.log(den) + top, float("-inf")), mask=there)
    return sums / den[:, None]


@triton.jit
def average(
    space,  # the pointers of a geometry
    rates,  # Rates
    mask,  # Mask
    given,  # Given
    OF_ENTRY: tl.constexpr,  # functions of the geometry
    SCORE: tl.constexpr,
    SHAPE: tl.constexpr,  # what the geometry compiles
    KIND: tl.constexpr,  # Kind
    R: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
):
    """sum_j W_ij value_j of a block of queries and its lse; SWAPPED: sum_i W_ij value_i of a block of keys."""
    entry, first, slab = program(space.length, tl.cdiv(given.width, V), R)
    space = OF_ENTRY(space, entry, SHAPE)
    queries = space.others if KIND.swapped else space.length
    mask = mask_of_entry(mask, entry, queries)
    lse = given.lse + entry * queries
    value = given.value + entry * space.others * given.width
    shift, rate = tl.load(rates.eps + entry), tl.load(rates.power + entry)
    rows = first + tl.arange(0, R)
    column = slab * V + tl.arange(0, V)
    top = tl.full((R,), float("-inf"), value.dtype.element_ty)
    den = tl.zeros((R,), top.dtype)
    sums = tl.zeros((R, V), top.dtype)
    start, stop = span(first, space.others, mask.causal, KIND, R)
    for at in range(start, stop, C):
        tile = Tile(rows, at + tl.arange(0, C), space.length, space.others)
        d2, _near, _one, _two = SCORE(space, shift, tile, SHAPE, R, C)
        pairs = pairs_of(tile, KIND.swapped)
        logits = masked(-rate * measure(d2, shift, KIND.weight), mask, pairs, KIND)
        if KIND.swapped:
            w = settled(logits, lse, pairs)
        else:
            w, top, den, sums = raised(logits, top, den, sums)
        if KIND.dropout:
            w = tl.where(kept(mask, pairs), w, 0.0)
        v = tl.load(  # [C, V]
            value + tile.columns[:, None] * given.width + column[None, :],
            mask=(tile.columns < space.others)[:, None] & (column < given.width)[None, :],
            other=0.0,
        )
        sums = tl.dot(w.to(v.dtype), v, sums, input_precision=KIND.precision, out_dtype=sums.dtype)
    if KIND.swapped == 0:
        sums = divided(sums, den, top, lse + rows, rows < space.length, slab == 0)
    out = given.out + (entry * space.length + rows[:, None]) * given.width + column[None, :]
    tl.store(out, sums, mask=(rows < space.length)[:, None] & (column < given.width)[None, :])


@triton.jit
def slopes(d2, rates, upper, mask, tile, KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """(dL/dlogits of a tile [R, C], the weights that dropout keeps, what the power multiplies)."""
    shift, rate = rates
    pairs = pairs_of(tile, KIND.swapped)
    measured = measure(d2, shift, KIND.weight)
    w = settled(masked(-rate * measured, mask, pairs, KIND), upper.lse, pairs)
    pull = product(upper.own, upper.other, tile, upper.width, R, C)
    taken = w
    if KIND.dropout:
        keeps = kept(mask, pairs)
        pull = tl.where(keeps, pull, 0.0)
        taken = tl.where(keeps, w, 0.0)
    return w * (pull - tl.load(upper.mean + pairs.i, mask=pairs.i < pairs.n, other=0.0)), taken, measured


@triton.jit
def upper_of_entry(upper, entry, queries, length, others):
    """What a batch entry reads."""
    own, other = upper.own + entry * upper.width * length, upper.other + entry * upper.width * others
    return Upper(own, other, upper.lse + entry * queries, upper.mean + entry * queries, upper.width)


@triton.jit
def gradient(
    space,  # the pointers of a geometry
    rates,  # Rates
    mask,  # Mask
    upper,  # Upper
    into,  # Into
    sums,  # where the geometry sums its gradient
    OF_ENTRY: tl.constexpr,  # functions of the geometry
    SCORE: tl.constexpr,
    START: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    SHAPE: tl.constexpr,  # what the geometry compiles
    KIND: tl.constexpr,  # Kind
    R: tl.constexpr,
    C: tl.constexpr,
    F: tl.constexpr,
):
    """What a block of rows owns gets of dL/dlogits = W (<do, v> - mean), with sums by eps, power and bias."""
    entry, first, slab = program(space.length, SHAPE.slabs, R)
    space = OF_ENTRY(space, entry, SHAPE)
    queries = space.others if KIND.swapped else space.length
    mask = mask_of_entry(mask, entry, queries)
    upper = upper_of_entry(upper, entry, queries, space.length, space.others)
    bias = into.bias + tl.load(mask.place + entry)
    values = into.value + entry * upper.width * space.length
    shift_and_rate = tl.load(rates.eps + entry), tl.load(rates.power + entry)
    rows = first + tl.arange(0, R)
    sums, state = START(sums, space, entry, SHAPE, R, F)
    none = tl.zeros((R,), upper.own.dtype.element_ty)
    tally = none, none, none
    start, stop = span(first, space.others, mask.causal, KIND, R)
    for at in range(start, stop, C):
        tile = Tile(rows, at + tl.arange(0, C), space.length, space.others)
        found = SCORE(space, shift_and_rate[0], tile, SHAPE, R, C)
        g, taken, measured = slopes(found[0], shift_and_rate, upper, mask, tile, KIND, R, C)
        if KIND.sums_values:
            add_products(values, taken, upper.other, tile, upper.width, KIND, F)
        if KIND.bias_gradient == PAIRS:
            if slab == 0:
                add_to_bias(bias, g, mask, pairs_of(tile, KIND.swapped))
        g, tally = tallied(tally, g, found[0], measured, shift_and_rate, KIND)
        state = ADD(state, sums, space, g, found, tile, slab * F, SHAPE, R, C, F)
    STORE(state, sums, space, entry, rows, slab * F, SHAPE, F)
    if slab == 0:
        write_tally(into, tally, entry * space.length + rows, rows < space.length, KIND)


class Shape(Protocol):
    """What a geometry compiles into a kernel."""

    @property
    def slabs(self) -> int:
        """Blocks of features, each summed by a program of its own."""


class Sums(Protocol):
    """Where the gradient of what the rows own is summed."""

    def entries(self, e: slice) -> tuple[object, ...]:
        """Of some batch entries."""


class Geometry(Protocol):
    """Points of both sides in the layout of the kernels, and their gradients; ``swapped``: the keys own the rows.

    The functions that are compiled into the kernels, of pointers ``space`` and a tile of R rows and C columns:

    - ``of_entry(space, entry, SHAPE)``: the same pointers where a batch entry starts.
    - ``score(space, eps, tile, SHAPE, R, C)``: four values, first d^2 [R, C], and what ``add`` wants to know again.
    - ``start(sums, space, entry, SHAPE, R, F)``: where the gradient goes, and the state of a block of rows.
    - ``add(state, sums, space, g, found, tile, slab, SHAPE, R, C, F)``: the state with what g = dL/d(d^2) [R, C] gives
      to the features from slab on; found is what ``score`` returned.
    - ``store(state, sums, space, entry, rows, slab, SHAPE, F)``: writes the state.
    """

    batch: torch.Size
    dtype: torch.dtype
    n: int
    m: int
    count: int  # of parts, whose gradients are summed one after the other
    sums_values: bool  # whether the gradient of the values is summed with that of the points
    of_entry: triton.JITFunction
    score: triton.JITFunction
    start: triton.JITFunction
    add: triton.JITFunction
    store: triton.JITFunction

    def lengths(self, swapped: bool) -> tuple[int, int]:
        """Rows and columns."""

    def space(self, swapped: bool, e: slice) -> tuple[object, ...]:
        """What kernels read of some batch entries."""

    def runs(self, swapped: bool, precision: str, part: int = -1) -> Iterator[tuple[slice, Shape]]:
        """Batch entries that one launch serves, and what is compiled."""

    def columns(self, part: int) -> int:
        """Features that a program sums at a time."""

    def sums(self, swapped: bool, part: int) -> Sums:
        """Zeros for the gradient of one part of the rows, which is found there."""


def attention(points: Geometry, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out (..., N, Dv) and lse (..., N)."""
    value, eps, power, bias, causal, weight, dropout_p, seed = inputs
    batch, dtype, n = points.batch, points.dtype, points.n
    values = flat(value, batch, 2).to(dtype).contiguous()
    entries, m, width = values.shape
    out, lse = values.new_zeros(entries, n, width), values.new_full((entries, n), -torch.inf)
    if n and m:
        mask = mask_of(bias, causal, dropout_p, seed, batch, n, value.device)
        kind = kind_of(weight, bias, causal, dropout_p, precision_of(dtype, backend()))
        _average(points, rates_of(eps, power, weight, dtype), mask, Given(values, lse, out, width), kind)
    return out.mul_(1 / (1 - dropout_p)).view(*batch, n, width), lse.view(*batch, n)


def _average(points: Geometry, rates: Rates, mask: Mask, given: Given, kind: Kind) -> None:
    """What one side takes of the other's values."""
    length, _ = points.lengths(kind.swapped)
    V = columns_of(given.width, points.dtype)
    down, across = triton.cdiv(length, TILE), triton.cdiv(max(1, given.width), V)
    for e, shape in points.runs(kind.swapped, kind.precision):
        average[((e.stop - e.start) * down * across,)](
            points.space(kind.swapped, e), rates.entries(e), mask.entries(e), given.entries(e), points.of_entry,
            points.score, shape, kind, V=V, **options_for(TILE, WARPS),
        )  # fmt: skip


def attention_backward(
    points: Geometry, inputs: Inputs, results: Results, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of value, eps (B,), power (B,) and bias, ``wanted`` as in the tiled form; ``points`` has its own."""
    value, eps, power, bias, causal, weight, dropout_p, seed = inputs
    out, lse, dout, dlse = results
    batch, dtype = points.batch, points.dtype
    mask = mask_of(bias, causal, dropout_p, seed, batch, points.n, value.device)
    kind = kind_of(weight, bias, causal, dropout_p, precision_of(dtype, backend()))
    rates = rates_of(eps, power, weight, dtype)
    values, out, dout = (flat(t, batch, 2).to(dtype).contiguous() for t in (value, out, dout))
    lse = flat(lse, batch, 1).contiguous()
    mean = (out * dout).sum(-1) - flat(dlse, batch, 1)
    dout = dout * (1 / (1 - dropout_p))
    upper = Upper(dout.mT.contiguous(), values.mT.contiguous(), lse, mean, values.shape[-1])
    tally = Tally(batch, points.n, points.m, bias, wanted, values)
    dvalue = torch.zeros_like(values.mT if points.sums_values else values, memory_format=torch.contiguous_format)
    if points.n and points.m and not points.sums_values:
        _average(points, rates, mask, Given(dout, lse, dvalue, upper.width), kind._replace(swapped=True))
    for part in range(points.count):
        for swapped in (False, True):
            _gradient(points, part, rates, mask, upper, tally, dvalue, tally.kind(kind, swapped, part == 0))
    if points.sums_values:
        dvalue = dvalue.mT
    dvalue = dvalue.reshape(*batch, *values.shape[1:]).sum_to_size(value.shape).to(value.dtype)
    return dvalue, *tally.gradients()


def _gradient(
    points: Geometry,
    part: int,
    rates: Rates,
    mask: Mask,
    upper: Upper,
    tally: Tally,
    dvalue: Tensor,
    kind: Kind,
) -> None:
    """What one side owns of a part gets."""
    swapped, sums, (length, others) = kind.swapped, points.sums(kind.swapped, part), points.lengths(kind.swapped)
    kind = kind._replace(sums_values=swapped and points.sums_values)
    if swapped:
        upper = upper._replace(own=upper.other, other=upper.own)
    for run, shape in points.runs(swapped, kind.precision, part) if length and others else ():
        for e in tally.runs(run, kind):
            gradient[((e.stop - e.start) * triton.cdiv(length, TILE) * shape.slabs,)](
                points.space(swapped, e), rates.entries(e), mask.entries(e), upper.entries(e),
                tally.into(dvalue, e, kind), sums.entries(e), points.of_entry, points.score, points.start, points.add,
                points.store, shape, kind, F=points.columns(part), **options_for(TILE, WARPS),
            )  # fmt: skip

"""Weights of pairs from their distances, what takes no part (bias, causality and dropout), and gradients of all but the
points: by eps, power and bias.

A tile of attention runs from a block of queries along the keys or, SWAPPED, from a block of keys along the queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from horosphere.kernels.dropout import row_keys

INVERSE = tl.constexpr(0)
SOFTMAX = tl.constexpr(1)
WEIGHTS = {"inverse": 0, "softmax": 1, "gaussian": 2}
ADDED = tl.constexpr(1)
BOOLEAN = tl.constexpr(2)
# How the gradient of the bias is written: pair by pair, or summed over the others of every row.
PAIRS = tl.constexpr(1)
ROWS = tl.constexpr(2)


class Kind(NamedTuple):
    """What of attention is compiled into a kernel."""

    weight: int
    bias: int  # 0, ADDED or BOOLEAN
    causal: bool
    dropout: bool
    precision: str  # of products with sums
    swapped: bool = False
    rates: bool = False  # whether the gradients of eps and power are wanted
    bias_gradient: int = 0  # 0, PAIRS or ROWS
    sums_values: bool = False  # whether the gradient of the values is summed with that of the points


class Mask(NamedTuple):
    """What kernels read of bias, causality and dropout; of B batch entries."""

    bias: Tensor
    place: Tensor  # (B,), where the bias of an entry starts
    keys: Tensor  # (B, queries), of dropout
    i_stride: int
    j_stride: int
    causal: int
    threshold: int

    def entries(self, e: slice) -> Mask:
        """Of some batch entries."""
        return self._replace(place=self.place[e], keys=self.keys[e])


class Rates(NamedTuple):
    """What is added to d^2, and the power."""

    eps: Tensor  # (B,)
    power: Tensor  # (B,)

    def entries(self, e: slice) -> Rates:
        """Of some batch entries."""
        return Rates(self.eps[e], self.power[e])


class Into(NamedTuple):
    """Where the gradients of all but the points are summed."""

    value: Tensor  # (B, V, N)
    eps: Tensor  # (B, N)
    power: Tensor  # (B, N)
    bias: Tensor  # as the bias, or (B, N) sums of the rows


class Pairs(NamedTuple):
    """Queries i and keys j of a tile, and how many there are of each."""

    i: tl.tensor  # [R, 1], [1, C] where SWAPPED
    j: tl.tensor
    n: tl.tensor
    m: tl.tensor


@triton.jit
def pairs_of(tile, SWAPPED: tl.constexpr):
    """Queries and keys of a tile."""
    if SWAPPED:
        return Pairs(tile.columns[None, :], tile.rows[:, None], tile.others, tile.length)
    else:
        return Pairs(tile.rows[:, None], tile.columns[None, :], tile.length, tile.others)


@triton.jit
def span(first, others, causal, KIND: tl.constexpr, R: tl.constexpr):
    """Where the others of a block of rows start and stop: what causality leaves of them."""
    start, stop = others * 0, others
    if KIND.causal:
        if KIND.swapped:
            start = tl.maximum(start, first - causal)
        else:
            stop = tl.minimum(stop, first + R + causal)
    return start, stop


@triton.jit
def mask_of_entry(mask, entry, queries):
    """The mask of a batch entry, whose pointers start there."""
    bias = mask.bias + tl.load(mask.place + entry)
    keys = mask.keys + entry * queries
    return Mask(bias, mask.place, keys, mask.i_stride, mask.j_stride, mask.causal, mask.threshold)


@triton.jit
def measure(d2, eps, WEIGHT: tl.constexpr):
    """What the power multiplies."""
    if WEIGHT == INVERSE:
        d2 = tl.log(d2 + eps)
    elif WEIGHT == SOFTMAX:
        d2 = tl.sqrt(d2)
    return d2


@triton.jit
def measure_slope(d2, eps, WEIGHT: tl.constexpr):
    """Its derivative by d^2; that of d at coincident points is 0."""
    out = tl.zeros_like(d2) + 1
    if WEIGHT == INVERSE:
        out = 1 / (d2 + eps)
    elif WEIGHT == SOFTMAX:
        out = tl.where(d2 > 0, 0.5 / tl.sqrt(tl.where(d2 > 0, d2, 1.0)), 0.0)
    return out


@triton.jit
def masked(logits, mask, pairs, KIND: tl.constexpr):
    """Logits [R, C] with the bias, -inf where a key takes no part."""
    allowed = (pairs.i < pairs.n) & (pairs.j < pairs.m)
    at = mask.bias + pairs.i * mask.i_stride + pairs.j * mask.j_stride
    if KIND.bias == ADDED:
        logits += tl.load(at, mask=allowed, other=0.0).to(logits.dtype)
    if KIND.bias == BOOLEAN:
        allowed = allowed & (tl.load(at, mask=allowed, other=0) != 0)
    if KIND.causal:
        allowed = allowed & (pairs.j <= pairs.i + mask.causal)
    return tl.where(allowed, logits, float("-inf"))


@triton.jit
def mixed(x):
    """murmur3's finaliser, as in horosphere.kernels.dropout."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B).to(tl.uint32)
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35).to(tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def kept(mask, pairs):
    """Which pairs [R, C] dropout keeps; 1 / (1 - p) is the caller's."""
    row = tl.load(mask.keys + pairs.i, mask=pairs.i < pairs.n, other=0).to(tl.uint32, bitcast=True)
    column = mixed((pairs.j.to(tl.uint32) * 0x27D4EB2F).to(tl.uint32))
    return mixed(row ^ column).to(tl.int32, bitcast=True) >= mask.threshold


@triton.jit
def settled(logits, lse, pairs):
    """Weights [R, C] whose denominators are known; 0 in rows without keys."""
    base = tl.load(lse + pairs.i, mask=pairs.i < pairs.n, other=0.0)
    return tl.exp(logits - tl.where(base == float("-inf"), 0.0, base))


@triton.jit
def add_to_bias(into, g, mask, pairs):
    """into += g [R, C] of a tile, which no other program of a launch has."""
    at = into + pairs.i * mask.i_stride + pairs.j * mask.j_stride
    there = (pairs.i < pairs.n) & (pairs.j < pairs.m)
    tl.store(at, tl.load(at, mask=there, other=0.0) + g, mask=there)


@triton.jit
def tallied(tally, g, d2, measured, rates, KIND: tl.constexpr):
    """(dL/d(d^2) [R, C] from g = dL/dlogits of a tile, sums [R] by eps, power and bias with those of the tile)."""
    eps, power, bias = tally
    shift, rate = rates
    if KIND.bias_gradient == ROWS:
        bias += tl.sum(g, 1)
    if KIND.rates:
        power -= tl.sum(tl.where(g == 0, 0.0, g * measured), 1)
    g = -rate * g * measure_slope(d2, shift, KIND.weight)
    if KIND.rates and KIND.weight == INVERSE:
        eps += tl.sum(g, 1)
    return g, (eps, power, bias)


@triton.jit
def write_tally(into, tally, rows, there, KIND: tl.constexpr):
    """Store the sums of a block of rows."""
    eps, power, bias = tally
    if KIND.rates:
        tl.store(into.eps + rows, eps, mask=there)
        tl.store(into.power + rows, power, mask=there)
    if KIND.bias_gradient == ROWS:
        tl.store(into.bias + rows, bias, mask=there)


def mask_of(
    bias: Tensor | None,
    causal: int | None,
    dropout_p: float,
    seed: Tensor | None,
    batch: torch.Size,
    queries: int,
    device: torch.device,
) -> Mask:
    """Bias, causality and dropout as kernels read them."""
    entries = batch.numel()
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    values, strides, place = nothing, (0, 0), torch.zeros(entries, dtype=torch.int64, device=device)
    if bias is not None:
        values = bias.contiguous()
        if bias.dtype == torch.bool:
            values = values.view(torch.uint8)
        strides, place = strides_of(values), places(values, batch).to(device)
    keys = row_keys(seed, entries, queries) if seed is not None and dropout_p else nothing.expand(entries)
    threshold = min(round(dropout_p * 2**32), 2**32 - 1) - 2**31
    return Mask(values, place, keys, *strides, 0 if causal is None else causal, threshold)


def kind_of(weight: str, bias: Tensor | None, causal: int | None, dropout_p: float, precision: str) -> Kind:
    """What of attention is compiled."""
    bias_kind = 0 if bias is None else 2 if bias.dtype == torch.bool else 1
    return Kind(WEIGHTS[weight], bias_kind, causal is not None, bool(dropout_p), precision)


def rates_of(eps: Tensor, power: Tensor, weight: str, dtype: torch.dtype) -> Rates:
    """eps and power (B,) as kernels read them."""
    shift = eps if weight == "inverse" else torch.zeros_like(eps)
    return Rates(shift.to(dtype).contiguous(), power.to(dtype).contiguous())


def strides_of(bias: Tensor) -> tuple[int, int]:
    """Strides of the last two dimensions, 0 where they are broadcast."""
    rows, columns = (0 if bias.shape[d] == 1 else bias.stride(d) for d in (-2, -1))
    return rows, columns


def places(bias: Tensor, batch: torch.Size) -> Tensor:
    """(B,) where the matrix of every batch entry starts in the bias."""
    starts = torch.arange(bias.shape[:-2].numel(), device="cpu").view(bias.shape[:-2]) * bias.shape[-2:].numel()
    return starts.expand(batch).reshape(-1).contiguous()  # kernels step from one to the next


class Tally:
    """The gradients of eps, power and bias.

    Each sum has one writer at a time, in an order that is fixed, so that the same call gives the same bits: a bias is
    summed over the columns or rows along which it was broadcast by the program that has all of them; batch entries that
    share one go in launches one after the other.

    Args:
        batch: the batch dimensions of the result.
        n: queries.
        m: keys.
        bias: the bias, if there is one.
        wanted: whether the gradients of eps, power and bias are.
        like: a tensor of the type and on the device of the sums.
    """

    def __init__(
        self, batch: torch.Size, n: int, m: int, bias: Tensor | None, wanted: tuple[bool, bool, bool], like: Tensor
    ):
        self.batch, self.rates_wanted = batch, wanted[0] or wanted[1]
        self.bias = bias if wanted[2] else None
        entries = batch.numel()
        self.rates = like.new_zeros(2, entries, n)
        self.by_rows = self.by_columns = False
        self._into = self.rates[0]
        if self.bias is not None:
            self.by_rows = self.bias.shape[-1] == 1
            self.by_columns = self.bias.shape[-2] == 1 and not self.by_rows
            shape = (entries, n) if self.by_rows else (entries, m) if self.by_columns else self.bias.shape
            self._into = like.new_zeros(shape)
            self._places = places(self.bias, batch).tolist()

    def kind(self, kind: Kind, swapped: bool, first: bool) -> Kind:
        """What is compiled into a launch; ``first``: the first with these sides."""
        of_bias = 0
        if self.bias is not None and first and swapped == self.by_columns:
            of_bias = 2 if self.by_rows or self.by_columns else 1
        return kind._replace(swapped=swapped, rates=first and not swapped and self.rates_wanted, bias_gradient=of_bias)

    def runs(self, e: slice, kind: Kind) -> Iterator[slice]:
        """``e`` cut so that no launch has two entries that write into the same place."""
        if kind.bias_gradient != 1:
            yield e
            return
        start = e.start
        for k in range(e.start, e.stop):
            if self._places[k] in self._places[start:k]:
                yield slice(start, k)
                start = k
        yield slice(start, e.stop)

    def into(self, values: Tensor, e: slice, kind: Kind) -> Into:
        """Where a launch of the entries ``e`` adds; ``values``: those' gradient."""
        eps, power = self.rates[:, e]
        return Into(values[e], eps, power, self._into[e] if kind.bias_gradient == 2 else self._into)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of eps (B,) and power (B,) in float64, and of the bias where it is wanted."""
        deps, dpower = self.rates.sum(-1, dtype=torch.float64)
        if self.bias is None:
            return deps, dpower, None
        found = self._into
        if self.by_rows or self.by_columns:
            found = found.view(*self.batch, -1).unsqueeze(-1 if self.by_rows else -2).sum_to_size(self.bias.shape)
        return deps, dpower, found.to(self.bias.dtype)

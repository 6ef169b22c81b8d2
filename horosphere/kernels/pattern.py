r"""Sums over a fixed pattern of keys, none of which gathers a key: O(N S) work for S keys a query.

A query at position i sees the keys at i + o for a band of offsets o, at i + o for single offsets, and at fixed
positions. So S columns of pairs are a banded matrix product, elementwise products of shifted rows, and a thin matrix
product. Three linear maps, whose derivatives are each other's:

    dots(x, y)_is   = <x_i, y_c(i,s)>
    gather(w, y)_i  = sum_s w_is y_c(i,s)
    scatter(w, x)_j = sum over (i, s) with c(i, s) = j of w_is x_i

Where a column has no key, ``dots`` is meaningless but finite, and the caller gives w = 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

# Rows of a block of the banded product: more of them waste more of the product, fewer of them run it less well.
BAND_ROWS = 32
# Numbers of the shifted rows worked together: three buffers of 2^16 float32 stay in a second-level cache.
CACHED = 2**16


@dataclass(frozen=True)
class Pattern:
    """The keys of a query at position i, each at most once but for those of ``positions`` that its offsets reach too.

    Attributes:
        band: least and greatest offset of a range, both included.
        shifts: single offsets outside of it.
        positions: of keys that every query sees.
        causal: drop the keys after i; no offset is positive then.
    """

    band: tuple[int, int]
    shifts: tuple[int, ...]
    positions: tuple[int, ...]
    causal: bool

    @property
    def columns(self) -> int:
        return self.band[1] - self.band[0] + 1 + len(self.shifts) + len(self.positions)


@functools.lru_cache(maxsize=64)
def keys_of(pattern: Pattern, start: int, rows: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions (rows, S) of the keys of the queries at start, start + 1, ..., and which of them count (bool).

    Where one does not count (beyond either end, in the future, there already by an offset) its position is any.
    """
    offsets = torch.tensor([*range(pattern.band[0], pattern.band[1] + 1), *pattern.shifts], device=device)
    fixed = torch.tensor(pattern.positions, dtype=torch.int64, device=device)
    i = torch.arange(start, start + rows, device=device)[:, None]
    near, far = i + offsets, fixed.expand(rows, -1)
    twice = torch.isin(far - i, offsets)
    at = torch.cat((near, far), -1)
    valid = (at >= 0) & (at < keys)
    valid[:, len(offsets) :] &= ~twice
    if pattern.causal:
        valid &= at <= i
    return at.clamp(0, max(keys - 1, 0)), valid


def dots(x: Tensor, y: Tensor, pattern: Pattern, start: int) -> Tensor:
    """<x_i, y_c(i,s)> (B, N, S) of rows x (B, N, F), at positions start.., and y (B, M, F)."""
    return _Dots.apply(x, y, pattern, start)


def gather(w: Tensor, y: Tensor, pattern: Pattern, start: int) -> Tensor:
    """sum_s w_is y_c(i,s), (B, N, F), of weights (B, N, S), 0 where there is no key, and y (B, M, F)."""
    return _Gather.apply(w, y, pattern, start)


def scatter(w: Tensor, x: Tensor, pattern: Pattern, start: int, keys: int) -> Tensor:
    """The transpose of :func:`gather`: (B, keys, F) from weights (B, N, S) and x (B, N, F)."""
    return _Scatter.apply(w, x, pattern, start, keys)


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, pattern, start):
        ctx.save_for_backward(x, y)
        ctx.where = pattern, start
        return _dots(x, y, pattern, start)

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        pattern, start = ctx.where
        dx = gather(g, y, pattern, start) if ctx.needs_input_grad[0] else None
        dy = scatter(g, x, pattern, start, y.shape[1]) if ctx.needs_input_grad[1] else None
        return dx, dy, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, y, pattern, start):
        ctx.save_for_backward(w, y)
        ctx.where = pattern, start
        return _gather(w, y, pattern, start)

    @staticmethod
    def backward(ctx, g):
        w, y = ctx.saved_tensors
        pattern, start = ctx.where
        dw = dots(g, y, pattern, start) if ctx.needs_input_grad[0] else None
        dy = scatter(w, g, pattern, start, y.shape[1]) if ctx.needs_input_grad[1] else None
        return dw, dy, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, x, pattern, start, keys):
        ctx.save_for_backward(w, x)
        ctx.where = pattern, start
        return _scatter(w, x, pattern, start, keys)

    @staticmethod
    def backward(ctx, g):
        w, x = ctx.saved_tensors
        dw = dots(x, g, *ctx.where) if ctx.needs_input_grad[0] else None
        dx = gather(w, g, *ctx.where) if ctx.needs_input_grad[1] else None
        return dw, dx, None, None, None


def _dots(x: Tensor, y: Tensor, pattern: Pattern, start: int) -> Tensor:
    b, n, _ = x.shape
    out = x.new_zeros(b, n, pattern.columns)
    band, positions = _columns(pattern)
    blocks = _blocks(x)
    product = torch.bmm(blocks, _windows(y, pattern, start, n).mT)
    out[..., band] = _diagonals(product, b, pattern).reshape(b, -1, band.stop)[:, :n]
    if pattern.positions:
        out[..., positions] = x @ _fixed(y, pattern).mT
    for column, rows, there in _shifted(pattern, start, n, y.shape[1], x):
        out[:, rows, column] = (x[:, rows] * y[:, there]).sum(-1)
    return out


def _gather(w: Tensor, y: Tensor, pattern: Pattern, start: int) -> Tensor:
    b, n, _ = w.shape
    band, positions = _columns(pattern)
    product = torch.bmm(_banded(w[..., band], pattern), _windows(y, pattern, start, n))
    out = product.view(b, -1, y.shape[-1])[:, :n].contiguous()
    if pattern.positions:
        out.baddbmm_(w[..., positions], _fixed(y, pattern))
    for column, rows, there in _shifted(pattern, start, n, y.shape[1], out):
        out[:, rows].addcmul_(y[:, there], w[:, rows, column, None])
    return out


def _scatter(w: Tensor, x: Tensor, pattern: Pattern, start: int, keys: int) -> Tensor:
    b, n, f = x.shape
    band, positions = _columns(pattern)
    windows = torch.bmm(_banded(w[..., band], pattern).mT, _blocks(x))  # (B * blocks, W, F)
    windows = windows.view(b, -1, *windows.shape[1:])
    blocks, width = windows.shape[1:3]
    # windows overlap: each is cut into stretches of BAND_ROWS, which lie side by side
    stretches = -(-width // BAND_ROWS)
    total = x.new_zeros(b, blocks + stretches - 1, BAND_ROWS, f)
    for j in range(stretches):
        some = windows[:, :, j * BAND_ROWS : (j + 1) * BAND_ROWS]
        total[:, j : j + blocks, : some.shape[2]] += some
    total = total.flatten(1, 2)
    out = x.new_zeros(b, keys, f)
    first = start + pattern.band[0]
    left, right = max(first, 0), min(first + total.shape[1], keys)
    if left < right:
        out[:, left:right] = total[:, left - first : right - first]
    if pattern.positions:
        at = torch.tensor(pattern.positions, device=x.device)
        there = at < keys
        out.index_add_(1, at[there], (w[..., positions].mT @ x)[:, there])
    for column, rows, there in _shifted(pattern, start, n, keys, x):
        out[:, there].addcmul_(x[:, rows], w[:, rows, column, None])
    return out


def _columns(pattern: Pattern) -> tuple[slice, slice]:
    """Columns of the band and of the fixed positions; those of the shifts lie between."""
    band = pattern.band[1] - pattern.band[0] + 1
    return slice(0, band), slice(band + len(pattern.shifts), pattern.columns)


def _shifted(pattern: Pattern, start: int, n: int, keys: int, like: Tensor):
    """(column, rows, their keys) of the shifts, in stretches of rows that stay in cache."""
    step = max(1, CACHED // max(1, like.shape[0] * like.shape[-1]))
    band = pattern.band[1] - pattern.band[0] + 1
    for top in range(0, n, step):
        for column, offset in enumerate(pattern.shifts, band):
            a = max(top, -start - offset)
            e = min(top + step, n, keys - start - offset)
            if a < e:
                yield column, slice(a, e), slice(a + start + offset, e + start + offset)


def _fixed(y: Tensor, pattern: Pattern) -> Tensor:
    at = torch.tensor(pattern.positions, device=y.device).clamp(max=y.shape[1] - 1)
    return y.index_select(1, at)


def _blocks(x: Tensor) -> Tensor:
    """Rows in blocks of BAND_ROWS, the last filled with zeros: (B, N, F) -> (B * blocks, BAND_ROWS, F)."""
    short = -x.shape[1] % BAND_ROWS
    return (pad(x, (0, 0, 0, short)) if short else x).reshape(-1, BAND_ROWS, x.shape[-1])


def _windows(y: Tensor, pattern: Pattern, start: int, n: int) -> Tensor:
    """The keys that each block of queries reaches by its band, zeros beyond the ends: (B * blocks, W, F)."""
    low, high = pattern.band
    blocks = -(-n // BAND_ROWS)
    first, length = start + low, blocks * BAND_ROWS + high - low
    left, right = min(max(first, 0), y.shape[1]), min(max(first + length, 0), y.shape[1])
    some = y[:, left : max(left, right)]
    before = min(max(-first, 0), length)
    some = pad(some, (0, 0, before, length - before - some.shape[1]))
    return some.unfold(1, BAND_ROWS + high - low, BAND_ROWS).mT.reshape(-1, BAND_ROWS + high - low, y.shape[-1])


def _diagonals(product: Tensor, b: int, pattern: Pattern) -> Tensor:
    """View of (B * blocks, BAND_ROWS, W) in which column c of row r is the product's column r + c."""
    width = product.shape[-1]
    band = pattern.band[1] - pattern.band[0] + 1
    shape = (b, product.shape[0] // max(b, 1), BAND_ROWS, band)
    return product.as_strided(shape, (shape[1] * BAND_ROWS * width, BAND_ROWS * width, width + 1, 1))


def _banded(w: Tensor, pattern: Pattern) -> Tensor:
    """Weights (B, N, band) as the banded blocks (B * blocks, BAND_ROWS, W)."""
    b, n, band = w.shape
    short = -n % BAND_ROWS
    blocks = (n + short) // BAND_ROWS
    out = w.new_zeros(b * blocks, BAND_ROWS, BAND_ROWS + band - 1)
    _diagonals(out, b, pattern).copy_(pad(w, (0, 0, 0, short)).view(b, blocks, BAND_ROWS, band))
    return out

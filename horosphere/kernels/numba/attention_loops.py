"""The loops of :mod:`horosphere.kernels.numba.attention`; importing this imports numba.

A row of a tile stays in the first cache while small loops go over it, one after the other, so that the compiler
vectorises each.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numba.core import types

from horosphere import _compiled, _numerics
from horosphere.kernels.numba.arguments import Layout
from horosphere.kernels.numba.products import add_times, numbers_at, rows_by_columns
from horosphere.kernels.numba.sqdist_loops import hyperbolic, spherical

__all__ = ["FORWARD", "forward"]

# What both directions take: of ``entries`` batch entries, of which ``shares`` threads work some each.
POINTS = {
    "value": ("values", "columns", "width"),  # one for all entries, or one each
    "x": ("xs", "rows", "points"),
    "y": ("ys", "columns", "points"),
    "rates": ("entries", 4),  # eps, c eps, unit and theta of each entry, see Entry
    "cx": ("entries", "rows"),
    "rx": ("entries", "rows"),
    "n": ("entries", "columns"),
    "w": ("entries", "columns"),
    "scratch": ("shares", "memory"),
}
NUMBERS = (
    "side", "sign", "resolve", "last", "weighted", "shares", "entries", "rows", "columns", "points", "width", "values",
    "xs", "ys", "height", "memory",
)  # fmt: skip
FORWARD = Layout(NUMBERS, POINTS | {"out": ("entries", "rows", "width"), "den": ("entries", "rows")})

jit = _compiled.njit(bare=True)
sum_jit = _compiled.njit(fastmath=_compiled.ANY_ORDER, bare=True)

ZERO, ONE, TWO = (np.float32(c) for c in (0, 1, 2))
TINY = np.float32(_numerics.SMALLEST_CHORD2)


class Settings(NamedTuple):
    """What is one for all entries."""

    sgemm: int
    side: int  # columns of a tile
    sign: int  # of the curvature
    resolve: int  # whether unresolved pairs are looked for
    last: int  # row i sees the columns before i + last
    weighted: int  # whether points have weights w_i and w_j, which are 1 otherwise


class Entry(NamedTuple):
    """One batch entry."""

    v: np.ndarray
    x: np.ndarray
    y: np.ndarray
    cx: np.ndarray  # c w_i: t = c w_i w_j |x_i - y_j|^2
    rx: np.ndarray  # c w_i |x_i|^2
    n: np.ndarray  # w_j |y_j|^2
    w: np.ndarray  # w_j
    eps: np.float32
    offset: np.float32  # c eps
    unit: np.float32  # d^2 = unit phi^2
    theta: np.float32


@sum_jit
def sum_of(row):
    total = ZERO
    for j in range(row.shape[0]):
        total += row[j]
    return total


@sum_jit
def dot(a, b):
    total = ZERO
    for j in range(a.shape[0]):
        total += a[j] * b[j]
    return total


@sum_jit
def difference2(x, y):
    """|x - y|^2 in float64."""
    total = 0.0
    for f in range(x.shape[0]):
        delta = np.float64(x[f]) - np.float64(y[f])
        total += delta * delta
    return total


@jit
def _distances(t, r, c, n, w, theta, offset):
    """t of a row in place of <x_i, y_j>; how many are unresolved by the rule of near.py, NaN among them."""
    count = np.int32(0)
    for j in range(t.shape[0]):
        size = r * w[j] + c * n[j]
        t[j] = size - (TWO * c) * (w[j] * t[j])
        count += np.int32(0) if t[j] + offset >= theta * size else np.int32(1)
    return count


@jit
def _rework(one, t, i, first, found):
    """Unresolved pairs of row i from differences in float64; ``found`` gets their places."""
    count = 0
    for j in range(t.shape[0]):
        at = first + j
        size = one.rx[i] * one.w[at] + one.cx[i] * one.n[at]
        if not t[j] + one.offset >= one.theta * size:
            scale = np.float64(one.cx[i]) * np.float64(one.w[at])
            t[j] = np.float32(difference2(one.x[i], one.y[at]) * scale)
            found[count] = j
            count += 1
    return count


@jit
def distances(settings, one, t, i, first, found):
    """t of row i in place of <x_i, y_j>, from column ``first`` on; how many pairs were worked from differences."""
    count = _distances(t, one.rx[i], one.cx[i], one.n[first:], one.w[first:], one.theta, one.offset)
    return _rework(one, t, i, first, found) if settings.resolve and count else 0


@jit
def _weigh(t, sign, unit, eps):
    """1 / (d^2 + eps) in place of t."""
    if sign < 0:
        for j in range(t.shape[0]):
            phi = hyperbolic(TINY if t[j] < TINY else t[j])
            t[j] = ONE / (phi * phi * unit + eps)
    elif sign > 0:
        for j in range(t.shape[0]):
            u = TINY if t[j] < TINY else t[j]
            phi = spherical(TWO if u > TWO else u)
            t[j] = ONE / (phi * phi * unit + eps)
    else:
        for j in range(t.shape[0]):
            t[j] = ONE / ((TINY if t[j] < TINY else t[j]) + eps)


@jit
def fill(row, value):
    for j in range(row.shape[0]):
        row[j] = value


@jit
def clear_rows(out, den, i0, i1):
    for i in range(i0, i1):
        fill(out[i], ZERO)
        den[i] = ZERO


@jit
def divide_rows(out, den, i0, i1):
    """Means from sums; rows that see nothing stay 0."""
    for i in range(i0, i1):
        if den[i] != ZERO:
            for k in range(out.shape[1]):
                out[i, k] /= den[i]


@jit
def _forward_rows(settings, one, i0, i1, tile, found, out, den):
    """Results of rows i0 to i1 of one entry."""
    side, last = settings.side, settings.last
    end = min(one.y.shape[0], max(0, i1 - 1 + last))
    clear_rows(out, den, i0, i1)
    for j0 in range(0, end, side):
        j1 = min(j0 + side, end)
        rows_by_columns(settings.sgemm, one.x[i0:i1], one.y[j0:j1], tile, side)
        for i in range(i0, i1):
            row = tile[(i - i0) * side :][: j1 - j0]
            seen = min(j1 - j0, max(0, i + last - j0))
            fill(row[seen:], ZERO)
            t = row[:seen]
            distances(settings, one, t, i, j0, found)
            _weigh(t, settings.sign, one.unit, one.eps)
            den[i] += sum_of(t)
        add_times(settings.sgemm, tile, side, one.v[j0:j1], out.shape[1], out[i0:i1])
    divide_rows(out, den, i0, i1)


@jit
def matrices(address, entries, rows, columns):
    return numba.carray(numbers_at(address), (entries, rows, columns))


@jit
def vectors(address, entries, length):
    """Empty ones where the address is 0."""
    return numba.carray(numbers_at(address), (entries, length if address else 0))


@jit
def settings_of(g):
    return Settings(g.sgemm, g.side, g.sign, g.resolve, g.last, g.weighted)


@jit
def entry_of(g, e):
    rates = vectors(g.rates, g.entries, 4)[e]
    return Entry(
        matrices(g.value, g.values, g.columns, g.width)[e % g.values],
        matrices(g.x, g.xs, g.rows, g.points)[e % g.xs],
        matrices(g.y, g.ys, g.columns, g.points)[e % g.ys],
        vectors(g.cx, g.entries, g.rows)[e],
        vectors(g.rx, g.entries, g.rows)[e],
        vectors(g.n, g.entries, g.columns)[e],
        vectors(g.w, g.entries, g.columns)[e],
        rates[0],
        rates[1],
        rates[2],
        rates[3],
    )


@_compiled.cfunc(types.void(types.int64, types.int64, types.CPointer(numba.from_dtype(FORWARD.dtype))))
def forward(begin, end, given):
    """Shares ``begin`` to ``end`` of the blocks of rows of all entries."""
    g = numba.carray(given, 1)[0]
    settings = settings_of(g)
    memory = vectors(g.scratch, g.shares, g.memory)
    out, den = matrices(g.out, g.entries, g.rows, g.width), vectors(g.den, g.entries, g.rows)
    found = np.empty(settings.side, np.int64)
    blocks = -(-g.rows // g.height)
    for share in range(begin, end):
        for task in range(share * g.entries * blocks // g.shares, (share + 1) * g.entries * blocks // g.shares):
            e, i0 = task // blocks, task % blocks * g.height
            i1 = min(g.rows, i0 + g.height)
            _forward_rows(settings, entry_of(g, e), i0, i1, memory[share], found, out[e], den[e])

"""The loops of :mod:`horosphere.kernels.blocked.compiled_attention`; importing this imports numba.

A row of a tile stays in the first cache while small loops go over it, one after the other, so that the compiler
vectorises each.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numba.core import types

from horosphere.kernels.blocked.compiled_products import add_times, numbers_at, rows_by_columns
from horosphere.kernels.blocked.compiled_tiles import hyperbolic, spherical

__all__ = ["GIVEN", "forward"]

# Numbers that a launcher hands over.
GIVEN = 43

OPTIONS = {"cache": True, "error_model": "numpy"}
# nothing of Python's is called or calls: wrappers would take most of the time of compilation
BARE = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
jit = numba.njit(fastmath={"contract", "nsz"}, **OPTIONS, **BARE)
# sums in any order, which vectorise
sum_jit = numba.njit(fastmath={"contract", "nsz", "reassoc"}, **OPTIONS, **BARE)

ZERO, ONE, TWO = (np.float32(c) for c in (0, 1, 2))
# t is kept at least here, as in horosphere.kernels.blocked.near
TINY = np.float32(1e-30)


class Settings(NamedTuple):
    """What is one for all entries."""

    sgemm: int
    side: int  # columns of a tile
    sign: int  # of the curvature
    resolve: int  # whether unresolved pairs are looked for
    last: int  # row i sees the columns before i + last


class Entry(NamedTuple):
    """One batch entry; without weights wx and wy are empty and w is 1."""

    a: np.ndarray
    b: np.ndarray
    v: np.ndarray
    x: np.ndarray
    y: np.ndarray
    wx: np.ndarray
    wy: np.ndarray
    p: np.ndarray
    q: np.ndarray
    n: np.ndarray
    w: np.ndarray
    c: np.float32  # t = c u w_i w_j
    eps: np.float32
    offset: np.float32  # c eps
    unit: np.float32  # d^2 = unit phi^2


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
def _difference2(x, y):
    """|x - y|^2 in float64."""
    total = 0.0
    for f in range(x.shape[0]):
        delta = np.float64(x[f]) - np.float64(y[f])
        total += delta * delta
    return total


@jit
def _unresolved(t, own, slope, n, w, offset):
    """How many pairs of a row are below their limit; NaN counts."""
    count = np.int32(0)
    for j in range(t.shape[0]):
        count += np.int32(0) if t[j] + offset >= own * w[j] + slope * n[j] else np.int32(1)
    return count


@jit
def _rework(one, t, i, first, found):
    """Pairs of row i that are below their limit, from differences in float64; ``found`` gets their places."""
    count = 0
    for j in range(t.shape[0]):
        at = first + j
        if not t[j] + one.offset >= one.p[i] * one.w[at] + one.q[i] * one.n[at]:
            scale = np.float64(one.c)
            if one.wx.shape[0]:
                scale *= np.float64(one.wx[i]) * np.float64(one.wy[at])
            t[j] = np.float32(_difference2(one.x[i], one.y[at]) * scale)
            found[count] = j
            count += 1
    return count


@jit
def resolved(settings, one, t, i, first, found):
    """Makes pairs again that need it; their number."""
    if settings.resolve and _unresolved(t, one.p[i], one.q[i], one.n[first:], one.w[first:], one.offset):
        return _rework(one, t, i, first, found)
    return 0


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
def _forward_rows(settings, one, i0, i1, tile, found, out, den):
    """Results of rows i0 to i1 of one entry."""
    side, last = settings.side, settings.last
    end = min(one.b.shape[0], max(0, i1 - 1 + last))
    for i in range(i0, i1):
        fill(out[i], ZERO)
        den[i] = ZERO
    for j0 in range(0, end, side):
        j1 = min(j0 + side, end)
        rows_by_columns(settings.sgemm, one.a[i0:i1], one.b[j0:j1], tile, side)
        for i in range(i0, i1):
            row = tile[(i - i0) * side :][: j1 - j0]
            seen = min(j1 - j0, max(0, i + last - j0))
            fill(row[seen:], ZERO)
            t = row[:seen]
            resolved(settings, one, t, i, j0, found)
            _weigh(t, settings.sign, one.unit, one.eps)
            den[i] += sum_of(t)
        add_times(settings.sgemm, tile, side, one.v[j0:j1], out.shape[1], out[i0:i1])
    for i in range(i0, i1):
        if den[i] != ZERO:
            for k in range(out.shape[1]):
                out[i, k] /= den[i]


@jit
def matrices(address, entries, rows, columns):
    return numba.carray(numbers_at(address), (entries, rows, columns))


@jit
def vectors(address, entries, length):
    """Empty ones where the address is 0."""
    return numba.carray(numbers_at(address), (entries, length if address else 0))


@jit
def settings_of(g):
    return Settings(g[0], g[1], g[2], g[3], g[4])


@jit
def entry_of(g, e):
    entries, rows, columns, points, width = g[6], g[7], g[8], g[9], g[10]
    numbers = vectors(g[11], entries, 4)[e]
    return Entry(
        matrices(g[12], entries, rows, points + 2)[e],
        matrices(g[13], entries, columns, points + 2)[e],
        # one for all entries, or one each
        matrices(g[14], g[15], columns, width)[e % g[15]],
        matrices(g[16], g[17], rows, points)[e % g[17]],
        matrices(g[18], g[19], columns, points)[e % g[19]],
        vectors(g[20], entries, rows)[e],
        vectors(g[21], entries, columns)[e],
        vectors(g[22], entries, rows)[e],
        vectors(g[23], entries, rows)[e],
        vectors(g[24], entries, columns)[e],
        vectors(g[25], entries, columns)[e],
        numbers[0],
        numbers[1],
        numbers[2],
        numbers[3],
    )


@numba.cfunc(types.void(types.int64, types.int64, types.CPointer(types.int64)), **OPTIONS)
def forward(begin, end, given):
    """Shares ``begin`` to ``end`` of the blocks of rows of all entries; ``given`` as the launcher lays it out."""
    g = numba.carray(given, GIVEN)
    settings = settings_of(g)
    shares, entries, rows, height = g[5], g[6], g[7], g[26]
    memory = vectors(g[27], shares, g[28])
    out, den = matrices(g[29], entries, rows, g[10]), vectors(g[30], entries, rows)
    found = np.empty(settings.side, np.int64)
    blocks = -(-rows // height)
    for share in range(begin, end):
        for task in range(share * entries * blocks // shares, (share + 1) * entries * blocks // shares):
            e, i0 = task // blocks, task % blocks * height
            i1 = min(rows, i0 + height)
            _forward_rows(settings, entry_of(g, e), i0, i1, memory[share], found, out[e], den[e])

"""The backward loops of :mod:`horosphere.kernels.numba.attention`, apart from the forward ones because each
module's are compiled when it is imported.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numba.core import types

from horosphere import _compiled
from horosphere.kernels.numba.arguments import Layout
from horosphere.kernels.numba.attention_loops import (
    NUMBERS,
    ONE,
    POINTS,
    TINY,
    TWO,
    ZERO,
    distances,
    dot,
    entry_of,
    fill,
    jit,
    matrices,
    settings_of,
    sum_of,
    vectors,
)
from horosphere.kernels.numba.products import add_times, add_transposed_times, rows_by_columns
from horosphere.kernels.numba.sqdist_loops import log1p, spherical

__all__ = ["BACKWARD", "backward"]


class Upper(NamedTuple):
    """What a backward pass takes from the result of one entry; ``dlse`` may be empty."""

    out: np.ndarray
    lse: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray
    learned: int  # whether the gradient of eps is wanted


class Sums(NamedTuple):
    """Of one entry, with G = dL/dt / scale and H_ij = c w_i w_j G_ij that of |x_i - y_j|^2."""

    dq: np.ndarray  # sum_j H_ij y_j
    rows: np.ndarray  # sum_j H_ij
    rows_t: np.ndarray  # sum_j G_ij t_ij, with weights
    rows_z: np.ndarray  # sum_j dL/dz_ij / scale, where wanted
    dk: np.ndarray  # sum_i H_ij x_i
    columns: np.ndarray  # sum_i H_ij
    columns_t: np.ndarray
    dv: np.ndarray


@jit
def _pull(t, g, slope, sign, unit, eps, c, inverse):
    """W = w / den in place of t and (g - c) W w in place of g; half of dphi^2/dt in ``slope``, but for flat rows."""
    if sign < 0:
        for j in range(t.shape[0]):
            u = TINY if t[j] < TINY else t[j]
            root = np.sqrt(u * (u + TWO))
            phi = log1p(u + root)
            slope[j] = phi / root
            w = ONE / (phi * phi * unit + eps)
            t[j] = w * inverse
            g[j] = (g[j] - c) * (w * inverse) * w
    elif sign > 0:
        for j in range(t.shape[0]):
            u = TINY if t[j] < TINY else t[j]
            u = TWO if u > TWO else u
            phi = spherical(u)
            slope[j] = ZERO if u >= TWO else phi / np.sqrt(u * (TWO - u))
            w = ONE / (phi * phi * unit + eps)
            t[j] = w * inverse
            g[j] = (g[j] - c) * (w * inverse) * w
    else:
        for j in range(t.shape[0]):
            w = ONE / ((TINY if t[j] < TINY else t[j]) + eps)
            t[j] = w * inverse
            g[j] = (g[j] - c) * (w * inverse) * w


@jit
def _copy(into, row):
    for j in range(row.shape[0]):
        into[j] = row[j]


@jit
def _multiply(g, by):
    for j in range(g.shape[0]):
        g[j] *= by[j]


@jit
def _scale(g, c, w):
    """c w_j g_j in place of g."""
    for j in range(g.shape[0]):
        g[j] *= c * w[j]


@jit
def _add(into, g):
    for j in range(g.shape[0]):
        into[j] += g[j]


@jit
def _add_product(into, g, t):
    for j in range(g.shape[0]):
        into[j] += g[j] * t[j]


@jit
def _pull_apart(one, h, found, i, first, dq, dk):
    """Gradients of the pairs found, from differences too; nothing of them is left to the products."""
    for j in found:
        upper = np.float64(h[j])
        h[j] = ZERO
        at = first + j
        for f in range(one.x.shape[1]):
            delta = np.float32(upper * (np.float64(one.x[i, f]) - np.float64(one.y[at, f])))
            dq[i, f] -= delta
            dk[at, f] += delta


@jit
def _backward_rows(settings, one, upper, i0, i1, memory, found, sums):
    """Adds what rows i0 to i1 of one entry give."""
    side, last, sgemm = settings.side, settings.last, settings.sgemm
    points, weighted = one.x.shape[1], settings.weighted
    size = (i1 - i0) * side
    tile, grad = memory[:size], memory[size : 2 * size]
    kept, slope = memory[2 * size : 2 * size + side], memory[2 * size + side : 2 * size + 2 * side]
    end = min(one.y.shape[0], max(0, i1 - 1 + last))
    for j0 in range(0, end, side):
        j1 = min(j0 + side, end)
        rows_by_columns(sgemm, one.x[i0:i1], one.y[j0:j1], tile, side)
        rows_by_columns(sgemm, upper.dout[i0:i1], one.v[j0:j1], grad, side)
        for i in range(i0, i1):
            row, pulled = tile[(i - i0) * side :][: j1 - j0], grad[(i - i0) * side :][: j1 - j0]
            seen = min(j1 - j0, max(0, i + last - j0))
            fill(row[seen:], ZERO)
            fill(pulled[seen:], ZERO)
            t, g = row[:seen], pulled[:seen]
            count = distances(settings, one, t, i, j0, found)
            if weighted:
                _copy(kept, t)
            c = dot(upper.dout[i], upper.out[i])
            if upper.dlse.shape[0]:
                c -= upper.dlse[i]
            inverse = ZERO if upper.lse[i] == -np.inf else np.float32(np.exp(-upper.lse[i]))
            _pull(t, g, slope, settings.sign, one.unit, one.eps, c, inverse)
            if upper.learned:
                sums.rows_z[i] += sum_of(g)
            if settings.sign:
                _multiply(g, slope)
            if weighted:
                sums.rows_t[i] += dot(g, kept)
                _add_product(sums.columns_t[j0:], g, kept)
            _scale(g, one.cx[i], one.w[j0:])
            if count:
                _pull_apart(one, g, found[:count], i, j0, sums.dq, sums.dk)
            sums.rows[i] += sum_of(g)
            _add(sums.columns[j0:], g)
        add_transposed_times(sgemm, tile, side, upper.dout[i0:i1], sums.dv.shape[1], sums.dv[j0:j1])
        add_times(sgemm, grad, side, one.y[j0:j1], points, sums.dq[i0:i1])
        add_transposed_times(sgemm, grad, side, one.x[i0:i1], points, sums.dk[j0:j1])


# Sums over rows have an entry for each of ``stretches`` stretches of rows.
BACKWARD = Layout(
    (*NUMBERS, "learned", "stretches", "stretched"),
    POINTS
    | {
        "out": ("entries", "rows", "width"),
        "lse": ("entries", "rows"),
        "dout": ("entries", "rows", "width"),
        "dlse": ("entries", "rows"),
        "dq": ("entries", "rows", "points"),
        "sums_rows": ("entries", "rows"),
        "sums_rows_t": ("entries", "rows"),
        "sums_rows_z": ("entries", "rows"),
        "dk": ("stretched", "columns", "points"),
        "sums_columns": ("stretched", "columns"),
        "sums_columns_t": ("stretched", "columns"),
        "dv": ("stretched", "columns", "width"),
    },
    frozenset({"dlse", "sums_rows_t", "sums_columns_t"}),
)


@_compiled.cfunc(types.void(types.int64, types.int64, types.CPointer(numba.from_dtype(BACKWARD.dtype))))
def backward(begin, end, given):
    """As :func:`forward`, for stretches of rows."""
    g = numba.carray(given, 1)[0]
    settings = settings_of(g)
    memory = vectors(g.scratch, g.shares, g.memory)
    found = np.empty(settings.side, np.int64)
    blocks, tasks = -(-g.rows // g.height), g.entries * g.stretches
    for share in range(begin, end):
        for task in range(share * tasks // g.shares, (share + 1) * tasks // g.shares):
            e, stretch = task // g.stretches, task % g.stretches
            at = stretch * g.entries + e
            upper = Upper(
                matrices(g.out, g.entries, g.rows, g.width)[e],
                vectors(g.lse, g.entries, g.rows)[e],
                matrices(g.dout, g.entries, g.rows, g.width)[e],
                vectors(g.dlse, g.entries, g.rows)[e],
                g.learned,
            )
            sums = Sums(
                matrices(g.dq, g.entries, g.rows, g.points)[e],
                vectors(g.sums_rows, g.entries, g.rows)[e],
                vectors(g.sums_rows_t, g.entries, g.rows)[e],
                vectors(g.sums_rows_z, g.entries, g.rows)[e],
                matrices(g.dk, g.stretched, g.columns, g.points)[at],
                vectors(g.sums_columns, g.stretched, g.columns)[at],
                vectors(g.sums_columns_t, g.stretched, g.columns)[at],
                matrices(g.dv, g.stretched, g.columns, g.width)[at],
            )
            one = entry_of(g, e)
            for block in range(stretch * blocks // g.stretches, (stretch + 1) * blocks // g.stretches):
                i0, i1 = block * g.height, min(g.rows, (block + 1) * g.height)
                _backward_rows(settings, one, upper, i0, i1, memory[share], found, sums)

"""The loop of :mod:`horosphere.kernels.numba.metric`; importing this imports numba."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numba.core import types

from horosphere import _compiled
from horosphere.kernels.numba.arguments import Layout
from horosphere.kernels.numba.attention_loops import (
    ONE,
    TINY,
    ZERO,
    clear_rows,
    difference2,
    divide_rows,
    fill,
    jit,
    matrices,
    sum_jit,
    sum_of,
    vectors,
)
from horosphere.kernels.numba.products import add_times, rows_by_columns

__all__ = ["FORWARD", "forward"]

# ``ranks_q`` and ``ranks_k`` are 0 where an end does not measure.
FORWARD = Layout(
    (
        "side", "resolve", "last", "shares", "entries", "rows", "columns", "points", "width", "height", "memory",
        "values", "ranks_q", "ranks_k", "batch", "start", "wide", "long",
    ),
    {
        "scratch": ("shares", "memory"),
        "out": ("entries", "rows", "width"),
        "den": ("entries", "rows"),
        "rates": ("entries", 2),  # eps and the share of a metric
        "a": ("entries", "rows", "wide"),  # wide: points + 2
        "b": ("entries", "columns", "wide"),
        "x": ("entries", "rows", "long"),  # long: points + 1
        "y": ("entries", "columns", "long"),
        "q": ("entries", "rows", "points"),
        "k": ("entries", "columns", "points"),
        "value": ("values", "columns", "width"),
        "scales_q": ("entries", "rows"),
        "scales_k": ("entries", "columns"),
        "norms_q": ("entries", "rows"),
        "norms_k": ("entries", "columns"),
        "limits_q": ("entries", "rows"),
        "limits_k": ("entries", "columns"),
        "columns_q": ("ranks_q", "batch", "rows", "long"),
        "columns_k": ("ranks_k", "batch", "columns", "long"),
    },
    frozenset({"columns_q", "columns_k"}),
)  # fmt: skip


class Settings(NamedTuple):
    """What is one for all entries."""

    sgemm: int
    side: int  # columns of a tile
    resolve: int  # whether unresolved pairs are looked for
    last: int  # row i sees the columns before i + last


class Entry(NamedTuple):
    """One batch entry, with the names of :class:`horosphere.kernels.tiled.metric_tiles.MetricTiles`; scales are 0 and
    columns empty where an end does not measure.
    """

    a: np.ndarray
    b: np.ndarray
    x: np.ndarray
    y: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    rows_scale: np.ndarray
    columns_scale: np.ndarray
    rows_norm: np.ndarray
    columns_norm: np.ndarray
    rows_limit: np.ndarray
    columns_limit: np.ndarray
    eps: np.float32
    share: np.float32


@sum_jit
def _along2(u, x, y):
    """(u^T (x - y))^2 in float64; u has one number more."""
    total = 0.0
    for f in range(x.shape[0]):
        total += np.float64(u[f]) * (np.float64(x[f]) - np.float64(y[f]))
    return total * total


@jit
def _scale(t, own, scales, eps, clamp):
    """Flat squares times the scales of both ends, and eps."""
    for j in range(t.shape[0]):
        u = ZERO if clamp and t[j] < ZERO else t[j]
        t[j] = u * (own + scales[j]) + eps


@jit
def _add_squares(t, s):
    for j in range(t.shape[0]):
        t[j] += s[j] * s[j]


@jit
def _unresolved(z, norm, norms, limit, limits):
    """How many pairs of a row are unresolved by the rule of metric_tiles.py, NaN among them."""
    count = np.int32(0)
    for j in range(z.shape[0]):
        count += np.int32(0) if z[j] >= (norm + norms[j]) * (limit + limits[j]) else np.int32(1)
    return count


@jit
def _rework(one, query, key, z, i, first):
    """Unresolved pairs of row i from differences in float64."""
    for j in range(z.shape[0]):
        at = first + j
        limit = (one.rows_norm[i] + one.columns_norm[at]) * (one.rows_limit[i] + one.columns_limit[at])
        if not z[j] >= limit:
            along = 0.0
            for r in range(query.shape[0]):
                along += _along2(query[r, i], one.q[i], one.k[at])
            for r in range(key.shape[0]):
                along += _along2(key[r, at], one.q[i], one.k[at])
            scale = np.float64(one.rows_scale[i]) + np.float64(one.columns_scale[at])
            d2 = scale * difference2(one.q[i], one.k[at]) + np.float64(one.share) * along
            z[j] = np.float32(d2 + np.float64(one.eps))


@jit
def _weigh(z):
    """1 / z in place."""
    for j in range(z.shape[0]):
        z[j] = ONE / (TINY if z[j] < TINY else z[j])


@jit
def _forward_rows(settings, one, query, key, i0, i1, memory, out, den):
    """Results of rows i0 to i1 of one entry."""
    side, last, sgemm = settings.side, settings.last, settings.sgemm
    tile, along = memory[: (i1 - i0) * side], memory[(i1 - i0) * side :]
    end = min(one.k.shape[0], max(0, i1 - 1 + last))
    clear_rows(out, den, i0, i1)
    for j0 in range(0, end, side):
        j1 = min(j0 + side, end)
        rows_by_columns(sgemm, one.a[i0:i1], one.b[j0:j1], tile, side)
        for i in range(i0, i1):
            row = tile[(i - i0) * side :][: j1 - j0]
            _scale(row, one.rows_scale[i], one.columns_scale[j0:], one.eps, settings.resolve == 0)
        for r in range(query.shape[0] + key.shape[0]):
            if r < query.shape[0]:
                rows_by_columns(sgemm, query[r, i0:i1], one.y[j0:j1], along, side)
            else:
                rows_by_columns(sgemm, one.x[i0:i1], key[r - query.shape[0], j0:j1], along, side)
            for i in range(i0, i1):
                at = (i - i0) * side
                _add_squares(tile[at:][: j1 - j0], along[at:][: j1 - j0])
        for i in range(i0, i1):
            row = tile[(i - i0) * side :][: j1 - j0]
            seen = min(j1 - j0, max(0, i + last - j0))
            fill(row[seen:], ZERO)
            z = row[:seen]
            if settings.resolve and _unresolved(
                z, one.rows_norm[i], one.columns_norm[j0:], one.rows_limit[i], one.columns_limit[j0:]
            ):
                _rework(one, query, key, z, i, j0)
            _weigh(z)
            den[i] += sum_of(z)
        add_times(sgemm, tile, side, one.v[j0:j1], out.shape[1], out[i0:i1])
    divide_rows(out, den, i0, i1)


@jit
def _of_rank(address, rank, total, length, features):
    """Columns of all ranks and batch entries, (R, B, length, features)."""
    return matrices(address, rank * total, length, features).reshape((rank, total, length, features))


@_compiled.cfunc(types.void(types.int64, types.int64, types.CPointer(numba.from_dtype(FORWARD.dtype))))
def forward(begin, end, given):
    """Shares ``begin`` to ``end`` of the blocks of rows of all entries."""
    g = numba.carray(given, 1)[0]
    settings = Settings(g.sgemm, g.side, g.resolve, g.last)
    memory = vectors(g.scratch, g.shares, g.memory)
    out, den = matrices(g.out, g.entries, g.rows, g.width), vectors(g.den, g.entries, g.rows)
    blocks = -(-g.rows // g.height)
    for share in range(begin, end):
        for task in range(share * g.entries * blocks // g.shares, (share + 1) * g.entries * blocks // g.shares):
            e, i0 = task // blocks, task % blocks * g.height
            rates = vectors(g.rates, g.entries, 2)[e]
            one = Entry(
                matrices(g.a, g.entries, g.rows, g.wide)[e],
                matrices(g.b, g.entries, g.columns, g.wide)[e],
                matrices(g.x, g.entries, g.rows, g.long)[e],
                matrices(g.y, g.entries, g.columns, g.long)[e],
                matrices(g.q, g.entries, g.rows, g.points)[e],
                matrices(g.k, g.entries, g.columns, g.points)[e],
                matrices(g.value, g.values, g.columns, g.width)[e % g.values],  # one for all entries, or one each
                vectors(g.scales_q, g.entries, g.rows)[e],
                vectors(g.scales_k, g.entries, g.columns)[e],
                vectors(g.norms_q, g.entries, g.rows)[e],
                vectors(g.norms_k, g.entries, g.columns)[e],
                vectors(g.limits_q, g.entries, g.rows)[e],
                vectors(g.limits_k, g.entries, g.columns)[e],
                rates[0],
                rates[1],
            )
            query = _of_rank(g.columns_q, g.ranks_q, g.batch, g.rows, g.long)[:, g.start + e]
            key = _of_rank(g.columns_k, g.ranks_k, g.batch, g.columns, g.long)[:, g.start + e]
            i1 = min(g.rows, i0 + g.height)
            _forward_rows(settings, one, query, key, i0, i1, memory[share], out[e], den[e])

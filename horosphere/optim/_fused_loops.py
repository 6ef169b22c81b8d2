"""The loop of :mod:`horosphere.optim._fused`: one pass over the rows of a table; importing this imports numba."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from horosphere import _compiled
from horosphere.optim import _fused_maps

__all__ = ["GIVEN", "KINDS", "steps"]

_jit = _compiled.njit(fastmath=(), bare=True)

KINDS = ("ball", "sphere", "hyperboloid")
_BALL, _SPHERE, _HYPERBOLOID = range(len(KINDS))
_Lanes, _ball, _sphere, _hyperboloid = _fused_maps.Lanes, _fused_maps.ball, _fused_maps.sphere, _fused_maps.hyperboloid

# What the launcher hands over: whole numbers, addresses of arrays (0: none) and settings.
GIVEN = np.dtype(
    [(name, np.int64) for name in ("kind", "wide", "shares", "count", "size", "dim", "lanes")]
    + [(name, np.int64) for name in ("points", "grads", "firsts", "seconds", "rows", "bad")]
    + [(name, np.float64) for name in ("kappa", "limit", "beta1", "beta2", "rate", "bias", "eps", "decay")]
)


def _at(typingctx, address):

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


# The memory at an address.
_memory: Any = intrinsic(_at)


class _Settings(NamedTuple):
    """Those of the numbers that rows need, by value: a store to an array might change what lies in memory."""

    kind: int
    wide: int
    dim: int
    lanes: int
    kappa: float
    limit: float
    beta1: float
    beta2: float
    rate: float
    bias: float
    eps: float
    decay: float


@_jit
def _read(table, rows, first, count, out):
    """Rows of a table as columns; those after the last are the first one again."""
    for k in range(out.shape[1]):
        at = first + (k if k < count else 0)
        row = rows[at] if len(rows) else at
        for i in range(out.shape[0]):
            out[i, k] = table[row, i]


@_jit
def _write(table, rows, first, count, good, values):
    for k in range(count):
        if good[k] == 0.0:
            at = first + k
            row = rows[at] if len(rows) else at
            for i in range(values.shape[0]):
                table[row, i] = values[i, k]


@_jit
def _share(o, points, grads, firsts, seconds, rows, begin, end, bad):
    """Rows ``begin`` to ``end``; ``bad`` counts those whose gradient is not finite, and those that stayed."""
    empty = rows[:0]
    w = _Lanes(
        np.empty((o.dim, o.lanes)),
        np.empty((o.dim, o.lanes)),
        np.empty((o.dim, o.lanes)),
        np.empty((o.dim, o.lanes)),
        np.empty((1, o.lanes)),
        np.empty((14, o.lanes)),
    )
    given, good = np.empty(o.lanes), np.empty(o.lanes)
    for first in range(begin, end, o.lanes):
        count = min(o.lanes, end - first)
        _read(points, rows, first, count, w.x)
        _read(grads, empty, first, count, w.g)
        _read(firsts, rows, first, count, w.m)
        _read(seconds, rows, first, count, w.v)
        given[:] = 0.0  # 0 for a row of finite numbers, else NaN
        for i in range(o.dim):
            for k in range(o.lanes):
                given[k] += w.g[i, k] * 0.0
                w.g[i, k] += o.decay * w.x[i, k]
        if o.kind == _BALL:
            _ball(o, w)
        elif o.kind == _SPHERE:
            _sphere(o, w)
        else:
            _hyperboloid(o, w)
        for k in range(o.lanes):
            good[k] = w.v[0, k] * 0.0  # nor are these finite where the gradient is not
        for i in range(o.dim):
            for k in range(o.lanes):
                if not o.wide:
                    w.m[i, k] = np.float64(np.float32(w.m[i, k]))
                good[k] += w.m[i, k] * 0.0 + w.y[i, k] * 0.0
        for k in range(count):
            bad[0] += given[k] != 0.0
            bad[1] += good[k] != 0.0
        _write(points, rows, first, count, good, w.y)
        _write(firsts, rows, first, count, good, w.m)
        _write(seconds, rows, first, count, good, w.v)


@_compiled.cfunc(types.void(types.int64, types.int64, types.CPointer(numba.from_dtype(GIVEN))))
def steps(begin, end, given):
    """Shares ``begin`` to ``end`` of the rows that a gradient touches."""
    g = numba.carray(given, 1)[0]
    o = _Settings(
        g.kind, g.wide, g.dim, g.lanes, g.kappa, g.limit, g.beta1, g.beta2, g.rate, g.bias, g.eps, g.decay
    )  # fmt: skip
    rows = numba.carray(_memory(g.rows), g.count if g.rows else 0, np.int64)
    bad = numba.carray(_memory(g.bad), (g.shares, 2), np.int64)
    for share in range(begin, end):
        i, j = share * g.count // g.shares, (share + 1) * g.count // g.shares
        if g.wide:
            _share(
                o,
                numba.carray(_memory(g.points), (g.size, g.dim), np.float64),
                numba.carray(_memory(g.grads), (g.count, g.dim), np.float64),
                numba.carray(_memory(g.firsts), (g.size, g.dim), np.float64),
                numba.carray(_memory(g.seconds), (g.size, 1), np.float64),
                rows, i, j, bad[share],
            )  # fmt: skip
        else:
            _share(
                o,
                numba.carray(_memory(g.points), (g.size, g.dim), np.float32),
                numba.carray(_memory(g.grads), (g.count, g.dim), np.float32),
                numba.carray(_memory(g.firsts), (g.size, g.dim), np.float32),
                numba.carray(_memory(g.seconds), (g.size, 1), np.float32),
                rows, i, j, bad[share],
            )  # fmt: skip

"""The loop of :mod:`horosphere.optim._fused`: one pass over the rows of a table; importing this imports numba."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload

from horosphere import _compiled
from horosphere.optim import _fused_maps

__all__ = ["GIVEN", "KINDS", "steps"]

_jit = _compiled.njit(fastmath=(), bare=True)

_Lanes, _ball, _sphere, _hyperboloid = _fused_maps.Lanes, _fused_maps.ball, _fused_maps.sphere, _fused_maps.hyperboloid

# What the launcher hands over: whole numbers, addresses of arrays (0: none) and settings.
GIVEN = np.dtype(
    [(name, np.int64) for name in ("wide", "shares", "count", "size", "dim", "lanes")]
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
    """Those of the numbers that rows need, by value: a store to an array might change what lies in memory.

    A manifold has a class of its own, which chooses its map where a loop is compiled: unused maps cost nothing.
    """

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


class _Ball(_Settings):
    pass


class _Sphere(_Settings):
    pass


class _Hyperboloid(_Settings):
    pass


KINDS = {"ball": _Ball, "sphere": _Sphere, "hyperboloid": _Hyperboloid}
_MAPS = {_Ball: _ball, _Sphere: _sphere, _Hyperboloid: _hyperboloid}


def _move(o, w):
    """The step of some rows, by the manifold of ``o``."""


@overload(_move)
def _moves(o, w):
    step = _MAPS[o.instance_class]
    return lambda o, w: step(o, w)


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
        _move(o, w)
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


@functools.cache
def steps(kind: str, number: type) -> Any:
    """The loop for a key of KINDS and np.float32 or np.float64: shares of the rows that a gradient touches."""
    settings = KINDS[kind]

    @_compiled.cfunc(types.void(types.int64, types.int64, types.CPointer(numba.from_dtype(GIVEN))))
    def loop(begin, end, given):
        g = numba.carray(given, 1)[0]
        o = settings(
            g.wide, g.dim, g.lanes, g.kappa, g.limit, g.beta1, g.beta2, g.rate, g.bias, g.eps, g.decay
        )  # fmt: skip
        rows = numba.carray(_memory(g.rows), g.count if g.rows else 0, np.int64)
        bad = numba.carray(_memory(g.bad), (g.shares, 2), np.int64)
        for share in range(begin, end):
            i, j = share * g.count // g.shares, (share + 1) * g.count // g.shares
            _share(
                o,
                numba.carray(_memory(g.points), (g.size, g.dim), number),
                numba.carray(_memory(g.grads), (g.count, g.dim), number),
                numba.carray(_memory(g.firsts), (g.size, g.dim), number),
                numba.carray(_memory(g.seconds), (g.size, 1), number),
                rows, i, j, bad[share],
            )  # fmt: skip

    return loop

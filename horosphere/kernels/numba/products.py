"""Matrix products inside of compiled loops, by BLAS: a call through an address, with what torch's library offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from horosphere import _compiled

__all__ = ["add_times", "add_transposed_times", "numbers_at", "rows_by_columns"]

_jit = _compiled.njit(bare=True)
# numba's own types count the typing context, which only numba gives, among what callers give.
_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic

_ZERO, _ONE = np.float32(0), np.float32(1)
_N, _T = ord("N"), ord("T")


@_intrinsic
def numbers_at(typingctx, address):
    """The float32 numbers at an address."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), codegen


@_intrinsic
def _sgemm(typingctx, sgemm, ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc):
    """c = op(a) op(b) + beta c by columns, as BLAS has it; sgemm, a, b and c are addresses, ta and tb letters."""
    whole = types.int64
    signature = types.void(*[whole] * 10, types.float32, whole, whole)

    def codegen(context, builder, signature, args):
        i8, i32, f32 = ir.IntType(8), ir.IntType(32), ir.FloatType()

        def by_reference(value, kind):
            place = cgutils.alloca_once(builder, kind)
            builder.store(value if isinstance(kind, ir.FloatType) else builder.trunc(value, kind), place)
            return place

        def pointer(address):
            return builder.inttoptr(address, f32.as_pointer())

        sgemm, ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc = args
        given = [by_reference(ta, i8), by_reference(tb, i8), *(by_reference(t, i32) for t in (m, n, k))]
        given += [by_reference(ir.Constant(f32, 1.0), f32), pointer(a), by_reference(lda, i32)]
        given += [pointer(b), by_reference(ldb, i32), by_reference(beta, f32), pointer(c), by_reference(ldc, i32)]
        kind = ir.FunctionType(ir.VoidType(), [g.type for g in given])
        builder.call(builder.inttoptr(sgemm, kind.as_pointer()), given)
        return context.get_dummy_value()

    return signature, codegen


@_jit
def rows_by_columns(sgemm, a, b, out, pitch):
    """a (R, K) b (C, K)^T into rows of out, ``pitch`` numbers apart."""
    k = a.shape[1]
    size = b.shape[0], a.shape[0]
    _sgemm(sgemm, _T, _N, size[0], size[1], k, b.ctypes.data, k, a.ctypes.data, k, _ZERO, out.ctypes.data, pitch)


@_jit
def add_times(sgemm, tile, pitch, b, count, out):
    """out (R, count) += tile (R, C) b (C, count of its columns)."""
    sizes = out.shape[0], b.shape[0], b.shape[1]
    _sgemm(
        sgemm, _N, _N, count, sizes[0], sizes[1], b.ctypes.data, sizes[2], tile.ctypes.data, pitch, _ONE,
        out.ctypes.data, count,
    )  # fmt: skip


@_jit
def add_transposed_times(sgemm, tile, pitch, a, count, out):
    """out (C, count) += tile (R, C)^T a (R, count of its columns)."""
    sizes = out.shape[0], a.shape[0], a.shape[1]
    _sgemm(
        sgemm, _N, _T, count, sizes[0], sizes[1], a.ctypes.data, sizes[2], tile.ctypes.data, pitch, _ONE,
        out.ctypes.data, count,
    )  # fmt: skip

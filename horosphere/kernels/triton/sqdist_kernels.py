"""Distance matrices and their gradient as Triton kernels over augmented features (horosphere.kernels.chord.augment).

Features come transposed, (B, K, N), so that a block of rows is read in one stretch. Addresses are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horosphere.kernels.triton.arcs import curvature_slope, phi, slope


@triton.jit
def product(a, b, rows, columns, n, m, K, R: tl.constexpr, C: tl.constexpr):
    """<a_i, b_j> of a tile, (R, C), columns (C,)."""
    return inner(a, b, rows, columns[None, :], n, m, K, R, C)


@triton.jit
def inner(a, b, rows, columns, n, m, K, R: tl.constexpr, C: tl.constexpr):
    """<a_i, b_j> of rows (R,) with the columns (R or 1, C) of each, feature by feature: tl.dot in full float32 spills
    hundreds of registers.
    """
    t = tl.zeros((R, C), a.dtype.element_ty)
    for _ in range(0, K):  # pointers move on: an index times n could leave 32 bits
        left = tl.load(a + rows, mask=rows < n, other=0.0)
        right = tl.load(b + columns, mask=columns < m, other=0.0)
        t += left[:, None] * right
        a += n
        b += m
    return t


@triton.jit
def forward(
    a,  # (B, K, N)
    b,  # (B, K, M), without weights
    wy,  # (B, M)
    norms,  # (B, M)
    p,  # (B, N)
    q,  # (B, N)
    factor,  # (B,)
    out,  # (B, N, M)
    doubt,  # (B, N, M), read and written where ADD and RESOLVE
    n,
    m,
    K,
    SIGN: tl.constexpr,
    SQUARED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RESOLVE: tl.constexpr,
    ADD: tl.constexpr,  # add the square to out, which other parts share
    TERMS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    across, down = tl.cdiv(m, C), tl.cdiv(n, R)
    entry = pid // (across * down)
    a += entry * K * n
    b += entry * K * m
    rows = pid // across % down * R + tl.arange(0, R)
    columns = pid % across * C + tl.arange(0, C)
    t = product(a, b, rows, columns, n, m, K, R, C)
    w = tl.zeros((C,), t.dtype) + 1
    if WEIGHTED:
        w = tl.load(wy + entry * m + columns, mask=columns < m, other=1.0)
        t = t * w[None, :]
    at = (entry * n + rows[:, None]) * m + columns[None, :]
    inside = (rows[:, None] < n) & (columns[None, :] < m)
    if RESOLVE:
        one = tl.load(p + entry * n + rows, mask=rows < n, other=0.0)
        two = tl.load(q + entry * n + rows, mask=rows < n, other=0.0)
        norm = tl.load(norms + entry * m + columns, mask=columns < m, other=0.0)
        limit = (one[:, None] + two[:, None] * norm[None, :]) * w[None, :]
        near = (t >= limit) == 0  # NaN counts
        if SIGN > 0:
            far = (t <= 2 - limit) == 0
            near = near | far
    unit = tl.load(factor + entry)
    outside = t != t
    t = tl.where(t > 0, t, 0.0)
    if SIGN > 0:
        t = tl.where(t < 2, t, 2.0)
    d = tl.where(outside, float("nan"), phi(t, SIGN, TERMS) * unit)
    if ADD:
        if RESOLVE:
            change = tl.where(t > 0, d * d / tl.where(t > 0, t, 1.0), 2 * unit * unit if SIGN != 0 else 1.0) * limit
            if SIGN > 0:
                change = tl.where(far, float("inf"), change)
            tl.store(doubt + at, tl.load(doubt + at, mask=inside) + change, mask=inside)
        d = tl.load(out + at, mask=inside) + d * d
    else:
        if SQUARED:
            d = d * d
        if RESOLVE:
            d = tl.where(near, -1.0, d)
    tl.store(out + at, d, mask=inside)


@triton.jit
def backward(
    a,  # (B, K, N), the side whose gradient is wanted
    b,  # (B, K, M), both with weights
    grad,  # dL/dout of pair (i, j) at entry * n * m + i * row_stride + j * column_stride
    factor,  # (B,), 1/sqrt|kappa|, squared where SQUARED
    da,  # (B, K, N), zero on entry
    dk,  # (B, N), row sums of the curvature's gradient where CURVATURE
    n,
    m,
    K,
    row_stride,
    column_stride,
    SIGN: tl.constexpr,
    SQUARED: tl.constexpr,
    CURVATURE: tl.constexpr,
    TERMS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    down = tl.cdiv(n, R)
    entry = pid // down
    rows = pid % down * R + tl.arange(0, R)
    a += entry * K * n
    b += entry * K * m
    da += entry * K * n
    grad += entry * n * m
    unit = tl.load(factor + entry)
    total = tl.zeros((R,), a.dtype.element_ty)
    for start in range(0, m, C):
        columns = start + tl.arange(0, C)
        t = product(a, b, rows, columns, n, m, K, R, C)
        inside = (rows[:, None] < n) & (columns[None, :] < m)
        at = rows[:, None].to(tl.int64) * row_stride + columns[None, :].to(tl.int64) * column_stride
        upper = tl.load(grad + at, mask=inside, other=0.0)
        proper = inside & (t > 0)  # coincident points and antipodes have gradient 0
        if SIGN > 0:
            proper = proper & (t < 2)
        t = tl.where(proper, t, 1.0)
        g = tl.where(proper, slope(t, SIGN, SQUARED, TERMS) * upper, 0.0)
        if SIGN != 0:
            g = g * unit
        if CURVATURE:
            total += tl.sum(tl.where(proper, curvature_slope(t, SIGN, SQUARED, TERMS) * upper, 0.0), 1)
        other = b + columns
        own = da + rows
        for _ in range(0, K):
            right = tl.load(other, mask=columns < m, other=0.0)
            before = tl.load(own, mask=rows < n, other=0.0)
            tl.store(own, before + tl.sum(g * right[None, :], 1), mask=rows < n)
            other += m
            own += n
        tl.debug_barrier()  # the next tile's sums read what other threads have written
    if CURVATURE:
        tl.store(dk + entry * n + rows, total, mask=rows < n)

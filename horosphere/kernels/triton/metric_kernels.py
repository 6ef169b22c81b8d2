"""Distances under per-token metrics, and their gradient, as Triton kernels over the features of MetricTiles.

A tile has rows of one side, "own", and columns of the other. Features come transposed, (..., K, N), so that a block of
rows is read in one stretch; columns of metrics are (R, B, E, N), K = D + 2 and E = D + 1. Addresses are 64-bit. Sums
over the columns are kept in memory, where no other program has its rows: they are too many for registers, and their
order is fixed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horosphere.kernels.triton.sqdist_kernels import product


@triton.jit
def scales(own_s, other_s, rows, columns, n, m, OWN: tl.constexpr, OTHER: tl.constexpr):
    """What |delta|^2 of a tile is multiplied with."""
    if OWN and OTHER:
        one = tl.load(own_s + rows, mask=rows < n, other=0.0)
        two = tl.load(other_s + columns, mask=columns < m, other=0.0)
        return one[:, None] + two[None, :]
    elif OWN:
        return tl.load(own_s + rows, mask=rows < n, other=0.0)[:, None]
    else:
        return tl.load(other_s + columns, mask=columns < m, other=0.0)[None, :]


@triton.jit
def squares(
    a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, rows, columns, n, m, K,
    own_step, other_step, own_rank, other_rank, OWN: tl.constexpr, OTHER: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """(d^2 of a tile, |delta|^2, what that is multiplied with)."""
    u = product(a, b, rows, columns, n, m, K, R, C)
    u = tl.where(u < 0, 0.0, u)
    factor = scales(own_s, other_s, rows, columns, n, m, OWN, OTHER)
    d2 = u * factor
    for r in range(0, own_rank):
        t = product(own_columns + r * own_step, other_points, rows, columns, n, m, K - 1, R, C)
        d2 += t * t
    for r in range(0, other_rank):
        t = product(own_points, other_columns + r * other_step, rows, columns, n, m, K - 1, R, C)
        d2 += t * t
    return d2, u, factor


@triton.jit
def add(into, t, rows, n):
    """into (N,) += t, of a block of rows."""
    before = tl.load(into + rows, mask=rows < n, other=0.0)
    tl.store(into + rows, before + t.to(before.dtype), mask=rows < n)
    tl.debug_barrier()  # the next sum may be read by other threads


@triton.jit
def accumulate(
    into, g, features, rows, columns, n, m, size, PRECISION: tl.constexpr, F: tl.constexpr
):  # fmt: skip
    """into (size, N) += features (size, M) times g^T of a tile."""
    for start in tl.range(0, size, F, num_stages=1):  # copies made ahead would spill hundreds of registers
        feature = start + tl.arange(0, F)[None, :]
        right = tl.load(
            features + feature * m + columns[:, None],
            mask=(feature < size) & (columns < m)[:, None],
            other=0.0,
        )
        own = into + feature * n + rows[:, None]
        inside = (feature < size) & (rows < n)[:, None]
        before = tl.load(own, mask=inside, other=0.0)
        tl.store(own, tl.dot(g, right, before, input_precision=PRECISION, out_dtype=before.dtype), mask=inside)
    tl.debug_barrier()


@triton.jit
def accumulate_last(into, g, features, rows, columns, n, m, size):
    """The same for a few features, one by one."""
    for _ in range(0, size):
        right = tl.load(features + columns, mask=columns < m, other=0.0)
        add(into, tl.sum(g * right[None, :], 1), rows, n)
        into += n
        features += m


@triton.jit
def spread(
    g, factor, a, b, own_columns, own_points, other_columns, other_points, da, dcolumns, dpoints, rows, columns, n, m,
    K, own_step, other_step, own_rank, other_rank, PRECISION: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    F: tl.constexpr,
):  # fmt: skip
    """Add what g = dL/d(d^2) of a tile gives to its rows; the scales are the caller's."""
    size = K - 2
    h = g * factor
    accumulate(da, h, b, rows, columns, n, m, size, PRECISION, F)
    accumulate_last(da + size * n, h, b + size * m, rows, columns, n, m, 2)
    for r in range(0, own_rank):
        at = r * own_step
        h = g * product(own_columns + at, other_points, rows, columns, n, m, K - 1, R, C)
        accumulate(dcolumns + at, h, other_points, rows, columns, n, m, size, PRECISION, F)
        accumulate_last(dcolumns + at + size * n, h, other_points + size * m, rows, columns, n, m, 1)
    for r in range(0, other_rank):
        at = other_columns + r * other_step
        h = g * product(own_points, at, rows, columns, n, m, K - 1, R, C)
        accumulate(dpoints, h, at, rows, columns, n, m, size, PRECISION, F)


@triton.jit
def of_entry(entry, entries, a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, n, m, K):
    """Where a batch entry has its features, and the steps from one column of its metrics to the next."""
    E = K - 1
    own, other = entry * E * n, entry * E * m
    return (
        a + entry * K * n, b + entry * K * m, own_s + entry * n, other_s + entry * m, own_columns + own,
        own_points + own, other_columns + other, other_points + other, entries * E * n, entries * E * m,
    )  # fmt: skip


@triton.jit
def forward(
    a,  # (B, K, N)
    b,  # (B, K, M)
    own_s,  # (B, N)
    other_s,  # (B, M)
    own_columns,  # (R, B, E, N)
    own_points,  # (B, E, N)
    other_columns,  # (R', B, E, M)
    other_points,  # (B, E, M)
    out,  # (B, N, M)
    n,
    m,
    K,
    entries,
    own_rank,
    other_rank,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    across, down = tl.cdiv(m, C), tl.cdiv(n, R)
    entry = pid // (across * down)
    rows = pid // across % down * R + tl.arange(0, R)
    columns = pid % across * C + tl.arange(0, C)
    n = tl.cast(n, tl.int64)
    m = tl.cast(m, tl.int64)
    a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, own_step, other_step = of_entry(
        entry, entries, a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, n, m, K
    )
    d2, _, _ = squares(
        a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, rows, columns, n, m, K, own_step,
        other_step, own_rank, other_rank, OWN, OTHER, R, C,
    )  # fmt: skip
    at = (entry * n + rows[:, None]) * m + columns[None, :]
    tl.store(out + at, d2, mask=(rows[:, None] < n) & (columns[None, :] < m))


@triton.jit
def backward(
    a,  # (B, K, N), the side whose gradient is wanted
    b,  # (B, K, M)
    own_s,
    other_s,
    own_columns,
    own_points,
    other_columns,
    other_points,
    grad,  # dL/d(d^2) of pair (i, j) at entry * n * m + i * row_stride + j * column_stride
    da,  # (B, K, N), zero on entry, as all that follow
    dscale,  # (B, N), gradient of the scale's square
    dcolumns,  # (R, B, E, N), half the gradient
    dpoints,  # (B, E, N), half the gradient, without the last feature
    n,
    m,
    K,
    entries,
    own_rank,
    other_rank,
    row_stride,
    column_stride,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    PRECISION: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    F: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    down = tl.cdiv(n, R)
    entry = pid // down
    rows = pid % down * R + tl.arange(0, R)
    n = tl.cast(n, tl.int64)
    m = tl.cast(m, tl.int64)
    a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, own_step, other_step = of_entry(
        entry, entries, a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, n, m, K
    )
    grad += entry * n * m
    da += entry * K * n
    dcolumns += entry * (K - 1) * n
    dpoints += entry * (K - 1) * n
    total = tl.zeros((R,), a.dtype.element_ty)
    for start in range(m * 0, m, C):
        columns = start + tl.arange(0, C)
        inside = (rows[:, None] < n) & (columns[None, :] < m)
        at = rows[:, None] * row_stride + columns[None, :] * column_stride
        g = tl.load(grad + at, mask=inside, other=0.0)
        if OWN:
            u = product(a, b, rows, columns, n, m, K, R, C)
            total += tl.sum(tl.where(u > 0, u, 0.0) * g, 1)
        spread(
            g, scales(own_s, other_s, rows, columns, n, m, OWN, OTHER), a, b, own_columns, own_points, other_columns,
            other_points, da, dcolumns, dpoints, rows, columns, n, m, K, own_step, other_step, own_rank, other_rank,
            PRECISION, R, C, F,
        )  # fmt: skip
    if OWN:
        tl.store(dscale + entry * n + rows, total, mask=rows < n)

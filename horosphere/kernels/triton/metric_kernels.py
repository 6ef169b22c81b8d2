"""Distances under per-token metrics, and their gradient, as Triton kernels over the features of MetricTiles.

A tile has rows of one side, "own", and columns of the other. Features come transposed, (..., K, N), so that a block of
rows is read in one stretch; columns of metrics are (R, B, E, N), E = D + 1. Addresses are 64-bit.
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
    t = product(a + entry * K * n, b + entry * K * m, rows, columns, n, m, K, R, C)
    t = tl.where(t < 0, 0.0, t)
    t = t * scales(own_s + entry * n, other_s + entry * m, rows, columns, n, m, OWN, OTHER)
    E = K - 1
    at_own, at_other = entry * E * n, entry * E * m
    for r in range(0, own_rank):
        place = (r * entries + entry) * E * n
        w = product(own_columns + place, other_points + at_other, rows, columns, n, m, E, R, C)
        t += w * w
    for r in range(0, other_rank):
        place = (r * entries + entry) * E * m
        w = product(own_points + at_own, other_columns + place, rows, columns, n, m, E, R, C)
        t += w * w
    at = (entry * n + rows[:, None]) * m + columns[None, :]
    tl.store(out + at, t, mask=(rows[:, None] < n) & (columns[None, :] < m))


@triton.jit
def accumulate(into, g, features, rows, columns, n, m, K):
    """into (K, N) += g features^T of a tile, feature by feature."""
    own, other = into + rows, features + columns
    for _ in range(0, K):
        right = tl.load(other, mask=columns < m, other=0.0)
        before = tl.load(own, mask=rows < n, other=0.0)
        tl.store(own, before + tl.sum(g * right[None, :], 1), mask=rows < n)
        own += n
        other += m


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
    dpoints,  # (B, E, N), half the gradient
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
    R: tl.constexpr,
    C: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    down = tl.cdiv(n, R)
    entry = pid // down
    rows = pid % down * R + tl.arange(0, R)
    E = K - 1
    grad += entry * n * m
    a += entry * K * n
    b += entry * K * m
    da += entry * K * n
    own_points += entry * E * n
    other_points += entry * E * m
    dpoints += entry * E * n
    total = tl.zeros((R,), a.dtype.element_ty)
    for start in range(0, m, C):
        columns = start + tl.arange(0, C)
        inside = (rows[:, None] < n) & (columns[None, :] < m)
        at = rows[:, None].to(tl.int64) * row_stride + columns[None, :].to(tl.int64) * column_stride
        upper = tl.load(grad + at, mask=inside, other=0.0)
        if OWN:
            u = product(a, b, rows, columns, n, m, K, R, C)
            total += tl.sum(tl.where(u > 0, u, 0.0) * upper, 1)
        g = upper * scales(own_s + entry * n, other_s + entry * m, rows, columns, n, m, OWN, OTHER)
        accumulate(da, g, b, rows, columns, n, m, K)
        for r in range(0, own_rank):
            place = (r * entries + entry) * E * n
            g = upper * product(own_columns + place, other_points, rows, columns, n, m, E, R, C)
            accumulate(dcolumns + place, g, other_points, rows, columns, n, m, E)
        for r in range(0, other_rank):
            place = (r * entries + entry) * E * m
            g = upper * product(own_points, other_columns + place, rows, columns, n, m, E, R, C)
            accumulate(dpoints, g, other_columns + place, rows, columns, n, m, E)
            tl.debug_barrier()
        tl.debug_barrier()  # the next sums read what other threads have written
    if OWN:
        tl.store(dscale + entry * n + rows, total, mask=rows < n)

"""Attention under per-token metrics as a Triton kernel; features as in horosphere.kernels.triton.metric_kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from horosphere.kernels.triton.attention_kernels import both, divided, gathered, masked, measure, raised, span
from horosphere.kernels.triton.metric_kernels import of_entry, squares


@triton.jit
def difference(a, b, rows, columns, n, m, SWAPPED: tl.constexpr):
    """own - other of a tile in one feature, in float64: the queries' features hold -2 q, the keys' k, both exact."""
    left = tl.load(a + rows, mask=rows < n, other=0.0).to(tl.float64)
    right = tl.load(b + columns, mask=columns < m, other=0.0).to(tl.float64)
    if SWAPPED:
        right = right * -0.5
    else:
        left = left * -0.5
    return left[:, None] - right[None, :]


@triton.jit
def inside(
    a, b, metric, rows, columns, n, m, size, OWN: tl.constexpr, SWAPPED: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """One column of the metrics times the difference of a tile, in float64; OWN: those of the rows."""
    total = tl.zeros((R, C), tl.float64)
    for f in range(0, size):
        delta = difference(a + f * n, b + f * m, rows, columns, n, m, SWAPPED)
        if OWN:
            total += delta * tl.load(metric + f * n + rows, mask=rows < n, other=0.0).to(tl.float64)[:, None]
        else:
            total += delta * tl.load(metric + f * m + columns, mask=columns < m, other=0.0).to(tl.float64)[None, :]
    return total


@triton.jit
def differences(
    a, b, own_columns, other_columns, factor, rows, columns, n, m, size, own_step, other_step, own_rank, other_rank,
    SHARE: tl.constexpr, SWAPPED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """d^2 of a tile from differences of points."""
    total = tl.zeros((R, C), tl.float64)
    for f in range(0, size):
        delta = difference(a + f * n, b + f * m, rows, columns, n, m, SWAPPED)
        total += delta * delta
    total = total * factor.to(tl.float64)
    for r in range(0, own_rank):
        t = inside(a, b, own_columns + r * own_step, rows, columns, n, m, size, True, SWAPPED, R, C)
        total += t * t * SHARE
    for r in range(0, other_rank):
        t = inside(a, b, other_columns + r * other_step, rows, columns, n, m, size, False, SWAPPED, R, C)
        total += t * t * SHARE
    return total


@triton.jit
def resolved(
    a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, own_norms, other_norms, own_limits,
    other_limits, shift, rows, columns, n, m, K, own_step, other_step, own_rank, other_rank,
    SHARE: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr, RESOLVE: tl.constexpr, SWAPPED: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(d^2 of a tile, which pairs were worked from differences, and of the product form |delta|^2 and its factor)."""
    d2, u, factor = squares(
        a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, rows, columns, n, m, K, own_step,
        other_step, own_rank, other_rank, OWN, OTHER, R, C,
    )  # fmt: skip
    near = d2 < 0
    if RESOLVE:
        left, right = both(own_norms, other_norms, rows, columns, n, m)
        one, two = both(own_limits, other_limits, rows, columns, n, m)
        near = ((d2 + shift >= (left + right) * (one + two)) == 0) & (rows < n)[:, None] & (columns < m)[None, :]
        if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
            exact = differences(
                a, b, own_columns, other_columns, factor, rows, columns, n, m, K - 2, own_step, other_step, own_rank,
                other_rank, SHARE, SWAPPED, R, C,
            )  # fmt: skip
            d2 = tl.where(near, exact.to(d2.dtype), d2)
    return d2, near, u, factor


@triton.jit
def average(
    a,  # (B, K, N)
    b,  # (B, K, M)
    own_s,  # (B, N)
    other_s,  # (B, M)
    own_columns,  # (R, B, E, N)
    own_points,  # (B, E, N)
    other_columns,  # (R', B, E, M)
    other_points,  # (B, E, M)
    own_norms,  # (B, N), |q|^2, and the limits of MetricTiles; read where RESOLVE
    other_norms,
    own_limits,
    other_limits,
    eps,  # (B,)
    power,  # (B,)
    value,  # (B, M, V)
    lse,  # (B, N)
    bias,
    place,  # (B,), where the bias of an entry starts
    keys,  # (B, N)
    out,  # (B, N, V)
    n,
    m,
    K,
    entries,
    own_rank,
    other_rank,
    width,  # V
    i_stride,
    j_stride,
    causal,
    threshold,
    SHARE: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    RESOLVE: tl.constexpr,
    PRECISION: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
):
    """sum_j W_ij value_j of a block of queries, and its lse."""
    pid = tl.program_id(0).to(tl.int64)
    down, across = tl.cdiv(n, R), tl.cdiv(width, V)
    entry = pid // (down * across)
    first = pid // across % down * R
    n = tl.cast(n, tl.int64)
    m = tl.cast(m, tl.int64)
    a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, own_step, other_step = of_entry(
        entry, entries, a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, n, m, K
    )
    own_norms += entry * n
    other_norms += entry * m
    own_limits += entry * n
    other_limits += entry * m
    value += entry * m * width
    lse += entry * n
    keys += entry * n
    bias += tl.load(place + entry)
    shift, rate = tl.load(eps + entry), tl.load(power + entry)
    rows = first + tl.arange(0, R)
    column = pid % across * V + tl.arange(0, V)
    top = tl.full((R,), float("-inf"), a.dtype.element_ty)
    den = tl.zeros((R,), a.dtype.element_ty)
    sums = tl.zeros((R, V), a.dtype.element_ty)
    start, stop = span(first, m, causal, CAUSAL, False, R)
    for at in range(start, stop, C):
        columns = at + tl.arange(0, C)
        d2, _, _, _ = resolved(
            a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, own_norms, other_norms,
            own_limits, other_limits, shift, rows, columns, n, m, K, own_step, other_step, own_rank, other_rank,
            SHARE, OWN, OTHER, RESOLVE, False, R, C,
        )  # fmt: skip
        i, j = rows[:, None], columns[None, :]
        logits = masked(-rate * measure(d2, shift, WEIGHT), bias, i, j, n, m, i_stride, j_stride, causal, BIAS, CAUSAL)
        w, top, den, sums = raised(logits, top, den, sums)
        sums = gathered(
            sums, w, value, keys, i, j, n, threshold, columns, column, m, width, DROPOUT, PRECISION
        )  # fmt: skip
    sums = divided(sums, den, top, lse, rows, n, pid % across == 0)
    at = (entry * n + rows[:, None]) * width + column[None, :]
    tl.store(out + at, sums, mask=(rows < n)[:, None] & (column < width)[None, :])

"""Attention under per-token metrics as a Triton kernel; features as in horosphere.kernels.triton.metric_kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from horosphere.kernels.triton.attention_kernels import both, kept, masked, measure
from horosphere.kernels.triton.metric_kernels import scales
from horosphere.kernels.triton.sqdist_kernels import product


@triton.jit
def difference(a, b, rows, columns, n, m):
    """q_i - k_j of a tile in one feature, in float64: a holds -2 q and b holds k, so both are exact."""
    left = tl.load(a + rows, mask=rows < n, other=0.0).to(tl.float64) * -0.5
    right = tl.load(b + columns, mask=columns < m, other=0.0).to(tl.float64)
    return left[:, None] - right[None, :]


@triton.jit
def differences(
    a, b, own_columns, other_columns, factor, rows, columns, n, m, K, own_step, other_step, own_rank, other_rank,
    SHARE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """d^2 of a tile from differences of points."""
    total = tl.zeros((R, C), tl.float64)
    for f in range(0, K - 2):
        delta = difference(a + f * n, b + f * m, rows, columns, n, m)
        total += delta * delta
    total = total * factor.to(tl.float64)
    for r in range(0, own_rank):
        inside = tl.zeros((R, C), tl.float64)
        for f in range(0, K - 2):
            delta = difference(a + f * n, b + f * m, rows, columns, n, m)
            own = tl.load(own_columns + r * own_step + f * n + rows, mask=rows < n, other=0.0)
            inside += delta * own[:, None].to(tl.float64)
        total += inside * inside * SHARE
    for r in range(0, other_rank):
        inside = tl.zeros((R, C), tl.float64)
        for f in range(0, K - 2):
            delta = difference(a + f * n, b + f * m, rows, columns, n, m)
            other = tl.load(other_columns + r * other_step + f * m + columns, mask=columns < m, other=0.0)
            inside += delta * other[None, :].to(tl.float64)
        total += inside * inside * SHARE
    return total


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
    width,  # V
    entries,
    own_rank,
    other_rank,
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
    n = n.to(tl.int64)
    m = m.to(tl.int64)
    E = K - 1
    a += entry * K * n
    b += entry * K * m
    own_s += entry * n
    other_s += entry * m
    own_step, other_step = entries * E * n, entries * E * m
    own_columns += entry * E * n
    other_columns += entry * E * m
    own_points += entry * E * n
    other_points += entry * E * m
    own_norms += entry * n
    other_norms += entry * m
    own_limits += entry * n
    other_limits += entry * m
    value += entry * m * width
    keys += entry * n
    bias += tl.load(place + entry)
    shift, rate = tl.load(eps + entry), tl.load(power + entry)
    rows = first + tl.arange(0, R)
    column = pid % across * V + tl.arange(0, V)
    top = tl.full((R,), float("-inf"), a.dtype.element_ty)
    den = tl.zeros((R,), a.dtype.element_ty)
    sums = tl.zeros((R, V), a.dtype.element_ty)
    stop = m
    if CAUSAL:
        stop = tl.minimum(stop, first + R + causal)
    for start in range(m * 0, stop, C):
        columns = start + tl.arange(0, C)
        factor = scales(own_s, other_s, rows, columns, n, m, OWN, OTHER)
        d2 = product(a, b, rows, columns, n, m, K, R, C)
        d2 = tl.where(d2 < 0, 0.0, d2) * factor
        for r in range(0, own_rank):
            w = product(own_columns + r * own_step, other_points, rows, columns, n, m, E, R, C)
            d2 += w * w
        for r in range(0, other_rank):
            w = product(own_points, other_columns + r * other_step, rows, columns, n, m, E, R, C)
            d2 += w * w
        if RESOLVE:
            left, right = both(own_norms, other_norms, rows, columns, n, m)
            one, two = both(own_limits, other_limits, rows, columns, n, m)
            near = ((d2 + shift >= (left + right) * (one + two)) == 0) & (rows < n)[:, None] & (columns < m)[None, :]
            if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
                exact = differences(
                    a, b, own_columns, other_columns, factor, rows, columns, n, m, K, own_step, other_step, own_rank,
                    other_rank, SHARE, R, C,
                )  # fmt: skip
                d2 = tl.where(near, exact.to(d2.dtype), d2)
        i, j = rows[:, None], columns[None, :]
        logits = masked(-rate * measure(d2, shift, WEIGHT), bias, i, j, n, m, i_stride, j_stride, causal, BIAS, CAUSAL)
        higher = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(top - base)
        w = tl.exp(logits - base[:, None])
        den = den * shrink + tl.sum(w, 1)
        sums = sums * shrink[:, None]
        top = higher
        if DROPOUT:
            w = tl.where(kept(keys, i, j, n, threshold), w, 0.0)
        v = tl.load(
            value + columns[:, None] * width + column[None, :],
            mask=(columns < m)[:, None] & (column < width)[None, :],
            other=0.0,
        )
        sums = tl.dot(w.to(v.dtype), v, sums, input_precision=PRECISION, out_dtype=sums.dtype)
    some = den != 0  # NaN counts
    den = tl.where(some, den, 1.0)
    if pid % across == 0:
        tl.store(lse + entry * n + rows, tl.where(some, tl.log(den) + top, float("-inf")), mask=rows < n)
    at = (entry * n + rows[:, None]) * width + column[None, :]
    tl.store(out + at, sums / den[:, None], mask=(rows < n)[:, None] & (column < width)[None, :])

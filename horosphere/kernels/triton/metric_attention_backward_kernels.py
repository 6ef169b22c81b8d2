"""The gradient of attention under per-token metrics by what one side owns, tiles and sums as in
horosphere.kernels.triton.metric_kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horosphere.kernels.triton.attention_backward_kernels import PAIRS, add_pairs, slopes, tallied, write_tallies
from horosphere.kernels.triton.attention_kernels import ends, span
from horosphere.kernels.triton.metric_attention_kernels import difference, inside, resolved
from horosphere.kernels.triton.metric_kernels import accumulate, add, of_entry, spread


@triton.jit
def spread_differences(
    g, factor, a, b, own_columns, other_columns, dcolumns, dpoints, rows, columns, n, m, size, own_step, other_step,
    own_rank, other_rank, SHARE: tl.constexpr, SWAPPED: tl.constexpr, PRECISION: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Add what g = dL/d(d^2) of a tile gives to its rows, from differences of points; sums of g |delta|^2 are returned.

    What points get joins the sums of the columns' metrics, which are taken 2 sqrt(SHARE) times, and what metrics get
    leaves alone their last feature, which is what the product form is corrected by.
    """
    root: tl.constexpr = SHARE**0.5
    wide = g.to(tl.float64)
    flat = wide * factor.to(tl.float64) / root
    square = tl.zeros((R, C), tl.float64)
    for f in range(0, size):
        delta = difference(a + f * n, b + f * m, rows, columns, n, m, SWAPPED)
        square += delta * delta
        add(dpoints + f * n, tl.sum(flat * delta, 1), rows, n)
    for r in range(0, own_rank):
        own = own_columns + r * own_step
        h = wide * inside(a, b, own, rows, columns, n, m, size, True, SWAPPED, R, C)
        total = tl.sum(h, 1) * root
        for f in range(0, size):
            delta = difference(a + f * n, b + f * m, rows, columns, n, m, SWAPPED)
            add(dcolumns + r * own_step + f * n, tl.sum(h * delta, 1) * SHARE, rows, n)
            column = tl.load(own + f * n + rows, mask=rows < n, other=0.0)
            add(dpoints + f * n, column.to(tl.float64) * total, rows, n)
    for r in range(0, other_rank):
        other = other_columns + r * other_step
        h = wide * inside(a, b, other, rows, columns, n, m, size, False, SWAPPED, R, C) * root
        accumulate(dpoints, h.to(g.dtype), other, rows, columns, n, m, size, PRECISION, F)
    return tl.sum(wide * square, 1).to(g.dtype)


@triton.jit
def fibres(
    a,  # (B, K, N), the side whose gradient is wanted
    b,  # (B, K, M)
    own_s,
    other_s,
    own_columns,
    own_points,
    other_columns,
    other_points,
    own_norms,
    other_norms,
    own_limits,
    other_limits,
    eps,
    power,
    own_v,  # (B, V, N), gradients of the results where own are the queries, values elsewhere
    other_v,  # (B, V, M)
    lse,  # (B, queries)
    mean,  # (B, queries), c
    bias,
    place,
    keys,
    da,  # (B, K, N), zero on entry, as all that follow
    dscale,  # (B, N), gradient of the scale's square
    dcolumns,  # (R, B, E, N), half the gradient
    dpoints,  # (B, E, N), half the gradient, without the last feature
    dvalue,  # (B, V, N), written where SWAPPED
    deps,  # (B, N), sums of the rows, here and below where not SWAPPED
    dpower,
    dbias,  # as bias, or (B, N) sums of the rows
    length,
    others,
    K,
    entries,
    own_rank,
    other_rank,
    width,
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
    SWAPPED: tl.constexpr,
    RATES: tl.constexpr,  # whether deps and dpower are wanted
    BIAS_GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    F: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    down = tl.cdiv(length, R)
    entry = pid // down
    first = pid % down * R
    length = tl.cast(length, tl.int64)
    others = tl.cast(others, tl.int64)
    a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, own_step, other_step = of_entry(
        entry, entries, a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, length, others, K
    )
    da += entry * K * length
    dcolumns += entry * (K - 1) * length
    dpoints += entry * (K - 1) * length
    own_norms += entry * length
    other_norms += entry * others
    own_limits += entry * length
    other_limits += entry * others
    own_v += entry * width * length
    other_v += entry * width * others
    dvalue += entry * width * length
    queries = entry * (others if SWAPPED else length)
    lse += queries
    mean += queries
    keys += queries
    start_of_bias = tl.load(place + entry)
    bias += start_of_bias
    shift, rate = tl.load(eps + entry), tl.load(power + entry)
    rows = first + tl.arange(0, R)
    scale_sum = tl.zeros((R,), a.dtype.element_ty)
    eps_sum = scale_sum
    power_sum = scale_sum
    bias_sum = scale_sum
    start, stop = span(first, others, causal, CAUSAL, SWAPPED, R)
    for at in range(start, stop, C):
        columns = at + tl.arange(0, C)
        d2, near, u, factor = resolved(
            a, b, own_s, other_s, own_columns, own_points, other_columns, other_points, own_norms, other_norms,
            own_limits, other_limits, shift, rows, columns, length, others, K, own_step, other_step, own_rank,
            other_rank, SHARE, OWN, OTHER, RESOLVE, SWAPPED, R, C,
        )  # fmt: skip
        i, j, n, m = ends(rows, columns, length, others, SWAPPED)
        g, taken, measured = slopes(
            d2, shift, rate, own_v, other_v, lse, mean, bias, keys, rows, columns, i, j, n, m, length, others, width,
            i_stride, j_stride, causal, threshold, WEIGHT, BIAS, CAUSAL, DROPOUT, R, C,
        )  # fmt: skip
        if SWAPPED:
            accumulate(dvalue, taken, other_v, rows, columns, length, others, width, PRECISION, F)
        if BIAS_GRADIENT == PAIRS:
            add_pairs(dbias + start_of_bias, g, i, j, n, m, i_stride, j_stride)
        g, eps_sum, power_sum, bias_sum = tallied(
            g, measured, d2, shift, rate, eps_sum, power_sum, bias_sum, WEIGHT, RATES, BIAS_GRADIENT
        )
        if RESOLVE:
            if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
                scale_sum += spread_differences(
                    tl.where(near, g, 0.0), factor, a, b, own_columns, other_columns, dcolumns, dpoints, rows, columns,
                    length, others, K - 2, own_step, other_step, own_rank, other_rank, SHARE, SWAPPED, PRECISION,
                    R, C, F,
                )  # fmt: skip
            g = tl.where(near, 0.0, g)
        if OWN:
            scale_sum += tl.sum(g * u, 1)
        spread(
            g, factor, a, b, own_columns, own_points, other_columns, other_points, da, dcolumns, dpoints, rows,
            columns, length, others, K, own_step, other_step, own_rank, other_rank, PRECISION, R, C, F,
        )  # fmt: skip
    row = entry * length + rows
    if OWN:
        tl.store(dscale + row, scale_sum, mask=rows < length)
    write_tallies(
        deps + row, dpower + row, dbias + row, eps_sum, power_sum, bias_sum, rows < length, RATES, BIAS_GRADIENT
    )

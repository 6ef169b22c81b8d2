"""The gradient of attention by the points, tiles as in horosphere.kernels.triton.attention_kernels.

With l = -power g(d^2) the logarithm of the weight and dl = W (<do, v> - c): what a part's own points get is

    sum_j r_ij (x_i - x_j),   r_ij = dl/dt |kappa| w_i w_j / 2

of resolved pairs from one product of the tile with x_j, of the others from differences.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horosphere.kernels.triton.arcs import curvature_slope, slope
from horosphere.kernels.triton.attention_kernels import (
    INVERSE,
    SOFTMAX,
    both,
    differences,
    ends,
    kept,
    masked,
    measure,
    of_entry,
    settled,
    span,
    squares,
)
from horosphere.kernels.triton.sqdist_kernels import product

# How the gradient of the bias is written: pair by pair, or summed over the others of every row.
PAIRS = tl.constexpr(1)
ROWS = tl.constexpr(2)


@triton.jit
def measure_slope(d2, eps, WEIGHT: tl.constexpr):
    """Its derivative by d^2; that of d at coincident points is 0."""
    out = tl.zeros_like(d2) + 1
    if WEIGHT == INVERSE:
        out = 1 / (d2 + eps)
    elif WEIGHT == SOFTMAX:
        out = tl.where(d2 > 0, 0.5 / tl.sqrt(tl.where(d2 > 0, d2, 1.0)), 0.0)
    return out


@triton.jit
def slopes(
    d2, shift, rate, own_v, other_v, lse, mean, bias, keys, rows, columns, i, j, n, m, length, others, width, i_stride,
    j_stride, causal, threshold, WEIGHT: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(dl of a tile, the weights that dropout keeps, what the power multiplies)."""
    measured = measure(d2, shift, WEIGHT)
    w = settled(masked(-rate * measured, bias, i, j, n, m, i_stride, j_stride, causal, BIAS, CAUSAL), lse, i, n)
    pull = product(own_v, other_v, rows, columns, length, others, width, R, C)
    taken = w
    if DROPOUT:
        keeps = kept(keys, i, j, n, threshold)
        pull = tl.where(keeps, pull, 0.0)
        taken = tl.where(keeps, w, 0.0)
    return w * (pull - tl.load(mean + i, mask=i < n, other=0.0)), taken, measured


@triton.jit
def add_pairs(into, g, i, j, n, m, i_stride, j_stride):
    """into += g of a tile, which no other program of a launch has."""
    at = into + i * i_stride + j * j_stride
    inside = (i < n) & (j < m)
    tl.store(at, tl.load(at, mask=inside, other=0.0) + g, mask=inside)


@triton.jit
def tallied(
    g, measured, d2, shift, rate, eps_sum, power_sum, bias_sum, WEIGHT: tl.constexpr, RATES: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):  # fmt: skip
    """(dL/d(d^2) from g = dl of a tile, and the sums of the rows with those of the tile)."""
    if BIAS_GRADIENT == ROWS:
        bias_sum += tl.sum(g, 1)
    if RATES:
        power_sum -= tl.sum(tl.where(g == 0, 0.0, g * measured), 1)
    g = -rate * g * measure_slope(d2, shift, WEIGHT)
    if RATES and WEIGHT == INVERSE:
        eps_sum += tl.sum(g, 1)
    return g, eps_sum, power_sum, bias_sum


@triton.jit
def write_tallies(
    deps, dpower, dbias, eps_sum, power_sum, bias_sum, inside, RATES: tl.constexpr, BIAS_GRADIENT: tl.constexpr
):
    """Store the sums of a block of rows."""
    if RATES:
        tl.store(deps, eps_sum, mask=inside)
        tl.store(dpower, power_sum, mask=inside)
    if BIAS_GRADIENT == ROWS:
        tl.store(dbias, bias_sum, mask=inside)


@triton.jit
def points(
    own,
    other,
    own_x,
    other_x,
    own_c,
    other_c,
    own_n,
    other_n,
    unit,
    eps,
    power,
    own_v,  # (B, V, N), gradients of the results where own are the queries, values elsewhere
    other_v,  # (B, V, M)
    lse,  # (B, queries)
    mean,  # (B, queries), c
    bias,
    place,
    keys,
    dx,  # (B, N, F of the part)
    dw,  # (B, N), sum of dl/dt t
    deps,  # (B, N), sums of the rows, here and below where not SWAPPED
    dpower,
    dkappa,
    dbias,  # as bias, or (B, N) sums of the rows
    length,
    others,
    width,
    i_stride,
    j_stride,
    causal,
    threshold,
    PARTS: tl.constexpr,
    ALL: tl.constexpr,
    FEATURES: tl.constexpr,
    SIGNS: tl.constexpr,
    TIMES: tl.constexpr,
    PART: tl.constexpr,
    BEFORE: tl.constexpr,  # features of the parts before it
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    RESOLVE: tl.constexpr,
    SWAPPED: tl.constexpr,
    CURVATURE: tl.constexpr,
    RATES: tl.constexpr,  # whether deps and dpower are wanted
    BIAS_GRADIENT: tl.constexpr,  # 0, PAIRS or ROWS
    PRECISION: tl.constexpr,
    TERMS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    F: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = FEATURES[PART]
    down, across = tl.cdiv(length, R), tl.cdiv(size, F)
    entry = pid // (down * across)
    first = pid // across % down * R
    slab = pid % across * F
    length = tl.cast(length, tl.int64)
    others = tl.cast(others, tl.int64)
    own, other, own_x, other_x, own_c, other_c, own_n, other_n, unit = of_entry(
        entry, own, other, own_x, other_x, own_c, other_c, own_n, other_n, unit, length, others, PARTS, ALL
    )
    own_v += entry * width * length
    other_v += entry * width * others
    queries = entry * (others if SWAPPED else length)
    lse += queries
    mean += queries
    keys += queries
    start_of_bias = tl.load(place + entry)
    bias += start_of_bias
    shift, rate = tl.load(eps + entry), tl.load(power + entry)
    curved = tl.load(unit + PART)
    part_x = own_x + BEFORE * length
    part_y = other_x + BEFORE * others
    rows = first + tl.arange(0, R)
    feature = slab + tl.arange(0, F)
    sums = tl.zeros((R, F), own.dtype.element_ty)
    far_sum = tl.zeros((R,), own.dtype.element_ty)
    t_sum = far_sum
    eps_sum = far_sum
    power_sum = far_sum
    kappa_sum = far_sum
    bias_sum = far_sum
    start, stop = span(first, others, causal, CAUSAL, SWAPPED, R)
    for at in range(start, stop, C):
        columns = at + tl.arange(0, C)
        d2, near, t, scale = squares(
            own, other, own_x, other_x, own_c, other_c, own_n, other_n, unit, shift, rows, columns, length, others,
            PARTS, ALL, FEATURES, SIGNS, TIMES, PART, RESOLVE, TERMS, R, C,
        )  # fmt: skip
        i, j, n, m = ends(rows, columns, length, others, SWAPPED)
        g, _kept, measured = slopes(
            d2, shift, rate, own_v, other_v, lse, mean, bias, keys, rows, columns, i, j, n, m, length, others, width,
            i_stride, j_stride, causal, threshold, WEIGHT, BIAS, CAUSAL, DROPOUT, R, C,
        )  # fmt: skip
        if BIAS_GRADIENT == PAIRS:
            if slab == 0:
                add_pairs(dbias + start_of_bias, g, i, j, n, m, i_stride, j_stride)
        g, eps_sum, power_sum, bias_sum = tallied(
            g, measured, d2, shift, rate, eps_sum, power_sum, bias_sum, WEIGHT, RATES, BIAS_GRADIENT
        )
        proper = t > 0  # coincident points and antipodes have gradient 0
        if SIGNS[PART] > 0:
            proper = proper & (t < 2)
        safe = tl.where(proper, t, 1.0)
        if CURVATURE:
            kappa_sum += tl.sum(tl.where(proper, g * curvature_slope(safe, SIGNS[PART], True, TERMS), 0.0), 1)
        g = tl.where(proper, g * slope(safe, SIGNS[PART], True, TERMS), 0.0)
        if SIGNS[PART] != 0:
            g = g * curved
        t_sum += tl.sum(g * safe, 1)
        g = g * scale
        far = tl.where(near, 0.0, g)
        far_sum += tl.sum(far, 1)
        y = tl.load(
            part_y + feature[None, :] * others + columns[:, None],
            mask=(columns < others)[:, None] & (feature < size)[None, :],
            other=0.0,
        )
        sums -= tl.dot(far, y, input_precision=PRECISION, out_dtype=sums.dtype)
        if RESOLVE:
            if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
                g = tl.where(near, g, 0.0)
                _, step = differences(part_x, part_y, rows, columns, length, others, size, TIMES[PART], R, C)
                for k in range(0, tl.minimum(F, size - slab)):
                    left, right = both(
                        part_x + (slab + k) * length, part_y + (slab + k) * others, rows, columns, length, others
                    )
                    delta = left.to(tl.float64) - right.to(tl.float64)
                    if TIMES[PART]:
                        delta = tl.where(slab + k == 0, step, delta)
                    column = tl.sum(g * delta.to(g.dtype), 1)
                    sums += tl.where((feature == slab + k)[None, :], column[:, None], 0.0)
    inside = (rows < length)[:, None] & (feature < size)[None, :]
    x = tl.load(part_x + feature[None, :] * length + rows[:, None], mask=inside, other=0.0)
    at = (entry * length + rows[:, None]) * size + feature[None, :]
    tl.store(dx + at, sums + x * far_sum[:, None], mask=inside)
    if slab == 0:
        row = entry * length + rows
        tl.store(dw + row, t_sum, mask=rows < length)
        if CURVATURE:
            tl.store(dkappa + row, kappa_sum, mask=rows < length)
        write_tallies(
            deps + row, dpower + row, dbias + row, eps_sum, power_sum, bias_sum, rows < length, RATES, BIAS_GRADIENT
        )

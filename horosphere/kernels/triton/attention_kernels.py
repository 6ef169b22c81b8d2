"""Attention by distance as Triton kernels: what queries take from keys, and keys from queries, tile by tile.

A tile belongs to a block of rows, "own", and runs along the others: own are the queries and the others the keys, or,
where SWAPPED, the other way round. Features come transposed, (B, K, N), so that a block of rows is read in one stretch;
those of all parts lie one below the other. Addresses are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horosphere.kernels.triton.arcs import square
from horosphere.kernels.triton.sqdist_kernels import product

INVERSE = tl.constexpr(0)
SOFTMAX = tl.constexpr(1)
ADDED = tl.constexpr(1)
BOOLEAN = tl.constexpr(2)


@triton.jit
def differences(own, other, rows, columns, length, others, F: tl.constexpr, TIME: tl.constexpr, R, C):
    """(s, difference of times) of a tile, from differences of features in float64; see horosphere.kernels.reference."""
    s = tl.zeros((R, C), tl.float64)
    along = tl.zeros((R, C), tl.float64)
    a = own + TIME * length
    b = other + TIME * others
    for _ in range(0, F - TIME):
        left = tl.load(a + rows, mask=rows < length, other=0.0).to(tl.float64)
        right = tl.load(b + columns, mask=columns < others, other=0.0).to(tl.float64)
        delta = left[:, None] - right[None, :]
        s += delta * delta
        if TIME:
            along += delta * (left[:, None] + right[None, :])
        a += length
        b += others
    if TIME:
        left = tl.load(own + rows, mask=rows < length, other=1.0).to(tl.float64)
        right = tl.load(other + columns, mask=columns < others, other=1.0).to(tl.float64)
        along = along / (left[:, None] + right[None, :])
        s -= along * along
    return s, along


@triton.jit
def both(own, other, rows, columns, length, others):
    """The numbers of the rows and of the columns, to broadcast against the tile."""
    left = tl.load(own + rows, mask=rows < length, other=0.0)
    right = tl.load(other + columns, mask=columns < others, other=0.0)
    return left[:, None], right[None, :]


@triton.jit
def squares(
    own,  # (K, N), augmented features of all parts; of this batch entry, as everything here
    other,  # (K, M)
    own_x,  # (F, N), features
    other_x,  # (F, M)
    own_c,  # (parts, N), weights, times |kappa| / 2 on the queries' side
    other_c,  # (parts, M)
    own_n,  # (parts, N), squared norms times theta
    other_n,  # (parts, M)
    unit,  # (parts,), 1/|kappa|
    eps,
    rows,
    columns,
    length,
    others,
    PARTS: tl.constexpr,
    ALL: tl.constexpr,  # features of all parts
    FEATURES: tl.constexpr,  # of every part, as its sign of curvature and number of time coordinates
    SIGNS: tl.constexpr,
    TIMES: tl.constexpr,
    PART: tl.constexpr,
    RESOLVE: tl.constexpr,
    TERMS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """(d^2 of a tile, which pairs were worked from differences, t of the part PART, its product of weights)."""
    total = tl.zeros((R, C), own.dtype.element_ty)
    doubt = total
    chosen = total
    scale = total
    a, b = own, other
    for p in tl.static_range(PARTS):
        left, right = both(own_c + p * length, other_c + p * others, rows, columns, length, others)
        weight = left * right
        t, d2 = square(
            product(a, b, rows, columns, length, others, FEATURES[p] + 2, R, C), tl.load(unit + p), SIGNS[p], TERMS
        )
        total += d2
        if RESOLVE:
            left, right = both(own_n + p * length, other_n + p * others, rows, columns, length, others)
            slope = tl.where(t > 0, d2 / tl.where(t > 0, t, 1.0), tl.load(unit + p) * 2 if SIGNS[p] != 0 else 1.0)
            doubt += slope * weight * (left + right)
        if p == PART:
            chosen = t
            scale = tl.zeros((R, C), own.dtype.element_ty) + weight
        a += (FEATURES[p] + 2) * length
        b += (FEATURES[p] + 2) * others
    near = total < 0
    if RESOLVE:
        near = (total + eps < doubt) & (rows < length)[:, None] & (columns < others)[None, :]
        if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
            exact = tl.zeros((R, C), own.dtype.element_ty)
            x, y = own_x, other_x
            for p in tl.static_range(PARTS):
                left, right = both(own_c + p * length, other_c + p * others, rows, columns, length, others)
                s, _ = differences(x, y, rows, columns, length, others, FEATURES[p], TIMES[p], R, C)
                t, d2 = square((s * (left * right)).to(total.dtype), tl.load(unit + p), SIGNS[p], TERMS)
                exact += d2
                if p == PART:
                    chosen = tl.where(near, t, chosen)
                x += FEATURES[p] * length
                y += FEATURES[p] * others
            total = tl.where(near, exact, total)
    return total, near, chosen, scale


@triton.jit
def measure(d2, eps, WEIGHT: tl.constexpr):
    """What the power multiplies."""
    if WEIGHT == INVERSE:
        d2 = tl.log(d2 + eps)
    elif WEIGHT == SOFTMAX:
        d2 = tl.sqrt(d2)
    return d2


@triton.jit
def masked(
    logits,
    bias,
    i,
    j,
    n,
    m,
    i_stride,
    j_stride,
    causal,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Logits with the bias of queries i and keys j, -inf where a key takes no part."""
    allowed = (i < n) & (j < m)
    if BIAS == ADDED:
        logits += tl.load(bias + i * i_stride + j * j_stride, mask=allowed, other=0.0).to(logits.dtype)
    if BIAS == BOOLEAN:
        allowed = allowed & (tl.load(bias + i * i_stride + j * j_stride, mask=allowed, other=0) != 0)
    if CAUSAL:
        allowed = allowed & (j <= i + causal)
    return tl.where(allowed, logits, float("-inf"))


@triton.jit
def mixed(x):
    """murmur3's finaliser, as in horosphere.kernels.dropout."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B).to(tl.uint32)
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35).to(tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def kept(keys, i, j, n, threshold):
    """Which pairs of queries i and keys j dropout keeps; keys (N,) of the queries; 1 / (1 - p) is the caller's."""
    row = tl.load(keys + i, mask=i < n, other=0).to(tl.uint32, bitcast=True)
    column = mixed((j.to(tl.uint32) * 0x27D4EB2F).to(tl.uint32))
    return mixed(row ^ column).to(tl.int32, bitcast=True) >= threshold


@triton.jit
def of_entry(
    entry, own, other, own_x, other_x, own_c, other_c, own_n, other_n, unit, length, others,
    PARTS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Where a batch entry has its points."""
    few, every = entry * PARTS, entry * ALL
    augmented = every + 2 * few
    return (
        own + augmented * length, other + augmented * others, own_x + every * length, other_x + every * others,
        own_c + few * length, other_c + few * others, own_n + few * length, other_n + few * others, unit + few,
    )  # fmt: skip


@triton.jit
def span(first, others, causal, CAUSAL: tl.constexpr, SWAPPED: tl.constexpr, R: tl.constexpr):
    """Where the others of a block of rows start and stop: what causality leaves of them."""
    start, stop = others * 0, others
    if CAUSAL:
        if SWAPPED:
            start = tl.maximum(start, first - causal)
        else:
            stop = tl.minimum(stop, first + R + causal)
    return start, stop


@triton.jit
def ends(rows, columns, length, others, SWAPPED: tl.constexpr):
    """(queries i, keys j, numbers of queries and of keys) of a tile."""
    if SWAPPED:
        return columns[None, :], rows[:, None], others, length
    else:
        return rows[:, None], columns[None, :], length, others


@triton.jit
def settled(logits, lse, i, n):
    """Weights whose denominators are known; 0 in rows without keys."""
    base = tl.load(lse + i, mask=i < n, other=0.0)
    return tl.exp(logits - tl.where(base == float("-inf"), 0.0, base))


@triton.jit
def raised(logits, top, den, sums):
    """(weights of another tile, the maximum with it, denominators and sums), all against that maximum."""
    higher = tl.maximum(top, tl.max(logits, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp(top - base)
    w = tl.exp(logits - base[:, None])
    return w, higher, den * shrink + tl.sum(w, 1), sums * shrink[:, None]


@triton.jit
def gathered(
    sums, w, value, keys, i, j, n, threshold, columns, column, others, width,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums and what a tile of weights, as dropout leaves it, takes of the values."""
    if DROPOUT:
        w = tl.where(kept(keys, i, j, n, threshold), w, 0.0)
    v = tl.load(
        value + columns[:, None] * width + column[None, :],
        mask=(columns < others)[:, None] & (column < width)[None, :],
        other=0.0,
    )
    return tl.dot(w.to(v.dtype), v, sums, input_precision=PRECISION, out_dtype=sums.dtype)


@triton.jit
def divided(sums, den, top, lse, rows, length, first):
    """sums over denominators; the first of a row's programs writes lse too. Rows without keys have 0 and -inf."""
    some = den != 0  # NaN counts
    den = tl.where(some, den, 1.0)
    if first:
        tl.store(lse + rows, tl.where(some, tl.log(den) + top, float("-inf")), mask=rows < length)
    return sums / den[:, None]


@triton.jit
def average(
    own,
    other,
    own_x,
    other_x,
    own_c,
    other_c,
    own_n,
    other_n,
    unit,
    eps,  # (B,)
    power,  # (B,)
    value,  # (B, M, V), of the others
    lse,  # (B, queries), read where SWAPPED and written elsewhere
    bias,
    place,  # (B,), where the bias of an entry starts
    keys,  # (B, queries)
    out,  # (B, N, V)
    length,
    others,
    width,  # V
    i_stride,
    j_stride,
    causal,
    threshold,
    PARTS: tl.constexpr,
    ALL: tl.constexpr,  # features of all parts
    FEATURES: tl.constexpr,  # of every part, as its sign of curvature and number of time coordinates
    SIGNS: tl.constexpr,
    TIMES: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    RESOLVE: tl.constexpr,
    SWAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    TERMS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
):
    """sum_j W_ij value_j of a block of queries and its lse; SWAPPED: sum_i W_ij value_i of a block of keys."""
    pid = tl.program_id(0).to(tl.int64)
    down, across = tl.cdiv(length, R), tl.cdiv(width, V)
    entry = pid // (down * across)
    first = pid // across % down * R
    length = tl.cast(length, tl.int64)  # where it is 1 the compiler is given a constant, which has no .to
    others = tl.cast(others, tl.int64)
    own, other, own_x, other_x, own_c, other_c, own_n, other_n, unit = of_entry(
        entry, own, other, own_x, other_x, own_c, other_c, own_n, other_n, unit, length, others, PARTS, ALL
    )
    value += entry * others * width
    lse += entry * (others if SWAPPED else length)
    keys += entry * (others if SWAPPED else length)
    bias += tl.load(place + entry)
    shift, rate = tl.load(eps + entry), tl.load(power + entry)
    rows = first + tl.arange(0, R)
    column = pid % across * V + tl.arange(0, V)
    top = tl.full((R,), float("-inf"), own.dtype.element_ty)
    den = tl.zeros((R,), own.dtype.element_ty)
    sums = tl.zeros((R, V), own.dtype.element_ty)
    start, stop = span(first, others, causal, CAUSAL, SWAPPED, R)
    for at in range(start, stop, C):
        columns = at + tl.arange(0, C)
        d2, _, _, _ = squares(
            own, other, own_x, other_x, own_c, other_c, own_n, other_n, unit, shift, rows, columns, length, others,
            PARTS, ALL, FEATURES, SIGNS, TIMES, -1, RESOLVE, TERMS, R, C,
        )  # fmt: skip
        i, j, n, m = ends(rows, columns, length, others, SWAPPED)
        logits = -rate * measure(d2, shift, WEIGHT)
        logits = masked(logits, bias, i, j, n, m, i_stride, j_stride, causal, BIAS, CAUSAL)
        if SWAPPED:
            w = settled(logits, lse, i, n)
        else:
            w, top, den, sums = raised(logits, top, den, sums)
        sums = gathered(
            sums, w, value, keys, i, j, n, threshold, columns, column, others, width, DROPOUT, PRECISION
        )  # fmt: skip
    if SWAPPED == 0:
        sums = divided(sums, den, top, lse, rows, length, pid % across == 0)
    at = (entry * length + rows[:, None]) * width + column[None, :]
    tl.store(out + at, sums, mask=(rows < length)[:, None] & (column < width)[None, :])

"""Lower bounds of distances as Triton kernels that do not store the matrix: smallest of groups of columns, then the
members of the groups that were chosen.

Augmented features of all parts lie one below the other and come transposed, (B, K, N). Addresses are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horosphere.kernels.triton.arcs import square
from horosphere.kernels.triton.sqdist_kernels import inner


@triton.jit
def bounds(
    a,  # (K, N), of this batch entry
    b,  # (K, M)
    unit,  # (parts,), 1/|kappa|
    rows,  # (R,)
    columns,  # (R or 1, C)
    n,
    m,
    PARTS: tl.constexpr,
    FEATURES: tl.constexpr,  # augmented features of every part, and its sign of curvature
    SIGNS: tl.constexpr,
    LARGEST: tl.constexpr,  # number of the type
    TERMS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """What pairs are ranked by (R, C): t of one part, d^2 of several; columns beyond the last come after points without
    distance.
    """
    if PARTS == 1:
        keys = inner(a, b, rows, columns, n, m, FEATURES[0], R, C)
    else:
        keys = tl.zeros((R, C), a.dtype.element_ty)
        for p in tl.static_range(PARTS):
            _, d2 = square(inner(a, b, rows, columns, n, m, FEATURES[p], R, C), tl.load(unit + p), SIGNS[p], TERMS)
            keys += d2
            a += FEATURES[p] * n
            b += FEATURES[p] * m
    keys = tl.where(keys < LARGEST, keys, LARGEST)  # NaN too
    return tl.where(columns < m, keys, float("inf"))


@triton.jit
def minima(
    a,  # (B, ALL, N)
    b,  # (B, ALL, M)
    unit,  # (B, parts)
    out,  # (B, last - first, groups)
    n,
    m,
    first,
    last,
    PARTS: tl.constexpr,
    ALL: tl.constexpr,
    FEATURES: tl.constexpr,
    SIGNS: tl.constexpr,
    LARGEST: tl.constexpr,
    TERMS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """The smallest of every group of C columns, for rows first to last."""
    pid = tl.program_id(0).to(tl.int64)
    groups, height = tl.cdiv(m, C), last - first
    down = tl.cdiv(height, R)
    entry, group = pid // (groups * down), pid % groups
    i = pid // groups % down * R + tl.arange(0, R)
    columns = (group * C + tl.arange(0, C))[None, :]
    a += entry * ALL * n
    b += entry * ALL * m
    keys = bounds(
        a, b, unit + entry * PARTS, first + i, columns, n, m, PARTS, FEATURES, SIGNS, LARGEST, TERMS, R, C
    )  # fmt: skip
    tl.store(out + (entry * height + i) * groups + group, tl.min(keys, 1), mask=i < height)


@triton.jit
def members(
    a,  # (B, ALL, N)
    b,  # (B, ALL, M)
    unit,  # (B, parts)
    place,  # (B, last - first, few), the groups chosen
    out,  # (B, last - first, few, C)
    n,
    m,
    first,
    last,
    few,
    PARTS: tl.constexpr,
    ALL: tl.constexpr,
    FEATURES: tl.constexpr,
    SIGNS: tl.constexpr,
    LARGEST: tl.constexpr,
    TERMS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """All of every chosen group."""
    pid = tl.program_id(0).to(tl.int64)
    count = tl.cast(last - first, tl.int64) * few
    down = tl.cdiv(count, R)
    entry = pid // down
    slots = pid % down * R + tl.arange(0, R)
    at = entry * count + slots
    group = tl.load(place + at, mask=slots < count, other=0).to(tl.int32)  # a column fits into 32 bits
    columns = group[:, None] * C + tl.arange(0, C)[None, :]
    a += entry * ALL * n
    b += entry * ALL * m
    keys = bounds(
        a, b, unit + entry * PARTS, first + slots // few, columns, n, m, PARTS, FEATURES, SIGNS, LARGEST, TERMS, R, C
    )  # fmt: skip
    tl.store(out + at[:, None] * C + tl.arange(0, C)[None, :], keys, mask=(slots < count)[:, None])

"""The loops of :mod:`horosphere.kernels.numba.sqdist`; importing this imports numba."""

from __future__ import annotations

import math

import numpy as np

from horosphere import _compiled, _numerics

__all__ = ["hyperbolic", "log1p", "spherical", "tile"]

_jit = _compiled.njit(nogil=True)

# Names of single numbers: the compiler vectorises a polynomial of constants, not of an array.
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (np.float32(c) for c in _numerics.LOG_FIT)
_A0, _A1, _A2, _A3, _A4, _A5, _A6, _A7 = (np.float32(c) for c in _numerics.ASIN_FIT)
_ZERO, _HALF, _ONE, _TWO = (np.float32(c) for c in (0, 0.5, 1, 2))
_LOG2, _PI = np.float32(math.log(2)), np.float32(math.pi)
# Rows and columns of a block that is mirrored: its lines fit the first cache.
_BLOCK = 32
# The bits of 1/sqrt 2: numbers from there to sqrt 2 have the exponent 0 after it is subtracted.
_ROOT_HALF = np.int32(np.float32(math.sqrt(0.5)).view(np.int32))
_MANTISSA = np.int32(23)


@_jit
def log1p(s):
    """log(1 + s) for finite s >= 0."""
    w = np.float32(_ONE + s)
    bits = np.int32(w.view(np.int32))
    exponent = np.int32(np.int32(bits - _ROOT_HALF) >> _MANTISSA)
    rest = np.int32(bits - np.int32(exponent << _MANTISSA))
    # where 1 + s is in the first interval s itself has the bits that the sum has lost
    f = s if exponent == np.int32(0) else rest.view(np.float32) - _ONE
    p = _L8 * f + _L7
    p = p * f + _L6
    p = p * f + _L5
    p = p * f + _L4
    p = p * f + _L3
    p = p * f + _L2
    p = p * f + _L1
    p = p * f + _L0
    square = f * f
    return f + (f * square * p - _HALF * square) + np.float32(exponent) * _LOG2


@_jit
def _asin(z):
    """asin z for 0 <= z^2 <= 1/2."""
    q = z * z
    p = _A7 * q + _A6
    p = p * q + _A5
    p = p * q + _A4
    p = p * q + _A3
    p = p * q + _A2
    p = p * q + _A1
    p = p * q + _A0
    return z * p


@_jit
def hyperbolic(t):
    """arcosh(1 + t)."""
    return log1p(t + np.sqrt(t * (t + _TWO)))


@_jit
def spherical(t):
    """arccos(1 - t) = 2 asin sqrt(t / 2); past a quarter turn the angle is measured from the antipode."""
    h = _HALF * t
    far = h > _HALF
    angle = _TWO * _asin(np.sqrt(_ONE - h if far else h))
    return _PI - angle if far else angle


@_jit
def _product(a, b, first, t):
    """t_j = sum_k a_k b_kj from column ``first`` on, four rows of b at a time: t stays in the first cache."""
    terms = a.shape[0]
    t[:] = _ZERO
    for k in range(0, terms - terms % 4, 4):
        a0, a1, a2, a3 = a[k], a[k + 1], a[k + 2], a[k + 3]
        b0, b1, b2, b3 = b[k, first:], b[k + 1, first:], b[k + 2, first:], b[k + 3, first:]
        for j in range(t.shape[0]):
            t[j] = t[j] + a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j]
    for k in range(terms - terms % 4, terms):
        a0, b0 = a[k], b[k, first:]
        for j in range(t.shape[0]):
            t[j] += a0 * b0[j]


@_jit
def tile(a, b, p, q, norms, w, factor, sign, corner, end, squared, resolve, out, found):
    """Distances into out (B, N, M) from one corner (entry, row, column) up to the other, exclusive.

    a (B, N, K), b (B, K, M), p, q (B, N), norms, w (B, M), factor (B,). Returns how many flat indices of unresolved
    pairs are in ``found``.
    """
    columns = end[2] - corner[2]
    here = slice(corner[2], end[2])
    t = np.empty(columns, np.float32)
    antipode = _TWO if sign > 0 else np.float32(np.inf)
    count = 0
    for e in range(corner[0], end[0]):
        unit, norm, weight = factor[e], norms[e, here], w[e, here]
        for i in range(corner[1], end[1]):
            row = out[e, i, here]
            _product(a[e, i], b[e], corner[2], t)
            if resolve:
                own, slope = p[e, i], q[e, i]
                # the columns between which unresolved pairs lie: often a point and itself, one column
                low, high = np.int32(columns), np.int32(-1)
                for j in range(columns):
                    limit = (own + slope * norm[j]) * weight[j]
                    known = t[j] >= limit and t[j] <= antipode - limit
                    low = min(low, np.int32(columns) if known else np.int32(j))
                    high = max(high, np.int32(-1) if known else np.int32(j))
                start = (e * out.shape[1] + i) * out.shape[2] + corner[2]
                for j in range(low, high + 1):
                    limit = (own + slope * norm[j]) * weight[j]
                    if not (t[j] >= limit and t[j] <= antipode - limit):
                        found[count] = start + j
                        count += 1
            if sign < 0:
                for j in range(columns):
                    row[j] = hyperbolic(t[j] if t[j] > _ZERO else _ZERO) * unit
            elif sign > 0:
                for j in range(columns):
                    v = min(t[j], _TWO)
                    row[j] = spherical(v if v > _ZERO else _ZERO) * unit
            else:
                for j in range(columns):
                    row[j] = np.sqrt(t[j] if t[j] > _ZERO else _ZERO)
            if squared:
                for j in range(columns):
                    row[j] *= row[j]
    return count


@_jit
def mirror(corner, end, out):
    """What a tile has above the diagonal of out (B, N, N) copied below it, in blocks that stay in the first cache."""
    for e in range(corner[0], end[0]):
        for first in range(corner[2], end[2], _BLOCK):
            for top in range(corner[1], end[1], _BLOCK):
                last = min(top + _BLOCK, end[1])
                for j in range(first, min(first + _BLOCK, end[2])):
                    for i in range(top, min(last, j)):
                        out[e, j, i] = out[e, i, j]

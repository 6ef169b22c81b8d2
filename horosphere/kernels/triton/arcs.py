"""Scalar functions of the distance kernels, written from sqrt, log and series, so that no driver library is needed.

phi(t) is arcosh(1 + t), arccos(1 - t) or sqrt(t), the distance in units of 1/sqrt|kappa|; see
horosphere.kernels.chord.arcs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log1p(x, TERMS: tl.constexpr):
    """log(1 + x) for x >= 0: 2 atanh(s), s = x / (2 + x), below 1/2, where s^2 <= 1/25."""
    s = x / (x + 2)
    q = s * s
    series = tl.zeros_like(x)
    for i in tl.static_range(TERMS):
        series = series * q + 1 / (2 * (TERMS - i) - 1)
    return tl.where(x < 0.5, 2 * s * series, tl.log(1 + x))


@triton.jit
def asin_series(z, TERMS: tl.constexpr):
    """asin z for 0 <= z <= 1/2: z (1 + z^2 1/6 (1 + z^2 9/20 (1 + ...)))."""
    q = z * z
    series = tl.zeros_like(z) + 1
    for i in tl.static_range(TERMS):
        # spelled out: assigned to a name, the number would become a float32 tensor
        series = 1 + q * series * ((2 * (TERMS - i) - 1) ** 2 / (2 * (TERMS - i) * (2 * (TERMS - i) + 1)))
    return z * series


@triton.jit
def phi(t, SIGN: tl.constexpr, TERMS: tl.constexpr):
    """The distance for t >= 0, and t <= 2 on positive curvature."""
    if SIGN == 0:
        out = tl.sqrt(t)
    elif SIGN < 0:
        out = log1p(t + tl.sqrt(t) * tl.sqrt(t + 2), TERMS)
    else:
        z = tl.sqrt(t / 2)
        # past a sixth of a turn the angle is measured from the other end: 1 - z without its cancellation
        far = z > 0.5
        rest = (1 - t / 2) / (1 + z)
        small = asin_series(tl.where(far, tl.sqrt(rest / 2), z), 2 * TERMS)
        out = tl.where(far, 3.141592653589793 - 4 * small, 2 * small)
    return out


@triton.jit
def square(t, unit, SIGN: tl.constexpr, TERMS: tl.constexpr):
    """(t put back into its range, d^2); unit = 1/|kappa|."""
    proper = tl.where(t > 0, t, 0.0)
    if SIGN > 0:
        proper = tl.where(proper < 2, proper, 2.0)
    d2 = proper
    if SIGN != 0:
        arc = phi(proper, SIGN, TERMS)
        d2 = arc * arc * unit
    return proper, tl.where(t != t, float("nan"), d2)


@triton.jit
def slope(t, SIGN: tl.constexpr, SQUARED: tl.constexpr, TERMS: tl.constexpr):
    """dphi/dt, or d(phi^2)/dt, for t inside its range."""
    if SIGN == 0:
        out = 0.5 / tl.sqrt(t)
        if SQUARED:
            out = tl.zeros_like(t) + 1
    else:
        if SIGN < 0:
            radical = tl.sqrt(t) * tl.sqrt(t + 2)
        else:
            radical = tl.sqrt(t * (2 - t))
        out = 1 / radical
        if SQUARED:
            out = 2 * phi(t, SIGN, TERMS) / radical
    return out


@triton.jit
def curvature_slope(t, SIGN: tl.constexpr, SQUARED: tl.constexpr, TERMS: tl.constexpr):
    """dd/dkappa at fixed u times |kappa|^(3/2), d(d^2)/dkappa times |kappa|^2 where SQUARED; flat: no factor."""
    if SIGN == 0:
        out = t * tl.sqrt(t) / 24
        if SQUARED:
            out = t * t / 12
    else:
        z2 = t / 2
        z = tl.sqrt(z2)
        small = z2 <= 0.0625
        q = SIGN * tl.where(small, z2, 0.0)
        series = tl.zeros_like(t) + 1
        for i in tl.static_range(TERMS):
            series = 1 + q * series * (
                (TERMS - i + 1)
                * (2 * (TERMS - i) + 1) ** 2
                / (2 * (TERMS - i) * (TERMS - i + 1) * (2 * (TERMS - i) + 3))
            )
        arc = phi(t, SIGN, TERMS)
        large = tl.where(small, 0.5, z2)
        closed = SIGN * (tl.sqrt(large / (1 - SIGN * large)) - arc / 2)
        out = tl.where(small, z * z2 * series / 3, closed)
        if SQUARED:
            out = out * 2 * arc
    return out

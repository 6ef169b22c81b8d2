"""Distances to 60 digits by mpmath, from exactly the stored numbers.

The formulas are the ambient ones (arc cosine of an inner product), which lose half of their digits on near pairs: of 60
that is no loss, and they share nothing with the code under test. Points of the ball and of the stereographic model are
lifted to the hyperboloid or sphere first. The exact point is what "Precision" promises about: the stored vector
(flat, ball, stereographic), the direction of the stored vector (sphere), the spatial part with exact time
(hyperboloid); kappa and scale are the stored values, widened.
"""

from __future__ import annotations

import mpmath
import numpy as np
import torch
from mpmath import mpf

import horosphere as hs

DIGITS = 60


def _stored(value) -> mpf:
    return mpf(value.item() if isinstance(value, torch.Tensor) else value)


def _dot(x, y) -> mpf:
    return mpmath.fdot(x, y)


def _lift(x: list, kappa: mpf) -> list:
    """Inverse stereographic projection in units of the radius: (first coordinate, the others)."""
    s = kappa * _dot(x, x)
    root = mpmath.sqrt(abs(kappa))
    return [(1 - s) / (1 + s), *(2 * root * a / (1 + s) for a in x)]


def _hyperboloid(x: list, y: list, kappa: mpf) -> mpf:
    """Points in units of the radius, time first."""
    if x == y:
        return mpf(0)
    value = x[0] * y[0] - _dot(x[1:], y[1:])
    return mpmath.acosh(max(value, mpf(1))) / mpmath.sqrt(-kappa)


def _sphere(x: list, y: list, kappa: mpf) -> mpf:
    if x == y:
        return mpf(0)
    cosine = _dot(x, y) / mpmath.sqrt(_dot(x, x) * _dot(y, y))
    return mpmath.acos(max(min(cosine, mpf(1)), mpf(-1))) / mpmath.sqrt(kappa)


def _kappa(manifold, shift) -> mpf:
    return _stored(manifold.kappa) + shift


def _prepare(manifold, x: list, shift=0):
    """What is worth computing once a point."""
    if isinstance(manifold, hs.Stereographic) and _kappa(manifold, shift) != 0:
        return _lift(x, _kappa(manifold, shift))
    if isinstance(manifold, hs.Lorentz):
        root = mpmath.sqrt(-_kappa(manifold, shift))
        space = [root * a for a in x[1:]]
        return [mpmath.sqrt(1 + _dot(space, space)), *space]
    if isinstance(manifold, hs.Scaled):
        return _prepare(manifold.base, x)
    if isinstance(manifold, hs.Product):
        return [_prepare(m, x[part]) for m, part in zip(manifold.manifolds, manifold.slices, strict=True)]
    return x


def _pair(manifold, x: list, y: list, shift=0) -> mpf:
    if isinstance(manifold, hs.Scaled):
        return _stored(manifold.scale) * _pair(manifold.base, x, y)
    if isinstance(manifold, hs.Product):
        parts = [_pair(m, a, b) for m, a, b in zip(manifold.manifolds, x, y, strict=True)]
        return mpmath.sqrt(mpmath.fsum(d * d for d in parts))
    kappa = _kappa(manifold, shift)
    if isinstance(manifold, hs.Sphere):
        return _sphere(x, y, kappa)
    if isinstance(manifold, hs.Lorentz):
        return _hyperboloid(x, y, kappa)
    if isinstance(manifold, hs.Stereographic) and kappa != 0:
        return _sphere(x, y, kappa) if kappa > 0 else _hyperboloid(x, y, kappa)
    delta = [a - b for a, b in zip(x, y, strict=True)]
    length = mpmath.sqrt(_dot(delta, delta))
    return length if isinstance(manifold, hs.Euclidean) else 2 * length


def _points(manifold, x: torch.Tensor) -> list:
    return [_prepare(manifold, [mpf(v) for v in row]) for row in x.detach().to(torch.float64).tolist()]


def distance(manifold, x: torch.Tensor, y: torch.Tensor) -> mpf:
    """Distance of two points (D,), an mpf of 60 digits."""
    with mpmath.workdps(DIGITS):
        (a,), (b,) = _points(manifold, x.reshape(1, -1)), _points(manifold, y.reshape(1, -1))
        return +_pair(manifold, a, b)


def matrix(manifold, x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """Distances of all pairs of x (N, D) and y (M, D): an (N, M) array of mpf."""
    with mpmath.workdps(DIGITS):
        xs, ys = _points(manifold, x), _points(manifold, y)
        return np.array([[_pair(manifold, a, b) for b in ys] for a in xs], dtype=object).reshape(len(xs), len(ys))


def slopes(manifold, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Derivatives of the distance of two points (D,) in x, y and kappa, by central differences in twice as many
    digits.
    """
    with mpmath.workdps(2 * DIGITS):
        a, b = ([mpf(v) for v in t.detach().to(torch.float64).tolist()] for t in (x, y))
        h = mpf(10) ** -25

        def value(p, q, shift=0):
            return _pair(manifold, _prepare(manifold, p, shift), _prepare(manifold, q, shift), shift)

        def moved(p, i, by):
            return [v + by if i == j else v for j, v in enumerate(p)]

        dx = [(value(moved(a, i, h), b) - value(moved(a, i, -h), b)) / (2 * h) for i in range(len(a))]
        dy = [(value(a, moved(b, i, h)) - value(a, moved(b, i, -h))) / (2 * h) for i in range(len(b))]
        dkappa = (value(a, b, h) - value(a, b, -h)) / (2 * h)
        return *(torch.tensor([float(v) for v in d], dtype=torch.float64) for d in (dx, dy)), float(dkappa)


def relative_error(found: torch.Tensor, true: np.ndarray) -> np.ndarray:
    """|found - true| / true in 60 digits, as floats; where true is 0: 0 if found is exactly 0, else infinity."""
    values = found.detach().to(torch.float64).tolist()
    with mpmath.workdps(DIGITS):
        out = np.empty(true.shape)
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                t = true[i, j]
                if t == 0:
                    out[i, j] = 0.0 if value == 0 else np.inf
                elif not np.isfinite(value):
                    out[i, j] = np.inf
                else:
                    out[i, j] = float(abs(mpf(value) - t) / t)
        return out

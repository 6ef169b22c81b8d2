r"""Distances, slopes and curvature derivatives of a tile, from t = |kappa| u / 2 (t = u on flat space).

In units of :math:`1/\sqrt{|\kappa|}` the distance is :math:`\varphi(t)` = arcosh(1 + t), arccos(1 - t) or sqrt(t).
Everything is written in functions that torch vectorises on CPUs (sqrt, log1p, atan; not asinh, acosh or asin).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horosphere import _numerics

ROOT2 = math.sqrt(2.0)
# From t = 0.01 on, where phi is 0.14, log(1 + ...) is as exact as needed (two roundings of 2^-24 are 8e-7 of it), and
# a third of the cost of log1p.
PLAIN_LOG = 0.01
# z/sqrt(1 - z^2) - asin z = sum 2 n c_n z^(2n+1), c_n the coefficients of asin; for asinh with alternating signs.
CURVATURE_SERIES = tuple(
    2 * n * math.factorial(2 * n) / (4**n * math.factorial(n) ** 2 * (2 * n + 1)) for n in range(1, 17)
)


def _radical(t: Tensor, sign: int, out: Tensor) -> Tensor:
    """sqrt(t (t + 2)) or sqrt(t (2 - t)) over sqrt 2, without overflow for t up to the root of the largest number."""
    return torch.addcmul(t, t, t, value=0.5 if sign < 0 else -0.5, out=out).sqrt_()


def overflows(largest: float, dtype: torch.dtype) -> bool:
    """Whether t^2 may overflow for t up to ``largest``."""
    return not largest * largest < torch.finfo(dtype).max


def arc_(t: Tensor, sign: int, scratch: Tensor, wide: bool = False, log: bool = False) -> Tensor:
    """phi(t) in place, for t >= 0 (and t <= 2 on positive curvature).

    ``wide``: t^2 may overflow. ``log``: no entry that matters is below PLAIN_LOG.
    """
    if sign == 0:
        return t.sqrt_()
    if sign < 0:
        if wide:
            torch.add(t, 2, out=scratch).sqrt_()
            return t.add_(scratch.mul_(t.sqrt())).log1p_()
        t.add_(_radical(t, sign, scratch), alpha=ROOT2)
        return t.add_(1).log_() if log else t.log1p_()
    torch.sub(2.0 * t.new_ones(()), t, out=scratch)
    return t.div_(scratch).sqrt_().atan_().mul_(2)


def clamp_(t: Tensor, sign: int) -> Tensor:
    """t put back into [0, 2 on positive curvature] after rounding."""
    return t.clamp_(min=0.0, max=2.0) if sign > 0 else t.clamp_(min=0.0)


def slope(t: Tensor, sign: int, squared: bool, scratch: Tensor, wide: bool = False) -> Tensor:
    """dphi/dt, or d(phi^2)/dt where squared, into ``scratch``; anything outside of its range, see :func:`masked_`."""
    if sign == 0:
        return scratch.fill_(1.0) if squared else torch.rsqrt(t, out=scratch).mul_(0.5)
    if wide:
        torch.add(t, 2, out=scratch).sqrt_().mul_(t.sqrt())
    else:
        _radical(t, sign, scratch).mul_(ROOT2)
    if not squared:
        return scratch.reciprocal_()
    if sign < 0:
        return torch.div((t + scratch).log1p_().mul_(2), scratch, out=scratch)
    return torch.div(arc_(t.clone(), sign, torch.empty_like(t)).mul_(2), scratch, out=scratch)


def masked_(values: Tensor, t: Tensor, sign: int) -> Tensor:
    """values, 0 where t is not inside its range: coincident points and antipodes have gradient 0."""
    torch.ops.aten.threshold_backward.grad_input(values, t, 0, grad_input=values)
    if sign > 0:
        torch.ops.aten.threshold_backward.grad_input(values, 2 - t, 0, grad_input=values)
    return values


def curvature_slope(t: Tensor, sign: int, squared: bool) -> Tensor:
    """dd/dkappa at fixed u times |kappa|^(3/2), or d(d^2)/dkappa times |kappa|^2; no factor on flat space.

    0 at antipodes (t = 2 on positive curvature), as all gradients are defined there.
    """
    if sign == 0:
        return t * t / 12 if squared else t * t.sqrt() / 24
    z2 = t / 2
    z = z2.sqrt()
    small = z2 <= _numerics.ARC_SERIES_BOUND / 4
    q = sign * torch.where(small, z2, 0.0)
    terms = CURVATURE_SERIES[: 16 if t.dtype == torch.float64 else 8]
    series = torch.full_like(q, terms[-1])
    for c in reversed(terms[:-1]):
        series = series * q + c
    inside = small if sign < 0 else small | (z2 >= 1)
    large = torch.where(inside, 0.5, z2)
    arc = arc_(large * 2, sign, torch.empty_like(t), wide=True)
    closed = sign * ((large / (1 - sign * large)).sqrt() - arc / 2)
    out = torch.where(small, z * z2 * series, closed)
    if squared:
        out = out * 2 * torch.where(small, _small_arc(z, q, t.dtype), arc)
    return out if sign < 0 else torch.where(z2 >= 1, 0.0, out)


def _small_arc(z: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """phi = 2 z (arc2's series)^(1/2) for small z, q = sign z^2."""
    terms = _numerics.ARC_SERIES[: 15 if dtype == torch.float64 else 7]
    series = torch.full_like(q, terms[-1])
    for c in reversed(terms[:-1]):
        series = series * (4 * q) + c
    return 2 * z * series.sqrt()

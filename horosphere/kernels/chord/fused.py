"""The plain form arranged for a compiler: one matrix product for the scaled squared chord, one fused pass.

Weights and norms go into the features of the product, because a compiler that fuses them into the pass over the matrix
computes them once an entry. Same formulas as horosphere.kernels.tiled, differentiable by autograd.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.chord.augment import minkowski


def can_serve(xs: Sequence) -> bool:
    """Whether all curvatures are numbers. The derivative by a learned one needs the reference's series near 0."""
    return not any(isinstance(x.kappa, Tensor) for x in xs)


def sqdist(xs: Sequence, ys: Sequence, squared: bool) -> Tensor:
    """Distances (..., N, M), or their squares, from chord parts with curvatures that are numbers."""
    if len(xs) == 1:
        d = _distance(xs[0], ys[0])
        return d * d if squared else d
    total = functools.reduce(operator.add, (_distance(x, y) ** 2 for x, y in zip(xs, ys, strict=True)))
    return total if squared else _numerics.safe_sqrt(total)


def _distance(x, y) -> Tensor:
    kappa = x.kappa
    factor = abs(kappa) ** -0.5 if kappa else 1.0
    t = _scaled_chord2(x, y)
    coincident = t <= 0
    t = torch.where(coincident, 1.0, t)
    if kappa == 0:
        d = torch.sqrt(t)
    elif kappa < 0:
        # on the hyperboloid t^2 may overflow
        radical = torch.sqrt(t) * torch.sqrt(t + 2) if x.time_dims else torch.sqrt(t * (t + 2))
        d = torch.log1p(t + radical) * factor
    else:
        antipodal = t >= 2
        t = torch.where(antipodal, 1.0, t)
        d = torch.where(antipodal, math.pi * factor, torch.atan(torch.sqrt(t / (2 - t))) * (2 * factor))
    return torch.where(coincident, 0.0, d)


def _scaled_chord2(x, y) -> Tensor:
    """t = |kappa| u / 2, u on flat space; cf. horosphere.kernels.chord.augment."""
    dtype = _numerics.fast_dtype(torch.promote_types(x.features.dtype, y.features.dtype))
    kappa = x.kappa
    c = abs(kappa) / 2 if kappa else 1.0
    fx, fy = x.features.to(torch.float64), y.features.to(torch.float64)
    nx, ny = (fx * fx).sum(-1, keepdim=True), (fy * fy).sum(-1, keepdim=True)
    one_x, one_y = torch.ones_like(nx), torch.ones_like(ny)
    if x.time_dims:
        a = c * torch.cat((-2 * minkowski(fx, x.time_dims), 2 / kappa * one_x), -1)
        b = torch.cat((fy, one_y), -1)
    else:
        a = c * torch.cat((-2 * fx, nx, one_x), -1)
        b = torch.cat((fy, one_y, ny), -1)
    if x.weight is not None:
        a, b = a * x.weight.unsqueeze(-1), b * y.weight.unsqueeze(-1)
    return a.to(dtype) @ b.to(dtype).mT

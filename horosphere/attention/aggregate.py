"""Means of values that lie on a manifold, as linear sums: lift each value, average, settle the average.

The weighted ambient midpoint of horosphere.midpoint is a function of one weighted sum, so the streaming kernels compute
it like any other mean of vectors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.attention.arguments import Arguments
from horosphere.kernels.ops import without_autocast
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve
from horosphere.manifolds.euclidean import Euclidean
from horosphere.manifolds.lorentz import Lorentz
from horosphere.manifolds.product import Product, Scaled
from horosphere.manifolds.sphere import Sphere
from horosphere.manifolds.stereographic import Stereographic


def averaged(
    args: Arguments,
    value_manifold: geoopt.Manifold | None,
    return_lse: bool,
    attend: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> Tensor | tuple[Tensor, Tensor]:
    """What an attention returns; ``attend`` takes values (..., M, E) to their weighted means and the lse."""
    values = args.value if value_manifold is None else lift(value_manifold, args.value)
    with without_autocast(args.query.device):
        out, lse = attend(values)
        if value_manifold is not None:
            out = settle(value_manifold, out)
    out = args.joined(out, 2).to(args.value.dtype)
    return (out, args.joined(lse, 1)) if return_lse else out


def lift(manifold: geoopt.Manifold, value: Tensor) -> Tensor:
    """Values (..., M, D) as vectors (..., M, E) whose weighted mean determines the midpoint.

    Raises TypeError where the manifold's midpoint has no closed form.
    """
    one, has_chord = resolve(manifold)
    if isinstance(one, Scaled):
        return lift(one.base, value)
    if has_chord and isinstance(one, Product):
        return torch.cat([lift(m, value[..., s]) for m, s in zip(one.manifolds, one.slices, strict=True)], -1)
    if has_chord and isinstance(one, Euclidean):
        return value
    if has_chord and isinstance(one, Sphere | Lorentz):
        return one.projx(value)
    if has_chord and isinstance(one, Stereographic):
        scale = one.lambda_x(value, keepdim=True)
        return torch.cat((scale * value, scale - 1), -1)
    raise TypeError(f"{type(manifold).__name__} has no closed-form midpoint: values cannot be averaged on it")


def settle(manifold: geoopt.Manifold, mean: Tensor) -> Tensor:
    """The midpoint (..., N, D) from weighted means (..., N, E) of lifted values; the origin where the mean is 0."""
    one, _ = resolve(manifold)
    if isinstance(one, Scaled):
        return settle(one.base, mean)
    if isinstance(one, Product):
        parts, at = [], 0
        for m, size in zip(one.manifolds, one.sizes, strict=True):
            width = size + lifted_columns(m)
            parts.append(settle(m, mean[..., at : at + width]))
            at += width
        return torch.cat(parts, -1)
    if isinstance(one, Euclidean):
        return mean
    if isinstance(one, Sphere):
        return one.projx(mean)
    wide = mean.to(_numerics.compute_dtype(mean.dtype))
    kappa = one._kappa_at(wide)
    if isinstance(one, Lorentz):
        height2 = -kappa * (wide[..., :1] ** 2 - (wide[..., 1:] ** 2).sum(-1, keepdim=True))
        return one.projx((wide / torch.where(height2 > 0, height2, 1.0).sqrt()).to(mean.dtype))
    total, height = wide[..., :-1], wide[..., -1:]
    norm2 = height**2 + kappa * (total**2).sum(-1, keepdim=True)
    below = _numerics.safe_sqrt(norm2.clamp(min=0.0)) + height
    return one.projx((total / torch.where(below == 0, 1.0, below)).to(mean.dtype))


def lifted_columns(manifold: geoopt.Manifold) -> int:
    """How many numbers more than a value its lifted vector has."""
    one, _ = resolve(manifold)
    if isinstance(one, Product):
        return sum(lifted_columns(m) for m in one.manifolds)
    if isinstance(one, Scaled):
        return lifted_columns(one.base)
    return int(isinstance(one, Stereographic))

r"""Isometries between models of one space: distances before and after are equal.

The hyperbolic models, R = 1/sqrt|kappa|:

==============  ==============================  ==============================================
model           points                          from the ball's x, lambda = 2/(1 + kappa|x|^2)
==============  ==============================  ==============================================
Poincare ball   \|x\| < R, conformal            x
hyperboloid     (t, s), t = sqrt(R^2 + \|s\|^2)  s = lambda x
Klein ball      \|k\| < R, geodesics straight   k = lambda x / (lambda - 1) = R s / t
==============  ==============================  ==============================================

All is worked in float64 and rounded once to the type of the points. What a model cannot store is lost there: at
hyperbolic radius r (in units of R) the gap to the rim is about 2 exp(-r) in the ball and 2 exp(-2 r) in the Klein
ball, so the ball ends at r = 15.2 in float32 and 35.4 in float64, the Klein ball at half of that (7.6 and 17.7), the
hyperboloid at 42.4 and 88; points beyond are put on the cap of the model they go to. Numbers that are no point of
their model (outside of a ball) give NaN, never an error, as in ``dist``: ``assert_check_point_on_manifold`` tells.
The rim of a ball goes to the cap of the other ball, and to NaN or infinity on the hyperboloid.

Source: Ratcliffe, Foundations of hyperbolic manifolds, chapters 3, 4 and 6; Cannon et al. (1997), Hyperbolic geometry.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._numerics import one_plus_kappa_norm2
from horosphere._points import as_points
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve
from horosphere.manifolds.curvature import ConstantCurvature
from horosphere.manifolds.euclidean import Euclidean
from horosphere.manifolds.lorentz import Lorentz
from horosphere.manifolds.poincare import PoincareBall
from horosphere.manifolds.product import Product, Scaled
from horosphere.manifolds.sphere import Sphere
from horosphere.manifolds.stereographic import Stereographic


def ball_to_hyperboloid(x: Tensor, kappa: float | Tensor) -> Tensor:
    r"""Poincare ball to hyperboloid: :math:`s = 2x/(1 + \kappa|x|^2)`, the time coordinate first.

    Args:
        x: (..., n) in the ball of radius :math:`1/\sqrt{|\kappa|}`. Outside the result is NaN.
        kappa: signed curvature < 0 of both models; (H,) goes with points (..., H, N, n).

    Returns:
        (..., n + 1), in the type of x.

    Raises:
        ValueError: kappa is not negative.
    """
    ball, hyperboloid = PoincareBall(kappa), Lorentz(kappa)
    x = as_points(x, "x")
    return _to_dtype(_lift(ball, x.to(torch.float64)), x.dtype, hyperboloid)


def hyperboloid_to_ball(x: Tensor, kappa: float | Tensor) -> Tensor:
    r"""Hyperboloid to Poincare ball: :math:`R s/(R + t)`, the projection from (-R, 0). Time is recomputed from s.

    Args:
        x: (..., n + 1), time first.
        kappa: signed curvature < 0 of both models; (H,) goes with points (..., H, N, n + 1).

    Returns:
        (..., n), in the type of x, within the ball's cap.

    Raises:
        ValueError: kappa is not negative.
    """
    ball, hyperboloid = PoincareBall(kappa), Lorentz(kappa)
    x = as_points(x, "x")
    return _to_dtype(_project(hyperboloid, x.to(torch.float64)), x.dtype, ball)


def ball_to_klein(x: Tensor, kappa: float | Tensor) -> Tensor:
    r"""Poincare ball to Klein ball: :math:`2x/(1 - \kappa|x|^2)`, the same direction, farther out.

    Args:
        x: (..., n) in the ball of radius :math:`1/\sqrt{|\kappa|}`. Outside the result is NaN.
        kappa: signed curvature < 0 of both models; (H,) goes with points (..., H, N, n).

    Returns:
        (..., n), in the type of x, within the ball's cap.

    Raises:
        ValueError: kappa is not negative.
    """
    ball = PoincareBall(kappa)
    x = as_points(x, "x")
    wide = x.to(torch.float64)
    kappa = ball._kappa_at(x)
    out = 2 * wide / (1 - kappa * (wide * wide).sum(-1, keepdim=True))
    out = torch.where(one_plus_kappa_norm2(wide, kappa, -1) < 0, math.nan, out)
    return _to_dtype(out, x.dtype, ball)


def klein_to_ball(x: Tensor, kappa: float | Tensor) -> Tensor:
    r"""Klein ball to Poincare ball: :math:`k/(1 + \sqrt{1 + \kappa|k|^2})`.

    Args:
        x: (..., n) in the ball of radius :math:`1/\sqrt{|\kappa|}`. Outside the result is NaN.
        kappa: signed curvature < 0 of both models; (H,) goes with points (..., H, N, n).

    Returns:
        (..., n), in the type of x, within the ball's cap.

    Raises:
        ValueError: kappa is not negative.
    """
    ball = PoincareBall(kappa)
    x = as_points(x, "x")
    wide = x.to(torch.float64)
    return _to_dtype(wide / (1 + _klein_height(ball, wide)), x.dtype, ball)


def hyperboloid_to_klein(x: Tensor, kappa: float | Tensor) -> Tensor:
    r"""Hyperboloid to Klein ball: :math:`R s/t`, the projection from the centre. Time is recomputed from s.

    Args:
        x: (..., n + 1), time first.
        kappa: signed curvature < 0 of both models; (H,) goes with points (..., H, N, n + 1).

    Returns:
        (..., n), in the type of x, within the ball's cap.

    Raises:
        ValueError: kappa is not negative.
    """
    ball, hyperboloid = PoincareBall(kappa), Lorentz(kappa)
    x = as_points(x, "x")
    time, space, r2 = hyperboloid._split(x.to(torch.float64))
    return _to_dtype(space * (r2**0.5 / time), x.dtype, ball)


def klein_to_hyperboloid(x: Tensor, kappa: float | Tensor) -> Tensor:
    r"""Klein ball to hyperboloid: :math:`s = k/\sqrt{1 + \kappa|k|^2}`, the time coordinate first.

    Args:
        x: (..., n) in the ball of radius :math:`1/\sqrt{|\kappa|}`. Outside the result is NaN.
        kappa: signed curvature < 0 of both models; (H,) goes with points (..., H, N, n).

    Returns:
        (..., n + 1), in the type of x.

    Raises:
        ValueError: kappa is not negative.
    """
    ball, hyperboloid = PoincareBall(kappa), Lorentz(kappa)
    x = as_points(x, "x")
    wide = x.to(torch.float64)
    space = wide / _klein_height(ball, wide)
    return _to_dtype(torch.cat((torch.zeros_like(space[..., :1]), space), -1), x.dtype, hyperboloid)


def convert(x: Tensor, source: geoopt.Manifold, target: geoopt.Manifold) -> Tensor:
    r"""The points x of one model as points of another model of the same space, :math:`d` unchanged.

    PoincareBall (or Stereographic, kappa < 0) and Lorentz; Stereographic, kappa > 0, and Sphere, whose origin R e_1
    goes with 0 and whose antipode -R e_1 has no image (the result is not finite); Stereographic, kappa = 0, and
    Euclidean, which is twice as large; a manifold and itself; Product and Scaled part by part. Learnable curvatures
    count with their present value, and the source's takes part in the gradient.

    Args:
        x: (..., D) points of ``source``.
        source: the manifold of x.
        target: the manifold wanted.

    Returns:
        points of ``target`` in the type of x, worked in float64 and rounded once.

    Raises:
        ValueError: the curvatures (or scales, or parts) differ.
        TypeError: no isometry between two such models is known here.

    Source: Bachmann, Becigneul and Ganea (2020), Constant curvature graph convolutional networks, for the stereographic
    family; the rest as above.
    """
    x = as_points(x, "x")
    return _convert(x.to(_numerics.compute_dtype(x.dtype)), resolve(source)[0], resolve(target)[0], x.dtype)


def _convert(x: Tensor, source: geoopt.Manifold, target: geoopt.Manifold, dtype: torch.dtype) -> Tensor:
    if isinstance(source, Scaled) and isinstance(target, Scaled):
        _check_equal("scales", source.scale, target.scale, source, target)
        return _convert(x, resolve(source.base)[0], resolve(target.base)[0], dtype)
    if isinstance(source, Product) and isinstance(target, Product):
        if len(source.manifolds) != len(target.manifolds):
            raise ValueError(f"{source} and {target} have different numbers of parts")
        parts = zip(source.manifolds, source.slices, target.manifolds, strict=True)
        return torch.cat([_convert(x[..., s], resolve(m)[0], resolve(t)[0], dtype) for m, s, t in parts], -1)
    curved = isinstance(source, ConstantCurvature | Euclidean) and isinstance(target, ConstantCurvature | Euclidean)
    if curved:
        _check_equal("curvatures", source.kappa, target.kappa, source, target)
    if curved and _family(source) == _family(target):
        return _to_dtype(x, dtype, target)
    if isinstance(source, Stereographic) and isinstance(target, Lorentz | Sphere):
        return _to_dtype(_lift(source, x), dtype, target)
    if isinstance(source, Lorentz | Sphere) and isinstance(target, Stereographic):
        return _to_dtype(_project(source, x), dtype, target)
    if isinstance(source, Stereographic) and isinstance(target, Euclidean):
        return (2 * x).to(dtype)
    if isinstance(source, Euclidean) and isinstance(target, Stereographic):
        return (x / 2).to(dtype)
    raise TypeError(f"no isometry from {source} to {target} is known here")


def _family(manifold: geoopt.Manifold) -> type:
    return Stereographic if isinstance(manifold, Stereographic) else type(manifold)


def _check_equal(what: str, a, b, source: geoopt.Manifold, target: geoopt.Manifold) -> None:
    one, other = (
        v.detach().to(torch.float64) if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64, device="cpu")
        for v in (a, b)
    )
    if one.shape != other.shape or not bool((one == other.to(one.device)).all()):
        raise ValueError(f"an isometry keeps the curvature: the {what} of {source} and {target} differ")


def _lift(source: Stereographic, x: Tensor) -> Tensor:
    """Stereographic points as (R (lambda - 1), lambda x), on the hyperboloid or the sphere with its origin first."""
    kappa = source._kappa_at(x)
    gap = source._gap(x, kappa)
    root = kappa.abs().sqrt() if isinstance(kappa, Tensor) else abs(kappa) ** 0.5
    out = torch.cat(((1 - kappa * (x * x).sum(-1, keepdim=True)) / root, 2 * x), -1) / gap
    return torch.where(gap < 0, math.nan, out)


def _project(source: Lorentz | Sphere, x: Tensor) -> Tensor:
    """``R s / (R + t)``, (t, s) the point; for t < 0 (sphere) ``R s (R - t) / |s|^2``, which does not cancel."""
    point = source.projx(x) if isinstance(source, Sphere) else x
    space = point[..., 1:]
    kappa = source._kappa_at(x)
    if isinstance(source, Lorentz):
        time, _, r2 = source._split(point)
        return space / (1 + time / r2**0.5)
    height = point[..., :1] * kappa**0.5
    s2 = kappa * (space * space).sum(-1, keepdim=True)
    front = height >= 0
    return space * torch.where(
        front, 1 / (1 + torch.where(front, height, 0.0)), (1 - height) / torch.where(front, 1.0, s2)
    )


def _klein_height(ball: PoincareBall, k: Tensor) -> Tensor:
    """``sqrt(1 + kappa |k|^2)``, NaN outside of the ball; that is R over the time coordinate."""
    return one_plus_kappa_norm2(k, ball._kappa_at(k), -1).sqrt()


def _to_dtype(x: Tensor, dtype: torch.dtype, manifold: geoopt.Manifold) -> Tensor:
    """Rounded once and within the cap of the model in the new type."""
    if isinstance(manifold, Lorentz):
        return manifold._capped(x[..., 1:], dtype)
    rounded = x.to(dtype)
    return manifold.projx(rounded) if isinstance(manifold, Stereographic) else rounded

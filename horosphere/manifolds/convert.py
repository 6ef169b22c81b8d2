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
from typing import TypeGuard

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._numerics import one_plus_kappa_norm2
from horosphere._points import as_points
from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve
from horosphere.manifolds.curvature import SpaceForm
from horosphere.manifolds.lorentz import Lorentz
from horosphere.manifolds.poincare import PoincareBall


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
    return hyperboloid.rounded(ball.to_canonical(x.to(torch.float64), -1), x.dtype)


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
    return ball.rounded(ball.from_canonical(x.to(torch.float64), hyperboloid._kappa_at(x), -1), x.dtype)


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
    return ball.rounded(out, x.dtype)


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
    return ball.rounded(wide / (1 + _klein_height(ball, wide)), x.dtype)


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
    return ball.rounded(space * (r2**0.5 / time), x.dtype)


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
    return hyperboloid.rounded(torch.cat((torch.zeros_like(space[..., :1]), space), -1), x.dtype)


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
    ours, theirs = hooks.factors(source), hooks.factors(target)
    if ours is not None and theirs is not None and _kinds(ours) == _kinds(theirs):
        if len(ours) != len(theirs):
            raise ValueError(f"{source} and {target} have different numbers of parts")
        pairs = list(zip(ours, theirs, strict=True))
        for a, b in pairs:
            _check_equal("scales", a.scale, b.scale, source, target)
        parts = [(resolve(a.manifold)[0], resolve(b.manifold)[0], hooks.of_factor(a, x)) for a, b in pairs]
        return torch.cat([_convert(piece, a, b, dtype) for a, b, piece in parts], -1)
    if not (_is_model(source) and _is_model(target)):
        raise TypeError(f"no isometry from {source} to {target} is known here")
    _check_equal("curvatures", source.kappa, target.kappa, source, target)
    if source.model != target.model:
        sign = target._sign if source._sign is None else source._sign
        if sign is None:
            raise TypeError(f"no isometry from {source} to {target} is known here")
        x = target.from_canonical(source.to_canonical(x, sign), source._kappa_at(x), sign)
    return target.rounded(x, dtype)


def _kinds(factors: list[hooks.Factor]) -> bool:
    """Whether the factors share a point's numbers out (a product) or have all of them (a scaled manifold)."""
    return all(f.slice is None for f in factors)


def _is_model(manifold: geoopt.Manifold) -> TypeGuard[SpaceForm]:
    """Whether the manifold is a model of a space of constant curvature that knows the way to the canonical one."""
    return hooks.own(manifold, "to_canonical") is not None


def _check_equal(what: str, a, b, source: geoopt.Manifold, target: geoopt.Manifold) -> None:
    one, other = (
        v.detach().to(torch.float64) if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64, device="cpu")
        for v in (a, b)
    )
    if one.shape != other.shape or not bool((one == other.to(one.device)).all()):
        raise ValueError(f"an isometry keeps the curvature: the {what} of {source} and {target} differ")


def _klein_height(ball: PoincareBall, k: Tensor) -> Tensor:
    """``sqrt(1 + kappa |k|^2)``, NaN outside of the ball; that is R over the time coordinate."""
    return one_plus_kappa_norm2(k, ball._kappa_at(k), -1).sqrt()

"""Points as a direction from the origin and a geodesic radius, on every space where that says all."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.manifolds import Euclidean, Lorentz, Sphere, Stereographic
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve

__all__ = ["direction_dim", "from_polar", "is_ball", "polar_space", "to_polar"]


def polar_space(manifold: geoopt.Manifold) -> geoopt.Manifold:
    """The manifold of ours with the same points, if its points have one radius and one direction.

    Raises:
        TypeError: no manifold.
        ValueError: a product, a projected sphere or a manifold of the user's own.
    """
    space = resolve(manifold)[0]
    if isinstance(space, Euclidean | Lorentz | Sphere) or is_ball(space):
        return space
    raise ValueError(
        f"manifold must be a ball, hyperboloid, sphere or flat space to be coded as radius and direction; got {space!r}"
    )


def is_ball(space: geoopt.Manifold) -> bool:
    """Whether points are stored in a ball, kappa < 0."""
    return isinstance(space, Stereographic) and space._known_sign() == -1


def direction_dim(space: geoopt.Manifold, dim: int) -> int:
    """Numbers in a direction, for points stored as ``dim`` numbers."""
    return dim - 1 if isinstance(space, Lorentz) else dim


def to_polar(space: geoopt.Manifold, x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors (..., n) whose directions are those of the points, and geodesic radii (..., 1) in float64.

    A ball's radius is :math:`2 R\\,\\mathrm{artanh}(|x|/R)`, a hyperboloid's :math:`R\\,\\mathrm{arsinh}(|x_s|/R)` with
    :math:`R = 1/\\sqrt{|\\kappa|}`, flat space's |x|. A sphere's point is its direction; the radius says nothing.
    """
    vector = x[..., 1:] if isinstance(space, Lorentz) else x
    norm = torch.linalg.vector_norm(vector, dim=-1, keepdim=True, dtype=torch.float64)
    if isinstance(space, Euclidean):
        return vector, norm
    if isinstance(space, Sphere):
        return vector, torch.ones_like(norm)
    root = _root_of_curvature(space, x)
    if isinstance(space, Lorentz):
        return vector, torch.asinh(root * norm) / root
    inside = (root * norm).clamp(max=1 - _numerics.ball_margin(torch.float64))
    return vector, 2 * torch.atanh(inside) / root


def from_polar(space: geoopt.Manifold, direction: Tensor, radius: Tensor) -> Tensor:
    """The point at ``radius`` (..., 1), float64, in the given unit direction (..., n), in the direction's type."""
    if isinstance(space, Euclidean):
        return direction * radius.to(direction.dtype)
    if isinstance(space, Sphere):
        return space.projx(direction)
    root = _root_of_curvature(space, direction)
    if isinstance(space, Lorentz):
        spatial = direction * (torch.sinh(root * radius) / root).to(direction.dtype)
        return space.projx(torch.cat((torch.zeros_like(spatial[..., :1]), spatial), -1))
    return space.projx(direction * (torch.tanh(root * radius / 2) / root).to(direction.dtype))


def _root_of_curvature(space: geoopt.Manifold, x: Tensor) -> Tensor:
    kappa = space._kappa_at(x)
    return torch.as_tensor(kappa, dtype=torch.float64, device=x.device).detach().abs().sqrt()

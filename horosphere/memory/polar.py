"""Points as a direction from the origin and a geodesic radius, on every space where that says all."""

from __future__ import annotations

from horosphere.manifolds import Stereographic, hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve

__all__ = ["is_ball", "polar_space"]


def polar_space(manifold: geoopt.Manifold) -> geoopt.Manifold:
    """The manifold of ours with the same points, if its points are vectors, each with one radius and one direction.

    Raises:
        TypeError: no manifold.
        ValueError: a product, whose points have a radius in each factor.
    """
    space = resolve(manifold)[0]
    if hooks.factors(space) is not None or space.ndim != 1:
        raise ValueError(f"manifold must not be a product to be coded as radius and direction; got {space!r}")
    return space


def is_ball(space: geoopt.Manifold) -> bool:
    """Whether points are stored in a ball, kappa < 0."""
    return isinstance(space, Stereographic) and space._known_sign() == -1

"""Entailment cones: an ancestor's cone holds its descendants."""

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._numerics import safe_sqrt
from horosphere.embedding.losses.base import PairLoss, register_loss
from horosphere.manifolds import PoincareBall

__all__ = [
    "APERTURE",
    "MARGIN",
    "Cones",
    "bounded",
    "cone_excess",
    "cone_loss",
    "drawn_in",
    "excess_to_all",
    "outside_centre",
]

# K and gamma of the source.
APERTURE, MARGIN = 0.1, 0.01
# Cones have their apex outside this radius of the unit ball, where K (1 - r^2) / r = 1.
INNER = 2 * APERTURE / (1 + math.sqrt(1 + 4 * APERTURE**2))
# In units of the curvature: how far out the farthest hundredth of the points may start, and how far a step may lead.
REACH, LONGEST_STEP = 1.5, 0.05


def cone_excess(parents: Tensor, children: Tensor) -> Tensor:
    r"""Angle by which a child lies outside its parent's cone, negative inside; points (..., D) of the unit ball.

    .. math:: \Xi(x, y) - \psi(x), \quad \psi(x) = \arcsin(K (1 - |x|^2) / |x|)

    with Xi the angle at x between the geodesics from the origin, continued, and to y. A cone is as wide as it can be
    while every cone with its apex inside lies inside.

    Source: O. Ganea, G. Becigneul and T. Hofmann, Hyperbolic entailment cones for learning hierarchical embeddings,
    2018, equations 26 and 28.
    """
    return _excess((parents**2).sum(-1), (children**2).sum(-1), (parents * children).sum(-1))


def _excess(x2: Tensor, y2: Tensor, xy: Tensor) -> Tensor:
    """`cone_excess` from |x|^2, |y|^2 and <x, y>."""
    # The source's arccos has an infinite slope at 0; the other side of its triangle, squared, is
    # |x|^2 |x - y|^2 (1 + |x|^2 |y|^2 - 2 <x, y>) - along^2 = (1 - |x|^2)^2 (|x|^2 |y|^2 - <x, y>^2).
    along = xy * (1 + x2) - x2 * (1 + y2)
    across = (1 - x2) * safe_sqrt((x2 * y2 - xy**2).clamp(min=0))
    half_width = torch.asin((APERTURE * (1 - x2) / safe_sqrt(x2)).clamp(max=1 - _numerics.CONE_MARGIN))
    return torch.atan2(across, along) - half_width


def cone_loss(points: Tensor, index: Tensor, manifold) -> Tensor:
    """sum_b E(v_b0, u_b) + sum_k max(0, gamma - E(v_bk, u_b)), E = max(0, `cone_excess`): the child u lies in the cone
    of its parent and outside those of strangers.

    Args:
        points: (R, D) points of a PoincareBall.
        index: (B, 2 + K) rows of `points`: the child u, its parent, K nodes that are no parents of it.
        manifold: the ball.
    """
    unit = points * math.sqrt(-manifold.kappa)
    chosen = unit[index]
    energy = cone_excess(chosen[:, 1:], chosen[:, :1]).clamp(min=0)
    return energy[:, 0].sum() + (MARGIN - energy[:, 1:]).clamp(min=0).sum()


def outside_centre(points: Tensor, manifold) -> Tensor:
    """Points with those nearer the origin than a cone's apex can be moved out along their radius."""
    radius = INNER / math.sqrt(-manifold.kappa)
    norm = points.norm(dim=-1, keepdim=True)
    return torch.where(norm < radius, points * (radius / norm.clamp(min=_numerics.SMALLEST_DIVISOR)), points)


def drawn_in(points: Tensor, manifold) -> Tensor:
    """The start of the work on cones: points with their distances from the origin shrunk by one factor, so that all but
    a hundredth lie within 1.5 / sqrt(-kappa).

    A cone at distance d from the origin takes in about 4 K e^(-2 d) of the directions. Where the ranking loss leaves
    its points no cone is wide enough to be found.
    """
    reach = REACH / math.sqrt(-manifold.kappa)
    far = torch.quantile(manifold.dist0(points), 0.99)
    return manifold.expmap0(manifold.logmap0(points) * (reach / far.clamp(min=reach)))


def bounded(gradient: Tensor, points: Tensor, manifold, rate: float, full_rate: float) -> Tensor:
    """The gradient with the rows shortened that would lead farther than 0.05 / sqrt(-kappa) at ``full_rate``, and less
    in proportion at a lower one.

    The slope of Xi has no bound where a child comes near its parent, nor that of psi where a cone is widest: a step as
    long as the slope says throws a node out of all its cones.
    """
    length = rate * manifold.norm(points, manifold.egrad2rgrad(points, gradient), keepdim=True)
    longest = LONGEST_STEP / math.sqrt(-manifold.kappa) * rate / full_rate
    return gradient * (longest / length.clamp(min=longest))


def excess_to_all(manifold, points: Tensor, rows: np.ndarray) -> np.ndarray:
    """(len(rows), N) angles by which the given rows lie outside the cone of every point."""
    unit = points * math.sqrt(-manifold.kappa)
    children, square = unit[torch.from_numpy(rows)], (unit**2).sum(-1)
    return _excess(square, square[torch.from_numpy(rows)].unsqueeze(1), children @ unit.T).numpy()


@register_loss
class Cones(PairLoss):
    """See :func:`cone_loss`: pairs (child, parent), on the ball; cones are ranked by how far a node lies outside."""

    name: ClassVar[str] = "cones"
    ranks_first: ClassVar[bool] = True

    def check_manifold(self, manifold: Any) -> None:
        if type(manifold) is not PoincareBall or not isinstance(manifold.kappa, float):
            raise ValueError(f'loss="cones" is for PoincareBall of fixed curvature ("poincare"), not {manifold}')

    def batch(self, points: Tensor, index: Tensor, manifold: Any) -> Tensor:
        return cone_loss(points, index, manifold)

    def start(self, points: Tensor, manifold: Any) -> Tensor:
        return drawn_in(points, manifold)

    def bounded(self, gradient: Tensor, points: Tensor, manifold: Any, rate: float, full_rate: float) -> Tensor:
        return bounded(gradient, points, manifold, rate, full_rate)

    def kept(self, points: Tensor, manifold: Any) -> Tensor:
        return outside_centre(points, manifold)

    def to_all(self, manifold: Any, points: Tensor, rows: np.ndarray) -> np.ndarray:
        return excess_to_all(manifold, points, rows)

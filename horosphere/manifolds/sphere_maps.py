"""Maps from the ball to the unit sphere: points kept in hyperbolic space, compared by angle."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from horosphere._points import as_points
from horosphere.manifolds._float64 import in_float64
from horosphere.manifolds.poincare import PoincareBall
from horosphere.manifolds.sphere import Sphere


class DirectionMap(nn.Module):
    r"""The direction in which a point of the ball lies, seen from its origin: :math:`c \mapsto c / |c|`.

    Points (..., D) of a ball of any curvature go to the sphere S^(D-1) of radius 1 in R^D; how far out a point lies is
    forgotten. The origin has no direction: it goes to e_1 = (1, 0, ..., 0), with gradient 0.

    Source: Ge, Riemann GeoResolver, map phi_A.
    """

    def __init__(self):
        super().__init__()
        self.sphere = Sphere(1.0)

    def forward(self, c: Tensor) -> Tensor:
        """(..., D) -> (..., D); TypeError where c is no floating point tensor."""
        return self.sphere.projx(as_points(c, "c"))


class HemisphereMap(nn.Module):
    r"""The whole ball laid conformally on the upper half of a sphere of one more dimension.

    .. math:: c \mapsto \Big(\frac{2 b}{1 + |b|^2},\; \frac{1 - |b|^2}{1 + |b|^2}\Big), \quad b = \sqrt{|\kappa|}\, c

    the inverse of the stereographic projection from the south pole. The origin goes to the north pole
    (0, ..., 0, 1), the rim to the equator; the image of the open ball is the open half where the last coordinate is
    positive. Angles are kept, :math:`J^T J = |\kappa| \big(2 / (1 + |b|^2)\big)^2 I`, distances are not.

    Args:
        ball: whose signed curvature kappa < 0 scales the points, live where it is learned; kappa (H,) goes with points
            (..., H, N, D). The sphere has radius 1 whatever kappa is.

    Raises:
        TypeError: ball is no PoincareBall.

    Source: Ge, Riemann GeoResolver, map phi_B; Ratcliffe, Foundations of hyperbolic manifolds, section 4.2.
    """

    def __init__(self, ball: PoincareBall):
        super().__init__()
        if not isinstance(ball, PoincareBall):
            raise TypeError(f"ball must be a PoincareBall, such as PoincareBall(kappa=-1.0); got {type(ball).__name__}")
        self.ball = ball

    @in_float64
    def forward(self, c: Tensor) -> Tensor:
        """(..., D) -> (..., D + 1), of norm 1."""
        b = c * self._root(c)
        b2 = (b * b).sum(-1, keepdim=True)
        return torch.cat((2 * b, 1 - b2), -1) / (1 + b2)

    @in_float64
    def inverse(self, s: Tensor) -> Tensor:
        r"""(..., D + 1) -> (..., D): :math:`s_{1..D} / ((1 + s_{D+1}) \sqrt{|\kappa|})`.

        A point of the lower half goes outside of the ball, the south pole nowhere (NaN or infinite).
        """
        return s[..., :-1] / ((1 + s[..., -1:]) * self._root(s))

    def _root(self, points: Tensor) -> float | Tensor:
        return (-self.ball._kappa_at(points)) ** 0.5


class LearnedMap(nn.Module):
    r"""A map to the sphere that is learned: :math:`c \mapsto \mathrm{MLP}(c) / |\mathrm{MLP}(c)|`, two linear layers
    with a GELU between them.

    Args:
        in_features: D, numbers of a point of the ball.
        out_features: numbers of a point of the sphere S^(out_features - 1), of radius 1.
        hidden_features: width between the layers; None: ``in_features + out_features``.

    Raises:
        ValueError: a size below 1, or out_features below 2.

    Source: Ge, Riemann GeoResolver, map phi_C.
    """

    def __init__(self, in_features: int, out_features: int, hidden_features: int | None = None):
        super().__init__()
        hidden = in_features + out_features if hidden_features is None else hidden_features
        if in_features < 1 or hidden < 1 or out_features < 2:
            raise ValueError(
                f"a learned map needs in_features >= 1, hidden_features >= 1 and out_features >= 2, got "
                f"{in_features}, {hidden} and {out_features}"
            )
        self.sphere = Sphere(1.0)
        self.layers = nn.Sequential(nn.Linear(in_features, hidden), nn.GELU(), nn.Linear(hidden, out_features))

    def forward(self, c: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), of norm 1; a zero output of the layers goes to e_1."""
        return self.sphere.projx(self.layers(as_points(c, "c")))

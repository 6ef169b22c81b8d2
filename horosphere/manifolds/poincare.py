"""The Poincare ball: hyperbolic space as the open ball with a conformal metric."""

from __future__ import annotations

from torch import Tensor

from horosphere.manifolds.stereographic import Stereographic


class PoincareBall(Stereographic):
    r"""Hyperbolic space of curvature kappa < 0: the open ball of radius :math:`1/\sqrt{|\kappa|}`.

    .. math:: d(x, y) = \frac{2}{\sqrt{|\kappa|}}\,\mathrm{asinh}
        \sqrt{\frac{|\kappa|\,|x - y|^2}{(1 + \kappa|x|^2)(1 + \kappa|y|^2)}}

    The metric at the origin is 4 I. Formulas, caps and errors are those of :class:`Stereographic`; kappa stays below 0.

    Sources: Ganea, Becigneul and Hofmann (2018), Hyperbolic neural networks; Ungar (2008), Analytic hyperbolic
    geometry.
    """

    _sign = -1

    def __init__(self, kappa: float | Tensor = -1.0, learnable: bool = False, **other):
        super().__init__(kappa, learnable, **other)

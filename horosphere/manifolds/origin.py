"""Distance, exponential and logarithm at the origin of a manifold that says where its origin is."""

from __future__ import annotations

from torch import Tensor

from horosphere._points import as_points


class AtOrigin:
    """What follows from ``origin`` and the maps: a base class of the manifolds here, and of your own if you like."""

    def dist0(self, x: Tensor, *, keepdim: bool = False) -> Tensor:
        """Distance to the origin: (..., D) -> (...)."""
        x = as_points(x, "x")
        return self.dist(x, self.origin(*x.shape, dtype=x.dtype, device=x.device), keepdim=keepdim)

    def expmap0(self, u: Tensor) -> Tensor:
        """The point reached from the origin along the tangent vector u (..., D) after time 1."""
        u = as_points(u, "u")
        return self.expmap(self.origin(*u.shape, dtype=u.dtype, device=u.device), u)

    def logmap0(self, y: Tensor) -> Tensor:
        """The tangent vector at the origin that leads to y (..., D), the inverse of :meth:`expmap0`."""
        y = as_points(y, "y")
        return self.logmap(self.origin(*y.shape, dtype=y.dtype, device=y.device), y)

"""Flat space R^n."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._points import as_points
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import Chord
from horosphere.manifolds.origin import AtOrigin


class Euclidean(AtOrigin, geoopt.Euclidean):
    r"""Flat space: :math:`d(x, y) = |x - y|`, exp is addition, curvature 0.

    Points are vectors over the last dimension (geoopt's own default, ``ndim=0``, treats every number as a point).

    Args:
        ndim: number of trailing dimensions that make one point.
    """

    kappa = 0.0

    def __init__(self, ndim: int = 1):
        super().__init__(ndim)

    def ambient_dim(self, n: int) -> int:
        return n

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Euclidean:
        return cls(config.get("ndim", 1))

    def config(self) -> dict[str, Any]:
        return {"type": "Euclidean"} if self.ndim == 1 else {"type": "Euclidean", "ndim": self.ndim}

    def picture(self) -> str:
        return "flat"

    def lift(self, x: Tensor) -> Tensor:
        return x

    def settle(self, mean: Tensor) -> Tensor:
        return mean

    def from_vectors(self, x: Tensor, max_radius: float | Tensor) -> Tensor:
        """``x / sqrt(n)``."""
        return x.shape[-1] ** -0.5 * x

    def to_polar(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x and its length."""
        return x, torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)

    def from_polar(self, direction: Tensor, radius: Tensor) -> Tensor:
        return direction * radius.to(direction.dtype)

    def chord(self, x: Tensor) -> Chord:
        if self.ndim != 1:
            raise ValueError(
                f"pairwise distances need points over the last dimension: Euclidean(ndim=1), got ndim={self.ndim}"
            )
        return Chord(x, None, 0, 0.0)

    def pair_dist2(self, x: Tensor, y: Tensor) -> Tensor:
        """``|x - y|^2`` in float64."""
        work = _numerics.compute_dtype(x.dtype)
        return ((x.to(work) - y.to(work)) ** 2).sum(-1)

    def dist2(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Squared distance."""
        return super().dist2(as_points(x, "x"), as_points(y, "y"), keepdim=keepdim)

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Distance; its gradient at x = y is 0. For squares take :meth:`dist2`, whose Hessian is right there."""
        if not self.ndim:
            return (as_points(x, "x") - as_points(y, "y")).abs()
        if self.ndim > 1:
            return _numerics.safe_sqrt(self.dist2(x, y, keepdim=keepdim))
        x, y = as_points(x, "x"), as_points(y, "y")
        # in float64: the square of a float32 distance below 1e-19 or above 1e19 is no float32 number
        out = _numerics.safe_sqrt(self.pair_dist2(x, y)).to(torch.promote_types(x.dtype, y.dtype))
        return out.unsqueeze(-1) if keepdim else out

    def projx(self, x: Tensor) -> Tensor:
        """x."""
        return as_points(x, "x")

    def random(self, *size, mean=0.0, std=1.0, dtype=None, device=None) -> Tensor:
        """Standard normal numbers scaled by ``std`` and moved by ``mean``; shape ``size``."""
        return torch.randn(*size, dtype=dtype, device=device) * std + mean

    def origin(self, *size, dtype=None, device=None, seed=None) -> Tensor:
        """The zero vector; shape ``size``."""
        return torch.zeros(*size, dtype=dtype, device=device)

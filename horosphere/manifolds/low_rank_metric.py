"""Flat space under constant low-rank metrics, one for all points or one for each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._points import as_points
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import Chord
from horosphere.manifolds.parameter import allow_loading
from horosphere.manifolds.token_metric import TokenMetric


@allow_loading
class LowRankMetric(geoopt.Euclidean):
    r"""R^D under :math:`G = s^2 I + U U^T`: geodesics are straight, :math:`d(x, y)^2 = (y - x)^T G (y - x)`.

    With one metric for all points it is flat space in other coordinates, with a chord (:math:`[s x, U^T x]`) and all
    that follows from it. With a metric a row it is a batch of flat fibres for parameters such as a token table: row i
    of x is measured by :math:`G_i`, ``egrad2rgrad`` is :math:`G_i^{-1}`, and a step of a Riemannian optimizer is
    preconditioned by it. Distances between rows of different metrics are :func:`horosphere.metric_sqdist`'s.

    Args:
        scale: s > 0, () or (rows,).
        factor: U, (D, R) or (rows, D, R). Both become buffers; :meth:`set_` replaces them.

    Raises:
        TypeError, ValueError: as :class:`TokenMetric`.
    """

    name = "LowRankMetric"

    def __init__(self, scale: Tensor | float, factor: Tensor):
        super().__init__(ndim=1)
        metric = TokenMetric(scale, factor)
        self.register_buffer("scale", metric.scale.detach().clone())
        self.register_buffer("factor", metric.factor.detach().clone())

    @property
    def metric(self) -> TokenMetric:
        """The metrics as a value."""
        return TokenMetric(self.scale, self.factor)

    @torch.no_grad()
    def set_(self, scale: Tensor, factor: Tensor) -> None:
        """Replace all metrics, shapes as they were: a new metric at the points where a parameter now is."""
        if scale.shape != self.scale.shape or factor.shape != self.factor.shape:
            raise ValueError(
                f"scale and factor must keep the shapes {tuple(self.scale.shape)} and {tuple(self.factor.shape)}, "
                f"got {tuple(scale.shape)} and {tuple(factor.shape)}"
            )
        self.scale.copy_(scale)
        self.factor.copy_(factor)

    def at_rows(self, rows: Tensor) -> LowRankMetric:
        """The manifold of the rows at ``rows`` (P,) of a parameter: what a sparse gradient touches."""
        return self if not self.scale.dim() else LowRankMetric(self.scale[rows], self.factor[rows])

    def ambient_dim(self, n: int) -> int:
        return n

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LowRankMetric:
        return cls(*(torch.tensor(config[name], dtype=torch.float64, device="cpu") for name in ("scale", "factor")))

    def config(self) -> dict[str, Any]:
        return {"type": "LowRankMetric", "scale": self.scale.tolist(), "factor": self.factor.tolist()}

    def extra_repr(self) -> str:
        return f"dim={self.factor.shape[-2]}, rank={self.factor.shape[-1]}, metrics={tuple(self.scale.shape)}"

    def chord(self, x: Tensor) -> Chord:
        """``[s x, U^T x]`` on flat space, for one metric shared by all points."""
        if self.scale.dim():
            raise ValueError(
                f"these points have {tuple(self.scale.shape)} metrics of their own and no common chord; "
                "hs.metric_sqdist(q, k, g_q, g_k) gives their distances"
            )
        work = _numerics.compute_dtype(x.dtype)
        wide = x.to(work)
        features = torch.cat((self.scale.to(work) * wide, wide @ self.factor.to(work)), -1)
        return Chord(features.to(_numerics.fast_dtype(x.dtype)), None, 0, 0.0)

    def pair_dist2(self, x: Tensor, y: Tensor) -> Tensor:
        """The squared distance from the difference, in float64."""
        work = _numerics.compute_dtype(x.dtype)
        return self.metric.inner(x.to(work) - y.to(work))

    def dist2(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """(y - x)^T G (y - x), with the metric of the row."""
        x, y = as_points(x, "x"), as_points(y, "y")
        out = self.pair_dist2(x, y).to(torch.promote_types(x.dtype, y.dtype))
        return out.unsqueeze(-1) if keepdim else out

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """The root of :meth:`dist2`; its gradient at x = y is 0."""
        x, y = as_points(x, "x"), as_points(y, "y")
        out = _numerics.safe_sqrt(self.pair_dist2(x, y)).to(torch.promote_types(x.dtype, y.dtype))
        return out.unsqueeze(-1) if keepdim else out

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """u^T G v."""
        out = self.metric.inner(u, v).to(u.dtype)
        return out.unsqueeze(-1) if keepdim else out

    def component_inner(self, x: Tensor, u: Tensor, v: Tensor | None = None) -> Tensor:
        """u^T G v, one number a row: the second moment of Riemannian Adam."""
        return self.inner(x, u, v, keepdim=True)

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """The length of u; its gradient at u = 0 is 0."""
        out = _numerics.safe_sqrt(self.metric.inner(u.to(torch.float64))).to(u.dtype)
        return out.unsqueeze(-1) if keepdim else out

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """G^-1 u."""
        return self.metric.solve(u).to(u.dtype)

    def random(self, *size, dtype=None, device=None) -> Tensor:
        """Standard normal numbers, shape ``size``."""
        return torch.randn(*size, dtype=dtype, device=device)

    def origin(self, *size, dtype=None, device=None, seed=None) -> Tensor:
        """The zero vector, shape ``size``."""
        return torch.zeros(*size, dtype=dtype, device=device)

    def _check_shape(self, shape, name):
        good, reason = super()._check_shape(shape, name)
        rows, dim = tuple(self.scale.shape), self.factor.shape[-2]
        if good and (shape[-1] != dim or (rows and tuple(shape[:-1][-len(rows) :]) != rows)):
            return False, f"{name} of shape {tuple(shape)} does not fit metrics of shape (..., {rows}, {dim})"
        return good, reason

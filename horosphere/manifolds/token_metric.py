"""A Riemannian metric for every token: a multiple of the identity plus a low-rank part."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horosphere._points import as_points
from horosphere.kernels.low_rank import operators as low_rank_ops
from horosphere.kernels.low_rank.algebra import Spectrum


class TokenMetric:
    r"""One positive definite matrix a token, :math:`G_i = s_i^2 I + U_i U_i^T`.

    A value, made afresh in every forward pass from the tensors that a layer computed; gradients flow to both. Columns
    of U may repeat, be zero, or be more than D. Everything is worked in float64 and rounded once; relative errors stay
    below 1e-5 for float32 input with :math:`|U|/s` from 1e-6 to 1e6, whatever the direction of the vector. A
    multiplication takes O(D R) per token, after O(D R^2) that all methods share.

    Args:
        scale: s > 0, (..., N).
        factor: U, (..., N, D, R), R >= 0; its leading dimensions broadcast with those of ``scale``.

    Raises:
        TypeError: an argument is no floating point tensor.
        ValueError: shapes that do not fit, or tensors on two devices.

    Source: Woodbury (1950) for the inverse; the roots are the same identity for :math:`(s I + H)^{-1}`, H the root of
    :math:`s^2 I + U^T U` (docs/fiber_bundle.md).
    """

    def __init__(self, scale: Tensor, factor: Tensor):
        scale, factor = as_points(scale, "scale"), as_points(factor, "factor")
        if factor.dim() < 2:
            raise ValueError(f"factor must have shape (..., D, R), got {tuple(factor.shape)}")
        if scale.device != factor.device:
            raise ValueError(f"scale is on {scale.device} and factor on {factor.device}; move them to one device")
        try:
            batch = torch.broadcast_shapes(scale.shape, factor.shape[:-2])
        except RuntimeError as error:
            raise ValueError(
                f"scale has shape {tuple(scale.shape)}, which does not broadcast with the leading dimensions of factor "
                f"{tuple(factor.shape)}: expected (..., N) and (..., N, D, R)"
            ) from error
        self.scale, self.factor = scale.expand(batch), factor.expand(*batch, *factor.shape[-2:])
        self._known: Spectrum | None = None  # found when first needed, then shared by all methods

    @property
    def shape(self) -> torch.Size:
        """(..., N): one metric for each entry."""
        return self.scale.shape

    @property
    def dim(self) -> int:
        """D."""
        return self.factor.shape[-2]

    @property
    def rank(self) -> int:
        """R, the number of columns of the factor."""
        return self.factor.shape[-1]

    def __repr__(self) -> str:
        return f"TokenMetric(shape={tuple(self.shape)}, dim={self.dim}, rank={self.rank})"

    def __getitem__(self, index) -> TokenMetric:
        """The metrics at an index of the leading dimensions."""
        index = index if isinstance(index, tuple) else (index,)
        matrices = (slice(None), slice(None)) if any(k is Ellipsis for k in index) else ()
        return TokenMetric(self.scale[index], self.factor[(*index, *matrices)])

    def heads(self, count: int) -> TokenMetric:
        """The metric restricted to ``count`` equal blocks of coordinates: (..., count, N), each of dimension D / count.

        A restriction of :math:`s^2 I + U U^T` to coordinates is the same with those rows of U.
        """
        if count < 1 or self.dim % count:
            raise ValueError(f"count must divide the dimension {self.dim} of the metric, got {count}")
        if not self.shape:
            raise ValueError("a single metric has no token dimension; give scale the shape (N,)")
        factor = self.factor.unflatten(-2, (count, self.dim // count)).movedim(-3, -4)
        return TokenMetric(self.scale.unsqueeze(-2).expand(factor.shape[:-2]), factor)

    def solve(self, v: Tensor) -> Tensor:
        r""":math:`G_i^{-1} v_i`; v (..., N, D), leading dimensions broadcast. Derivatives of every order."""
        return self._apply(v, -1.0)

    def sqrt_matmul(self, v: Tensor) -> Tensor:
        r""":math:`G_i^{1/2} v_i` by the symmetric root; v (..., N, D). First derivatives."""
        return self._apply(v, 0.5)

    def inv_sqrt_matmul(self, v: Tensor) -> Tensor:
        r""":math:`G_i^{-1/2} v_i`; v (..., N, D). First derivatives."""
        return self._apply(v, -0.5)

    def matmul(self, v: Tensor) -> Tensor:
        r""":math:`G_i v_i = s_i^2 v_i + U_i (U_i^T v_i)`; v (..., N, D)."""
        v, dtype = self._vector(v, "v")
        s, u = self.scale.to(torch.float64).unsqueeze(-1), self.factor.to(torch.float64)
        v = v.to(torch.float64)
        return (s * s * v + (u @ (u.mT @ v.unsqueeze(-1))).squeeze(-1)).to(dtype)

    def inner(self, u: Tensor, v: Tensor | None = None) -> Tensor:
        r""":math:`u_i^T G_i v_i = s_i^2 u_i \cdot v_i + (U_i^T u_i) \cdot (U_i^T v_i)`, of u with itself without v.

        Args:
            u, v: (..., N, D), leading dimensions broadcast.

        Returns:
            (..., N).
        """
        u, dtype = self._vector(u, "u")
        v, other = (u, dtype) if v is None else self._vector(v, "v")
        u, v, s = (t.to(torch.float64) for t in (u, v, self.scale))
        columns = self.factor.to(torch.float64)
        a, b = (torch.einsum("...dr,...d->...r", columns, t) for t in (u, v))
        return (s * s * (u * v).sum(-1) + (a * b).sum(-1)).to(torch.promote_types(dtype, other))

    def logdet(self) -> Tensor:
        r""":math:`\log\det G_i = 2 D \log s_i + \sum_r \log(1 + S_{ir}^2 / s_i^2)`, (..., N).

        S are the singular values of U. The error is relative to the sizes of the two terms, which may cancel. First
        derivatives.
        """
        out = low_rank_ops.logdet(self.scale.reshape(-1), self._flat_factor, self._spectrum)
        return out.view(self.shape)

    def condition(self) -> Tensor:
        """Condition numbers, largest over smallest eigenvalue of G_i, (..., N) in float64, without gradient."""
        top = (self._spectrum.singular / self.scale.detach().to(torch.float64).reshape(-1, 1)) ** 2
        if not self.rank:
            return torch.ones(self.shape, dtype=torch.float64, device=self.scale.device)
        low = top.sort(descending=True).values[..., self.dim - 1] if self.rank >= self.dim else 0.0
        return ((1 + top.amax(-1)) / (1 + low)).view(self.shape)

    def dense(self) -> Tensor:
        """The matrices G_i, (..., N, D, D)."""
        eye = torch.eye(self.dim, dtype=self.factor.dtype, device=self.factor.device)
        return self.scale[..., None, None] ** 2 * eye + self.factor @ self.factor.mT

    @property
    def _flat_factor(self) -> Tensor:
        return self.factor.reshape(self.shape.numel(), self.dim, self.rank)

    @property
    def _spectrum(self) -> Spectrum:
        if self._known is None:
            self._known = low_rank_ops.spectrum(self.scale.detach().reshape(-1), self._flat_factor.detach())
        return self._known

    def _vector(self, v: Tensor, name: str) -> tuple[Tensor, torch.dtype]:
        v = as_points(v, name)
        if not v.dim() or v.shape[-1] != self.dim:
            raise ValueError(
                f"{name} must hold vectors of length {self.dim}, shape (..., N, {self.dim}); got {tuple(v.shape)}"
            )
        try:
            torch.broadcast_shapes(v.shape[:-1], self.shape)
        except RuntimeError as error:
            raise ValueError(
                f"{name} of shape {tuple(v.shape)} does not fit metrics of shape {tuple(self.shape)}: "
                f"expected (..., {', '.join(map(str, self.shape))}, {self.dim})"
            ) from error
        return v, torch.promote_types(v.dtype, torch.promote_types(self.scale.dtype, self.factor.dtype))

    def _apply(self, v: Tensor, power: float) -> Tensor:
        v, _ = self._vector(v, "v")
        batch = torch.broadcast_shapes(v.shape[:-1], self.shape)
        v = v.expand(*batch, self.dim)
        # vectors beyond the metrics' own batch are further vectors of the same metrics
        own = batch[len(batch) - len(self.shape) :]
        metric = self if own == self.shape else self._expanded(own)
        count = math.prod(own)
        rows = v.reshape(-1, count, self.dim).transpose(0, 1)
        factor = metric._flat_factor
        out = low_rank_ops.apply(rows, metric.scale.reshape(-1), factor, metric._spectrum, power)
        return out.transpose(0, 1).reshape(*batch, self.dim)

    def _expanded(self, batch: torch.Size) -> TokenMetric:
        """The same metrics over a larger batch; the eigenvectors are repeated, not computed again."""
        wide = TokenMetric(self.scale.expand(batch), self.factor.expand(*batch, *self.factor.shape[-2:]))
        wide._known = Spectrum(
            *(
                t.view(*self.shape, *t.shape[1:]).expand(*batch, *t.shape[1:]).reshape(-1, *t.shape[1:])
                for t in self._spectrum
            )
        )
        return wide

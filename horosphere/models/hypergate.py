"""HyperGate: a curvature for every head, a radius for every token, a gate for every dimension."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from horosphere.manifolds import PoincareBall

__all__ = ["Gated", "HyperGate"]


class Gated(NamedTuple):
    """What the gate says about tokens.

    Attributes:
        hidden: (..., N, dim), h = g * x, which queries, keys and values are made of.
        gate: (..., N, dim) in (0, 1).
        boundary: (..., N) in (0, 1), beta: how far out a token's points may lie, in units of the ball's radius.
        max_radius: (..., N), the same as sqrt|kappa| times a geodesic radius, 2 artanh(beta).
    """

    hidden: Tensor
    gate: Tensor
    boundary: Tensor
    max_radius: Tensor


class HyperGate(nn.Module):
    r"""Gating at three levels: heads, tokens, dimensions.

    Every head has a ball of its own curvature, ``ball``, learned: the Riemannian optimizers keep it below 0, after a
    step of another call :func:`horosphere.optim.project_`. Every token has a boundary
    :math:`\beta = \sigma(w_b \cdot x + b)`: its points lie within :math:`\beta/\sqrt{|\kappa|}` of the origin. Every
    dimension has a gate :math:`g = \sigma(W_g x + b_g)`: :math:`h = g \odot x` goes to queries, keys and values, and
    :meth:`mix` weighs the two paths of a block, :math:`g \odot o_{main} + (1 - g) \odot o_{memory}`.

    The gradient that reaches x through h is at least :meth:`gradient_floor` times that at h, where this is positive:

    .. math:: \frac{\partial h}{\partial x} = \mathrm{diag}(g) + \mathrm{diag}(x \odot \sigma'(z)) W_g,\qquad
        |\partial L/\partial x| \ge \big(\min_d \sigma(z_d) - \|\mathrm{diag}(x \odot \sigma'(z)) W_g\|_2\big)
        |\partial L/\partial h|

    With ``max_norm``, an upper bound on the length of tokens, W_g is used scaled down to a spectral norm of at most
    1/max_norm, and b_g kept positive by a softplus: the floor is then at least :math:`\sigma(-1) - 1/4 > 0.0189` for
    every such token. That takes a singular value of W_g in each forward.

    Args:
        dim: size of a token.
        heads: H.
        kappa: signed curvature of the heads at the start, < 0.
        max_norm: cap, or None for none. A LayerNorm without weights gives tokens of length sqrt(dim).

    Raises:
        ValueError: a size that is not positive, kappa >= 0, or a cap that is not positive.

    Source: HyperGate of the GeoResolver paper (M6), whose bound leaves the constant open; docs/georesolver.md.
    """

    def __init__(self, dim: int, heads: int, kappa: float = -1.0, max_norm: float | None = None):
        super().__init__()
        if dim < 1 or heads < 1:
            raise ValueError(f"dim and heads must be positive; got {dim} and {heads}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, or None for no cap; got {max_norm}")
        self.dim, self.max_norm = dim, max_norm
        self.ball = PoincareBall(torch.full((heads,), float(kappa), dtype=torch.float64), learnable=True)
        self.gate = nn.Linear(dim, dim)
        self.boundary = nn.Linear(dim, 1)
        nn.init.normal_(self.gate.weight, std=0.02)
        nn.init.ones_(self.gate.bias)
        nn.init.zeros_(self.boundary.weight)
        # points of a fresh gate may lie as far out as those of a layer without one, at geodesic radius 4
        nn.init.constant_(self.boundary.bias, math.log(math.expm1(4.0) / 2))

    def forward(self, x: Tensor) -> Gated:
        """Gate tokens (..., N, dim); ValueError where they have another size."""
        if x.shape[-1:] != (self.dim,):
            raise ValueError(f"x must have shape (..., {self.dim}); got {tuple(x.shape)}")
        gate = torch.sigmoid(self._logits(x))
        beyond = self.boundary(x).squeeze(-1)
        # 2 artanh(sigmoid(z)) = log(1 + 2 exp(z))
        return Gated(gate * x, gate, torch.sigmoid(beyond), F.softplus(beyond + math.log(2)))

    @staticmethod
    def mix(gate: Tensor, main: Tensor, memory: Tensor) -> Tensor:
        """``gate * main + (1 - gate) * memory``, in the widest of their types."""
        dtype = torch.promote_types(gate.dtype, torch.promote_types(main.dtype, memory.dtype))
        return torch.lerp(memory.to(dtype), main.to(dtype), gate.to(dtype))

    @property
    def weight(self) -> Tensor:
        """W_g as it is used: capped."""
        if self.max_norm is None:
            return self.gate.weight
        norm = torch.linalg.matrix_norm(self.gate.weight, 2)
        return self.gate.weight / (norm * self.max_norm).clamp(min=1.0)

    def _logits(self, x: Tensor) -> Tensor:
        bias = self.gate.bias if self.max_norm is None else F.softplus(self.gate.bias)
        return F.linear(x, self.weight, bias)

    @torch.no_grad()
    def gradient_floor(self, x: Tensor) -> Tensor:
        """For tokens (..., dim): a factor (...) by which the gradient shrinks at most; 0 or less is no guarantee.

        Worked in float64, with a singular value decomposition a token: for looking at, not for training.
        """
        wide = x.to(torch.float64)
        logits = self._logits(x).to(torch.float64)
        gate = torch.sigmoid(logits)
        slope = (wide * gate * torch.sigmoid(-logits)).unsqueeze(-1) * self.weight.to(torch.float64)
        return gate.amin(-1) - torch.linalg.matrix_norm(slope, 2)

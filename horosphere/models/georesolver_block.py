"""The block of the GeoResolver: attention on curved heads beside a memory that grows, joined by a gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from horosphere.attention.caches import AttentionCache
from horosphere.attention.multihead import GeodesicAttention
from horosphere.attention.points import into_manifold
from horosphere.manifolds import PoincareBall, Sphere
from horosphere.manifolds.sphere_maps import HemisphereMap
from horosphere.memory.genesis import DynamicMemory
from horosphere.models.hypergate import HyperGate
from horosphere.routing.geodesic import route

__all__ = ["BlockOutput", "GeoResolverBlock", "MemoryPath"]


class BlockOutput(NamedTuple):
    """Tokens (B, N, dim), and how the paths shared the work: the mean gate (1: nothing comes from the memory) and the
    mean certificate of the routing, both scalars."""

    hidden: Tensor
    gate: Tensor
    certificate: Tensor


class MemoryPath(nn.Module):
    r"""Tokens ask a pool of prototypes: :math:`\phi(c)`, distances on the sphere, the K nearest answer.

    A token is a point of the ball; it and the pool's centroids go to the sphere by :math:`\phi_B`
    (:class:`horosphere.manifolds.sphere_maps.HemisphereMap`) and are routed there (:func:`horosphere.routing.route`).
    A forward pass reads only; in training it keeps the tokens' points and values for :meth:`update`.

    Args:
        dim: size of a token.
        memory_dim: of a point.
        capacity, **options: of :class:`horosphere.memory.DynamicMemory`.
        top_k: prototypes that answer.
        eps: of the routing, in units of squared angle.
    """

    def __init__(self, dim: int, memory_dim: int, capacity: int, top_k: int, eps: float, **options):
        super().__init__()
        ball = PoincareBall()
        self.pool = DynamicMemory(memory_dim, dim, capacity, ball, **options)
        self.to_sphere = HemisphereMap(ball)
        self.sphere = Sphere()
        self.key = nn.Linear(dim, memory_dim)
        self.out = nn.Linear(dim, dim)
        self.top_k, self.eps = top_k, eps
        self._kept: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Answers (B, N, dim) to tokens x, and the mean certificate; 0 while the pool is empty."""
        points = into_manifold(self.key(x), self.pool.manifold)
        if self.training:
            self._kept = points.detach(), x.detach()
        if not len(self.pool):
            return torch.zeros_like(x), x.new_zeros(())
        output, certificate = route(
            self.to_sphere(points),
            self.to_sphere(self.pool.points),
            self.sphere,
            self.pool.values.to(x.dtype),
            top_k=min(self.top_k, len(self.pool)),
            eps=self.eps,
            # squared angles to about 3e-6: the many tokens that lie on a prototype need no better where eps is 0.01
            precision="fast",
        ).answer
        return self.out(output), certificate.mean()

    def update(self, losses: Tensor, mask: Tensor | None, all_gather: Callable[[Tensor], Tensor] | None) -> None:
        """Write the tokens of the last forward pass, losses (B, M) of the first M of each sequence, where ``mask`` is
        True.
        """
        if self._kept is None:
            raise ValueError("there are no tokens to write: update_memory follows a forward pass in training mode")
        points, values = self._kept
        if losses.dim() != 2 or losses.shape[0] != points.shape[0] or not 1 <= losses.shape[1] <= points.shape[1]:
            raise ValueError(
                "losses must have shape (B, M), of the first M tokens of each sequence of the last forward pass, which "
                f"were {tuple(points.shape[:2])}; got {tuple(losses.shape)}"
            )
        rows = losses.shape[1]
        self.pool.write(points[:, :rows], values[:, :rows], losses.detach(), mask=mask, all_gather=all_gather)
        self._kept = None


class GeoResolverBlock(nn.Module):
    r"""One block: a gated token attends to earlier tokens and asks the memory; the gate weighs both answers.

    .. math:: (h, g, \beta) = \mathrm{gate}(\mathrm{norm}(x)),\quad o = g \odot \mathrm{attention}_\beta(h) + (1 - g)
        \odot \mathrm{memory}(h),\quad x \leftarrow x + o,\quad x \leftarrow x + \mathrm{FF}(\mathrm{norm}(x))

    Args:
        dim, heads: sizes of the tokens and of attention.
        kappa: curvature of the heads at the start.
        cap_gate: cap the gate's weights, for a positive gradient floor (:class:`HyperGate`).
        dropout: probability, after both branches, in training.
        attention: further arguments of :class:`horosphere.attention.GeodesicAttention`.
        memory: arguments of :class:`MemoryPath`, or None for no memory.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kappa: float = -1.0,
        cap_gate: bool = False,
        dropout: float = 0.0,
        attention: dict | None = None,
        memory: dict | None = None,
    ):
        super().__init__()
        # without weights of its own, so that the length of a gated token is at most sqrt(dim)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.gate = HyperGate(dim, heads, kappa, max_norm=dim**0.5 if cap_gate else None)
        self.attention = GeodesicAttention(dim, heads, manifold=self.gate.ball, **(attention or {}))
        self.memory = None if memory is None else MemoryPath(dim, **memory)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, *, cache: AttentionCache | None = None, use_memory: bool = True, padding: Tensor | None = None
    ) -> BlockOutput:
        """Tokens x (B, N, dim), causal; ``cache`` holds the earlier ones. ``use_memory=False`` cuts the memory path;
        ``padding`` (B, N) is True where a token is none.
        """
        gated = self.gate(self.norm(x))
        h = gated.hidden
        main, _ = self.attention(h, h, h, padding, False, is_causal=True, cache=cache, max_radius=gated.max_radius)
        certificate = x.new_zeros(())
        remembered = torch.zeros_like(main)
        if self.memory is not None and use_memory:
            remembered, certificate = self.memory(h)
        x = x + self.dropout(self.gate.mix(gated.gate, main, remembered))
        x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return BlockOutput(x, gated.gate.detach().mean(), certificate)

r"""The Fiber Bundle Transformer: every token carries a metric of its own.

In a block token i makes :math:`G_i = s_i^2 I + U_i U_i^T` from its features. Attention weighs by distance under these
metrics, values are carried between fibres by :math:`P_{i \leftarrow j} = G_i^{-1/2} R_{ij} G_j^{1/2}`, and the
feed-forward step is preconditioned by :math:`G_i^{-1}`. Heads measure with the diagonal blocks of G, its restrictions
to their coordinates.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from horosphere.attention.connection import PairRotation, Turn, curvature, torsion, triangles
from horosphere.attention.metric_attention import metric_attention
from horosphere.diagnostics import effective_rank, rank_residual
from horosphere.manifolds import BoundedParameter, LowRankMetric, ManifoldParameter, TokenMetric
from horosphere.manifolds.metric_distance import ENDS
from horosphere.models._io import load_model, save_model
from horosphere.models._tokens import check_tokens, continued, real_tokens, scored_labels, token_losses

# Triangles of a sequence whose curvature and torsion are looked at.
TRIANGLES = 64


@dataclass(frozen=True)
class FiberBundleConfig:
    """Sizes of a :class:`FiberBundleLM`.

    Attributes:
        vocab_size: number of different tokens.
        dim: features of a token.
        depth: number of blocks.
        heads: of attention; divides ``dim``.
        rank: R, columns of every metric; 0 leaves the scale alone.
        feedforward: hidden size of the feed-forward part, in units of ``dim``.
        max_length: longest sequence, cache included.
        end: whose metric measures a distance, "query", "key" or "mean".
        power: the exponent of the inverse-distance weights at the start; learned, one a head.
        eps: what is added to squared distances at the start; learned, one a head.
        planes: planes of the learned pair rotation of each head; 0: transport through one global frame.
        dropout: probability, on both branches, in training.
    """

    vocab_size: int
    dim: int = 128
    depth: int = 6
    heads: int = 4
    rank: int = 4
    feedforward: int = 4
    max_length: int = 512
    end: str = "mean"
    power: float = 8.0
    eps: float = 1.0
    planes: int = 0
    dropout: float = 0.0

    def __post_init__(self):
        for name in ("vocab_size", "dim", "depth", "heads", "feedforward", "max_length"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        for name in ("rank", "planes"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {getattr(self, name)!r}")
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim, got dim={self.dim} and heads={self.heads}")
        if 2 * self.planes > self.dim // self.heads:
            raise ValueError(
                f"planes must be at most half of dim / heads = {self.dim // self.heads}, got {self.planes}"
            )
        if self.end not in ENDS:
            raise ValueError(f"end must be one of {ENDS}, got {self.end!r}")
        if not (self.power > 0 and self.eps > 0):
            raise ValueError(f"power and eps must be positive, got {self.power} and {self.eps}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {self.dropout}")


class Geometry(NamedTuple):
    """What the bundle looks like, block by block; means over batch, tokens or sampled triangles.

    Attributes:
        curvature: (depth,), see :func:`horosphere.attention.curvature`; 0 without pair rotation. Differentiable.
        torsion: (depth,), see :func:`horosphere.attention.torsion`. Differentiable.
        condition: (depth,), geometric mean of the condition numbers of the metrics.
        residual: (depth + 1,), |X - 1 x^T| / |X| before the first block and after each, :func:`rank_residual`.
        rank: (depth + 1,), effective rank of the tokens there.
    """

    curvature: Tensor
    torsion: Tensor
    condition: Tensor
    residual: Tensor
    rank: Tensor


class FiberState(NamedTuple):
    """What a block keeps of earlier tokens: keys and carried values (B, H, M, D/H), metrics, angle features, and which
    of them are real (B, M), None where all are.
    """

    key: Tensor
    value: Tensor
    scale: Tensor
    factor: Tensor
    angle: Tensor | None
    real: Tensor | None


class FiberBundleOutput(NamedTuple):
    """``logits`` (B, N, vocabulary); ``loss`` where labels were given, ``cache`` and ``geometry`` where asked for."""

    loss: Tensor | None
    logits: Tensor
    cache: list[FiberState] | None
    geometry: Geometry | None


class MetricMap(nn.Module):
    """From features (..., D) to metrics: s = softplus, 1 at the start, and a linear map to U."""

    def __init__(self, dim: int, rank: int):
        super().__init__()
        self.rank = rank
        self.scale = nn.Linear(dim, 1)
        self.factor = nn.Linear(dim, dim * rank, bias=False) if rank else None
        nn.init.normal_(self.scale.weight, std=0.1 * dim**-0.5)
        nn.init.constant_(self.scale.bias, math.log(math.e - 1))
        if self.factor is not None:
            nn.init.normal_(self.factor.weight, std=0.2 * dim**-0.5)

    def forward(self, h: Tensor) -> TokenMetric:
        scale = functional.softplus(self.scale(h)).squeeze(-1) + 1e-3
        factor = h.new_zeros(*h.shape, 0) if self.factor is None else self.factor(h).unflatten(-1, (-1, self.rank))
        return TokenMetric(scale, factor)


class FiberBundleBlock(nn.Module):
    """Pre-norm block: attention between fibres, then ``x + G^-1 FF(norm(x))``, one metric a token for both.

    Args:
        config: sizes.
    """

    def __init__(self, config: FiberBundleConfig):
        super().__init__()
        dim, self.heads, self.end = config.dim, config.heads, config.end
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.metric = MetricMap(dim, config.rank)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.log_power = BoundedParameter(torch.full((config.heads,), math.log(config.power)))
        self.log_eps = BoundedParameter(torch.full((config.heads,), math.log(config.eps)))
        self.rotation = self.angle = None
        if config.planes:
            features = max(2, dim // config.heads // 4)
            self.angle = nn.Linear(dim, features)
            self.rotation = PairRotation(dim // config.heads, features, config.planes)
        hidden = config.feedforward * dim
        self.feed_forward = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, past: FiberState | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, FiberState]:
        """x (B, N, D), of which tokens ``real`` (B, N) are no padding -> the same shape, and the state with them."""
        h = self.attention_norm(x)
        g = self.metric(h)
        local = g.heads(self.heads)
        angle = None if self.angle is None else self.angle(h)
        query = self._split(self.query(h))
        state = FiberState(
            self._split(self.key(h)), self._split(g.sqrt_matmul(self.value(h))), local.scale, local.factor, angle, real
        )
        if past is not None:
            if real is None and past.real is not None:
                state = state._replace(real=past.real.new_ones(x.shape[:2]))
            if real is not None and past.real is None:
                past = past._replace(real=real.new_ones(x.shape[0], past.key.shape[-2]))
            axes = (-2, -2, -1, -3, -2, -1)
            state = FiberState._make(_behind(*each) for each in zip(past, state, axes, strict=True))
        n, m = x.shape[1], state.key.shape[-2]
        mask = None if n in (1, m) else torch.ones(n, m, dtype=torch.bool, device=x.device).tril(m - n)
        if state.real is not None:
            seen = state.real[:, None, None]
            mask = seen if mask is None else seen & mask
        mean = metric_attention(
            query,
            state.key,
            state.value,
            local,
            TokenMetric(state.scale, state.factor),
            end=self.end,
            turn=self._turn(angle, state.angle),
            attn_mask=mask,
            is_causal=n == m,
            power=self.log_power.exp(),
            eps=self.log_eps.exp(),
        )
        attended = g.inv_sqrt_matmul(mean.transpose(1, 2).flatten(-2))
        x = x + self.dropout(self.out(attended))
        step = self.feed_forward(self.feed_forward_norm(x))
        return x + self.dropout(g.solve(step)), state

    def geometry(self, x: Tensor, corners: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean curvature and torsion of triangles of the block's input x, and the mean condition number."""
        h = self.attention_norm(x)
        g = self.metric(h)
        bend, angle, turned = h.new_zeros(()), None, None
        if self.angle is not None and self.rotation is not None:
            angle = self.angle(h)
            bend = curvature(self.rotation, angle, corners).mean()
            # the rotation turns heads, torsion is of the whole space: there each head's rotation is one block
            turned = _EveryHead(self.rotation, self.heads)
        gap = torsion(h, g, corners, turned, angle)
        return bend, gap.mean(), g.condition().log().mean().exp()

    def _turn(self, angle: Tensor | None, held: Tensor | None) -> Turn | None:
        """The pair rotations of new tokens and all that are held; None for a block without."""
        if self.rotation is None or angle is None or held is None:
            return None
        return self.rotation.between(angle.unsqueeze(1), held.unsqueeze(1))

    def _split(self, t: Tensor) -> Tensor:
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _behind(old: Tensor | None, new: Tensor | None, dim: int) -> Tensor | None:
    """A part of the state of earlier tokens with that of new ones behind; None where the block has no such part."""
    if old is None and new is None:
        return None
    if old is None or new is None:
        raise ValueError("the cache is of a model of another configuration")
    return torch.cat((old, new), dim)


class _EveryHead:
    """A head's rotation as one of the whole space, block by block."""

    def __init__(self, rotation: PairRotation, heads: int):
        self.rotation, self.heads = rotation, heads

    def angles(self, a_i: Tensor, a_j: Tensor) -> Tensor:
        return self.rotation.angles(a_i, a_j)

    def __call__(self, v: Tensor, angles: Tensor) -> Tensor:
        return self.rotation(v.unflatten(-1, (self.heads, -1)), angles.unsqueeze(-2)).flatten(-2)


class FiberBundleLM(nn.Module):
    """Causal language model of Fiber Bundle blocks, input and output embeddings tied.

    The token table is a :class:`~horosphere.ManifoldParameter` on :class:`~horosphere.LowRankMetric`: row v is measured
    by the metric that the first block gives token v, renewed in every training step, so the optimizer's step is
    preconditioned by G_v^-1. Train it with ``hs.optim.RiemannianAdam(hs.optim.param_groups(model))``; a point moves by
    about lr as a whole, so the group "manifold" wants a rate sqrt(dim) times that of "flat".

    Attributes:
        gradient_checkpointing: recompute every block in the backward pass instead of keeping its activations.

    Source: the architecture is specified, without experiments, in "Riemannian Attention Mechanisms for
    Transformers"; see docs/fiber_bundle.md for what is measured here.
    """

    def __init__(self, config: FiberBundleConfig):
        super().__init__()
        self.config = config
        self.fibres = LowRankMetric(
            torch.ones(config.vocab_size), torch.zeros(config.vocab_size, config.dim, config.rank)
        )
        self.table = ManifoldParameter(torch.randn(config.vocab_size, config.dim) * config.dim**-0.5, self.fibres)
        self.positions = nn.Parameter(torch.randn(config.max_length, config.dim) * 0.1 * config.dim**-0.5)
        self.blocks = nn.ModuleList(FiberBundleBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.dim)
        self.gradient_checkpointing = False

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        cache: list[FiberState] | None = None,
        use_cache: bool = False,
        return_geometry: bool = False,
        generator: torch.Generator | None = None,
    ) -> FiberBundleOutput:
        """Logits of the next token.

        Args:
            ids: (B, N) integers below vocab_size.
            labels: (B, N), usually ids themselves: the loss is the mean cross entropy in nats of labels[:, 1:] given
                what is before; -100 is left out. The loss of labels that are all left out is 0.
            attention_mask: (B, N) bool or 0 and 1, 0 for padding: logits of the others are those of their sequence
                alone, whose first real token has position 0. Labels of padding are left out.
            cache: of earlier tokens, from ``out.cache``; given or with ``use_cache`` the new one is returned.
            use_cache: start a cache.
            return_geometry: also measure the bundle, see :class:`Geometry`.
            generator: draws its triangles; without one they are the same in every call.

        Raises:
            ValueError: ids or labels of another shape or type, ids out of range, or more tokens than max_length.
        """
        check_tokens(ids, labels, self.config.vocab_size)
        before = 0 if cache is None else cache[0].key.shape[-2]
        if before + ids.shape[1] > self.config.max_length:
            raise ValueError(
                f"{before} tokens in the cache and {ids.shape[1]} new ones are more than "
                f"max_length={self.config.max_length}"
            )
        if self.training and torch.is_grad_enabled():
            self._renew_fibres()
        real = real_tokens(ids, attention_mask)
        x = functional.embedding(ids, self.table) + self._positions(ids, real, cache)
        states, layers = [], [x]
        for at, block in enumerate(self.blocks):
            past = None if cache is None else cache[at]
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x, state = checkpoint(block, x, past, real, use_reentrant=False)
            else:
                x, state = block(x, past, real)
            states.append(state)
            layers.append(x)
        logits = self.norm(x) @ self.table.mT
        loss = None
        if labels is not None:
            loss = token_losses(logits, scored_labels(labels, real))[0]
        geometry = self._geometry(layers, generator) if return_geometry else None
        return FiberBundleOutput(loss, logits, states if use_cache or cache is not None else None, geometry)

    def _positions(self, ids: Tensor, real: Tensor | None, cache: list[FiberState] | None) -> Tensor:
        """(N, D), or (B, N, D) where padding makes them differ: counted from the first real token of each sequence."""
        held = None if cache is None else cache[0]
        before = 0 if held is None else held.key.shape[-2]
        if real is None and (held is None or held.real is None):
            return self.positions[before : before + ids.shape[1]]
        counted = torch.ones_like(ids) if real is None else real.to(torch.int64)
        start = before if held is None or held.real is None else held.real.sum(-1, keepdim=True)
        return self.positions[(counted.cumsum(-1) - 1 + start).clamp(min=0)]

    @torch.no_grad()
    def _renew_fibres(self) -> None:
        first = cast(FiberBundleBlock, self.blocks[0])
        g = first.metric(first.attention_norm(self.table.detach()))
        self.fibres.set_(g.scale, g.factor)

    def _geometry(self, layers: list[Tensor], generator: torch.Generator | None) -> Geometry:
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        corners = triangles(TRIANGLES, layers[0].shape[1], generator=generator).to(layers[0].device)
        blocks = cast("Iterable[FiberBundleBlock]", self.blocks)
        found = [block.geometry(x, corners) for block, x in zip(blocks, layers, strict=False)]
        with torch.no_grad():
            residual = torch.stack([rank_residual(x).mean() for x in layers])
            rank = torch.stack([effective_rank(x).mean() for x in layers])
        bend, gap, condition = (torch.stack(t) for t in zip(*found, strict=True))
        return Geometry(bend, gap, condition, residual, rank)

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """ids (B, N) with ``new_tokens`` more behind, with a cache: the likeliest at temperature 0, else drawn.

        Works in evaluation mode and restores the mode. ``attention_mask`` (B, N) is 0 for padding, on the left.

        Raises:
            ValueError: a number of new tokens or a temperature below 0.
        """
        cache: list[FiberState] | None = None

        def next_logits(fresh: Tensor, real: Tensor | None) -> Tensor:
            nonlocal cache
            out = self(fresh, attention_mask=real, cache=cache, use_cache=True)
            cache = out.cache
            return out.logits[:, -1]

        return continued(self, ids, next_logits, new_tokens, temperature, generator, attention_mask)

    def save(self, path: str | os.PathLike) -> None:
        """Write weights and configuration to one safetensors file, whole or not at all."""
        save_model(path, self, self.config)

    @classmethod
    def load(cls, path: str | os.PathLike) -> FiberBundleLM:
        """The model that :meth:`save` wrote; ValueError for any other file."""
        return load_model(path, cls, FiberBundleConfig, _sizes)


def _sizes(config: FiberBundleConfig) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {
        "table": (config.vocab_size, config.dim),
        "positions": (config.max_length, config.dim),
        "fibres.factor": (config.vocab_size, config.dim, config.rank),
        "blocks.0.log_eps": (config.heads,),
        "blocks.0.feed_forward.0.weight": (config.feedforward * config.dim, config.dim),
    }
    if config.planes:
        sizes["blocks.0.rotation.omega"] = (config.planes, 2, max(2, config.dim // config.heads // 4))
    return sizes

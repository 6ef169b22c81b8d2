"""The GeoResolver as a language model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from horosphere.attention.caches import AttentionCache
from horosphere.attention.multihead import GeodesicAttention
from horosphere.attention.patterns import sizes_of
from horosphere.models._io import load_model, save_model
from horosphere.models._tokens import LEFT_OUT, check_tokens, continued, real_tokens, scored_labels, token_losses
from horosphere.models.georesolver_block import GeoResolverBlock

__all__ = ["GeoResolverConfig", "GeoResolverLM", "GeoResolverOutput"]


@dataclass(frozen=True)
class GeoResolverConfig:
    """Sizes and rules of a :class:`GeoResolverLM`.

    Attributes:
        vocab_size: tokens known.
        dim, depth, heads: size of a token, number of blocks, heads of each.
        pattern: "dense", "fixed", "landmark" or "summary": which keys attention sees.
        max_length: longest sequence of the "fixed" pattern.
        landmarks: of "landmark". slots, chunk: of "summary".
        kappa: curvature of every head at the start; learned.
        eps: of attention at the start, in units of squared distance; learned.
        power: p of attention's weights (d^2 + eps)^-p.
        dropout: in training.
        cap_gate: cap the gate's weights, which makes its gradient floor positive.
        memory_capacity: prototypes a block, 0 for no memory. memory_dim: numbers of a prototype's point.
            memory_top_k, memory_eps: of the routing to them. memory_window, memory_k, memory_threshold,
            memory_policy: of :class:`horosphere.memory.DynamicMemory`.

    Raises:
        ValueError: a size that is not positive, or an unknown pattern.
    """

    vocab_size: int
    dim: int = 128
    depth: int = 4
    heads: int = 4
    pattern: str = "dense"
    max_length: int = 4096
    landmarks: int = 64
    slots: int = 64
    chunk: int = 64
    kappa: float = -1.0
    eps: float = 0.05
    power: float = 1.0
    dropout: float = 0.0
    cap_gate: bool = False
    memory_capacity: int = 1024
    memory_dim: int = 32
    memory_top_k: int = 8
    memory_eps: float = 0.01
    memory_window: int = 100
    memory_k: float = 3.0
    memory_threshold: str = "mean"
    memory_policy: str = "lru"

    def __post_init__(self):
        for name in ("vocab_size", "dim", "depth", "heads", "max_length", "memory_dim", "memory_top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.memory_capacity < 0:
            raise ValueError(f"memory_capacity must be at least 0; got {self.memory_capacity}")
        if self.memory_capacity and self.memory_top_k > self.memory_capacity:
            raise ValueError(
                f"memory_top_k = {self.memory_top_k} prototypes cannot answer where memory_capacity = "
                f"{self.memory_capacity}"
            )
        sizes_of(self.pattern)  # ValueError where it is unknown
        if self.dim % self.heads or self.dim // self.heads % 2:
            raise ValueError(f"dim must be an even multiple of heads; got {self.dim} and {self.heads}")


class GeoResolverOutput(NamedTuple):
    """logits (B, N, V); with labels loss, a scalar, and losses (B, N - 1) of the single tokens; gate and certificate
    (depth,), means over tokens (:class:`horosphere.models.georesolver_block.BlockOutput`)."""

    logits: Tensor
    loss: Tensor | None
    losses: Tensor | None
    gate: Tensor
    certificate: Tensor


class GeoResolverLM(nn.Module):
    """A causal language model of :class:`GeoResolverBlock`, token embeddings tied to the output.

    A forward pass reads the memories and never writes. The training loop writes once a step, after the optimizer::

        out = model(ids, labels=ids)
        out.loss.backward()
        optimizer.step()
        model.update_memory(out.losses)

    Source: Ge, Riemann GeoResolver, unified framework (M10).
    """

    def __init__(self, config: GeoResolverConfig):
        super().__init__()
        self.config = config
        known = {
            "n_max": config.max_length,
            "landmarks": config.landmarks,
            "slots": config.slots,
            "chunk": config.chunk,
        }
        sizes = {name: known.get(name) for name in sizes_of(config.pattern)}
        memory = None
        if config.memory_capacity:
            memory = {
                "memory_dim": config.memory_dim,
                "capacity": config.memory_capacity,
                "top_k": config.memory_top_k,
                "eps": config.memory_eps,
                "window": config.memory_window,
                "k": config.memory_k,
                "threshold": config.memory_threshold,
                "policy": config.memory_policy,
            }
        attention = {
            "pattern": config.pattern,
            "eps": config.eps,
            "power": config.power,
            "rotary": 10000.0,
            **sizes,
        }
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        nn.init.normal_(self.embedding.weight, std=config.dim**-0.5)
        self.blocks = nn.ModuleList(
            GeoResolverBlock(
                config.dim,
                config.heads,
                kappa=config.kappa,
                cap_gate=config.cap_gate,
                dropout=config.dropout,
                attention=attention,
                memory=memory,
            )
            for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.dim)
        self._scored: Tensor | None = None  # which tokens of the last training pass had a label

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        caches: Sequence[AttentionCache] | None = None,
        use_memory: bool = True,
    ) -> GeoResolverOutput:
        """Logits of the next token after each.

        Args:
            ids: (B, N) whole numbers.
            labels: (B, N), usually ids themselves: position i is scored against label i + 1; -100 is left out of the
                loss, and its entry of ``losses`` is 0. The loss of labels that are all left out is 0.
            attention_mask: (B, N) bool or 0 and 1, 0 for padding: logits of the others are those of their sequence
                alone. Labels of padding are left out. With pattern "dense" only: in the others a token's place counts.
            caches: one a block (:meth:`new_caches`), which hold the tokens before these.
            use_memory: False cuts the memory path of every block.

        Raises:
            ValueError: shapes or a number of caches that do not fit, or ids out of range.
        """
        check_tokens(ids, labels, self.config.vocab_size)
        real = real_tokens(ids, attention_mask)
        if real is not None and self.config.pattern != "dense":
            raise ValueError(
                f"attention_mask needs pattern='dense': with {self.config.pattern!r} what a token sees depends on its "
                "place; run sequences of different lengths one by one"
            )
        padding = None if real is None else ~real
        held: list[AttentionCache | None] = [None] * len(self.blocks) if caches is None else list(caches)
        if len(held) != len(self.blocks):
            raise ValueError(f"caches must hold one for each of the {len(self.blocks)} blocks; got {len(held)}")
        x, reports = self.embedding(ids), []
        for block, cache in zip(self.blocks, held, strict=True):
            x, *report = block(x, cache=cache, use_memory=use_memory, padding=padding)
            reports.append(torch.stack(report))
        logits = F.linear(self.norm(x), self.embedding.weight)
        loss = losses = None
        if labels is not None:
            labels = scored_labels(labels, real)
            loss, losses = token_losses(logits, labels)
            if self.training:
                self._scored = labels[:, 1:] != LEFT_OUT
        gate, certificate = torch.stack(reports, -1)
        return GeoResolverOutput(logits, loss, losses, gate, certificate)

    def update_memory(
        self,
        losses: Tensor,
        *,
        mask: Tensor | None = None,
        all_gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Write the tokens of the last forward pass into the pools: surprising ones found prototypes.

        Does nothing in evaluation mode. Call it once after each forward pass in training; under data parallelism on
        every replica, whose pools then stay equal.

        Args:
            losses: (B, M), ``output.losses``, of the first M tokens of each sequence; finite.
            mask: (B, M) bool, True where a token is written; unless given, the tokens whose label was not -100 in the
                forward pass, all of them where it had no labels or losses of another shape are given.
            all_gather: as in :meth:`horosphere.memory.DynamicMemory.write`.

        Raises:
            ValueError: no forward pass before, shapes that do not fit, or losses that are not finite; then nothing is
                written.
        """
        if not self.training:
            return
        if mask is None and self._scored is not None and self._scored.shape == losses.shape:
            mask = self._scored
        if not bool(losses.isfinite().all()):
            raise ValueError(f"losses must be finite; {int((~losses.isfinite()).sum())} of them are not")
        for block in cast("Iterable[GeoResolverBlock]", self.blocks):
            if block.memory is not None:
                block.memory.update(losses, mask, all_gather)
        self._scored = None

    def new_caches(self, make: Callable[[GeodesicAttention], AttentionCache] | None = None) -> list[AttentionCache]:
        """Empty caches, one a block: those of the pattern, or what ``make`` makes of each block's attention layer."""
        blocks = cast("Iterable[GeoResolverBlock]", self.blocks)
        return [(make or GeodesicAttention.new_cache)(block.attention) for block in blocks]

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        make_cache: Callable[[GeodesicAttention], AttentionCache] | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """ids (B, N) with ``new_tokens`` more behind: the likeliest at temperature 0, else drawn. Writes no memory.

        Args:
            attention_mask: (B, N), 0 for padding, which stands on the left; see :meth:`forward`.
            make_cache: attention layer -> cache, as in :meth:`new_caches`.

        Raises:
            ValueError: a number of new tokens or a temperature below 0.
        """
        caches = self.new_caches(make_cache)

        def next_logits(fresh: Tensor, real: Tensor | None) -> Tensor:
            return self(fresh, attention_mask=real, caches=caches).logits[:, -1]

        return continued(self, ids, next_logits, new_tokens, temperature, generator, attention_mask)

    def save(self, path: str | os.PathLike) -> None:
        """Write configuration and numbers, memories included, to one safetensors file, whole or not at all."""
        save_model(path, self, self.config)

    @classmethod
    def load(cls, path: str | os.PathLike) -> GeoResolverLM:
        """The model of such a file, on the CPU; FileNotFoundError or ValueError where it is none."""
        return load_model(path, cls, GeoResolverConfig, _sizes)


def _sizes(config: GeoResolverConfig) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (config.vocab_size, config.dim),
        "blocks.0.attention.log_eps": (config.heads,),
    }
    if config.memory_capacity:
        sizes["blocks.0.memory.pool.centroids"] = (config.memory_capacity, config.memory_dim)
        sizes["blocks.0.memory.pool.recent"] = (config.memory_window,)
    if config.pattern == "landmark":
        anchors = (config.heads, config.landmarks, config.dim // config.heads)
        sizes["blocks.0.attention.scheme.landmarks.anchors"] = anchors
    return sizes

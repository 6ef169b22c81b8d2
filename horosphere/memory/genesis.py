"""Dynamic memory genesis: a pool of prototypes on a manifold that grows where the losses are surprising."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from horosphere._points import as_points
from horosphere.attention.functional import geodesic_attention
from horosphere.attention.patterns import move_centroids
from horosphere.manifolds import PoincareBall
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.hooks import log, origin
from horosphere.manifolds.pairwise import cdist
from horosphere.memory.eviction import POLICIES, make_room
from horosphere.memory.replicas import gathered
from horosphere.memory.surprise import THRESHOLDS, thresholds

__all__ = ["DynamicMemory", "Written"]


class Written(NamedTuple):
    """What a write did, token by token: whether it was a surprise, the slot that took it (-1: none), its threshold."""

    surprising: Tensor
    slots: Tensor
    thresholds: Tensor


class DynamicMemory(nn.Module):
    r"""Prototypes that follow the tokens nearest to them, and new ones where a loss exceeds what was usual.

    A slot holds a centroid s on the manifold, the number n of its tokens, the sum of their values, its birth, its hits
    and when it was last used. A token whose loss exceeds its threshold (see ``threshold``) spawns a prototype where it
    is; any other moves the nearest one, :math:`s \leftarrow \exp_s(\log_s(x)/n)`. A full
    pool makes room by its policy. The first token of an empty pool always spawns, without being a surprise.

    Writes go in chunks: which slot is nearest is decided by the state at the chunk's start, and spawns come after the
    updates; thresholds are those of the single tokens whatever the chunk. With chunk 1 it is the rule one token at a
    time. Nothing is written in evaluation mode, and a read never changes anything.

    Args:
        dim: numbers that store a point.
        value_dim: Dv.
        capacity: slots.
        manifold: any geoopt.Manifold with ``expmap`` and ``logmap``; the Poincare ball unless given.
        window: W, losses that a threshold looks back on.
        k: standard deviations above the mean.
        threshold: "mean", "base" (the source's, with ``base``) or "growing", the formulas of
            :func:`horosphere.memory.surprise.thresholds`.
        base: tau_0 of "base".
        policy: "lru" evicts the slot longest unused, "least hit" the one with the fewest hits and of these the longest
            unused, "merge" joins the two nearest.
        chunk: tokens decided on together.
        eps, power: of :meth:`read`.

    Attributes (buffers):
        centroids (C, dim), sums (C, Dv), counts, birth, hits, last (C,); size, steps, surprises (): slots in use,
        tokens and surprises so far; recent (W,): losses, oldest first. Slots in use are the first ``size``.

    Raises:
        ValueError: a size, window or chunk that is not positive, an unknown threshold or policy, "base" without base.

    Source: dynamic memory genesis of the GeoResolver paper (M9). Its claim that spawns grow like log T on a
    stationary stream does not hold for a threshold of fixed k: docs/memory.md.
    """

    centroids: Tensor
    sums: Tensor
    counts: Tensor
    birth: Tensor
    hits: Tensor
    last: Tensor
    size: Tensor
    steps: Tensor
    surprises: Tensor
    recent: Tensor

    def __init__(
        self,
        dim: int,
        value_dim: int,
        capacity: int,
        manifold: geoopt.Manifold | None = None,
        *,
        window: int = 100,
        k: float = 3.0,
        threshold: str = "mean",
        base: float | None = None,
        policy: str = "lru",
        chunk: int = 256,
        eps: float = 1e-3,
        power: float = 1.0,
    ):
        super().__init__()
        for name, number in (
            ("dim", dim),
            ("value_dim", value_dim),
            ("capacity", capacity),
            ("window", window),
            ("chunk", chunk),
        ):
            if number < 1:
                raise ValueError(f"{name} must be at least 1; got {number}")
        if threshold not in THRESHOLDS or policy not in POLICIES:
            raise ValueError(
                f"threshold must be one of {THRESHOLDS} and policy one of {POLICIES}; got {threshold!r} and {policy!r}"
            )
        if (threshold == "base") != (base is not None):
            raise ValueError(f"base belongs to threshold='base'; got threshold={threshold!r}, base={base}")
        if not k >= 0 or not eps > 0:
            raise ValueError(f"k must be at least 0 and eps positive; got {k} and {eps}")
        self.manifold = PoincareBall() if manifold is None else manifold
        self.capacity, self.window, self.k, self.threshold, self.base = capacity, window, k, threshold, base
        self.policy, self.chunk, self.eps, self.power = policy, chunk, eps, power
        self.register_buffer("centroids", origin(self.manifold, capacity, dim))
        self.register_buffer("sums", torch.zeros(capacity, value_dim))
        for name in ("counts", "birth", "hits", "last"):
            self.register_buffer(name, torch.zeros(capacity, dtype=torch.int64))
        for name in ("size", "steps", "surprises"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))
        self.register_buffer("recent", torch.zeros(window, dtype=torch.float64))

    def __len__(self) -> int:
        return int(self.size)

    @property
    def points(self) -> Tensor:
        """Centroids of the slots in use (size, dim), on the manifold also after its curvature moved."""
        held = self.centroids[: len(self)]
        return self.manifold.projx(held) if self._curvature_moves() else held

    @property
    def values(self) -> Tensor:
        """Mean values of the slots in use, (size, Dv)."""
        return self.sums[: len(self)] / self.counts[: len(self)].unsqueeze(-1)

    def read(self, query: Tensor) -> Tensor:
        """Inverse-distance attention to the prototypes' mean values; 0 while the pool is empty.

        Args:
            query: points (..., N, dim).

        Returns:
            (..., N, Dv). Gradients flow to the queries and a learned curvature; the pool has none.

        Raises:
            ValueError: points of another size.
        """
        query = as_points(query, "query")
        if query.dim() < 2 or query.shape[-1] != self.centroids.shape[-1]:
            raise ValueError(f"query must have shape (..., N, {self.centroids.shape[-1]}); got {tuple(query.shape)}")
        if not len(self):
            return query.new_zeros(*query.shape[:-1], self.sums.shape[-1])
        # attention holds no weights, so that any number of queries and slots fits
        return geodesic_attention(
            query, self.points, self.values.to(query.dtype), self.manifold, eps=self.eps, power=self.power
        )

    @torch.no_grad()
    def write(
        self,
        keys: Tensor,
        values: Tensor,
        losses: Tensor,
        *,
        mask: Tensor | None = None,
        all_gather: Callable[[Tensor], Tensor] | None = None,
    ) -> Written:
        """Take in tokens in order; in evaluation mode nothing happens.

        Args:
            keys: points (..., dim). values: (..., Dv). losses: (...), finite.
            mask: (...) bool, True where a token counts. The others may hold any numbers: they change neither the
                prototypes nor the threshold nor the number of steps.
            all_gather: rows of this replica -> rows of all replicas, in one order everywhere;
                ``torch.distributed`` unless given, where a process group is initialised. Every replica calls, and all
                hold the same pool afterwards.

        Returns:
            Written, for the tokens of all replicas, (T,); a token that does not count has slot -1 and threshold inf.

        Raises:
            ValueError: shapes that do not fit, or numbers that are not finite; nothing is written then.
        """
        keys, values, losses = self._checked(keys, values, losses, mask)
        if not self.training:
            return _nothing_written(losses)
        keys, values, losses = (gathered(t, all_gather) for t in (keys, values, losses))
        counted = ~losses.isnan()
        if bool(counted.all()):
            return self._write(keys, values, losses)
        written = self._write(keys[counted], values[counted], losses[counted])
        everywhere = _nothing_written(losses)
        for whole, part in zip(everywhere, written, strict=True):
            whole[counted] = part
        return everywhere

    def _write(self, keys: Tensor, values: Tensor, losses: Tensor) -> Written:
        limits = thresholds(losses, self.recent, int(self.steps), self.threshold, self.k, self.base)
        surprising = losses > limits
        if self._curvature_moves():
            self.centroids.copy_(self.manifold.projx(self.centroids))
        slots = torch.full_like(surprising, -1, dtype=torch.int64)
        start = 0
        while start < len(keys):
            # the first token of an empty pool goes alone: the others then have a prototype to move
            stop = start + (self.chunk if len(self) else 1)
            piece = slice(start, stop)
            slots[piece] = self._write_chunk(keys[piece], values[piece], surprising[piece])
            start = stop
        self.recent.copy_(torch.cat((self.recent, losses.to(self.recent.dtype)))[-self.window :])
        self.surprises += surprising.sum()
        return Written(surprising, slots, limits)

    def _write_chunk(self, keys: Tensor, values: Tensor, surprising: Tensor) -> Tensor:
        """The slots (L,) that took the tokens."""
        now = self.steps + torch.arange(len(keys), device=keys.device)
        spawning = surprising if len(self) else torch.ones_like(surprising)
        slots = torch.full_like(now, -1)
        follow = (~spawning).nonzero().squeeze(-1)
        if follow.numel():
            slots[follow] = self._move_nearest(keys[follow], values[follow], now[follow])
        spawn = spawning.nonzero().squeeze(-1)[-self.capacity :]  # of more than fit, the last remain
        if spawn.numel():
            where = make_room(self, len(spawn))
            # another token of the chunk may have been taken by a slot that is given away now
            slots[torch.isin(slots, where)] = -1
            slots[spawn] = where
            self.centroids[where] = keys[spawn]
            self.sums[where] = values[spawn]
            self.counts[where] = 1
            self.hits[where] = 0
            self.birth[where] = now[spawn]
            self.last[where] = now[spawn]
        self.steps += len(keys)
        return slots

    def _move_nearest(self, keys: Tensor, values: Tensor, now: Tensor) -> Tensor:
        nearest = cdist(keys, self.centroids[: len(self)], self.manifold, squared=True).argmin(-1)
        moved, which, taken = nearest.unique(return_inverse=True, return_counts=True)
        logs = log(self.manifold, self.centroids[nearest], keys, "the running mean of DynamicMemory.write")
        pull = torch.zeros_like(self.centroids[moved]).index_add_(0, which, logs.to(self.centroids.dtype))
        counts = self.counts[moved] + taken
        self.centroids[moved] = move_centroids(self.centroids[moved], pull, counts, self.manifold)
        self.counts[moved] = counts
        self.sums.index_add_(0, nearest, values)
        self.hits[moved] += taken
        self.last.scatter_reduce_(0, nearest, now, "amax")
        return nearest

    def _curvature_moves(self) -> bool:
        return any(True for _ in self.manifold.parameters())

    def _checked(
        self, keys: Tensor, values: Tensor, losses: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One token a row, in the types of the pool; the loss of a token that does not count is NaN."""
        dim, value_dim = self.centroids.shape[-1], self.sums.shape[-1]
        keys, values, losses = as_points(keys, "keys"), as_points(values, "values"), as_points(losses, "losses")
        batch = losses.shape
        if keys.shape != (*batch, dim) or values.shape != (*batch, value_dim):
            raise ValueError(
                f"keys, values and losses must have shapes (..., {dim}), (..., {value_dim}) and (...); got "
                f"{tuple(keys.shape)}, {tuple(values.shape)} and {tuple(batch)}"
            )
        if mask is not None and (mask.dtype != torch.bool or mask.shape != batch):
            raise ValueError(
                f"mask must be bool of the shape of losses, {tuple(batch)}; got {mask.dtype} {tuple(mask.shape)}"
            )
        for name, t in (("keys", keys), ("values", values), ("losses", losses)):
            t = t if mask is None else t[mask]
            if not bool(t.isfinite().all()):
                raise ValueError(
                    f"{name} must be finite; {int((~t.isfinite()).sum())} of them are not: leave those out"
                )
        keys, values, losses = keys.reshape(-1, dim), values.reshape(-1, value_dim), losses.reshape(-1).double()
        if mask is not None:
            losses = losses.masked_fill(~mask.reshape(-1), torch.nan)
        return keys.to(self.centroids.dtype), values.to(self.sums.dtype), losses

    def extra_repr(self) -> str:
        return f"{len(self)} of {self.capacity} slots, threshold={self.threshold!r}, k={self.k}, policy={self.policy!r}"


def _nothing_written(losses: Tensor) -> Written:
    nowhere = torch.full_like(losses, -1, dtype=torch.int64)
    return Written(nowhere > 0, nowhere, torch.full_like(losses, torch.inf, dtype=torch.float64))

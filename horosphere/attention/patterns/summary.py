r"""Attention to a fixed number of running summaries: constant time a token, constant memory (C-HIDA).

A *slot* holds a centroid s_k on the manifold, the number n_k of keys it took and the sum V_k of their values. A query
reads all slots,

.. math:: o = \frac{\sum_k w_k V_k}{\sum_k w_k n_k}, \qquad w_k = (d(q, s_k)^2 + \epsilon)^{-p},

as if every key sat at its slot's centroid. This file is the one place of the online-centroid rule:
:func:`move_centroids`.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from horosphere import _numerics
from horosphere.attention.caches import check_space
from horosphere.attention.inverse import (
    check_same_length,
    checked_key_mask,
    checked_tokens,
    closeness,
    safe_divide,
    weights_to,
    with_ones,
)
from horosphere.attention.patterns.base import Heads, Pattern, register_pattern
from horosphere.attention.stream_cache import StreamCache
from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import check_manifold
from horosphere.manifolds.hooks import origin

# Weights of queries to slots above which the backward pass works them again: 2^22 float32 are 16 MiB, of which training
# would hold about eight times as much.
KEPT_WEIGHTS = 2**22
# Weights worked together: 2^18 float32 are 1 MiB.
GROUP_WEIGHTS = 2**18


class SummaryState(NamedTuple):
    """C slots after some tokens; leading dimensions are batch and heads.

    Attributes:
        centroids: (..., C, D) points; those of empty slots mean nothing.
        counts: (..., C) keys taken, 0 for an empty slot.
        values: (..., C, Dv) sums of the values of those keys.
        pull: (..., C, D) sums of the logarithms, at the centroids, of the keys taken since they last moved.
        seen: tokens so far; the centroids move where it is a multiple of the chunk.
    """

    centroids: Tensor
    counts: Tensor
    values: Tensor
    pull: Tensor
    seen: int


def move_centroids(centroids: Tensor, pull: Tensor, counts: Tensor, manifold: geoopt.Manifold) -> Tensor:
    r"""Running means on a manifold after new points: :math:`s \leftarrow \exp_s\big(\tfrac1n \sum \log_s x\big)`.

    With one new point it is the step of online k-means, :math:`\exp_s(\log_s(x) / n)`; on flat space the centroid then
    is the mean of the n points exactly. Points that came together are all seen from where the centroid was.

    Args:
        centroids: points (..., C, D).
        pull: (..., C, D) tangent vectors there, the sum of the logarithms of each one's new points.
        counts: (..., C) points of each, the new ones included; 0 leaves a centroid where it is.
        manifold: any geoopt.Manifold with ``expmap``.

    Source: MacQueen (1967), Some methods for classification and analysis of multivariate observations.
    """
    return manifold.expmap(centroids, pull / counts.clamp(min=1).unsqueeze(-1))


def empty_summaries(key: Tensor, value: Tensor, manifold: geoopt.Manifold, slots: int) -> SummaryState:
    """The state before the first token, for keys (..., M, D) and values (..., M, Dv) like these.

    Raises ValueError where slots < 1.
    """
    _check_slots(slots)
    batch = key.shape[:-2]
    points, sums = _numerics.fast_dtype(key.dtype), _numerics.fast_dtype(value.dtype)
    # some point of the manifold: distances to an empty slot count for nothing, but must be numbers
    return SummaryState(
        origin(manifold, *batch, slots, key.shape[-1], dtype=points, device=key.device),
        value.new_zeros(*batch, slots, dtype=sums),
        value.new_zeros(*batch, slots, value.shape[-1], dtype=sums),
        key.new_zeros(*batch, slots, key.shape[-1], dtype=points),
        0,
    )


def summary_step(
    state: SummaryState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    manifold: geoopt.Manifold,
    *,
    chunk: int = 64,
    eps: float | Tensor = 1e-3,
    power: float | Tensor = 1.0,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, SummaryState]:
    """The next tokens of a stream, any number of them; each query sees its own key and the earlier ones.

    For every token: an empty slot takes the key as its centroid, otherwise the nearest slot takes it; its count and
    value sum grow; the query reads. Centroids move (:func:`move_centroids`) when the number of tokens seen reaches a
    multiple of ``chunk``: with 1 after every token. So the outcome depends on ``chunk``, not on how the stream is cut
    into calls.

    Args:
        state: from :func:`empty_summaries` or the last call; it is not changed.
        query: points (..., L, D). key: points (..., L, D). value: (..., L, Dv).
        manifold: any geoopt.Manifold with ``expmap`` and ``logmap``.
        chunk: tokens from one move of the centroids to the next, the same in all calls.
        eps, power: positive, () or (H,).
        key_mask: bool, broadcasts to (..., L), True = takes part; other keys leave the slots alone.

    Returns:
        (..., L, Dv), 0 while no key took part, and the new state. Gradients flow to query, key (through the
        centroids), value, eps, power and a learnable curvature; which slot takes a key is a choice and has none.

    Raises:
        ValueError: shapes that do not fit, chunk < 1, eps or power <= 0.
        TypeError: no floating point tensors, no manifold, a mask that is not bool.
    """
    query, key, value = checked_tokens(query, key, value, eps, power)
    check_same_length(query, key, "a stream of summaries")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if state.centroids.shape[:-2] != key.shape[:-2] or state.centroids.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"the state holds centroids {tuple(state.centroids.shape)}, which do not fit keys {tuple(key.shape)}"
        )
    mask = checked_key_mask(key_mask, key)
    dtype = value.dtype
    query, key, value = (t.to(_numerics.fast_dtype(t.dtype)) for t in (query, key, value))
    slots, n = state.counts.shape[-1], key.shape[-2]
    # the transforms of torch.func do not go through checkpoint's hooks
    again = torch.is_grad_enabled() and not _numerics.transformed()
    again = again and query.shape[:-1].numel() * (slots + chunk) > KEPT_WEIGHTS
    together = max(1, GROUP_WEIGHTS // max(1, query.shape[:-2].numel() * chunk * max(slots, chunk)))
    first = min(n, chunk - state.seen % chunk)
    lengths = [m for m in (first, *[chunk] * ((n - first) // chunk), (n - first) % chunk) if m]
    # one split, whose gradient is put together once: that of a slice is as long as the sequence
    pieces = [t.split(lengths, -2) for t in (query, key, value)] if n else [(), (), ()]
    masks = [None] * len(lengths) if mask is None or not n else mask.split(lengths, -1)
    outs: list[Tensor] = []
    waiting: list[_Reading] = []
    for q, k, v, here in zip(*pieces, masks, strict=True):
        reading, state = _follow(state, q, k, v, here, manifold, chunk)
        if waiting and (len(waiting) == together or not reading.goes_with(waiting[0])):
            outs += _read_all(waiting, manifold, eps, power, again)
            waiting = []
        waiting.append(reading)
    if waiting:
        outs += _read_all(waiting, manifold, eps, power, again)
    out = torch.cat(outs, -2) if outs else value
    return out.to(dtype), state


def summary_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    manifold: geoopt.Manifold,
    *,
    slots: int = 64,
    chunk: int = 64,
    eps: float | Tensor = 1e-3,
    power: float | Tensor = 1.0,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Causal attention through ``slots`` running summaries, over a whole sequence.

    The same numbers as :func:`summary_step` gives token by token from :func:`empty_summaries`, whose arguments and
    errors these are; O(N (slots + chunk)) time. It is not an approximation that converges to dense attention: a query
    sees keys only through their slots, and which slots there are depends on the order of the tokens.

    Returns:
        (..., N, Dv) in the type of the values.

    Source: Ge, Riemann GeoResolver, C-HIDA.
    """
    query, key, value = checked_tokens(query, key, value, eps, power)
    state = empty_summaries(key, value, manifold, slots)
    return summary_step(state, query, key, value, manifold, chunk=chunk, eps=eps, power=power, key_mask=key_mask)[0]


class Summaries:
    """A stream of tokens that remembers ``slots`` summaries: :meth:`step` for every token or piece of the sequence.

    Args:
        manifold, slots, chunk, eps, power: as in :func:`summary_attention`, whose output the steps add up to.
    """

    def __init__(
        self,
        manifold: geoopt.Manifold,
        slots: int = 64,
        *,
        chunk: int = 64,
        eps: float | Tensor = 1e-3,
        power: float | Tensor = 1.0,
    ):
        _check_slots(slots)
        self.manifold, self.slots, self.chunk, self.eps, self.power = manifold, slots, chunk, eps, power
        self.state: SummaryState | None = None

    def step(self, query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The next L tokens, as in :func:`summary_step`: (..., L, Dv). Where an argument is wrong, none is taken."""
        state = empty_summaries(key, value, self.manifold, self.slots) if self.state is None else self.state
        out, self.state = summary_step(
            state,
            query,
            key,
            value,
            self.manifold,
            chunk=self.chunk,
            eps=self.eps,
            power=self.power,
            key_mask=key_mask,
        )
        return out

    def reset(self) -> None:
        """Forget all tokens."""
        self.state = None


def _check_slots(slots: int) -> None:
    if slots < 1:
        raise ValueError(f"slots must be at least 1, got {slots}")


class _Reading(NamedTuple):
    """What the queries of one piece, which does not cross a border, read."""

    query: Tensor  # (..., L, D)
    centroids: Tensor  # (..., C, D)
    filled: Tensor | None  # (..., 1, C) bool, None where every slot is
    by: Tensor  # (..., L, C), 1 where the slot took the key
    rows: Tensor  # (..., L, Dv + 1), [v, 1]
    held: Tensor  # (..., C, Dv + 1), sums of the slots at the start of the piece

    def goes_with(self, other: _Reading) -> bool:
        return self.query.shape == other.query.shape and (self.filled is None) == (other.filled is None)


def _follow(
    state: SummaryState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    manifold: geoopt.Manifold,
    chunk: int,
) -> tuple[_Reading, SummaryState]:
    """The slots through the tokens up to the next border of the centroids, or fewer."""
    centroids, filled, by = _assign(state, key, mask, manifold)
    if mask is not None:  # a masked value may be anything, also no number
        value = torch.where(mask.unsqueeze(-1), value, 0.0)
    rows = with_ones(value)
    held = torch.cat((state.values, state.counts.unsqueeze(-1)), -1)
    reading = _Reading(query, centroids, filled, by, rows, held)
    held = held + by.mT @ rows
    counts = held[..., -1].detach()
    pull = state.pull + _logs(centroids, by, key, mask, manifold)
    seen = state.seen + key.shape[-2]
    if seen % chunk == 0:
        centroids = move_centroids(centroids, pull, counts, manifold).to(centroids.dtype)
        pull = torch.zeros_like(pull)
    return reading, SummaryState(centroids, counts, held[..., :-1], pull, seen)


def _read_all(
    readings: list[_Reading], manifold: geoopt.Manifold, eps: float | Tensor, power: float | Tensor, again: bool
) -> list[Tensor]:
    """The outputs (..., L, Dv) of pieces of one shape, worked together: small operations are mostly overhead."""
    stacked = [None if field[0] is None else torch.stack(field) for field in zip(*readings, strict=True)]
    given = (*stacked, manifold, eps, power)
    out = checkpoint(_read, *given, use_reentrant=False) if again else _read(*given)
    return list(out.unbind(0))


def _assign(
    state: SummaryState, key: Tensor, mask: Tensor | None, manifold: geoopt.Manifold
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Centroids (..., C, D), empty slots filled by the first keys; which slots are (..., 1, C), None for all; and which
    slot took which key, (..., L, C), 0 or 1.
    """
    centroids, counts = state.centroids, state.counts
    length, slots = key.shape[-2], counts.shape[-1]
    may_be_empty = state.seen < slots or mask is not None
    filled: Tensor | None = None
    if may_be_empty:
        empty = counts == 0
        rank = empty.cumsum(-1) - 1  # an empty slot takes the key of its own rank among those that take part
        if mask is None:
            source, there = rank, torch.full_like(rank[..., :1], length)
        else:
            source = torch.gather((~mask).to(torch.int8).argsort(dim=-1, stable=True), -1, rank.clamp(0, length - 1))
            there = mask.sum(-1, keepdim=True)
        takes = empty & (rank < there)
        source = source.clamp(0, length - 1)
        first = torch.gather(key, -2, source.unsqueeze(-1).expand(*source.shape, key.shape[-1]))
        centroids = torch.where(takes.unsqueeze(-1), first, centroids)
        filled = (takes | ~empty).unsqueeze(-2)
    with torch.no_grad():
        d2 = closeness(key, centroids, manifold)
        if filled is not None:
            d2 = torch.where(filled, d2, torch.inf)
        nearest = d2.argmin(-1)
        if may_be_empty:  # the key that fills a slot is that slot's, although others may lie at the same place
            beyond = torch.where(takes, source, length)
            own = torch.arange(slots, device=key.device).expand(beyond.shape)
            nearest = torch.nn.functional.pad(nearest, (0, 1)).scatter(-1, beyond, own)[..., :length]
        by = torch.nn.functional.one_hot(nearest, slots).to(counts.dtype)
        return centroids, filled, by if mask is None else by * mask.unsqueeze(-1)


def _logs(centroids: Tensor, by: Tensor, key: Tensor, mask: Tensor | None, manifold: geoopt.Manifold) -> Tensor:
    """Sums (..., C, D) of the logarithms of the keys at the centroids that took them."""
    nearest = by.argmax(-1, keepdim=True)
    target = torch.gather(centroids, -2, nearest.expand(*nearest.shape[:-1], key.shape[-1]))
    if mask is not None:  # a key that takes no part may be anything, also no point; from the centroid it pulls nowhere
        key = torch.where(mask.unsqueeze(-1), key, target.detach())
    return by.to(key.dtype).mT @ hooks.log(manifold, target, key, "the running mean of a summary").to(key.dtype)


def _read(
    query: Tensor,
    centroids: Tensor,
    filled: Tensor | None,
    by: Tensor,
    rows: Tensor,
    held: Tensor,
    manifold: geoopt.Manifold,
    eps: float | Tensor,
    power: float | Tensor,
) -> Tensor:
    """Out (..., L, Dv) from what the slots held at the start, and the keys of the piece up to each query."""
    w = weights_to(query, centroids, manifold, eps, power, filled).to(rows.dtype)
    both = (w @ by.mT).tril() @ rows + w @ held
    return safe_divide(both[..., :-1], both[..., -1:])


@register_pattern
class SummaryPattern(Pattern):
    """:func:`summary_attention`; causal by nature."""

    name = "summary"
    sizes: ClassVar[dict[str, int | None]] = {"slots": 64, "chunk": 64}

    def __init__(self, heads: Heads, slots: int, chunk: int):
        super().__init__(heads)
        if slots < 1 or chunk < 1:
            raise ValueError(f"slots and chunk must be at least 1, got {slots} and {chunk}")
        self.slots, self.chunk = slots, chunk
        self._manifold = [heads.manifold]  # in a list: it is the layer's

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, manifold: geoopt.Manifold, *, is_causal: bool, **options
    ) -> Tensor:
        if not is_causal:
            raise ValueError('pattern="summary" is a stream: a query sees earlier tokens only, pass is_causal=True')
        return summary_attention(query, key, value, manifold, slots=self.slots, chunk=self.chunk, **options)

    def new_cache(self) -> SummaryCache:
        return SummaryCache(self._manifold[0], self.slots, self.chunk)

    def extra_repr(self) -> str:
        return f"slots={self.slots}, chunk={self.chunk}"


class SummaryCache(StreamCache):
    """A fixed number of summaries in place of the tokens, for a layer of this manifold: memory and time of a token do
    not depend on how many came before.

    A layer with ``pattern="summary"`` and the same sizes decodes as its parallel forward; one with ``pattern="dense"``
    is approximated.

    Args:
        manifold: that of the layer.
        slots, chunk: as in :func:`summary_attention`, whose output the steps add up to.

    Raises:
        ValueError: slots or chunk below 1.
    """

    names = ("centroids", "counts", "values", "pull")
    centroids: Tensor
    counts: Tensor
    values: Tensor
    pull: Tensor
    patterns = ("summary", "dense")

    def __init__(self, manifold: geoopt.Manifold, slots: int = 64, chunk: int = 64):
        super().__init__()
        if slots < 1 or chunk < 1:
            raise ValueError(f"slots and chunk must be at least 1; got {slots} and {chunk}")
        check_manifold(manifold)
        self.slots, self.chunk = slots, chunk
        self._manifold = [manifold]  # in a list: the layer's curvature is no state of the cache

    def answer(self, query, key, value, manifold, **options):
        check_space(self._manifold[0], manifold, "manifold")
        return super().answer(query, key, value, manifold, **options)

    def _start(self, key, value, manifold):
        return empty_summaries(key, value, manifold, self.slots)

    def _state(self):
        return SummaryState(self.centroids, self.counts, self.values, self.pull, self._seen)

    def _step(self, state, query, key, value, manifold, **options):
        return summary_step(state, query, key, value, manifold, chunk=self.chunk, **options)

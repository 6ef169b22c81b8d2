"""Caches of constant size: attention through landmarks and through running summaries, decoded as a stream."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from horosphere.attention.caches import TokenCache, check_space, each_head
from horosphere.attention.landmarks import LandmarkState, empty_landmarks, landmark_step
from horosphere.attention.summaries import SummaryState, empty_summaries, summary_step
from horosphere.manifolds._geoopt import geoopt


class StreamCache(TokenCache):
    """A cache that keeps a state of fixed size in place of tokens: a subclass says which and how it moves on.

    The weights are "inverse", the precision that of cdist.
    """

    def answer(self, query, key, value, manifold, *, key_mask, eps, power, weight, **others):
        if weight != "inverse":
            raise ValueError(f'{type(self).__name__} knows weight="inverse" only, got {weight!r}')
        keys, values = each_head(query, key, value)
        state = self._start(keys, values, manifold) if self._like is None else self._state()
        mask = None if key_mask is None else key_mask[:, None, :]
        out, state = self._step(state, query, keys, values, manifold, eps=eps, power=power, key_mask=mask)
        for name in self.names:
            setattr(self, name, getattr(state, name))
        return out

    def _start(self, key: Tensor, value: Tensor, manifold: geoopt.Manifold) -> NamedTuple:
        """The state before the first token."""
        raise NotImplementedError

    def _state(self) -> NamedTuple:
        """The state that the tensors hold."""
        raise NotImplementedError

    def _step(self, state, query, key, value, manifold, **options) -> tuple[Tensor, NamedTuple]:
        """The output of the new tokens, and the state after them."""
        raise NotImplementedError


class SummaryCache(StreamCache):
    """A fixed number of summaries in place of the tokens, for a layer of this manifold: memory and time of a token do
    not depend on how many came before.

    A layer with ``pattern="summary"`` and the same sizes decodes as its parallel forward; one with ``pattern="dense"``
    is approximated.

    Args:
        manifold: that of the layer.
        slots, chunk: as in :func:`horosphere.attention.summary_attention`, whose output the steps add up to.

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


class LandmarkCache(StreamCache):
    """Decoding through anchors: each holds a sum of weighted values and its mass.

    Args:
        anchors: points (m, D) or (H, m, D) of a layer; shared with it, no part of the cache's own state.
    """

    names = ("values", "mass")
    values: Tensor
    mass: Tensor
    patterns = ("landmark",)

    def __init__(self, anchors: Tensor):
        super().__init__()
        self._anchors = [anchors]  # in a list: a module would take a parameter for its own

    def _start(self, key, value, manifold):
        anchors = self._anchors[0]
        return empty_landmarks(value, anchors.expand(*key.shape[:-2], *anchors.shape[-2:]))

    def _state(self):
        return LandmarkState(self.values, self.mass)

    def _step(self, state, query, key, value, manifold, **options):
        return landmark_step(state, query, key, value, self._anchors[0], manifold, **options)

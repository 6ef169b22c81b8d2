"""The base of caches of constant size: a state that moves on with every token."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from horosphere.attention.caches import TokenCache, each_head
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

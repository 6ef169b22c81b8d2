"""The HIDA patterns as GeodesicAttention uses them: attention over heads, and the cache that decodes each.

A pattern's ``forward`` takes points, values, the manifold, and the options key_mask, is_causal, eps and power.
"""

from __future__ import annotations

from torch import Tensor, nn

from horosphere.attention.caches import AttentionCache, StoringCache, each_head
from horosphere.attention.fixed_pattern import fixed_pattern_attention
from horosphere.attention.landmarks import Landmarks
from horosphere.attention.stream_caches import LandmarkCache, SummaryCache
from horosphere.attention.summaries import summary_attention
from horosphere.manifolds._geoopt import geoopt

PATTERNS = ("dense", "fixed", "landmark", "summary")


class FixedPattern(nn.Module):
    """:func:`horosphere.attention.fixed_pattern_attention` for sequences of at most n_max tokens."""

    def __init__(self, n_max: int | None):
        super().__init__()
        if n_max is None or n_max < 1:
            raise ValueError(f'pattern="fixed" needs n_max, the longest sequence there will be, got {n_max}')
        self.n_max = n_max

    def forward(self, query: Tensor, key: Tensor, value: Tensor, manifold: geoopt.Manifold, **options) -> Tensor:
        return fixed_pattern_attention(query, key, value, manifold, n_max=self.n_max, **options)

    def new_cache(self) -> AttentionCache:
        return FixedCache(self.n_max)

    def extra_repr(self) -> str:
        return f"n_max={self.n_max}"


class FixedCache(StoringCache):
    """Every token is kept, a query sees those of its pattern; keys and values of grouped queries are kept repeated."""

    patterns = ("fixed",)

    def __init__(self, n_max: int):
        super().__init__()
        self.pattern = FixedPattern(n_max)

    def answer(self, query, key, value, manifold, *, key_mask, eps, power, **others):
        if self.seen + key.shape[2] > self.pattern.n_max:
            raise ValueError(f"{self.seen} tokens are held and {key.shape[2]} more do not fit {self.pattern}")
        offset = self.seen
        keys, values, held = self._held_with(*each_head(query, key, value), key_mask)
        held = None if held is None else held[:, None, :]
        options = {"eps": eps, "power": power, "key_mask": held, "is_causal": True, "offset": offset}
        return self.pattern(query, keys, values, manifold, **options)


class LandmarkPattern(nn.Module):
    """:func:`horosphere.attention.landmark_attention` through learned anchors (H, m, D)."""

    def __init__(self, manifold: geoopt.Manifold, count: int, size: int, heads: int, **made):
        super().__init__()
        self.landmarks = Landmarks(manifold, count, size, heads=heads, **made)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, manifold: geoopt.Manifold, **options) -> Tensor:
        return self.landmarks(query, key, value, **options)

    def new_cache(self) -> AttentionCache:
        return LandmarkCache(self.landmarks.anchors)


class SummaryPattern(nn.Module):
    """:func:`horosphere.attention.summary_attention`; causal by nature."""

    def __init__(self, manifold: geoopt.Manifold, slots: int, chunk: int):
        super().__init__()
        if slots < 1 or chunk < 1:
            raise ValueError(f"summaries and chunk must be at least 1, got {slots} and {chunk}")
        self.slots, self.chunk = slots, chunk
        self._manifold = [manifold]  # in a list: it is the layer's

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, manifold: geoopt.Manifold, *, is_causal: bool, **options
    ) -> Tensor:
        if not is_causal:
            raise ValueError('pattern="summary" is a stream: a query sees earlier tokens only, pass is_causal=True')
        return summary_attention(query, key, value, manifold, slots=self.slots, chunk=self.chunk, **options)

    def new_cache(self) -> AttentionCache:
        return SummaryCache(self._manifold[0], self.slots, self.chunk)

    def extra_repr(self) -> str:
        return f"slots={self.slots}, chunk={self.chunk}"


def make_scheme(
    pattern: str, given: dict[str, int | None], manifold: geoopt.Manifold, size: int, heads: int, **made
) -> nn.Module | None:
    """The module of a pattern, None for "dense"; ``given`` holds the sizes a caller chose, by name, or None.

    Raises ValueError for an unknown pattern, or a size that the pattern does not have.
    """
    if pattern not in PATTERNS:
        raise ValueError(f"pattern must be one of {PATTERNS}, got {pattern!r}")
    chosen = {name: n for name, n in given.items() if n is not None}
    other = [name for name in chosen if name not in _SIZES[pattern]]
    if other:
        raise ValueError(f"{other[0]}={chosen[other[0]]} means nothing with pattern={pattern!r}")
    sizes = _SIZES[pattern] | chosen
    if pattern == "fixed":
        return FixedPattern(sizes["n_max"])
    if pattern == "landmark":
        return LandmarkPattern(manifold, sizes["landmarks"], size, heads, **made)
    if pattern == "summary":
        return SummaryPattern(manifold, **sizes)
    return None


_SIZES = {"dense": {}, "fixed": {"n_max": None}, "landmark": {"landmarks": 64}, "summary": {"slots": 64, "chunk": 64}}

r"""Attention to a fixed pattern of keys: a local window, global keys and dyadic distances (FP-HIDA).

A query at position i sees, as a set,

    j with |i - j| <= w;    floor(t n_max / g) for t = 0 .. g-1;    i +- 2^k for k = 0, 1, 2, ...

less what lies outside of the sequence and, causal, after i. w and g default to ceil(log2 n_max), so a query sees
O(log n) keys. n_max is the longest sequence that the layer will meet: with the current length in its place, decoding
would see other keys than the parallel form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from horosphere import _numerics
from horosphere._numerics import without_autocast
from horosphere.attention.caches import StoringCache, each_head
from horosphere.attention.inverse import (
    by_head,
    checked_key_mask,
    checked_tokens,
    error_factor,
    row_weights,
    safe_divide,
)
from horosphere.attention.patterns.base import Heads, Pattern, register_pattern
from horosphere.kernels import pattern as sums
from horosphere.kernels.chord.product_form import arc2, left, right, size
from horosphere.kernels.pattern import Pattern as Keys
from horosphere.kernels.pattern import keys_of
from horosphere.kernels.reference.attention import PAIRS, kappa_against, of_pairs
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import Chord, chords
from horosphere.manifolds.hooks import origin
from horosphere.manifolds.pairwise import pairs_of_rows

# Pairs of a block of rows; the backward pass works blocks again where there are several. 2^19 float32 are 2 MiB, of
# which some are alive.
BLOCK_PAIRS = 2**19
# Blocks there are at most where gradients are wanted: those of keys and values are summed over the blocks, whole.
LARGEST_BLOCKS = 8
# Pairs below which every key is gathered: decoding, where the sums over a pattern would be all overhead.
FEW_PAIRS = 2**14
# Numbers of gathered keys worked together in float64.
BLOCK_NUMBERS = 2**20


def pattern_of(
    n_max: int, *, window: int | None = None, global_keys: int | None = None, is_causal: bool = False
) -> Keys:
    """The pattern for at most n_max tokens; window w >= 0 and global_keys g >= 0 default to ceil(log2 n_max).

    Raises ValueError for a number out of range.
    """
    if n_max < 1:
        raise ValueError(f"n_max must be at least 1, got {n_max}")
    log = max(1, (n_max - 1).bit_length())
    w, g = log if window is None else window, log if global_keys is None else global_keys
    if w < 0 or g < 0:
        raise ValueError(f"window and global_keys must not be negative, got {w} and {g}")
    w = min(w, n_max - 1)
    dyadic = [2**k for k in range((n_max - 1).bit_length()) if w < 2**k < n_max]
    shifts = [-o for o in reversed(dyadic)] + ([] if is_causal else dyadic)
    positions = sorted({t * n_max // g for t in range(g)}) if g else []
    return Keys((-w, 0 if is_causal else w), tuple(shifts), tuple(positions), is_causal)


def fixed_pattern_mask(
    rows: int,
    keys: int,
    *,
    n_max: int | None = None,
    window: int | None = None,
    global_keys: int | None = None,
    is_causal: bool = False,
    offset: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The pattern as an attn_mask (rows, keys), True where the query at position offset + row sees the key.

    Arguments and errors as in :func:`fixed_pattern_attention`.
    """
    pattern = _fitting(rows, keys, n_max, window, global_keys, is_causal, offset)
    at, valid = keys_of(pattern, offset, rows, keys, torch.device(device))
    mask = torch.zeros(rows, keys, dtype=torch.int8, device=at.device)
    return (mask.scatter_add_(1, at, valid.to(torch.int8)) if keys else mask).bool()


def fixed_pattern_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    manifold: geoopt.Manifold,
    *,
    n_max: int | None = None,
    window: int | None = None,
    global_keys: int | None = None,
    is_causal: bool = False,
    offset: int = 0,
    eps: float | Tensor = 1e-3,
    power: float | Tensor = 1.0,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Dense attention with the mask of the pattern, in O(N log N) time and memory.

    Args:
        query: points (..., H, N, D), at positions offset, offset + 1, ...
        key: points (..., H, M, D), at positions 0 .. M-1. value: (..., H, M, Dv).
        manifold: any geoopt.Manifold; ``dist`` alone is enough.
        n_max: longest sequence, M <= n_max; None: M. Give it where sequences differ in length or keys are cached.
        window: w, to either side; None: ceil(log2 n_max). global_keys: g, likewise.
        is_causal: a query sees no key after its own position.
        offset: position of the first query, M - N when decoding with M - N cached keys.
        eps, power: positive, () or (H,).
        key_mask: bool, broadcasts to (..., H, M), True = takes part.

    Returns:
        (..., H, N, Dv) in the type of the values, 0 where a query sees no key. Pairs that the product form does not
        resolve are worked from differences, as in geodesic_attention. Gradients flow to query, key, value, eps, power
        and a learnable curvature.

    Raises:
        ValueError: shapes or numbers that do not fit, a position beyond n_max.
        TypeError: no floating point tensors, no manifold, a mask that is not bool.

    Sources: Ge, Riemann GeoResolver, FP-HIDA; Child et al. (2019), sparse transformers; Beltagy et al. (2020),
    Longformer.
    """
    query, key, value = checked_tokens(query, key, value, eps, power)
    n, m = query.shape[-2], key.shape[-2]
    pattern = _fitting(n, m, n_max, window, global_keys, is_causal, offset)
    mask = checked_key_mask(key_mask, key)
    if not m or not n or not query.shape[:-2].numel():
        return value.new_zeros(*query.shape[:-1], value.shape[-1]) + 0 * (query.sum() + key.sum() + value.sum())
    if mask is not None:  # what takes no part may be anything, also no point
        start = origin(manifold, *key.shape[:-2], 1, key.shape[-1], dtype=key.dtype, device=key.device)
        key = torch.where(mask.unsqueeze(-1), key, start)
        value = torch.where(mask.unsqueeze(-1), value, 0.0)
    with without_autocast(query.device):
        return _in_blocks(query, key, value, mask, manifold, pattern, offset, eps, power).to(value.dtype)


def _fitting(
    rows: int,
    keys: int,
    n_max: int | None,
    window: int | None,
    global_keys: int | None,
    is_causal: bool,
    offset: int,
) -> Keys:
    n_max = max(1, keys) if n_max is None else n_max
    if offset < 0 or max(keys, offset + rows) > n_max:
        raise ValueError(
            f"{keys} keys and queries at positions {offset} to {offset + rows - 1} "
            f"do not fit a pattern with n_max = {n_max}"
        )
    return pattern_of(n_max, window=window, global_keys=global_keys, is_causal=is_causal)


class _Keys(NamedTuple):
    """What the blocks of rows share: the keys' chord parts, their features (B, M, F) and sizes (..., M, 2)."""

    chords: tuple
    right: list[Tensor]
    size: list[Tensor]


def _in_blocks(query, key, value, mask, manifold, pattern, offset, eps, power) -> Tensor:
    n, batch = query.shape[-2], query.shape[:-2].numel()
    transforms = _numerics.transformed()
    plain = transforms or torch.compiler.is_compiling() or batch * n * pattern.columns < FEW_PAIRS
    parts = None if plain else chords(manifold, key)
    work: Callable[..., Tensor] = _gathered if parts is None else _summed
    given: tuple[Any, Tensor]
    again = torch.is_grad_enabled() and not transforms
    if parts is None:
        numbers, limit, given = key.shape[-1], BLOCK_NUMBERS, (key, value)
    else:
        with torch.no_grad():
            sizes = [size(part, -1) for part in parts]
        keys = _Keys(parts, [right(part).flatten(0, -3) for part in parts], sizes)
        numbers, limit, given = 1, BLOCK_PAIRS, (keys, value)
    rows = max(1, limit // (batch * pattern.columns * numbers))
    if torch.compiler.is_compiling():
        rows = n
    elif again:  # the gradient of every block is as long as the keys
        rows = max(rows, -(-n // LARGEST_BLOCKS))
    again = again and rows < n
    outs = []
    for i, piece in enumerate(query.split(rows, -2)):
        some = (piece, *given, mask, manifold, pattern, offset + i * rows, eps, power)
        outs.append(checkpoint(work, *some, use_reentrant=False) if again else work(*some))
    return torch.cat(outs, -2) if len(outs) > 1 else outs[0]


def _gathered(query, key, value, mask, manifold, pattern, start, eps, power) -> Tensor:
    """The plain form: every key of a row side by side, exact distances."""
    at, valid = keys_of(pattern, start, query.shape[-2], key.shape[-2], query.device)
    flat = at.flatten()
    d2 = pairs_of_rows(query, key.index_select(-2, flat).unflatten(-2, at.shape), manifold)
    if mask is not None:
        valid = valid & mask.index_select(-1, flat).unflatten(-1, at.shape)
    w = row_weights(d2.to(_numerics.fast_dtype(value.dtype)), eps, power, valid)
    rows = value.index_select(-2, flat).unflatten(-2, at.shape)
    out = (w.unsqueeze(-2) @ rows.to(w.dtype)).squeeze(-2)
    return safe_divide(out, w.sum(-1, keepdim=True))


def _summed(query, keys: _Keys, value, mask, manifold, pattern, start, eps, power) -> Tensor:
    """The same through sums over the pattern, distances in product form where it resolves them."""
    at, valid = keys_of(pattern, start, query.shape[-2], value.shape[-2], query.device)
    batch = query.shape[:-2]
    if mask is not None:
        valid = valid & mask.index_select(-1, at.flatten()).unflatten(-1, at.shape)
    d2 = _squared_distances(chords(manifold, query), keys, pattern, start, at, valid, by_head(eps, torch.float64))
    w = row_weights(d2, eps, power, valid)
    out = sums.gather(w.flatten(0, -3), value.to(w.dtype).reshape(-1, *value.shape[-2:]), pattern, start)
    return safe_divide(out.view(*batch, *out.shape[-2:]), w.sum(-1, keepdim=True))


def _squared_distances(xs, keys: _Keys, pattern: Keys, start: int, at: Tensor, valid: Tensor, eps) -> Tensor:
    """d^2 (..., N, S) of rows to the keys of the pattern; any number where there is none."""
    batch = xs[0].features.shape[:-2]
    products = (sums.dots(left(x).flatten(0, -3), b, pattern, start) for x, b in zip(xs, keys.right, strict=True))
    arcs = (arc2(u.view(*batch, *at.shape), kappa_against(x, 2)) for x, u in zip(xs, products, strict=True))
    total = functools.reduce(torch.add, arcs)
    with torch.no_grad():  # the largest error bound of every row
        sizes = ((x, size(x, 1), q.amax(-2, keepdim=True)) for x, q in zip(xs, keys.size, strict=True))
        parts = (error_factor(x, total.dtype) * (p * q).sum(-1, keepdim=True) for x, p, q in sizes)
        bound = functools.reduce(torch.add, parts)
        least = torch.where(valid, total, torch.inf).amin(-1, keepdim=True)
        rows = (least + eps < bound).flatten().nonzero().squeeze(-1)
        if not rows.numel():
            return total
        near, picked = _unresolved(xs, keys, total + eps, at, valid, rows)
    if not near.numel():
        return total
    shape = torch.Size((*batch, at.shape[0], keys.chords[0].features.shape[-2]))
    exact = torch.cat([of_pairs(shape, xs, keys.chords, some) for some in picked.split(PAIRS)])
    return total.flatten().index_put((near,), exact.to(total.dtype)).view(total.shape)


def _unresolved(xs, keys: _Keys, shifted: Tensor, at: Tensor, valid: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Flat indices of the unresolved pairs of some rows, into the columns of the pattern and into all keys."""
    n, columns = at.shape
    entry, row = rows // n, rows % n
    m = keys.chords[0].features.shape[-2]

    def part(x: Chord, q: Tensor) -> Tensor:
        own, other = size(x, 1).reshape(-1, 1, 2)[rows], q.reshape(-1, m, 2)[entry.unsqueeze(-1), at[row]]
        return error_factor(x, other.dtype) * (own * other).sum(-1)

    bound = functools.reduce(torch.add, (part(x, q) for x, q in zip(xs, keys.size, strict=True)))
    there = valid[row] if valid.dim() == 2 else valid.reshape(-1, columns)[rows]
    which, column = ((shifted.reshape(-1, columns)[rows] < bound) & there).nonzero(as_tuple=True)
    return rows[which] * columns + column, rows[which] * m + at[row[which], column]


@register_pattern
class FixedPattern(Pattern):
    """:func:`fixed_pattern_attention` for sequences of at most n_max tokens."""

    name = "fixed"
    sizes: ClassVar[dict[str, int | None]] = {"n_max": None}

    def __init__(self, heads: Heads, n_max: int):
        super().__init__(heads)
        if n_max < 1:
            raise ValueError(f'pattern="fixed" needs n_max, the longest sequence there will be, got {n_max}')
        self.n_max = n_max

    def forward(self, query: Tensor, key: Tensor, value: Tensor, manifold: geoopt.Manifold, **options) -> Tensor:
        return fixed_pattern_attention(query, key, value, manifold, n_max=self.n_max, **options)

    def new_cache(self) -> FixedCache:
        return FixedCache(self.n_max)

    def extra_repr(self) -> str:
        return f"n_max={self.n_max}"


class FixedCache(StoringCache):
    """Every token is kept, a query sees those of its pattern; keys and values of grouped queries are kept repeated."""

    patterns = ("fixed",)

    def __init__(self, n_max: int):
        super().__init__()
        self.n_max = n_max

    def answer(self, query, key, value, manifold, *, key_mask, eps, power, **others):
        if self.seen + key.shape[2] > self.n_max:
            raise ValueError(f"{self.seen} tokens are held and {key.shape[2]} more do not fit n_max={self.n_max}")
        offset = self.seen
        key, value = each_head(query, key, value)
        keys, values, held = self._held_with(key, value, key_mask)
        held = None if held is None else held[:, None, :]
        options = {"eps": eps, "power": power, "key_mask": held, "is_causal": True, "offset": offset}
        return fixed_pattern_attention(query, keys, values, manifold, n_max=self.n_max, **options)

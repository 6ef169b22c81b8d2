"""A cache that keeps tokens in code."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from horosphere.attention.caches import TokenCache, check_space, lower_right
from horosphere.attention.functional import geodesic_attention
from horosphere.attention.merge import merge
from horosphere.manifolds._geoopt import geoopt
from horosphere.memory.compression import HyperbolicCompressor
from horosphere.memory.packed import Packed

__all__ = ["CompressedCache"]

# Tokens decoded at a time: 4096 rows of 64 float32 are 1 MiB a head, and gone before the next.
BLOCK_ROWS = 4096


class CompressedCache(TokenCache):
    """Keeps tokens coded: at 4 bits a coordinate about an eighth of the memory, and a small error.

    The last tokens are kept as they are until ``block`` of them are there; then they are coded together. The first
    block of every head fixes its range of radii, unless the code was calibrated. Attention decodes some thousand rows
    at a time and merges. Gradients reach the tokens that are not coded yet.

    Args:
        code: of the manifold that the layer's keys live on.
        block: tokens coded together.
        code_values: also code the values (direction as the keys', length in bfloat16); False keeps them.

    Raises:
        ValueError: block below 1. TypeError: code is none.
    """

    names = ("key_codes", "low", "high", "value_codes", "value_store", "recent_key", "recent_value", "mask_store")
    key_codes: Tensor | None
    low: Tensor | None
    high: Tensor | None
    value_codes: Tensor | None
    value_store: Tensor | None
    recent_key: Tensor | None
    recent_value: Tensor | None
    mask_store: Tensor | None

    def __init__(self, code: HyperbolicCompressor, block: int = 64, code_values: bool = True):
        super().__init__()
        if not isinstance(code, HyperbolicCompressor):
            raise TypeError(f"code must be a HyperbolicCompressor; got {type(code).__name__}")
        if block < 1:
            raise ValueError(f"block must be at least 1; got {block}")
        self.code, self.block, self.code_values = code, block, code_values

    @property
    def coded(self) -> int:
        """How many tokens are held in code; the others, fewer than a block, are held as they are."""
        return 0 if self.key_codes is None else self.key_codes.shape[2]

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys held."""
        return self._bytes("key_codes", "low", "high", "recent_key")

    def answer(self, query, key, value, manifold, *, key_mask, **options):
        check_space(self.code.manifold, manifold, "code")
        if options["weight"] == "dot":
            raise ValueError('weight="dot" has no points to code: use a DenseCache')
        self._check_finite(key, value)
        self._hold_mask(key, key_mask)
        # in pieces that end where a block does: one call equals a call for every token
        outs = [self._read(query[:, :, piece], manifold, options) for piece in self._taken_in(key, value)]
        return torch.cat(outs, 2) if outs else value.new_zeros(*query.shape[:-1], value.shape[-1])

    def append(
        self, key: Tensor, value: Tensor, key_mask: Tensor | None = None, *, owner: object = None
    ) -> CompressedCache:
        """Hold L more tokens, key (B, H', L, D), value (B, H', L, Dv), that ask nothing."""
        self.check(key, key, value, key_mask, owner)
        self._check_finite(key, value)
        self._hold_mask(key, key_mask)
        for _ in self._taken_in(key, value):
            pass
        self._remember(key, value, owner)
        return self

    @staticmethod
    def _check_finite(key: Tensor, value: Tensor) -> None:
        if not bool(key.isfinite().all()) or not bool(value.isfinite().all()):
            raise ValueError("key and value must be finite to be coded")

    def _taken_in(self, key: Tensor, value: Tensor) -> Iterator[slice]:
        """Pieces of the new tokens, each yielded when it is among the recent ones; full blocks are coded after that."""
        at = 0
        while at < key.shape[2]:
            held = 0 if self.recent_key is None else self.recent_key.shape[2]
            piece = slice(at, at + self.block - held)
            self.recent_key = _joined(self.recent_key, key[:, :, piece])
            self.recent_value = _joined(self.recent_value, value[:, :, piece])
            yield piece
            if self.recent_key.shape[2] == self.block:
                self._code_recent()
            at = piece.stop

    def _read(self, query: Tensor, manifold: geoopt.Manifold, options: dict) -> Tensor:
        """The newest tokens' queries over everything held."""
        coded, key = self.coded, _held(self.recent_key)
        parts = [(key, _held(self.recent_value), self._mask(coded, coded + key.shape[2]), query.shape[2])]
        for start in range(0, coded, BLOCK_ROWS):
            stop = min(coded, start + BLOCK_ROWS)
            parts.append((*self._decoded(start, stop), self._mask(start, stop), 1))
        outs, lses = [], []
        for keys, values, mask, causal_rows in parts:
            allowed = lower_right(causal_rows, keys.shape[2], mask, query.device)
            out, lse = geodesic_attention(query, keys, values, manifold, attn_mask=allowed, return_lse=True, **options)
            outs.append(out)
            lses.append(lse)
        return outs[0] if len(outs) == 1 else merge(outs, lses)[0]

    @torch.no_grad()
    def _code_recent(self) -> None:
        key, value = _held(self.recent_key), _held(self.recent_value)
        packed = self.code.encode(key, like=None if self.key_codes is None else self._packed_keys())
        self.low, self.high = packed.low, packed.high
        self.key_codes = _joined(self.key_codes, packed.data)
        if self.code_values:
            self.value_codes = _joined(self.value_codes, self.code.encode_values(value).data)
        else:
            self.value_store = _joined(self.value_store, value.detach())
        self.recent_key, self.recent_value = key[:, :, :0], value[:, :, :0]

    def _decoded(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        keys = self.code.decode(self._packed_keys(), start, stop)
        if not self.code_values:
            return keys, _held(self.value_store)[:, :, start:stop]
        codes, value = _held(self.value_codes), _held(self.recent_value)
        coded = Packed(codes, "values", value.shape[-1], value.dtype, self.code.signature, None, None)
        return keys, self.code.decode(coded, start, stop)

    def _packed_keys(self) -> Packed:
        codes, key = _held(self.key_codes), _held(self.recent_key)
        return Packed(codes, "keys", key.shape[-1], key.dtype, self.code.signature, self.low, self.high)

    def _hold_mask(self, key: Tensor, key_mask: Tensor | None) -> None:
        if self.mask_store is None:
            if key_mask is None:
                return
            self.mask_store = key_mask.new_ones(key.shape[0], self._seen)
        new = self.mask_store.new_ones(key.shape[0], key.shape[2]) if key_mask is None else key_mask
        self.mask_store = torch.cat((self.mask_store, new), 1)

    def _mask(self, start: int, stop: int) -> Tensor | None:
        return None if self.mask_store is None else self.mask_store[:, start:stop]

    def extra_repr(self) -> str:
        return f"{self._seen} tokens, {self.coded} of them coded, {self.code!r}"


def _held(tensor: Tensor | None) -> Tensor:
    """One of the cache's tensors, where tokens have come."""
    if tensor is None:
        raise RuntimeError("an empty cache holds no tensors")
    return tensor


def _joined(held: Tensor | None, new: Tensor) -> Tensor:
    return new.clone() if held is None else torch.cat((held, new), 2)

"""Decoding with a memory of earlier tokens: the protocol every cache answers, and the one that keeps all of them."""

from __future__ import annotations

import weakref
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from horosphere.attention.arguments import Rule, checked
from horosphere.attention.functional import geodesic_attention
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve


@runtime_checkable
class AttentionCache(Protocol):
    """What an attention layer asks of the memory it decodes with: one object a layer, for one batch of sequences.

    A cache *answers* :meth:`attend` instead of handing keys and values back, because not every cache has them: a
    compressed one decodes them block by block, a summary keeps a fixed number of centroids. Points are given as they
    lie on the manifold, after rotary positions and the map.
    """

    @property
    def seen(self) -> int:
        """How many tokens were appended since the start or the last reset: the position of the next one."""
        ...

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        manifold: geoopt.Manifold,
        *,
        key_mask: Tensor | None = None,
        enable_gqa: bool = False,
        eps: float | Tensor = 1e-3,
        power: float | Tensor = 1.0,
        weight: str = "inverse",
        precision: str = "auto",
        owner: object = None,
    ) -> Tensor:
        """Append L tokens, then attend: query i sees everything held before and the new keys 0..i (lower right).

        One call with L tokens equals L calls with one. Where an argument is wrong, nothing is appended.

        Args:
            query: points (B, H, L, D). key: points (B, H', L, D). value: (B, H', L, Dv). H' = H, or with ``enable_gqa``
                a divisor of it.
            manifold, eps, power, weight, precision: as in :func:`geodesic_attention`; the same in every call.
            key_mask: (B, L) bool of the new tokens, True = takes part; it is remembered. False for padding.
            owner: the layer that asks; a cache answers one layer only.

        Returns:
            (B, H, L, Dv).

        Raises:
            ValueError: shapes, type, device or owner differ from those of the first call.
        """
        ...

    def reset(self) -> None:
        """Forget everything, the shapes and the owner included."""
        ...

    def reorder(self, index: Tensor) -> None:
        """Keep the sequences ``index`` (B',) of the batch, in that order: beam search, or a batch that shrinks."""
        ...


class TokenCache(torch.nn.Module):
    """The base of every cache here, and of one of your own: tensors by name, a count of tokens, and what they are like.

    A subclass fills in three things:

    - ``names``: its tensors, None while empty; the first dimension of each is the batch. They are buffers, so that
      ``to``, ``state_dict``, ``reorder``, copies and pickles carry them.
    - ``patterns``: those of the layers that it decodes.
    - :meth:`answer`: what it does with new tokens.

    Counting tokens, refusing shapes, types, devices and owners that do not fit, and everything about state is here. The
    layer that used a cache first is held weakly and not copied: a copy belongs to the first layer that uses it.
    """

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ("dense",)

    def __init__(self):
        super().__init__()
        for name in self.names:
            self.register_buffer(name, None)
        self._seen = 0
        self._like: tuple[Any, ...] | None = None
        self._owner: weakref.ref | None = None

    @property
    def seen(self) -> int:
        """How many tokens were appended."""
        return self._seen

    @property
    def nbytes(self) -> int:
        """Bytes of everything held, room for tokens to come included."""
        return self._bytes(*self.names)

    def _bytes(self, *names: str) -> int:
        return sum(t.numel() * t.element_size() for name in names if (t := getattr(self, name)) is not None)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        manifold: geoopt.Manifold,
        *,
        key_mask: Tensor | None = None,
        enable_gqa: bool = False,
        eps: float | Tensor = 1e-3,
        power: float | Tensor = 1.0,
        weight: str = "inverse",
        precision: str = "auto",
        owner: object = None,
    ) -> Tensor:
        """Append L tokens, then attend: see :class:`AttentionCache`."""
        self.check(query, key, value, key_mask, owner)
        resolve(manifold)
        rule: Rule = {"eps": eps, "power": power, "weight": weight, "precision": precision}
        checked(query, key, value, enable_gqa=enable_gqa, **rule)  # before anything is held
        out = self.answer(query, key, value, manifold, key_mask=key_mask, enable_gqa=enable_gqa, **rule)
        self._remember(key, value, owner)
        return out

    def answer(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        manifold: geoopt.Manifold,
        *,
        key_mask: Tensor | None,
        enable_gqa: bool,
        eps: float | Tensor,
        power: float | Tensor,
        weight: str,
        precision: str,
    ) -> Tensor:
        """Hold L new tokens and attend to them and to all before: the hook of a subclass.

        Shapes, types, device and owner have been looked at, ``seen`` still counts the tokens before these. What else is
        wrong is to be refused before anything is held.

        Args:
            query: (B, H, L, D). key: (B, H', L, D). value: (B, H', L, Dv), with H' a divisor of H: ``enable_gqa`` says
                that it is another number, and :func:`each_head` repeats heads.
            key_mask: (B, L) bool of the new tokens, True = takes part, or None.
            enable_gqa, eps, power, weight, precision: as :func:`geodesic_attention` takes them; a subclass that has no
                use for some takes them as ``**others``.

        Returns:
            (B, H, L, Dv).
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Forget everything, the shapes and the owner included."""
        for name in self.names:
            setattr(self, name, None)
        self._seen, self._like, self._owner = 0, None, None

    def reorder(self, index: Tensor) -> None:
        """Keep the sequences ``index`` (B',) of the batch, in that order."""
        if self._like is None:
            raise ValueError("an empty cache has no sequences to reorder")
        kept = {name: t.index_select(0, index) for name in self.names if (t := getattr(self, name)) is not None}
        for name, tensor in kept.items():
            setattr(self, name, tensor)
        self._like = (len(index), *self._like[1:])

    def check(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, owner: object) -> None:
        """ValueError where new tokens do not fit each other or those held; nothing is changed then."""
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        if not query.dim() == key.dim() == value.dim() == 4:
            raise ValueError(f"a cache takes query, key and value (B, H, L, D), got {shapes}")
        fits = query.shape[0] == key.shape[0] and query.shape[2:] == key.shape[2:] and key.shape[:3] == value.shape[:3]
        if not fits:
            raise ValueError(
                "query, key and value are those of the same new tokens (B, H, L, D), of one batch, length and point "
                f"size, key and value of the same heads; got {shapes}"
            )
        if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != (key.shape[0], key.shape[2])):
            raise ValueError(
                f"key_mask must be bool of shape {(key.shape[0], key.shape[2])}, the new tokens only, True where a "
                f"token takes part; got {key_mask.dtype} of shape {tuple(key_mask.shape)}"
            )
        like = self._description(key, value)
        if self._like is not None and any(a not in (None, b) for a, b in zip(self._like, like, strict=True)):
            raise ValueError(
                "this cache holds tokens with (batch, key heads, point size, value size, type, device) = "
                f"{self._like}, got {like}: use one cache a layer and batch, or reset() it"
            )
        held = self._owner() if self._owner is not None else None
        if owner is not None and held is not None and held is not owner:
            raise ValueError("this cache holds the tokens of another layer: give every layer a cache of its own")

    def _remember(self, key: Tensor, value: Tensor, owner: object) -> None:
        """Count tokens that are held now, and note what they are like and whose."""
        self._seen += key.shape[2]
        self._like = self._description(key, value)
        if owner is not None:
            self._owner = weakref.ref(owner)

    @staticmethod
    def _description(key: Tensor, value: Tensor) -> tuple[Any, ...]:
        return (key.shape[0], key.shape[1], key.shape[3], value.shape[3], str(key.dtype), str(key.device))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_owner": None}

    def get_extra_state(self) -> tuple[int, tuple[Any, ...] | None]:
        return self._seen, self._like

    def set_extra_state(self, state: tuple[int, tuple[Any, ...] | None]) -> None:
        self._seen, self._like = state

    def _load_from_state_dict(self, state_dict, prefix, *others):
        # as many tokens as were saved, whatever is held now
        self.reset()
        for name in self.names:
            stored = state_dict.get(prefix + name)
            setattr(self, name, None if stored is None else stored.clone())
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self._like is not None:
            self._like = (*self._like[:4], None, None)  # type and device are new
        return self

    def extra_repr(self) -> str:
        return f"{self._seen} tokens"


class StoringCache(TokenCache):
    """A cache that keeps the points and values of every token; a subclass says how they are attended to.

    Memory grows in doubling steps. Under ``torch.no_grad`` tokens are written in place; where gradients are recorded
    they flow to earlier tokens too.
    """

    names = ("key_store", "value_store", "mask_store")
    key_store: Tensor | None
    value_store: Tensor | None
    mask_store: Tensor | None

    @property
    def key(self) -> Tensor | None:
        """The points held, (B, H', seen, D); None while empty. A view: the next append may write beside it."""
        return None if self.key_store is None else self.key_store[:, :, : self._seen]

    @property
    def value(self) -> Tensor | None:
        """The values held, (B, H', seen, Dv); None while empty."""
        return None if self.value_store is None else self.value_store[:, :, : self._seen]

    @property
    def key_mask(self) -> Tensor | None:
        """(B, seen) bool, True = takes part; None as long as no token was masked."""
        return None if self.mask_store is None else self.mask_store[:, : self._seen]

    def append(
        self, key: Tensor, value: Tensor, key_mask: Tensor | None = None, *, owner: object = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hold L more tokens, key (B, H', L, D), value (B, H', L, Dv), and return all that are held with their mask."""
        self.check(key, key, value, key_mask, owner)
        held = self._held_with(key, value, key_mask)
        self._remember(key, value, owner)
        return held

    def _held_with(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Everything held and new tokens behind, which are not counted yet."""
        if key_mask is not None and self.mask_store is None:
            rows = 0 if self.key_store is None else self.key_store.shape[2]
            self.mask_store = key_mask.new_ones(key.shape[0], rows)
        if key_mask is None and self.mask_store is not None:
            key_mask = self.mask_store.new_ones(key.shape[0], key.shape[2])
        self.key_store = _extended(self.key_store, self._seen, key, 2)
        self.value_store = _extended(self.value_store, self._seen, value, 2)
        total = self._seen + key.shape[2]
        if key_mask is not None:
            self.mask_store = _extended(self.mask_store, self._seen, key_mask, 1)
        mask = None if self.mask_store is None else self.mask_store[:, :total]
        return self.key_store[:, :, :total], self.value_store[:, :, :total], mask


class DenseCache(StoringCache):
    """Keeps every token: decoding that equals the parallel causal forward exactly.

    A step costs what attention over the tokens held costs.
    """

    def answer(self, query, key, value, manifold, *, key_mask, **options):
        keys, values, held_mask = self._held_with(key, value, key_mask)
        n, m = query.shape[2], keys.shape[2]
        allowed: Tensor | None
        if n == m and held_mask is not None:  # nothing was held: lower right is upper left, and needs no matrix
            allowed, is_causal = held_mask[:, None, None], True
        else:
            allowed, is_causal = lower_right(n, m, held_mask, query.device), False
        return geodesic_attention(query, keys, values, manifold, attn_mask=allowed, is_causal=is_causal, **options)


def check_space(own: geoopt.Manifold, asked: geoopt.Manifold, what: str) -> None:
    """ValueError where a cache made for one manifold is used by a layer of another."""
    if own is asked:
        return
    mine, other = (dict(m.state_dict()) for m in (own, asked))
    same = type(own) is type(asked) and repr(own) == repr(asked) and mine.keys() == other.keys()
    if not same or any(not torch.equal(mine[name], other[name]) for name in mine):
        raise ValueError(f"the cache's {what} is of {own!r}, the layer's points are on {asked!r}")


def lower_right(queries: int, keys: int, key_mask: Tensor | None, device: torch.device) -> Tensor | None:
    """The mask of ``geodesic_attention`` for the last ``queries`` of ``keys`` tokens, each seeing itself and earlier.

    key_mask (B, keys) bool or None. One query sees every key: then there is nothing to mask but padding.
    """
    if key_mask is None:
        from torch.nn.attention.bias import causal_lower_right  # here, because it imports triton

        return None if queries == 1 else causal_lower_right(queries, keys)
    mask = key_mask[:, None, None, :]
    if queries == 1:
        return mask
    return mask & torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def each_head(query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Keys or values (B, H', L, ...) repeated for the heads of a query (B, H, L, D) that share them."""
    group = query.shape[1] // others[0].shape[1]
    return others if group == 1 else tuple(t.repeat_interleave(group, 1) for t in others)


def _extended(store: Tensor | None, used: int, new: Tensor, dim: int) -> Tensor:
    """A tensor whose first ``used`` entries along dim are those of store, followed by new; in place where that fits."""
    if store is None:
        return new.clone()
    total = used + new.shape[dim]
    if torch.is_grad_enabled():  # what was attended to so far may be needed by a backward pass
        return torch.cat((store.narrow(dim, 0, used), new), dim)
    frozen = store.requires_grad or (store.is_inference() and not torch.is_inference_mode_enabled())
    if frozen or total > store.shape[dim]:
        grown = new.new_empty(*new.shape[:dim], max(total, 2 * used), *new.shape[dim + 1 :])
        grown.narrow(dim, 0, used).copy_(store.narrow(dim, 0, used))
        store = grown
    store.narrow(dim, used, new.shape[dim]).copy_(new)
    return store

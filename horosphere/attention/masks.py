"""The two meanings of a mask, and the one way from the layer's to the function's."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def blocked_to_allowed(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    heads: Sequence[int],
    keys: int,
    unbatched: bool,
) -> Tensor | None:
    """Masks as nn.MultiheadAttention means them (True = blocked), as scaled_dot_product_attention means them.

    Args:
        attn_mask: (N, M) or (B H, N, M), bool or additive float.
        key_padding_mask: (B, M), unbatched (M,), bool or additive float.
        heads: B, H, N.
        keys: M.
        unbatched: B = 1 was added by the layer.

    Returns:
        Broadcastable to (B, H, N, M): bool, True = takes part; additive float where one of them was; None for none.

    Raises:
        ValueError: another shape or type.
    """
    batch, h, n = heads
    found = []
    if attn_mask is not None:
        shapes = ((n, keys), (batch * h, n, keys))
        _check("attn_mask", attn_mask, shapes)
        found.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, h)))
    if key_padding_mask is not None:
        _check("key_padding_mask", key_padding_mask, ((keys,) if unbatched else (batch, keys),))
        padding = key_padding_mask.unsqueeze(0) if unbatched else key_padding_mask
        found.append(padding[:, None, None, :])
    if not found:
        return None
    if all(mask.dtype == torch.bool for mask in found):
        return ~found[0] if len(found) == 1 else ~(found[0] | found[1])
    return functools.reduce(torch.add, map(_additive, found))


def with_causal(mask: Tensor | None, n: int, m: int, device: torch.device) -> Tensor:
    """A mask (True = takes part, or additive) that also blocks key j for query i where j > i."""
    if mask is None:
        return torch.ones(n, m, dtype=torch.bool, device=device).tril()
    if mask.dtype == torch.bool:
        return mask.expand(*mask.shape[:-2], n, m).tril()
    return mask.masked_fill(torch.ones(n, m, dtype=torch.bool, device=device).triu(1), -math.inf)


def dot_weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """The weights (B, H, N, M) that torch's scaled_dot_product_attention does not return; 0 where no key takes part."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, scores.softmax(-1))


def _check(name: str, mask: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} must be bool, True = blocked, or additive float; got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.get_default_dtype()).masked_fill(mask, -math.inf)

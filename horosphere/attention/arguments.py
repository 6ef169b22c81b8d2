"""The arguments of attention, checked, and brought to the form that the kernels take."""

from __future__ import annotations

import math
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._points import as_points
from horosphere.kernels.inputs import WEIGHTS, broadcast
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.pairwise import PRECISIONS


class Arguments(NamedTuple):
    """What a call means once its arguments are checked. Batch dimensions are those of the result."""

    query: Tensor  # (*batch, N, D)
    key: Tensor  # (*batch or 1, M, D)
    value: Tensor  # (*batch or 1, M, Dv)
    eps: float | Tensor
    power: float | Tensor
    bias: Tensor | None  # bool or floating, broadcastable to (*batch, N, M)
    causal: int | None
    heads: tuple[int, int] | None  # with grouped queries: key heads and queries of each, two dimensions of the batch

    def joined(self, t: Tensor, own: int) -> Tensor:
        """t (*batch, its ``own`` dimensions) with the two dimensions of grouped heads made one again."""
        return t if self.heads is None else t.flatten(-2 - own, -1 - own)


class Options(TypedDict, total=False):
    """The keywords that every attention function takes; their meaning is that of geodesic_attention."""

    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    eps: float | Tensor
    power: float | Tensor
    weight: str
    value_manifold: geoopt.Manifold | None
    precision: str
    impl: str


class Rule(TypedDict):
    """The keywords that a layer decides."""

    eps: float | Tensor
    power: float | Tensor
    weight: str
    precision: str


def checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    eps: float | Tensor,
    power: float | Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    weight: str = "inverse",
    precision: str = "auto",
    batched_curvature: bool = False,
) -> Arguments:
    """ValueError or TypeError for what does not fit, naming the argument."""
    query, key, value = check_points(query, key, value)
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"every key needs a value: key has shape {tuple(key.shape)}, value {tuple(value.shape)}")
    if weight not in (*WEIGHTS, "dot"):
        raise ValueError(f"weight must be one of {(*WEIGHTS, 'dot')}, got {weight!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and less than 1, got {dropout_p}")

    heads = None
    if enable_gqa:
        key, value, heads = _grouped(query, key, value, batched_curvature)
        if heads is not None:
            query = query.unflatten(-3, heads)
    dtype = torch.promote_types(query.dtype, key.dtype)
    query, key = query.to(dtype), key.to(dtype)
    batch = _batch({"query": query, "key": key, "value": value})
    query = query.expand(*batch, *query.shape[-2:])
    n, m = query.shape[-2], key.shape[-2]
    bias, causal = _mask(attn_mask, is_causal, n, m)
    if bias is not None:
        bias = _fitted_mask(bias, heads, batch, n, m, query.device)
    eps, power = (_scalar(s, name, heads, batch) for s, name in ((eps, "eps"), (power, "power")))
    return Arguments(query, key, value, eps, power, bias, causal, heads)


def check_points(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sequences as floating tensors, of points of one size on one device."""
    query, key, value = as_points(query, "query"), as_points(key, "key"), as_points(value, "value")
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() < 2:
            raise ValueError(f"{name} must hold a sequence of vectors, shape (..., length, D); got {tuple(t.shape)}")
        if t.device != query.device:
            raise ValueError(f"query is on {query.device} and {name} on {t.device}; move them to one device")
    if not query.shape[-1]:
        raise ValueError(f"query must hold points of at least one number, got shape {tuple(query.shape)}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must hold points of one size, got shapes {tuple(query.shape)} and {tuple(key.shape)}"
        )
    return query, key, value


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, batched_curvature: bool
) -> tuple[Tensor, Tensor, tuple[int, int] | None]:
    if any(t.dim() < 3 for t in (query, key, value)):
        raise ValueError("enable_gqa needs a head dimension: query, key and value of shape (..., H, length, D)")
    h, kv = query.shape[-3], key.shape[-3]
    if value.shape[-3] != kv or not kv or h % kv:
        shapes = [tuple(t.shape) for t in (query, key, value)]
        raise ValueError(f"enable_gqa needs query heads that are a multiple of the key and value heads, got {shapes}")
    if h == kv:
        return key, value, None
    if batched_curvature:  # a curvature of every query head: each needs keys of its own
        return key.repeat_interleave(h // kv, -3), value.repeat_interleave(h // kv, -3), None
    return key.unsqueeze(-3), value.unsqueeze(-3), (kv, h // kv)


def _batch(tensors: dict[str, Tensor]) -> torch.Size:
    try:
        return broadcast(*(t.shape[:-2] for t in tensors.values()))
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"batch dimensions do not broadcast: {shapes}") from error


def _mask(attn_mask, is_causal: bool, n: int, m: int) -> tuple[Tensor | None, int | None]:
    if attn_mask is None:
        return None, 0 if is_causal else None
    if type(attn_mask).__name__ == "CausalBias":
        if is_causal:
            raise ValueError("attn_mask is a causal mask already: leave out is_causal=True")
        return None, _causal_offset(attn_mask, n, m)
    if not isinstance(attn_mask, Tensor) or not (attn_mask.dtype == torch.bool or attn_mask.dtype.is_floating_point):
        kind = attn_mask.dtype if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
        raise TypeError(f"attn_mask must be a bool tensor (True takes part) or a floating one, added; got {kind}")
    return attn_mask, 0 if is_causal else None


def _causal_offset(mask, n: int, m: int) -> int:
    from torch.nn.attention.bias import CausalVariant  # here, because it imports triton

    if (mask.seq_len_q, mask.seq_len_kv) != (n, m):
        raise ValueError(
            f"attn_mask is causal for {mask.seq_len_q} queries and {mask.seq_len_kv} keys, but there are {n} and {m}"
        )
    return m - n if mask.variant == CausalVariant.LOWER_RIGHT else 0


def _fitted_mask(
    mask: Tensor, heads: tuple[int, int] | None, batch: torch.Size, n: int, m: int, device: torch.device
) -> Tensor:
    if mask.device != device:
        raise ValueError(f"query is on {device} and attn_mask on {mask.device}; move them to one device")
    shape, fitted = tuple(mask.shape), mask
    if heads is not None and mask.dim() > 2:
        joined = (*batch[:-2], heads[0] * heads[1])
        fitted = mask.unflatten(-3, heads) if mask.shape[-3] == joined[-1] else mask.unsqueeze(-3)
    try:
        fits = torch.broadcast_shapes(fitted.shape, (*batch, n, m)) == (*batch, n, m)
    except RuntimeError:
        fits = False
    if not fits or (heads is not None and mask.dim() > 2 and mask.shape[-3] not in (1, heads[0] * heads[1])):
        wanted = (*batch, n, m) if heads is None else (*batch[:-2], heads[0] * heads[1], n, m)
        raise ValueError(f"attn_mask of shape {shape} does not broadcast to {tuple(wanted)}")
    return fitted


def _scalar(number, name: str, heads: tuple[int, int] | None, batch: torch.Size) -> float | Tensor:
    """eps or power: a positive number, or a tensor () or (H,)."""
    if not isinstance(number, Tensor):
        if not isinstance(number, (int, float)) or not (number > 0 and math.isfinite(number)):
            raise ValueError(f"{name} must be a positive finite number or a tensor () or (heads,), got {number!r}")
        if name == "power" and number > _numerics.MAX_POWER:
            raise ValueError(f"power must be at most {_numerics.MAX_POWER:g}, got {number!r}")
        return float(number)
    if not number.dtype.is_floating_point:
        raise TypeError(f"{name} must be a number or a floating point tensor, got {number.dtype}")
    count = (heads[0] * heads[1] if heads else batch[-1]) if batch else None
    if number.dim() > 1 or (number.dim() and number.shape[0] not in (1, count)):
        raise ValueError(f"{name} must be a number or of shape () or ({count},), one a head; got {tuple(number.shape)}")
    if heads is not None and number.dim() and number.shape[0] > 1:
        return number.unflatten(0, heads)
    return number

"""Geodesic attention as an attention implementation of Hugging Face transformers.

.. code-block:: python

    hs.integrations.transformers.register("horosphere:poincare", hs.PoincareBall(), eps=1e-2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="horosphere:poincare")

Both the attention *and* its mask function are registered: an attention without a mask function gets no mask at all, and
a causal model then reads the future without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horosphere.attention.functional import geodesic_attention
from horosphere.attention.points import MAX_RADIUS, into_manifold
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import check_manifold

# arguments by which some models change the scores, and which a distance has no place for
_UNSUPPORTED = ("softcap", "position_bias", "s_aux")
_registered: set[str] = set()


def register(
    name: str,
    manifold: geoopt.Manifold,
    *,
    eps: float | Tensor = 1e-3,
    power: float | Tensor = 1.0,
    weight: str = "inverse",
    max_radius: float = MAX_RADIUS,
    precision: str = "auto",
) -> None:
    """Make ``attn_implementation=name`` mean attention by distance on a manifold.

    A head's query and key become points by :func:`horosphere.attention.into_manifold`; values are averaged linearly.
    The model's own scaling of dot products has no meaning here and is left out. A weight is then
    ``(d^2 + eps)^-power``, or what ``weight`` says, normalised over the keys.

    A name that was registered here before is given the new meaning, for models that already use it too.

    Args:
        name: such as "horosphere:poincare".
        manifold: any geoopt.Manifold whose points are vectors. A learnable curvature belongs to no model: give it to
            the optimizer yourself.
        eps, power, weight, precision: as in :func:`horosphere.attention.geodesic_attention`.
        max_radius: sqrt|kappa| times the largest distance of a point from the origin.

    Raises:
        ImportError: transformers is not installed, or older than its attention interface.
        ValueError: the name belongs to transformers or to someone else.
        TypeError: no manifold.
    """
    attentions, masks, sdpa_mask = _interfaces()
    check_manifold(manifold)
    if name not in _registered and (name == "eager" or name in attentions or name in masks):
        raise ValueError(f"{name!r} is already an attention implementation: choose another name")

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        asked = [other for other in _UNSUPPORTED if others.get(other) is not None]
        if asked:
            raise ValueError(f"{name} has no {asked[0]}: this model needs another attn_implementation")
        if torch.is_autocast_enabled(query.device.type):
            query, key, value = query.float(), key.float(), value.float()
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if weight != "dot":
            query, key = (into_manifold(x, manifold, max_radius=max_radius) for x in (query, key))
        out = geodesic_attention(
            query,
            key,
            value,
            manifold,
            attn_mask=attention_mask,
            dropout_p=dropout,
            # the mask function leaves the mask out where it would be the causal one, aligned upper left
            is_causal=bool(is_causal) and attention_mask is None and query.shape[2] > 1,
            enable_gqa=query.shape[1] != key.shape[1],
            eps=eps,
            power=power,
            weight=weight,
            precision=precision,
        )
        return out.transpose(1, 2).contiguous(), None

    attentions.register(name, attention)
    masks.register(name, sdpa_mask)
    _registered.add(name)


def unregister(name: str) -> None:
    """Take a name back; models that were built with it raise KeyError when they run.

    Raises ValueError where the name was not registered here.
    """
    if name not in _registered:
        raise ValueError(f"{name!r} was not registered here; registered are {sorted(_registered) or 'none'}")
    attentions, masks, _ = _interfaces()
    for interface in (attentions, masks):  # there is no public way to remove a name
        interface._global_mapping.pop(name, None)
    _registered.discard(name)


def _interfaces() -> tuple[Any, Any, Any]:
    """transformers' two registries and its mask of scaled_dot_product_attention (bool, True = takes part)."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            "the attention and mask interfaces of transformers are needed: pip install 'horosphere[transformers]'"
        ) from error
    return AttentionInterface(), AttentionMaskInterface(), sdpa_mask

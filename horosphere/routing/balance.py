"""Whether the prototypes share the work: loads, and a loss that spreads them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["balance_loss", "load"]


def load(indices: Tensor, prototypes: int, weights: Tensor | None = None) -> Tensor:
    """Share (E,) of all choices that fell on each prototype; 1/E each is perfect balance, a single 1 is collapse.

    Args:
        indices: (..., K) of the chosen.
        prototypes: E.
        weights: (..., K); choices of weight 0 do not count.
    """
    ones = torch.ones_like(indices, dtype=torch.float32) if weights is None else (weights > 0).float()
    counts = torch.zeros(prototypes, device=indices.device).index_add_(0, indices.flatten(), ones.flatten())
    return counts / counts.sum().clamp(min=1.0)


def balance_loss(probabilities: Tensor, indices: Tensor) -> Tensor:
    r""":math:`E \sum_e f_e p_e`: 1 at perfect balance, E where everything goes to one prototype.

    f is the load (a count, without gradient) and p the mean of the *full* distribution over all prototypes, so also
    prototypes that were not chosen are drawn in. A product of means: smooth everywhere, at perfect balance too.

    Args:
        probabilities: (..., N, E), rows of sum 1.
        indices: (..., N, K) of the chosen.

    Raises:
        ValueError: no rows.

    Source: Fedus, Zoph and Shazeer (2022), Switch transformers, equation 4.
    """
    count = probabilities.shape[-1]
    if probabilities.numel() == 0 or indices.numel() == 0:
        raise ValueError(f"balance needs routed tokens; got probabilities of shape {tuple(probabilities.shape)}")
    share = probabilities.flatten(0, -2).mean(0)
    return count * (load(indices, count).to(share.dtype) * share).sum()

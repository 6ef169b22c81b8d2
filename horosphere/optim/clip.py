"""Clipping gradients, sparse ones included."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from horosphere import _numerics

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients in place to a joint Euclidean norm of at most ``max_norm``; returns the norm
    before.

    ``torch.nn.utils.clip_grad_norm_`` for dense and sparse gradients together (torch's raises on sparse
    ones). Duplicate rows of a sparse gradient are summed first, so the norm is that of the dense gradient.
    The factor is ``min(1, max_norm / (norm + _numerics.CLIP_SUMMAND))``, as torch's.

    Args:
        parameters: a parameter or parameters; those without a gradient are left out.
        max_norm: largest norm allowed, >= 0.

    Raises:
        ValueError: ``max_norm`` is negative or NaN.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0; got {max_norm}")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    values = []
    for p in parameters:
        if p.grad is None:
            continue
        if p.grad.is_sparse:
            p.grad = p.grad.coalesce()
            values.append(p.grad.values())
        else:
            values.append(p.grad)
    if not values:
        return torch.tensor(0.0, device="cpu")
    norm = torch.nn.utils.get_total_norm(values)
    factor = (max_norm / (norm + _numerics.CLIP_SUMMAND)).clamp(max=1.0)
    for value in values:
        value.mul_(factor.to(value.device, value.dtype))
    return norm

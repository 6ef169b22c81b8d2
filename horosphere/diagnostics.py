"""What happens inside a network, in numbers: ranks, and how tokens become alike with depth."""

from __future__ import annotations

import torch
from torch import Tensor

NORMS = ("frobenius", "composite")


def numerical_rank(a: Tensor, rtol: float = 1e-6) -> Tensor:
    """Number of singular values of a (..., N, M) above ``rtol`` times the largest, (...), worked in float64."""
    values = torch.linalg.svdvals(a.to(torch.float64))
    if not values.shape[-1]:
        return torch.zeros(values.shape[:-1], dtype=torch.int64, device=a.device)
    return (values > rtol * values[..., :1]).sum(-1)


def effective_rank(a: Tensor) -> Tensor:
    r"""exp of the entropy of the normalised singular values of a (..., N, M): from 1 to min(N, M); 0 for a zero matrix.

    Source: Roy and Vetterli (2007), The effective rank.
    """
    values = torch.linalg.svdvals(a.to(torch.float64))
    total = values.sum(-1, keepdim=True)
    p = values / torch.where(total > 0, total, 1.0)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    return torch.where(total.squeeze(-1) > 0, entropy.exp(), 0.0).to(a.dtype)


def rank_residual(x: Tensor, norm: str = "frobenius") -> Tensor:
    r"""How far tokens are from being all alike: :math:`|X - 1 \bar x^T| / |X|`, :math:`\bar x` their mean.

    0 for a matrix of equal rows; a stack in which it goes to 0 with depth collapses to rank one.

    Args:
        x: (..., N, D), a row a token.
        norm: "frobenius", or "composite" :math:`\sqrt{|X|_1 |X|_\infty}` with the largest absolute column and row sums.

    Returns:
        (...) ; 0 for a zero matrix.

    Raises ValueError for another norm.

    Source: Dong, Cordonnier and Loukas (2021), Attention is not all you need: pure attention loses rank doubly
    exponentially with depth; there with the composite norm.
    """
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {NORMS}, got {norm!r}")
    rest = x - x.mean(-2, keepdim=True)
    if norm == "frobenius":
        above, below = (torch.linalg.matrix_norm(t) for t in (rest, x))
    else:
        above, below = ((_column_sums(t) * _column_sums(t.mT)).sqrt() for t in (rest, x))
    return above / torch.where(below > 0, below, 1.0)


def _column_sums(x: Tensor) -> Tensor:
    return x.abs().sum(-2).amax(-1)

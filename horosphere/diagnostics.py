"""What happens inside a network, in numbers: ranks, how tokens become alike with depth, and whether keys are apart."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.pairwise import knn

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


def retrieval_margin(key: Tensor, manifold: geoopt.Manifold, eps: float | Tensor) -> Tensor:
    r"""Whether eps is small enough for inverse-distance attention to tell each key from all others.

    .. math:: r_j = \varepsilon \frac{M - 1}{\min_{l \ne j} d(k_j, k_l)^2}

    A query at key j gives the others at most the share r_j of the weight that it gives to j. From r_j = 1/2 on
    retrieval of that key degrades; equal keys have infinity.

    Args:
        key: points (..., M, D), M >= 2.
        manifold: as in :func:`horosphere.knn`.
        eps: > 0, a number or a tensor that broadcasts against (..., M): (H, 1) for one a head.

    Returns:
        (..., M) in the type of the keys.

    Raises ValueError for fewer than two keys or an eps that is not positive.

    Source: the bound of retrieval in docs/attention.md.
    """
    if key.dim() < 2 or key.shape[-2] < 2:
        raise ValueError(f"key must hold at least two points, shape (..., M, D); got {tuple(key.shape)}")
    if not bool((torch.as_tensor(eps, device="cpu") > 0).all()):
        raise ValueError(f"eps must be positive, got {eps}")
    nearest = knn(key, key, manifold, k=2).distances[..., 1]
    return eps * (key.shape[-2] - 1) / nearest**2


def _column_sums(x: Tensor) -> Tensor:
    return x.abs().sum(-2).amax(-1)

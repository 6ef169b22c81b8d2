"""Landmarks taken from points, and dense attention approximated through them (Nystrom)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from horosphere._points import as_points
from horosphere.attention.inverse import by_head, checked_key_mask, checked_tokens, safe_divide, with_ones
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.pairwise import cdist

METHODS = ("k-means++", "farthest", "random")


class NystromAttention(NamedTuple):
    """What :func:`nystrom_attention` found.

    Attributes:
        out: (..., N, Dv).
        smallest_denominator: (...), the smallest denominator of a query. The dense one is positive; where this is not,
            or is tiny beside the others, landmarks are too few and out is not to be used.
    """

    out: Tensor
    smallest_denominator: Tensor


@torch.no_grad()
def choose_landmarks(
    points: Tensor,
    count: int,
    manifold: geoopt.Manifold,
    method: str = "k-means++",
    *,
    key_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Some of the points, spread out so that every point has one near it.

    "k-means++" draws the first at random and each next one with probability :math:`\propto \min_l d(x, a_l)^2`;
    "farthest" starts with the first point and takes each next one where that minimum is largest; "random" draws
    without replacement. O(M count) distances.

    Args:
        points: (..., M, D). count: 1 <= count <= M. manifold: any geoopt.Manifold.
        method: one of the three.
        key_mask: bool, broadcasts to (..., M), True = may be chosen; at least ``count`` of every batch entry.
        generator: of the random numbers.

    Returns:
        (..., count, D), without gradient.

    Raises:
        ValueError: count or method out of range, too few points that may be chosen.

    Sources: Arthur and Vassilvitskii (2007), k-means++: the advantages of careful seeding; Gonzalez (1985), Clustering
    to minimize the maximum intercluster distance.
    """
    points = as_points(points, "points")
    if points.dim() < 2:
        raise ValueError(f"points must be rows, shape (..., M, D); got shape {tuple(points.shape)}")
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    m = points.shape[-2]
    mask = checked_key_mask(key_mask, points)
    fewest = m if mask is None or not mask.numel() else int(mask.sum(-1).min())
    if not 1 <= count <= fewest:
        raise ValueError(f"count must lie between 1 and the number of points to choose from, {fewest}; got {count}")
    allowed = points.new_ones(points.shape[:-1], dtype=torch.float64)
    if mask is not None:
        allowed = allowed * mask

    def draw(weights: Tensor, n: int) -> Tensor:
        flat = torch.multinomial(weights.reshape(-1, m), n, generator=generator)
        return flat.view(*weights.shape[:-1], n)

    if method == "random" or not points.numel():
        return _rows(points, draw(allowed, count)) if points.numel() else points[..., :count, :]
    chosen = draw(allowed, 1) if method == "k-means++" else allowed.argmax(-1, keepdim=True)
    found, nearest = [chosen], torch.full_like(allowed, torch.inf)
    while len(found) < count:
        allowed = allowed.scatter(-1, chosen, 0.0)
        d2 = cdist(points, _rows(points, chosen), manifold, squared=True).squeeze(-1)
        nearest = torch.minimum(nearest, d2.to(torch.float64))
        # copies of chosen points come last, all alike
        weights = torch.where(allowed > 0, nearest, 0.0)
        weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, allowed)
        chosen = draw(weights, 1) if method == "k-means++" else weights.argmax(-1, keepdim=True)
        found.append(chosen)
    return _rows(points, torch.cat(found, -1))


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    landmarks: Tensor,
    manifold: geoopt.Manifold,
    *,
    eps: float | Tensor = 1e-3,
    power: float | Tensor = 1.0,
    key_mask: Tensor | None = None,
    rtol: float = 1e-10,
) -> NystromAttention:
    r"""Dense inverse-distance attention with its kernel matrix replaced by the Nystrom approximation.

    .. math:: \tilde K = K_{nm} K_{mm}^{+} K_{mn},\quad K_{ij} = (d(x_i, x_j)^2 + \epsilon)^{-p},\qquad
        o_i = \frac{\sum_j \tilde K_{ij} v_j}{\sum_j \tilde K_{ij}}

    Exact when the landmarks are all the keys, in O((N + M) m D + m^3) otherwise. Its weights may be negative, and on
    sphere and ball K is indefinite: the pseudo-inverse drops eigenvalues below ``rtol`` times the largest magnitude,
    whatever their sign, and the smallest denominator is reported. Not causal.

    Args:
        query: points (..., H, N, D). key: points (..., H, M, D). value: (..., H, M, Dv).
        landmarks: points (..., H, m, D), such as :func:`choose_landmarks` takes from the keys.
        manifold: any geoopt.Manifold.
        eps, power: positive, () or (H,).
        key_mask: bool, broadcasts to (..., H, M), True = takes part.
        rtol: relative size below which eigenvalues count as 0.

    Returns:
        :class:`NystromAttention`, worked in float64, in the type of the values; differentiable.

    Raises:
        ValueError: shapes that do not fit, eps or power <= 0. TypeError: no tensors, no manifold.

    Sources: Drineas and Mahoney (2005), On the Nystrom method; Xiong et al. (2021), Nystromformer.
    """
    query, key, value = checked_tokens(query, key, value, eps, power)
    _, landmarks, _ = checked_tokens(query, landmarks, landmarks, eps, power)
    mask = checked_key_mask(key_mask, key)
    dtype = value.dtype
    wide = torch.float64
    query, key, landmarks, value = (t.to(wide) for t in (query, key, landmarks, value))
    if mask is not None:
        key = torch.where(mask.unsqueeze(-1), key, landmarks[..., :1, :].detach())
        value = torch.where(mask.unsqueeze(-1), value, 0.0)

    def kernel(x: Tensor) -> Tensor:
        return (cdist(x, landmarks, manifold, squared=True) + by_head(eps, wide)) ** -by_head(power, wide)

    rows = with_ones(value)
    if mask is not None:
        rows = rows * mask.unsqueeze(-1)
    inner = torch.linalg.pinv(kernel(landmarks), rtol=rtol, hermitian=True)
    both = kernel(query) @ (inner @ (kernel(key).mT @ rows))
    den = both[..., -1]
    out = safe_divide(both[..., :-1], both[..., -1:])
    smallest = den.amin(-1) if den.shape[-1] else den.sum(-1)
    return NystromAttention(out.to(dtype), smallest.to(dtype))


def _rows(points: Tensor, index: Tensor) -> Tensor:
    return torch.gather(points, -2, index.unsqueeze(-1).expand(*index.shape, points.shape[-1]))

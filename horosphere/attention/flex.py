"""Attention by distance on torch's flex_attention: the same weights as a score function."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.attention.arguments import check_points
from horosphere.kernels.reference.sqdist import arc2_of
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import chords


class FlexInputs(NamedTuple):
    """What flex_attention takes: ``flex_attention(query, key, value, score_mod=score_mod, scale=scale)``."""

    query: Tensor
    key: Tensor
    score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    scale: float


def flex_inputs(query: Tensor, key: Tensor, manifold: geoopt.Manifold, eps: float | Tensor) -> FlexInputs:
    r"""Inverse-distance attention as a softmax of scores :math:`-\log(d(q_i, k_j)^2 + \varepsilon)`.

    Queries and keys become the augmented features of the chord form, whose product is the squared chord, so that the
    score function is one arc and one logarithm.

    Args:
        query: points (B, H, N, D).
        key: points (B, H, M, D).
        manifold: of one chord: Euclidean, a ball, sphere, hyperboloid or stereographic model, Scaled, geoopt's own.
        eps: > 0, a number or a tensor of shape () or (H,).

    Returns:
        query (B, H, N, F + 2), key (B, H, M, F + 2), score_mod and scale, in float32 (float64 for float64 points). The
        precision is that of the product form ("fast"): keep eps above its error, ``4 sqrt(F) 2^-24`` times the squared
        size of the features. Features may be padded with zeros to a width that a kernel wants. Without a GPU
        flex_attention has no backward pass; :func:`geodesic_attention` has.

    Raises:
        ValueError: products, manifolds with ``dist`` alone, shapes that do not fit, eps that is not positive.

    Source: Dong et al. (2024), Flex Attention: a programming model for generating optimized attention kernels.
    """
    check_points(query, key, key)
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(f"flex_attention takes (B, H, length, D); got {tuple(query.shape)} and {tuple(key.shape)}")
    if not isinstance(eps, Tensor) and not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}")
    xs, ys = chords(manifold, query), chords(manifold, key)
    if xs is None or ys is None or len(xs) != 1:
        what = "has dist alone" if xs is None or ys is None else f"is a product of {len(xs)} parts"
        raise ValueError(f"flex_inputs needs a manifold of one chord; {type(manifold).__name__} {what}")
    (x,), (y,) = xs, ys
    dtype = _numerics.fast_dtype(torch.promote_types(query.dtype, key.dtype))
    fx, fy = x.features.to(dtype), y.features.to(dtype)
    nx, ny = (fx * fx).sum(-1, keepdim=True), (fy * fy).sum(-1, keepdim=True)
    if x.time_dims:
        end = 2 / _per_head(x.kappa, fx) * torch.ones_like(nx)
        fx = torch.cat((2 * fx[..., : x.time_dims], -2 * fx[..., x.time_dims :], end, torch.zeros_like(nx)), -1)
        fy = torch.cat((fy, torch.ones_like(ny), torch.zeros_like(ny)), -1)
    else:
        fx = torch.cat((-2 * fx, nx, torch.ones_like(nx)), -1)
        fy = torch.cat((fy, torch.ones_like(ny), ny), -1)
    if x.weight is not None and y.weight is not None:
        fx, fy = fx * x.weight.to(dtype).unsqueeze(-1), fy * y.weight.to(dtype).unsqueeze(-1)
    kappa = x.kappa

    def score_mod(score, b, h, i, j):
        k = kappa[h] if isinstance(kappa, Tensor) and kappa.dim() else kappa
        e = eps[h] if isinstance(eps, Tensor) and eps.dim() else eps
        return -torch.log(arc2_of(score, k) + e).to(score.dtype)

    return FlexInputs(fx, fy, score_mod, 1.0)


def _per_head(kappa: float | Tensor, like: Tensor) -> float | Tensor:
    if not isinstance(kappa, Tensor):
        return kappa
    kappa = kappa.to(like.dtype)
    return kappa[..., None, None] if kappa.dim() else kappa

"""From the numbers that a projection gives to points of a manifold: rotary positions, then the map."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere._points import as_points
from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve

# sqrt|kappa| times the radius of mapped points. Float32 distances hold to radius 12; 4 reaches norm 0.964 of the ball,
# which bfloat16 can store too.
MAX_RADIUS = 4.0


def stored_size(manifold: geoopt.Manifold, n: int) -> int:
    """How many numbers store the point that n free numbers become: n, on the hyperboloid n + 1.

    Raises ValueError where the points are no vectors, or a product takes another count than n; TypeError for anything
    but a manifold.
    """
    resolve(manifold)
    if manifold.ndim != 1:
        raise ValueError(f"attention takes points that are vectors (ndim 1), {manifold} has ndim {manifold.ndim}")
    return hooks.size_from_vectors(manifold, n)


def into_manifold(x: Tensor, manifold: geoopt.Manifold, *, max_radius: float | Tensor = MAX_RADIUS) -> Tensor:
    r"""Points of a manifold from free numbers: the tangent vector x / sqrt(n) at the origin, walked along.

    With l = |x| / sqrt(n), about 1 for normal numbers:

    - flat space: x / sqrt(n);
    - ball, projected sphere, hyperboloid: exp at the origin of the tangent vector in direction x of length
      :math:`R\tanh(l/R)`, R = max_radius / sqrt|kappa|: smooth, and no point lies farther from the origin than R
      (kappa > 0: length l, unbounded);
    - sphere: the direction of x;
    - products part by part, with each part's own n; Scaled as its base;
    - any other manifold: its own ``from_vectors(x, max_radius)``, else its ``projx`` of x / sqrt(n).

    Args:
        x: (..., N, n).
        manifold: any geoopt.Manifold whose points are vectors.
        max_radius: sqrt|kappa| times the largest distance from the origin, > 0; a tensor broadcasts against (..., N, 1)
            and bounds every token for itself.

    Returns:
        (..., N, D) in the type of x, D = n, on the hyperboloid n + 1.

    Raises:
        ValueError: the size of x does not fit the parts of a product.
    """
    return hooks.from_vectors(manifold, as_points(x, "x"), max_radius)


def rotate(x: Tensor, start: int, slices: list[slice], base: float) -> Tensor:
    r"""Rotary positions: token t = start, start + 1, ... turned by the angles :math:`t\,\text{base}^{-2i/n}`.

    Each slice of x (..., N, n) is turned by itself, its coordinates i and i + n/2 as a pair. A rotation about the
    origin is an isometry of flat space, ball, sphere and hyperboloid: distances depend on t through differences only.

    Source: Su et al. (2021), RoFormer.
    """
    # in float64: a float32 angle of position 10^5 is off by 1e-2
    t = torch.arange(start, start + x.shape[-2], device=x.device, dtype=torch.float64).unsqueeze(-1)
    turned = []
    for part in slices:
        piece = x[..., part]
        half = piece.shape[-1] // 2
        rate = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        cosine, sine = (f(t * rate).to(x.dtype) for f in (torch.cos, torch.sin))
        a, b = piece[..., :half], piece[..., half:]
        turned += [a * cosine - b * sine, a * sine + b * cosine]
    return torch.cat(turned, -1)

"""From the numbers that a projection gives to points of a manifold: rotary positions, then the map."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._points import as_points
from horosphere.manifolds import Euclidean, Lorentz, Product, Scaled, Sphere, Stereographic
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve

# sqrt|kappa| times the radius of mapped points. Float32 distances hold to radius 12; 4 reaches norm 0.964 of the ball,
# which bfloat16 can store too.
MAX_RADIUS = 4.0


def stored_size(manifold: geoopt.Manifold, n: int) -> int:
    """How many numbers store the point that n free numbers become: n, on the hyperboloid n + 1.

    Raises ValueError where the points are no vectors, or a product takes another count than n.
    """
    resolve(manifold)  # TypeError for what is no manifold
    if manifold.ndim != 1:
        raise ValueError(f"attention takes points that are vectors (ndim 1), {manifold} has ndim {manifold.ndim}")
    known = _unscaled(manifold)
    if not isinstance(known, Product):
        return n + isinstance(known, Lorentz)
    free = _free_size(known, known.n_elements)
    if free != n:
        raise ValueError(
            f"{known} takes {free} free numbers a point (its stored sizes, less 1 for each hyperboloid's time), "
            f"and a head gives {n}: choose embed_dim = {free} * num_heads, or other sizes of the parts"
        )
    return known.n_elements


def factor_slices(manifold: geoopt.Manifold, n: int) -> list[slice]:
    """Where among n free numbers each factor of a product lies; one slice for anything else."""
    known = _unscaled(manifold)
    if not isinstance(known, Product):
        return [slice(0, n)]
    return [
        slice(start + inner.start, start + inner.stop)
        for part, start, size in _parts(known)
        for inner in factor_slices(part, size)
    ]


def _unscaled(manifold: geoopt.Manifold) -> geoopt.Manifold:
    known = resolve(manifold)[0]
    return _unscaled(known.base) if isinstance(known, Scaled) else known


def _free_size(manifold: geoopt.Manifold, stored: int) -> int:
    known = _unscaled(manifold)
    if isinstance(known, Product):
        return sum(size for _, _, size in _parts(known))
    return stored - isinstance(known, Lorentz)


def _parts(product: Product) -> list[tuple[geoopt.Manifold, int, int]]:
    """Every part with the start and the number of its free numbers."""
    found, start = [], 0
    for part, stored in zip(product.manifolds, product.sizes, strict=True):
        size = _free_size(part, stored)
        found.append((part, start, size))
        start += size
    return found


def into_manifold(x: Tensor, manifold: geoopt.Manifold, *, max_radius: float | Tensor = MAX_RADIUS) -> Tensor:
    r"""Points of a manifold from free numbers: the tangent vector x / sqrt(n) at the origin, walked along.

    With l = |x| / sqrt(n), about 1 for normal numbers:

    - flat space: x / sqrt(n);
    - ball, projected sphere, hyperboloid: exp at the origin of the tangent vector in direction x of length
      :math:`R\tanh(l/R)`, R = max_radius / sqrt|kappa|: smooth, and no point lies farther from the origin than R
      (kappa > 0: length l, unbounded);
    - sphere: the direction of x;
    - products part by part, with each part's own n; Scaled as its base;
    - any other manifold: its ``projx`` of x / sqrt(n).

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
    x = as_points(x, "x")
    known = resolve(manifold)[0]
    if isinstance(known, Scaled):
        return into_manifold(x, known.base, max_radius=max_radius)
    if isinstance(known, Product):
        stored_size(known, x.shape[-1])
        parts = _parts(known)
        return torch.cat([into_manifold(x[..., i : i + n], m, max_radius=max_radius) for m, i, n in parts], -1)
    scale = x.shape[-1] ** -0.5
    if isinstance(known, Euclidean):
        return scale * x
    if not isinstance(known, (Sphere, Stereographic, Lorentz)):
        return known.projx(scale * x)
    # a point is x times a number: only lengths go through the maps of the manifold and float64
    wide = x.to(_numerics.fast_dtype(x.dtype))
    norm = _numerics.safe_sqrt((wide * wide).sum(-1, keepdim=True)).to(torch.float64)
    kappa = torch.as_tensor(known._kappa_at(x), dtype=torch.float64, device=x.device)
    flat = norm == 0
    if isinstance(known, Sphere):
        origin = known.origin(*x.shape[:-2], 1, x.shape[-1], dtype=x.dtype, device=x.device)
        ratio = torch.where(flat, 0.0, kappa.rsqrt() / torch.where(flat, 1.0, norm))
        return torch.where(flat, origin, (wide * ratio.to(wide.dtype)).to(x.dtype))
    length = scale * norm
    length = length * _numerics.tanh_ratio(kappa.clamp(max=0.0) * length * length / max_radius**2)
    if isinstance(known, Stereographic):  # whose metric at the origin is 4 I
        reached = known.projx(known.expmap0(length / 2).to(x.dtype)).to(torch.float64)
        ratio = torch.where(flat, scale / 2, reached / torch.where(flat, 1.0, norm))
        return (wide * ratio.to(wide.dtype)).to(x.dtype)
    reached = known.expmap0(torch.nn.functional.pad(length, (1, 0)).to(x.dtype))
    ratio = torch.where(flat, scale, reached[..., 1:].to(torch.float64) / torch.where(flat, 1.0, norm))
    return torch.cat((reached[..., :1], (wide * ratio.to(wide.dtype)).to(x.dtype)), -1)


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

"""Points at which distances are hard to compute: near pairs, the rim, far out, antipodes; all mixed in one batch.

Everything is drawn from one numpy generator, so that an example is a seed; points are rounded to the dtype under
test, and only pairs within the promise are compared (:func:`promised`).
"""

from __future__ import annotations

import numpy as np
import torch

import horosphere as hs

STEPS = (1.3e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.3)  # |x - y| / |x|
RIM = 1e-5
HYPERBOLOID_RADIUS = 12.0


def curvature_of(manifold) -> float:
    return manifold.kappa.item() if isinstance(manifold.kappa, torch.Tensor) else manifold.kappa


def _directions(rng: np.random.Generator, n: int, dim: int) -> np.ndarray:
    v = rng.normal(size=(n, dim))
    if dim > 1:  # some along an axis, as after an initialisation by hand
        v[: n // 4] = np.eye(dim)[rng.integers(0, dim, n // 4)] * rng.choice((-1.0, 1.0), (n // 4, 1))
    return v / np.linalg.norm(v, axis=-1, keepdims=True)


def _neighbours(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """One point beside each x: along the radius, across it, or anywhere; at relative distances STEPS."""
    n, dim = x.shape
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    radial = x / np.where(length > 0, length, 1.0)
    free = _directions(rng, n, dim)
    across = free - radial * (free * radial).sum(-1, keepdims=True)
    size = np.linalg.norm(across, axis=-1, keepdims=True)
    across = np.where(size > 1e-3, across / np.where(size > 1e-3, size, 1.0), radial)
    kind = rng.integers(0, 3, (n, 1))
    direction = np.where(kind == 0, radial, np.where(kind == 1, across, free)) * rng.choice((-1.0, 1.0), (n, 1))
    return x + length * np.resize(STEPS, (n, 1)) * direction


def _radii(rng: np.random.Generator, n: int, manifold) -> np.ndarray:
    """Euclidean norms in units of 1/sqrt|kappa| that cover the model: near 0, in the middle, at the limit of the
    promise.
    """
    third = n // 3
    small = 10.0 ** rng.uniform(-6, -1, third)
    if isinstance(manifold, hs.Lorentz):
        return np.concatenate((small, np.sinh(rng.uniform(0.1, HYPERBOLOID_RADIUS * 0.999, n - third))))
    middle = rng.uniform(0.1, 0.95, third)
    if curvature_of(manifold) < 0:
        margin = rng.uniform(-4.9, -1, n - 2 * third)
        margin[::2] = rng.uniform(-4.95, -4.7, len(margin[::2]))  # where an uncompensated 1 + kappa |x|^2 would show
        outer = 1 - 10.0**margin
    else:
        outer = 10.0 ** rng.uniform(-0.3, 3, n - 2 * third)
    return np.concatenate((small, middle, outer))


def points(manifold, rng: np.random.Generator, n: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """x, y (n, stored size): y_i is a hard partner of x_i, and the other pairs are a mixture. dim is the intrinsic
    dimension.
    """
    if isinstance(manifold, hs.Scaled):
        return points(manifold.base, rng, n, dim)
    if isinstance(manifold, hs.Product):
        parts = []
        for m, size in zip(manifold.manifolds, manifold.sizes, strict=True):
            x, y = points(m, rng, n, size - m.ambient_dim(0))
            order = rng.permutation(n)  # near in one part need not be near in another
            keep = slice(0, n // 2)
            order[keep] = np.arange(n)[keep]
            equal = rng.random(n) < 0.2
            parts.append((x, np.where(equal[:, None], x, y)[order]))
        return np.concatenate([p[0] for p in parts], -1), np.concatenate([p[1] for p in parts], -1)
    kappa = curvature_of(manifold)
    scale = abs(kappa) ** -0.5 if kappa else 1.0
    if isinstance(manifold, hs.Sphere):
        x = _directions(rng, n, dim + 1)
        y = _neighbours(rng, x) * rng.uniform(0.9, 1.1, (n, 1))
        y = np.where((np.arange(n) % 2 == 0)[:, None], y, -y)  # every second one near the antipode
        y[0], y[1] = x[0], -x[1]
        return scale * x, scale * y
    x = _directions(rng, n, dim) * _radii(rng, n, manifold)[:, None]
    y = _neighbours(rng, x)
    if kappa > 0 and not isinstance(manifold, hs.Sphere):
        far = -y / (y * y).sum(-1, keepdims=True)  # antipodes, and points near them
        y = np.where((np.arange(n) % 3 == 1)[:, None], far, y)
    y[0] = x[0]
    if isinstance(manifold, hs.Lorentz):

        def lift(v):
            return np.concatenate((np.sqrt(1 + (v * v).sum(-1, keepdims=True)), v), -1)

        x, y = lift(x), lift(y)
    return scale * x, scale * y


def stored(manifold, rng: np.random.Generator, n: int, dim: int, dtype: torch.dtype):
    """:func:`points` rounded to dtype, with the rows that rounding moved out of the promise pulled back."""
    x, y = (torch.from_numpy(p).to(dtype) for p in points(manifold, rng, n, dim))
    return x, y


def interior(manifold, x: torch.Tensor) -> torch.Tensor:
    """(N,) which points the promise covers."""
    if isinstance(manifold, hs.Scaled):
        return interior(manifold.base, x)
    if isinstance(manifold, hs.Product):
        parts = [interior(m, x[:, s]) for m, s in zip(manifold.manifolds, manifold.slices, strict=True)]
        return torch.stack(parts).all(0)
    root = abs(curvature_of(manifold)) ** 0.5
    wide = x.to(torch.float64)
    if isinstance(manifold, hs.Lorentz):
        return torch.asinh(root * wide[:, 1:].norm(dim=-1)) <= HYPERBOLOID_RADIUS
    if isinstance(manifold, hs.Stereographic) and curvature_of(manifold) < 0:
        return 1 - root * wide.norm(dim=-1) >= RIM
    return torch.ones(len(x), dtype=torch.bool)


def promised(manifold, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(N, M) which pairs the promise covers: interior points that are equal or at least 1e-6 |x| apart, in every
    part.
    """
    if isinstance(manifold, hs.Scaled):
        return promised(manifold.base, x, y)
    if isinstance(manifold, hs.Product):
        parts = [promised(m, x[:, s], y[:, s]) for m, s in zip(manifold.manifolds, manifold.slices, strict=True)]
        return torch.stack(parts).all(0)
    a, b = x.to(torch.float64), y.to(torch.float64)
    if isinstance(manifold, hs.Lorentz):
        a, b = a[:, 1:], b[:, 1:]
    if isinstance(manifold, hs.Sphere):
        a, b = (torch.nn.functional.normalize(v, dim=-1) for v in (a, b))
    delta = (a[:, None] - b[None]).norm(dim=-1)
    size = torch.maximum(a.norm(dim=-1)[:, None], b.norm(dim=-1)[None])
    equal = (x[:, None] == y[None]).all(-1)
    return (equal | (delta >= 1e-6 * size)) & interior(manifold, x)[:, None] & interior(manifold, y)[None]


def tolerance(manifold, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(N, M) the promised relative error: 1e-5, 1e-12, or 1e-11 with a float64 point beyond radius 10 of a
    hyperboloid.
    """
    out = torch.full((len(x), len(y)), 1e-5 if x.dtype == torch.float32 else 1e-12, dtype=torch.float64)
    if x.dtype == torch.float32:
        return out
    far = torch.stack([beyond_ten(manifold, p).any() & beyond_ten(manifold, p) for p in (x, y)])
    return torch.where(far[0][:, None] | far[1][None], 1e-11, out)


def beyond_ten(manifold, x: torch.Tensor) -> torch.Tensor:
    if isinstance(manifold, hs.Scaled):
        return beyond_ten(manifold.base, x)
    if isinstance(manifold, hs.Product):
        parts = [beyond_ten(m, x[:, s]) for m, s in zip(manifold.manifolds, manifold.slices, strict=True)]
        return torch.stack(parts).any(0)
    if isinstance(manifold, hs.Lorentz):
        return torch.asinh(abs(curvature_of(manifold)) ** 0.5 * x[:, 1:].to(torch.float64).norm(dim=-1)) > 10
    return torch.zeros(len(x), dtype=torch.bool)

"""Hyperbolic multidimensional scaling: points from their distances by one eigendecomposition."""

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor

from horosphere import _numerics
from horosphere.manifolds import Lorentz, convert
from horosphere.manifolds.hooks import own

__all__ = ["hyperbolic_mds", "hyperbolic_mds_spectrum", "hyperbolic_mds_start"]

# Any centre gives the right points; ten rounds bring it to within a unit of the fixed point, where rounding is least.
_CENTRINGS = 10
# exp(350) squared is the largest number of float64.
_FARTHEST = 350.0


def hyperbolic_mds(
    distances: np.ndarray, n_components: int, kappa: float = -1.0, *, model: str = "lorentz"
) -> np.ndarray:
    """The points of hyperbolic space, up to an isometry, that have the given distances.

    On the hyperboloid of curvature -1, cosh d_ij = t_i t_j - <s_i, s_j>: a matrix of one positive eigenvalue and, for
    points in general position of n dimensions, n negative ones, whose eigenvectors are the coordinates. Row and column
    i are divided by the cosh of i's distance to a centre first (a congruence: the signs stay), so that all entries are
    of order 1, nothing overflows, and a point at radius r is found to about e^r 1e-16. The eigenvectors are orthogonal,
    which puts the points' centre at the origin: sum_i t_i s_i / cosh^2 r_i = 0.

    Noise: an error e in d_ij is a relative error e tanh(d_ij) of its entry. As long as all errors together are small
    beside the smallest of the n negative eigenvalues (`hyperbolic_mds_spectrum` shows them), the points move in
    proportion to them; an eigenvalue that sinks into the noise takes its dimension with it. Distances that are not
    those of n-dimensional hyperbolic points give the points of the n lowest eigenvalues, moved to the hyperboloid along
    the time axis: a start for training, not the best fit of the distances.

    Args:
        distances: (N, N), symmetric, finite, zeros on the diagonal.
        n_components: n >= 1. Dimensions that the distances do not need are 0.
        kappa: curvature < 0 of the space.
        model: "lorentz" for (N, n + 1) points of the hyperboloid, "poincare" for (N, n) points of the ball.

    Raises:
        ValueError: for distances of another shape or kind, n_components < 1, kappa >= 0, an unknown model; for points
            too far out for float64 (beyond a radius of 350 / sqrt(-kappa)).

    Source: F. Sala, C. De Sa, A. Gu, C. Re, Representation tradeoffs for hyperbolic embeddings, 2018, section 4.
    """
    if model not in ("lorentz", "poincare"):
        raise ValueError(f'model must be "lorentz" or "poincare", got {model!r}')
    if n_components < 1:
        raise ValueError(f"n_components must be at least 1, got {n_components}")
    log_scale, matrix = _scaled_gram(distances, kappa)
    if log_scale.max() > _FARTHEST:
        raise ValueError(
            f"distances up to {np.max(distances):g} at kappa = {kappa} need coordinates whose squares float64 does not "
            "hold: divide them by a number"
        )
    values, vectors = np.linalg.eigh(matrix)
    # Ascending: the n most negative eigenvalues are space, whatever lies between them and the last is not hyperbolic.
    taken = min(n_components, len(values) - 1)
    space = np.zeros((len(matrix), n_components))
    space[:, :taken] = vectors[:, :taken] * np.sqrt(np.maximum(-values[:taken], 0)) * np.exp(log_scale)[:, None]
    time = np.sqrt(1 + np.sum(space**2, axis=1, keepdims=True))
    root = np.sqrt(-kappa)
    return np.concatenate([time, space], axis=1) / root if model == "lorentz" else space / (1 + time) / root


def hyperbolic_mds_spectrum(distances: np.ndarray, kappa: float = -1.0) -> np.ndarray:
    """(N,) eigenvalues, largest first, of the scaled matrix of `hyperbolic_mds`: how hyperbolic distances are.

    Points of n-dimensional hyperbolic space have one positive eigenvalue, at most n negative ones, and rounding.
    """
    return np.linalg.eigvalsh(_scaled_gram(distances, kappa)[1])[::-1]


def hyperbolic_mds_start(distances: np.ndarray, manifold, n_components: int, rng: np.random.Generator) -> Tensor:
    """Starting points for training: `hyperbolic_mds` in the coordinates of a hyperbolic manifold.

    Args:
        distances: (N, N), as for `hyperbolic_mds`.
        manifold: `PoincareBall`, `Lorentz` or `Stereographic` of negative curvature.
        n_components: dimension.
        rng: points that coincide are moved apart by 1e-6 at random, since no distance loss has a gradient there.

    Returns:
        (N, stored numbers) float64.

    Raises:
        ValueError: for another manifold, and as `hyperbolic_mds`.
    """
    kappa = hyperbolic_curvature(manifold, "mds")
    points = hyperbolic_mds(distances, n_components, kappa)
    points[:, 1:] += rng.normal(scale=_numerics.NUDGE / np.sqrt(-kappa), size=(len(points), n_components))
    source = Lorentz(kappa)
    return convert(source.projx(torch.from_numpy(points)), source, manifold)


def hyperbolic_curvature(manifold, init: str) -> float:
    """The curvature of a hyperbolic manifold.

    Raises:
        ValueError: for another manifold, on which points cannot start by ``init``.
    """
    if own(manifold, "to_canonical") is not None and float(manifold.kappa) < 0:
        return float(manifold.kappa)
    raise ValueError(
        f"init={init!r} needs hyperbolic space (PoincareBall, Lorentz or Stereographic, kappa < 0), not {manifold}: "
        'take init="random", or an array of points'
    )


def _scaled_gram(distances: np.ndarray, kappa: float) -> tuple[np.ndarray, np.ndarray]:
    """log cosh of the distance r_i to a centre of the points, and cosh d_ij / (cosh r_i cosh r_j).

    The centre is m = sum_j w_j x_j, scaled to the hyperboloid, w_j = 1 / cosh r_j: by <x_i, m>, cosh r_i is
    sum_j w_j cosh d_ij / sqrt(sum_ij w_i w_j cosh d_ij), and so needs no points.
    """
    distances = np.asarray(distances, dtype=np.float64)
    if not _negative(kappa):
        raise ValueError(f"kappa must be a number < 0, the curvature of hyperbolic space, got {kappa!r}")
    if distances.ndim != 2 or distances.shape[0] != distances.shape[1] or not len(distances):
        raise ValueError(f"distances must be a square matrix, got shape {distances.shape}")
    if not np.isfinite(distances).all():
        raise ValueError("distances must be finite: those of a graph are where it is connected")
    if distances.min() < 0 or np.any(np.diag(distances)):
        raise ValueError("distances must be >= 0, and 0 on the diagonal")
    if np.abs(distances - distances.T).max() > _numerics.SYMMETRIC * distances.max():
        raise ValueError("distances must be symmetric")
    logs = _log_cosh(distances * np.sqrt(-kappa))
    log_scale = logs[np.argmin(logs.sum(axis=0))]
    for _ in range(_CENTRINGS):
        sums = logsumexp(logs - log_scale, axis=1)
        log_scale = sums - logsumexp(sums - log_scale) / 2
    return log_scale, np.exp(logs - log_scale - log_scale[:, None])


def _negative(value: object) -> bool:
    return isinstance(value, int | float) and value < 0


def _log_cosh(x: np.ndarray) -> np.ndarray:
    return x + np.log1p(np.exp(-2 * x)) - np.log(2)

"""Where the points start."""

import numpy as np
import torch
from torch import Tensor

from horosphere.manifolds import hooks

__all__ = ["ambient_dim", "beside_neighbours", "near_origin"]

_SPREAD = 1e-3  # Nickel & Kiela's start: far below every distance that is learned, far above rounding.


def ambient_dim(manifold, n_components: int) -> int:
    """How many numbers store a point of `n_components` dimensions."""
    return hooks.ambient_dim(manifold, n_components)


def near_origin(manifold, n_points: int, n_components: int, rng: np.random.Generator) -> Tensor:
    """Points exp_o(v), v uniform in +-1e-3 in each stored coordinate, projected to the tangent space at the origin o.

    Returns:
        (n_points, ambient_dim) float64.
    """
    size = (n_points, ambient_dim(manifold, n_components))
    origin = hooks.origin(manifold, *size, dtype=torch.float64, device="cpu")
    noise = torch.from_numpy(rng.uniform(-_SPREAD, _SPREAD, size))
    return manifold.projx(manifold.expmap(origin, manifold.proju(origin, noise)))


def beside_neighbours(manifold, table: Tensor, n_old: int, edges: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Place the rows from `n_old` on next to their neighbours among the rows placed before, nearest first.

    A new point starts at exp_y( mean_j log_y(y_j) ) over its placed neighbours y_j, y the first of them (one step of
    the Frechet mean's iteration), plus the noise of `near_origin`. A node that no path joins to an old one keeps its
    row.

    Args:
        table: (N, D); rows < n_old are fixed, the others hold their fallback start.
        edges: (E, 2) pairs; both directions count.
    """
    table = table.clone()
    neighbours: dict[int, list[int]] = {}
    for u, v in edges.tolist():
        for a, b in ((u, v), (v, u)):
            if a >= n_old:
                neighbours.setdefault(a, []).append(b)
    placed = set(range(n_old))
    waiting = sorted(neighbours)
    while ready := [i for i in waiting if any(j in placed for j in neighbours[i])]:
        for i in ready:
            near = table[[j for j in dict.fromkeys(neighbours[i]) if j in placed]]
            base = near[:1]
            logs = hooks.log(manifold, base.expand_as(near), near, "a new node's start beside its neighbours")
            step = logs.mean(0, keepdim=True)
            noise = manifold.proju(base, torch.from_numpy(rng.uniform(-_SPREAD, _SPREAD, base.shape)))
            table[i] = manifold.projx(manifold.expmap(base, step + noise))[0]
        placed.update(ready)
        waiting = [i for i in waiting if i not in placed]
    return table

"""The manifolds the optimizer tests run on, and a starting point for each."""

import torch

from horosphere import (
    Euclidean,
    Lorentz,
    ManifoldParameter,
    PoincareBall,
    Product,
    Scaled,
    Sphere,
    Stereographic,
)

SPACES = {
    "euclidean": lambda: Euclidean(),
    "ball": lambda: PoincareBall(-1.5),
    "stereographic": lambda: Stereographic(0.7),
    "lorentz": lambda: Lorentz(-0.5),
    "sphere": lambda: Sphere(2.0),
    "product": lambda: Product((PoincareBall(-1.0), 2), (Sphere(1.0), 2)),
    "scaled": lambda: Scaled(Lorentz(-1.0), 1.5),
}
CURVED = {name: make for name, make in SPACES.items() if name != "euclidean"}
LEARNED = {
    "ball": lambda: PoincareBall(-1.0, learnable=True),
    "stereographic": lambda: Stereographic(-0.2, learnable=True),
    "lorentz": lambda: Lorentz(-1.0, learnable=True),
    "sphere": lambda: Sphere(1.0, learnable=True),
    "product": lambda: Product((PoincareBall(-1.0, learnable=True), 2), (Sphere(1.0, learnable=True), 2)),
    "scaled": lambda: Scaled(PoincareBall(-1.0, learnable=True), 1.5, learnable=True),
}


def points(manifold, rows=6, size=4, dtype=torch.float64, seed=0):
    """A parameter of random points."""
    torch.manual_seed(seed)
    return ManifoldParameter(manifold.random(rows, size, dtype=dtype), manifold)


def sparse(rows, values, shape):
    """A sparse row gradient, duplicates not yet summed."""
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, shape, check_invariants=True)


@torch.no_grad()
def on_manifold(p, tolerance=1e-9):
    """Whether every point of a parameter is on its manifold."""
    return p.manifold.check_point_on_manifold(p.detach(), atol=tolerance, rtol=tolerance)

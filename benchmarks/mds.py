"""Hyperbolic MDS: the distances of 200 random points, radii up to 10, recovered in float64.

Distances are measured with ``precision="exact"`` before and after; the test suite has mpmath measure them.
"""

from pathlib import Path

import numpy as np
import torch
from report import report, verdict
from rich.table import Table

__all__ = ["BAR", "DIMENSIONS", "GRAPHS", "main", "worst_error"]

GRAPHS = ()
DIMENSIONS = (2, 5, 10)
POINTS, RADIUS, SEEDS = 200, 10.0, range(5)
# Largest error of a distance, at most.
BAR = 1e-9


def worst_error(dimension: int, seed: int, points: int = POINTS) -> float:
    """Largest absolute error of a distance; directions uniform, radii uniform up to 10."""
    from horosphere import Lorentz, cdist
    from horosphere.embedding import hyperbolic_mds

    rng = np.random.default_rng(seed)
    direction = rng.normal(size=(points, dimension))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    space = direction * np.sinh(rng.uniform(0, RADIUS, (points, 1)))
    x = torch.from_numpy(np.concatenate([np.sqrt(1 + np.sum(space**2, axis=1, keepdims=True)), space], axis=1))
    wanted = cdist(x, x, Lorentz(), precision="exact")
    wanted = (wanted + wanted.T) / 2
    y = torch.from_numpy(hyperbolic_mds(wanted.numpy(), dimension))
    return float((cdist(y, y, Lorentz(), precision="exact") - wanted).abs().max())


def main(_: dict[str, Path]) -> bool:
    table = Table(title=f"h-MDS: {POINTS} points, radius up to {RADIUS:g}, float64, five draws")
    for column in ("dimension", "largest error of a distance, worst draw", f"bar {BAR:g}"):
        table.add_column(column)
    errors = {dimension: [worst_error(dimension, seed) for seed in SEEDS] for dimension in DIMENSIONS}
    for dimension, found in errors.items():
        table.add_row(str(dimension), f"{max(found):.1e}", verdict(max(found) <= BAR))
    report("mds", table, errors=errors)
    return max(map(max, errors.values())) <= BAR

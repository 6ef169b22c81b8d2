"""horosphere: geometry-first manifolds for PyTorch.

Manifolds whose distances hold to the last promised digit, attention and memory by distance on them, Riemannian
optimizers, and graph embeddings. ``kappa`` is the signed sectional curvature everywhere.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from horosphere import attention, manifolds, optim
from horosphere.manifolds import (
    Chord,
    Euclidean,
    FrechetMean,
    Lorentz,
    LowRankMetric,
    ManifoldParameter,
    Neighbors,
    PoincareBall,
    Product,
    Scaled,
    Sphere,
    Stereographic,
    TokenMetric,
    cdist,
    chord_of,
    convert,
    frechet_mean,
    knn,
    metric_sqdist,
    midpoint,
    register_manifold,
    validate_points,
)

if TYPE_CHECKING:  # what __getattr__ loads, for checkers and editors
    from horosphere import data, diagnostics, embedding, integrations, kernels, memory, models, routing, testing

__version__ = "0.1.0"
_LAZY = ("data", "diagnostics", "embedding", "integrations", "kernels", "memory", "models", "routing", "testing")

__all__ = [
    "Chord",
    "Euclidean",
    "FrechetMean",
    "Lorentz",
    "LowRankMetric",
    "ManifoldParameter",
    "Neighbors",
    "PoincareBall",
    "Product",
    "Scaled",
    "Sphere",
    "Stereographic",
    "TokenMetric",
    "attention",
    "cdist",
    "chord_of",
    "convert",
    "data",
    "diagnostics",
    "embedding",
    "frechet_mean",
    "integrations",
    "kernels",
    "knn",
    "manifolds",
    "memory",
    "metric_sqdist",
    "midpoint",
    "models",
    "optim",
    "register_manifold",
    "routing",
    "testing",
    "validate_points",
]


def __getattr__(name: str) -> ModuleType:
    # scikit-learn, networkx and hypothesis take seconds to import: only whoever names these packages pays
    if name in _LAZY:
        return importlib.import_module(f"horosphere.{name}")
    raise AttributeError(f"module 'horosphere' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

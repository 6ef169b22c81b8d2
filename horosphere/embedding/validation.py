"""Checks of an estimator's arguments: each error names the argument, what came and what to do."""

import copy
import math
import warnings
from numbers import Integral, Real
from typing import Any

import numpy as np
from sklearn.utils import check_random_state

from horosphere.embedding.curvature import curvatures, with_curvatures
from horosphere.embedding.graph import Graph
from horosphere.embedding.io import unsaveable
from horosphere.embedding.losses import loss_by_name
from horosphere.manifolds import Product, Sphere, dimension_of_name, hooks, manifold_by_name
from horosphere.manifolds.chord import check_manifold

__all__ = [
    "check_arguments",
    "check_integer",
    "dimension_of",
    "fitting_curvature",
    "plain",
    "seed_of",
    "space_of",
    "warn_if_too_small",
    "with_edges",
]

_CHOICES = {
    "engine": ("auto", "numba", "torch"),
    "metric": ("shortest_path", "precomputed"),
}


def check_arguments(model: Any) -> None:
    """Raise ValueError or TypeError for a constructor argument of a `GraphEmbedding` that is out of range."""
    for name in ("n_components", "n_epochs", "n_negatives", "batch_size", "checkpoint_every"):
        if name in ("n_components", "n_epochs") and getattr(model, name) is None:
            continue
        check_integer(name, getattr(model, name), 1)
    check_integer("burn_in", model.burn_in, 0)
    if isinstance(model.init, str) and model.init not in ("random", "mds", "tree"):
        raise ValueError(f'init must be "random", "mds", "tree" or an array of points, got {model.init!r}')
    for name, choices in _CHOICES.items():
        value = getattr(model, name)
        if value not in choices:
            shown = ", ".join(f'"{choice}"' for choice in choices[:-1])
            raise ValueError(f'{name} must be {shown} or "{choices[-1]}", got {value!r}')
    loss_by_name(model.loss).check(model)
    rate = model.learning_rate
    if rate is not None:
        if isinstance(rate, bool) or not isinstance(rate, Real) or not (math.isfinite(rate) and float(rate) > 0):
            raise ValueError(f"learning_rate must be a finite number > 0, got {rate!r}")
    if isinstance(model.random_state, Integral) and model.random_state < 0:
        raise ValueError(f"random_state must be >= 0, got {model.random_state}")
    if model.checkpoint is not None and not isinstance(model.random_state, Integral):
        raise ValueError("checkpoint needs random_state to be an integer: otherwise each run draws other numbers")
    for callback in model.callbacks or ():
        if not callable(callback):
            raise TypeError(f"callbacks must be callables taking an EpochInfo, got {callback!r}")


def space_of(manifold: Any, learn: bool) -> tuple[Any, bool]:
    """The manifold that an argument asks for, a copy, and whether a curvature is to be learned.

    Args:
        manifold: a name or an object.
        learn: learn its curvature; a manifold with learnable=True asks for it too.
    """
    if not isinstance(manifold, str):
        check_manifold(manifold, otherwise=" or a name")
    space = manifold_by_name(manifold) if isinstance(manifold, str) else copy.deepcopy(manifold)
    return space, learn or any(parameter.requires_grad for parameter in space.parameters())


def fitting_curvature(space: Any, longest: float) -> Any:
    """The space with abs(kappa) = (pi / longest)^2 in each curved part: on the sphere, half a great circle."""
    return with_curvatures(space, None, np.sign(curvatures(space)) * (math.pi / longest) ** 2)[0]


def warn_if_too_small(space: Any, longest: float) -> None:
    """A product of spheres has a largest distance: say so where a longer one is wanted."""
    parts = space.manifolds if isinstance(space, Product) else [space]
    if all(type(part) is Sphere for part in parts):
        farthest = math.sqrt(sum(math.pi**2 / float(part.kappa) for part in parts))
        if farthest < longest:
            warnings.warn(
                f"no two points of {space} are farther apart than {farthest:.4g}, and the longest distance asked for "
                f"is {longest:.4g}: pass learn_curvature=True, or spheres of smaller kappa",
                UserWarning,
                stacklevel=3,
            )


def dimension_of(manifold: Any, n_components: int | None) -> int:
    """The intrinsic dimension: what the name or the product says, else ``n_components``, else 2.

    Raises ValueError where they contradict each other.
    """
    said = None
    if isinstance(manifold, str):
        said = dimension_of_name(manifold)
    elif isinstance(manifold, Product):
        said = hooks.intrinsic_dim(manifold, manifold.n_elements)
    if said is not None and n_components is not None and n_components != said:
        raise ValueError(f"{manifold} has {said} dimensions, and n_components is {n_components}: leave it out")
    return int(n_components or said or 2)


def seed_of(random_state: Any) -> int:
    """The number that decides a run; of None or a RandomState another one each time."""
    if isinstance(random_state, Integral):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


def plain(value: Any) -> bool | int | float | str | None:
    """A constructor argument as JSON keeps it; a RandomState or an array cannot be kept and becomes None."""
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, bool | int | float | str) else None


def check_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def with_edges(graph: Graph) -> Graph:
    """The graph, with a warning of self-loops and of labels that `save` will refuse; ValueError without edges."""
    if graph.self_loops:
        warnings.warn(
            f"left out {graph.self_loops} self-loop{'s' * (graph.self_loops > 1)}: a node is at distance 0 from itself "
            "wherever it lies",
            UserWarning,
            stacklevel=4,
        )
    if not len(graph.edges):
        raise ValueError(
            "the graph has no edges between different nodes"
            + (f" (only {graph.self_loops} self-loops)" if graph.self_loops else "")
            + ": there is nothing to embed"
        )
    if reason := unsaveable(graph.nodes):
        warnings.warn(reason, UserWarning, stacklevel=4)
    return graph

"""What a loss is, and the table of those that there are.

A loss of pairs is one file: a subclass of :class:`PairLoss` under ``@register_loss``. See docs/embedding.md.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from horosphere.embedding.scores import distances_to_all

__all__ = ["Loss", "PairLoss", "loss_by_name", "loss_names", "register_loss"]


class Loss(ABC):
    """What training minimises. One object serves all runs: it holds no state.

    Attributes:
        name: as ``GraphEmbedding(loss=...)`` takes it.
        engines: which of "numba" and "torch" have it.
        of_lengths: whether it is fitted to lengths of paths, of all pairs of nodes, and not to the graph's pairs.
        n_epochs, learning_rate: what an estimator takes where it is not told.
    """

    name: ClassVar[str]
    engines: ClassVar[tuple[str, ...]]
    of_lengths: ClassVar[bool] = False
    n_epochs: ClassVar[int] = 300
    learning_rate: ClassVar[float] = 0.1

    def check(self, model: Any) -> None:
        """Raise ValueError for arguments of an estimator that mean nothing here."""
        if model.metric != "shortest_path":
            raise ValueError(
                f'metric="{model.metric}" is for loss="distortion": other losses want edges, not distances'
            )

    def check_manifold(self, manifold: Any) -> None:  # noqa: B027 - most have a meaning on all of them
        """Raise ValueError for a manifold that this loss has no meaning on."""


class PairLoss(Loss):
    """A loss of the graph's pairs, each against drawn nodes that are no neighbours of its source.

    A subclass names itself and says in :meth:`batch` what some pairs cost; the torch engine does the rest.

    Attributes:
        ranks_first: train the first half of the epochs on the ranking loss, which sorts the nodes out.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    ranks_first: ClassVar[bool] = False

    @abstractmethod
    def batch(self, points: Tensor, index: Tensor, manifold: Any) -> Tensor:
        """What a batch costs, a scalar, summed over its pairs and not averaged.

        Args:
            points: (R, D) points, float64.
            index: (B, 2 + K) rows of ``points``: the source u, its true neighbour, K drawn nodes.
            manifold: a `geoopt.Manifold`.
        """

    def start(self, points: Tensor, manifold: Any) -> Tensor:
        """The points (N, D) that the work on this loss starts from, made of a random start or of what was ranked."""
        return points

    def bounded(self, gradient: Tensor, points: Tensor, manifold: Any, rate: float, full_rate: float) -> Tensor:
        """The gradient (R, D) of a batch as the step takes it, at ``rate`` where the largest rate is ``full_rate``."""
        return gradient

    def kept(self, points: Tensor, manifold: Any) -> Tensor:
        """Points (R, D) after a step, brought back to where this loss is defined."""
        return points

    def to_all(self, manifold: Any, points: Tensor, rows: np.ndarray) -> np.ndarray:
        """(len(rows), N) numbers by which `evaluate` ranks all nodes for each of some: the smaller the nearer."""
        return distances_to_all(manifold, points, rows)


_LOSSES: dict[str, Loss] = {}


def register_loss(kind: type[Loss]) -> type[Loss]:
    """Class decorator: make a loss known by its name.

    Raises:
        TypeError: it is no :class:`Loss`, has no name, or has not filled in what a loss must say.
        ValueError: the name is taken.
    """
    if not _is_loss(kind):
        raise TypeError(f"a loss is a subclass of PairLoss, got {kind!r}")
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    missing += [name for name in ("name", "engines") if not hasattr(kind, name)]
    if missing:
        raise TypeError(f"{kind.__name__} is half a loss: it does not say {', '.join(missing)}")
    if not _is_name(kind.name):
        raise TypeError(f"the name of {kind.__name__} must be a string, got {kind.name!r}")
    if not kind.engines or set(kind.engines) - {"numba", "torch"}:
        raise ValueError(f'engines of {kind.__name__} must be among "numba" and "torch", got {kind.engines!r}')
    if kind.name in _LOSSES:
        raise ValueError(f'there is a loss "{kind.name}" already, {type(_LOSSES[kind.name]).__name__}')
    if "numba" in kind.engines and not kind.__module__.startswith("horosphere.embedding."):
        raise ValueError(f'{kind.__name__} has engines={kind.engines}: the loops of "numba" are those of the package')
    _LOSSES[kind.name] = kind()
    return kind


def _is_loss(kind: object) -> bool:
    return inspect.isclass(kind) and issubclass(kind, Loss)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name)


def loss_names() -> tuple[str, ...]:
    """The names that there are."""
    return tuple(_LOSSES)


def loss_by_name(name: str) -> Loss:
    """The loss of a name; ValueError for an unknown one."""
    if name not in _LOSSES:
        *some, last = (f'"{known}"' for known in _LOSSES)
        raise ValueError(f"loss must be {', '.join(some)} or {last}, got {name!r}")
    return _LOSSES[name]

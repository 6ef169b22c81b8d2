"""Distances in the embedding against lengths of paths in the graph; see horosphere.embedding.distortion_engine."""

from __future__ import annotations

from typing import Any, ClassVar

from horosphere.embedding.losses.base import Loss, register_loss

__all__ = ["Distortion"]


@register_loss
class Distortion(Loss):
    """sum |d(u, v) / g(u, v) - 1| over all pairs of nodes, g the length of the shortest path or a given distance.

    Source: A. Gu, F. Sala, B. Gunel and C. Re, Learning mixed-curvature representations in product spaces, 2019.
    """

    name: ClassVar[str] = "distortion"
    engines: ClassVar[tuple[str, ...]] = ("numba", "torch")
    of_lengths: ClassVar[bool] = True
    n_epochs: ClassVar[int] = 60
    learning_rate: ClassVar[float] = 0.01

    def check(self, model: Any) -> None:
        if model.closure:
            raise ValueError(
                "closure=True is for the other losses: in the closure every ancestor would be at distance 1, and the "
                "distortion loss takes the paths of the graph as it is given"
            )

"""True neighbours nearer than all other nodes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from horosphere.embedding.losses.base import PairLoss, register_loss
from horosphere.embedding.losses.pairs import pair_distances

__all__ = ["Ranking", "ranking_loss"]


def ranking_loss(points: Tensor, index: Tensor, manifold) -> Tensor:
    """Each source should be nearer to its true neighbour than to the drawn nodes.

    sum_b -log( exp(-d(u_b, v_b0)) / sum_k exp(-d(u_b, v_bk)) ), summed over the batch and not averaged, so that the
    learning rate is a rate per pair whatever the batch size.

    Args:
        points: (R, D) points.
        index: (B, 2 + K) rows of `points`: the source u, its true neighbour, K negatives.
        manifold: a `geoopt.Manifold`.

    Returns:
        A scalar, at least 0.

    Source: M. Nickel and D. Kiela, Poincare embeddings for learning hierarchical representations, 2017, eq. 6.
    """
    distance = pair_distances(points, index, manifold)
    target = torch.zeros(len(index), dtype=torch.long, device=points.device)
    return cross_entropy(-distance, target, reduction="sum")


@register_loss
class Ranking(PairLoss):
    """See :func:`ranking_loss`; the compiled engine takes its pairs one at a time."""

    name: ClassVar[str] = "ranking"
    engines: ClassVar[tuple[str, ...]] = ("numba", "torch")

    def batch(self, points: Tensor, index: Tensor, manifold: Any) -> Tensor:
        return ranking_loss(points, index, manifold)

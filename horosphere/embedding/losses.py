"""What a batch of pairs costs."""

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding

from horosphere._numerics import arc2, safe_sqrt
from horosphere.manifolds.chord import Chord, chords

__all__ = ["pair_distances", "ranking_loss"]


def pair_distances(points: Tensor, index: Tensor, manifold) -> Tensor:
    """Distances from the first node of each row of an index to the others, (B, 1 + K) -> (B, K).

    Through the chord, what depends on one point alone is worked once a point and not once a pair:
    d^2 = sum over parts of arc2(w_u w_v <f_u - f_v, f_u - f_v>_J, kappa). Manifolds without a chord go
    through ``dist``.

    Args:
        points: (R, D) points.
        index: (B, 1 + K) rows of `points`.
        manifold: a `geoopt.Manifold`.
    """
    parts = chords(manifold, points)
    if parts is None:
        x = embedding(index, points)
        return manifold.dist(x[:, :1], x[:, 1:])
    squares = [(_squared_chord(part, index), part.kappa) for part in parts]
    if len(squares) == 1 and isinstance(squares[0][1], float) and squares[0][1] < 0:
        # One hyperbolic part: asinh of the chord itself is a third of the work of squaring and taking the root again.
        ((u, kappa),) = squares
        return 2 / math.sqrt(-kappa) * torch.asinh(safe_sqrt(-kappa * u) / 2)
    return safe_sqrt(sum(arc2(u, kappa) for u, kappa in squares))


def _squared_chord(part: Chord, index: Tensor) -> Tensor:
    features, weight, time_dims, _ = part
    f = embedding(index, features)
    difference = f[:, :1] - f[:, 1:]
    u = difference.square().sum(-1)
    if time_dims:
        u = (u - 2 * difference[..., :time_dims].square().sum(-1)).clamp(min=0.0)
    if weight is not None:
        w = embedding(index, weight.unsqueeze(-1)).squeeze(-1)
        u = u * (w[:, :1] * w[:, 1:])
    return u


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

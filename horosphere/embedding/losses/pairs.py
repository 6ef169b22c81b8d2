"""Distances of the pairs of a batch."""

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding

from horosphere._numerics import arc2, safe_sqrt
from horosphere.manifolds.chord import Chord, chords

__all__ = ["pair_distances"]


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
    return safe_sqrt(sum((arc2(u, kappa) for u, kappa in squares), points.new_zeros(())))


def _squared_chord(part: Chord, index: Tensor) -> Tensor:
    weight = torch.ones_like(part.features[:, 0]) if part.weight is None else part.weight
    packed = torch.cat([part.features, weight.unsqueeze(-1)], dim=-1)
    return _SquaredChord.apply(packed, index, part.time_dims)


class _SquaredChord(torch.autograd.Function):
    """u = w_u w_v <f_u - f_v, f_u - f_v>_J of indexed rows [f, w]: one gather, one scatter, where autograd's own way
    through slices makes a zero-filled copy of everything for each of them."""

    @staticmethod
    def forward(ctx, packed: Tensor, index: Tensor, time_dims: int) -> Tensor:
        rows = embedding(index, packed)
        difference = rows[:, :1, :-1] - rows[:, 1:, :-1]
        lowered = difference
        if time_dims:
            lowered = torch.cat([-difference[..., :time_dims], difference[..., time_dims:]], dim=-1)
        square = (difference * lowered).sum(-1).clamp_(min=0.0)
        weight = rows[..., -1]
        ctx.save_for_backward(index, lowered, square, weight)
        ctx.n_rows = len(packed)
        return square * (weight[:, :1] * weight[:, 1:])

    @staticmethod
    def backward(ctx, grad: Tensor):
        index, lowered, square, weight = ctx.saved_tensors
        out = torch.empty(*index.shape, lowered.shape[-1] + 1, dtype=grad.dtype, device=grad.device)
        pull = (2 * grad * weight[:, :1] * weight[:, 1:]).unsqueeze(-1) * lowered
        out[:, 0, :-1] = pull.sum(1)
        torch.neg(pull, out=out[:, 1:, :-1])
        scaled = grad * square
        out[:, 0, -1] = (scaled * weight[:, 1:]).sum(1)
        torch.mul(scaled, weight[:, :1], out=out[:, 1:, -1])
        table = torch.zeros(ctx.n_rows, out.shape[-1], dtype=grad.dtype, device=grad.device)
        return table.index_add_(0, index.reshape(-1), out.flatten(0, 1)), None, None

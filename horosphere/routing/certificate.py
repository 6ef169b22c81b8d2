"""How far the output of a few prototypes can be from that of all of them, and how few are enough."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["Spread", "certificate", "enough_prototypes"]

# |G^8|_F^(1/8) is at most n^(1/16) times the largest of n eigenvalues of G: 35% too much at n = 128, at worst, and 16%
# in its root
POWER = 8


def rounding_slack(prototypes: int, dtype: torch.dtype) -> float:
    """(4 + log2 E) eps: what float sums of E weighted values may add to the error, in units of the largest value."""
    return (4 + math.log2(max(1, prototypes))) * torch.finfo(dtype).eps


class Spread(NamedTuple):
    """What certificates know of the values v_e of all prototypes; lengths in ``unit``, so that no square overflows.

    Attributes:
        unit: (), the largest sum of absolute entries of a value, in units of the values.
        lengths: (E,), |v_e| / unit.
        mean: (Dv,), of v_e / unit.
        deviation: (), an upper bound on the largest singular value of the rows v_e / unit - mean.
        slack: :func:`rounding_slack` of the weights.
    """

    unit: Tensor
    lengths: Tensor
    mean: Tensor
    deviation: Tensor
    slack: float

    @classmethod
    @torch.no_grad()
    def of(cls, values: Tensor, dtype: torch.dtype) -> Spread:
        """Of values (E, Dv), for weights in ``dtype``: made once, it serves any number of queries."""
        unit = torch.linalg.vector_norm(values, 1, dim=-1).amax()
        unit = torch.where((unit > 0) & unit.isfinite(), unit, 1.0).to(torch.float64)
        rows = values / unit.reshape(1)  # in float64: a tensor without dimensions would not ask for it
        lengths = torch.linalg.vector_norm(rows, dim=-1)
        mean = rows.mean(0)
        deviation = singular_value_bound(rows.sub_(mean))
        working = torch.promote_types(dtype, torch.float32)
        unit, lengths, mean, deviation = (t.to(working) for t in (unit, lengths, mean, deviation))
        return cls(unit, lengths, mean, deviation, rounding_slack(len(values), dtype))

    def bound(self, tail: Tensor, root: Tensor, largest: Tensor, output: Tensor) -> Tensor:
        """The bound of :func:`certificate`, (...), where those outside have weights of sum ``tail`` and of root sum of
        squares ``root``, and values of length at most ``largest`` units; ``output`` (..., Dv) in units too."""
        by_length = tail * (torch.linalg.vector_norm(output, dim=-1) + largest)
        by_spread = self.deviation * root + tail * torch.linalg.vector_norm(output - self.mean, dim=-1)
        # fmin: where values are not finite, only the first has a meaning
        return ((1 + self.slack) * torch.fmin(by_length, by_spread) + self.slack * self.lengths.max()) * self.unit


def singular_value_bound(rows: Tensor) -> Tensor:
    r"""An upper bound on the largest singular value of float64 rows X (E, D), by matrix products alone.

    .. math:: \sigma_1(X)^2 = \lambda_1(G) \le |G^8|_F^{1/8} \le n^{1/16} \lambda_1(G), \qquad
        n = \min(E, D),\; G = X^T X \text{ or } X X^T

    With u the unit roundoff, G as computed is off by E n u of its norm at most, each squaring adds n^2 u, and an
    earlier error doubles with the square and halves with its root: together below 5 (E + n) n u, which is added.
    """
    count, size = rows.shape
    gram = rows.T @ rows if count > size else rows @ rows.T
    norm = torch.linalg.matrix_norm(gram)
    power = torch.linalg.matrix_power(gram / norm.clamp(min=torch.finfo(rows.dtype).tiny), POWER)
    largest = norm * torch.linalg.matrix_norm(power) ** (1 / POWER)
    rounding = 2.5 * (count + len(gram)) * len(gram) * torch.finfo(rows.dtype).eps
    return ((1 + rounding) * largest).sqrt()


@torch.no_grad()
def certificate(weights: Tensor, indices: Tensor, spread: Spread, output: Tensor) -> Tensor:
    r"""Bound on :math:`|o - o^*|`, o of the chosen prototypes with renormalised weights, o* of all of them.

    .. math:: |o - o^*| \le \min\Big\{ t\,\big(|o| + \max_{e\ \text{outside}} |v_e|\big),\;
        \|V - \bar v\|_2 \sqrt{\textstyle\sum_{\text{outside}} w_e^2} + t\,|o - \bar v| \Big\} (1 + s)
        + s \max_e |v_e|, \qquad t = \sum_{\text{outside}} w_e,\; s = (4 + \log_2 E)\,\epsilon

    because :math:`o^* - o = \sum_{\text{outside}} w_e (v_e - o)`. The first is the triangle inequality. For the second
    the mean :math:`\bar v` of *all* values is put in, :math:`\sum w_e (v_e - \bar v) + t (\bar v - o)`: a matrix times
    the weights outside is no longer than its spectral norm times their length. The first is the smaller where values go
    one way, the second where many that are left out cancel. The tail is summed, not 1 minus the rest, so it keeps its
    digits. A prototype of weight 0 does not count.

    Args:
        weights: (..., N, E), rows of sum 1 (or 0).
        indices: (..., N, K) of the chosen.
        spread: of the values, :meth:`Spread.of`.
        output: (..., N, Dv), o.

    Returns:
        (..., N), in units of the values.

    Source: the first is the bound of geodesic sparse routing in the GeoResolver paper, put right: its form
    :math:`2 |V|_F\, t/(1-t) \max |v_e|` over the *chosen* fails. The second is ours; docs/routing.md.
    """
    outside = weights.to(spread.lengths.dtype).scatter(-1, indices, 0.0)
    tail = outside.sum(-1)
    # in place: fresh memory for all weights costs more than the arithmetic. Weights whose square underflows (1e-22 in
    # float32) are lost here, which is far below the slack.
    squares = outside.square_()
    root = squares.sum(-1).sqrt()
    largest = (squares.sign_() * spread.lengths.clamp(max=torch.finfo(squares.dtype).max)).amax(-1)
    return spread.bound(tail, root, largest, output / spread.unit).to(weights.dtype)


@torch.no_grad()
def enough_prototypes(weights: Tensor, values: Tensor, spread: Spread, tolerance: float, rule: str) -> Tensor:
    """The smallest K of a scan from 1 whose certificate is at most ``tolerance``, (..., N); E where none is.

    The certificate is not monotone in K: the scan stops at the first that holds. Rule "cheap" looks at 2 tail max|v|,
    which needs no outputs, is monotone, and never asks for fewer.

    Args:
        weights: (..., N, E).
        values: (E, Dv).
        spread: of them, :meth:`Spread.of`.
        tolerance: in units of the values.
        rule: "scan" or "cheap".
    """
    count = weights.shape[-1]
    ordered, order = weights.to(spread.lengths.dtype).sort(dim=-1, descending=True, stable=True)

    def outside(terms: Tensor) -> Tensor:
        """Sums over all but the first K, from the smallest, K = 1 ... E."""
        return pad(terms.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))

    tails = outside(ordered)
    if rule == "cheap":
        bound = ((1 + spread.slack) * 2 * tails + spread.slack) * spread.lengths.max() * spread.unit
        good = bound <= tolerance
        return torch.where(good.any(-1), good.int().argmax(-1) + 1, count)
    counted = torch.where(ordered > 0, spread.lengths[order], 0.0)
    largest = pad(counted.flip(-1).cummax(-1).values.flip(-1)[..., 1:], (0, 1))
    roots = outside(ordered.square()).sqrt()
    shape = weights.shape[:-1]
    ordered, order, tails, largest, roots = (t.reshape(-1, count) for t in (ordered, order, tails, largest, roots))
    found = torch.full((len(ordered),), count, device=weights.device)
    rows = torch.arange(len(ordered), device=weights.device)  # those still undecided
    values = values.to(ordered.dtype) / spread.unit
    sums = values.new_zeros(len(ordered), values.shape[-1])
    for k in range(count):
        sums = sums + ordered[rows, k].unsqueeze(-1) * values[order[rows, k]]
        mass = (1 - tails[rows, k]).clamp(min=torch.finfo(sums.dtype).tiny)
        bound = spread.bound(tails[rows, k], roots[rows, k], largest[rows, k], sums / mass.unsqueeze(-1))
        good = bound <= tolerance
        found[rows[good]] = k + 1
        rows, sums = rows[~good], sums[~good]
        if not rows.numel():
            break
    return found.view(shape)

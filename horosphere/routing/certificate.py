"""How far the output of a few prototypes can be from that of all of them, and how few are enough."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["certificate", "enough_prototypes"]


def rounding_slack(prototypes: int, dtype: torch.dtype) -> float:
    """(4 + log2 E) eps: what float sums of E weighted values may add to the error, in units of the largest value."""
    return (4 + math.log2(max(1, prototypes))) * torch.finfo(dtype).eps


@torch.no_grad()
def certificate(weights: Tensor, indices: Tensor, norms: Tensor, output_norm: Tensor) -> Tensor:
    r"""Bound on :math:`|o - o^*|`, o of the chosen prototypes with renormalised weights, o* of all of them.

    .. math:: t\,(|o| + \max_{e\ \text{outside}} |v_e|) + (4 + \log_2 E)\,\epsilon \max_e |v_e|,\qquad
        t = \sum_{e\ \text{outside}} w_e

    because :math:`o^* = (1 - t)\,o + \sum_{\text{outside}} w_e v_e`. The tail is summed, not 1 minus the rest, so it
    keeps its digits. A prototype of weight 0 does not count.

    Args:
        weights: (..., N, E), rows of sum 1 (or 0).
        indices: (..., N, K) of the chosen.
        norms: (E,) lengths of the values, or upper bounds.
        output_norm: (..., N), |o|.

    Returns:
        (..., N).

    Source: the bound of geodesic sparse routing in the GeoResolver paper, put right: its form
    :math:`2 |V|_F\, t/(1-t) \max |v_e|` over the *chosen* fails; docs/routing.md.
    """
    outside = weights.scatter(-1, indices, 0.0)
    largest = torch.where(outside > 0, norms, 0.0).amax(-1)
    slack = rounding_slack(weights.shape[-1], weights.dtype) * norms.max()
    return outside.sum(-1) * (output_norm + largest) + slack


@torch.no_grad()
def enough_prototypes(weights: Tensor, values: Tensor, tolerance: float, rule: str) -> Tensor:
    """The smallest K of a scan from 1 whose certificate is at most ``tolerance``, (..., N); E where none is.

    The certificate is not monotone in K: the scan stops at the first that holds. Rule "cheap" looks at 2 tail max|v|,
    which needs no outputs, is monotone, and never asks for fewer.

    Args:
        weights: (..., N, E). values: (E, Dv).
        rule: "scan" or "cheap".
    """
    count = weights.shape[-1]
    norms = torch.linalg.vector_norm(values, dim=-1)
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    slack = rounding_slack(count, weights.dtype) * norms.max()
    # tails[K - 1]: the weights outside of the first K, summed from the smallest
    tails = torch.nn.functional.pad(ordered.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))
    if rule == "cheap":
        good = 2 * tails * norms.max() + slack <= tolerance
        return torch.where(good.any(-1), good.int().argmax(-1) + 1, count)
    counted = torch.where(ordered > 0, norms[order], 0.0)
    largest = torch.nn.functional.pad(counted.flip(-1).cummax(-1).values.flip(-1)[..., 1:], (0, 1))
    shape = weights.shape[:-1]
    ordered, order, tails, largest = (t.reshape(-1, count) for t in (ordered, order, tails, largest))
    found = torch.full((len(ordered),), count, device=weights.device)
    rows = torch.arange(len(ordered), device=weights.device)  # those still undecided
    sums = values.new_zeros(len(ordered), values.shape[-1])
    for k in range(count):
        sums = sums + ordered[rows, k].unsqueeze(-1) * values[order[rows, k]]
        mass = (1 - tails[rows, k]).clamp(min=torch.finfo(weights.dtype).tiny)
        length = torch.linalg.vector_norm(sums, dim=-1) / mass
        good = tails[rows, k] * (length + largest[rows, k]) + slack <= tolerance
        found[rows[good]] = k + 1
        rows, sums = rows[~good], sums[~good]
        if not rows.numel():
            break
    return found.view(shape)

"""Mean squared distances between queries and keys, which eps is measured by."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.pairwise import cdist

# Distances held at a time: 2^22 float32 are 16 MiB.
PAIRS = 2**22


def squared_distance_sums(
    query: Tensor, key: Tensor, manifold: geoopt.Manifold, mask: Tensor | None, is_causal: bool
) -> Tensor:
    """(2, H) in float64: the sum of d^2 over the pairs of every head that take part, and their number.

    Args:
        query: points (B, H, N, D). key: points (B, H, M, D).
        mask: bool, broadcastable to (B, H, N, M), True = takes part. is_causal: and of those the keys j <= i.
    """
    sums = torch.zeros(2, query.shape[1], dtype=torch.float64, device=query.device)
    rows = max(1, PAIRS // max(1, query.shape[:2].numel() * key.shape[-2]))
    for start in range(0, query.shape[-2], rows):
        d2 = cdist(query[..., start : start + rows, :], key, manifold, squared=True).to(torch.float64)
        allowed = torch.ones_like(d2, dtype=torch.bool)
        if mask is not None:
            allowed &= mask if mask.shape[-2] == 1 else mask[..., start : start + rows, :]
        if is_causal:
            allowed = allowed.tril(start)
        sums[0] += d2.masked_fill(~allowed, 0.0).sum((0, 2, 3))
        sums[1] += allowed.sum((0, 2, 3))
    return sums

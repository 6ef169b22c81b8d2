r"""Squared distances under per-token metrics: the plain form that every faster one is measured against.

With :math:`\delta = q_i - k_j` and G the metric of one end,

    |delta|_G^2 = s^2 |delta|^2 + sum_r (U_r^T delta)^2,

at both ends the mean of the two. :math:`U_{ir}^T k_j` is R matrix products N x M; their squares are added one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.low_rank.pair import MetricPair, limits


def sqdist(f: MetricPair, dtype: torch.dtype) -> Tensor:
    """(..., N, M) in product form, in the type ``dtype``; differentiable any number of times."""
    f = f.each(lambda t, own, of_keys: t.to(dtype))
    q, k, queries, keys = f.q, f.k, f.metric_q, f.metric_k
    norms = (q * q).sum(-1).unsqueeze(-1) + (k * k).sum(-1).unsqueeze(-2)
    u = (norms - 2 * (q @ k.mT)).clamp(min=0.0)
    scales: float | Tensor = 0.0
    if queries is not None:
        scales = (queries.scale**2).unsqueeze(-1)
    if keys is not None:
        scales = scales + (keys.scale**2).unsqueeze(-2)
    d2 = u * scales
    if queries is not None:
        for column in queries.factor.unbind(-1):
            d2 = d2 + ((column * q).sum(-1).unsqueeze(-1) - column @ k.mT) ** 2
    if keys is not None:
        for column in keys.factor.unbind(-1):
            d2 = d2 + (q @ column.mT - (column * k).sum(-1).unsqueeze(-2)) ** 2
    return d2 if f.share == 1 else d2 * f.share


def resolved(f: MetricPair, dtype: torch.dtype, eps: float | Tensor, tolerance: float) -> Tensor:
    """As :func:`sqdist`, pairs whose ``d^2 + eps`` it may miss by more than ``tolerance`` from differences."""
    d2 = sqdist(f, dtype)
    if _numerics.transformed() or torch.compiler.is_compiling():
        return d2  # which pairs are near depends on the data, and there nobody may ask
    with torch.no_grad():
        norms = (f.q.to(dtype) ** 2).sum(-1).unsqueeze(-1) + (f.k.to(dtype) ** 2).sum(-1).unsqueeze(-2)
        own, other = limits(f, dtype, tolerance)
        near = ~(d2 + eps >= norms * (own.unsqueeze(-1) + other.unsqueeze(-2)))
        entry, row, column = near.reshape(-1, *near.shape[-2:]).nonzero(as_tuple=True)
    if not entry.numel():
        return d2
    pairs = f.flat(d2.shape[:-2], torch.float64).pairs((entry, row), (entry, column))
    flat = d2.reshape(-1, *d2.shape[-2:])
    return flat.index_put((entry, row, column), by_differences(pairs).to(dtype)).view(d2.shape)


def by_differences(f: MetricPair) -> Tensor:
    """Squared distances of row pairs, q and k both (P, D) with metrics (P,): from q - k in float64, (P,)."""
    delta = f.q.to(torch.float64) - f.k.to(torch.float64)
    square = (delta * delta).sum(-1)
    total = torch.zeros_like(square)
    for metric in (f.metric_q, f.metric_k):
        if metric is not None:
            inside = torch.einsum("pdr,pd->pr", metric.factor.to(torch.float64), delta)
            total = total + metric.scale.to(torch.float64) ** 2 * square + (inside * inside).sum(-1)
    return f.share * total

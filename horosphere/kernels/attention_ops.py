"""Attention by distance as a torch custom operator, and the function that callers use.

A chord is any tuple (features, weight, time_dims, kappa), see horosphere.manifolds.Chord; packing as in
horosphere.kernels.ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere.kernels.reference.attention import attention as reference_attention

WEIGHTS = ("inverse", "softmax", "gaussian")


def attention(
    xs: Sequence,
    ys: Sequence,
    value: Tensor,
    *,
    eps: float | Tensor,
    power: float | Tensor,
    bias: Tensor | None = None,
    causal: int | None = None,
    weight: str = "inverse",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    resolve: bool = True,
    impl: str,
) -> tuple[Tensor, Tensor]:
    r"""Averages of values by distance, :math:`o_i = \sum_j W_{ij} v_j`, without the matrix of weights.

    Args:
        xs, ys: chord parts of queries and keys, features (..., N, F) and (..., M, F); batch dimensions broadcast, also
            with those of the value.
        value: (..., M, Dv).
        eps: > 0, a number or a tensor that broadcasts against the batch dimensions, as kappa does ((H,) with features
            (..., H, N, F)); only "inverse" uses it.
        power: p or beta, shaped as eps.
        bias: broadcastable to (..., N, M): bool, True takes part, or a number that is added to the logarithm of the
            weight (-inf excludes).
        causal: key j takes part where ``j <= i + causal``; None: everywhere.
        weight: "inverse" ``(d^2 + eps)^-power``, "softmax" ``exp(-power d)``, "gaussian" ``exp(-power d^2)``.
        dropout_p: probability with which a normalised weight is dropped, the others divided by 1 - dropout_p.
        seed: () int64, wanted where dropout_p > 0; equal seeds drop equal weights in every impl.
        resolve: work pairs that the product form does not resolve from differences.
        impl: "reference", "blocked" or "triton", see :func:`horosphere.kernels.dispatch.choose`.

    Returns:
        out (..., N, Dv) and lse (..., N), the logarithm of the denominator, both differentiable, in float32 or float64.
        A row in which no key takes part has out 0 and lse -inf.
    """
    eps, power = as_scalar(eps, value), as_scalar(power, value)
    return reference_attention(xs, ys, value, eps, power, bias, causal, weight, dropout_p, seed, resolve)


def as_scalar(number: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.tensor(number, dtype=torch.float64, device=like.device)

r"""Attention by distance, the plain form: the whole matrix of weights, differentiable, any number of times.

g_ij = log(d_ij^2 + eps) | d_ij | d_ij^2        weight "inverse" | "softmax" | "gaussian"
l_ij = -power g_ij + bias_ij,   lse_i = log sum_j exp(l_ij),   W_ij = exp(l_ij - lse_i),   o_i = sum_j W_ij v_j
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from horosphere import _numerics
from horosphere.kernels.dropout import keep_mask
from horosphere.kernels.inputs import Inputs
from horosphere.kernels.reference.sqdist import arc2_of, product_chord2

# Pairs worked from differences at a time.
PAIRS = 2**16


def attention(xs: Sequence, ys: Sequence, inputs: Inputs, resolve: bool) -> tuple[Tensor, Tensor]:
    """(out (..., N, Dv), lse (..., N)); arguments as in :func:`horosphere.kernels.operators.attention`."""
    shift = _of_matrix(inputs.eps, xs[0].features) if inputs.weight == "inverse" else 0.0
    return averaged(squared_distances(xs, ys, shift, resolve), inputs)


def averaged(d2: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out (..., N, Dv), lse (..., N)) from squared distances (..., N, M)."""
    value, eps, power, bias, causal, weight, dropout_p, seed = inputs
    w, lse = weights(d2, eps, power, bias, causal, weight)
    if dropout_p:
        kept = keep_mask(needed(seed), w.shape, dropout_p)
        w = torch.where(kept, w / (1 - dropout_p), 0.0)
    out = w @ value.to(w.dtype)
    return out, lse.expand(out.shape[:-1])


def needed(seed: Tensor | None) -> Tensor:
    """The seed, where there is dropout."""
    if seed is None:
        raise ValueError("dropout_p > 0 wants a seed")
    return seed


def weights(
    d2: Tensor, eps: Tensor, power: Tensor, bias: Tensor | None, causal: int | None, weight: str
) -> tuple[Tensor, Tensor]:
    """Normalised weights (..., N, M) and lse (..., N) from squared distances; a row without keys has weights 0."""
    logits = -_of_matrix(power, d2) * _measure(d2, _of_matrix(eps, d2), weight)
    if bias is not None:
        logits = logits.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else logits + bias.to(logits.dtype)
    if causal is not None:
        n, m = logits.shape[-2:]
        i, j = torch.arange(n, device=d2.device), torch.arange(m, device=d2.device)
        logits = logits.masked_fill(j > i[:, None] + causal, -torch.inf)
    if not logits.shape[-1]:
        return logits, logits.new_full(logits.shape[:-1], -torch.inf)
    top = logits.detach().amax(-1, keepdim=True)
    top = torch.where(top.isinf(), 0.0, top)
    w = torch.exp(logits - top)
    den = w.sum(-1, keepdim=True)
    empty = den == 0
    safe = torch.where(empty, 1.0, den)
    lse = torch.where(empty, -torch.inf, torch.log(safe) + top)
    return w / safe, lse.squeeze(-1)


def _of_matrix(scalar: Tensor, like: Tensor) -> Tensor:
    """() or (..., H) in the work type of ``like``, to broadcast against a matrix (..., H, N, M)."""
    scalar = scalar.to(_numerics.fast_dtype(like.dtype))
    return scalar[..., None, None] if scalar.dim() else scalar


def _measure(d2: Tensor, eps: Tensor, weight: str) -> Tensor:
    if weight == "inverse":
        return torch.log(d2 + eps)
    return _numerics.safe_sqrt(d2) if weight == "softmax" else d2


def squared_distances(xs: Sequence, ys: Sequence, eps: float | Tensor, resolve: bool) -> Tensor:
    """(..., N, M) in inner-product form; with ``resolve`` pairs whose ``d^2 + eps`` it may miss by more than
    :func:`horosphere._numerics.weight_tolerance` are worked from differences.
    """
    if resolve and (_numerics.transformed() or torch.compiler.is_compiling()):
        return _by_differences(xs, ys)  # which pairs are near depends on the data, and there nobody may ask
    total, doubt = _by_product(xs[0], ys[0])
    for x, y in zip(xs[1:], ys[1:], strict=True):
        d2, part_doubt = _by_product(x, y)
        total, doubt = total + d2, doubt + part_doubt
    if not resolve:
        return total
    with torch.no_grad():
        picked = (total + eps < doubt).flatten().nonzero().squeeze(-1)
    if not picked.numel():
        return total
    found = [of_pairs(total.shape, xs, ys, some) for some in picked.split(PAIRS)]
    return total.flatten().index_put((picked,), torch.cat(found).to(total.dtype)).view(total.shape)


def _by_product(x, y) -> tuple[Tensor, Tensor]:
    """Squared distances of one part, and the d^2 + eps that its inner products do not resolve."""
    u, size = product_chord2(x, y)
    d2 = arc2_of(u, kappa_against(x, 2))
    with torch.no_grad():
        limit = _numerics.weight_theta(x.features.shape[-1], u.dtype) * size
        return d2, torch.where(u > 0, d2 / torch.where(u > 0, u, 1.0), 1.0) * limit


def kappa_against(x, own: int) -> float | Tensor:
    """kappa of a chord, shaped to go with ``own`` dimensions after the batch."""
    kappa = x.kappa
    return kappa.reshape(*kappa.shape, *[1] * own) if isinstance(kappa, Tensor) and kappa.dim() else kappa


def _by_differences(xs: Sequence, ys: Sequence) -> Tensor:
    def part(x, y) -> Tensor:
        u = exact_chord2(x.features.unsqueeze(-2), y.features.unsqueeze(-3), x.time_dims, kappa_against(x, 3))
        if x.weight is not None:
            u = u * x.weight.unsqueeze(-1) * y.weight.unsqueeze(-2)
        return arc2_of(u, kappa_against(x, 2)).to(_numerics.fast_dtype(x.features.dtype))

    return functools.reduce(operator.add, (part(x, y) for x, y in zip(xs, ys, strict=True)))


def of_pairs(shape: torch.Size, xs: Sequence, ys: Sequence, picked: Tensor) -> Tensor:
    """Squared distances of the pairs at flat indices (P,) of a matrix of ``shape``, by differences."""
    batch, n, m = shape[:-2], shape[-2], shape[-1]
    row = picked // m
    entry = row // n
    column = entry * m + picked % m

    def rows(t: Tensor, at: Tensor, own: int) -> Tensor:
        t = t.expand(*batch, *t.shape[t.dim() - own :])
        return t.reshape(-1, *t.shape[t.dim() - own + 1 :])[at]

    def part(x, y) -> Tensor:
        kappa = x.kappa
        if isinstance(kappa, Tensor) and kappa.dim():
            kappa = kappa.expand(batch).reshape(-1)[entry]
        per_pair = kappa.unsqueeze(-1) if isinstance(kappa, Tensor) and kappa.dim() else kappa
        u = exact_chord2(rows(x.features, row, 2), rows(y.features, column, 2), x.time_dims, per_pair)
        if x.weight is not None:
            u = u * rows(x.weight, row, 1) * rows(y.weight, column, 1)
        return arc2_of(u, kappa)

    def work() -> Tensor:
        return functools.reduce(operator.add, (part(x, y) for x, y in zip(xs, ys, strict=True)))

    return checkpoint(work, use_reentrant=False) if torch.is_grad_enabled() else work()


def exact_chord2(x: Tensor, y: Tensor, time_dims: int, kappa: float | Tensor) -> Tensor:
    r"""s of broadcast pairs (..., F) -> (...) from differences of features, in float64.

    With a time coordinate it is the time of the spatial part: :math:`t_x - t_y = \langle\delta, s\rangle/(t_x + t_y)`,
    delta and s the difference and the sum of the spatial parts.
    """
    x, y = x[..., time_dims:].to(torch.float64), y[..., time_dims:].to(torch.float64)
    delta = x - y
    out = (delta * delta).sum(-1)
    if time_dims:
        tx, ty = (torch.sqrt((p * p).sum(-1, keepdim=True) - 1 / kappa) for p in (x, y))
        out = out - (((delta * (x + y)).sum(-1, keepdim=True) / (tx + ty)) ** 2).squeeze(-1)
    return out

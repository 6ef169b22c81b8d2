"""Attention from whole rows of squared distances, some rows at a time, recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from horosphere import _numerics
from horosphere.attention.arguments import Arguments
from horosphere.kernels import dispatch
from horosphere.kernels.dropout import kept, row_keys
from horosphere.kernels.operators import as_scalar
from horosphere.kernels.reference import attention as reference
from horosphere.manifolds.pairwise import BLOCK_NUMBERS


def weights_of_rows(args: Arguments, rows: slice, d2: Tensor, weight: str) -> tuple[Tensor, Tensor]:
    """Normalised weights (..., R, M) and lse (..., R) of some rows from their squared distances."""
    bias = args.bias
    if bias is not None and bias.dim() > 1 and bias.shape[-2] > 1:
        bias = bias[..., rows, :]
    causal = None if args.causal is None else args.causal + rows.start
    eps, power = (as_scalar(s, d2) for s in (args.eps, args.power))
    return reference.weights(d2, eps, power, bias, causal, weight)


def attend(
    args: Arguments,
    distances: Callable[[slice], Tensor],
    average: Callable[[Tensor, slice], Tensor],
    *,
    dropout_p: float,
    seed: Tensor | None,
    weight: str,
    numbers: int = 1,
) -> tuple[Tensor, Tensor]:
    """Out (..., N, Dv) and lse (..., N).

    Args:
        args: the checked arguments.
        distances: squared distances (..., R, M) of the queries in a slice to all keys.
        average: what the weights (..., R, M) of a slice make of the values, (..., R, Dv).
        numbers: how many numbers the distance of a pair takes on the way: decides how many rows go together.
    """
    n, m = args.query.shape[-2], args.key.shape[-2]
    batch = args.query.shape[:-2]
    keys = row_keys(reference.needed(seed), batch.numel(), n).view(*batch, n) if dropout_p else None

    def block(start: int, stop: int) -> tuple[Tensor, Tensor]:
        rows = slice(start, stop)
        w, lse = weights_of_rows(args, rows, distances(rows), weight)
        if keys is not None:
            w = torch.where(kept(keys[..., rows], 0, m, dropout_p), w / (1 - dropout_p), 0.0)
        return average(w, rows), lse

    size = max(1, BLOCK_NUMBERS // max(1, m * batch.numel() * numbers))
    if n <= size:
        return block(0, n)
    blocks = [(i, min(i + size, n)) for i in range(0, n, size)]
    if torch.is_grad_enabled() and not _numerics.transformed():
        found = [checkpoint(block, *b, use_reentrant=False) for b in blocks]
    else:
        found = [block(*b) for b in blocks]
    return torch.cat([out for out, _ in found], -2), torch.cat([lse for _, lse in found], -1)


def check_form(operation: str, query: Tensor, key: Tensor, why: str, impl: str) -> None:
    """ValueError where a form was asked for that has no place for what works in blocks of rows of the matrix."""
    entries = query.shape[:-1].numel() * key.shape[-2]
    tracing = dispatch.tracing()
    dispatch.choose(dispatch.Call(operation, query.device, query.dtype, entries, tracing=tracing, pairwise=why), impl)

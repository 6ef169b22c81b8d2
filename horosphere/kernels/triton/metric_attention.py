"""Launchers of the Triton kernels of attention under per-token metrics."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.chord.augment import flat
from horosphere.kernels.low_rank.fibres import Fibres
from horosphere.kernels.tiled.metric_tiles import MetricTiles
from horosphere.kernels.triton import metric_attention_backward_kernels, metric_attention_kernels
from horosphere.kernels.triton.attention import Masking, backend, columns_of, rates_of
from horosphere.kernels.triton.attention import options_for as attention_options
from horosphere.kernels.triton.backward import Given, Sums
from horosphere.kernels.triton.metric import Tokens, sums_for


def options_for(dtype: torch.dtype, on: str) -> dict:
    """As for attention on chords, without terms of series."""
    return {name: value for name, value in attention_options(dtype, on).items() if name != "TERMS"}


class Resolving(Tokens):
    """Tokens and what tells which pairs are near."""

    def __init__(self, f: Fibres, batch: torch.Size, dtype: torch.dtype, resolve: bool):
        super().__init__(MetricTiles(f, batch, dtype, _numerics.weight_tolerance(dtype) if resolve else None))
        limits = self.made.limits if resolve else self.made.norms  # not read
        self.bounds = [[t.contiguous() for t in pair] for pair in (self.made.norms, limits)]
        self.settings = {"SHARE": f.share, "RESOLVE": resolve}

    def arguments(self, swapped: bool, e: slice) -> list[Tensor]:
        bounds = [t[e] for pair in self.bounds for t in (pair[::-1] if swapped else pair)]
        return super().arguments(swapped, e) + bounds

    def constants(self, swapped: bool) -> dict:
        return super().constants(swapped) | self.settings


def attention(
    f: Fibres,
    batch: torch.Size,
    dtype: torch.dtype,
    value: Tensor,
    eps: Tensor,
    power: Tensor,
    bias: Tensor | None,
    causal: int | None,
    weight: str,
    dropout_p: float,
    seed: Tensor | None,
    resolve: bool,
) -> tuple[Tensor, Tensor]:
    """out (..., N, Dv) and lse (..., N); eps and power (B,) in float64."""
    values = flat(value, batch, 2).to(dtype).contiguous()
    (entries, m, width), n = values.shape, f.q.shape[-2]
    out, lse = values.new_zeros(entries, n, width), values.new_full((entries, n), -torch.inf)
    if n and m:
        tokens = Resolving(f, batch, dtype, resolve)
        masking = Masking(bias, causal, dropout_p, seed, weight, batch, n, value.device)
        options = options_for(dtype, backend()) | masking.constants | tokens.constants(False)
        options |= {"V": columns_of(width, dtype)}
        across = triton.cdiv(max(1, width), options["V"])
        metric_attention_kernels.average[(entries * triton.cdiv(n, options["R"]) * across,)](
            *tokens.arguments(False, slice(0, entries)), *rates_of(eps, power, weight, dtype), values, lse,
            masking.bias, masking.place, masking.keys, out, n, m, *tokens.sizes(False), width, *masking.strides,
            masking.causal, masking.threshold, **options,
        )  # fmt: skip
        out.mul_(masking.gain)
    return out.view(*batch, n, width), lse.view(*batch, n)


def attention_backward(
    f: Fibres,
    batch: torch.Size,
    dtype: torch.dtype,
    value: Tensor,
    eps: Tensor,
    power: Tensor,
    bias: Tensor | None,
    causal: int | None,
    weight: str,
    dropout_p: float,
    seed: Tensor | None,
    resolve: bool,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the fibres' tensors, value, eps (B,), power (B,) and bias; ``wanted`` as in the tiled form."""
    tokens = Resolving(f, batch, dtype, resolve)
    masking = Masking(bias, causal, dropout_p, seed, weight, batch, tokens.n, value.device)
    given = Given(batch, dtype, value, out, lse, dout, dlse, masking.gain)
    sums = Sums(batch, dtype, tokens.n, tokens.m, bias, wanted, value.device)
    rates, width = rates_of(eps, power, weight, dtype), value.shape[-1]
    dvalue = torch.zeros_like(given.values.mT, memory_format=torch.contiguous_format)
    options = options_for(dtype, backend()) | masking.constants | sums_for(f.q.shape[-1], dtype, backend())
    for swapped in (False, True):
        into, (length, others) = tokens.zeros(swapped), tokens.lengths(swapped)
        options |= tokens.constants(swapped) | {"SWAPPED": swapped, **sums.constants(swapped, True)}
        for e in sums.runs(slice(0, tokens.entries), options) if length and others else ():
            da, dscales, dcolumns, dpoints = into
            metric_attention_backward_kernels.fibres[((e.stop - e.start) * triton.cdiv(length, options["R"]),)](
                *tokens.arguments(swapped, e),
                *(t[e] for t in (*rates, *given.sides(swapped), given.lse, given.mean)),
                masking.bias, masking.place[e], masking.keys[e],
                da[e], dscales[e], dcolumns[:, e], dpoints[e], dvalue[e], *sums.rates[:, e], sums.into(e, options),
                length, others, *tokens.sizes(swapped), width, *masking.strides, masking.causal, masking.threshold,
                **options,
            )  # fmt: skip
        tokens.take(swapped, *into)
    dvalue = dvalue.mT.reshape(*batch, *given.values.shape[1:]).sum_to_size(value.shape).to(value.dtype)
    return tokens.made.gradients(), dvalue, *sums.gradients()

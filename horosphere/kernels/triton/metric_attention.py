"""Launcher of the Triton kernel of attention under per-token metrics; its gradient is that of the blocked form."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.blocked.augment import flat
from horosphere.kernels.blocked.metric_tiles import MetricTiles
from horosphere.kernels.fibres import Fibres
from horosphere.kernels.triton import metric_attention_kernels as kernels
from horosphere.kernels.triton.attention import Masking, columns_of
from horosphere.kernels.triton.attention import options_for as attention_options
from horosphere.kernels.triton.metric import features


def options_for(dtype: torch.dtype, backend: str) -> dict:
    """As for attention on chords, without terms of series."""
    return {name: value for name, value in attention_options(dtype, backend).items() if name != "TERMS"}


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
    made = MetricTiles(f, batch, dtype, _numerics.weight_tolerance(dtype) if resolve else None)
    values = flat(value, batch, 2).to(dtype).contiguous()
    (entries, m, width), n = values.shape, f.q.shape[-2]
    out, lse = values.new_zeros(entries, n, width), values.new_full((entries, n), -torch.inf)
    if n and m:
        masking = Masking(bias, causal, dropout_p, seed, weight, batch, n, value.device)
        (s, a, u, x), (t, b, v, y) = features(made)
        shift = eps if weight == "inverse" else torch.zeros_like(eps)
        limits = made.limits if resolve else (s, t)
        options = options_for(dtype, "hip" if torch.version.hip else "cuda") | masking.constants
        options |= {"V": columns_of(width, dtype), "RESOLVE": resolve, "SHARE": f.share}
        across = triton.cdiv(max(1, width), options["V"])
        kernels.average[(entries * triton.cdiv(n, options["R"]) * across,)](
            a, b, s, t, u, x, v, y, *(w.contiguous() for w in (*made.norms, *limits)),
            *(r.to(dtype).contiguous() for r in (shift, power)), values, lse, masking.bias, masking.place, masking.keys,
            out, n, m, a.shape[1], width, entries, u.shape[0], v.shape[0], *masking.strides, masking.causal,
            masking.threshold, OWN=made.query is not None, OTHER=made.key is not None, **options,
        )  # fmt: skip
        out.mul_(masking.gain)
    return out.view(*batch, n, width), lse.view(*batch, n)

"""Launchers of the Triton attention kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.chord.augment import augment, flat, kappa_entries, minkowski, valid_weight
from horosphere.kernels.chord.parts import Part
from horosphere.kernels.dropout import row_keys
from horosphere.kernels.tiled.near import with_own_time
from horosphere.kernels.triton import attention_backward_kernels, attention_kernels
from horosphere.kernels.triton.backward import Given, Sums, places

# Rows and columns of a tile: with more rows registers spill. Columns of the values or features that a program sums.
TILE = 32
WIDEST = 128
WEIGHTS = {"inverse": 0, "softmax": 1, "gaussian": 2}


def precision_of(dtype: torch.dtype, on: str) -> str:
    """How the backend works products with sums: never in less than float32."""
    return "tf32x3" if on == "cuda" and dtype != torch.float64 else "ieee"


def options_for(dtype: torch.dtype, on: str) -> dict:
    """Tile sizes, terms of the series, and how products with sums are worked."""
    wide = dtype == torch.float64
    return {
        "R": TILE,
        "C": TILE,
        "TERMS": 14 if wide else 6,
        "PRECISION": precision_of(dtype, on),
        "num_warps": 8,
        "enable_fp_fusion": True,
    }


def columns_of(width: int, dtype: torch.dtype) -> int:
    """How many columns a program sums: a power of 2 that the hardware's products take."""
    return max(16, min(triton.next_power_of_2(width), WIDEST // 2 if dtype == torch.float64 else WIDEST))


class Side(NamedTuple):
    """What the kernels read of the queries or of the keys; of B entries and P parts."""

    augmented: Tensor  # (B, K, N)
    features: Tensor  # (B, F, N)
    weights: Tensor  # (B, P, N)
    norms: Tensor  # (B, P, N)

    def __getitem__(self, e: slice) -> tuple[Tensor, ...]:
        return tuple(t[e] for t in tuple(self))


class Points:
    """Both sides in the layout of the kernels, and what is compiled into them."""

    def __init__(self, parts: Sequence[Part], batch: torch.Size, dtype: torch.dtype):
        self.parts, self.batch, self.dtype = parts, batch, dtype
        self.n, self.m = parts[0].x.shape[-2], parts[0].y.shape[-2]
        self.sizes = tuple(p.x.shape[-1] for p in parts)
        kappas = [kappa_entries(p.kappa, batch) for p in parts]
        self.kappas = [k.to(parts[0].x.device) for k in kappas]
        self.signs = list(zip(*([(k > 0) - (k < 0) for k in kappa.tolist()] for kappa in kappas), strict=True))
        made = [augment(p, batch, dtype) for p in parts]
        self.unit = torch.cat([a.factor.view(-1, 1) ** 2 for a in made], 1).contiguous()
        scales = [torch.where(k != 0, k.abs() / 2, 1.0)[:, None] for k in self.kappas]
        self.queries = self._side([a.a for a in made], [(p.x, p.wx) for p in parts], scales)
        self.keys = self._side([a.b for a in made], [(p.y, p.wy) for p in parts], [torch.ones_like(s) for s in scales])

    def _side(self, augmented: Sequence[Tensor], points: Sequence[tuple], scales: Sequence[Tensor]) -> Side:
        features, weights, norms = [], [], []
        for part, (x, w), scale, kappa in zip(self.parts, points, scales, self.kappas, strict=True):
            x = with_own_time(flat(x, self.batch, 2), kappa, part.time_dims)
            w = scale.expand(x.shape[:2]) if w is None else scale * valid_weight(flat(w, self.batch, 1).double())
            features.append(x)
            weights.append(w)
            norms.append(_numerics.weight_theta(x.shape[-1], self.dtype) * (x * x).sum(-1))
        return Side(
            torch.cat(list(augmented), -1).mT.contiguous(),
            torch.cat(features, -1).to(self.dtype).mT.contiguous(),
            torch.stack(weights, 1).to(self.dtype).contiguous(),
            torch.stack(norms, 1).to(self.dtype).contiguous(),
        )

    def runs(self) -> Iterator[tuple[slice, dict]]:
        """Batch entries that one launch serves, and the constants of their parts: curvatures of equal signs."""
        start, shapes = 0, {"PARTS": len(self.parts), "ALL": sum(self.sizes), "FEATURES": self.sizes}
        while start < len(self.signs):
            stop = start + 1
            while stop < len(self.signs) and self.signs[stop] == self.signs[start]:
                stop += 1
            times = tuple(p.time_dims for p in self.parts)
            yield slice(start, stop), {**shapes, "SIGNS": self.signs[start], "TIMES": times}
            start = stop


class Masking:
    """Bias, causality and dropout as the kernels take them."""

    def __init__(
        self,
        bias: Tensor | None,
        causal: int | None,
        dropout_p: float,
        seed: Tensor | None,
        weight: str,
        batch: torch.Size,
        queries: int,
        device: torch.device,
    ):
        entries = batch.numel()
        nothing = torch.zeros(1, dtype=torch.int32, device=device)
        self.bias, self.strides, kind = nothing, (0, 0), 0
        self.place = torch.zeros(entries, dtype=torch.int64, device=device)
        if bias is not None:
            kind = 2 if bias.dtype == torch.bool else 1
            self.bias = bias.contiguous()
            if kind == 2:
                self.bias = self.bias.view(torch.uint8)
            self.strides = bias_strides(self.bias)
            self.place = places(self.bias, batch).to(device)
        self.keys = row_keys(seed, entries, queries) if dropout_p else nothing.expand(entries)
        self.causal = 0 if causal is None else causal
        self.threshold, self.gain = min(round(dropout_p * 2**32), 2**32 - 1) - 2**31, 1 / (1 - dropout_p)
        self.constants = {
            "WEIGHT": WEIGHTS[weight],
            "BIAS": kind,
            "CAUSAL": causal is not None,
            "DROPOUT": bool(dropout_p),
        }


def bias_strides(bias: Tensor) -> tuple[int, int]:
    """Strides of the last two dimensions, 0 where they are broadcast."""
    return tuple(0 if bias.shape[d] == 1 else bias.stride(d) for d in (-2, -1))


def rates_of(eps: Tensor, power: Tensor, weight: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is added to d^2, and the power."""
    shift = eps if weight == "inverse" else torch.zeros_like(eps)
    return tuple(t.to(dtype).contiguous() for t in (shift, power))


def _launch(kernel, rows: int, across: int, e: slice, options: dict, *arguments) -> None:
    grid = ((e.stop - e.start) * triton.cdiv(rows, options["R"]) * across,)
    kernel[grid](*arguments, **options)


def backend() -> str:
    return "hip" if torch.version.hip else "cuda"


def attention(
    parts: Sequence[Part],
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
    """As horosphere.kernels.tiled.attention.attention; eps and power (B,) in float64."""
    points = Points(parts, batch, dtype)
    masking = Masking(bias, causal, dropout_p, seed, weight, batch, points.n, value.device)
    values = flat(value, batch, 2).to(dtype).contiguous()
    entries, m, width = values.shape
    out = values.new_zeros(entries, points.n, width)
    lse = values.new_full((entries, points.n), -torch.inf)
    if points.n and m:
        sides, rates = (points.queries, points.keys), rates_of(eps, power, weight, dtype)
        _average(points, masking, sides, rates, values, lse, out, resolve, False)
    return out.mul_(masking.gain).view(*batch, points.n, width), lse.view(*batch, points.n)


def _average(
    points: Points,
    masking: Masking,
    sides: tuple[Side, Side],
    rates: Sequence[Tensor],
    values: Tensor,
    lse: Tensor,
    out: Tensor,
    resolve: bool,
    swapped: bool,
) -> None:
    own, other = sides
    width = values.shape[-1]
    options = options_for(points.dtype, backend())
    options |= {"V": columns_of(width, points.dtype), "RESOLVE": resolve, "SWAPPED": swapped, **masking.constants}
    for e, shapes in points.runs():
        _launch(
            attention_kernels.average, out.shape[1], triton.cdiv(max(1, width), options["V"]), e, shapes | options,
            *(t for pair in zip(own[e], other[e], strict=True) for t in pair),
            *(t[e] for t in (points.unit, *rates, values, lse)),
            masking.bias, masking.place[e], masking.keys[e], out[e],
            out.shape[1], values.shape[1], width, *masking.strides, masking.causal, masking.threshold,
        )  # fmt: skip


def attention_backward(
    parts: Sequence[Part],
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
    curvature: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the packed points, value, eps (B,), power (B,) and bias; ``wanted`` as in the tiled form."""
    points = Points(parts, batch, dtype)
    masking = Masking(bias, causal, dropout_p, seed, weight, batch, points.n, value.device)
    given = Given(batch, dtype, value, out, lse, dout, dlse, masking.gain)
    sums = Sums(batch, dtype, points.n, points.m, bias, wanted, value.device)
    dvalue = torch.zeros_like(given.values)
    dkappas = torch.zeros(len(parts), *given.lse.shape, dtype=dtype, device=value.device)
    sides, scalars = (points.queries, points.keys), rates_of(eps, power, weight, dtype)
    gradients = []
    if points.n and points.m:
        _average(points, masking, sides[::-1], scalars, given.dout, given.lse, dvalue, resolve, True)
    options = options_for(dtype, backend()) | masking.constants | {"RESOLVE": resolve}
    for k, part in enumerate(parts):
        found = []
        for swapped in (False, True):
            own, other = sides[::-1] if swapped else sides
            own_v, other_v = given.sides(swapped)
            length, others = own.features.shape[-1], other.features.shape[-1]
            dx = given.values.new_zeros(own.features.shape[0], length, part.x.shape[-1])
            dw = given.values.new_zeros(own.features.shape[0], length)
            options |= {
                "PART": k,
                "BEFORE": sum(points.sizes[:k]),
                "SWAPPED": swapped,
                "CURVATURE": curvature and not swapped,
                "F": columns_of(part.x.shape[-1], dtype),
                **sums.constants(swapped, k == 0),
            }
            for run, shapes in points.runs() if length and others else ():
                for e in sums.runs(run, options):
                    _launch(
                        attention_backward_kernels.points, length, triton.cdiv(part.x.shape[-1], options["F"]), e,
                        shapes | options, *(t for pair in zip(own[e], other[e], strict=True) for t in pair),
                        *(t[e] for t in (points.unit, *scalars, own_v, other_v, given.lse, given.mean)),
                        masking.bias, masking.place[e], masking.keys[e], dx[e], dw[e],
                        *(t[e] for t in (*sums.rates, dkappas[k])), sums.into(e, options),
                        length, others, given.values.shape[-1], *masking.strides, masking.causal, masking.threshold,
                    )  # fmt: skip
            found.append((dx, dw))
        gradients += _of_part(part, batch, points.kappas[k], found, dkappas[k])
    dvalue = dvalue.view(*batch, *dvalue.shape[1:]).sum_to_size(value.shape).to(value.dtype)
    return gradients, dvalue, *sums.gradients()


def _of_part(
    part: Part, batch: torch.Size, kappa: Tensor, found: Sequence[tuple[Tensor, Tensor]], dkappa: Tensor
) -> list[Tensor]:
    """Gradients of x, y, kappa and any weights from the kernels' sums."""
    power = torch.where(kappa != 0, kappa.abs(), 1.0) ** 2
    gradients = [2 * minkowski(dx, part.time_dims) for dx, _ in found]
    gradients.append(dkappa.sum(-1, dtype=torch.float64) / power)
    likes = [part.x, part.y, part.kappa]
    if part.wx is not None:
        gradients += [dw / flat(w, batch, 1) for (_, dw), w in zip(found, (part.wx, part.wy), strict=True)]
        likes += [part.wx, part.wy]
    return [
        g.view((*batch, *g.shape[1:])).sum_to_size(like.shape).to(like)
        for g, like in zip(gradients, likes, strict=True)
    ]

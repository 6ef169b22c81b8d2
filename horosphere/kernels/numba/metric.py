"""Attention under per-token metrics in a loop compiled by numba, the forward pass of long enough float32 sequences.

As :mod:`horosphere.kernels.numba.attention`, with the products of
:mod:`horosphere.kernels.tiled.metric_tiles`: a thread adds the square of each to its tile while both are in its
cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere.kernels.inputs import Inputs
from horosphere.kernels.numba.arguments import launch
from horosphere.kernels.numba.attention import ALL, HEIGHT, SIDE, streamed
from horosphere.kernels.tiled.metric import MetricScores
from horosphere.kernels.tiled.weights import WeightFunction


def attention(scores: MetricScores, inputs: Inputs, *, strict: bool) -> tuple[Tensor, Tensor]:
    """As horosphere.kernels.numba.attention.attention, for scores under per-token metrics."""
    return streamed("metric_attention", scores, inputs, strict, serves, CompiledGroup)


def serves(scores: MetricScores, e: slice, eps: Tensor) -> bool:
    """Whether weights keep to the range of their type."""
    return WeightFunction(
        "inverse", torch.ones(1, device="cpu"), eps[e], scores.tiles.extent(), scores.dtype, False
    ).reciprocal


class CompiledGroup:
    """Entries e of the batch."""

    def __init__(self, scores: MetricScores, e: slice, eps: Tensor, causal: int | None, value: Tensor):
        self.scores, self.e, self.eps = scores, e, eps[e]
        self.last, self.height = (ALL, HEIGHT) if causal is None else (causal + 1, HEIGHT // 2)
        self.value = value.to(torch.float32).contiguous()

    def forward(self, out: Tensor, den: Tensor) -> None:
        """Results into out (E, N, Dv) and den (E, N), contiguous."""
        from horosphere.kernels.numba.metric_loops import FORWARD, forward

        scores, tiles, e = self.scores, self.scores.tiles, self.e
        n, m, entries, shares = scores.n, scores.m, e.stop - e.start, torch.get_num_threads()
        resolve, memory, points = tiles.tolerance is not None, 2 * self.height * SIDE, tiles.flat.q.shape[-1]
        rates = [(rate, tiles.pair.share) for rate in self.eps.tolist()]
        given: dict[str, int | Tensor | None] = {
            "side": SIDE,
            "resolve": resolve,
            "last": self.last,
            "shares": shares,
            "entries": entries,
            "rows": n,
            "columns": m,
            "points": points,
            "wide": points + 2,
            "long": points + 1,
            "width": self.value.shape[-1],
            "height": self.height,
            "memory": memory,
            "scratch": scores.workspace("scratch", shares, memory),
            "out": out,
            "den": den,
            "rates": torch.tensor(rates, dtype=torch.float32, device="cpu"),
            "value": self.value,
            "values": self.value.shape[0],
            "batch": scores.batch.numel(),
            "start": e.start,
        }
        arrays = {"a": tiles.a, "b": tiles.b, "x": tiles.x, "y": tiles.y, "q": tiles.flat.q, "k": tiles.flat.k}
        given |= {name: t[e].contiguous() for name, t in arrays.items()}
        limits = tiles.limits if resolve else tiles.norms  # not read
        for at, (end, side, length) in enumerate((("q", tiles.query, n), ("k", tiles.key, m))):
            given[f"scales_{end}"] = den.new_zeros(entries, length) if side is None else side.scales[e].contiguous()
            given[f"norms_{end}"] = tiles.norms[at][e].contiguous()
            given[f"limits_{end}"] = limits[at][e].contiguous()
            given[f"columns_{end}"] = None if side is None else side.columns
            given[f"ranks_{end}"] = 0 if side is None else side.columns.shape[0]
        launch(forward, FORWARD, given, shares)

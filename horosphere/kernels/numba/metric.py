"""Attention under per-token metrics in a loop compiled by numba, the forward pass of long enough float32 sequences.

As :mod:`horosphere.kernels.numba.attention`, with the products of
:mod:`horosphere.kernels.tiled.metric_tiles`: a thread adds the square of each to its tile while both are in its
cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere.kernels.numba.attention import ALL, HEIGHT, OUT_OF_RANGE, SIDE, launch
from horosphere.kernels.tiled.attention import Stream
from horosphere.kernels.tiled.metric_scores import MetricScores
from horosphere.kernels.tiled.weights import Weighing


def attention(scores: MetricScores, *arguments, strict: bool) -> tuple[Tensor, Tensor]:
    """As horosphere.kernels.numba.attention.attention, for scores under per-token metrics."""
    stream = Stream(scores, *arguments)
    for e in stream.groups():
        if serves(scores, e, stream.eps):
            group = CompiledGroup(scores, e, stream.eps, stream.mask.causal, stream.values[e])
            group.forward(stream.out[e], stream.den[e])
        elif strict:
            raise ValueError(f"impl='numba' cannot serve this call: {OUT_OF_RANGE}; use impl='auto'")
        else:
            stream.add(e)
    return stream.result()


def serves(scores: MetricScores, e: slice, eps: Tensor) -> bool:
    """Whether weights keep to the range of their type."""
    return Weighing(
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
        from horosphere.kernels.numba.metric_loops import GIVEN, forward

        scores, tiles, e = self.scores, self.scores.tiles, self.e
        n, m, entries, shares = scores.n, scores.m, e.stop - e.start, torch.get_num_threads()
        resolve = tiles.tolerance is not None
        numbers = torch.tensor(
            [(rate, tiles.fibres.share) for rate in self.eps.tolist()], dtype=torch.float32, device="cpu"
        )
        memory = 2 * self.height * SIDE
        given = [SIDE, resolve, self.last, shares, entries, n, m, tiles.flat.q.shape[-1], self.value.shape[-1]]
        given += [self.height, scores.lent("scratch", shares, memory), memory, out, den, numbers]
        given += [t[e].contiguous() for t in (tiles.a, tiles.b, tiles.x, tiles.y, tiles.flat.q, tiles.flat.k)]
        given += [self.value, self.value.shape[0]]
        for side, length in ((tiles.query, n), (tiles.key, m)):
            given.append(den.new_zeros(entries, length) if side is None else side.scales[e].contiguous())
        given += [t[e].contiguous() for t in (*tiles.norms, *(tiles.limits if resolve else tiles.norms))]
        for side in (tiles.query, tiles.key):
            given += [None, 0] if side is None else [side.columns, side.columns.shape[0]]
        given += [scores.batch.numel(), e.start]
        launch(forward, GIVEN, given, shares)

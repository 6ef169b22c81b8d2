"""Attention of a group of batch entries in loops compiled by numba, for long enough float32 sequences on CPUs.

The loops of torch operations make seven passes over a tile forward and fourteen backward, and what they spend between
them is as much again. Here a thread takes a head, or some rows of one; tiles stay in its cache; from one product to the
next it makes a pass that adds norms to products, weighs, looks for unresolved pairs and sums. Pairs found are worked
from differences, with their gradients. Threads and products are torch's, see :mod:`horosphere._libtorch`.

Served are weights 1 / (d^2 + eps) of one chord part without time coordinates, with or without a causal border.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from horosphere.kernels.chord import arcs
from horosphere.kernels.dispatch import left_to_tiles
from horosphere.kernels.inputs import Inputs, Results
from horosphere.kernels.numba.arguments import launch
from horosphere.kernels.tiled.attention import Stream
from horosphere.kernels.tiled.attention_backward import Backward
from horosphere.kernels.tiled.near import Near
from horosphere.kernels.tiled.scores import Scores
from horosphere.kernels.tiled.weights import WeightFunction

if TYPE_CHECKING:
    from horosphere.kernels.tiled.chord_scores import ChordScores

# Rows and columns of a tile: with two of them and the operands a thread stays within a second-level cache of 2 MiB. Of
# half as many rows where a causal border cuts through tiles.
HEIGHT, SIDE = 256, 512
# More columns than any sequence has.
ALL = 2**40

S = TypeVar("S", bound=Scores)

OUT_OF_RANGE = "weights or arcs of these points leave the range of float32"


def attention(scores: ChordScores, inputs: Inputs, *, strict: bool) -> tuple[Tensor, Tensor]:
    """As horosphere.kernels.tiled.attention.attention.

    Entries whose weights or arcs leave the range of float32 are worked in tiles, or a ValueError where ``strict``.
    """
    return streamed("attention", scores, inputs, strict, serves, CompiledGroup)


class Forward(Protocol):
    """A group of batch entries."""

    def forward(self, out: Tensor, den: Tensor) -> None:
        """Results into out (E, N, Dv) and den (E, N), contiguous."""


def streamed(
    operation: str,
    scores: S,
    inputs: Inputs,
    strict: bool,
    serves: Callable[[S, slice, Tensor], bool],
    group: Callable[[S, slice, Tensor, int | None, Tensor], Forward],
) -> tuple[Tensor, Tensor]:
    """Group after group: compiled where ``serves`` allows, in tiles or, where ``strict``, refused elsewhere."""
    stream = Stream(scores, inputs)
    for e in stream.groups():
        if serves(scores, e, stream.eps):
            group(scores, e, stream.eps, stream.mask.causal, stream.values[e]).forward(stream.out[e], stream.den[e])
        elif strict:
            raise ValueError(f"impl='numba' cannot serve this call: {OUT_OF_RANGE}; use impl='auto'")
        else:
            left_to_tiles(operation, OUT_OF_RANGE)
            stream.add(e)
    return stream.result()


def attention_backward(
    scores: ChordScores, inputs: Inputs, results: Results, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As horosphere.kernels.tiled.attention_backward.attention_backward."""
    backward = Backward(scores, inputs, results, wanted)
    for e in backward.groups():
        if not serves(scores, e, backward.eps):
            left_to_tiles("attention_backward", OUT_OF_RANGE)
            backward.add(e)
            continue
        into, value = backward.into, backward.value
        place = into.memory(e)
        dv = value.new_zeros(e.stop - e.start, *value.shape[-2:]).float() if place is None else place
        out, lse, dout, dlse = (t[e] for t in (backward.outs, backward.lses, backward.douts, backward.dlses))
        group = CompiledGroup(scores, e, backward.eps, backward.mask.causal, backward.values[e])
        found = group.backward(out, lse, dout, dlse, backward.wanted[0], dv)
        backward.deps[e] += found.to(backward.deps.dtype)
        if place is None:
            into.add_(e, dv, slice(None))
    return backward.result()


class CompiledGroup:
    """Entries e of the batch, whose features have been made."""

    def __init__(self, scores: ChordScores, e: slice, eps: Tensor, causal: int | None, value: Tensor):
        self.scores, self.entries, self.eps = scores, e.stop - e.start, eps[e]
        self.s = slice(e.start - scores.ready.start, e.stop - scores.ready.start)
        self.last, self.height = (ALL, HEIGHT) if causal is None else (causal + 1, HEIGHT // 2)
        self.value = value.to(torch.float32).contiguous()

    def forward(self, out: Tensor, den: Tensor) -> None:
        """Results into out (E, N, Dv) and den (E, N), contiguous."""
        from horosphere.kernels.numba.attention_loops import FORWARD, forward

        given = self._points(self.height * SIDE) | {"out": out, "den": den}
        launch(forward, FORWARD, given, torch.get_num_threads())

    def backward(self, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor, learned: bool, dv: Tensor) -> Tensor:
        """Adds the gradient of the value to dv (E, M, Dv), contiguous, and what the points get to the sums of the
        scores; returns that of eps, (E,) in float64, where it is ``learned``.
        """
        from horosphere.kernels.numba.attention_backward_loops import BACKWARD, backward

        sums, s = self.scores.sums[0], self.s
        sums.compiled, sums.scale[s] = True, -1.0
        threads = torch.get_num_threads()
        # rows of an entry are shared out where there are few entries
        alone = self.entries % threads == 0 or self.entries >= 2 * threads
        stretches = 1 if alone else min(-(-threads // self.entries), -(-self.scores.n // self.height))
        q, k = sums.queries, sums.keys
        rows_z = out.new_zeros(self.entries, self.scores.n, dtype=torch.float32)
        columns = {
            "dk": k.main[s],
            "sums_columns": k.first[s],
            "sums_columns_t": None if k.second is None else k.second[s],
            "dv": dv,
        }
        apart = columns
        if stretches > 1:
            apart = {name: None if t is None else t.new_zeros(stretches, *t.shape) for name, t in columns.items()}
        results = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
        given = self._points(2 * (self.height + 1) * SIDE)
        given |= {name: t.to(torch.float32).contiguous() for name, t in results.items()}
        given |= {"learned": learned, "stretches": stretches, "stretched": stretches * self.entries}
        given |= {"dq": q.main[s], "sums_rows": q.first[s], "sums_rows_z": rows_z}
        given |= {"sums_rows_t": None if q.second is None else q.second[s]} | apart
        launch(backward, BACKWARD, given, threads)
        if stretches > 1:
            for into, parts in zip(columns.values(), apart.values(), strict=True):
                if into is not None and parts is not None:
                    into += parts.sum(0)
        return -rows_z.sum(-1, dtype=torch.float64)  # 0 where it is not learned

    def _points(self, memory: int) -> dict[str, int | Tensor | None]:
        """What both directions take; every thread has ``memory`` numbers of its own."""
        scores, s, f = self.scores, self.s, self.scores.features[0]
        near, rates = Near(f, s, self.eps, False), self.eps.tolist()
        units = [0.5 / c if f.sign else 1.0 for c in f.c[s]]
        rows = [(*three, f.theta) for three in zip(rates, near.shift, units, strict=True)]
        x, y = ((t if t.shape[0] == 1 else t[s]).to(torch.float32).contiguous() for t in (f.part.x, f.part.y))
        vectors = {"cx": f.scaled, "rx": f.scaled * f.nx, "n": f.n, "w": f.w}
        shares = torch.get_num_threads()
        return {
            "side": SIDE,
            "sign": f.sign,
            "resolve": scores.resolve and not near.never,
            "last": self.last,
            "weighted": f.wx is not None,
            "shares": shares,
            "entries": self.entries,
            "rows": scores.n,
            "columns": scores.m,
            "points": x.shape[-1],
            "width": self.value.shape[-1],
            "values": self.value.shape[0],
            "xs": x.shape[0],
            "ys": y.shape[0],
            "height": self.height,
            "memory": memory,
            "value": self.value,
            "x": x,
            "y": y,
            "rates": torch.tensor(rows, dtype=torch.float32, device="cpu"),
            "scratch": scores.workspace("scratch", shares, memory),
            **{name: t[s].contiguous() for name, t in vectors.items()},
        }


def serves(scores: ChordScores, e: slice, eps: Tensor) -> bool:
    """Whether weights and arcs keep to the range of their type: one answer for all entries made ready at once."""
    scores.make_ready(e)
    f, ready = scores.features[0], scores.ready
    weighing = WeightFunction(
        "inverse", torch.ones(1, device="cpu"), eps[ready], f.extent(slice(None)), scores.dtype, False
    )
    return weighing.reciprocal and not any(arcs.overflows(t, scores.dtype) for t in f.largest)

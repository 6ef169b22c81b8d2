r"""Attention tile by tile: weights exist for one tile at a time, and memory grows like N + M.

Where weights stay within the range of the type they are summed as they are; elsewhere under the running maximum of
their logarithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from horosphere.kernels.inputs import Inputs
from horosphere.kernels.reference.attention import needed
from horosphere.kernels.tiled.entries import Entries
from horosphere.kernels.tiled.products import Blocks, Buffers, add_product, one
from horosphere.kernels.tiled.scores import Scores
from horosphere.kernels.tiled.tiles import tile_size
from horosphere.kernels.tiled.weights import Dropout, Mask, WeightFunction

# Rows and columns of a tile of one batch entry, and those of short sequences: more entries share a tile then, and a
# causal mask leaves out more of them.
SIDE, SHORT_SIDE = 512, 256
# Columns up to which a sequence is short: the sums of a group's columns are a few MiB then.
SHORT = 2048


class Plan:
    """How B matrices (N, M) are cut: groups of batch entries, blocks of rows and of columns.

    A thread works a batch entry at a time; small matrices share a tile.
    """

    def __init__(self, signs: Sequence[object], n: int, m: int, device: torch.device):
        size = tile_size(device)
        threads = torch.get_num_threads() if device.type == "cpu" else 1
        short = m <= SHORT and len(signs) * SHORT_SIDE**2 >= threads * size
        side = SHORT_SIDE if short else SIDE
        area = min(size, side * side) if device.type == "cpu" else size
        self.r = _even(n, side)
        self.c = _even(m, max(side, area // max(1, self.r)))
        self.e = max(1, threads * size // max(1, self.r * self.c))
        self.signs, self.n, self.m = signs, n, m
        self.numbers = min(self.e, len(signs)) * self.r * self.c

    def groups(self) -> Iterator[slice]:
        start = 0
        while start < len(self.signs):
            stop = start + 1
            while stop < min(start + self.e, len(self.signs)) and self.signs[stop] == self.signs[start]:
                stop += 1
            yield slice(start, stop)
            start = stop

    def rows(self) -> list[slice]:
        return _slices(self.n, self.r)

    def columns(self) -> list[slice]:
        return _slices(self.m, self.c)


def _even(length: int, most: int) -> int:
    """Size of equal blocks of at most ``most``."""
    count = max(1, -(-length // most))
    return -(-length // count)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, length)) for i in range(0, length, max(1, size))]


def attention(scores: Scores, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out (..., N, Dv) and lse (..., N)."""
    stream = Stream(scores, inputs)
    for e in stream.groups():
        stream.add(e)
    return stream.result()


class Stream:
    """Results of attention, made group by group; arguments as of :func:`attention`."""

    def __init__(self, scores: Scores, inputs: Inputs):
        value, self.eps, self.power, bias, causal, self.weight, dropout_p, seed = inputs
        batch, dtype, entries = scores.batch, scores.dtype, scores.batch.numel()
        self.scores = scores
        self.values = Entries(value, batch, 2)
        self.out = torch.empty(entries, scores.n, value.shape[-1], dtype=dtype, device=scores.device)
        self.den = torch.zeros(entries, scores.n, dtype=dtype, device=scores.device)
        self.top: Tensor | None = None
        self.plan = Plan(scores.signs, scores.n, scores.m, scores.device)
        self.buffers = Buffers(scores.workspace, scores.tensors, self.plan.numbers)
        self.rows, self.columns = self.plan.rows(), self.plan.columns()
        self.mask = Mask(bias, causal, batch)
        self.dropout = Dropout(needed(seed), entries, scores.n, dropout_p) if dropout_p else None
        if not scores.m:
            self.out.zero_()

    def groups(self) -> Iterator[slice]:
        """Batch entries that share tiles."""
        return self.plan.groups() if self.scores.n and self.scores.m else iter(())

    def add(self, e: slice) -> None:
        """The results of a group."""
        scores, mask, width = self.scores, self.mask, self.out.shape[-1]
        shift = self.eps[e] if self.weight == "inverse" else torch.zeros_like(self.eps[e])
        group = scores.group(e, shift)
        weighing = WeightFunction(self.weight, self.power[e], shift, group.extent(), scores.dtype, mask.biased)
        v = Blocks(self.values[e].to(scores.dtype), e.stop - e.start)
        for i in self.rows:
            num = scores.workspace("numerator", e.stop - e.start, i.stop - i.start, width)
            sums = Sums(num, self.den[e, i]) if weighing.plain else SumsOverTop(num, self.den[e, i])
            for j in self.columns:
                if mask.nobody(i, j):
                    break
                z = group.tile(i, j, self.buffers, False)
                if isinstance(sums, SumsOverTop):
                    w = sums.below_top_(mask.logits_(weighing.logits_(z), e, i, j))
                else:
                    w = mask.weights_(weighing.weights_(z), e, i, j)
                sums.den += w.sum(-1)  # that of all weights
                if self.dropout is not None:
                    self.dropout.apply_(w, e, i, j)
                sums.add(one(w), v[j])
            sums.mean(self.out[e, i], mask.some)
            if isinstance(sums, SumsOverTop):
                self.top = torch.zeros_like(self.den) if self.top is None else self.top
                self.top[e, i] = sums.top.squeeze(-1)

    def result(self) -> tuple[Tensor, Tensor]:
        """out and lse, of all groups."""
        self.scores.workspace.back()
        lse = self.den.log_()  # -inf where no key took part
        if self.top is not None:
            lse.add_(self.top)
        batch = self.scores.batch
        return self.out.view(*batch, *self.out.shape[1:]), lse.view(*batch, self.scores.n)


class Sums:
    """Numerator (E, R, Dv) and denominator (E, R) of some rows, in the memory given, ``den`` 0."""

    def __init__(self, num: Tensor, den: Tensor):
        self.num, self.den, self.into = num, den, one(num)
        self.empty = True  # the first product overwrites the numerator

    def add(self, w: Tensor, v: Tensor) -> None:
        add_product(self.into, w, v, beta=0 if self.empty else 1)
        self.empty = False

    def mean(self, out: Tensor, empty_rows: bool) -> None:
        """The quotient into ``out``; 0 in rows without keys, of which there may be some where ``empty_rows``."""
        if self.empty:
            self.num.zero_()
        den = torch.where(self.den == 0, 1.0, self.den) if empty_rows else self.den
        torch.div(self.num, den.unsqueeze(-1), out=out)


class SumsOverTop(Sums):
    """The same over exp(top), the running maximum of the logarithms (E, R, 1)."""

    def __init__(self, num: Tensor, den: Tensor):
        super().__init__(num.zero_(), den)
        self.empty = False
        self.top = num.new_full((*den.shape, 1), -torch.inf)

    def below_top_(self, logits: Tensor) -> Tensor:
        """Weights in place of logits; what was summed before is brought to the new maximum."""
        higher = torch.maximum(self.top, logits.amax(-1, keepdim=True))
        base = torch.where(higher == -torch.inf, 0.0, higher)
        shrink = torch.exp(self.top - base)
        self.num.mul_(shrink)
        self.den.mul_(shrink.squeeze(-1))
        self.top = higher
        return logits.sub_(base).exp_()

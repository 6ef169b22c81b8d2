r"""Attention tile by tile: weights exist for one tile at a time, and memory grows like N + M.

Values carry a column of ones, so one product adds a tile to numerator and denominator. Where weights stay within the
range of the type they are summed as they are; elsewhere under the running maximum of their logarithms.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from horosphere.kernels.blocked.chord_scores import ChordScores
from horosphere.kernels.blocked.entries import Entries
from horosphere.kernels.blocked.tiles import tile_size
from horosphere.kernels.blocked.weighing import Dropout, Mask, Weighing

# Rows and columns of a tile of one batch entry.
ROWS, COLUMNS = 512, 512


class Plan:
    """How B matrices (N, M) are cut: groups of batch entries, blocks of rows and of columns.

    A thread works a batch entry at a time; small matrices share a tile.
    """

    def __init__(self, signs: list, n: int, m: int, device: torch.device, rows: int = ROWS, columns: int = COLUMNS):
        size = tile_size(device)
        threads = torch.get_num_threads() if device.type == "cpu" else 1
        each = min(size, rows * columns) if device.type == "cpu" else size
        self.r = _even(n, rows)
        self.c = _even(m, max(columns, each // max(1, self.r)))
        self.e = max(1, threads * each // max(1, self.r * self.c))
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


def attention(
    scores: ChordScores,
    value: Tensor,
    eps: Tensor,
    power: Tensor,
    bias: Tensor | None,
    causal: int | None,
    weight: str,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out (..., N, Dv) and lse (..., N); eps and power (B,) in float64."""
    batch, dtype, entries = scores.batch, scores.dtype, scores.batch.numel()
    values = Entries(value, batch, 2)
    out = torch.zeros(entries, scores.n, value.shape[-1], dtype=dtype, device=scores.device)
    lse = torch.full((entries, scores.n), -torch.inf, dtype=dtype, device=scores.device)
    plan = Plan(scores.signs, scores.n, scores.m, scores.device)
    buffers = torch.empty(scores.tensors, plan.numbers, dtype=dtype, device=scores.device)
    mask = Mask(bias, causal, batch)
    dropout = Dropout(seed, entries, scores.n, dropout_p) if dropout_p else None
    for e in plan.groups() if scores.n and scores.m else ():
        shift = eps[e] if weight == "inverse" else torch.zeros_like(eps[e])
        group = scores.group(e, shift)
        weighing = Weighing(weight, power[e], shift, group.extent(), dtype, mask.biased)
        with_ones = append(values[e].to(dtype), 1.0)
        for i in plan.rows():
            sums, top = _row_block(group, weighing, mask, dropout, with_ones, e, i, plan.columns(), buffers)
            den = sums[..., -1]
            some = den != 0  # NaN counts
            torch.div(sums[..., :-1], torch.where(some, den, 1.0).unsqueeze(-1), out=out[e, i])
            lse[e, i] = torch.where(some, den.log() if top is None else den.log() + top.squeeze(-1), -torch.inf)
    return out.view(*batch, *out.shape[1:]), lse.view(*batch, scores.n)


def _row_block(
    group, weighing: Weighing, mask: Mask, dropout: Dropout | None, v: Tensor, e: slice, i: slice, columns, buffers
) -> tuple[Tensor, Tensor | None]:
    """Sums of weights times (value, 1), (E, R, Dv + 1), and the running maximum (E, R, 1) where there is one."""
    sums = v.new_zeros(e.stop - e.start, i.stop - i.start, v.shape[-1])
    top = None if weighing.plain else sums.new_full((*sums.shape[:2], 1), -torch.inf)
    for j in columns:
        if mask.nobody(i, j):
            break
        z = group.tile(i, j, buffers, False)
        if weighing.plain:
            w = mask.weights_(weighing.weights_(z), e, i, j)
        else:
            w = mask.logits_(weighing.logits_(z), e, i, j)
            higher = torch.maximum(top, w.amax(-1, keepdim=True))
            base = torch.where(higher == -torch.inf, 0.0, higher)
            sums.mul_(torch.exp(top - base))
            w.sub_(base).exp_()
            top = higher
        if dropout is not None:  # the denominator is that of all weights
            sums[..., -1] += w.sum(-1)
            dropout.apply_(w, e, i, j)
            sums[..., :-1] += w @ v[:, j, :-1]
        else:
            accumulate(sums, w, v[:, j])
    return sums, top


def append(t: Tensor, last: float | Tensor) -> Tensor:
    """t (..., F) with one more column."""
    out = t.new_empty(*t.shape[:-1], t.shape[-1] + 1)
    out[..., :-1], out[..., -1] = t, last
    return out


def accumulate(into: Tensor, g: Tensor, features: Tensor) -> None:
    """into (E, R, F) += g (E, R, C) features (E or 1, C, F)."""
    if into.shape[0] == 1:
        into[0].addmm_(g[0], features[0])
    else:
        into.baddbmm_(g, features.expand(g.shape[0], -1, -1))

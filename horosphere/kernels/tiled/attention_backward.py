r"""Gradients of attention by recomputing tiles.

With W = w / den, :math:`c_i = \langle do_i, o_i\rangle - dlse_i` and l the logarithm of w

    dL/dl_ij = W_ij (<do_i, v_j> - c_i),   dv_j = sum_i W_ij do_i,   dL/dz_ij = -power dL/dl_ij g'(z_ij)

g as in the reference. do and c are divided by the denominator beforehand and lie side by side, as values and ones do,
so that the bracket is one product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from horosphere.kernels.inputs import Inputs, Results
from horosphere.kernels.reference.attention import needed
from horosphere.kernels.tiled.attention import Plan
from horosphere.kernels.tiled.entries import Entries
from horosphere.kernels.tiled.products import Blocks, Buffers, add_product, append, multiply, one
from horosphere.kernels.tiled.scores import Scores
from horosphere.kernels.tiled.weights import Dropout, Mask, WeightFunction

# Blocks of rows for which what the loop takes from the result is made at once.
READY = 8


def attention_backward(
    scores: Scores, inputs: Inputs, results: Results, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of value, eps (B,), power (B,) and bias; those of the points stay with ``scores``. ``wanted``: whether
    those of eps, power and bias are.
    """
    backward = Backward(scores, inputs, results, wanted)
    for e in backward.groups():
        backward.add(e)
    return backward.result()


class Backward:
    """Gradients of attention, made group by group; arguments as of :func:`attention_backward`, its results in one."""

    def __init__(self, scores: Scores, inputs: Inputs, results: Results, wanted: tuple[bool, bool, bool]):
        value, eps, power, bias, causal, self.weight, dropout_p, seed = inputs
        batch, dtype, entries, n = scores.batch, scores.dtype, scores.batch.numel(), scores.n
        self.scores, self.value, self.eps, self.power = scores, value, eps, power
        self.wanted, self.bias = wanted, bias
        self.values = Entries(value, batch, 2)
        self.into = self.values.zeros(dtype)
        out, lse, dout, dlse = results
        self.outs, self.lses, self.douts = (Entries(t, batch, own) for t, own in ((out, 2), (lse, 1), (dout, 2)))
        self.dlses = Entries(dlse, batch, 1)
        self.plan = Plan(scores.signs, n, scores.m, scores.device)
        self.buffers = Buffers(scores.workspace, scores.tensors + 2, self.plan.numbers)
        self.rows, self.columns = self.plan.rows(), self.plan.columns()
        self.mask = Mask(bias, causal, batch)
        self.dropout = Dropout(needed(seed), entries, n, dropout_p) if dropout_p else None
        self.deps, self.dpower = torch.zeros_like(eps), torch.zeros_like(power)
        self.dbias = BiasGradient(bias, batch, dtype) if bias is not None and wanted[2] else None
        scores.prepare_gradients()

    def groups(self) -> Iterator[slice]:
        """Batch entries that share tiles."""
        return self.plan.groups() if self.scores.n and self.scores.m else iter(())

    def add(self, e: slice) -> None:
        """What a group gives."""
        scores, mask, dropout, buffers, wanted = self.scores, self.mask, self.dropout, self.buffers, self.wanted
        dtype, weight = scores.dtype, self.weight
        shift = self.eps[e] if weight == "inverse" else torch.zeros_like(self.eps[e])
        group = scores.group(e, shift)
        weighing = WeightFunction(weight, self.power[e], shift, group.extent(), dtype, mask.biased)
        size = e.stop - e.start
        v = Blocks(append(self.values[e].to(dtype), 1.0), size, transposed=True)
        scale = -self.power[e]
        dv: dict[int, Tensor] = {}
        given = [t[e] for t in (self.outs, self.lses, self.douts, self.dlses)]
        ready = slice(0, 0)
        for i in self.rows:
            if i.stop > ready.stop:
                ready = slice(i.start, i.start + READY * self.plan.r)
                base, upper = _rows(weighing, dtype, *(t[:, ready] for t in given))
                uppers, bare = Blocks(upper, size), Blocks(upper[..., :-1], size)
            at = slice(i.start - ready.start, i.stop - ready.start)
            one_upper, one_bare = uppers[at], bare[at]
            for j in self.columns:
                if mask.nobody(i, j):
                    break
                z = group.tile(i, j, buffers, True)
                w, (g, into_g) = buffers.tile(scores.tensors, *z.shape)[0], buffers.tile(scores.tensors + 1, *z.shape)
                if weighing.reciprocal:
                    w = mask.weights_(z.reciprocal_(), e, i, j)
                elif weighing.plain:
                    mask.weights_(weighing.weights_(w.copy_(z)), e, i, j)
                else:
                    mask.logits_(weighing.logits_(w.copy_(z)), e, i, j).sub_(base[:, at]).exp_()
                if j.start not in dv:
                    dv[j.start] = z.new_zeros(size, j.stop - j.start, self.value.shape[-1])
                kept = w if dropout is None else dropout.apply_(w.clone(), e, i, j)
                add_product(one(dv[j.start]), one(kept).mT, one_bare)
                if dropout is None:
                    multiply(one_upper, v[j], into_g)
                else:
                    multiply(one_bare, v[j][..., :-1, :], into_g)
                    dropout.apply_(g, e, i, j).add_(upper[:, at, -1:])
                g.mul_(w)
                if self.dbias is not None:
                    self.dbias.add(e, i, j, g)
                if wanted[1]:
                    measured = w.log().neg_() if weighing.reciprocal else weighing.measure(z)
                    self.dpower[e] -= torch.where(g == 0, 0.0, g * measured).sum((-1, -2)).to(self.dpower.dtype)
                g = g.mul_(w) if weighing.reciprocal else weighing.slope_(g, z)
                if wanted[0] and weight == "inverse":
                    self.deps[e] += scale * g.sum((-1, -2)).to(self.deps.dtype)
                group.backward(i, j, g)
            group.rows_done(i, scale)
        group.finish(scale)
        for start, gradient in dv.items():
            self.into.add_(e, gradient, slice(start, start + gradient.shape[1]))

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Of value, eps, power and bias."""
        dbias = None if self.dbias is None or self.bias is None else self.dbias.t.to(self.bias.dtype)
        return self.into.t.to(self.value.dtype), self.deps, self.dpower, dbias


def _rows(
    weighing: WeightFunction, dtype: torch.dtype, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor]:
    """What is subtracted from logits (E, N, 1), and (do, -c) / den (E, N, Dv + 1); 0 in rows without keys."""
    empty = (lse == -torch.inf).unsqueeze(-1)
    c = (dout * out).sum(-1)
    upper = append(dout.to(dtype), dlse - c)
    base = torch.where(empty, 0.0, lse.unsqueeze(-1))
    if weighing.plain:
        upper.mul_(torch.exp(-base))
    return base, upper.masked_fill_(empty, 0.0)


class BiasGradient:
    """The sum of dL/dl over everything along which the bias was broadcast."""

    def __init__(self, bias: Tensor, batch: torch.Size, dtype: torch.dtype):
        self.t = torch.zeros(bias.shape, dtype=dtype, device=bias.device)
        self.entries = Entries(self.t, batch, 2)

    def add(self, e: slice, i: slice, j: slice, g: Tensor) -> None:
        view = self.entries.view
        if view.shape[-2] == 1:
            g, i = g.sum(-2, keepdim=True), slice(None)
        if view.shape[-1] == 1:
            g, j = g.sum(-1, keepdim=True), slice(None)
        for k, part in zip(range(e.start, e.stop), g.unbind(0), strict=True):
            view[self.entries.place(k)][i, j] += part

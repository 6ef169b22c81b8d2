r"""Gradients of attention by recomputing tiles.

With W = w / den, :math:`c_i = \langle do_i, o_i\rangle - dlse_i` and l the logarithm of w

    dL/dl_ij = W_ij (<do_i, v_j> - c_i),   dv_j = sum_i W_ij do_i,   dL/dz_ij = -power dL/dl_ij g'(z_ij)

g as in the reference. do and c are divided by the denominator beforehand and lie side by side, as values and ones do,
so that the bracket is one product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere.kernels.numba import attention as compiled_attention
from horosphere.kernels.numba.attention import CompiledGroup
from horosphere.kernels.tiled.attention import Plan
from horosphere.kernels.tiled.chord_scores import ChordScores
from horosphere.kernels.tiled.entries import Entries
from horosphere.kernels.tiled.products import Blocks, Buffers, add_product, append, multiply, one
from horosphere.kernels.tiled.weights import Dropout, Mask, Weighing

# Blocks of rows for which what the loop takes from the result is made at once.
READY = 8


def attention_backward(
    scores: ChordScores,
    value: Tensor,
    eps: Tensor,
    power: Tensor,
    bias: Tensor | None,
    causal: int | None,
    weight: str,
    dropout_p: float,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of value, eps (B,), power (B,) and bias; those of the points stay with ``scores``. ``wanted``: whether
    those of eps, power and bias are.
    """
    batch, dtype, entries, n = scores.batch, scores.dtype, scores.batch.numel(), scores.n
    values = Entries(value, batch, 2)
    into = Entries(torch.zeros(value.shape, dtype=dtype, device=value.device), batch, 2)
    outs, lses, douts = (Entries(t, batch, own) for t, own in ((out, 2), (lse, 1), (dout, 2)))
    dlses = None if dlse is None else Entries(dlse, batch, 1)
    plan = Plan(scores.signs, n, scores.m, scores.device)
    buffers = Buffers(scores.lent, scores.tensors + 2, plan.numbers)
    rows, columns = plan.rows(), plan.columns()
    mask = Mask(bias, causal, batch)
    dropout = Dropout(seed, entries, n, dropout_p) if dropout_p else None
    deps, dpower = torch.zeros_like(eps), torch.zeros_like(power)
    dbias = BiasGradient(bias, batch, dtype) if wanted[2] else None
    compiled = not wanted[1] and compiled_attention.may_serve(scores, value, weight, power, bias, dropout_p)
    scores.prepare_gradients()
    for e in plan.groups() if n and scores.m else ():
        if compiled and compiled_attention.serves(scores, e, eps):
            dv = into.whole[e] if into.own_memory else value.new_zeros(e.stop - e.start, *value.shape[-2:], dtype=dtype)
            given = (None if t is None else t[e] for t in (outs, lses, douts, dlses))
            found = CompiledGroup(scores, e, eps, causal, values[e]).backward(*given, wanted[0], dv)
            deps[e] += found.to(deps.dtype)
            if not into.own_memory:
                into.add_(e, dv, slice(None))
            continue
        shift = eps[e] if weight == "inverse" else torch.zeros_like(eps[e])
        group = scores.group(e, shift)
        weighing = Weighing(weight, power[e], shift, group.extent(), dtype, mask.biased)
        size = e.stop - e.start
        v = Blocks(append(values[e].to(dtype), 1.0), size, transposed=True)
        scale = -power[e]
        dv: dict[int, Tensor] = {}
        given = [t[e] for t in (outs, lses, douts)]
        if dlses is not None:
            given.append(dlses[e])
        ready = slice(0, 0)
        for i in rows:
            if i.stop > ready.stop:
                ready = slice(i.start, i.start + READY * plan.r)
                base, upper = _rows(weighing, dtype, *(t[:, ready] for t in given))
                uppers, bare = Blocks(upper, size), Blocks(upper[..., :-1], size)
            at = slice(i.start - ready.start, i.stop - ready.start)
            one_upper, one_bare = uppers[at], bare[at]
            for j in columns:
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
                    dv[j.start] = z.new_zeros(size, j.stop - j.start, value.shape[-1])
                kept = w if dropout is None else dropout.apply_(w.clone(), e, i, j)
                add_product(one(dv[j.start]), one(kept).mT, one_bare)
                if dropout is None:
                    multiply(one_upper, v[j], into_g)
                else:
                    multiply(one_bare, v[j][..., :-1, :], into_g)
                    dropout.apply_(g, e, i, j).add_(upper[:, at, -1:])
                g.mul_(w)
                if dbias is not None:
                    dbias.add(e, i, j, g)
                if wanted[1]:
                    measured = w.log().neg_() if weighing.reciprocal else weighing.measure(z)
                    dpower[e] -= torch.where(g == 0, 0.0, g * measured).sum((-1, -2)).to(dpower.dtype)
                g = g.mul_(w) if weighing.reciprocal else weighing.slope_(g, z)
                if wanted[0] and weight == "inverse":
                    deps[e] += scale * g.sum((-1, -2)).to(deps.dtype)
                group.pull(i, j, g)
            group.rows_done(i, scale)
        group.finish(scale)
        for start, gradient in dv.items():
            into.add_(e, gradient, slice(start, start + gradient.shape[1]))
    return into.t.to(value.dtype), deps, dpower, None if dbias is None else dbias.t.to(bias.dtype)


def _rows(
    weighing: Weighing, dtype: torch.dtype, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What is subtracted from logits (E, N, 1), and (do, -c) / den (E, N, Dv + 1); 0 in rows without keys."""
    empty = (lse == -torch.inf).unsqueeze(-1)
    c = (dout * out).sum(-1)
    upper = append(dout.to(dtype), -(c if dlse is None else c - dlse))
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

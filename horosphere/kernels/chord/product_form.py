"""Squared distances of few pairs in inner-product form, as operators of torch: augmented features, and their arc."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.chord import arcs
from horosphere.kernels.reference.attention import kappa_against
from horosphere.kernels.reference.sqdist import arc2_of


def left(x) -> Tensor:
    """Features a_i (..., N, F + 1 or 2) of a chord part with ``<a_i, b_j> = u_ij``, b_j from :func:`right`."""
    f = x.features.to(_numerics.fast_dtype(x.features.dtype))
    one = torch.ones_like(f[..., :1])
    if x.time_dims:
        kappa = kappa_against(x, 2)
        scale = 2 / (kappa.to(f.dtype) if isinstance(kappa, Tensor) else kappa)
        a = torch.cat((2 * f[..., : x.time_dims], -2 * f[..., x.time_dims :], scale * one), -1)
    else:
        a = torch.cat((-2 * f, (f * f).sum(-1, keepdim=True), one), -1)
    return a if x.weight is None else a * x.weight.to(f.dtype).unsqueeze(-1)


def right(y) -> Tensor:
    """Features b_j (..., M, F + 1 or 2) of a chord part, see :func:`left`."""
    g = y.features.to(_numerics.fast_dtype(y.features.dtype))
    one = torch.ones_like(g[..., :1])
    b = torch.cat((g, one) if y.time_dims else (g, one, (g * g).sum(-1, keepdim=True)), -1)
    return b if y.weight is None else b * y.weight.to(g.dtype).unsqueeze(-1)


def size(chord, side: int) -> Tensor:
    """Two numbers of every point, side 1 or -1: by their inner product, w_i w_j (|f_i|^2 + |f_j|^2), u is in error."""
    f = chord.features.to(_numerics.fast_dtype(chord.features.dtype))
    norm = (f * f).sum(-1)
    pair = torch.stack((norm, torch.ones_like(norm))[::side], -1)
    return pair if chord.weight is None else pair * chord.weight.to(f.dtype).unsqueeze(-1)


def arc2(u: Tensor, kappa: float | Tensor) -> Tensor:
    """Squared distances from squared chords u of any shape, clamped to [0, 4/kappa]; kappa broadcasts against u.

    One node of the graph, which keeps its argument and nothing else. The same function as
    :func:`horosphere.kernels.reference.sqdist.arc2_of`, which serves where signs of curvature are mixed, under
    torch.func transforms and inside torch.compile.
    """
    if not isinstance(kappa, Tensor):
        kappa = torch.tensor(kappa, dtype=torch.float64, device=u.device)
    if _numerics.transformed() or torch.compiler.is_compiling():
        return arc2_of(u, kappa)
    signs = {(k > 0) - (k < 0) for k in kappa.detach().flatten().tolist()}
    if len(signs) != 1:
        return arc2_of(u, kappa)
    sign = signs.pop()
    if sign == 0 and not kappa.requires_grad:
        return u.clamp(min=0.0)
    return arc2_of(u, kappa) if sign == 0 else _Arc2.apply(u, kappa, sign)


class _Arc2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, kappa, sign):
        ctx.save_for_backward(u, kappa)
        ctx.sign = sign
        unit = kappa.abs().to(u.dtype)
        t = arcs.clamp_(u * (unit / 2), sign)
        # the square of t overflows on the far hyperboloid
        return arcs.arc_(t, sign, torch.empty_like(t), wide=sign < 0).square_().div_(unit)

    @staticmethod
    def backward(ctx, g):
        u, kappa = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: that of the plain form
            wanted = [t for t, needed in zip((u, kappa), ctx.needs_input_grad, strict=False) if needed]
            found = iter(torch.autograd.grad(arc2_of(u, kappa), wanted, g, create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:2]), None
        unit = kappa.abs().to(u.dtype)
        t = arcs.clamp_(u * (unit / 2), ctx.sign)
        du = dkappa = None
        if ctx.needs_input_grad[0]:
            slope = arcs.slope(t, ctx.sign, True, torch.empty_like(t), wide=ctx.sign < 0)
            du = arcs.masked_(slope, t, ctx.sign).mul_(0.5).mul_(g)
        if ctx.needs_input_grad[1]:
            term = arcs.curvature_slope(t, ctx.sign, True) * g
            dkappa = (term.to(kappa.dtype) / kappa.square()).sum_to_size(kappa.shape)
        return du, dkappa, None

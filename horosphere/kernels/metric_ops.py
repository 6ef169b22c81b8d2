"""Distances under per-token metrics as a torch custom operator."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels import dispatch
from horosphere.kernels.low_rank.fibres import Fibres, fibres_of
from horosphere.kernels.ops import without_autocast
from horosphere.kernels.reference import metric_sqdist as reference
from horosphere.kernels.tiled.metric_sqdist import sqdist as tiled_sqdist
from horosphere.kernels.tiled.metric_sqdist import sqdist_backward as tiled_sqdist_backward


def metric_sqdist(f: Fibres, *, resolve: bool, impl: str) -> Tensor:
    """Squared distances of all pairs, (..., N, M), float32 or float64.

    Args:
        f: points and metrics.
        resolve: work in float64 and pairs that even this does not resolve from differences; else products run in the
            tensors' own type.
        impl: see :mod:`horosphere.kernels.dispatch`.
    """
    entries = f.batch.numel() * f.q.shape[-2] * f.k.shape[-2]
    call = dispatch.Call("metric_sqdist", f.q.device, f.dtype, entries, parts=0, tracing=dispatch.tracing())
    impl = dispatch.choose(call, impl)
    if impl == "reference":
        return reference.sqdist(f, torch.float64 if resolve else f.dtype).to(f.dtype)
    return torch.ops.horosphere.metric_sqdist(f.tensors(), f.end, resolve, impl)


def _work(f: Fibres, resolve: bool) -> tuple[torch.dtype, float | None]:
    if not resolve:
        return f.dtype, None
    return torch.float64, 2 * _numerics.promised_tolerance(f.dtype)


torch.library.define(
    "horosphere::metric_sqdist",
    "(Tensor[] tensors, str end, bool resolve, str impl) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("horosphere::metric_sqdist", "default")
def _(tensors, end, resolve, impl):
    f = fibres_of(tensors, end)
    with without_autocast(f.q.device):
        if impl == "triton":
            from horosphere.kernels.triton.sqdist import metric_sqdist as triton_sqdist

            return triton_sqdist(f, *_work(f, resolve))
        return tiled_sqdist(f, *_work(f, resolve))


@torch.library.register_fake("horosphere::metric_sqdist")
def _(tensors, end, resolve, impl):
    f = fibres_of(tensors, end)
    return f.q.new_empty(*f.batch, f.q.shape[-2], f.k.shape[-2], dtype=f.dtype)


torch.library.define(
    "horosphere::metric_sqdist_backward",
    "(Tensor grad, Tensor[] tensors, str end, bool resolve, str impl) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("horosphere::metric_sqdist_backward", "default")
def _(grad, tensors, end, resolve, impl):
    f = fibres_of(tensors, end)
    with without_autocast(grad.device):
        if impl == "triton":
            from horosphere.kernels.triton.sqdist import metric_sqdist_backward as triton_sqdist_backward

            return triton_sqdist_backward(grad, f, _work(f, resolve)[0])
        return tiled_sqdist_backward(grad, f, _work(f, resolve)[0])


@torch.library.register_fake("horosphere::metric_sqdist_backward")
def _(grad, tensors, end, resolve, impl):
    return [t.new_empty(t.shape) for t in tensors]


def _save(ctx, inputs, output):
    tensors, ctx.end, ctx.resolve, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    tensors = ctx.saved_tensors
    if not torch.is_grad_enabled():
        settings = ctx.end, ctx.resolve, ctx.impl
        return torch.ops.horosphere.metric_sqdist_backward(grad, tensors, *settings), None, None, None
    # a second derivative is wanted: that of the plain form. A tensor may be there twice, each place its own alias
    places = [t.view_as(t) for t in tensors]
    out = metric_sqdist(fibres_of(places, ctx.end), resolve=ctx.resolve, impl="reference")
    wanted = [p for p in places if p.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if p.requires_grad else None for p in places], None, None, None


torch.library.register_autograd("horosphere::metric_sqdist", _backward, setup_context=_save)

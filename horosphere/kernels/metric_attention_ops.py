"""Attention under per-token metrics as a torch custom operator; cf. horosphere.kernels.attention_ops."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels import dispatch
from horosphere.kernels.attention_ops import INSIDE, as_scalar, one_power
from horosphere.kernels.chord.augment import kappa_entries
from horosphere.kernels.inputs import Inputs, Results
from horosphere.kernels.low_rank.fibres import Fibres, fibres_of
from horosphere.kernels.numba.metric import attention as numba_attention
from horosphere.kernels.ops import without_autocast
from horosphere.kernels.reference import metric_sqdist as reference
from horosphere.kernels.reference.attention import averaged
from horosphere.kernels.tiled.attention import attention as tiled_attention
from horosphere.kernels.tiled.attention_backward import attention_backward as tiled_attention_backward
from horosphere.kernels.tiled.metric_scores import MetricScores


def metric_attention(
    f: Fibres,
    value: Tensor,
    *,
    eps: float | Tensor,
    power: float | Tensor,
    bias: Tensor | None,
    causal: int | None,
    weight: str,
    dropout_p: float,
    seed: Tensor | None,
    resolve: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """(out (..., N, Dv), lse (..., N)) from the distances of fibres.

    Args:
        f: queries, keys and their metrics; batch dimensions broadcast with those of the value.
        impl: see :mod:`horosphere.kernels.dispatch`.
        all others: as in :func:`horosphere.kernels.attention_ops.attention`.
    """
    eps, power = as_scalar(eps, value), as_scalar(power, value)
    if bias is not None and bias.dim() < 2:
        bias = bias.reshape(*[1] * (2 - bias.dim()), *bias.shape)
    inputs = Inputs(value, eps, power, bias, causal, weight, dropout_p, seed)
    call = _call("metric_attention", f, value, None, bias, weight, dropout_p, dispatch.tracing())
    if dispatch.choose(call, impl, told=False) == "reference":
        dispatch.choose(call, impl)
        return _plain(f, inputs, resolve)
    return torch.ops.horosphere.metric_attention(f.tensors(), f.end, *inputs, resolve, impl)


def _call(
    operation: str,
    f: Fibres,
    value: Tensor,
    power: Tensor | None,
    bias: Tensor | None,
    weight: str,
    dropout_p: float,
    tracing: str | None,
) -> dispatch.Call:
    """``power`` None: it is not looked at yet."""
    batch, dtype = _layout(f, value)
    return dispatch.Call(
        operation,
        value.device,
        dtype,
        batch.numel() * f.q.shape[-2] * f.k.shape[-2],
        parts=0,
        features=f.q.shape[-1],
        width=value.shape[-1],
        weight=weight,
        power=None if power is None else one_power(power),
        biased=bias is not None,
        dropout=bool(dropout_p),
        tracing=tracing,
    )


def _plain(f: Fibres, inputs: Inputs, resolve: bool) -> tuple[Tensor, Tensor]:
    """The whole matrix, differentiable any number of times."""
    dtype = _layout(f, inputs.value)[1]
    if resolve:
        eps = inputs.eps
        shift = eps[..., None, None] if eps.dim() else eps
        tolerance = _numerics.weight_tolerance(dtype)
        d2 = reference.resolved(f, torch.float64, shift if inputs.weight == "inverse" else 0.0, tolerance)
    else:
        d2 = reference.sqdist(f, f.dtype)
    return averaged(d2.to(dtype), inputs)


def _layout(f: Fibres, value: Tensor) -> tuple[torch.Size, torch.dtype]:
    batch = torch.broadcast_shapes(f.batch, value.shape[:-2])
    return batch, torch.promote_types(f.dtype, _numerics.fast_dtype(value.dtype))


_INPUTS = (
    "Tensor[] tensors, str end, Tensor value, Tensor eps, Tensor power, Tensor? bias, SymInt? causal, str weight,"
    " float dropout_p, Tensor? seed, bool resolve, str impl"
)
torch.library.define(
    "horosphere::metric_attention", f"({_INPUTS}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)
torch.library.define(
    "horosphere::metric_attention_backward",
    f"(Tensor out, Tensor lse, Tensor dout, Tensor dlse, bool[] wanted, {_INPUTS})"
    " -> (Tensor[], Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("horosphere::metric_attention", "default")
def _(tensors, end, value, eps, power, bias, causal, weight, dropout_p, seed, resolve, impl):
    f = fibres_of(tensors, end)
    batch, dtype = _layout(f, value)
    with without_autocast(value.device):
        rates = kappa_entries(eps, batch), kappa_entries(power, batch)
        inputs = Inputs(value, *rates, bias, causal, weight, dropout_p, seed)
        call = _call("metric_attention", f, value, power, bias, weight, dropout_p, INSIDE)
        form = dispatch.choose(call, impl)
        if form == "triton":
            from horosphere.kernels.triton.attention import attention as triton_attention
            from horosphere.kernels.triton.metric import Tokens

            tokens = Tokens(f, batch, dtype, resolve=resolve)
            return triton_attention(tokens, inputs)
        scores = MetricScores(f, batch, dtype, resolve=resolve)
        if form == "numba":
            return numba_attention(scores, inputs, strict=impl == "numba")
        return tiled_attention(scores, inputs)


@torch.library.register_fake("horosphere::metric_attention")
def _(tensors, end, value, eps, power, bias, causal, weight, dropout_p, seed, resolve, impl):
    f = fibres_of(tensors, end)
    batch, dtype = _layout(f, value)
    n = f.q.shape[-2]
    return value.new_empty(*batch, n, value.shape[-1], dtype=dtype), value.new_empty(*batch, n, dtype=dtype)


@torch.library.impl("horosphere::metric_attention_backward", "default")
def _(out, lse, dout, dlse, wanted, *given):
    """Gradients of the fibres, value, eps, power and bias (empty where it is not ``wanted``, the third)."""
    tensors, end, value, eps, power, bias, causal, weight, dropout_p, seed, resolve, impl = given
    f = fibres_of(tensors, end)
    batch, dtype = _layout(f, value)
    with without_autocast(value.device):
        rates = kappa_entries(eps, batch), kappa_entries(power, batch)
        inputs = Inputs(value, *rates, bias, causal, weight, dropout_p, seed)
        results = Results(out, lse, dout, dlse)
        options = f, value, power, bias, weight, dropout_p, INSIDE
        form = dispatch.choose(_call("metric_attention", *options), impl, told=False)
        form = dispatch.of_gradient(_call("metric_attention_backward", *options), form)
        if form == "triton":
            from horosphere.kernels.triton.attention import attention_backward as triton_attention_backward
            from horosphere.kernels.triton.metric import Tokens

            tokens = Tokens(f, batch, dtype, resolve=resolve)
            dvalue, *drates, dbias = triton_attention_backward(tokens, inputs, results, tuple(wanted))
            fibres = tokens.gradients()
        else:
            scores = MetricScores(f, batch, dtype, resolve=resolve)
            dvalue, *drates, dbias = tiled_attention_backward(scores, inputs, results, tuple(wanted))
            fibres = scores.gradients()
    deps, dpower = (
        d.view(batch).sum_to_size(like.shape).to(like) for d, like in zip(drates, (eps, power), strict=True)
    )
    return fibres, dvalue, deps, dpower, value.new_empty(0) if dbias is None else dbias


@torch.library.register_fake("horosphere::metric_attention_backward")
def _(out, lse, dout, dlse, wanted, *given):
    tensors, _, value, eps, power, bias, *_ = given
    fibres = [t.new_empty(t.shape) for t in tensors]
    dbias = bias.new_empty(bias.shape) if wanted[2] else value.new_empty(0)
    return fibres, value.new_empty(value.shape), eps.new_empty(eps.shape), power.new_empty(power.shape), dbias


def _save(ctx, inputs, output):
    tensors, ctx.end, value, eps, power, bias, *settings = inputs
    *ctx.settings, seed, ctx.resolve, ctx.impl = settings
    ctx.has = bias is not None, seed is not None
    ctx.save_for_backward(*output, *tensors, value, eps, power, *(t for t in (bias, seed) if t is not None))


def _backward(ctx, dout, dlse):
    out, lse, *saved = ctx.saved_tensors
    seed = saved.pop() if ctx.has[1] else None
    bias = saved.pop() if ctx.has[0] else None
    *tensors, value, eps, power = saved
    settings = *ctx.settings, seed
    if torch.is_grad_enabled():
        found = _plain_gradient(dout, dlse, tensors, ctx.end, (value, eps, power, bias), settings, ctx.resolve)
    else:
        wanted = [eps.requires_grad, power.requires_grad, bias is not None and bias.requires_grad]
        *found, dbias = torch.ops.horosphere.metric_attention_backward(
            out, lse, dout, dlse, wanted, tensors, ctx.end, value, eps, power, bias, *settings, ctx.resolve, ctx.impl
        )
        found.append(dbias if wanted[2] else None)
    points, *others = found
    return points, None, *others, *(None,) * 6


def _plain_gradient(dout, dlse, tensors, end, others, settings, resolve):
    """A second derivative is wanted: that of the plain form. A tensor may be there twice, each place its own alias."""
    places = [t.view_as(t) for t in tensors]
    others = [None if t is None else t.view_as(t) for t in others]
    results = _plain(fibres_of(places, end), Inputs(*others, *settings), resolve)
    inputs = [*places, *others]
    wanted = [p for p in inputs if p is not None and p.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, (dout, dlse), create_graph=True, allow_unused=True))
    gradients = [next(found) if p is not None and p.requires_grad else None for p in inputs]
    return gradients[: len(places)], *gradients[len(places) :]


torch.library.register_autograd("horosphere::metric_attention", _backward, setup_context=_save)

"""Attention by distance as a torch custom operator, and the function that callers use.

A chord is any tuple (features, weight, time_dims, kappa), see horosphere.manifolds.Chord; packing as in
horosphere.kernels.ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels import dispatch
from horosphere.kernels.chord.augment import kappa_entries
from horosphere.kernels.chord.parts import Part, batch_of, dtype_of, pack, unpack
from horosphere.kernels.inputs import Inputs, Results
from horosphere.kernels.numba.attention import attention as numba_attention
from horosphere.kernels.numba.attention import attention_backward as numba_attention_backward
from horosphere.kernels.ops import without_autocast
from horosphere.kernels.reference.attention import attention as reference_attention
from horosphere.kernels.tiled.attention import attention as tiled_attention
from horosphere.kernels.tiled.attention_backward import attention_backward as tiled_attention_backward
from horosphere.kernels.tiled.chord_scores import ChordScores

WEIGHTS = ("inverse", "softmax", "gaussian")


def attention(
    xs: Sequence,
    ys: Sequence,
    value: Tensor,
    *,
    eps: float | Tensor,
    power: float | Tensor,
    bias: Tensor | None = None,
    causal: int | None = None,
    weight: str = "inverse",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    resolve: bool = True,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""Averages of values by distance, :math:`o_i = \sum_j W_{ij} v_j`, without the matrix of weights.

    Args:
        xs, ys: chord parts of queries and keys, features (..., N, F) and (..., M, F); batch dimensions broadcast, also
            with those of the value.
        value: (..., M, Dv).
        eps: > 0, a number or a tensor that broadcasts against the batch dimensions, as kappa does ((H,) with features
            (..., H, N, F)); only "inverse" uses it.
        power: p or beta, shaped as eps.
        bias: broadcastable to (..., N, M): bool, True takes part, or a number that is added to the logarithm of the
            weight (-inf excludes).
        causal: key j takes part where ``j <= i + causal``; None: everywhere.
        weight: "inverse" ``(d^2 + eps)^-power``, "softmax" ``exp(-power d)``, "gaussian" ``exp(-power d^2)``.
        dropout_p: probability with which a normalised weight is dropped, the others divided by 1 - dropout_p.
        seed: () int64, wanted where dropout_p > 0; equal seeds drop equal weights in every impl.
        resolve: work pairs that the product form does not resolve from differences.
        impl: see :mod:`horosphere.kernels.dispatch`.

    Returns:
        out (..., N, Dv) and lse (..., N), the logarithm of the denominator, both differentiable, in float32 or float64.
        A row in which no key takes part has out 0 and lse -inf.
    """
    eps, power = as_scalar(eps, value), as_scalar(power, value)
    if bias is not None and bias.dim() < 2:
        bias = bias.reshape(*[1] * (2 - bias.dim()), *bias.shape)
    inputs = Inputs(value, eps, power, bias, causal, weight, dropout_p, seed)
    packed = pack(xs, ys)
    call = _call("attention", unpack(*packed), value, None, bias, weight, dropout_p, dispatch.tracing())
    if dispatch.choose(call, impl, told=False) == "reference":
        dispatch.choose(call, impl)
        return reference_attention(xs, ys, inputs, resolve)
    return torch.ops.horosphere.attention(*packed, *inputs, resolve, impl)


def as_scalar(number: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.tensor(number, dtype=torch.float64, device=like.device)


def _call(
    operation: str,
    parts: Sequence[Part],
    value: Tensor,
    power: Tensor | None,
    bias: Tensor | None,
    weight: str,
    dropout_p: float,
    tracing: str | None,
    learned: tuple[str, ...] = (),
) -> dispatch.Call:
    """``power`` None: it is not looked at yet."""
    batch, dtype = _layout(parts, value)
    return dispatch.Call(
        operation,
        value.device,
        dtype,
        batch.numel() * parts[0].x.shape[-2] * parts[0].y.shape[-2],
        parts=len(parts),
        time=any(p.time_dims for p in parts),
        features=parts[0].x.shape[-1],
        width=value.shape[-1],
        weight=weight,
        power=None if power is None else one_power(power),
        biased=bias is not None,
        dropout=bool(dropout_p),
        learned=learned,
        tracing=tracing,
    )


def one_power(power: Tensor) -> float:
    """The power of all batch entries, NaN where they differ."""
    first = float(power.flatten()[0]) if power.numel() else 1.0
    return first if bool((power == first).all()) else float("nan")


# Inside of an operator the graph is made: the plain form is none of its forms.
INSIDE = "torch.compile"


_INPUTS = (
    "Tensor[] tensors, int[] time_dims, bool[] weighted, Tensor value, Tensor eps, Tensor power, Tensor? bias,"
    " SymInt? causal, str weight, float dropout_p, Tensor? seed, bool resolve, str impl"
)
torch.library.define("horosphere::attention", f"({_INPUTS}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
torch.library.define(
    "horosphere::attention_backward",
    f"(Tensor out, Tensor lse, Tensor dout, Tensor dlse, bool curvature, bool[] wanted, {_INPUTS})"
    " -> (Tensor[], Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _layout(parts: Sequence[Part], value: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Batch dimensions of the result, and the type it is worked in."""
    batch = torch.broadcast_shapes(batch_of(parts), value.shape[:-2])
    return batch, torch.promote_types(dtype_of(parts), _numerics.fast_dtype(value.dtype))


@torch.library.impl("horosphere::attention", "default")
def _(tensors, time_dims, weighted, value, eps, power, bias, causal, weight, dropout_p, seed, resolve, impl):
    """:func:`attention` on packed chords."""
    parts = unpack(tensors, time_dims, weighted)
    batch, dtype = _layout(parts, value)
    with without_autocast(value.device):
        rates = kappa_entries(eps, batch), kappa_entries(power, batch)
        inputs = Inputs(value, *rates, bias, causal, weight, dropout_p, seed)
        form = dispatch.choose(_call("attention", parts, value, power, bias, weight, dropout_p, INSIDE), impl)
        if form == "triton":
            from horosphere.kernels.triton.attention import attention as triton_attention
            from horosphere.kernels.triton.chord import Points

            return triton_attention(Points(parts, batch, dtype, resolve=resolve), inputs)
        scores = ChordScores(parts, batch, dtype, resolve=resolve)
        if form == "numba":
            return numba_attention(scores, inputs, strict=impl == "numba")
        return tiled_attention(scores, inputs)


@torch.library.register_fake("horosphere::attention")
def _(tensors, time_dims, weighted, value, eps, power, bias, causal, weight, dropout_p, seed, resolve, impl):
    parts = unpack(tensors, time_dims, weighted)
    batch, dtype = _layout(parts, value)
    n = parts[0].x.shape[-2]
    return value.new_empty(*batch, n, value.shape[-1], dtype=dtype), value.new_empty(*batch, n, dtype=dtype)


@torch.library.impl("horosphere::attention_backward", "default")
def _(out, lse, dout, dlse, curvature, wanted, *given):
    """Gradients of the packed chords, value, eps, power and bias (empty where it is not ``wanted``, the third)."""
    tensors, time_dims, weighted, value, eps, power, bias, causal, weight, dropout_p, seed, resolve, impl = given
    parts = unpack(tensors, time_dims, weighted)
    batch, dtype = _layout(parts, value)
    with without_autocast(value.device):
        rates = kappa_entries(eps, batch), kappa_entries(power, batch)
        inputs = Inputs(value, *rates, bias, causal, weight, dropout_p, seed)
        results = Results(out, lse, dout, dlse)
        learned = (*(("curvature",) if curvature else ()), *(("power",) if wanted[1] else ()))
        options = parts, value, power, bias, weight, dropout_p, INSIDE
        form = dispatch.choose(_call("attention", *options), impl, told=False)
        form = dispatch.of_gradient(_call("attention_backward", *options, learned), form)
        if form == "triton":
            from horosphere.kernels.triton.attention import attention_backward as triton_attention_backward
            from horosphere.kernels.triton.chord import Points

            points = Points(parts, batch, dtype, resolve=resolve, curvature=curvature)
            dvalue, *drates, dbias = triton_attention_backward(points, inputs, results, tuple(wanted))
            gradients = points.gradients()
        else:
            scores = ChordScores(parts, batch, dtype, resolve=resolve, curvature=curvature)
            run = numba_attention_backward if form == "numba" else tiled_attention_backward
            dvalue, *drates, dbias = run(scores, inputs, results, tuple(wanted))
            gradients = scores.gradients()
    deps, dpower = (
        d.view(batch).sum_to_size(like.shape).to(like) for d, like in zip(drates, (eps, power), strict=True)
    )
    return gradients, dvalue, deps, dpower, value.new_empty(0) if dbias is None else dbias


@torch.library.register_fake("horosphere::attention_backward")
def _(out, lse, dout, dlse, curvature, wanted, *given):
    tensors, _, _, value, eps, power, bias, *_ = given
    points = [t.new_empty(t.shape) for t in tensors]
    dbias = bias.new_empty(bias.shape) if wanted[2] else value.new_empty(0)
    return points, value.new_empty(value.shape), eps.new_empty(eps.shape), power.new_empty(power.shape), dbias


def _save(ctx, inputs, output):
    tensors, time_dims, weighted, value, eps, power, bias, *ctx.settings = inputs
    causal, weight, dropout_p, seed, resolve, impl = ctx.settings
    ctx.settings = causal, weight, dropout_p, None, resolve, impl
    ctx.layout, ctx.has = (time_dims, weighted), (bias is not None, seed is not None)
    ctx.save_for_backward(*output, *tensors, value, eps, power, *(t for t in (bias, seed) if t is not None))


def _backward(ctx, dout, dlse):
    out, lse, *saved = ctx.saved_tensors
    seed = saved.pop() if ctx.has[1] else None
    bias = saved.pop() if ctx.has[0] else None
    *tensors, value, eps, power = saved
    causal, weight, dropout_p, _, resolve, impl = ctx.settings
    settings = causal, weight, dropout_p, seed
    if torch.is_grad_enabled():  # a second derivative is wanted: that of the plain form
        points, dvalue, deps, dpower, dbias = _reference_gradient(
            dout, dlse, tensors, ctx.layout, (value, eps, power, bias), settings, resolve
        )
    else:
        curvature = any(p.kappa.requires_grad for p in unpack(tensors, *ctx.layout))
        wanted = [eps.requires_grad, power.requires_grad, bias is not None and bias.requires_grad]
        points, dvalue, deps, dpower, dbias = torch.ops.horosphere.attention_backward(
            out,
            lse,
            dout,
            dlse,
            curvature,
            wanted,
            tensors,
            *ctx.layout,
            value,
            eps,
            power,
            bias,
            *settings,
            resolve,
            impl,
        )
        dbias = dbias if wanted[2] else None
    return points, None, None, dvalue, deps, dpower, dbias, *(None,) * 6


def _reference_gradient(dout, dlse, tensors, layout, others, settings, resolve):
    # a tensor may be there twice: each place gets its own gradient through an alias of its own
    places = [t.view_as(t) for t in tensors]
    others = [None if t is None else t.view_as(t) for t in others]
    xs, ys = zip(*(p.chords() for p in unpack(places, *layout)), strict=True)
    results = reference_attention(xs, ys, Inputs(*others, *settings), resolve)
    inputs = [*places, *others]
    wanted = [p for p in inputs if p is not None and p.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, (dout, dlse), create_graph=True, allow_unused=True))
    gradients = [next(found) if p is not None and p.requires_grad else None for p in inputs]
    return gradients[: len(places)], *gradients[len(places) :]


torch.library.register_autograd("horosphere::attention", _backward, setup_context=_save)

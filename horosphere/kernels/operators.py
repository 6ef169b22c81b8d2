"""Distances, nearest neighbours and attention as torch custom operators, and the functions that callers use.

One operator of each sort serves every kind of distance: a :class:`~horosphere.kernels.geometry.Geometry` travels packed
into flat lists, so that torch.compile sees one node. Operators are made by ``define`` and ``impl`` rather than by
``custom_op``, whose first call imports torch's compiler: a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._numerics import without_autocast
from horosphere.kernels import dispatch
from horosphere.kernels.chord.augment import batch_scalars
from horosphere.kernels.geometry import ChordPairs, Geometry, unpacked
from horosphere.kernels.inputs import Inputs, Results, broadcast
from horosphere.kernels.reference.sqdist import nearest as reference_nearest
from horosphere.kernels.tiled.attention import attention as tiled_attention
from horosphere.kernels.tiled.attention_backward import attention_backward as tiled_attention_backward
from horosphere.kernels.tiled.nearest import nearest as tiled_nearest

_POINTS = "Tensor[] tensors, str kind, str layout"
_INPUTS = (
    "Tensor value, Tensor eps, Tensor power, Tensor? bias, SymInt? causal, str weight, float dropout_p, Tensor? seed"
)
# Inside of an operator the graph is made: the plain form is none of its forms.
_INSIDE = "torch.compile"


def sqdist(points: Geometry, *, squared: bool, resolve: bool, impl: str) -> tuple[Tensor, Tensor | None]:
    """Distances (or their squares) of all pairs.

    Args:
        points: both sets and what measures them.
        squared: return squares; per-token metrics have nothing else.
        resolve: chords: also return which pairs the product form does not resolve, by the rule of the reference (never
            fewer); the caller replaces their entries by values of its own. Metrics: work in float64 and those pairs
            from differences; else products run in the tensors' own type.
        impl: see :mod:`horosphere.kernels.dispatch`.

    Returns:
        the matrix (..., N, M), float32 or float64, and flat indices (P,) into it, None where nothing is left.
    """
    form = dispatch.choose(points.call("sqdist", tracing=dispatch.tracing()), impl)
    if form == "reference":
        return points.plain_sqdist(squared, resolve)
    # numba's loops leave points out of their range to tiles, unless they were asked for
    form = "auto" if form == "numba" and impl == "auto" else form
    out, picked = torch.ops.horosphere.sqdist(*points.packed(), squared, resolve, form)
    return out, picked if resolve and points.picks else None


def nearest(points: ChordPairs, k: int, *, impl: str) -> tuple[Tensor, Tensor]:
    """The k pairs of every row with the smallest lower bound of d^2 (the product form less its error bound).

    Args:
        points: both sets.
        k: 1 <= k <= M.
        impl: see :mod:`horosphere.kernels.dispatch`.

    Returns:
        the bounds (..., N, k), ascending, and indices (..., N, k): no other point of a row is nearer than its last
        bound.
    """
    with torch.no_grad():
        form = dispatch.choose(points.call("nearest", tracing=dispatch.tracing()), impl)
        if form == "reference":
            return reference_nearest(points.xs, points.ys, k)
        return torch.ops.horosphere.nearest(*points.packed(), k, form)


def attention(
    points: Geometry,
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
        points: queries and keys; their batch dimensions broadcast with those of the value.
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
    call = _call("attention", points, inputs, power=None, tracing=dispatch.tracing())
    if dispatch.choose(call, impl, told=False) == "reference":
        dispatch.choose(call, impl)
        return points.plain_attention(inputs, resolve)
    return torch.ops.horosphere.attention(*points.packed(), *inputs, resolve, impl)


def as_scalar(number: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.tensor(number, dtype=torch.float64, device=like.device)


def _operator(name: str, arguments: str, results: str, fake: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """Make the decorated function the operator ``horosphere::name``; ``fake`` gives results of its shapes and types."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        schema = f"({arguments}) -> {results}"
        torch.library.define(f"horosphere::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"horosphere::{name}", "default")(run)
        torch.library.register_fake(f"horosphere::{name}")(fake)
        return run

    return register


def _by_the_plain_form(
    run: Callable[..., Any], tensors: Sequence[Tensor], others: Sequence[Tensor | None], upper: Sequence[Tensor]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of ``run(tensors, *others)`` that can be differentiated again.

    A tensor may be there twice: each place gets its own gradient through an alias of its own.
    """
    given = [None if t is None else t.view_as(t) for t in (*tensors, *others)]
    results = run(given[: len(tensors)], *given[len(tensors) :])
    wanted = [t for t in given if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, upper, create_graph=True, allow_unused=True))
    gradients = [next(found) if t is not None and t.requires_grad else None for t in given]
    return gradients[: len(tensors)], gradients[len(tensors) :]


# distances


def _fake_sqdist(tensors, kind, layout, squared, resolve, impl):
    points = unpacked(tensors, kind, layout)
    out = tensors[0].new_empty(*points.batch, points.n, points.m, dtype=points.dtype)
    # how many are near depends on the points
    pairs = torch.library.get_ctx().new_dynamic_size() if resolve and points.picks else 0
    return out, tensors[0].new_empty(pairs, dtype=torch.int64)


@_operator("sqdist", f"{_POINTS}, bool squared, bool resolve, str impl", "(Tensor, Tensor)", _fake_sqdist)
def _sqdist(tensors, kind, layout, squared, resolve, impl):
    with without_autocast(tensors[0].device):
        return unpacked(tensors, kind, layout).sqdist(impl, squared, resolve)


@_operator(
    "sqdist_backward",
    f"Tensor grad, bool curvature, {_POINTS}, bool squared, bool resolve, str impl",
    "Tensor[]",
    lambda grad, curvature, tensors, *_: [t.new_empty(t.shape) for t in tensors],
)
def _sqdist_backward(grad, curvature, tensors, kind, layout, squared, resolve, impl):
    """Gradients of all packed tensors."""
    points = unpacked(tensors, kind, layout)
    with without_autocast(grad.device):
        call = points.call("sqdist_backward", tracing=dispatch.tracing())
        form = dispatch.of_gradient(call, "numba" if impl == "auto" else impl)
        return points.sqdist_backward(form, grad, squared, resolve, curvature)


def _save_sqdist(ctx, inputs, output):
    tensors, *ctx.layout, ctx.squared, ctx.resolve, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_sqdist(ctx, grad, _):
    tensors, nothing = ctx.saved_tensors, (None,) * 5
    if torch.is_grad_enabled():  # a second derivative is wanted

        def run(tensors: list[Tensor]) -> Tensor:
            points = unpacked(tensors, *ctx.layout)
            resolve = ctx.resolve and not points.picks  # those pairs are replaced by the caller
            return points.plain_sqdist(ctx.squared, resolve)[0]

        return _by_the_plain_form(run, tensors, (), grad)[0], *nothing
    curved = unpacked(tensors, *ctx.layout).curved
    settings = ctx.squared, ctx.resolve, ctx.impl
    return torch.ops.horosphere.sqdist_backward(grad, curved, tensors, *ctx.layout, *settings), *nothing


torch.library.register_autograd("horosphere::sqdist", _differentiate_sqdist, setup_context=_save_sqdist)


# nearest neighbours


def _fake_nearest(tensors, kind, layout, k, impl):
    points = unpacked(tensors, kind, layout)
    shape = (*points.batch, points.n, k)
    return tensors[0].new_empty(shape, dtype=points.dtype), tensors[0].new_empty(shape, dtype=torch.int64)


@_operator("nearest", f"{_POINTS}, int k, str impl", "(Tensor, Tensor)", _fake_nearest)
def _nearest(tensors, kind, layout, k, impl):
    """Indices have no gradient, and bounds need none."""
    parts = ChordPairs.of(tensors, layout).parts
    with without_autocast(tensors[0].device):
        if impl == "triton":
            from horosphere.kernels.triton.nearest import nearest as triton_nearest

            return triton_nearest(parts, k)
        return tiled_nearest(parts, k)


# attention


def _layout(points: Geometry, value: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Batch dimensions of the result, and the type it is worked in."""
    batch = broadcast(points.batch, value.shape[:-2])
    return batch, torch.promote_types(points.dtype, _numerics.fast_dtype(value.dtype))


def _call(operation: str, points: Geometry, inputs: Inputs, **settings: Any) -> dispatch.Call:
    batch, dtype = _layout(points, inputs.value)
    settings |= {"batch": batch, "dtype": dtype, "width": inputs.value.shape[-1], "weight": inputs.weight}
    return points.call(operation, biased=inputs.bias is not None, dropout=bool(inputs.dropout_p), **settings)


def _one_power(power: Tensor) -> float:
    """The power of all batch entries, NaN where they differ."""
    first = float(power.flatten()[0]) if power.numel() else 1.0
    return first if bool((power == first).all()) else float("nan")


def _fake_attention(*given):
    points, value = unpacked(*given[:3]), given[3]
    batch, dtype = _layout(points, value)
    out = value.new_empty(*batch, points.n, value.shape[-1], dtype=dtype)
    return out, value.new_empty(*batch, points.n, dtype=dtype)


@_operator("attention", f"{_POINTS}, {_INPUTS}, bool resolve, str impl", "(Tensor, Tensor)", _fake_attention)
def _attention(*given):
    points, inputs, (resolve, impl) = unpacked(*given[:3]), Inputs(*given[3:11]), given[11:]
    batch, dtype = _layout(points, inputs.value)
    with without_autocast(inputs.value.device):
        call = _call("attention", points, inputs, power=_one_power(inputs.power), tracing=_INSIDE)
        form = dispatch.choose(call, impl)
        inputs = _by_entry(inputs, batch)
        if form == "triton":
            from horosphere.kernels.triton.attention import attention as triton_attention

            return triton_attention(points.pointers(batch, dtype, resolve, False), inputs)
        scores = points.scores(batch, dtype, resolve, False)
        if form == "numba":
            return points.loops.attention(scores, inputs, strict=impl == "numba")
        return tiled_attention(scores, inputs)


def _by_entry(inputs: Inputs, batch: torch.Size) -> Inputs:
    """eps and power of every batch entry."""
    return inputs._replace(eps=batch_scalars(inputs.eps, batch), power=batch_scalars(inputs.power, batch))


def _fake_attention_backward(out, lse, dout, dlse, curvature, wanted, *given):
    tensors, (value, eps, power, bias) = given[0], given[3:7]
    dbias = bias.new_empty(bias.shape) if wanted[2] else value.new_empty(0)
    points, rates = [t.new_empty(t.shape) for t in tensors], [t.new_empty(t.shape) for t in (eps, power)]
    return points, value.new_empty(value.shape), *rates, dbias


@_operator(
    "attention_backward",
    "Tensor out, Tensor lse, Tensor dout, Tensor dlse, bool curvature, bool[] wanted,"
    f" {_POINTS}, {_INPUTS}, bool resolve, str impl",
    "(Tensor[], Tensor, Tensor, Tensor, Tensor)",
    _fake_attention_backward,
)
def _attention_backward(out, lse, dout, dlse, curvature, wanted, *given):
    """Gradients of the packed tensors, value, eps, power and bias (empty where it is not ``wanted``, the third)."""
    points, inputs, (resolve, impl) = unpacked(*given[:3]), Inputs(*given[3:11]), given[11:]
    batch, dtype = _layout(points, inputs.value)
    value, rates = inputs.value, (inputs.eps, inputs.power)
    with without_autocast(value.device):
        settings = {"power": _one_power(inputs.power), "tracing": _INSIDE}
        form = dispatch.choose(_call("attention", points, inputs, **settings), impl, told=False)
        learned = (*(("curvature",) if curvature else ()), *(("power",) if wanted[1] else ()))
        call = _call("attention_backward", points, inputs, learned=learned, **settings)
        form = dispatch.of_gradient(call, form)
        options = _by_entry(inputs, batch), Results(out, lse, dout, dlse), tuple(wanted)
        if form == "triton":
            from horosphere.kernels.triton.attention import attention_backward as triton_attention_backward

            space = points.pointers(batch, dtype, resolve, curvature)
            dvalue, *drates, dbias = triton_attention_backward(space, *options)
        else:
            space = points.scores(batch, dtype, resolve, curvature)
            run = points.loops.attention_backward if form == "numba" else tiled_attention_backward
            dvalue, *drates, dbias = run(space, *options)
        gradients = space.gradients()
    deps, dpower = (d.view(batch).sum_to_size(like.shape).to(like) for d, like in zip(drates, rates, strict=True))
    return gradients, dvalue, deps, dpower, value.new_empty(0) if dbias is None else dbias


def _save_attention(ctx, inputs, output):
    tensors, *ctx.layout = inputs[:3]
    value, eps, power, bias, *ctx.settings, seed = inputs[3:11]
    ctx.resolve, ctx.impl = inputs[11:]
    ctx.save_for_backward(*output, value, eps, power, bias, seed, *tensors)


def _differentiate_attention(ctx, dout, dlse):
    out, lse, value, eps, power, bias, seed, *tensors = ctx.saved_tensors
    settings = *ctx.settings, seed
    if torch.is_grad_enabled():  # a second derivative is wanted

        def run(tensors: list[Tensor], value: Tensor, eps: Tensor, power: Tensor, bias: Tensor | None):
            return unpacked(tensors, *ctx.layout).plain_attention(
                Inputs(value, eps, power, bias, *settings), ctx.resolve
            )

        points, others = _by_the_plain_form(run, tensors, (value, eps, power, bias), (dout, dlse))
    else:
        curved = unpacked(tensors, *ctx.layout).curved
        wanted = [eps.requires_grad, power.requires_grad, bias is not None and bias.requires_grad]
        inputs = Inputs(value, eps, power, bias, *settings)
        points, *others = torch.ops.horosphere.attention_backward(
            out, lse, dout, dlse, curved, wanted, tensors, *ctx.layout, *inputs, ctx.resolve, ctx.impl
        )
        others[-1] = others[-1] if wanted[2] else None
    return points, None, None, *others, *(None,) * 6


torch.library.register_autograd("horosphere::attention", _differentiate_attention, setup_context=_save_attention)

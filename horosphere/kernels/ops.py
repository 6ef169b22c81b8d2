"""Distance kernels as torch custom operators, and the functions that callers use.

A chord is any tuple (features, weight, time_dims, kappa), see horosphere.manifolds.Chord. Operators take chords packed
into flat lists (:func:`horosphere.kernels.chord.parts.pack`), so that one tensor may appear several times and
torch.compile sees one node. They are made by ``define`` and ``impl`` rather than by ``custom_op``, whose first call
imports torch's compiler: a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels import dispatch
from horosphere.kernels.chord import fused
from horosphere.kernels.chord.parts import Part, batch_of, dtype_of, pack, unpack
from horosphere.kernels.numba.sqdist import sqdist as numba_sqdist
from horosphere.kernels.reference import sqdist as reference
from horosphere.kernels.reference.nearest import nearest as reference_nearest
from horosphere.kernels.tiled.nearest import nearest as tiled_nearest
from horosphere.kernels.tiled.sqdist import sqdist as tiled_sqdist
from horosphere.kernels.tiled.sqdist_backward import sqdist_backward as tiled_sqdist_backward


def sqdist(xs: Sequence, ys: Sequence, *, squared: bool, resolve: bool, impl: str) -> tuple[Tensor, Tensor | None]:
    """Distances (or their squares) of all pairs from chord parts in inner-product form.

    Args:
        xs, ys: the chord parts of both sets, features (..., N, F) and (..., M, F); batch dimensions broadcast.
        squared: return squares.
        resolve: also return which pairs the product form does not resolve, by the rule of the reference (never fewer);
            the caller replaces their entries by values of its own.
        impl: see :mod:`horosphere.kernels.dispatch`.

    Returns:
        the matrix (..., N, M), float32 or float64, and flat indices (P,) into it, None without ``resolve``.
    """
    packed = pack(xs, ys)
    form = dispatch.choose(_call("sqdist", unpack(*packed)), impl)
    if form == "reference":
        if dispatch.tracing() == "torch.compile" and not resolve and fused.can_serve(xs):
            return fused.sqdist(xs, ys, squared), None
        d2, near = reference.sqdist(xs, ys)
        out = d2 if squared else _numerics.safe_sqrt(d2)
        return out, near.flatten().nonzero().squeeze(-1) if resolve else None
    # numba's loops leave points out of their range to tiles, unless they were asked for
    form = "auto" if form == "numba" and impl == "auto" else form
    out, picked = torch.ops.horosphere.sqdist(*packed, squared, resolve, form)
    return out, picked if resolve else None


def nearest(xs: Sequence, ys: Sequence, k: int, *, impl: str) -> tuple[Tensor, Tensor]:
    """The k pairs of every row with the smallest lower bound of d^2 (the product form less its error bound).

    Args:
        xs, ys: chord parts as in :func:`sqdist`.
        k: 1 <= k <= M.
        impl: see :mod:`horosphere.kernels.dispatch`.

    Returns:
        the bounds (..., N, k), ascending, and indices (..., N, k): no other point of a row is nearer than its last
        bound.
    """
    with torch.no_grad():
        packed = pack(xs, ys)
        form = dispatch.choose(_call("nearest", unpack(*packed)), impl)
        if form == "reference":
            return reference_nearest(xs, ys, k)
        return torch.ops.horosphere.nearest(*packed, k, form)


def _call(operation: str, parts: Sequence[Part]) -> dispatch.Call:
    return dispatch.Call(
        operation,
        parts[0].x.device,
        dtype_of(parts),
        batch_of(parts).numel() * parts[0].x.shape[-2] * parts[0].y.shape[-2],
        parts=len(parts),
        tracing=dispatch.tracing(),
    )


def without_autocast(device: torch.device):
    """Distances are worked in the points' own precision, whatever autocast asks of matrix products."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


torch.library.define(
    "horosphere::sqdist",
    "(Tensor[] tensors, int[] time_dims, bool[] weighted, bool squared, bool resolve, str impl) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("horosphere::sqdist", "default")
def _(tensors, time_dims, weighted, squared, resolve, impl):
    """:func:`sqdist` on packed chords."""
    parts = unpack(tensors, time_dims, weighted)
    with without_autocast(tensors[0].device):
        if impl == "triton":
            from horosphere.kernels.triton.sqdist import sqdist as triton_sqdist

            return triton_sqdist(parts, squared, resolve)
        if impl in ("numba", "auto"):
            return numba_sqdist(parts, squared, resolve, strict=impl == "numba")
        return tiled_sqdist(parts, squared, resolve)


@torch.library.register_fake("horosphere::sqdist")
def _(tensors, time_dims, weighted, squared, resolve, impl):
    parts = unpack(tensors, time_dims, weighted)
    n, m = parts[0].x.shape[-2], parts[0].y.shape[-2]
    out = tensors[0].new_empty(*batch_of(parts), n, m, dtype=dtype_of(parts))
    pairs = torch.library.get_ctx().new_dynamic_size() if resolve else 0  # how many are near depends on the points
    return out, tensors[0].new_empty(pairs, dtype=torch.int64)


torch.library.define(
    "horosphere::sqdist_backward",
    "(Tensor grad, Tensor[] tensors, int[] time_dims, bool[] weighted, bool squared, bool curvature, str impl)"
    " -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("horosphere::sqdist_backward", "default")
def _(grad, tensors, time_dims, weighted, squared, curvature, impl):
    """Gradients of all packed tensors."""
    parts = unpack(tensors, time_dims, weighted)
    with without_autocast(grad.device):
        form = dispatch.of_gradient(_call("sqdist_backward", parts), "numba" if impl == "auto" else impl)
        if form == "triton":
            from horosphere.kernels.triton.sqdist import sqdist_backward as triton_sqdist_backward

            return triton_sqdist_backward(grad, parts, squared, curvature)
        return tiled_sqdist_backward(grad, parts, squared, curvature)


@torch.library.register_fake("horosphere::sqdist_backward")
def _(grad, tensors, time_dims, weighted, squared, curvature, impl):
    return [t.new_empty(t.shape) for t in tensors]


torch.library.define(
    "horosphere::nearest",
    "(Tensor[] tensors, int[] time_dims, bool[] weighted, int k, str impl) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("horosphere::nearest", "default")
def _(tensors, time_dims, weighted, k, impl):
    """:func:`nearest` on packed chords; indices have no gradient, and bounds need none."""
    parts = unpack(tensors, time_dims, weighted)
    with without_autocast(tensors[0].device):
        if impl == "triton":
            from horosphere.kernels.triton.nearest import nearest as triton_nearest

            return triton_nearest(parts, k)
        return tiled_nearest(parts, k)


@torch.library.register_fake("horosphere::nearest")
def _(tensors, time_dims, weighted, k, impl):
    parts = unpack(tensors, time_dims, weighted)
    shape = (*batch_of(parts), parts[0].x.shape[-2], k)
    return tensors[0].new_empty(shape, dtype=dtype_of(parts)), tensors[0].new_empty(shape, dtype=torch.int64)


def _save(ctx, inputs, output):
    tensors, *ctx.layout, ctx.squared, _, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad, _):
    tensors = ctx.saved_tensors
    nothing = (None,) * 5
    if torch.is_grad_enabled():  # a second derivative is wanted: that of the plain form
        return _reference_gradient(grad, tensors, ctx.layout, ctx.squared), *nothing
    curvature = any(p.kappa.requires_grad for p in unpack(tensors, *ctx.layout))
    return torch.ops.horosphere.sqdist_backward(grad, tensors, *ctx.layout, ctx.squared, curvature, ctx.impl), *nothing


def _reference_gradient(
    grad: Tensor, tensors: Sequence[Tensor], layout: Sequence, squared: bool
) -> list[Tensor | None]:
    # a tensor may be there twice: each place gets its own gradient through an alias of its own
    places = [t.view_as(t) for t in tensors]
    xs, ys = zip(*(p.chords() for p in unpack(places, *layout)), strict=True)
    out, _ = sqdist(xs, ys, squared=squared, resolve=False, impl="reference")
    wanted = [p for p in places if p.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if p.requires_grad else None for p in places]


torch.library.register_autograd("horosphere::sqdist", _backward, setup_context=_save)

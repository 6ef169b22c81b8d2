"""Low-rank metrics as torch custom operators with written gradients; see horosphere.kernels.low_rank.algebra."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere.kernels.low_rank import algebra as low_rank
from horosphere.kernels.low_rank.algebra import Spectrum

_TAGS = (torch.Tag.pt2_compliant_tag,)


def spectrum(scale: Tensor, factor: Tensor) -> Spectrum:
    """The :class:`Spectrum` of P metrics, without gradient: what the operators below share."""
    with torch.no_grad():
        return Spectrum(*torch.ops.horosphere.low_rank_spectrum(scale, factor))


def apply(v: Tensor, scale: Tensor, factor: Tensor, known: Spectrum, power: float) -> Tensor:
    """G^power v (P, K, D) in the common type of the arguments; differentiable in v, scale and factor.

    G^-1 has derivatives of every order, the roots a first one.
    """
    return torch.ops.horosphere.low_rank_apply(v, scale, factor, *known, power)


def logdet(scale: Tensor, factor: Tensor, known: Spectrum) -> Tensor:
    """log det G (P,); differentiable once in scale and factor."""
    return torch.ops.horosphere.low_rank_logdet(scale, factor, *known)


torch.library.define("horosphere::low_rank_spectrum", "(Tensor s, Tensor u) -> (Tensor, Tensor, Tensor)", tags=_TAGS)


@torch.library.impl("horosphere::low_rank_spectrum", "default")
def _(s, u):
    return tuple(low_rank.spectrum(s, u))


@torch.library.register_fake("horosphere::low_rank_spectrum")
def _(s, u):
    p, d, r = u.shape
    return tuple(u.new_empty(shape, dtype=torch.float64) for shape in ((p, d, r), (p, r, r), (p, r)))


torch.library.define(
    "horosphere::low_rank_apply",
    "(Tensor v, Tensor s, Tensor u, Tensor turned, Tensor basis, Tensor singular, float power) -> Tensor",
    tags=_TAGS,
)


@torch.library.impl("horosphere::low_rank_apply", "default")
def _(v, s, u, turned, basis, singular, power):
    out = low_rank.apply(v, s, u, Spectrum(turned, basis, singular), power)
    return out.to(_common(v, s, u))


@torch.library.register_fake("horosphere::low_rank_apply")
def _(v, s, u, turned, basis, singular, power):
    return v.new_empty(v.shape, dtype=_common(v, s, u))


torch.library.define(
    "horosphere::low_rank_apply_backward",
    "(Tensor grad, Tensor v, Tensor s, Tensor u, Tensor turned, Tensor basis, Tensor singular, float power)"
    " -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


@torch.library.impl("horosphere::low_rank_apply_backward", "default")
def _(grad, v, s, u, turned, basis, singular, power):
    found = low_rank.apply_backward(grad, v, s, u, Spectrum(turned, basis, singular), power)
    return tuple(g.to(t.dtype) for g, t in zip(found, (v, s, u), strict=True))


@torch.library.register_fake("horosphere::low_rank_apply_backward")
def _(grad, v, s, u, turned, basis, singular, power):
    return tuple(t.new_empty(t.shape) for t in (v, s, u))


torch.library.define(
    "horosphere::low_rank_logdet",
    "(Tensor s, Tensor u, Tensor turned, Tensor basis, Tensor singular) -> Tensor",
    tags=_TAGS,
)


@torch.library.impl("horosphere::low_rank_logdet", "default")
def _(s, u, turned, basis, singular):
    return low_rank.logdet(s, Spectrum(turned, basis, singular), u.shape[-2]).to(_common(s, u))


@torch.library.register_fake("horosphere::low_rank_logdet")
def _(s, u, turned, basis, singular):
    return s.new_empty(s.shape, dtype=_common(s, u))


torch.library.define(
    "horosphere::low_rank_logdet_backward",
    "(Tensor grad, Tensor s, Tensor u, Tensor turned, Tensor basis, Tensor singular) -> (Tensor, Tensor)",
    tags=_TAGS,
)


@torch.library.impl("horosphere::low_rank_logdet_backward", "default")
def _(grad, s, u, turned, basis, singular):
    ds, du = low_rank.logdet_backward(grad, s, Spectrum(turned, basis, singular), u.shape[-2])
    return ds.to(s.dtype), du.to(u.dtype)


@torch.library.register_fake("horosphere::low_rank_logdet_backward")
def _(grad, s, u, turned, basis, singular):
    return s.new_empty(s.shape), u.new_empty(u.shape)


def _common(*tensors: Tensor) -> torch.dtype:
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def _save_apply(ctx, inputs, output):
    *tensors, ctx.power = inputs
    ctx.save_for_backward(*tensors)


def _apply_backward(ctx, grad):
    v, s, u, *known = ctx.saved_tensors
    rest = (None,) * 4
    if not torch.is_grad_enabled():
        return *torch.ops.horosphere.low_rank_apply_backward(grad, v, s, u, *known, ctx.power), *rest
    if ctx.power != -1:
        raise NotImplementedError("the roots of a low-rank metric have first derivatives only; G^-1 has all orders")
    y, z = (apply(t, s, u, Spectrum(*known), -1) for t in (v, grad))
    du = -(z.mT @ (y @ u) + y.mT @ (z @ u))
    return z.to(v.dtype), (-2 * s * (z * y).sum((-1, -2))).to(s.dtype), du.to(u.dtype), *rest


torch.library.register_autograd("horosphere::low_rank_apply", _apply_backward, setup_context=_save_apply)


def _save_logdet(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _logdet_backward(ctx, grad):
    if torch.is_grad_enabled():
        raise NotImplementedError("log det of a low-rank metric has first derivatives only")
    return *torch.ops.horosphere.low_rank_logdet_backward(grad, *ctx.saved_tensors), None, None, None


torch.library.register_autograd("horosphere::low_rank_logdet", _logdet_backward, setup_context=_save_logdet)

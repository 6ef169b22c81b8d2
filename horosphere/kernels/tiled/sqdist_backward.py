r"""Gradient of distance matrices by recomputing tiles: no memory beyond the tile and the points.

With t = <a_i, b_j> and G = dL/dt the gradients of the augmented features are G b and G^T a; the rest is per point. For
one point and one side this is the formula of docs/chord.md: dL/df_i = 2 J (f_i sum_j r_ij - sum_j r_ij f_j), r = dL/du
w_i w_j.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere.kernels.chord import arcs
from horosphere.kernels.chord.augment import (
    augment,
    flat,
    kappa_entries,
    key_gradient,
    query_gradient,
    tile_product,
    without_far,
)
from horosphere.kernels.chord.parts import Part, batch_of, dtype_of
from horosphere.kernels.tiled.sqdist import all_alike, may_overflow
from horosphere.kernels.tiled.tiles import group_width, tile_size, tiles


def sqdist_backward(grad: Tensor, parts: Sequence[Part], squared: bool, curvature: bool) -> list[Tensor]:
    """Gradients of the packed tensors; that of kappa is 0 unless ``curvature`` asks for it."""
    batch, dtype = batch_of(parts), dtype_of(parts)
    grad = flat(grad, batch, 2)
    made = [without_far(augment(p, batch, dtype)) for p in parts]
    wide = [may_overflow(a) for a in made]
    da, db = [torch.zeros_like(a.a) for a in made], [torch.zeros_like(a.b) for a in made]
    dk = [torch.zeros(batch.numel(), dtype=torch.float64, device=grad.device) for _ in made]
    n, m = grad.shape[-2:]
    width = group_width(m)
    size = max(tile_size(grad.device), width)
    buffers = torch.empty(3, min(size, max(1, grad.numel())), dtype=dtype, device=grad.device)
    single = len(made) == 1
    for e, i, j in tiles(batch.numel(), n, m, size, width, all_alike(made)):
        upper = grad[e, i, j]
        if not single:
            upper = upper.to(dtype) if squared else _through_root(made, wide, upper, e, i, j, buffers)
        for k, a in enumerate(made):
            t = tile_product(a.a[e, i], a.b[e, j], buffers[0])
            sign, square = a.signs[e.start], squared or not single
            scratch = buffers[1, : t.numel()].view(t.shape)
            factor = a.factor[e] ** 2 if square else a.factor[e]
            if curvature:
                change = arcs.masked_(arcs.curvature_slope(t, sign, square) * upper, t, sign)
                dk[k][e] += change.sum((-1, -2)).to(torch.float64)
            g = arcs.slope(t, sign, square, scratch, wide[k]).mul_(upper)
            arcs.masked_(g, t, sign)
            if sign:
                g.mul_(factor)
            _accumulate(da[k][e, i], g, a.b[e, j])
            _accumulate(db[k][e, j], g.mT, a.a[e, i])
    grads = []
    for part, a_sum, b_sum, k_sum in zip(parts, da, db, dk, strict=True):
        grads += per_point(part, batch, a_sum, b_sum, k_sum, squared or not single, curvature)
    return grads


def _through_root(made, wide, upper: Tensor, e: slice, i: slice, j: slice, buffers: Tensor) -> Tensor:
    """dL/d(d^2) of a product from dL/dd: the squares of all parts are summed first."""
    total = torch.zeros_like(upper, dtype=buffers.dtype)
    for a, w in zip(made, wide, strict=True):
        t = arcs.clamp_(tile_product(a.a[e, i], a.b[e, j], buffers[0]), a.signs[e.start])
        d = arcs.arc_(t, a.signs[e.start], buffers[1, : t.numel()].view(t.shape), w).mul_(a.factor[e])
        total.addcmul_(d, d)
    out = total.rsqrt().mul_(0.5).mul_(upper)
    return arcs.masked_(out, total, 0)


def _accumulate(into: Tensor, g: Tensor, features: Tensor) -> None:
    if g.shape[0] == 1:
        into[0].addmm_(g[0], features[0])
    else:
        into.baddbmm_(g, features)


def per_point(
    part: Part, batch: torch.Size, da: Tensor, db: Tensor, dk: Tensor, square: bool, curvature: bool
) -> list[Tensor]:
    """From the gradients of augmented features to those of features, curvature and weights."""
    kappa = kappa_entries(part.kappa, batch).to(da.device)
    curved = kappa != 0
    c = torch.where(curved, kappa.abs() / 2, 1.0)[:, None]
    x, y = flat(part.x, batch, 2).to(torch.float64), flat(part.y, batch, 2).to(torch.float64)
    da, db = da.to(torch.float64), db.to(torch.float64)
    wx, wy = (None if w is None else flat(w, batch, 1).to(torch.float64) for w in (part.wx, part.wy))
    # with time coordinates norms enter the comparison only, not the distance
    (x1, x2), (y1, y2) = ((None, None) if part.time_dims else (d[..., -2], d[..., -1]) for d in (da, db))
    gx, gwx = query_gradient(x, wx, da[..., :-2].clone(), x1, x2, c, part.time_dims)
    gy, gwy = key_gradient(y, wy, db[..., :-2].clone(), y1, y2, part.time_dims)
    gk = torch.zeros_like(kappa)
    if curvature:
        power = torch.where(curved, kappa.abs(), 1.0)
        gk = dk / (power**2 if square else power**1.5)
        if part.time_dims:  # u = 2/kappa - 2 <x, y>_J
            gk = gk - 2 / kappa**2 * (c * da[..., x.shape[-1]]).sum(-1)
    gk = gk.to(part.kappa.device)
    found = ((gx, part.x), (gy, part.y), (gk, part.kappa), (gwx, part.wx), (gwy, part.wy))
    return [_fold(g, like, batch) for g, like in found if g is not None and like is not None]


def _fold(g: Tensor, like: Tensor, batch: torch.Size) -> Tensor:
    """g (B, ...) in the shape and type of ``like``, summed over what was broadcast."""
    return g.reshape((*batch, *g.shape[1:])).sum_to_size(like.shape).to(like.dtype)

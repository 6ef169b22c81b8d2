r"""Features augmented so that one matrix product returns the scaled squared chord of a tile.

With c = |kappa| / 2 (1 on flat space) the tile is :math:`t_{ij} = c\,u_{ij} = \langle a_i, b_j \rangle`,

    a_i = c w_i (-2 f_i, |f_i|^2, 1),          b_j = w_j (f_j, 1, |f_j|^2)
    a_i = c (-2 J f_i, 2/kappa, 0),            b_j = (f_j, 1, |f_j|^2)          with time coordinates

so that cosh or cos of the distance is 1 + t or 1 - t. They are formed in float64 and rounded once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.chord.pair import ChordPair, theta


class Augmented(NamedTuple):
    """One part, batch dimensions flattened to B."""

    a: Tensor  # (B, N, F + 2)
    b: Tensor  # (B, M, F + 2)
    signs: list[int]  # of the B curvatures
    factor: Tensor  # (B, 1, 1), 1/sqrt|kappa|, 1 on flat space: the unit of length
    plain_b: Tensor  # (B, M, F + 2), b without weights
    wy: Tensor | None  # (B, M), None where there are no weights
    # theta times the size of what was subtracted to get t is (p_i + q_i n_j) w_j, n_j = |f_j|^2. NaN, which no t
    # exceeds, where squares leave the range of the type
    p: Tensor  # (B, N)
    q: Tensor  # (B, N)
    n: Tensor  # (B, M)


def batch_scalars(kappa: Tensor, batch: torch.Size) -> Tensor:
    """The curvature of every batch entry, (B,) in float64."""
    return kappa.detach().to(torch.float64).expand(batch).reshape(-1)


def flat(t: Tensor, batch: torch.Size, own: int) -> Tensor:
    """t (..., its last ``own`` dimensions) with the batch dimensions made one."""
    return t.expand(*batch, *t.shape[t.dim() - own :]).reshape(batch.numel(), *t.shape[t.dim() - own :])


def valid_weight(w: Tensor) -> Tensor:
    """Outside of a ball the conformal factor is negative: there is no distance."""
    return torch.where(w > 0, w, math.nan)


def minkowski(f: Tensor, time_dims: int) -> Tensor:
    """J f: the leading coordinates with their sign changed."""
    return torch.cat((-f[..., :time_dims], f[..., time_dims:]), -1) if time_dims else f


def _bounding(n: Tensor, c: Tensor, work: torch.dtype) -> Tensor:
    """Squared norms as error bounds take them, see :func:`horosphere._numerics.range_of_squares`; 0 is exact."""
    least, most = _numerics.range_of_squares(work)
    return torch.where(c * n < most, torch.where(n > 0, n.clamp(min=least), n), math.nan)


def augment(part: ChordPair, batch: torch.Size, work: torch.dtype, pad: int = 0) -> Augmented:
    """The part's augmented features in the type ``work``, the last column repeated ``pad`` times."""
    kappa = batch_scalars(part.kappa, batch)
    signs = [(k > 0) - (k < 0) for k in kappa.tolist()]
    kappa = kappa.to(part.x.device)[:, None, None]
    curved = kappa != 0
    c = torch.where(curved, kappa.abs() / 2, 1.0)
    factor = torch.where(curved, kappa.abs(), 1.0).rsqrt()
    x, y = flat(part.x, batch, 2).to(torch.float64), flat(part.y, batch, 2).to(torch.float64)
    nx, ny = (x * x).sum(-1, keepdim=True), (y * y).sum(-1, keepdim=True)
    b = torch.cat((y, torch.ones_like(ny), ny), -1)
    if part.time_dims:
        a = c * torch.cat(
            (-2 * minkowski(x, part.time_dims), 2 / kappa * torch.ones_like(nx), torch.zeros_like(nx)), -1
        )
    else:
        a = c * torch.cat((-2 * x, nx, torch.ones_like(nx)), -1)
    bounding, norms = (_bounding(n, c, work) for n in (nx, ny))
    size = c * torch.cat((bounding, torch.ones_like(nx)), -1)
    if pad:
        b, norms = (torch.cat((t, t[:, -1:].expand(-1, pad, -1)), 1) for t in (b, norms))
    plain_b, wy = b, None
    if part.wx is not None and part.wy is not None:
        wx, wy = (valid_weight(flat(w, batch, 1).to(torch.float64)) for w in (part.wx, part.wy))
        if pad:
            wy = torch.cat((wy, wy[:, -1:].expand(-1, pad)), 1)
        a, b, size = a * wx.unsqueeze(-1), b * wy.unsqueeze(-1), size * wx.unsqueeze(-1)
        wy = wy.to(work)
    size = size * theta(x.shape[-1], work)
    a, b, plain_b, size, norms, factor = (t.to(work) for t in (a, b, plain_b, size, norms, factor))
    return Augmented(a, b, signs, factor, plain_b, wy, size[..., 0], size[..., 1], norms[..., 0])


def without_far(a: Augmented) -> Augmented:
    """a with points of finite coordinates whose squares leave the range of the type made 0, and so t of their pairs."""

    def kept(features: Tensor, bound: Tensor) -> Tensor:
        far = bound.isnan() & features[..., :-2].isfinite().all(-1)
        return torch.where(far.unsqueeze(-1), 0.0, features)

    return a._replace(a=kept(a.a, a.p), b=kept(a.b, a.n))


def tile_product(a: Tensor, b: Tensor, buffer: Tensor) -> Tensor:
    """<a_i, b_j> (B', R, C) written into the kept flat buffer."""
    out = buffer[: a.shape[0] * a.shape[1] * b.shape[1]].view(a.shape[0], a.shape[1], b.shape[1])
    if a.shape[0] == 1:
        torch.mm(a[0], b[0].mT, out=out[0])
    else:
        torch.bmm(a, b.mT, out=out)
    return out


def query_gradient(
    x: Tensor, w: Tensor | None, main: Tensor, first: Tensor | None, second: Tensor | None, c: Tensor, time_dims: int
) -> tuple[Tensor, Tensor | None]:
    """Gradients of features x (..., N, F) and weights w (..., N), from that of a: ``main`` (..., N, F), which is
    overwritten, and the last two columns (..., N); c (..., 1).

    With time coordinates the columns may be None: the gradient of -2 <x, y>_J alone, not that of <x - y, x - y>_J.
    That of weights wants both.
    """
    gw = None
    if w is not None and first is not None and second is not None:
        gw = c * (second + (x * x).sum(-1) * first - 2 * (x * main).sum(-1))
    scale = 2 * (c if w is None else c * w)
    main.mul_(-scale.unsqueeze(-1))
    if first is not None:
        main.addcmul_(x, (scale * first).unsqueeze(-1))
    if time_dims:
        main[..., :time_dims].neg_()
    return main, gw


def key_gradient(
    y: Tensor, w: Tensor | None, main: Tensor, first: Tensor | None, second: Tensor | None, time_dims: int
) -> tuple[Tensor, Tensor | None]:
    """Gradients of features y (..., M, F) and weights w (..., M), from that of b: ``main`` (..., M, F), which is
    overwritten, and the last two columns (..., M). ``first`` is wanted with weights only; both may be None as above.
    """
    gw = None
    if w is not None and first is not None and second is not None:
        gw = (y * main).sum(-1) + first + (y * y).sum(-1) * second
    if second is not None:
        main.addcmul_(minkowski(y, time_dims), second.unsqueeze(-1), value=2.0)
    return main if w is None else main.mul_(w.unsqueeze(-1)), gw

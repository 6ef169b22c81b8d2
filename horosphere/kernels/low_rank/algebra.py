r"""Algebra of low-rank metrics :math:`G = s^2 I + U U^T`, one a row, worked in float64 from the eigenvectors of U^T U.

With :math:`U^T U = B \mathrm{diag}(S^2) B^T`, h = hypot(s, S) and Z = U B every power of G that is needed is

    G^p v = c v + Z diag(m) Z^T v      p = -1:   c = 1/s^2,  m = -1/(s^2 h^2)
                                       p = 1/2:  c = s,      m = 1/(h + s)
                                       p = -1/2: c = 1/s,    m = -1/(s h (h + s))

in which nothing is divided by S: zero, repeated and surplus columns are ordinary. U^T U squares the ratio |U|/s, so
rows where it passes :data:`PEEL_RATIO` are worked by :mod:`horosphere.kernels.low_rank.ill_conditioned` instead.

Shapes: P metrics, K vectors for each of them: scale (P,), factor (P, D, R), v (P, K, D).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from horosphere.kernels.low_rank import ill_conditioned

# h/s above which U^T U is not formed: below, its rounding and the cancellation in G^-1 are 2^-53 of 1e6.
PEEL_RATIO = 1e3


class Spectrum(NamedTuple):
    """Z = U B (P, D, R), B (P, R, R) and S (P, R), all float64 and without gradient."""

    turned: Tensor
    basis: Tensor
    singular: Tensor

    def heights(self, scale: Tensor) -> Tensor:
        """h = sqrt(s^2 + S^2), the roots of the eigenvalues of G on the columns of Z."""
        return torch.hypot(scale.unsqueeze(-1), self.singular)


def spectrum(scale: Tensor, factor: Tensor) -> Spectrum:
    """The eigenvectors of U^T U, by singular values of U where the ratio is large."""
    scale, factor = scale.to(torch.float64), factor.to(torch.float64)
    if factor.shape[-1] == 0:
        p, d, _ = factor.shape
        return Spectrum(*(factor.new_zeros(shape) for shape in ((p, d, 0), (p, 0, 0), (p, 0))))
    gram = factor.mT @ factor
    good = gram.isfinite().all(-1).all(-1)[..., None, None]  # LAPACK refuses a NaN; the row's own results show it
    squares, basis = torch.linalg.eigh(torch.where(good, gram, 0.0))
    singular = torch.where(good.squeeze(-1), squares.clamp(min=0.0).sqrt(), torch.nan)
    turned = factor @ basis
    rows = _steep(scale, singular)
    if rows is not None:
        exact = ill_conditioned.decompose(scale[rows], factor[rows])
        turned[rows], basis[rows], singular[rows] = ill_conditioned.full(exact)
    return Spectrum(turned, basis, singular)


def apply(v: Tensor, scale: Tensor, factor: Tensor, known: Spectrum, power: float) -> Tensor:
    """G^power v for power in (-1, 1/2, -1/2), float64 (P, K, D)."""
    v, scale = v.to(torch.float64), scale.to(torch.float64)
    front, middle = _coefficients(scale, known.heights(scale), power)
    inside = (v @ known.turned) * middle.unsqueeze(-2)
    out = torch.addcmul(inside @ known.turned.mT, v, front[:, None, None])
    rows = _steep(scale, known.singular)
    if rows is not None:
        exact = ill_conditioned.decompose(scale[rows], factor[rows].to(torch.float64))
        out[rows] = ill_conditioned.apply(exact, ill_conditioned.split(exact, v[rows]), power)
    return out


def apply_backward(
    grad: Tensor, v: Tensor, scale: Tensor, factor: Tensor, known: Spectrum, power: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dv (P, K, D), dL/ds (P,) and dL/dU (P, D, R) of :func:`apply`, float64.

    The derivative of the root H = G^{1/2} solves H dH + dH H = dG; in the eigenvectors of G that is a division by
    h_i + h_j, which is never 0. So nothing is differentiated through the eigenvectors themselves.
    """
    grad, v, scale = grad.to(torch.float64), v.to(torch.float64), scale.to(torch.float64)
    dv = apply(grad, scale, factor, known, power)
    s, h, turned = scale[:, None, None], known.heights(scale).unsqueeze(-2), known.turned
    if power == -1:
        y = apply(v, scale, factor, known, power)
        beside, along = torch.cat((dv, y), -2), torch.cat((v, grad), -2) @ turned / -(h**2)
        du = beside.mT @ (along @ known.basis.mT)
        ds = -2 * scale * (dv * y).sum((-1, -2))
    else:
        o, w = grad, v
        if power == -0.5:  # d(H^-1) = -H^-1 dH H^-1
            o, w = -dv, apply(v, scale, factor, known, power)
        a, b = (o @ turned) / (h + s), (w @ turned) / (h + s)
        pairs = a.mT @ b / (h.mT + h)
        beside, along = torch.cat((o, w), -2), torch.cat((b, a), -2)
        du = torch.baddbmm(beside.mT @ (along @ known.basis.mT), turned, (pairs + pairs.mT) @ known.basis.mT, alpha=-1)
        ds = (o * w).sum((-1, -2)) - (a * b).sum((-1, -2)) - 2 * scale * pairs.diagonal(dim1=-2, dim2=-1).sum(-1)
    rows = _steep(scale, known.singular)
    if rows is not None:
        exact = ill_conditioned.decompose(scale[rows], factor[rows].to(torch.float64))
        upper, vectors = ill_conditioned.split(exact, grad[rows]), ill_conditioned.split(exact, v[rows])
        ds[rows], du[rows] = ill_conditioned.apply_backward(exact, upper, vectors, power)
    return dv, ds, du


def logdet(scale: Tensor, known: Spectrum, dim: int) -> Tensor:
    """log det G = 2 D log s + sum log(1 + S^2/s^2), float64 (P,)."""
    scale = scale.to(torch.float64)
    return 2 * dim * scale.log() + torch.log1p((known.singular / scale.unsqueeze(-1)) ** 2).sum(-1)


def logdet_backward(grad: Tensor, scale: Tensor, known: Spectrum, dim: int) -> tuple[Tensor, Tensor]:
    """dL/ds and dL/dU of :func:`logdet`: 2 s tr G^-1 and 2 G^-1 U."""
    grad, scale = grad.to(torch.float64), scale.to(torch.float64)
    inverse = known.heights(scale) ** -2
    rank = inverse.shape[-1]
    ds = 2 * grad * ((dim - rank) / scale + scale * inverse.sum(-1))
    return ds, 2 * grad[:, None, None] * (known.turned * inverse.unsqueeze(-2)) @ known.basis.mT


def _coefficients(s: Tensor, h: Tensor, power: float) -> tuple[Tensor, Tensor]:
    r = s.unsqueeze(-1)
    if power == -1:
        return s**-2, -1 / (r * h) ** 2
    return (s, 1 / (h + r)) if power == 0.5 else (1 / s, -1 / (r * h * (h + r)))


def _steep(scale: Tensor, singular: Tensor) -> Tensor | None:
    """Indices of the rows whose ratio |U|/s is beyond what U^T U resolves; None where there is none."""
    if not singular.numel():
        return None
    rows = (singular.amax(-1) > PEEL_RATIO * scale).nonzero().squeeze(-1)
    return rows if rows.numel() else None

r"""Low-rank metrics with |U| >> s: singular vectors of U itself, and vectors split into what U spans and the rest.

There :math:`G^{-1} v` is of size |v|/S^2 for v in the range of U and |v|/s^2 beside it, so v has to be split exactly:
v = U W + r with W on a grid so coarse that U W has no rounding.

Shapes as in :mod:`horosphere.kernels.low_rank.algebra`, everything float64; J = min(D, R) singular values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Digits kept of the coefficients W: factors of float32 have as many, so products are exact in the 53 of float64.
GRID_BITS = 24


class Exact(NamedTuple):
    """U = Q diag(S) B^T: factor (P, D, R), Q (P, D, J), S (P, J), B^T (P, R, R), scale (P,)."""

    scale: Tensor
    factor: Tensor
    left: Tensor
    singular: Tensor
    right: Tensor

    @property
    def heights(self) -> Tensor:
        return torch.hypot(self.scale.unsqueeze(-1), self.singular)

    @property
    def spanned(self) -> Tensor:
        """S B^T = Q^T U, (P, J, R)."""
        return self.singular.unsqueeze(-1) * self.right[:, : self.singular.shape[-1]]


class Split(NamedTuple):
    """A vector as its coordinates c on Q (P, K, J) and the part p beside it (P, K, D)."""

    along: Tensor
    beside: Tensor


def decompose(scale: Tensor, factor: Tensor) -> Exact:
    """QR first: its triangle keeps the small singular values that U^T U loses."""
    q, triangle = torch.linalg.qr(factor)
    a, singular, right = torch.linalg.svd(triangle)
    return Exact(scale, factor, q @ a[..., : q.shape[-1]], singular, right)


def full(exact: Exact) -> tuple[Tensor, Tensor, Tensor]:
    """Z = U B (P, D, R), B (P, R, R), S (P, R), zeros where R > D."""
    d, r = exact.factor.shape[-2:]
    pad = (0, max(0, r - d))
    turned = torch.nn.functional.pad(exact.left * exact.singular.unsqueeze(-2), pad)
    return turned, exact.right.mT, torch.nn.functional.pad(exact.singular, pad)


def split(exact: Exact, v: Tensor) -> Split:
    """v (P, K, D) as Q c + p, c and p each to its own relative accuracy."""
    j = exact.singular.shape[-1]
    steep = exact.singular > exact.scale.unsqueeze(-1)  # where S <= s nothing cancels
    inverse = torch.where(steep, 1 / torch.where(steep, exact.singular, 1.0), 0.0)
    coefficients = v.new_zeros(*v.shape[:-1], exact.factor.shape[-1])
    rest = v
    for _ in range(2):
        w = ((rest @ exact.left) * inverse.unsqueeze(-2)) @ exact.right[:, :j]
        w = _on_grid(w)
        rest = rest - w @ exact.factor.mT
        coefficients = coefficients + w
    remaining = rest @ exact.left
    along = coefficients @ exact.spanned.mT + remaining
    if j == v.shape[-1]:  # Q spans everything: what is left is rounding
        return Split(along, torch.zeros_like(v))
    return Split(along, rest - remaining @ exact.left.mT)


def apply(exact: Exact, v: Split, power: float) -> Tensor:
    """G^power v (P, K, D)."""
    h, s = exact.heights.unsqueeze(-2), exact.scale[:, None, None]
    exponent = 2 * power
    return (v.along * h**exponent) @ exact.left.mT + v.beside * s**exponent


def apply_backward(exact: Exact, o: Split, v: Split, power: float) -> tuple[Tensor, Tensor]:
    """dL/ds (P,) and dL/dU (P, D, R), o the cotangent of G^power v."""
    h, s = exact.heights.unsqueeze(-2), exact.scale[:, None, None]
    if power == -1:
        z, y = (Split(t.along / h**2, t.beside / s**2) for t in (o, v))
        zs, ys = (t.along @ exact.left.mT + t.beside for t in (z, y))
        ds = -2 * exact.scale * ((z.along * y.along).sum((-1, -2)) + (z.beside * y.beside).sum((-1, -2)))
        return ds, -(zs.mT @ y.along + ys.mT @ z.along) @ exact.spanned
    if power == -0.5:
        o, v = Split(-o.along / h, -o.beside / s), Split(v.along / h, v.beside / s)
    pairs = o.along.mT @ v.along / (h.mT + h)
    ds = exact.scale * (o.along * v.along / h).sum((-1, -2)) + (o.beside * v.beside).sum((-1, -2))
    columns = exact.left @ (pairs + pairs.mT)
    columns = columns + o.beside.mT @ (v.along / (h + s)) + v.beside.mT @ (o.along / (h + s))
    return ds, columns @ exact.spanned


def _on_grid(w: Tensor) -> Tensor:
    """w rounded to multiples of 2^-24 of its largest entry's binary order."""
    order = torch.frexp(w.abs().amax(-1, keepdim=True)).exponent
    return torch.ldexp(torch.round(torch.ldexp(w, GRID_BITS - order)), order - GRID_BITS)

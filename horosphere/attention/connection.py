r"""Carrying vectors between fibres: transport by square roots of metrics and pair rotations, its curvature and torsion.

Vectors at token j are measured by G_j, those at token i by G_i. The transport

    P_{i<-j} = G_i^{-1/2} R_ij G_j^{1/2},   R_ij orthogonal,  R_ji = R_ij^T,

keeps lengths exactly: |P v|_{G_i} = |v|_{G_j}. With R = I vectors pass through one global frame: the connection is flat
and has torsion (teleparallel). A rotation A_i A_j^T made of one rotation a token is a change of frames, and as flat:
curvature needs an angle of the *pair*. Source: Nakahara, Geometry, Topology and Physics, 7.3.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from horosphere import _numerics
from horosphere.manifolds import ManifoldParameter, TokenMetric, allow_loading
from horosphere.manifolds._geoopt import geoopt


@allow_loading
class Frames(geoopt.manifolds.stiefel.EuclideanStiefel):
    """Matrices with orthonormal columns: geoopt's Stiefel manifold, whose points move by the QR retraction.

    geoopt's exponential map leaves the manifold by 2e-5 within 300 steps in float32; the retraction stays on it.
    """

    name = "Frames"

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """The Q of x + u: first order in u, and orthonormal to rounding."""
        return self.retr(x, u)


class Turn(NamedTuple):
    """Rotations of all pairs of two sequences, not formed: angles are ``left @ right^T`` in each plane.

    Attributes:
        frame: B (D, 2 m), two columns a plane.
        left: (..., m, N, p), what a query gives to the angle of each plane.
        right: (..., M, p), what a key gives.
    """

    frame: Tensor
    left: Tensor
    right: Tensor


class PairRotation(nn.Module):
    r"""Rotations that depend on the pair: :math:`R_{ij} = I + B (\mathrm{rot}(\theta_{ij}) - I) B^T`.

    B (D x 2m) has orthonormal columns, a point of the Stiefel manifold, and spans m planes; in plane l the angle is
    :math:`\theta_{ij} = a_i^T \Omega_l a_j` with :math:`\Omega_l` antisymmetric, so :math:`R_{ji} = R_{ij}^T` and
    :math:`R_{ii} = I`. Train it with :class:`horosphere.optim.RiemannianAdam`.

    Args:
        dim: D.
        features: p >= 2, the length of the vectors a that tokens give.
        planes: m, at most D / 2.

    Raises:
        ValueError: sizes out of range.
    """

    def __init__(self, dim: int, features: int, planes: int = 1):
        super().__init__()
        if planes < 1 or 2 * planes > dim:
            raise ValueError(f"planes must lie between 1 and dim / 2 = {dim // 2}, got {planes}")
        if features < 2:
            raise ValueError(f"features must be at least 2, because an antisymmetric number is 0; got {features}")
        self.dim, self.features, self.planes = dim, features, planes
        self.frame = ManifoldParameter(torch.randn(dim, 2 * planes), Frames())
        self.omega = nn.Parameter(torch.randn(planes, features, features) / features)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, features={self.features}, planes={self.planes}"

    @property
    def antisymmetric(self) -> Tensor:
        """Omega - Omega^T, (m, p, p)."""
        return self.omega - self.omega.mT

    def angles(self, a_i: Tensor, a_j: Tensor) -> Tensor:
        """theta_ij of broadcast pairs a_i, a_j (..., p), one a plane: (..., m)."""
        return torch.einsum("...p,mpq,...q->...m", a_i, self.antisymmetric, a_j)

    def between(self, a_q: Tensor, a_k: Tensor) -> Turn:
        """The rotations of all pairs of a_q (..., N, p) and a_k (..., M, p)."""
        return Turn(self.frame, a_q.unsqueeze(-3) @ self.antisymmetric, a_k)

    def forward(self, v: Tensor, angles: Tensor) -> Tensor:
        """R v for vectors (..., D) and angles (..., m), broadcast."""
        return rotate(v, angles, self.frame)


class Rotation(Protocol):
    """What transport asks of the rotation of a pair, such as :class:`PairRotation`."""

    def angles(self, a_i: Tensor, a_j: Tensor) -> Tensor:
        """theta_ij of broadcast pairs of features."""
        ...

    def __call__(self, v: Tensor, angles: Tensor) -> Tensor:
        """R v for broadcast vectors and angles."""
        ...


def rotate(v: Tensor, angles: Tensor, frame: Tensor) -> Tensor:
    """v (..., D) turned by ``angles`` (..., m) in the planes of consecutive columns of ``frame`` (D, 2 m)."""
    along = (v @ frame).unflatten(-1, (-1, 2))
    one, two = along.unbind(-1)
    less = -2 * torch.sin(angles / 2) ** 2  # cos - 1, exact for small angles
    sine = torch.sin(angles)
    change = torch.stack((less * one - sine * two, sine * one + less * two), -1)
    return v + change.flatten(-2) @ frame.mT


def transport(
    g_to: TokenMetric,
    g_from: TokenMetric,
    v: Tensor,
    rotation: Rotation | None = None,
    angles: Tensor | None = None,
) -> Tensor:
    r""":math:`P_{i \leftarrow j} v = G_i^{-1/2} R_{ij} G_j^{1/2} v`, pair by pair.

    Args:
        g_to: metrics G_i, (...).
        g_from: metrics G_j, (...).
        v: (..., D), vectors at j.
        rotation: R; None: the identity.
        angles: (..., m), the rotation's angles of these pairs.

    Returns:
        (..., D), vectors at i, of the same length in their own metric.

    Raises:
        ValueError: a rotation without angles, or shapes that do not fit.
    """
    across = g_from.sqrt_matmul(v)
    if rotation is not None:
        if angles is None:
            raise ValueError("a rotation needs the angles of the pairs: rotation.angles(a_i, a_j)")
        across = rotation(across, angles)
    return g_to.inv_sqrt_matmul(across)


def triangles(count: int, length: int, *, generator: torch.Generator | None = None, device=None) -> Tensor:
    """(3, count) indices of random triples of different tokens out of ``length``.

    Raises ValueError for fewer than three tokens.
    """
    if length < 3:
        raise ValueError(f"a triangle needs three tokens, got a sequence of {length}")
    drawn = [torch.randint(length - k, (count,), generator=generator, device=device) for k in range(3)]
    i, j, k = drawn
    j = j + (j >= i)
    low, high = torch.minimum(i, j), torch.maximum(i, j)
    k = k + (k >= low)
    return torch.stack((i, j, k + (k >= high)))


def curvature_proxy(around: Tensor) -> Tensor:
    r"""How far a vector carried around a triangle comes back turned: :math:`|R_{ij} R_{jk} R_{ki} - I|_F`.

    In the orthonormal frames, so independent of how they are chosen. All pair rotations turn in the same planes, and
    there it is :math:`2 \sqrt 2\,(\sum_l \sin^2(\varphi_l / 2))^{1/2}`, :math:`\varphi = \theta_{ij} + \theta_{jk} +
    \theta_{ki}`. With R = I it is 0. Its square is the better penalty: it is smooth at 0.

    Args:
        around: (..., m), the sum of the three angles in each plane.

    Returns:
        (...).
    """
    return _numerics.safe_sqrt(8 * (torch.sin(around / 2) ** 2).sum(-1))


def curvature(rotation: PairRotation, a: Tensor, corners: Tensor) -> Tensor:
    """:func:`curvature_proxy` of the triangles ``corners`` (3, T) of token features a (..., N, p): (..., T)."""
    i, j, k = (a[..., c, :] for c in corners)
    return curvature_proxy(rotation.angles(i, j) + rotation.angles(j, k) + rotation.angles(k, i))


def torsion(
    x: Tensor, g: TokenMetric, corners: Tensor, rotation: Rotation | None = None, a: Tensor | None = None
) -> Tensor:
    r"""The gap of Cartan's parallelogram on triangles i, j, k, relative to its sides.

    .. math::
        \tau_{ijk} = \frac{|(P_{j \leftarrow i} - I)(x_k - x_i) - (P_{k \leftarrow i} - I)(x_j - x_i)|_{G_i}}
        {|x_j - x_i|_{G_i} |x_k - x_i|_{G_i}}

    0 for one constant metric with R = I and for j = k; to leading order 0 for a transport without torsion and for
    G = (Hess psi)^2, whose root is a coordinate frame; in general not 0 for varying metrics.

    Args:
        x: positions (..., N, D).
        g: their metrics, (..., N).
        corners: (3, T), the triangles.
        rotation: R, with a (..., N, p), the features of the tokens; None: the identity.

    Returns:
        (..., T); 0 where two corners coincide.

    Raises ValueError for a rotation without features.
    """
    if rotation is not None and a is None:
        raise ValueError("a rotation needs the features a of the tokens")
    i, j, k = corners
    at_i, at_j, at_k = (g[..., c] for c in (i, j, k))
    to_j, to_k = x[..., j, :] - x[..., i, :], x[..., k, :] - x[..., i, :]
    theta_j = theta_k = None
    if rotation is not None and a is not None:
        theta_j, theta_k = (rotation.angles(a[..., c, :], a[..., i, :]) for c in (j, k))
    gap = (transport(at_j, at_i, to_k, rotation, theta_j) - to_k) - (
        transport(at_k, at_i, to_j, rotation, theta_k) - to_j
    )
    sides = at_i.inner(to_j) * at_i.inner(to_k)
    degenerate = sides == 0
    return torch.where(degenerate, 0.0, _numerics.safe_sqrt(at_i.inner(gap) / torch.where(degenerate, 1.0, sides)))

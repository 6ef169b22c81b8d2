"""The sphere of any radius, embedded in R^(n+1)."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._numerics import arc2, arc_factor, product_with_rest, safe_sqrt, sin_cos
from horosphere.manifolds._float64 import in_float64
from horosphere.manifolds.chord import Chord
from horosphere.manifolds.curvature import ConstantCurvature


class Sphere(ConstantCurvature):
    r"""The sphere of radius :math:`R = 1/\sqrt{\kappa}` in R^(n+1); a point is the *direction* of the stored vector.

    .. math:: d(x, y) = R \angle(x, y) = 2 R\,\mathrm{atan2}\big(\sqrt{|\delta|^2 - c}, \sqrt{|s|^2 - c}\big),\quad
        \delta = x - y,\; s = x + y,\; c = (|x| - |y|)^2

    which is exact for coincident, near and antipodal points alike (x is first brought to the norm of y). Points are
    stored with norm R (``projx``); the zero vector is projected to the origin, R e_1. Maps and distances are worked in
    float64.

    At exact antipodes ``logmap`` returns one of the shortest directions (the coordinate axis least aligned with x,
    made tangent), of norm pi R, and ``transp`` leaves the vector as it is.

    Source: Kahan's angle between vectors, "How futile are mindless assessments of roundoff" (2006), section 12.
    """

    _sign = 1
    model = "sphere"

    def __init__(self, kappa: float | Tensor = 1.0, learnable: bool = False, **other):
        super().__init__(kappa, learnable, **other)

    def ambient_dim(self, n: int) -> int:
        return n + 1

    def to_canonical(self, x: Tensor, sign: int) -> Tensor:
        return self.projx(x)

    def from_canonical(self, x: Tensor, kappa: float | Tensor, sign: int) -> Tensor:
        return x

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def picture(self) -> str:
        return "sphere"

    def lift(self, x: Tensor) -> Tensor:
        """The points themselves, with the norm that they mean."""
        return self.projx(x)

    def settle(self, mean: Tensor, *, convex: bool = False) -> Tensor:
        """The mean scaled back onto the sphere."""
        return self.projx(mean)

    def from_vectors(self, x: Tensor, max_radius: float | Tensor) -> Tensor:
        """The direction of x; 0 goes to the origin."""
        wide = x.to(_numerics.fast_dtype(x.dtype))
        norm = safe_sqrt((wide * wide).sum(-1, keepdim=True)).to(torch.float64)
        kappa = torch.as_tensor(self._kappa_at(x), dtype=torch.float64, device=x.device)
        flat = norm == 0
        origin = self.origin(*x.shape[:-2], 1, x.shape[-1], dtype=x.dtype, device=x.device)
        ratio = torch.where(flat, 0.0, kappa.rsqrt() / torch.where(flat, 1.0, norm))
        return torch.where(flat, origin, (wide * ratio.to(wide.dtype)).to(x.dtype))

    def to_polar(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A point is its direction; the radius says nothing and is 1."""
        return x, torch.ones_like(x[..., :1], dtype=torch.float64)

    def to_frame(self, point: Tensor, u: Tensor) -> Tensor:
        return u

    def from_frame(self, point: Tensor, e: Tensor) -> Tensor:
        return e

    def from_polar(self, direction: Tensor, radius: Tensor) -> Tensor:
        return self.projx(direction)

    def chord(self, x: Tensor) -> Chord:
        # a weight R/|x| in place of this scaling is right for equal norms only: it adds (|x| - |y|)^2 to the chord
        radius = _radius(self._kappa_at(x))
        if _numerics.narrow(x) and (not isinstance(radius, Tensor) or not radius.dim()):
            features = _Scaled.apply(x, torch.as_tensor(radius, dtype=torch.float64, device=x.device))
        else:
            wide = x.to(torch.float64)
            features = wide * (radius / torch.linalg.vector_norm(wide, dim=-1, keepdim=True))
        return Chord(features.to(_numerics.fast_dtype(x.dtype)), None, 0, self.kappa)

    def _half_angles(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """sin^2 and cos^2 of half the angle between x and y, (..., 1)."""
        nx = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        ny = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        # x is brought to the norm of y, without rounding: |delta|^2 - c cancels where the norms differ. The angle does
        # not depend on the factor, so neither does its gradient.
        factor = (ny / nx).detach()
        x, rest = product_with_rest(x, factor)
        nx = nx * factor
        delta, total = (x - y) + rest, (x + y) + rest
        c = ((delta * total).sum(-1, keepdim=True) / (nx + ny)) ** 2
        sine = ((delta * delta).sum(-1, keepdim=True) - c).clamp(min=0.0)
        cosine = ((total * total).sum(-1, keepdim=True) - c).clamp(min=0.0)
        return sine / (4 * nx * ny), cosine / (4 * nx * ny)

    def pair_dist2(self, x: Tensor, y: Tensor) -> Tensor:
        """Squared distance of broadcast pairs (..., D), in float64, without cancellation."""
        x, y = x.to(torch.float64), y.to(torch.float64)
        kappa = self._kappa_at(x if x.dim() >= y.dim() else y)
        sine, cosine = self._half_angles(x, y)
        return arc2(4 * sine / kappa, kappa, cosine, sign=1).squeeze(-1)

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """``<u, v>`` (v = u where it is left out)."""
        out = (u * (u if v is None else v)).sum(-1, keepdim=True)
        out = out.expand(torch.broadcast_shapes((*x.shape[:-1], 1), out.shape))
        return out if keepdim else out.squeeze(-1)

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """``|u|``; its gradient at u = 0 is 0."""
        return safe_sqrt(self.inner(x, u, keepdim=keepdim))

    @in_float64
    def projx(self, x: Tensor) -> Tensor:
        """``R x / |x|``; the zero vector goes to the origin R e_1 (with zero gradient)."""
        norm = safe_sqrt((x * x).sum(-1, keepdim=True))
        zero = norm == 0
        axis = torch.zeros_like(x)
        axis[..., 0] = 1.0
        return _radius(self._kappa_at(x)) * torch.where(zero, axis, x / torch.where(zero, 1.0, norm))

    @in_float64
    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """u less its part along x."""
        return u - x * ((x * u).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True))

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Riemannian gradient: the tangent part."""
        return self.proju(x, u)

    def row_maps(self) -> tuple[str, float] | None:
        kappa = self._one_kappa()
        return None if kappa is None else ("sphere", kappa)

    @in_float64
    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """``cos(|u|/R) x + R sin(|u|/R) u/|u|``, put back on the sphere; smooth at u = 0."""
        kappa = self._kappa_at(x if x.dim() >= u.dim() else u)
        sine, cosine = sin_cos(kappa * (u * u).sum(-1, keepdim=True), 1)
        return self.projx(cosine * x + sine * u)

    @in_float64
    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """The tangent vector at x that leads to y, of norm d(x, y); at antipodes one of the shortest, of norm pi R."""
        kappa = self._kappa_at(x if x.dim() >= y.dim() else y)
        sine, cosine = self._half_angles(x, y)
        antipodal = cosine <= _numerics.antipode_floor(torch.float64)
        safe = torch.where(antipodal, 1.0, cosine)
        d2 = arc2(4 * sine / kappa, kappa, cosine, sign=1)
        # y is a direction: brought to the norm of x by a difference, which keeps the digits of y - x, then to R
        nx = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        ny = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        tangent = self.proju(x, (y - x) + y * ((nx - ny) / ny)) * (_radius(kappa) / nx)
        # |tangent| = sqrt(u cos^2): near x the ratio d^2/u is the analytic factor, elsewhere the quotient itself
        near = sine < 0.25
        ratio = torch.where(
            near,
            arc_factor(torch.where(near, 4 * sine, 0.0)),
            d2 * kappa / torch.where(near, 1.0, 4 * sine),
        )
        log = tangent * torch.sqrt(ratio / safe)
        axis = torch.nn.functional.one_hot(x.detach().abs().argmin(-1), x.shape[-1]).to(x.dtype)
        away = self.proju(x, axis)
        away = away / torch.linalg.vector_norm(away, dim=-1, keepdim=True)
        return torch.where(antipodal, (away * safe_sqrt(d2)).detach(), log)

    @in_float64
    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Parallel transport of v along the great circle from x to y: ``v - <y, v> (x + y) / (R^2 + <x, y>)``."""
        longest = max((x, y, v), key=lambda t: t.dim())
        kappa = self._kappa_at(longest)
        _, cosine = self._half_angles(x, y)
        antipodal = cosine <= _numerics.antipode_floor(torch.float64)
        along = kappa * ((y - x) * v).sum(-1, keepdim=True) / (2 * torch.where(antipodal, 1.0, cosine))
        return torch.where(antipodal, v, v - along * (x + y))

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """First-order retraction ``x + u``, projected."""
        return self.projx(x + u)

    @torch.no_grad()
    def random(self, *size, std: float | None = None, dtype=None, device=None) -> Tensor:
        """Uniform on the sphere; with ``std`` the exp at the origin of normal tangent vectors with that standard
        deviation a coordinate; shape ``size``, whose last number is n + 1."""
        drawn = torch.randn(*size, dtype=dtype, device=device)
        if std is None:
            return self.projx(drawn)
        return self.expmap0(torch.cat((torch.zeros_like(drawn[..., :1]), std * drawn[..., 1:]), -1))

    def origin(self, *size, dtype=None, device=None, seed=None) -> Tensor:
        """R e_1."""
        return self.projx(torch.zeros(*size, dtype=dtype, device=device))

    def _check_shape(self, shape, name):
        ok, reason = super()._check_shape(shape, name)
        if ok and shape[-1] < 2:
            return False, f"'{name}' on the {self} needs at least 2 coordinates, got shape {tuple(shape)}"
        return ok, reason

    @torch.no_grad()
    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5):
        norm = torch.linalg.vector_norm(x.to(torch.float64), dim=-1, keepdim=True)
        ratio = norm / _radius(self._kappa_at(x))
        if bool(((ratio - 1).abs() <= max(atol + rtol, 4 * torch.finfo(x.dtype).eps)).all()):
            return True, None
        return (
            False,
            f"a point has {float(ratio.min()):.6g} to {float(ratio.max()):.6g} times the sphere's radius; see projx",
        )

    @torch.no_grad()
    def _check_vector_on_tangent(self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5):
        inner = (x * u).sum(-1)
        scale = torch.linalg.vector_norm(x, dim=-1) * torch.linalg.vector_norm(u, dim=-1)
        if bool((inner.abs() <= atol + rtol * scale).all()):
            return True, None
        return False, f"<x, u> is {float(inner.abs().max()):.3g}, not 0; see proju"


def _radius(kappa: float | Tensor) -> float | Tensor:
    return kappa.rsqrt() if isinstance(kappa, Tensor) else kappa**-0.5


class _Scaled(torch.autograd.Function):
    """radius x / |x| worked in float64, of points in a narrower type that are never held in float64 all at once."""

    @staticmethod
    def forward(ctx, x: Tensor, radius: Tensor) -> Tensor:
        out = x.new_empty(x.shape, dtype=_numerics.fast_dtype(x.dtype))
        into = out.view(-1, x.shape[-1])
        for some, wide in _numerics.wide_rows(x.reshape(-1, x.shape[-1])):
            into[some] = wide.mul_(radius / torch.linalg.vector_norm(wide, dim=-1, keepdim=True))
        ctx.save_for_backward(x, radius, out)
        return out

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor | None]:
        x, radius, out = ctx.saved_tensors
        along = (g.unsqueeze(-2) @ out.unsqueeze(-1)).squeeze(-1)
        scale = radius / torch.linalg.vector_norm(x.to(out.dtype), dim=-1, keepdim=True)
        across = torch.addcmul(g, out, along / (radius * radius).to(out.dtype), value=-1)
        across = across * scale.to(out.dtype) if torch.is_grad_enabled() else across.mul_(scale.to(out.dtype))
        dradius = along.sum(dtype=torch.float64) / radius if ctx.needs_input_grad[1] else None
        return across.to(x.dtype), dradius

"""The hyperboloid (Lorentz) model of hyperbolic space."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._numerics import arc2, arc_factor, safe_sqrt, sin_cos
from horosphere._points import as_points
from horosphere.manifolds._float64 import in_float64
from horosphere.manifolds.chord import Chord
from horosphere.manifolds.curvature import ConstantCurvature


class Lorentz(ConstantCurvature):
    r"""Hyperbolic space of curvature kappa < 0 as the upper sheet :math:`\langle x, x\rangle_J = 1/\kappa` in R^(n+1),
    :math:`\langle x, y\rangle_J = -x_0 y_0 + \sum x_i y_i`.

    .. math:: d(x, y)^2 = \mathrm{arc2}(u, \kappa),\quad u = \langle x - y, x - y\rangle_J

    A point *is its spatial part* x_1..x_n; the time coordinate x_0 is stored with it but always recomputed as
    :math:`\sqrt{1/|\kappa| + |x_s|^2}`. A tangent vector is its spatial part likewise: its time part is
    :math:`\langle x_s, v_s\rangle / x_0`. (The Minkowski-orthogonal projection amplifies a rounding of the time part by
    x_0^2, which destroys a float32 vector at radius 9.) u is never a difference of times, see :meth:`pair_chord2`.
    Points are kept within the radius of :func:`horosphere._numerics.hyperboloid_max_radius` (42.4 in float32, 88 in
    float64, in units of :math:`1/\sqrt{|\kappa|}`). Maps and distances are worked in float64.

    Sources: Nickel and Kiela (2018), Learning continuous hierarchies in the Lorentz model; Ratcliffe, Foundations of
    hyperbolic manifolds, chapter 3.
    """

    _sign = -1
    model = "hyperboloid"

    def __init__(self, kappa: float | Tensor = -1.0, learnable: bool = False, **other):
        super().__init__(kappa, learnable, **other)

    @property
    def k(self) -> float | Tensor:
        """The number that geoopt calls k in this model: ``<x, x>_J = -k``, so ``k = -1/kappa``."""
        return -1 / self.kappa

    def ambient_dim(self, n: int) -> int:
        return n + 1

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, float | Tensor]:
        """Time (recomputed), spatial part and squared radius 1/|kappa| of points."""
        space = x[..., 1:]
        r2 = -1 / self._kappa_at(x)
        return torch.sqrt(r2 + (space * space).sum(-1, keepdim=True)), space, r2

    def _lift(self, x_time: Tensor, x_space: Tensor, v_space: Tensor) -> Tensor:
        """The tangent vector with the given spatial part."""
        time = (x_space * v_space).sum(-1, keepdim=True) / x_time
        return torch.cat((time, v_space.expand(time.shape[:-1] + v_space.shape[-1:])), -1)

    def to_canonical(self, x: Tensor, sign: int) -> Tensor:
        return x

    def from_canonical(self, x: Tensor, kappa: float | Tensor, sign: int) -> Tensor:
        return x

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._capped(x[..., 1:], dtype)

    def picture(self) -> str:
        return "hyperboloid"

    def lift(self, x: Tensor) -> Tensor:
        """The points themselves, with the time that they mean."""
        return self.projx(x)

    def settle(self, mean: Tensor, *, convex: bool = False) -> Tensor:
        """The mean scaled back onto the hyperboloid; of a ``convex`` one, below which only rounding can lead."""
        wide = mean.to(_numerics.compute_dtype(mean.dtype))
        height2 = -self._kappa_at(wide) * (wide[..., :1] ** 2 - (wide[..., 1:] ** 2).sum(-1, keepdim=True))
        height2 = height2.clamp(min=1.0) if convex else torch.where(height2 > 0, height2, 1.0)
        return self.projx((wide / height2.sqrt()).to(mean.dtype))

    def size_from_vectors(self, n: int) -> int:
        return n + 1

    def from_vectors(self, x: Tensor, max_radius: float | Tensor) -> Tensor:
        """exp at the origin of the direction of x, of length ``R tanh(|x| / (R sqrt(n)))``.

        R = max_radius / sqrt|kappa|.
        """
        wide, norm, length = self._bounded_length(x, max_radius)
        flat = norm == 0
        reached = self.expmap0(torch.nn.functional.pad(length, (1, 0)).to(x.dtype))
        scale = x.shape[-1] ** -0.5
        ratio = torch.where(flat, scale, reached[..., 1:].to(torch.float64) / torch.where(flat, 1.0, norm))
        return torch.cat((reached[..., :1], (wide * ratio.to(wide.dtype)).to(x.dtype)), -1)

    def direction_dim(self, stored: int) -> int:
        return stored - 1

    def to_polar(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r"""The spatial part and :math:`R\,\mathrm{arsinh}(|x_s|/R)`."""
        norm = torch.linalg.vector_norm(x[..., 1:], dim=-1, keepdim=True, dtype=torch.float64)
        root = self._root_of_curvature(x)
        return x[..., 1:], torch.asinh(root * norm) / root

    def from_polar(self, direction: Tensor, radius: Tensor) -> Tensor:
        root = self._root_of_curvature(direction)
        spatial = direction * (torch.sinh(root * radius) / root).to(direction.dtype)
        return self.projx(torch.cat((torch.zeros_like(spatial[..., :1]), spatial), -1))

    def to_frame(self, point: Tensor, u: Tensor) -> Tensor:
        return self._stretched(point, u[..., 1:], -1)

    def from_frame(self, point: Tensor, e: Tensor) -> Tensor:
        space = self._stretched(point, e, 1)
        return self.proju(point, torch.cat((torch.zeros_like(space[..., :1]), space), -1))

    def _stretched(self, point: Tensor, u: Tensor, power: int) -> Tensor:
        """Spatial vectors u with their part along the point, whose length is R/t of it, times ``(t / R) ** power``."""
        space = point[..., 1:]
        length2 = (space * space).sum(-1, keepdim=True)
        along = space * ((space * u).sum(-1, keepdim=True) / torch.where(length2 > 0, length2, 1.0))
        stretch = torch.sqrt(1 - self._kappa_at(point) * length2)
        return u - along + along * stretch**power

    def chord(self, x: Tensor) -> Chord:
        time, space, _ = self._split(x.to(torch.float64))
        dtype = _numerics.fast_dtype(x.dtype)
        return Chord(torch.cat((time.to(dtype), space.to(dtype)), -1), None, 1, self.kappa)

    def pair_chord2(self, x: Tensor, y: Tensor) -> Tensor:
        r"""u of broadcast pairs (..., D), kept (..., 1), without the cancellation of ``2 t_x t_y - 2 c - 2 R^2``.

        With c = <x_s, y_s>, delta = y_s - x_s and s = x_s + y_s: for c >= 0 the numerator of the rationalised
        difference is :math:`4 R^2 |\delta|^2 + |s|^2 |\delta_\perp|^2`, delta's part across s; else nothing cancels.
        """
        (tx, xs, r2), (ty, ys, _) = self._split(x), self._split(y)
        delta, total = ys - xs, xs + ys
        c = (xs * ys).sum(-1, keepdim=True)
        x2, y2 = (xs * xs).sum(-1, keepdim=True), (ys * ys).sum(-1, keepdim=True)
        total2 = (total * total).sum(-1, keepdim=True)
        safe = torch.where(total2 > 0, total2, 1.0)
        across = delta
        for _ in range(2):  # projected twice: the first leaves a rounding of delta along s, which |s|^2 would amplify
            across = across - total * ((across * total).sum(-1, keepdim=True) / safe)
        delta2, across2 = (delta * delta).sum(-1, keepdim=True), (across * across).sum(-1, keepdim=True)
        same_side = (4 * r2 * delta2 + total2 * across2) / (2 * (r2 + tx * ty + c).clamp(min=torch.finfo(c.dtype).tiny))
        other_side = 2 * ((r2 * (x2 + y2) + x2 * y2) / (tx * ty + r2) - c)
        return torch.where(c >= 0, same_side, other_side)

    def pair_dist2(self, x: Tensor, y: Tensor) -> Tensor:
        """Squared distance of broadcast pairs (..., D), in float64, without cancellation."""
        x, y = x.to(torch.float64), y.to(torch.float64)
        kappa = self._kappa_at(x if x.dim() >= y.dim() else y)
        return arc2(self.pair_chord2(x, y), kappa, sign=-1).squeeze(-1)

    @in_float64
    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """``<u, v>_J`` of tangent vectors at x: parts across x_s as they are, along x_s times ``1/(|kappa| x_0^2)``."""
        time, space, r2 = self._split(x)
        us = u[..., 1:]
        vs = us if v is None else v[..., 1:]
        length2 = (space * space).sum(-1, keepdim=True)
        safe = torch.where(length2 > 0, length2, 1.0)
        u_along, v_along = (us * space).sum(-1, keepdim=True), (vs * space).sum(-1, keepdim=True)
        across = ((us - space * (u_along / safe)) * (vs - space * (v_along / safe))).sum(-1, keepdim=True)
        out = across + u_along * v_along * (r2 / (safe * time * time))
        return out if keepdim else out.squeeze(-1)

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Length of a tangent vector; its gradient at u = 0 is 0."""
        return safe_sqrt(self.inner(x, u, keepdim=keepdim))

    def _capped(self, space: Tensor, dtype: torch.dtype) -> Tensor:
        """The point with a float64 spatial part, within the largest radius that ``dtype`` can hold, rounded to it."""
        r2 = -1 / self._kappa_at(space)
        limit = math.sinh(_numerics.hyperboloid_max_radius(dtype)) * r2**0.5
        norm = safe_sqrt((space * space).sum(-1, keepdim=True))
        beyond = norm > limit
        space = torch.where(beyond, space * (limit / torch.where(beyond, norm, 1.0)), space)
        time = torch.sqrt(r2 + (space * space).sum(-1, keepdim=True))
        return torch.cat((time, space), -1).to(dtype)

    def projx(self, x: Tensor) -> Tensor:
        """The point with the spatial part of x: time recomputed, radius capped."""
        x = as_points(x, "x")
        return self._capped(x[..., 1:].to(torch.float64), x.dtype)

    @in_float64
    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """The tangent vector with the spatial part of u."""
        time, space, _ = self._split(x)
        return self._lift(time, space, u[..., 1:])

    @in_float64
    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Riemannian gradient ``J u + |kappa| <x, J u>_J x`` of an ambient gradient u."""
        time, space, r2 = self._split(x)
        us = u[..., 1:]
        along = (time * u[..., :1] + (space * us).sum(-1, keepdim=True)) / r2
        return self._lift(time, space, us + along * space)

    def row_maps(self) -> tuple[str, float] | None:
        kappa = self._one_kappa()
        return None if kappa is None else ("hyperboloid", kappa)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """``cosh(|u|/R) x + R sinh(|u|/R) u/|u|`` on the spatial parts, radius capped; smooth at u = 0."""
        x, u = as_points(x, "x"), as_points(u, "u")
        dtype = torch.promote_types(x.dtype, u.dtype)
        x, u = x.to(torch.float64), u.to(torch.float64)
        time, space, r2 = self._split(x)
        # a step longer than the cap and back ends beyond the cap in any direction: shortened, it does not overflow
        radius = torch.asinh(torch.sqrt((time * time / r2 - 1).clamp(min=0.0)))
        reach = (_numerics.hyperboloid_max_radius(torch.float64) + radius).detach()
        step2 = self.inner(x, u, keepdim=True) / r2
        shrink = torch.where(step2 > reach * reach, reach / torch.where(step2 > 0, step2, 1.0).sqrt(), 1.0).detach()
        sine, cosine = sin_cos(-step2 * shrink * shrink, -1)
        return self._capped(cosine * space + sine * shrink * u[..., 1:], dtype)

    @in_float64
    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """The tangent vector at x that leads to y, of norm d(x, y)."""
        kappa = self._kappa_at(x if x.dim() >= y.dim() else y)
        time, space, _ = self._split(x)
        u = self.pair_chord2(x, y)
        tangent = y[..., 1:] - space + (kappa * u / 2) * space
        return self._lift(time, space, tangent * torch.sqrt(arc_factor(kappa * u) / (1 - kappa * u / 4)))

    @in_float64
    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Parallel transport along the geodesic from x to y: the boost at x undone, the gyration, the boost at y.

        ``v - kappa <y, v>_J (x + y) / (1 + kappa <x, y>_J)`` is the same but loses e^(2 radius) of the digits; this
        form, all from y_s - x_s, loses e^radius.
        """
        (tx, xs, r2), (ty, ys, _) = self._split(x), self._split(y)
        r = r2**0.5
        vs = v[..., 1:]
        nx, ny = safe_sqrt(_dot(xs, xs)), safe_sqrt(_dot(ys, ys))
        ex, ey = xs / torch.where(nx > 0, nx, 1.0), ys / torch.where(ny > 0, ny, 1.0)
        frame = vs + ex * (_dot(ex, vs) * (r / tx - 1))
        # b = x_s / (R + t) in the ball, b_y - b_x = along * ex + across; a t_x - |x_s| t_y formed without cancellation
        delta = ys - xs
        step = _dot(ex, delta)
        across = delta - ex * step
        across = across - ex * _dot(ex, across)
        a = nx + step
        forward = (a > 0) & (nx > 0)
        below = torch.where(forward, a * tx + nx * ty, 1.0)
        cross = torch.where(forward, (r2 * step * (a + nx) - nx * nx * _dot(across, across)) / below, a * tx - nx * ty)
        along = (r * step + cross) / ((r + tx) * (r + ty))
        across = across / (r + ty)
        beta = nx / (r + tx)
        gap = 4 * r2 / ((r + tx) * (r + ty)) + along * along + _dot(across, across)

        def turn(u):
            return beta * (across * _dot(ex, u) - ex * _dot(across, u))

        once = turn(frame)
        frame = frame - (2 / gap) * ((2 * r / (r + tx) - along * beta) * once - turn(once))
        return self._lift(ty, ys, frame + ey * (_dot(ey, frame) * (ty / r - 1)))

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """First-order retraction: ``x + u`` on the spatial parts, time recomputed."""
        return self.projx(x + u)

    @in_float64
    def mobius_add(self, x: Tensor, y: Tensor) -> Tensor:
        """Gyrovector sum: the boost that takes the origin to x, applied to y (the ball's Mobius sum, converted)."""
        (tx, xs, r2), (ty, ys, _) = self._split(x), self._split(y)
        r = r2**0.5
        space = ys + xs * (ty / r + (xs * ys).sum(-1, keepdim=True) / (r2 + r * tx))
        return torch.cat((torch.sqrt(r2 + (space * space).sum(-1, keepdim=True)), space), -1)

    def mobius_scalar_mul(self, r: float | Tensor, x: Tensor) -> Tensor:
        """The point at r times the distance of x from the origin: ``exp0(r log0(x))``."""
        return self.expmap0(r * self.logmap0(x))

    def mobius_matvec(self, m: Tensor, x: Tensor) -> Tensor:
        """``exp0(m log0(x))`` on spatial parts; m (..., E, n), x (..., n+1)."""
        moved = (m * self.logmap0(x)[..., 1:].unsqueeze(-2)).sum(-1)
        return self.expmap0(torch.cat((torch.zeros_like(moved[..., :1]), moved), -1))

    @torch.no_grad()
    def random(self, *size, std: float = 1.0, dtype=None, device=None) -> Tensor:
        """exp at the origin of normal tangent vectors with standard deviation ``std`` a coordinate; shape ``size``."""
        return self.expmap0(torch.randn(*size, dtype=dtype, device=device) * std)

    def origin(self, *size, dtype=None, device=None, seed=None) -> Tensor:
        """(R, 0, ..., 0)."""
        return self.projx(torch.zeros(*size, dtype=dtype, device=device))

    def _check_shape(self, shape, name):
        ok, reason = super()._check_shape(shape, name)
        if ok and shape[-1] < 2:
            return False, f"'{name}' on the {self} needs a time and a spatial coordinate, got shape {tuple(shape)}"
        return ok, reason

    @torch.no_grad()
    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5):
        wide = x.to(torch.float64)
        if not bool(wide.isfinite().all()):
            return False, "a coordinate is not finite"
        time, _, _ = self._split(wide)
        error = ((wide[..., :1] - time) / time).abs()
        if bool((error <= max(atol + rtol, 4 * torch.finfo(x.dtype).eps)).all()):
            return True, None
        return (
            False,
            f"a time coordinate is off sqrt(1/|kappa| + |x_s|^2) by {float(error.max()):.3g} of itself; see projx",
        )

    @torch.no_grad()
    def _check_vector_on_tangent(self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5):
        time, space, _ = self._split(x.to(torch.float64))
        wide = u.to(torch.float64)
        error = (wide[..., :1] - (space * wide[..., 1:]).sum(-1, keepdim=True) / time).abs()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        if bool((error <= atol + rtol * scale).all()):
            return True, None
        return False, f"the time part of a vector is off <x_s, u_s>/x_0 by {float(error.max()):.3g}; see proju"


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)

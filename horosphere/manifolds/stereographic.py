"""The stereographic model: Poincare ball, flat space and projected sphere in one family, smooth through kappa = 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._numerics import arc2, arc_factor, one_plus_kappa_norm2, safe_sqrt, sin_cos, tanh_ratio
from horosphere._points import as_points
from horosphere.manifolds._float64 import in_float64
from horosphere.manifolds.chord import Chord
from horosphere.manifolds.curvature import ConstantCurvature


class Stereographic(ConstantCurvature):
    r"""R^n (for kappa < 0 the open ball of radius :math:`1/\sqrt{|\kappa|}`) with the conformal metric
    :math:`g_x = \lambda_x^2 I`, :math:`\lambda_x = 2 / (1 + \kappa |x|^2)`.

    .. math:: d(x, y)^2 = \mathrm{arc2}(\lambda_x \lambda_y |x - y|^2, \kappa)

    At kappa = 0 the metric is 4 dx^2, so d = 2 |x - y|, as in geoopt. A learnable kappa may cross 0 in this model only.
    All maps are worked in float64. Points of a ball are kept at :math:`\sqrt{|\kappa|}\,|x| \le 1 - 4\,\mathrm{eps}`
    (distance to the origin at most 15.2 in float32 and 35.4 in float64 for kappa = -1); a point outside the ball has
    distance NaN, a point on its boundary infinity: ``assert_check_point_on_manifold`` tells.

    Sources: Bachmann, Becigneul and Ganea (2020), Constant curvature graph convolutional networks; Ungar (2008).
    """

    model = "stereographic"

    def __init__(self, kappa: float | Tensor = 0.0, learnable: bool = False, **other):
        super().__init__(kappa, learnable, **other)

    def _gap(self, x: Tensor, kappa) -> Tensor:
        """``1 + kappa |x|^2``, (..., 1)."""
        return one_plus_kappa_norm2(x, kappa, self._known_sign())

    def _rough_gap(self, x: Tensor, kappa) -> Tensor:
        """The same by the plain formula, kept positive in a ball: for optimizer steps, which round anyway."""
        gap = 1 + kappa * (x * x).sum(-1, keepdim=True)
        return gap if self._known_sign() in (0, 1) else gap.clamp(min=_numerics.ball_margin(torch.float64))

    def _known_sign(self) -> int | None:
        return self._sign if self._sign is not None else _numerics.sign_of(self.kappa)

    def to_canonical(self, x: Tensor, sign: int) -> Tensor:
        """``(R (lambda - 1), lambda x)``, on hyperboloid or sphere (2 x for kappa = 0); NaN outside of a ball."""
        if sign == 0:
            return 2 * x
        kappa = self._kappa_at(x)
        gap = self._gap(x, kappa)
        root = kappa.abs().sqrt() if isinstance(kappa, Tensor) else abs(kappa) ** 0.5
        out = torch.cat(((1 - kappa * (x * x).sum(-1, keepdim=True)) / root, 2 * x), -1) / gap
        return torch.where(gap < 0, math.nan, out)

    def from_canonical(self, x: Tensor, kappa: float | Tensor, sign: int) -> Tensor:
        """``R s / (R + t)`` of the point (t, s); for t < 0 (sphere) ``R s (R - t) / |s|^2``, which does not cancel."""
        if sign == 0:
            return x / 2
        space = x[..., 1:]
        s2 = (space * space).sum(-1, keepdim=True)
        if sign == -1:  # the time is what the spatial part says
            r2 = -1 / kappa
            return space / (1 + torch.sqrt(r2 + s2) / r2**0.5)
        height = x[..., :1] * kappa**0.5
        front = height >= 0
        return space * torch.where(
            front, 1 / (1 + torch.where(front, height, 0.0)), (1 - height) / torch.where(front, 1.0, kappa * s2)
        )

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.projx(x.to(dtype))

    def picture(self) -> str:
        kappa = self.kappa.detach().max().item() if isinstance(self.kappa, Tensor) else self.kappa
        return "ball" if kappa < 0 else "none"

    def lift(self, x: Tensor) -> Tensor:
        """``(lambda x, lambda - 1)``: a point of the sphere or hyperboloid of this space, its origin last."""
        scale = self.lambda_x(x, keepdim=True)
        return torch.cat((scale * x, scale - 1), -1)

    def settle(self, mean: Tensor, *, convex: bool = False) -> Tensor:
        """The gyro-midpoint; of a ``convex`` mean on kappa < 0, below whose height only rounding can lead."""
        wide = mean.to(_numerics.compute_dtype(mean.dtype))
        kappa = self._kappa_at(wide)
        total, height = wide[..., :-1], wide[..., -1:]
        norm2 = height**2 + kappa * (total**2).sum(-1, keepdim=True)
        least = torch.where(torch.as_tensor(kappa, device=wide.device) < 0, 1.0, 0.0) if convex else 0.0
        below = safe_sqrt(torch.maximum(norm2, torch.as_tensor(least, dtype=norm2.dtype, device=norm2.device))) + height
        return self.projx((total / torch.where(below == 0, 1.0, below)).to(mean.dtype))

    def lifted_size(self, stored: int) -> int:
        return stored + 1

    def from_vectors(self, x: Tensor, max_radius: float | Tensor) -> Tensor:
        """exp at the origin of the direction of x, of length ``R tanh(|x| / (R sqrt(n)))``.

        R = max_radius / sqrt|kappa|; for kappa > 0 the length is ``|x| / sqrt(n)``.
        """
        wide, norm, length = self._bounded_length(x, max_radius)
        flat = norm == 0
        reached = self.expmap0(length / 2).to(x.dtype)  # the metric at the origin is 4 I
        reached = self.projx(reached).to(torch.float64)
        ratio = torch.where(flat, x.shape[-1] ** -0.5 / 2, reached / torch.where(flat, 1.0, norm))
        return (wide * ratio.to(wide.dtype)).to(x.dtype)

    def to_polar(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r"""x and, in a ball, :math:`2 R\,\mathrm{artanh}(|x|/R)`."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
        if self._known_sign() != -1:
            return x, self.dist0(x.to(torch.float64), keepdim=True)
        root = self._root_of_curvature(x)
        return x, 2 * torch.atanh((root * norm).clamp(max=1 - _numerics.ball_margin(torch.float64))) / root

    def from_polar(self, direction: Tensor, radius: Tensor) -> Tensor:
        if self._known_sign() != -1:
            return self.expmap0(direction.to(torch.float64) * (radius / 2)).to(direction.dtype)
        root = self._root_of_curvature(direction)
        return self.projx(direction * (torch.tanh(root * radius / 2) / root).to(direction.dtype))

    def to_frame(self, point: Tensor, u: Tensor) -> Tensor:
        return self.lambda_x(point, keepdim=True) * u

    def from_frame(self, point: Tensor, e: Tensor) -> Tensor:
        return e / self.lambda_x(point, keepdim=True)

    def as_stored(self, x: Tensor) -> Tensor:
        return x

    def chord(self, x: Tensor) -> Chord:
        kappa = self._kappa_at(x)
        # to the last bit for every float64 point: the stated error of the product form has no room for more
        below = 1.0 if x.dtype == torch.float64 else _numerics.RIM_GAP
        gap = one_plus_kappa_norm2(x, kappa, self._known_sign(), below)
        # gap < 0 is outside of the ball, where there is no distance: a negative weight would be clamped to distance 0
        weight = 2 / torch.where(gap < 0, math.nan, gap)
        return Chord(x, weight.squeeze(-1).to(_numerics.fast_dtype(x.dtype)), 0, self.kappa)

    def pair_dist2(self, x: Tensor, y: Tensor) -> Tensor:
        """Squared distance of broadcast pairs (..., D), in float64, without cancellation."""
        x, y = x.to(torch.float64), y.to(torch.float64)
        kappa = self._kappa_at(x if x.dim() >= y.dim() else y)
        delta2 = ((x - y) ** 2).sum(-1, keepdim=True)
        gx, gy = self._gap(x, kappa), self._gap(y, kappa)
        u = 4 * delta2 / (gx * gy)
        sign = self._known_sign()
        quarter = None
        if sign in (None, 1):
            quarter = _antipodal_gap(x, y, kappa) / (gx * gy)
        out = arc2(u, kappa, quarter, sign)
        if sign in (None, -1):  # outside of the ball there is no distance
            out = torch.where((gx < 0) | (gy < 0), math.nan, out)
        return out.squeeze(-1)

    @in_float64
    def lambda_x(self, x: Tensor, *, keepdim: bool = False) -> Tensor:
        """Conformal factor ``2 / (1 + kappa |x|^2)``."""
        out = 2 / self._gap(x, self._kappa_at(x))
        return out if keepdim else out.squeeze(-1)

    @in_float64
    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """``lambda_x^2 <u, v>`` (v = u where it is left out)."""
        scale = (2 / self._gap(x, self._kappa_at(x))) ** 2
        out = scale * (u * (u if v is None else v)).sum(-1, keepdim=True)
        return out if keepdim else out.squeeze(-1)

    @in_float64
    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """``lambda_x |u|``; its gradient at u = 0 is 0."""
        out = 2 / self._gap(x, self._kappa_at(x)) * safe_sqrt((u * u).sum(-1, keepdim=True))
        return out if keepdim else out.squeeze(-1)

    def projx(self, x: Tensor) -> Tensor:
        """x, moved along its ray to the cap where it lies outside the ball or beyond the cap."""
        x = as_points(x, "x")
        if self._known_sign() in (0, 1):
            return x
        wide = x.to(torch.float64)
        kappa = self._kappa_at(x)
        kappa = kappa if isinstance(kappa, Tensor) else torch.as_tensor(kappa, dtype=torch.float64, device=x.device)
        limit = (1 - _numerics.ball_margin(x.dtype)) / torch.where(kappa < 0, -kappa, 1.0).sqrt()
        norm = safe_sqrt((wide * wide).sum(-1, keepdim=True))
        beyond = (kappa < 0) & (norm > limit)
        moved = (wide * (limit / torch.where(beyond, norm, 1.0))).to(x.dtype)
        return torch.where(beyond, moved, x)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Every vector is tangent: u, broadcast against x."""
        return u.expand(torch.broadcast_shapes(x.shape, u.shape))

    @in_float64
    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Riemannian gradient ``u / lambda_x^2``."""
        return u * (self._rough_gap(x, self._kappa_at(x)) / 2) ** 2

    def row_maps(self) -> tuple[str, float] | None:
        kappa = self._one_kappa()
        return None if kappa is None or not kappa < 0 else ("ball", kappa)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """The point reached from x along u after time 1, kept inside the cap."""
        return self.projx(self._expmap(x, u))

    @in_float64
    def _expmap(self, x: Tensor, u: Tensor) -> Tensor:
        kappa = self._kappa_at(x if x.dim() >= u.dim() else u)
        gx = self._rough_gap(x, kappa)
        v = u / gx
        v2 = (v * v).sum(-1, keepdim=True)
        s = kappa * v2
        sign = self._known_sign()
        # x (+) tan_k(|v|) v/|v| with tan = sine/cosine; for kappa <= 0 tanh itself, which does not overflow
        if sign == -1:
            sine, cosine = tanh_ratio(s), torch.ones_like(s)
        elif sign == 0:
            return x + v
        elif sign == 1:
            sine, cosine = sin_cos(s, 1)
        else:
            up_sine, up_cosine = sin_cos(s.clamp(min=0.0) + (s - s.clamp(min=0.0)).clamp(min=-1.0))
            inside = s >= -1  # between -1 and 0 both forms hold: the one that is smooth through 0 is taken
            sine = torch.where(inside, up_sine, tanh_ratio(torch.where(inside, -1.0, s)))
            cosine = torch.where(inside, up_cosine, 1.0)
        xv = (x * v).sum(-1, keepdim=True)
        x2 = (x * x).sum(-1, keepdim=True)
        along = cosine * cosine - 2 * kappa * cosine * sine * xv - kappa * sine * sine * v2
        below = cosine * cosine - 2 * kappa * cosine * sine * xv + kappa * kappa * x2 * sine * sine * v2
        return (along * x + gx * cosine * sine * v) / below

    def expmap0(self, u: Tensor) -> Tensor:
        """Exponential map at the origin, whose metric is 4 I: ``d(0, expmap0(u)) = 2 |u|``."""
        return self.expmap(torch.zeros_like(as_points(u, "u")), u)

    @in_float64
    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """The tangent vector at x that leads to y: ``|log_x(y)|_x = d(x, y)``.

        At exact antipodes (kappa > 0) every direction leads to y: the first coordinate axis is taken.
        """
        kappa = self._kappa_at(x if x.dim() >= y.dim() else y)
        delta = y - x
        delta2 = (delta * delta).sum(-1, keepdim=True)
        gx, gy = self._gap(x, kappa), self._gap(y, kappa)
        product = gx * gy
        sign = self._known_sign()
        # (-x) (+) y = (gx delta + kappa |delta|^2 x) / gap, all from the difference: nothing cancels when y is near x
        direction = gx * delta + kappa * delta2 * x
        if sign in (-1, 0):
            gap = product - kappa * delta2
            return direction * torch.sqrt(arc_factor(4 * kappa * delta2 / product) * gx / (gy * gap))
        gap = _antipodal_gap(x, y, kappa)
        positive = gap > _numerics.antipode_floor(torch.float64) * product
        d2 = arc2(4 * delta2 / product, kappa, gap / product, sign)
        near = torch.where(positive, delta2, 1.0) == 0
        ratio = torch.where(near, 4.0 / product, d2 / torch.where(near, 1.0, delta2))
        # |direction|^2 = |delta|^2 gap, and the length wanted is d / lambda_x
        log = direction * (gx / 2) * torch.sqrt(ratio / torch.where(positive, gap, 1.0))
        axis = torch.zeros_like(delta)
        axis[..., 0] = 1.0
        return torch.where(positive, log, axis * (safe_sqrt(d2) * gx / 2).detach())

    def logmap0(self, y: Tensor) -> Tensor:
        """Logarithm at the origin, the inverse of :meth:`expmap0`."""
        return self.logmap(torch.zeros_like(as_points(y, "y")), y)

    @in_float64
    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Parallel transport of v along the geodesic from x to y: ``(lambda_x / lambda_y) gyr[y, -x] v``.

        The gyration is the rotation by ``2 arg(gx + kappa <delta, x> + i kappa |delta ^ x|)`` in the plane of x and
        ``delta = y - x``, written without the angle, so that it is the identity exactly for y = x.
        """
        longest = max((x, y, v), key=lambda t: t.dim())
        kappa = self._kappa_at(longest)
        delta = y - x
        gx, gy = self._gap(x, kappa), self._gap(y, kappa)
        sign = self._known_sign()
        if sign in (-1, 0):
            gap = gx * gy - kappa * (delta * delta).sum(-1, keepdim=True)
        else:
            gap = _antipodal_gap(x, y, kappa)
            gap = torch.where(gap > 0, gap, 1.0)  # antipodes: no unique geodesic, some isometry

        # v turned twice in the plane: all that is left of it there are multiples of delta and x
        x2, delta2 = (x * x).sum(-1, keepdim=True), (delta * delta).sum(-1, keepdim=True)
        dx, xv, dv = ((a * b).sum(-1, keepdim=True) for a, b in ((delta, x), (x, v), (delta, v)))
        real = gx + kappa * dx
        of_delta = real * xv + kappa * (dx * xv - x2 * dv)
        of_x = kappa * (dx * dv - delta2 * xv) - real * dv
        rotated = v + (2 * kappa / gap) * (of_delta * delta + of_x * x)
        return rotated * (gy / gx)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """First-order retraction ``x + u``, projected."""
        return self.projx(x + u)

    @in_float64
    def mobius_add(self, x: Tensor, y: Tensor) -> Tensor:
        """Gyrovector (Mobius) sum of x and y: the isometry that takes 0 to x, applied to y."""
        kappa = self._kappa_at(x if x.dim() >= y.dim() else y)
        xy = (x * y).sum(-1, keepdim=True)
        gx, gy = self._gap(x, kappa), self._gap(y, kappa)
        below = gx * gy - kappa * ((x + y) ** 2).sum(-1, keepdim=True)
        if self._known_sign() in (None, 1):
            below = _antipodal_gap(-x, y, kappa)
        y2 = (y * y).sum(-1, keepdim=True)
        return ((1 - 2 * kappa * xy - kappa * y2) * x + gx * y) / below

    def mobius_scalar_mul(self, r: float | Tensor, x: Tensor) -> Tensor:
        """The point at r times the distance of x from the origin: ``exp0(r log0(x))``."""
        return self.expmap0(r * self.logmap0(x))

    def mobius_matvec(self, m: Tensor, x: Tensor) -> Tensor:
        """``exp0(m log0(x))``; the origin where the product is 0. m (..., E, D), x (..., D)."""
        return self.expmap0((m * self.logmap0(x).unsqueeze(-2)).sum(-1))

    @torch.no_grad()
    def random(self, *size, std: float = 1.0, dtype=None, device=None) -> Tensor:
        """exp0 of normal vectors whose standard deviation a coordinate is ``std`` in the metric at the origin."""
        return self.expmap0(torch.randn(*size, dtype=dtype, device=device) * (std / 2))

    def origin(self, *size, dtype=None, device=None, seed=None) -> Tensor:
        """The zero vector."""
        return torch.zeros(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5):
        if not bool(x.isfinite().all()):
            return False, "a coordinate is not finite"
        gap = self._gap(x.to(torch.float64), self._kappa_at(x))
        if self._known_sign() in (0, 1) or bool((gap > 0).all()):
            return True, None
        worst = float(gap.min())
        return (
            False,
            f"a point lies outside the ball of radius 1/sqrt|kappa|: 1 + kappa |x|^2 = {worst:.3g} <= 0; see projx",
        )

    @torch.no_grad()
    def _check_vector_on_tangent(self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5):
        return True, None


def _antipodal_gap(x: Tensor, y: Tensor, kappa) -> Tensor:
    """``|1 + kappa conj(x) y|^2 = (1 + kappa <x, y>)^2 + kappa^2 |x ^ y|^2``: 0 just for antipodes, (..., 1)."""
    xy = (x * y).sum(-1, keepdim=True)
    x2 = (x * x).sum(-1, keepdim=True)
    rest = y - x * (xy / torch.where(x2 > 0, x2, 1.0))
    return (1 + kappa * xy) ** 2 + kappa * kappa * x2 * (rest * rest).sum(-1, keepdim=True)

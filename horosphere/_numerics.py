"""Scalar functions of curved geometry and every numerical constant of the library.

All functions are smooth through zero curvature and zero argument in the sense that matters for training: value,
gradient and second derivative are finite there. They are written on the *square* of the usual argument
(``s = kappa r^2``), in which sin, cos and the squared arc are analytic: one code serves every sign of curvature.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

# |kappa u| up to which arc2 is summed as a series with coefficients 2 / (n^2 C(2n, n)); there 15 terms reach float64,
# (1/16)^15 < 2^-53, and 7 reach float32.
ARC_SERIES_BOUND = 0.25
ARC_SERIES = tuple(2.0 / (n * n * math.comb(2 * n, n)) for n in range(1, 16))
# |s| up to which sin(sqrt s)/sqrt s and cos(sqrt s) are summed; 10 terms leave 1 / 21! < 2^-65.
TRIG_SERIES_BOUND = 1.0
SIN_SERIES = tuple((-1.0) ** n / math.factorial(2 * n + 1) for n in range(10))
COS_SERIES = tuple((-1.0) ** n / math.factorial(2 * n) for n in range(10))

# log(1 + f) = f - f^2 / 2 + f^3 P(f) for 1 + f in [1/sqrt 2, sqrt 2], P to 3e-8, and asin z = z P(z^2) for z^2 <= 1/2,
# P to 2e-8: least squares in Chebyshev nodes, for float32.
LOG_FIT = (
    *(3.333333119e-01, -2.499998905e-01, 2.000070748e-01, -1.666848024e-01, 1.424993653e-01),
    *(-1.241105068e-01, 1.166151107e-01, -1.157120073e-01, 7.149753894e-02),
)
ASIN_FIT = (
    *(9.99999987e-01, 1.66669932e-01, 7.48684710e-02, 4.66362156e-02),
    *(1.58279045e-02, 7.82289190e-02, -9.40462760e-02, 1.11960899e-01),
)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: 2^-24 for float32, 2^-53 for float64."""
    return torch.finfo(dtype).eps / 2


def ball_margin(dtype: torch.dtype) -> float:
    """Points of a ball are kept at ``sqrt|kappa| |x| <= 1 - margin``.

    The coordinates and the factor that rescales them are each rounded once, which moves the norm by at most 1.5 eps;
    4 eps keep it strictly inside. Distance to the origin at the cap: 15.2 in float32, 35.4 in float64, for kappa = -1.
    """
    return 4 * torch.finfo(dtype).eps


def hyperboloid_max_radius(dtype: torch.dtype) -> float:
    """Largest hyperbolic radius in units of 1/sqrt|kappa|: float32 and bfloat16 42.4, float64 88, float16 3.5.

    log sqrt(max) - 2 keeps the product of two time coordinates finite; 88 keeps everything finite that an exponential
    map in float64 forms on the way, cosh(2 * 88) sinh(88) and its square.
    """
    return min(0.5 * math.log(torch.finfo(dtype).max) - 2.0, 88.0)


def antipode_floor(dtype: torch.dtype) -> float:
    """cos^2 of half the angle below which points are antipodal: gradient 0 there, slope <= 1/sqrt(floor) outside."""
    return 4 * torch.finfo(dtype).eps ** 2


def range_of_squares(dtype: torch.dtype) -> tuple[float, float]:
    """Between them the squared norms of two points, in the unit of the product form, give all digits of it.

    Below the first, 3e-24 in float32, a product may be less than the smallest number with all its digits, and what is
    lost of it more than a rounding. Below the second, 2e37, 4 (|f| + |g|)^2 is no more than the largest number; 4 is
    the product of two weights on flat space.
    """
    info = torch.finfo(dtype)
    return info.tiny / unit_roundoff(dtype) ** 2, info.max / 16


def promised_tolerance(dtype: torch.dtype) -> float:
    """Relative error of a distance promised by precision "exact" and "auto"."""
    return 1e-12 if dtype == torch.float64 else 1e-5


def weight_tolerance(dtype: torch.dtype) -> float:
    """Error of ``d^2 + eps``, relative, above which attention works a pair from differences (float64: 1e-11).

    It is set against a bound of the product form's error that is some ten times what its roundings come to: the
    weights of float32 points are known to about 5e-5.
    """
    return 1e-11 if dtype == torch.float64 else 5e-4


def weight_theta(features: int, dtype: torch.dtype) -> float:
    """Attention counts pairs with ``u + eps < theta w_i w_j (|f_i|^2 + |f_j|^2)`` as unresolved: 4 sqrt(F + 2) units
    of what was subtracted, two features being the norms of the augmented product.
    """
    return 4 * (features + 2) ** 0.5 * unit_roundoff(dtype) / weight_tolerance(dtype)


def mean_tolerance(dtype: torch.dtype) -> float:
    """Length of the mean tangent, relative to the root mean square distance, at which a Frechet mean has converged."""
    return 1e-10 if dtype == torch.float64 else 1e-6


# A sum of squared lengths of logarithms on the hyperboloid is known to 4e-12 of itself at radius 15: a smaller rise may
# be rounding, and the residual decides.
OBJECTIVE_NOISE = 1e-9

# Tiles of attention keep t = |kappa| u / 2 at least here: nothing beside any eps, and the slope of d^2 is still that of
# coincident points. Squared distances below the second number are those of such pairs, where d has no slope.
SMALLEST_CHORD2 = 1e-30
COINCIDENT = 1e-24
# Embeddings keep points of a ball at sqrt|kappa| |x| <= 1 - this, hyperbolic radius 23.7: closer to the rim
# 1 + kappa |x|^2, formed by subtraction, would have fewer than six digits.
TRAINING_RIM = 1e-10
# A node whose share of a ranking loss is below this does not move: that much hyperbolic length is less than what a
# table of float64 keeps of a point at radius 8, and a million such steps are less than one of a training's.
UNSEEN_SHARE = 1e-9
# Sine of the angle between points of a sphere, below which the slope of their distance is held: the direction from one
# to the other has fewer than four digits there.
LEAST_SINE = 1e-12
# Half the opening of an entailment cone stays this far below a right angle's sine: the slope of asin is at most 2e4.
CONE_MARGIN = 1e-9
# Lengths that distances are fitted to: the fourth power of each is a float64 number.
LENGTHS = (1e-75, 1e75)
# What is divided by is at least this where the quotient is not used.
SMALLEST_DIVISOR = 1e-300
# Least |kappa| longest^2 of a learned curvature: flat to one in ten million, and a sphere's coordinates still hold the
# digits of a distance.
FLATTEST = 1e-6
# Two lengths of one edge, and the two halves of a distance matrix, that differ by no more than this, relative, are the
# same number written with nine digits.
SAME_LENGTH = 1e-8
SYMMETRIC = 1e-9
# Start of a training from h-MDS: equal points are moved apart by this much of the unit of length.
NUDGE = 1e-6
# Norm of a mean direction, or of a tangent between unit vectors, below which it is rounding.
NO_DIRECTION = 1e-12
# Codebook: tolerance of the solver, and what its equations may be off by.
CODEBOOK_STEP, CODEBOOK_ERROR = 1e-13, 1e-10
# torch's own summand under a norm that gradients are divided by.
CLIP_SUMMAND = 1e-6

# 2^27 + 1: what Veltkamp multiplies a float64 with to split it into halves whose products are exact.
SPLITTER = 134217729.0

# 1 + kappa |x|^2 below which its roundings are undone: above it they are at most 2^-53 (D + 2) / 0.03 of itself.
RIM_GAP = 0.03
# Smallest |kappa| kept by a model whose curvature must keep its sign (ball, sphere, hyperboloid): radius 1e4.
MIN_ABS_KAPPA = 1e-8
# Largest |kappa|: radius 1e-8, whose fourth power float32 still holds.
MAX_ABS_KAPPA = 1e16
# Largest power of an attention weight: its product with a logarithm of a float32 stays finite.
MAX_POWER = 1e30


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which maps and exact distances are worked: always float64."""
    if not dtype.is_floating_point:
        raise TypeError(f"points must be floating point tensors, got {dtype}; convert them with .to(torch.float32)")
    return torch.float64


def fast_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which matrix products run: the input's own, half precision in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    out = x * coefficients[-1] + coefficients[-2]
    for c in reversed(coefficients[:-2]):
        out = out * x + c
    return out


def safe_sqrt(x: Tensor) -> Tensor:
    """sqrt(x) for x >= 0 whose gradient at 0 is 0 rather than infinite."""
    if not _differentiated(x):
        return torch.sqrt(x)
    zero = x == 0
    return torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, x)))


def sign_of(kappa: float | Tensor) -> int | None:
    """-1, 0 or 1 for a number; None for a tensor, whose sign may change while it is learned."""
    if isinstance(kappa, Tensor):
        return None
    return (kappa > 0) - (kappa < 0)


def _arcosh1p(t: Tensor) -> Tensor:
    """``arcosh(1 + t) = 2 asinh(sqrt(t / 2))`` for t >= 0, to full relative accuracy and without overflow.

    torch.asinh gives the same value at twenty times the cost: it is not vectorised on CPUs.
    """
    return torch.log1p(t + torch.sqrt(t) * torch.sqrt(t + 2))


def transformed() -> bool:
    """Inside vmap, grad and the other transforms of torch.func, which forbid to look at values."""
    return torch._C._are_functorch_transforms_active()


def _differentiated(*values: float | Tensor) -> bool:
    if transformed():
        return True
    return torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)


def arc2(u: Tensor, kappa: float | Tensor, complement: Tensor | None = None, sign: int | None = None) -> Tensor:
    r"""Squared geodesic distance of two points whose straight chord has the square ``u``.

    .. math::
        \mathrm{arc2}(u, \kappa) = \frac{4}{\kappa}\,\mathrm{asin}\Big(\frac{\sqrt{\kappa u}}{2}\Big)^2
        = u \sum_{n \ge 1} \frac{2 (\kappa u)^{n-1}}{n^2 \binom{2n}{n}}

    with asinh and |kappa| for negative curvature.

    Args:
        u: squared chord, >= 0, any shape.
        kappa: signed sectional curvature, broadcastable to ``u``.
        complement: ``1 - kappa u / 4`` where the caller knows it better than this subtraction does; decides the value
            past a quarter turn (antipodes on positive curvature).
        sign: the sign of ``kappa`` where it is known although ``kappa`` is a tensor.

    At the antipode (complement below :func:`antipode_floor`) the gradient is defined as 0.
    """
    sign = sign_of(kappa) if sign is None else sign
    if sign == 0:
        return u
    x = kappa * u
    if sign == -1 and not _differentiated(u, kappa):  # the series serves derivatives; the value needs none
        return _arcosh1p(x * -0.5) ** 2 / -kappa
    small = x.abs() <= ARC_SERIES_BOUND
    series = u * _polynomial(torch.where(small, x, 0.0), ARC_SERIES[: 15 if u.dtype == torch.float64 else 7])
    if sign == -1:
        large = torch.where(small, -1.0, x)
        out = _arcosh1p(large * -0.5) ** 2 / -large * u
        # u = inf, a point on the boundary of the ball, is infinitely far: 0 * inf must not make it NaN
        out = torch.where(torch.isinf(u), u, out)
        return torch.where(small, series, out)

    quarter = (1 - x / 4) if complement is None else complement
    floor = antipode_floor(u.dtype)
    antipodal = (x > 0) & (quarter <= floor)
    far = (x > 2) & ~antipodal
    large = torch.where(small | far | antipodal, 1.0, x)
    positive = torch.where(large > 0, large, 1.0)
    out = 4 * torch.asin(torch.sqrt(positive.clamp(max=4.0)) / 2) ** 2 / positive
    if sign is None:
        negative = torch.where(large > 0, -1.0, large)
        out = torch.where(large > 0, out, _arcosh1p(negative * -0.5) ** 2 / -negative)
    out = torch.where(small, series, out * u)
    # past a quarter turn the angle is measured from the antipode: there sin^2 is flat and cos^2 is not
    k = torch.where(far | antipodal, kappa * torch.ones_like(u), 1.0)
    rest = torch.asin(torch.sqrt(torch.where(far, quarter, 0.5).clamp(max=1.0)))
    out = torch.where(far, (math.pi - 2 * rest) ** 2 / k, out)
    limit = (math.pi - 2 * torch.sqrt(quarter.clamp(min=0.0))) ** 2 / k
    return torch.where(antipodal, limit.detach(), out)


def arc_factor(x: Tensor) -> Tensor:
    """``arc2(u, kappa) / u`` as a function of ``x = kappa u`` alone; 1 at 0, analytic for x < 4."""
    small = x.abs() <= ARC_SERIES_BOUND
    series = _polynomial(torch.where(small, x, 0.0), ARC_SERIES)
    positive = torch.where(small | (x < 0), 1.0, x).clamp(max=4.0)
    negative = torch.where(small | (x > 0), 1.0, -x)
    up = 4 * torch.asin(torch.sqrt(positive) / 2) ** 2 / positive
    down = _arcosh1p(negative * 0.5) ** 2 / negative
    return torch.where(small, series, torch.where(x > 0, up, down))


def sin_cos(s: Tensor, sign: int | None = None) -> tuple[Tensor, Tensor]:
    """``sin(r)/r`` and ``cos(r)`` for ``s = r^2 >= 0``, ``sinh(r)/r`` and ``cosh(r)`` for ``s = -r^2 < 0``.

    ``sign`` is that of s where the caller knows it.
    """
    small = s.abs() <= TRIG_SERIES_BOUND
    r = torch.sqrt(torch.where(small, 1.0, s.abs()))
    if sign is None:
        up = s > 0
        down = torch.where(up, 1.0, r)  # the branch not taken must not overflow either: its gradient would be 0 * inf
        sine = torch.where(up, torch.sin(r), torch.sinh(down)) / r
        cosine = torch.where(up, torch.cos(r), torch.cosh(down))
    else:
        sine, cosine = (torch.sin(r) / r, torch.cos(r)) if sign > 0 else (torch.sinh(r) / r, torch.cosh(r))
    inside = torch.where(small, s, 0.0)
    return (
        torch.where(small, _polynomial(inside, SIN_SERIES), sine),
        torch.where(small, _polynomial(inside, COS_SERIES), cosine),
    )


def tanh_ratio(s: Tensor) -> Tensor:
    """``tanh(r)/r`` for ``s = -r^2 <= 0``; never overflows."""
    if not _differentiated(s):
        r = torch.sqrt(-s)
        return torch.where(r > 0, torch.tanh(r) / r, 1.0)
    small = s.abs() <= TRIG_SERIES_BOUND
    inside = torch.where(small, s, 0.0)
    r = torch.sqrt(torch.where(small, 1.0, -s))
    return torch.where(small, _polynomial(inside, SIN_SERIES) / _polynomial(inside, COS_SERIES), torch.tanh(r) / r)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = a + b
    bb = total - a
    return total, (a - (total - bb)) + (b - bb)


def _two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    def split(v):
        scaled = SPLITTER * v  # torch has no fused multiply-add to ask for
        high = scaled - (scaled - v)
        return high, v - high

    product = a * b
    (ah, al), (bh, bl) = split(a), split(b)
    return product, ((ah * bh - product) + ah * bl + al * bh) + al * bl


def product_with_rest(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``a * b`` in float64 and what its rounding left out; the gradient is that of the product."""
    with torch.no_grad():
        rest = _two_product(a.detach(), b.detach())[1]
    return a * b, rest


# Numbers of points that are held in float64 at a time on a CPU, where fresh memory costs more than the arithmetic.
_WIDE = 2**16


def narrow(x: Tensor) -> bool:
    """Whether points are of a narrower type than float64 and no tracer watches: then :func:`wide_rows` serves."""
    return x.dtype != torch.float64 and not torch.compiler.is_compiling() and not transformed()


def wide_rows(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of x (R, D) in float64, some at a time."""
    rows = max(1, x.shape[0] if x.device.type != "cpu" else _WIDE // max(1, x.shape[1]))
    for i in range(0, x.shape[0], rows):
        yield slice(i, i + rows), x[i : i + rows].to(torch.float64)


class _SquaredNorm(torch.autograd.Function):
    """``|x|^2`` in float64, (..., 1); neither direction holds all points in float64."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(rows.shape[0], 1, dtype=torch.float64)
        for some, wide in wide_rows(rows):
            torch.sum(wide.square_(), -1, keepdim=True, out=out[some])
        return out.view(*x.shape[:-1], 1)

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (2 * g).to(x.dtype) * x


def one_plus_kappa_norm2(x: Tensor, kappa: float | Tensor, sign: int | None = None, below: float = RIM_GAP) -> Tensor:
    r"""``1 + kappa |x|^2`` over the last dimension (kept), in float64, without the cancellation near the rim of a ball.

    Sums and products are carried in two float64 numbers (Dekker's and Knuth's error-free transformations), so the
    result has a relative error of a few 2^-53 down to ``1 - sqrt|kappa| |x| = 1e-15``. On a CPU that is done for the
    points where the result is less than ``below``. The derivative is that of the plain formula.
    """
    if narrow(x):
        plain = 1 + kappa * _SquaredNorm.apply(x)
    else:
        x = x.to(torch.float64)
        plain = 1 + kappa * (x * x).sum(-1, keepdim=True)
    sign = sign_of(kappa) if sign is None else sign
    if sign in (0, 1):
        return plain
    with torch.no_grad():
        value, rough = x.detach(), plain.detach()
        k = kappa.detach() if isinstance(kappa, Tensor) else torch.full_like(rough, kappa)
        k = k.expand(rough.shape)
        if rough.device.type != "cpu" or torch.compiler.is_compiling() or transformed():
            correction = _exact_gap(value.to(torch.float64), k) - rough
        else:  # most points are far from the rim, where the plain formula is as good
            near = (rough < below).squeeze(-1)
            correction = torch.zeros_like(rough)
            if bool(near.any()):
                few = value.expand(*near.shape, -1)[near].to(torch.float64)
                correction[near] = _exact_gap(few, k[near]) - rough[near]
    return plain + correction


def _exact_gap(x: Tensor, kappa: Tensor) -> Tensor:
    total, error = _two_product(x, x)
    error = error.sum(-1, keepdim=True)
    while total.shape[-1] > 1:  # pairwise tree: log2(D) vectorised steps
        if total.shape[-1] % 2:
            total = torch.cat((total, torch.zeros_like(total[..., :1])), -1)
        total, rest = _two_sum(total[..., 0::2], total[..., 1::2])
        error = error + rest.sum(-1, keepdim=True)
    scaled, scaled_error = _two_product(kappa, total)
    head, tail = _two_sum(torch.ones_like(scaled), scaled)
    return head + (tail + scaled_error + kappa * error)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Distances are worked in the points' own precision, whatever autocast asks of matrix products."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()

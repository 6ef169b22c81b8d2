"""Isometries between models: distances, round trips, gyro operations, and what happens at the rim."""

import math

import mpmath
import pytest
import torch

import horosphere as hs
from horosphere.manifolds.convert import (
    ball_to_hyperboloid,
    ball_to_klein,
    convert,
    hyperboloid_to_ball,
    hyperboloid_to_klein,
    klein_to_ball,
    klein_to_hyperboloid,
)

KAPPAS = [-1.0, -0.3, -4.0]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def points(kappa, dtype, radius=3.0, n=40, dim=4, seed=0):
    """Points of the ball spread evenly over hyperbolic radii up to ``radius / sqrt|kappa|``."""
    g = torch.Generator().manual_seed(seed)
    direction = torch.nn.functional.normalize(torch.randn(n, dim, generator=g, dtype=torch.float64), dim=-1)
    r = radius * torch.linspace(0, 1, n, dtype=torch.float64)[:, None]
    return (torch.tanh(r / 2) / abs(kappa) ** 0.5 * direction).to(dtype)


def klein_distance(a, b, kappa):
    """The Klein ball's own formula, in mpmath: cosh(d/R) = (1 - <a,b>)/sqrt((1 - |a|^2)(1 - |b|^2)) in units of R."""
    with mpmath.workdps(50):
        root = mpmath.sqrt(mpmath.mpf(-kappa))
        a, b = ([root * mpmath.mpf(float(v)) for v in p] for p in (a, b))
        inner = mpmath.fdot(a, b)
        gaps = (1 - mpmath.fdot(a, a)) * (1 - mpmath.fdot(b, b))
        return float(mpmath.acosh((1 - inner) / mpmath.sqrt(gaps)) / root)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kappa", KAPPAS)
def test_hyperboloid_distance_is_ball_distance(kappa, dtype):
    x = points(kappa, dtype)
    ball, lorentz = hs.PoincareBall(kappa), hs.Lorentz(kappa)
    y = ball_to_hyperboloid(x, kappa)
    assert y.dtype == dtype and y.shape == (40, 5)
    before, after = ball.dist(x[:-1], x[1:]), lorentz.dist(y[:-1], y[1:])
    # coordinates rounded at radius r move a point by up to (eps/2) sinh(r): stated in the module
    torch.testing.assert_close(after, before, rtol=TOLERANCE[dtype] * 10 ** (dtype == torch.float32), atol=0)
    inner = ball.dist(x[:14], x[1:15])  # radius <= 1.1
    torch.testing.assert_close(lorentz.dist(y[:14], y[1:15]), inner, rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kappa", KAPPAS)
def test_klein_distance_is_ball_distance(kappa, dtype):
    x = points(kappa, dtype, radius=1.0)
    klein = ball_to_klein(x, kappa)
    assert klein.dtype == dtype
    ball = hs.PoincareBall(kappa)
    for i in range(0, 39, 6):
        right = ball.dist(x[i].double(), x[i + 1].double()).item()
        assert klein_distance(klein[i], klein[i + 1], kappa) == pytest.approx(right, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kappa", KAPPAS)
def test_round_trips(kappa, dtype):
    x = points(kappa, dtype)
    h = ball_to_hyperboloid(x, kappa)
    k = ball_to_klein(x, kappa)
    rtol, atol = 16 * torch.finfo(dtype).eps, 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(hyperboloid_to_ball(h, kappa), x, rtol=rtol, atol=atol)
    torch.testing.assert_close(hyperboloid_to_klein(h, kappa), k, rtol=rtol, atol=atol)
    # the Klein ball has e^-2r left at radius r where the others have e^-r: e^3 of the digits are gone at radius 3
    loss = math.exp(3.0)
    torch.testing.assert_close(klein_to_ball(k, kappa), x, rtol=loss * rtol, atol=atol)
    torch.testing.assert_close(klein_to_hyperboloid(k, kappa), h, rtol=loss**2 * rtol, atol=atol)


@pytest.mark.parametrize(
    ("dtype", "margin"), [(torch.float32, 1e-5), (torch.float64, 1e-5), (torch.float64, 1e-12)], ids=str
)
def test_no_cancellation_near_the_rim(dtype, margin):
    x = torch.tensor([[0.6, 0.8]], dtype=torch.float64) * (1 - margin)
    x = x.to(dtype)
    with mpmath.workdps(50):
        a, b = (mpmath.mpf(float(v)) for v in x[0])
        right = [float(2 * v / (1 - a * a - b * b)) for v in (a, b)]
    got = ball_to_hyperboloid(x, -1.0)[0, 1:]
    torch.testing.assert_close(
        got.double(), torch.tensor(right, dtype=torch.float64), rtol=torch.finfo(dtype).eps * 4, atol=0
    )


@pytest.mark.parametrize("margin", [1e-5, 1e-12])
def test_no_cancellation_near_the_rim_of_the_klein_ball(margin):
    k = torch.tensor([0.6, 0.8], dtype=torch.float64) * (1 - margin)
    with mpmath.workdps(50):
        a, b = (mpmath.mpf(v) for v in k.tolist())
        height = mpmath.sqrt(1 - a * a - b * b)
        on_hyperboloid = torch.tensor([float(v / height) for v in (a, b)], dtype=torch.float64)
        in_ball = torch.tensor([float(v / (1 + height)) for v in (a, b)], dtype=torch.float64)
    torch.testing.assert_close(klein_to_hyperboloid(k, -1.0)[1:], on_hyperboloid, rtol=1e-15, atol=0)
    torch.testing.assert_close(klein_to_ball(k, -1.0), in_ball, rtol=1e-15, atol=0)


def test_distance_to_the_origin_survives_float64_radius_20():
    x = points(-1.0, torch.float64, radius=20.0)
    y = ball_to_hyperboloid(x, -1.0)
    torch.testing.assert_close(hs.Lorentz().dist0(y), hs.PoincareBall().dist0(x), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_results_stay_strictly_inside_of_the_ball(dtype):
    far = hs.Lorentz().projx(torch.tensor([[0.0, 1e30, 0.0], [0.0, 3e4, 4e4]], dtype=torch.float32)).to(dtype)
    if dtype == torch.float16:
        far = hs.Lorentz().projx(torch.tensor([[0.0, 100.0, 0.0], [0.0, 30.0, 40.0]], dtype=dtype))
    for x in (
        hyperboloid_to_ball(far, -1.0),
        hyperboloid_to_klein(far, -1.0),
        ball_to_klein(hyperboloid_to_ball(far, -1.0), -1.0),
    ):
        assert x.dtype == dtype
        assert (torch.linalg.vector_norm(x.double(), dim=-1) < 1).all()
        assert hs.PoincareBall().dist0(x).isfinite().all()


def test_outside_of_the_model_is_nan():
    outside = torch.tensor([1.5, 0.0])
    for f in (ball_to_hyperboloid, ball_to_klein, klein_to_ball, klein_to_hyperboloid):
        assert f(outside, -1.0).isnan().any(), f.__name__


def test_the_rim_goes_to_the_cap_of_a_ball_and_to_no_finite_point_of_the_hyperboloid():
    rim = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for f in (ball_to_klein, klein_to_ball):
        assert f(rim, -1.0)[0] == 1 - 2.0**-50, f.__name__
    for f in (ball_to_hyperboloid, klein_to_hyperboloid):
        assert not f(rim, -1.0).isfinite().all(), f.__name__
    antipode = torch.tensor([-1.0, 0.0, 0.0])
    assert not convert(antipode, hs.Sphere(), hs.Stereographic(1.0)).isfinite().any()


@pytest.mark.parametrize("kappa", [0.0, 1.0])
def test_curvature_must_be_negative(kappa):
    for f in (ball_to_hyperboloid, ball_to_klein, klein_to_ball, klein_to_hyperboloid, hyperboloid_to_ball):
        with pytest.raises(ValueError, match="negative sectional curvature"):
            f(torch.zeros(3), kappa)


def test_curvature_of_each_head():
    kappa = torch.tensor([-0.5, -2.0], dtype=torch.float64)
    x = 0.2 * torch.rand(3, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = ball_to_hyperboloid(x, kappa)
    for h in range(2):
        torch.testing.assert_close(y[:, h], ball_to_hyperboloid(x[:, h], float(kappa[h])), rtol=1e-15, atol=0)
    torch.testing.assert_close(hyperboloid_to_ball(y, kappa), x, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(klein_to_hyperboloid(ball_to_klein(x, kappa), kappa), y, rtol=1e-13, atol=1e-15)


def test_gradients():
    kappa = torch.tensor(-0.7, dtype=torch.float64, requires_grad=True)
    x = points(-0.7, torch.float64, radius=2.0, n=5, dim=3)[1:].requires_grad_()
    h = ball_to_hyperboloid(x, -0.7).detach().requires_grad_()
    k = ball_to_klein(x, -0.7).detach().requires_grad_()
    for f, a in (
        (ball_to_hyperboloid, x),
        (ball_to_klein, x),
        (hyperboloid_to_ball, h),
        (hyperboloid_to_klein, h),
        (klein_to_ball, k),
        (klein_to_hyperboloid, k),
    ):
        assert torch.autograd.gradcheck(f, (a, kappa)), f.__name__


def pairs_of_models():
    return [
        (hs.PoincareBall(-0.7), hs.Lorentz(-0.7)),
        (hs.Stereographic(-0.7), hs.Lorentz(-0.7)),
        (hs.PoincareBall(-0.7), hs.Stereographic(-0.7)),
        (hs.Stereographic(1.7), hs.Sphere(1.7)),
        (hs.Stereographic(0.0), hs.Euclidean()),
        (hs.Sphere(2.0), hs.Sphere(2.0)),
        (hs.Scaled(hs.PoincareBall(-0.7), 3.0), hs.Scaled(hs.Lorentz(-0.7), 3.0)),
    ]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", range(7))
def test_convert_keeps_distances_and_comes_back(case, dtype):
    source, target = pairs_of_models()[case]
    torch.manual_seed(case)
    x = source.random(30, source.ambient_dim(3), dtype=dtype)
    y = convert(x, source, target)
    assert y.dtype == dtype and y.shape == (30, target.ambient_dim(3))
    rtol = TOLERANCE[dtype] * (5 if dtype == torch.float32 else 1)  # normal points reach radius 3.5: see above
    torch.testing.assert_close(target.dist(y[:-1], y[1:]), source.dist(x[:-1], x[1:]), rtol=rtol, atol=0)
    back = convert(y, target, source)
    torch.testing.assert_close(back, x, rtol=100 * torch.finfo(dtype).eps, atol=10 * torch.finfo(dtype).eps)


def test_convert_a_product_by_parts():
    source = hs.Product((hs.PoincareBall(-1.0), 2), (hs.Sphere(2.0), 3))
    target = hs.Product((hs.Lorentz(-1.0), 3), (hs.Stereographic(2.0), 2))
    torch.manual_seed(0)
    x = source.random(20, 5, dtype=torch.float64)
    y = convert(x, source, target)
    assert y.shape == (20, 5)
    torch.testing.assert_close(target.dist(y[:-1], y[1:]), source.dist(x[:-1], x[1:]), rtol=1e-12, atol=0)


def test_convert_beyond_the_equator_of_the_sphere():
    # stereographic points at 1000 R lie 2e-3 from the antipode of the origin, where 1 + t/R cancels
    x = torch.tensor([[600.0, 800.0], [-800.0, 600.0]], dtype=torch.float32)
    y = convert(x, hs.Stereographic(1.0), hs.Sphere(1.0))
    torch.testing.assert_close(convert(y, hs.Sphere(1.0), hs.Stereographic(1.0)), x, rtol=1e-6, atol=0)


def test_convert_refuses_other_curvatures_and_unknown_pairs():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="curvatures"):
        convert(x, hs.PoincareBall(-1.0), hs.Lorentz(-2.0))
    with pytest.raises(ValueError, match="curvatures"):
        convert(x, hs.PoincareBall(torch.tensor([-1.0, -1.0])), hs.Lorentz(-1.0))
    with pytest.raises(ValueError, match="scales"):
        convert(x, hs.Scaled(hs.PoincareBall(), 2.0), hs.Scaled(hs.Lorentz(), 1.0))
    with pytest.raises(ValueError, match="numbers of parts"):
        convert(x, hs.Product((hs.Euclidean(), 3)), hs.Product((hs.Euclidean(), 1), (hs.Euclidean(), 2)))
    with pytest.raises(TypeError, match="no isometry"):
        convert(x, hs.Scaled(hs.PoincareBall(), 2.0), hs.Lorentz())


def test_learnable_curvature_on_both_sides_carries_the_gradient():
    ball = hs.PoincareBall(-1.0, learnable=True)
    y = convert(torch.tensor([[0.5, 0.0]], dtype=torch.float64), ball, hs.Lorentz(-1.0))
    y[0, 1].backward()
    # s = 2x/(1 + kappa x^2): ds/dkappa = -2 x^3/(1 + kappa x^2)^2
    assert ball.kappa.grad.item() == pytest.approx(-2 * 0.125 / 0.75**2, rel=1e-14)


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gyro_operations_agree_through_the_isometry(kappa, dtype):
    """Fault 44: Mobius addition, scalar multiplication and matrix-vector product of the hyperboloid are the ball's."""
    ball, lorentz = hs.PoincareBall(kappa), hs.Lorentz(kappa)
    x, y = points(kappa, dtype, radius=1.0, seed=1), points(kappa, dtype, radius=1.0, seed=2).flip(0)
    hx, hy = ball_to_hyperboloid(x, kappa), ball_to_hyperboloid(y, kappa)
    matrix = torch.randn(3, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)
    cases = {
        "mobius_add": (ball.mobius_add(x, y), lorentz.mobius_add(hx, hy)),
        "mobius_scalar_mul": (ball.mobius_scalar_mul(1.7, x), lorentz.mobius_scalar_mul(1.7, hx)),
        "mobius_matvec": (ball.mobius_matvec(matrix, x), lorentz.mobius_matvec(matrix, hx)),
    }
    for name, (on_ball, on_hyperboloid) in cases.items():
        got = hyperboloid_to_ball(on_hyperboloid, kappa)
        scale = abs(kappa) ** -0.5
        torch.testing.assert_close(
            got, on_ball, rtol=0, atol=TOLERANCE[dtype] * scale, msg=lambda m, n=name: f"{n}: {m}"
        )

"""Inputs on which other tools fail, one test a row: the number in the name is the row's, the figures are its own.

Rows 31, 32 and 34 belong to other parts of the library; rows on optimizers to tests/optim.
"""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import horosphere as hs
from horosphere.kernels.tiled import nearest
from horosphere.manifolds import pairwise
from horosphere.manifolds._geoopt import geoopt
from tests.manifolds import oracle

F32, F64 = torch.float32, torch.float64
each_dtype = pytest.mark.parametrize("dtype", (F32, F64), ids=("float32", "float64"))


def tensor(*values, dtype=F64):
    return torch.tensor(values, dtype=dtype)


@each_dtype
def test_1_a_point_of_the_sphere_is_at_distance_0_from_itself(dtype):
    x = tensor(1.0, 2.0, 3.0, dtype=dtype) / 14**0.5
    for manifold in (hs.Sphere(), hs.Sphere(0.3), geoopt.Sphere()):
        assert hs.cdist(x[None], x[None], manifold) == 0
        points = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=dtype)
        assert torch.equal(hs.cdist(points, points, manifold).diagonal(), torch.zeros(40, dtype=dtype))
    assert hs.Sphere().dist(x, x) == 0


@pytest.mark.parametrize(("t", "dtype"), ((1e-4, F32), (1e-9, F64), (1e-3, F32), (1e-6, F64)))
def test_2_short_arcs_keep_their_digits(t, dtype):
    x, y = tensor(1.0, 0.0, dtype=dtype), tensor(math.cos(t), math.sin(t), dtype=dtype)
    assert hs.Sphere().dist(x, y).item() == pytest.approx(t, rel=1e-6)
    assert hs.cdist(x[None], y[None], hs.Sphere()).item() == pytest.approx(t, rel=1e-6)


@each_dtype
def test_4_antipodes(dtype):
    x = tensor(1.0, 0.0, 0.0, dtype=dtype)
    sphere = hs.Sphere()
    assert sphere.dist(x, -x).item() == pytest.approx(math.pi, rel=1e-7)
    assert hs.cdist(x[None], -x[None], sphere).item() == pytest.approx(math.pi, rel=1e-7)
    log = sphere.logmap(x, -x)
    assert log.norm().item() == pytest.approx(math.pi, rel=1e-6)
    assert abs(log @ x) < 1e-6
    torch.testing.assert_close(sphere.expmap(x, log), -x, atol=1e-6, rtol=0)
    half = hs.Sphere(4.0)  # radius 1/2
    assert half.dist(x / 2, -x / 2).item() == pytest.approx(math.pi / 2, rel=1e-7)
    projected = hs.Stereographic(1.0)
    far = projected.logmap(0.5 * x, -2.0 * x)  # antipodes of the stereographic sphere
    assert projected.norm(0.5 * x, far).item() == pytest.approx(math.pi, rel=1e-6)


@each_dtype
def test_5_gradients_of_the_sphere_at_the_ends_of_arccos(dtype):
    for manifold in (hs.Sphere(), hs.Sphere(0.25)):
        x = manifold.projx(tensor(1.0, 2.0, 3.0, dtype=dtype))
        for y in (x, -x):
            for distance in (manifold.dist, lambda a, b, m=manifold: hs.cdist(a[None], b[None], m)):
                a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
                scaled = 2 * a  # one step up the chain
                for grad in torch.autograd.grad(distance(scaled / 2, b).sum(), (a, b)):
                    assert grad.isfinite().all() and grad.abs().max() < 10
    x = tensor(0.3, 0.4, 0.5, dtype=dtype).requires_grad_()
    (grad,) = torch.autograd.grad(hs.Sphere().dist(x, x.detach().clone()), x)
    assert torch.equal(grad, torch.zeros(3, dtype=dtype))


@each_dtype
def test_7_exp_and_norm_at_the_zero_vector(dtype):
    sphere = hs.Sphere()
    x = tensor(1.0, 0.0, 0.0, dtype=dtype)
    u = torch.zeros(3, dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(sphere.expmap(x, u).sum(), u)
    torch.testing.assert_close(grad, tensor(0.0, 1.0, 1.0, dtype=dtype))
    for manifold in (sphere, hs.PoincareBall(), hs.Stereographic(0.5), hs.Lorentz(), hs.Scaled(sphere, 2.0)):
        point = manifold.origin(3, dtype=dtype)
        (grad,) = torch.autograd.grad(manifold.norm(point, u), u)
        assert torch.equal(grad, torch.zeros(3, dtype=dtype)), manifold


@each_dtype
def test_8_the_zero_vector_is_projected_to_the_origin(dtype):
    x = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    for kappa in (1.0, 0.25):
        sphere = hs.Sphere(kappa)
        out = sphere.projx(x)
        assert torch.equal(out, sphere.origin(2, 3, dtype=dtype))
        assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


@each_dtype
def test_9_gradient_of_the_ball_at_coincident_points(dtype):
    x, y = (tensor(0.3, 0.4, dtype=dtype).requires_grad_() for _ in range(2))
    zero = torch.zeros(2, dtype=dtype)
    for distance in (hs.PoincareBall().dist, hs.PoincareBall().dist2):
        assert all(torch.equal(grad, zero) for grad in torch.autograd.grad(distance(x, y), (x, y)))
    assert torch.equal(torch.autograd.grad(hs.cdist(x[None], y[None], hs.PoincareBall()).sum(), x)[0], zero)


def test_11_far_points_keep_their_order():
    ball, zero = hs.PoincareBall(), torch.zeros(2, dtype=F64)
    for r, d in ((0.999999, 14.5087), (0.9999999, 16.8112)):
        x = tensor(r, 0.0)
        found = ball.dist(x, zero).item()
        assert found == pytest.approx(d, abs=5e-5)
        assert found == pytest.approx(2 * math.atanh(r), rel=1e-9)
        assert hs.cdist(x[None], zero[None], ball).item() == pytest.approx(found, rel=1e-12)


def test_12_exp_at_the_origin_is_not_shortened():
    ball = hs.PoincareBall()
    u = tensor(10.0, 0.0)
    torch.testing.assert_close(ball.logmap0(ball.expmap0(u)), u, rtol=1e-8, atol=0)
    narrow = ball.expmap0(u.to(F32))
    # the stated cap of float32: distance 15.2 to the origin, 7.6 for the vector in the metric 4 I
    assert ball.dist0(narrow).item() == pytest.approx(15.2, abs=0.05)
    assert ball.logmap0(narrow)[0].item() == pytest.approx(7.6, abs=0.03)


@each_dtype
def test_13_exp_never_reaches_the_boundary(dtype):
    for kappa in (-1.0, -0.37, -25.0, -1e-6):
        for ball in (hs.PoincareBall(kappa), hs.Stereographic(kappa), hs.PoincareBall(kappa, learnable=True)):
            for n in (2, 3, 10, 64):
                for length in (1e3, 1e30):
                    x = ball.expmap0(torch.full((n,), length, dtype=dtype)).detach()
                    assert x.to(F64).norm() < abs(kappa) ** -0.5
                    d = ball.dist0(x)
                    assert d.isfinite() and ball.check_point_on_manifold(x)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=("float16", "bfloat16"))
def test_14_projection_in_half_precision_stays_inside(dtype):
    x = hs.PoincareBall().projx(tensor(2.0, 0.0, dtype=dtype))
    assert x.dtype == dtype and x.norm() < 1
    if dtype == torch.bfloat16:
        assert x.norm() <= 0.99609375
    directions = torch.randn(200, 5, generator=torch.Generator().manual_seed(0)).to(dtype) * 3
    for kappa in (-1.0, -0.37, -4.0):
        inside = hs.PoincareBall(kappa).projx(directions)
        assert (inside.to(F64).norm(dim=-1) < abs(kappa) ** -0.5).all()
        assert hs.PoincareBall(kappa).dist0(inside.float()).isfinite().all()


@each_dtype
def test_15_points_outside_of_the_ball_have_no_distance(dtype):
    ball, zero = hs.PoincareBall(), torch.zeros(2, dtype=dtype)
    outside, edge = tensor(1.5, 0.0, dtype=dtype), tensor(1.0, 0.0, dtype=dtype)
    assert ball.dist(outside, zero).isnan()
    assert ball.dist(edge, zero) == math.inf
    assert hs.cdist(outside[None], zero[None], ball).isnan()
    assert hs.cdist(edge[None], zero[None], ball) == math.inf
    for x in (outside, edge):
        good, reason = ball.check_point_on_manifold(x, explain=True)
        assert not good and "outside the ball" in reason
        with pytest.raises(ValueError, match="outside the ball"):
            ball.assert_check_point_on_manifold(x)


@pytest.mark.parametrize("r", (1.0, 5.0, 10.0))
@each_dtype
def test_18_the_hyperboloid_at_coincident_points(dtype, r):
    x = tensor(math.cosh(r), math.sinh(r), 0.0, dtype=dtype)
    for distance in (hs.Lorentz().dist, lambda a, b: hs.cdist(a[None], b[None], hs.Lorentz())):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        d = distance(a, b).sum()
        assert d == 0
        for grad in torch.autograd.grad(d, (a, b)):
            assert torch.equal(grad, torch.zeros(3, dtype=dtype))


@each_dtype
def test_19_exp_of_the_hyperboloid_does_not_overflow(dtype):
    for kappa in (-1.0, -2.0, -1e-6):
        lorentz = hs.Lorentz(kappa)
        for length in (100.0, 1e4, 1e20):
            u = (tensor(0.0, length, 0.0) * abs(kappa) ** -0.5).to(dtype).requires_grad_()
            x = lorentz.expmap0(u)
            assert x.isfinite().all() and lorentz.check_point_on_manifold(x)
            # the stated caps: radius 42.4 in float32, 88 in float64
            radius = lorentz.dist0(x).item() * abs(kappa) ** 0.5
            assert radius == pytest.approx(42.36 if dtype == F32 else 88.0, abs=0.01)
            assert torch.autograd.grad(x.sum(), u)[0].isfinite().all()
        moved = lorentz.expmap(x.detach(), (x * 0.0).detach() + u.detach())
        assert moved.isfinite().all()


def test_22_the_sign_of_curvature_is_checked():
    for cls, wrong in ((hs.PoincareBall, 1.0), (hs.PoincareBall, 0.0), (hs.Lorentz, 1.0), (hs.Sphere, -1.0)):
        with pytest.raises(ValueError, match=f"{cls.__name__} needs a .* sectional curvature"):
            cls(wrong)
    for letter in ("c", "k"):
        with pytest.raises(TypeError, match=rf"PoincareBall got {letter}=-1.0.*kappa"):
            hs.PoincareBall(**{letter: -1.0})
    with pytest.raises(ValueError, match="finite"):
        hs.Stereographic(math.nan)
    flat = hs.Stereographic(0.0).dist(tensor(0.3, 0.4), tensor(0.1, -0.2))
    assert flat.item() == pytest.approx(1.264911, abs=5e-7)  # twice the Euclidean distance, as stated


def test_23_curvature_is_read_back_as_given():
    for cls, kappa in ((hs.PoincareBall, -1.0), (hs.Lorentz, -4.0), (hs.Sphere, 0.3), (hs.Stereographic, 0.0)):
        assert cls(kappa).kappa == kappa
        assert cls(kappa, learnable=True).kappa.item() == kappa
    x = hs.Lorentz(-4.0).random(50, 3, dtype=F64)
    product = (x[:, 1:] ** 2).sum(-1) - x[:, 0] ** 2
    torch.testing.assert_close(product, torch.full((50,), -0.25, dtype=F64), rtol=1e-8, atol=0)
    # geoopt's Lorentz(k) has <x, x> = -k
    a, b = (hs.Lorentz(-0.25).random(4, 3, dtype=F64) for _ in range(2))
    torch.testing.assert_close(hs.cdist(a, b, geoopt.Lorentz(k=4.0)), hs.cdist(a, b, hs.Lorentz(-0.25)))


def test_25_points_follow_a_ball_that_shrinks():
    ball = hs.PoincareBall(-1.0, learnable=True)
    x = tensor(0.95, 0.0)
    for step in range(40):
        with torch.no_grad():
            ball.kappa.sub_(0.1 if step < 30 else -10.0)  # the last steps cross 0: the sign is kept
        ball.kappa.constrain_()
        x = ball.projx(x)
        assert ball.kappa < 0
        assert x.norm() < ball.kappa.detach().abs().rsqrt()
        assert ball.check_point_on_manifold(x)


def test_26_through_zero_curvature():
    x, y = tensor(0.3, 0.4), tensor(0.1, -0.2)
    right = {-1e-6: 1.2649112, 0.0: 1.2649111, 1e-6: 1.2649110}
    for kappa, d in right.items():
        for learnable in (False, True):
            manifold = hs.Stereographic(kappa, learnable)
            assert manifold.dist(x, y).item() == pytest.approx(d, abs=5e-8)
            assert manifold.dist(x, y).item() == pytest.approx(float(oracle.distance(manifold, x, y)), rel=1e-14)
            assert hs.cdist(x[None], y[None], manifold).item() == pytest.approx(d, abs=5e-8)
    for kappa in right:
        manifold = hs.Stereographic(kappa, learnable=True)
        (slope,) = torch.autograd.grad(manifold.dist(x, y), manifold.kappa)
        assert slope.item() == pytest.approx(-0.105409, abs=1e-6)
        (slope,) = torch.autograd.grad(hs.cdist(x[None], y[None], manifold).sum(), manifold.kappa)
        assert slope.item() == pytest.approx(-0.105409, abs=1e-6)


def test_27_other_curvatures_than_1():
    x, y = tensor(0.3, 0.4), tensor(0.1, -0.2)
    for kappa, d in ((-0.5, 1.320929868677592), (-1.0, 1.385123994547563)):
        assert hs.PoincareBall(kappa).dist(x, y).item() == pytest.approx(d, rel=1e-15)
        assert hs.Stereographic(kappa).dist(x, y).item() == pytest.approx(d, rel=1e-15)


def test_29_half_a_great_circle_by_exp():
    end = hs.Sphere().expmap(tensor(1.0, 0.0), tensor(0.0, math.pi))
    assert abs(end[0].item() + 1) < 1e-15
    assert abs(end[1].item() - 1.2246e-16) < 1e-15


@each_dtype
def test_35_frechet_mean_and_midpoint_by_name(dtype):
    points = torch.tensor([[0.9, 0.0], [0.0, 0.1], [-0.2, 0.0]], dtype=dtype)
    ball = hs.PoincareBall()
    mean = hs.manifolds.frechet_mean(points, ball)
    assert bool(mean.converged)
    torch.testing.assert_close(mean.mean, tensor(0.397982, 0.015433, dtype=dtype), atol=1e-6, rtol=0)
    middle = hs.manifolds.midpoint(points, ball)
    torch.testing.assert_close(middle, tensor(0.478637, 0.010676, dtype=dtype), atol=1e-6, rtol=0)


@each_dtype
def test_38_a_zero_product_is_the_origin_in_its_row_alone(dtype):
    ball = hs.PoincareBall()
    matrix = tensor([1.0, 0.0], [0.0, 2.0], dtype=dtype)
    x = tensor([0.3, 0.2], [0.0, 0.0], [0.1, -0.4], dtype=dtype)
    out = ball.mobius_matvec(matrix, x)
    assert torch.equal(out[1], torch.zeros(2, dtype=dtype))
    for i in (0, 2):
        torch.testing.assert_close(out[i], ball.mobius_matvec(matrix, x[i]))
        assert out[i].norm() > 0
    kills = tensor([0.0, 1.0], [0.0, 2.0], dtype=dtype)
    assert torch.equal(ball.mobius_matvec(kills, tensor(0.5, 0.0, dtype=dtype)), torch.zeros(2, dtype=dtype))


def test_39_plain_matrices_and_a_clear_shape_message():
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=F64) * 0.2
    for manifold in (hs.PoincareBall(), hs.Euclidean(), geoopt.PoincareBall()):
        assert hs.cdist(x, x, manifold).shape == (6, 6)
    ball = hs.PoincareBall(tensor(-1.0, -2.0))
    with pytest.raises(ValueError, match=r"kappa of shape \(2,\).*points of shape \(2, 3\)"):
        hs.cdist(x[:2], x[:2], ball)
    with pytest.raises(ValueError, match=r"kappa of shape \(2,\).*points of shape \(2, 3\)"):
        ball.dist(x[:2], x[:2])


@pytest.mark.parametrize("manifold", (hs.Euclidean(), hs.PoincareBall(), hs.Sphere(), hs.Lorentz(), hs.Stereographic()))
def test_40_numpy_arrays_are_converted_and_nonsense_is_named(manifold):
    x = manifold.random(3, 4, dtype=F64)
    y = manifold.random(3, 4, dtype=F64)
    torch.testing.assert_close(manifold.dist(x.numpy(), y.numpy()), manifold.dist(x, y))
    torch.testing.assert_close(manifold.projx(x.numpy()), manifold.projx(x))
    torch.testing.assert_close(hs.cdist(x.numpy(), y, manifold), hs.cdist(x, y, manifold))
    with pytest.raises(TypeError, match=r"\by must be a tensor"):
        manifold.dist(x, "y")
    with pytest.raises(TypeError, match=r"\bx must hold real numbers"):
        hs.cdist(torch.ones(3, 4, dtype=torch.complex64), y, manifold)


@each_dtype
def test_42_no_points(dtype):
    for manifold in (hs.Euclidean(), hs.PoincareBall(), hs.Sphere(), hs.Lorentz(), hs.Stereographic(0.0, True)):
        for n, m in ((0, 0), (0, 4), (4, 0)):
            x = manifold.origin(n, 3, dtype=dtype).requires_grad_()
            y = manifold.origin(m, 3, dtype=dtype).requires_grad_()
            for precision in ("auto", "exact", "fast"):
                d = hs.cdist(x, y, manifold, precision=precision)
                assert d.shape == (n, m)
                grads = torch.autograd.grad(d.sum(), (x, y))
                assert [g.shape for g in grads] == [x.shape, y.shape]
                assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@each_dtype
def test_44_gyro_operations_on_both_hyperbolic_models(dtype):
    generator = torch.Generator().manual_seed(0)
    for kappa in (-1.0, -0.4):
        ball, lorentz = hs.PoincareBall(kappa), hs.Lorentz(kappa)
        radius = abs(kappa) ** -0.5
        a, b = (torch.randn(6, 3, generator=generator, dtype=dtype) * 0.3 * radius for _ in range(2))

        def lift(p, k=kappa):
            return hs.manifolds.ball_to_hyperboloid(p, k)

        matrix = torch.randn(3, 3, generator=generator, dtype=dtype)
        pairs = (
            (ball.mobius_add(a, b), lorentz.mobius_add(lift(a), lift(b))),
            (ball.mobius_scalar_mul(0.7, a), lorentz.mobius_scalar_mul(0.7, lift(a))),
            (ball.mobius_matvec(matrix, a), lorentz.mobius_matvec(matrix, lift(a))),
            (hs.manifolds.midpoint(a, ball), hs.manifolds.midpoint(lift(a), lorentz)),
        )
        for in_ball, on_sheet in pairs:
            assert lorentz.dist(lift(in_ball), on_sheet).max() < (1e-5 if dtype == F32 else 1e-12)


def test_45_coincident_rows():
    for manifold in (hs.Euclidean(), hs.PoincareBall(), hs.Stereographic(1.0)):
        for squared in (False, True):
            x = torch.zeros(30, 3, requires_grad=True)
            hs.cdist(x, x, manifold, squared=squared).sum().backward()
            assert torch.equal(x.grad, torch.zeros(30, 3))


def test_46_near_distances_survive_the_matrix_product():
    flat = hs.Euclidean()
    a, b = torch.tensor([[512695.0]]), torch.tensor([[512804.0]])
    assert hs.cdist(a, b, flat).item() == 109.0
    many = a.expand(64, 1).contiguous()
    assert torch.equal(hs.cdist(many, b, flat), torch.full((64, 1), 109.0))
    x = torch.randn(100, 16, generator=torch.Generator().manual_seed(0)) + 100
    d = hs.cdist(x, x, flat)
    assert torch.equal(d.diagonal(), torch.zeros(100))
    torch.testing.assert_close(hs.cdist(x[:1], x, flat), d[:1], rtol=1e-5, atol=0)  # whatever the batch size
    near = hs.cdist(torch.tensor([[1000.0, 0.0]]), torch.tensor([[1000.01, 0.0]]), flat).item()
    assert near == pytest.approx(float(np.float32(1000.01)) - 1000.0, rel=1e-5)
    assert near == pytest.approx(0.01, rel=3e-3)
    x.requires_grad_()
    hs.cdist(x, x, flat).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=("float16", "bfloat16"))
def test_47_half_precision_works_for_every_size(dtype):
    generator = torch.Generator().manual_seed(0)
    for manifold in (hs.Euclidean(), hs.PoincareBall(), hs.Sphere(), hs.Lorentz()):
        x = manifold.projx((torch.randn(64, 8, generator=generator) * 0.3).to(dtype))
        # "fast" may be off by 4 sqrt(F) 2^-24 w w (|f|^2 + |f|^2) in u, which is d^2 near 0; both sides may
        chord = hs.chord_of(manifold, x.float())
        size = chord.features.square().sum(-1) * (1.0 if chord.weight is None else chord.weight.square())
        slack = 2 * (4 * chord.features.shape[-1] ** 0.5 * 2**-24 * 2 * float(size.max())) ** 0.5
        for precision in ("auto", "exact", "fast"):
            large = hs.cdist(x, x, manifold, precision=precision)
            small = hs.cdist(x[:4], x, manifold, precision=precision)
            assert large.dtype == small.dtype == dtype
            step = torch.finfo(dtype).eps  # equal numbers may be rounded to neighbours
            torch.testing.assert_close(large[:4], small, rtol=1.01 * step, atol=slack if precision == "fast" else 0.0)
            wide = hs.cdist(x.double(), x.double(), manifold, precision="exact")
            far = wide > 0.1
            torch.testing.assert_close(large.double()[far], wide[far], rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_48_second_derivatives_of_the_distance_matrix():
    generator = torch.Generator().manual_seed(0)
    for manifold in (hs.Euclidean(), hs.PoincareBall(-0.5, learnable=True), hs.Sphere(), hs.Lorentz(-2.0)):
        x = manifold.projx(torch.randn(3, 4, generator=generator, dtype=F64) * 0.4).detach().requires_grad_()
        y = manifold.projx(torch.randn(2, 4, generator=generator, dtype=F64) * 0.4).detach().requires_grad_()
        parameters = tuple(manifold.parameters())
        for precision in ("auto", "exact"):

            def matrix(a, b, *_, m=manifold, p=precision):
                return hs.cdist(a, b, m, precision=p)

            assert torch.autograd.gradgradcheck(matrix, (x, y, *parameters), rtol=1e-4, atol=1e-5)
    x = torch.zeros(3, 2, dtype=F64, requires_grad=True)  # a gradient penalty where rows coincide
    (grad,) = torch.autograd.grad(hs.cdist(x, x, hs.PoincareBall(), squared=True).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((grad**2).sum() + grad.sum(), x)
    assert second.isfinite().all()


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor):
                self.numbers = max(self.numbers, t.numel())
        return out


def test_56_no_tensor_larger_than_a_block(monkeypatch):
    n, dim, block = 800, 16, 2**15
    monkeypatch.setattr(pairwise, "BLOCK_NUMBERS", block)
    monkeypatch.setattr(pairwise, "BLOCK_PAIRS", block // dim)
    monkeypatch.setattr(nearest, "CPU_BLOCK", block)
    x = torch.randn(n, dim, generator=torch.Generator().manual_seed(0)) * 0.1
    for manifold in (hs.PoincareBall(), hs.Euclidean()):
        with Largest() as seen:
            near = hs.knn(x, x, manifold, 5)
        assert seen.numbers <= max(block, n * 5 * dim)
        assert torch.equal(near.indices[:, 0], torch.arange(n))
        with Largest() as seen:
            hs.cdist(x, x, manifold)
        assert seen.numbers == n * n  # the result itself

    saved = []
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        d = hs.cdist(x, x, hs.PoincareBall())
    assert sum(saved) <= 4 * n * n  # the blocks' insides are recomputed, not kept
    with Largest() as seen:
        (grad,) = torch.autograd.grad(d.sum(), x)
    assert seen.numbers <= n * n
    monkeypatch.setattr(pairwise, "BLOCK_NUMBERS", 2**40)
    (whole,) = torch.autograd.grad(hs.cdist(x, x, hs.PoincareBall()).sum(), x)
    torch.testing.assert_close(grad, whole, rtol=1e-4, atol=1e-3)

"""Derivatives of distances: in x, y and kappa against 60-digit differences; functional transforms."""

import math

import numpy as np
import pytest
import torch

import horosphere as hs
from tests.manifolds import hard_pairs, oracle

F32, F64 = torch.float32, torch.float64
each_dtype = pytest.mark.parametrize("dtype", (F32, F64), ids=("float32", "float64"))
MANIFOLDS = {
    "ball": lambda: hs.PoincareBall(-0.7, learnable=True),
    "hyperboloid": lambda: hs.Lorentz(-0.7, learnable=True),
    "sphere": lambda: hs.Sphere(0.7, learnable=True),
    "stereographic -": lambda: hs.Stereographic(-0.7, learnable=True),
    "stereographic 0": lambda: hs.Stereographic(0.0, learnable=True),
    "stereographic tiny": lambda: hs.Stereographic(1e-6, learnable=True),
    "stereographic +": lambda: hs.Stereographic(0.7, learnable=True),
}


def pair_errors(manifold, x, y, distance):
    """Relative errors, pair by pair, of the gradients in x, in y and in kappa."""
    out = []
    for a, b in zip(x, y, strict=True):
        true_x, true_y, true_kappa = oracle.slopes(manifold, a, b)
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        gx, gy, gk = torch.autograd.grad(distance(a, b).sum(), (a, b, manifold.kappa))
        out.append(
            (
                float((gx.double() - true_x).norm() / true_x.norm()),
                float((gy.double() - true_y).norm() / true_y.norm()),
                abs(gk.item() - true_kappa) / max(abs(true_kappa), 1e-6 * float(oracle.distance(manifold, a, b))),
            )
        )
    return np.array(out)


@each_dtype
@pytest.mark.parametrize("kind", ("ordinary", "near", "hard"))
@pytest.mark.parametrize("name", MANIFOLDS)
def test_gradients_in_points_and_curvature(name, kind, dtype):
    manifold = MANIFOLDS[name]()
    generator = torch.Generator().manual_seed(1)
    if kind == "hard":
        x, y = hard_pairs.stored(manifold, np.random.default_rng(3), 12, 3, dtype)
        inner = hard_pairs.promised(manifold, x, y).diagonal()
        d = np.array([float(oracle.distance(manifold, a, b)) for a, b in zip(x, y, strict=True)])
        # the distance is not differentiable in the antipode, and its slope there is not promised
        use = inner & torch.from_numpy((d > 0) & (d * 0.7**0.5 < 3.1))
        x, y = x[use], y[use]
    else:
        size = 4 if name in ("sphere", "hyperboloid") else 3
        x = manifold.projx((torch.randn(6, size, generator=generator, dtype=F64) * 0.25).to(dtype)).detach()
        step = torch.randn(6, size, generator=generator, dtype=F64) * (0.3 if kind == "ordinary" else 1e-4 / size**0.5)
        y = manifold.projx((x.double() + step).to(dtype)).detach()
    # far out on the hyperboloid a near pair leaves 8 of 16 digits of the derivative
    limit = 5e-6 if dtype == F32 else 1e-8 if kind == "hard" else 1e-11
    for precision, impl in (("auto", "reference"), ("auto", "tiled"), ("exact", "auto")):

        def matrix(a, b, p=precision, i=impl):
            return hs.cdist(a[None], b[None], manifold, precision=p, impl=i)

        errors = pair_errors(manifold, x, y, matrix)
        if name == "hyperboloid" and precision == "auto" and dtype == F32:
            # the inner product's -2/kappa^2 and the slopes of two times cancel down to (t_x - t_y)^2: a single pair
            # keeps 4 digits of its slope in kappa
            assert errors[:, 2].max() <= 1e-4
            errors = errors[:, :2]
        assert errors.max() <= limit, f"cdist {precision} {impl}: {errors.max(0)}"
    errors = pair_errors(manifold, x, y, manifold.dist)
    assert errors.max() <= limit, f"dist: {errors.max(0)}"


def test_keys_close_together_keep_their_gradient():
    """The product form's gradient is 18% wrong at keys 1e-4 apart; that of "fast" shows that this test would see it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(20, 8, generator=generator, dtype=F64), dim=-1)
    y = (x + 1e-4 * torch.nn.functional.normalize(torch.randn(20, 8, generator=generator, dtype=F64), dim=-1)).float()
    x = x.float()

    def gradient(a, precision, impl="auto"):
        a = a.clone().requires_grad_()
        d = hs.cdist(a, y.to(a.dtype), hs.Euclidean(), squared=True, precision=precision, impl=impl)
        return torch.autograd.grad(d.diagonal().sum(), a)[0].double()

    true = 2 * (x.double() - y.double())
    for precision, impl in (("auto", "reference"), ("auto", "tiled"), ("exact", "auto")):
        assert ((gradient(x, precision, impl) - true).norm(dim=-1) / true.norm(dim=-1)).max() < 1e-6
    assert ((gradient(x, "fast") - true).norm(dim=-1) / true.norm(dim=-1)).max() > 1e-4


@each_dtype
def test_kappa_of_a_product_and_a_scale(dtype):
    base = hs.Product((hs.PoincareBall(-0.5, learnable=True), 2), (hs.Sphere(2.0, learnable=True), 3))
    manifold = hs.Scaled(base, 0.7, learnable=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, y = (manifold.random(4, 5, dtype=dtype) for _ in range(2))
    parameters = list(manifold.parameters())
    assert len(parameters) == 3
    found = torch.autograd.grad(hs.cdist(x, y, manifold).sum(), parameters)
    h = 1e-6
    for parameter, grad in zip(parameters, found, strict=True):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * h
                ends.append(hs.cdist(x.double(), y.double(), manifold, precision="exact").sum().item())
                parameter -= sign * h
        assert grad.item() == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=2e-6 if dtype == F32 else 1e-7)


def test_second_derivatives_of_a_product():
    manifold = hs.Product((hs.PoincareBall(-0.5, learnable=True), 2), (hs.Sphere(2.0), 3), (hs.Lorentz(), 3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, y = (manifold.random(2, 8, dtype=F64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradgradcheck(
        lambda a, b, *_: hs.cdist(a, b, manifold, squared=True),
        (x, y, *manifold.parameters()),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", MANIFOLDS)
def test_hessian_of_the_squared_distance_at_coincident_points_is_twice_the_metric(name):
    manifold = MANIFOLDS[name]()
    size = 4 if name in ("sphere", "hyperboloid") else 3
    x = manifold.projx(torch.tensor([0.3, -0.2, 0.4, 0.1], dtype=F64)[:size]).detach()
    hessian = torch.autograd.functional.hessian(lambda b: manifold.dist2(x, b), x.clone())
    tangent = manifold.proju(x, torch.eye(size, dtype=F64)).detach()
    metric = manifold.inner(x, tangent[:, None], tangent[None]).detach()
    torch.testing.assert_close(tangent @ hessian @ tangent.mT, 2 * metric, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", MANIFOLDS)
def test_83_vmap_of_grad(name):
    manifold = MANIFOLDS[name]()
    x, y = (
        manifold.projx(torch.randn(3, 4, generator=torch.Generator().manual_seed(i), dtype=F64) * 0.3).detach()
        for i in (0, 1)
    )
    a = x.clone().requires_grad_()
    (plain,) = torch.autograd.grad(manifold.dist(a, y).sum(), a)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(manifold.dist))(x, y), plain)
    mapped = torch.func.vmap(torch.func.grad(lambda p, q: hs.cdist(p[None], q[None], manifold).sum()))(x, y)
    torch.testing.assert_close(mapped, plain)


def test_83_on_two_coordinates():
    x = torch.tensor([[0.1, 0.2], [0.3, -0.1], [0.0, 0.5]], dtype=F64)
    y = x.flip(0)
    found = torch.func.vmap(torch.func.grad(hs.PoincareBall().dist))(x, y)
    assert found.shape == (3, 2)
    assert torch.equal(found[1], torch.zeros(2, dtype=F64))  # the middle point meets itself
    assert found.isfinite().all() and math.isfinite(found[0].norm())

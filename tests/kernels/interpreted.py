"""The cases of all kernels under Triton's interpreter; run by test_triton.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import horosphere as hs
from horosphere.kernels.triton import nearest
from tests.kernels import attention_cases, cases, metric_attention_cases, metric_cases, nearest_cases

# the interpreter computes by numpy, which warns of what points that are no numbers give
no_numbers = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_triton_is_the_reference(case):
    cases.check(case, "triton")


@no_numbers
@pytest.mark.parametrize("case", nearest_cases.CASES, ids=lambda c: c.name)
def test_triton_nearest_is_the_reference(case):
    nearest_cases.check(case, "triton")


@no_numbers
def test_triton_nearest_a_few_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(nearest, "BLOCK", 2000)
    for case in nearest_cases.CASES[-10:]:
        nearest_cases.check(case, "triton")


@pytest.mark.parametrize("case", attention_cases.CASES, ids=lambda c: c.name)
def test_triton_attention_is_the_reference(case):
    attention_cases.check(case, "triton")


@pytest.mark.parametrize("case", metric_cases.CASES, ids=lambda c: c.name)
def test_triton_distances_under_metrics_are_the_reference(case):
    metric_cases.check(case, "triton")


@pytest.mark.parametrize("case", metric_attention_cases.CASES, ids=lambda c: c.name)
def test_triton_attention_under_metrics_is_the_reference(case):
    metric_attention_cases.check(case, "triton")


def test_cdist_by_triton():
    manifold = hs.PoincareBall(-1.0)
    x = (manifold.random(40, 3) * 0.5).requires_grad_()
    by_name = hs.cdist(x, x, manifold, impl="triton")
    torch.testing.assert_close(by_name, hs.cdist(x, x, manifold, precision="exact"), rtol=1e-5, atol=1e-6)
    assert (by_name.diagonal() == 0).all()
    assert torch.autograd.grad(by_name.sum(), x)[0].isfinite().all()


@no_numbers
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_close_and_far_points_by_triton():
    x = torch.randn(70, 3, generator=torch.Generator().manual_seed(0))
    x[:8] *= 1e-30
    x[8:16] *= 1e25
    true = hs.cdist(x, x, hs.Euclidean(), precision="exact")
    for manifold in (hs.Euclidean(), hs.Product((hs.Euclidean(), 1), (hs.Euclidean(), 2))):
        y = x.clone().requires_grad_()
        found = hs.cdist(y, y, manifold, impl="triton")
        torch.testing.assert_close(found, true, rtol=1e-5, atol=0)
        assert torch.autograd.grad(found.sum(), y)[0].isfinite().all()
        near = hs.knn(x, x, manifold, 5, impl="triton")
        torch.testing.assert_close(near.distances, true.sort(dim=-1).values[:, :5], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_knn_by_triton(dtype):
    manifold = hs.Product((hs.PoincareBall(-1.0, learnable=True), 3), (hs.Sphere(1.0), 3))
    x, y = (manifold.random(n, 6, dtype=dtype) for n in (30, 150))
    y[40:50], y[60:70] = x[:10], x[:10]
    by_name, true = (hs.knn(x, y, manifold, 6, impl=i) for i in ("triton", "reference"))
    assert torch.equal(by_name.indices, true.indices) and torch.equal(by_name.distances, true.distances)


def test_attention_under_metrics_by_triton():
    """As a user calls it: two query heads to a key head, one metric of all batch entries."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, s, u = (
        torch.randn(*shape, generator=generator).requires_grad_()
        for shape in ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 4), (2, 7), (2, 7, 3, 1))
    )
    results = []
    for impl in ("triton", "reference"):
        metric = hs.TokenMetric(s.abs() + 0.5, u)
        out = hs.attention.metric_attention(q, k, v, None, metric, end="key", enable_gqa=True, impl=impl)
        results.append((out, *torch.autograd.grad((out**2).sum(), (q, k, v, s, u))))
    for ours, true in zip(*results, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-4)


def coincident_and_close(radius: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Points of the ball at a distance from its centre, and the same in another order, every other one 1e-6 away."""
    generator = torch.Generator().manual_seed(0)
    direction, step = torch.nn.functional.normalize(
        torch.randn(2, 12, 10, generator=generator, dtype=torch.float64), dim=-1
    )
    x = direction * torch.tanh(torch.tensor(radius / 2, dtype=torch.float64))
    step[::2] = 0
    y = x + 1e-6 * step * (1 - (x * x).sum(-1, keepdim=True)) / 2
    return x.to(dtype), y.roll(5, 0).to(dtype)


@pytest.mark.parametrize("radius", (9.0, 11.0))
@pytest.mark.parametrize(
    ("space", "dtype"), [("ball", torch.float64), ("ball", torch.float32), ("hyperboloid", torch.float64)]
)
def test_gradients_of_attention_at_close_pairs_far_out(space, dtype, radius):
    """Sums over j of r_ij x_i - r_ij x_j would cancel there by the square of the conformal factor, 1e7 to 1e9."""
    manifold = (hs.PoincareBall if space == "ball" else hs.Lorentz)(-1.0, learnable=True)
    x, y = coincident_and_close(radius, torch.float64)
    if space == "hyperboloid":
        x, y = (hs.convert(p, hs.PoincareBall(-1.0), manifold).detach() for p in (x, y))
    value, upper = torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    stored = [t.to(dtype) for t in (x, y, value)]
    results = []
    for impl, work in (("triton", dtype), ("reference", torch.float64)):
        leaves = [t.to(work).requires_grad_() for t in stored]
        out = hs.attention.geodesic_attention(*leaves, manifold, eps=1e-2, impl=impl)
        results.append([out, *torch.autograd.grad((out * upper.to(work)).sum(), [*leaves, *manifold.parameters()])])
    of_result, of_gradients = attention_cases.TOLERANCE[dtype]
    for ours, true, limit in zip(*results, [of_result] + [of_gradients] * 4, strict=True):
        assert (ours.double() - true).abs().max() <= limit * true.abs().max()

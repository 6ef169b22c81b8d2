"""The cases of all kernels under Triton's interpreter; run by test_triton.py in a process of its own."""

from __future__ import annotations

import pytest
import torch

import horosphere as hs
from horosphere.kernels.triton import nearest
from tests.kernels import attention_cases, cases, far_out_cases, metric_attention_cases, metric_cases, nearest_cases

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


@pytest.mark.parametrize("case", far_out_cases.CASES, ids=lambda c: c.name)
def test_triton_attention_far_out_is_the_reference(case):
    far_out_cases.check(case, "triton")


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

"""The cases of all kernels under Triton's interpreter; run by test_triton.py in a process of its own."""

from __future__ import annotations

import pytest
import torch

import horosphere as hs
from tests.kernels import attention_cases, cases, metric_attention_cases, metric_cases


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_triton_is_the_reference(case):
    cases.check(case, "triton")


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

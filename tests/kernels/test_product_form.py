"""The arc of a matrix as one node: value, derivatives, and what it does at the ends of its range."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from horosphere.kernels.chord.product_form import arc2
from horosphere.kernels.reference.sqdist import arc2_of

f64 = torch.float64
KAPPAS = {
    "negative": -1.3,
    "positive": 0.7,
    "zero": 0.0,
    "heads": torch.tensor([[[-0.5]], [[-2.0]]], dtype=f64),
    "mixed": torch.tensor([[[-0.5]], [[0.8]]], dtype=f64),
}


@pytest.mark.parametrize("dtype, tolerance", [(f64, 1e-14), (torch.float32, 2e-6)])
@pytest.mark.parametrize("name", KAPPAS)
def test_equals_the_plain_form(name, dtype, tolerance):
    torch.manual_seed(0)
    u = (torch.rand(2, 5, 7, dtype=f64) * 4).to(dtype)
    u[0, 0] = torch.tensor([-1.0, 0.0, 1e-12, 1e-6, 1e-3, 0.1, 4.0])
    kappa = KAPPAS[name]
    wide = kappa if isinstance(kappa, torch.Tensor) else torch.tensor(kappa, dtype=f64)
    torch.testing.assert_close(arc2(u, kappa).to(f64), arc2_of(u.to(f64), wide), rtol=tolerance, atol=0)


def test_far_points_do_not_overflow():
    u = torch.tensor([1e10, 1e25, 1e37])
    right = arc2_of(u.double(), torch.tensor(-1.0, dtype=f64))
    torch.testing.assert_close(arc2(u, -1.0).double(), right, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", KAPPAS)
def test_derivatives(name):
    torch.manual_seed(0)
    kappa = KAPPAS[name]
    kappa = (kappa if isinstance(kappa, torch.Tensor) else torch.tensor(kappa, dtype=f64)).clone().requires_grad_()
    u = (0.05 + 4 * torch.rand(2, 3, 4, dtype=f64)).requires_grad_()
    assert gradcheck(arc2, (u, kappa))
    assert gradgradcheck(arc2, (u, kappa), atol=1e-4)


@pytest.mark.parametrize("kappa", [-1.0, 1.0])
def test_slopes_at_the_ends_are_numbers(kappa):
    u = torch.tensor([-1e-3, 0.0, 4.0, 5.0], requires_grad=True)
    arc2(u, kappa).sum().backward()
    assert u.grad.isfinite().all() and u.grad[:2].tolist() == [0.0, 0.0]

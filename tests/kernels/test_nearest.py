"""Nearest neighbours: the tiled kernel against the plain one, and knn against a sort of all exact distances."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import horosphere as hs
from horosphere.kernels.tiled import nearest as tiled
from tests.kernels import nearest_cases
from tests.manifolds import hard_pairs


@pytest.mark.parametrize("block", (1000, tiled.CPU_BLOCK))
@pytest.mark.parametrize("case", nearest_cases.CASES, ids=lambda c: c.name)
def test_tiled_is_the_reference(case, block, monkeypatch):
    monkeypatch.setattr(tiled, "CPU_BLOCK", block)
    nearest_cases.check(case, "tiled")


def ball(kappa=-1.0):
    return hs.PoincareBall(kappa)


MANIFOLDS = (
    ball,
    lambda: hs.Sphere(0.5),
    lambda: hs.Lorentz(-2.0),
    hs.Euclidean,
    lambda: hs.Stereographic(torch.tensor([-1.0, 0.0])),
    lambda: hs.Product((hs.PoincareBall(-1.0), 3), (hs.Sphere(1.0), 4), (hs.Euclidean(), 2)),
)


@pytest.mark.parametrize("make", MANIFOLDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("impl", ("reference", "tiled"))
def test_knn_is_a_sort_of_exact_distances(make, dtype, impl):
    manifold = make()
    size = manifold.n_elements if isinstance(manifold, hs.Product) else 4
    generator = torch.random.manual_seed(0)
    x, y = (manifold.projx(torch.randn(2, n, size, generator=generator, dtype=dtype) * 0.3) for n in (30, 300))
    y[:, 100:110] = y[:, :10]  # ties
    y[:, 200:230] = x
    true = hs.cdist(x.double(), y.double(), manifold, precision="exact")
    order = true.argsort(dim=-1, stable=True)[..., :7]
    found = hs.knn(x, y, manifold, 7, impl=impl)
    assert torch.equal(found.indices, order)
    torch.testing.assert_close(found.distances.double(), true.gather(-1, order), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("make", MANIFOLDS[:3])
def test_knn_of_hard_pairs(make):
    manifold = make()
    x, y = hard_pairs.stored(manifold, np.random.default_rng(0), 300, 3, torch.float32)
    true = hs.cdist(x.double(), y.double(), manifold, precision="exact")
    found = hs.knn(x, y, manifold, 5, impl="tiled")
    assert torch.equal(true.gather(-1, found.indices), true.sort(dim=-1).values[:, :5])


def test_many_copies_of_one_point_come_in_order_of_index():
    x = torch.zeros(400, 3)
    x[200:] = 0.5
    found = hs.knn(x, x, ball(), 6, impl="tiled").indices
    assert (found[:200] == torch.arange(6)).all() and (found[200:] == 200 + torch.arange(6)).all()


def test_points_without_distance_come_last():
    x = ball().random(300, 2) * 0.5
    y = x.clone()
    y[5] = torch.tensor([1.5, 0.0])
    found = hs.knn(x, y, ball(), 299, impl="tiled")
    assert not (found.indices == 5).any() and found.distances.isfinite().all()


def test_triton_is_refused_with_the_reason():
    x = ball().random(5, 3)
    with pytest.raises(ValueError, match="it runs on GPUs, and the points are on cpu"):
        hs.knn(x, x, ball(), 2, impl="triton")


def test_gradients_are_those_of_the_matrix():
    x = (ball().random(300, 3, dtype=torch.float64) * 0.5).requires_grad_()
    near = hs.knn(x, x, ball(), 4)
    (gradient,) = torch.autograd.grad(near.distances.sum(), x)
    (true,) = torch.autograd.grad(hs.cdist(x, x, ball(), precision="exact").gather(-1, near.indices).sum(), x)
    torch.testing.assert_close(gradient, true, rtol=1e-9, atol=1e-12)


def test_memory_stays_far_below_that_of_the_matrix(peak_mib):
    """12,000 points: the matrix alone would be 549 MiB."""
    setup = "import torch, horosphere as hs; x, ball = torch.rand(12_000, 10) * 0.2, hs.PoincareBall(-1.0)\n"
    assert peak_mib(setup + "hs.knn(x[:300], x[:300], ball, 10)", "hs.knn(x, x, ball, 10)") < 200

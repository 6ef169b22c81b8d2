"""What weight decay acts on."""

import pytest
import torch

import horosphere as hs
from horosphere.optim import RiemannianAdam, RiemannianSGD
from tests.optim.spaces import sparse as sparse_tensor

OPTIMIZERS = [RiemannianAdam, RiemannianSGD]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_curvatures_scales_and_points_are_left_alone(kind):
    """A learned kappa of -1 was pulled to -1e-8 in 20 steps of a zero gradient."""
    ball = hs.PoincareBall(-1.0, learnable=True)
    either = hs.Stereographic(0.5, learnable=True)
    scaled = hs.Scaled(hs.Sphere(), 2.0, learnable=True)
    points = hs.ManifoldParameter(torch.tensor([[0.3, 0.4]]), ball)
    table = hs.ManifoldParameter(torch.tensor([[0.3, 0.4]]), either)
    layer = hs.attention.GeodesicAttention(8, 2, manifold=ball)
    plain = torch.nn.Parameter(torch.ones(3))
    held = [points, table, *ball.parameters(), *either.parameters(), *scaled.parameters(), layer.log_eps]
    before = [p.detach().clone() for p in held]
    optimizer = kind([*held, plain], lr=0.1, weight_decay=1.0)
    for _ in range(20):
        for p in (*held, plain):
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for p, old in zip(held, before, strict=True):
        assert torch.equal(p.detach(), old)
    assert float(plain.detach().max()) < 0.5


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("sparse", [False, True])
def test_points_decay_where_that_is_asked_for(kind, sparse):
    point = hs.ManifoldParameter(torch.tensor([[0.3, 0.4], [0.5, 0.0]]), hs.PoincareBall(-1.0))
    optimizer = kind([{"params": [point], "decay_points": True}], lr=0.1, weight_decay=1.0)
    point.grad = sparse_tensor([0, 1], torch.zeros(2, 2), (2, 2)) if sparse else torch.zeros(2, 2)
    optimizer.step()
    assert bool((point.detach().norm(dim=-1) < torch.tensor([0.5, 0.5])).all())


def test_a_flat_table_with_sparse_gradients_decays_in_its_touched_rows():
    table = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = RiemannianAdam([table], lr=0.1, weight_decay=1.0)
    table.grad = sparse_tensor([1], torch.zeros(1, 2), (3, 2))
    optimizer.step()
    assert torch.equal(table.detach()[[0, 2]], torch.ones(2, 2)) and float(table.detach()[1].max()) < 1.0

"""Experts: sums by hand, capacity, reports, and a balance loss that stays finite."""

import copy

import pytest
import torch
from torch import nn

import horosphere as hs
from horosphere.attention.points import into_manifold
from horosphere.routing import ExpertLayer, balance_loss, load


def layer(experts=4, top_k=2, dim=6, **other):
    torch.manual_seed(0)
    return ExpertLayer(dim, [nn.Linear(dim, 3) for _ in range(experts)], top_k, **other)


@pytest.mark.parametrize("manifold", [None, hs.PoincareBall(), hs.Lorentz(), hs.Euclidean()])
def test_output_by_hand(manifold):
    module = layer(manifold=manifold, capacity_factor=None)
    x = torch.randn(2, 5, 6)
    out = module(x)
    space = module.router.manifold
    for i in range(2):
        for j in range(5):
            point = into_manifold(x[i, j : j + 1], space)[0].double()
            w = torch.stack(
                [1 / (space.dist(point, c.double()) ** 2 + 1e-3) for c in module.router.prototypes.detach()]
            )
            best = w.argsort(descending=True)[:2]
            right = sum(w[e] / w[best].sum() * module.experts[e](x[i, j]).double() for e in best)
            assert torch.allclose(out.output[i, j].double(), right, atol=1e-4)
    assert out.capacity is None and not out.dropped.any() and out.dropped.shape == (2, 5, 2)
    assert out.routing.probabilities.shape == (2, 5, 4) and out.routing.certificate is None


def test_capacity_drops_the_later_and_reports():
    """Fault 59: 8 tokens in one place go to one expert; the report and the loss show it."""
    module = layer(top_k=1, capacity_factor=1.0)
    x = torch.randn(1, 6).expand(8, 6)
    out = module(x)
    expert = int(out.routing.indices[0, 0])
    assert out.capacity == 2
    assert out.dropped[:, 0].tolist() == [False] * 2 + [True] * 6 and torch.equal(out.lost, out.dropped[:, 0])
    assert (out.output[2:] == 0).all() and torch.allclose(out.output[0], module.experts[expert](x[0]), atol=1e-5)
    assert out.load[expert] == 1 and out.load.sum() == 1
    spread = module(module.router.prototypes.detach().repeat(2, 1) * 3)
    assert torch.allclose(spread.load, torch.full((4,), 0.25)) and not spread.dropped.any()
    assert out.balance_loss > 2 > 1.2 > spread.balance_loss > 0.99


def test_a_token_never_loses_its_place_to_a_later_one():
    module = layer(experts=3, capacity_factor=0.5)
    x = torch.randn(12, 6)
    other = torch.cat((x[:-4], torch.randn(4, 6)))
    assert torch.equal(module(x).dropped[:8], module(other).dropped[:8])
    assert module(x).dropped.any()


@pytest.mark.parametrize("training", [False, True])
def test_fewer_tokens_than_experts_are_served(training):
    """Fault 38: a last batch of one token is trained on like any other."""
    module = layer(experts=5).train(training)
    out = module(torch.randn(1, 6))
    assert out.output.shape == (1, 3) and out.output.isfinite().all() and not out.dropped.any()
    out.output.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_58_balance_loss_is_smooth_at_perfect_balance():
    """Fault 58: every load equal, and a router that has learned nothing."""
    probabilities = torch.full((8, 4), 0.25, requires_grad=True)
    loss = balance_loss(probabilities, torch.arange(8).remainder(4).unsqueeze(-1))
    loss.backward()
    assert loss.item() == 1.0 and probabilities.grad.isfinite().all()
    module = layer()
    with torch.no_grad():
        module.router.prototypes.copy_(module.router.prototypes[:1].expand(4, -1))
    module(torch.randn(20, 6)).balance_loss.backward()
    assert module.router.prototypes.grad.isfinite().all()


def test_60_balance_loss_is_of_the_full_distribution():
    """Fault 60: E = 4, k = 2, uniform weights: E sum f p = 1; prototypes that were not chosen have a gradient."""
    probabilities = torch.full((6, 4), 0.25, requires_grad=True)
    indices = torch.tensor([[0, 1]]).expand(6, 2)
    loss = balance_loss(probabilities, indices)
    assert loss.item() == 1.0
    module = layer()
    module(torch.randn(30, 6)).balance_loss.backward()
    assert (module.router.prototypes.grad.norm(dim=-1) > 0).all()


def test_balance_loss_spreads_a_collapsed_router():
    torch.manual_seed(1)
    module = layer(top_k=1, eps=0.1)
    x = torch.randn(200, 6) * 0.3 + torch.randn(6)
    optimizer = hs.optim.RiemannianAdam(hs.optim.param_groups(module.router), lr=0.02)
    first = module(x)
    for _ in range(60):
        optimizer.zero_grad()
        module(x).balance_loss.backward()
        optimizer.step()
    last = module(x)
    assert last.load.max() < first.load.max() and last.balance_loss < first.balance_loss


def test_load_counts_what_is_used():
    indices, weights = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert torch.allclose(load(indices, 3), torch.tensor([0.5, 0.25, 0.25]))
    assert torch.allclose(load(indices, 3, weights), torch.tensor([2 / 3, 0.0, 1 / 3]))


def test_declared_bound_gives_a_certificate():
    class Unit(nn.Linear):
        def forward(self, x):
            return nn.functional.normalize(super().forward(x), dim=-1)

    torch.manual_seed(0)
    experts = [Unit(6, 3) for _ in range(5)]
    module = ExpertLayer(6, experts, 2, output_bound=1.0, capacity_factor=None)
    x = torch.randn(40, 6)
    out = module(x)
    full = sum(out.routing.probabilities[:, e : e + 1] * experts[e](x) for e in range(5))
    assert ((out.output - full).norm(dim=-1) <= out.routing.certificate).all()


def test_copies_and_gradients():
    module = layer()
    x = torch.randn(7, 6, requires_grad=True)
    assert torch.equal(copy.deepcopy(module)(x).output, module(x).output)
    module(x).output.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters()) and x.grad.norm() > 0


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="experts"):
        ExpertLayer(4, [])
    with pytest.raises(ValueError, match="top_k"):
        layer(experts=2, top_k=3)
    for wrong in (0, -1.0):
        with pytest.raises(ValueError, match="capacity"):
            layer(capacity_factor=wrong)
    module = layer()
    for wrong in (torch.randn(3, 5), torch.randn(0, 6), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="x must hold"):
            module(wrong)
    with pytest.raises(ValueError, match="expert must answer"):
        ExpertLayer(6, [nn.Linear(6, 3), nn.Linear(6, 4)], 1, capacity_factor=None)(torch.randn(50, 6))
    with pytest.raises(ValueError, match="routed tokens"):
        balance_loss(torch.zeros(0, 3), torch.zeros(0, 1, dtype=torch.long))

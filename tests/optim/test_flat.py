"""Plain parameters get torch's own update, bit for bit."""

import copy

import pytest
import torch

from horosphere import PoincareBall
from horosphere.optim import RiemannianAdam, RiemannianSGD
from tests.optim.spaces import points

ADAM = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True},
    {"betas": (0.5, 0.9), "eps": 1e-3, "lr": 0.3, "weight_decay": 0.2, "amsgrad": True},
]
SGD = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.2},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.2},
]


def train(optimizer_class, with_points, **settings):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    x, y = torch.randn(20, 5), torch.randn(20, 3)
    parameters = list(net.parameters())
    if with_points:
        p = points(PoincareBall(-1.0))
        parameters.insert(1, p)
    optimizer = optimizer_class(parameters, **settings)
    for step in range(20):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        if with_points:
            loss = loss + p.square().sum()
        loss.backward()
        if step % 3 == 2:
            net[0].bias.grad = None
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [(RiemannianAdam, torch.optim.Adam, s) for s in ADAM] + [(RiemannianSGD, torch.optim.SGD, s) for s in SGD],
)
@pytest.mark.parametrize("with_points", [False, True])
def test_mixed_group_leaves_plain_parameters_to_torch(ours, theirs, settings, with_points):
    net, optimizer = train(ours, with_points, **settings)
    expected, reference = train(theirs, False, **settings)
    for p, q in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)
        ours_state, torch_state = optimizer.state[p], reference.state[q]
        assert ours_state.keys() == torch_state.keys()
        assert all(torch.equal(ours_state[k], torch_state[k]) for k in torch_state)


def test_sparse_plain_gradients_in_sgd_are_torchs():
    results = []
    for optimizer_class in (RiemannianSGD, torch.optim.SGD):
        torch.manual_seed(0)
        table = torch.nn.Embedding(10, 3, sparse=True)
        optimizer = optimizer_class(table.parameters(), lr=0.3)
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.tensor([1, 1, 1, 7])).square().sum().backward()
            optimizer.step()
        results.append(table.weight.detach())
    assert torch.equal(*results)


def test_a_plain_gradient_that_is_not_finite_is_torchs_affair():
    for optimizer_class in (RiemannianAdam, RiemannianSGD):
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.tensor([1.0, float("nan"), 1.0])
        optimizer = optimizer_class([p], lr=0.1)
        optimizer.step()
        assert p.isnan().tolist() == [False, True, False] and optimizer.skipped_rows == 0


def test_torchs_optimizer_state_can_be_taken_over():
    expected, reference = train(torch.optim.Adam, False)
    net, _ = train(torch.optim.Adam, False)
    optimizer = RiemannianAdam(net.parameters())
    state = copy.deepcopy(reference.state_dict())
    state["param_groups"] = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(state)
    for p, q in zip(net.parameters(), expected.parameters(), strict=True):
        p.grad = q.grad = torch.ones_like(p)
    optimizer.step()
    reference.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), expected.parameters(), strict=True))

"""State: checkpoints go on bit for bit, copies are independent, a swapped parameter is named."""

import copy
import io

import pytest
import torch

from horosphere import ManifoldParameter, PoincareBall
from horosphere.optim import param_groups
from tests.optim.spaces import sparse
from tests.optim.test_update import OPTIMIZERS


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.manifold = PoincareBall(-1.0, learnable=True)
        self.dense = ManifoldParameter(0.3 * torch.randn(6, 3), self.manifold)
        self.lazy = ManifoldParameter(0.3 * torch.randn(20, 3), PoincareBall(-0.7))
        self.linear = torch.nn.Linear(3, 3)

    def loss(self):
        distances = self.manifold.dist(self.dense[:, None], self.dense[None])
        return (distances - self.linear(self.dense)[..., :1]).square().mean()


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        model.loss().backward()
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(20, (4,), generator=generator).tolist()
        model.lazy.grad = sparse(rows, torch.randn(4, 3, generator=generator), (20, 3))
        optimizer.step()


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_restored_run_is_bit_equal_to_an_undisturbed_one(kind):
    model = Model()
    optimizer = OPTIMIZERS[kind](param_groups(model))
    train(model, optimizer, range(7))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(7, 15))

    file.seek(0)
    saved = torch.load(file)
    other = Model()
    restored = OPTIMIZERS[kind](param_groups(other))
    other.load_state_dict(saved["model"])
    restored.load_state_dict(saved["optimizer"])
    assert not same(model, other)
    train(other, restored, range(7, 15))
    assert same(model, other)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_deep_copy_goes_on_alone(kind):
    model = Model()
    optimizer = OPTIMIZERS[kind](param_groups(model))
    train(model, optimizer, range(3))
    other, restored = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(3, 6))
    assert not same(model, other)
    train(other, restored, range(3, 6))
    assert same(model, other)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_is_made_when_a_gradient_first_comes(kind):
    model = Model()
    optimizer = OPTIMIZERS[kind](param_groups(model))
    optimizer.step()
    assert not optimizer.state
    train(model, optimizer, range(1))
    assert (len(optimizer.state) == 0) == (kind == "sgd")


def test_second_moment_is_one_number_a_point():
    model = Model()
    optimizer = OPTIMIZERS["adam"](param_groups(model))
    train(model, optimizer, range(1))
    assert optimizer.state[model.dense]["exp_avg_sq"].shape == (6, 1)
    assert optimizer.state[model.lazy]["exp_avg_sq"].shape == (20, 1)


def test_schedulers_and_groups_work_as_in_torch():
    model = Model()
    optimizer = OPTIMIZERS["adam"](param_groups(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, range(1))
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.025, 0.025]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "retraction": True})
    assert [g["retraction"] for g in optimizer.param_groups] == [False, False, True]

"""State dicts of geoopt's and torch's optimizers, loaded into ours."""

import copy

import pytest
import torch

from horosphere import Euclidean, ManifoldParameter, PoincareBall
from horosphere.manifolds._geoopt import geoopt
from horosphere.optim import RiemannianAdam, RiemannianSGD

# (whose, ours, settings)
PAIRS = {
    "geoopt Adam": (geoopt.optim.RiemannianAdam, RiemannianAdam, {"lr": 0.1}),
    "geoopt Adam with amsgrad": (geoopt.optim.RiemannianAdam, RiemannianAdam, {"lr": 0.1, "amsgrad": True}),
    "geoopt SGD": (geoopt.optim.RiemannianSGD, RiemannianSGD, {"lr": 0.1, "momentum": 0.9}),
    "geoopt SGD without momentum": (geoopt.optim.RiemannianSGD, RiemannianSGD, {"lr": 0.1}),
    "torch Adam": (torch.optim.Adam, RiemannianAdam, {"lr": 0.1}),
    "torch SGD": (torch.optim.SGD, RiemannianSGD, {"lr": 0.1, "momentum": 0.9}),
    "torch SGD without momentum": (torch.optim.SGD, RiemannianSGD, {"lr": 0.1}),
}


def gradient(seed, like):
    return torch.randn(like.shape, dtype=like.dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("manifold", [Euclidean(), PoincareBall(-1.0)], ids=["flat", "ball"])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_run_goes_on_where_the_other_optimizer_stopped(pair, manifold):
    """On flat space, where all of them are the same algorithm, the steps that follow are the other one's own."""
    theirs, ours, settings = PAIRS[pair]
    data = 0.3 * gradient(0, torch.empty(5, 3, dtype=torch.float64)).tanh()
    point, plain = (ManifoldParameter(data, manifold), torch.nn.Parameter(data.clone()))
    other = theirs([point, plain], **settings)
    for seed in (1, 2):
        point.grad, plain.grad = gradient(seed, data), gradient(-seed, data)
        other.step()
    kept = point.detach().clone(), plain.detach().clone()
    copies = ManifoldParameter(kept[0], manifold), torch.nn.Parameter(kept[1])
    optimizer = ours(copies, lr=0.7, retraction=True)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 0.1 and optimizer.param_groups[0]["retraction"] is True
    for seed in (3, 4):
        for p, q, sign in ((point, copies[0], 1), (plain, copies[1], -1)):
            p.grad, q.grad = gradient(sign * seed, data), gradient(sign * seed, data)
        other.step()
        optimizer.step()
    assert copies[0].isfinite().all() and optimizer.skipped_rows == 0
    assert not torch.equal(copies[0], kept[0])
    torch.testing.assert_close(copies[1].detach(), plain.detach(), rtol=1e-12, atol=1e-12)
    if isinstance(manifold, Euclidean):
        torch.testing.assert_close(copies[0].detach(), point.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ours", [RiemannianAdam, RiemannianSGD])
def test_a_state_dict_of_our_own_keeps_its_settings(ours):
    point = ManifoldParameter(torch.zeros(2, 2), PoincareBall(-1.0))
    first = ours([point], retraction=True, decay_points=True, stabilize=7)
    second = ours([point])
    second.load_state_dict(first.state_dict())
    group = second.param_groups[0]
    assert group["retraction"] is True and group["decay_points"] is True and group["stabilize"] == 7

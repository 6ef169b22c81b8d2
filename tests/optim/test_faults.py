"""Small inputs on which other optimizers were seen to fail; the number is that of the collected case."""

import copy

import pytest
import torch

from horosphere import Lorentz, ManifoldParameter, PoincareBall, Sphere
from horosphere.manifolds._geoopt import geoopt
from horosphere.optim import RiemannianAdam, RiemannianSGD, clip_grad_norm_
from tests.optim.spaces import on_manifold

OPTIMIZERS = [RiemannianAdam, RiemannianSGD]


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_25_points_stay_inside_a_ball_that_shrinks(optimizer_class):
    """(0.95, 0), c learned from 1 upwards; elsewhere the norm ends above 1/sqrt(c)."""
    manifold = PoincareBall(kappa=-1.0, learnable=True)
    p = ManifoldParameter(torch.tensor([[0.95, 0.0]], dtype=torch.float64), manifold)
    optimizer = optimizer_class([p, manifold.kappa], lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        (manifold.kappa - manifold.dist0(p).sum()).backward()
        optimizer.step()
        assert p.detach().norm() < 1 / (-manifold.kappa.detach()).sqrt()
        assert manifold.dist0(p).isfinite().all()
    assert manifold.kappa.item() < -2


@pytest.mark.parametrize("manifold", [PoincareBall(-1.0), Lorentz(-1.0)], ids=["ball", "lorentz"])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
@pytest.mark.parametrize("lr", [0.5, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("retraction", [False, True])
def test_65_running_away_from_the_origin_stays_finite(manifold, optimizer_class, lr, dtype, retraction):
    start = {2: [0.1, 0.0], 3: [1.005, 0.1, 0.0]}[manifold.ambient_dim(2)]
    p = ManifoldParameter(torch.tensor([start], dtype=dtype), manifold)
    optimizer = optimizer_class([p], lr=lr, retraction=retraction)
    first = manifold.dist0(p).item()
    for _ in range(200):
        optimizer.zero_grad()
        (-manifold.dist0(p)).sum().backward()
        optimizer.step()
        assert p.isfinite().all()
    assert on_manifold(p, 1e-5)
    assert manifold.dist0(p).isfinite().all() and manifold.dist0(p).item() > first + 5
    assert optimizer.skipped_rows == 0


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_67_sparse_rows_are_summed(optimizer_class):
    weights = []
    for is_sparse in (True, False):
        manifold = PoincareBall(-1.0)
        table = torch.nn.Embedding(4, 3, sparse=is_sparse)
        table.weight = ManifoldParameter(0.1 * torch.arange(12.0).reshape(4, 3) / 3, manifold)
        optimizer = optimizer_class(table.parameters(), lr=0.1)
        ids = torch.tensor([1, 1, 2])
        (manifold.dist0(table(ids)) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        assert table.weight.grad.is_sparse == is_sparse
        optimizer.step()
        weights.append(table.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-6)


def test_68_clipping_takes_sparse_gradients():
    torch.manual_seed(0)
    dense, plain = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 1)
    table = torch.nn.Embedding(5, 3, sparse=True)
    table.weight = torch.nn.Parameter(dense.weight.detach().clone())
    unused = torch.nn.Parameter(torch.zeros(2))
    ids = torch.tensor([1, 1, 4])
    norms, gradients = [], []
    for clip, embedding in ((torch.nn.utils.clip_grad_norm_, dense), (clip_grad_norm_, table)):
        plain.zero_grad()
        plain(embedding(ids)).square().sum().mul(10).backward()
        norms.append(clip([embedding.weight, unused, *plain.parameters()], 0.5))
        gradients.append([embedding.weight.grad.to_dense(), plain.weight.grad.clone()])
    assert norms[0] > 0.5
    torch.testing.assert_close(norms[1], norms[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    RiemannianSGD([table.weight], lr=0.1).step()
    before = table.weight.grad.to_dense().clone()
    clip_grad_norm_(table.weight, 100.0)
    assert torch.equal(table.weight.grad.to_dense(), before)
    assert clip_grad_norm_(unused, 1.0) == 0
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm"):
            clip_grad_norm_(unused, bad)


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_69_a_swapped_parameter_is_named(optimizer_class):
    p = ManifoldParameter(torch.zeros(3, 2), PoincareBall(-1.0))
    optimizer = optimizer_class([p], lr=0.1, **({"momentum": 0.9} if optimizer_class is RiemannianSGD else {}))
    p.grad = torch.ones(3, 2)
    optimizer.step()
    optimizer.state_dict()
    optimizer.param_groups[0]["params"][0] = copy.deepcopy(p)
    with pytest.raises(RuntimeError, match=r"shape \(3, 2\).*replaced"):
        optimizer.state_dict()


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_77_a_mixed_group(optimizer_class):
    theirs = {RiemannianAdam: torch.optim.Adam, RiemannianSGD: torch.optim.SGD}[optimizer_class]
    point = ManifoldParameter([[0.5, 0.5]], PoincareBall(-1.0))
    plain, reference = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizers = optimizer_class([point, plain], lr=0.1), theirs([reference], lr=0.1)
    for step in range(5):
        for p in (point, plain, reference):
            p.grad = torch.full_like(p.detach(), 0.3 + step)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(plain, reference)
    assert on_manifold(point, 1e-6)


@pytest.mark.parametrize("manifold", [Sphere(), geoopt.Sphere()], ids=["ours", "geoopt"])
@pytest.mark.parametrize("retraction", [False, True])
def test_79_no_drift_off_the_sphere(manifold, retraction):
    torch.manual_seed(0)
    p = ManifoldParameter(torch.randn(5, 4), manifold)
    optimizer = RiemannianSGD([p], lr=0.05, momentum=0.9, retraction=retraction)
    for _ in range(2000):
        p.grad = torch.randn(5, 4)
        optimizer.step()
    assert ((p.detach().double().norm(dim=-1) - 1).abs() <= 1e-6).all()

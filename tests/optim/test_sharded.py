"""A learned curvature of one dimension, in the layer's type, is taken by torch's sharding of optimizers and layers."""

import warnings

import pytest
import torch
import torch.distributed as dist

import horosphere as hs

with warnings.catch_warnings():  # torch's own, at import
    warnings.simplefilter("ignore")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer


@pytest.fixture
def one_process(tmp_path):
    with warnings.catch_warnings():  # torch's own, about its hooks and collectives
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def layer():
    torch.manual_seed(0)
    ball = hs.PoincareBall(kappa=torch.tensor([-1.0]), learnable=True)
    return hs.attention.GeodesicAttention(16, 2, manifold=ball)


def step(module, optimizer):
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    module(x, x, x, need_weights=False)[0].square().sum().backward()
    optimizer.step()


def test_17_zero_takes_a_curvature_of_one_dimension(one_process):
    plain, sharded = layer(), layer()
    step(plain, hs.optim.RiemannianAdam(plain.parameters(), lr=1e-2))
    optimizer = ZeroRedundancyOptimizer(sharded.parameters(), optimizer_class=hs.optim.RiemannianAdam, lr=1e-2)
    step(sharded, optimizer)
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    assert sharded.manifold.kappa.item() != -1.0


def test_17_fully_shard_takes_a_curvature_of_one_dimension(one_process):
    plain, sharded = layer(), layer()
    step(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    step(sharded, torch.optim.Adam(sharded.parameters(), lr=1e-2))
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(a, b.full_tensor(), msg=name)

"""The layer under torch.compile and on two processes."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import horosphere as hs
from horosphere.attention import GeodesicAttention, TransformerBlock


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_one_graph(fresh_compiler):
    """fullgraph=True, forward and backward, with self-attention (query is key is value) and causal."""
    torch.manual_seed(0)
    ball = hs.PoincareBall(torch.tensor([-0.5, -1.5]), learnable=True)
    block = TransformerBlock(GeodesicAttention(16, 2, manifold=ball, rotary=100.0))
    x = torch.randn(2, 7, 16)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    found, right = (f(x, is_causal=True) for f in (compiled, block))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    names, parameters = zip(*block.named_parameters(), strict=True)
    gradients = (torch.autograd.grad(out.square().sum(), parameters) for out in (found, right))
    for name, a, b in zip(names, *gradients, strict=True):
        assert (a - b).abs().max() <= 1e-3 * (1 + b.abs().max()), name


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script.*:DeprecationWarning")  # of the compiler's own import
def test_the_default_compiler(fresh_compiler):
    """Half a minute, all of it the compilation of generated C++: forward and backward of a layer."""
    torch.manual_seed(0)
    layer = GeodesicAttention(8, 2, manifold=hs.PoincareBall())
    x = torch.randn(2, 5, 8)
    found, right = (f(x, x, x, need_weights=False)[0] for f in (torch.compile(layer, fullgraph=True), layer))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    parameters = [*layer.parameters()]
    gradients = (torch.autograd.grad(out.square().sum(), parameters) for out in (found, right))
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() <= 1e-3 * (1 + b.abs().max())


def test_a_product_with_masks_and_grouped_heads_compiles(fresh_compiler):
    manifold = hs.Product((hs.Lorentz(), 5), (hs.Sphere(), 4))
    layer = GeodesicAttention(16, 2, manifold=manifold, num_kv_heads=1)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, right = (f(x, memory, memory, padding, is_causal=True) for f in (compiled, layer))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def make():
    torch.manual_seed(0)
    ball = hs.PoincareBall(torch.tensor([-0.5, -1.5]), learnable=True)
    return TransformerBlock(GeodesicAttention(16, 2, manifold=ball, num_kv_heads=1))


def batch(rank):
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(rank))


def replica(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        block = make()
        block.attention.calibrate_eps_(batch(rank), is_causal=True)
        calibrated = block.attention.eps.clone()
        model = DistributedDataParallel(block)
        optimizer = hs.optim.RiemannianAdam(hs.optim.param_groups(model), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            model(batch(rank), is_causal=True).square().mean().backward()
            optimizer.step()
        torch.save({"eps": calibrated, "state": block.state_dict()}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_replicas_stay_equal(tmp_path):
    """Slow because two fresh processes import torch: eps of both batches together, and one step's state."""
    mp.spawn(replica, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    right = make().attention.calibrate_eps_(torch.cat((batch(0), batch(1))), is_causal=True).eps
    torch.testing.assert_close(first["eps"], right)
    assert torch.equal(first["eps"], second["eps"])
    assert all(torch.equal(first["state"][key], second["state"][key]) for key in first["state"])
    start = make().state_dict()
    assert all(not torch.equal(first["state"][key], start[key]) for key in start)

"""The tiles of attention: sizes at their borders, the switch of sums, derivatives, compilation and memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import horosphere as hs
from horosphere.attention import geodesic_attention
from horosphere.kernels.tiled import attention, attention_backward, weights
from tests.kernels import attention_cases


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def both(q, k, v, manifold, **arguments):
    """Result, lse and gradients of both forms."""
    found = []
    for impl in ("tiled", "reference"):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = geodesic_attention(*leaves, manifold, impl=impl, return_lse=True, **arguments)
        upper = normal(*out.shape, seed=5, dtype=out.dtype), normal(*lse.shape, seed=6, dtype=lse.dtype)
        if not k.shape[-2]:  # nothing to differentiate
            found.append([out, lse])
            continue
        gradients = torch.autograd.grad((out, lse), leaves, upper, materialize_grads=True, allow_unused=True)
        found.append([out, lse, *gradients])
    return found


@pytest.mark.parametrize("n, m", ((0, 5), (5, 0), (1, 257), (127, 129), (257, 1), (129, 257)))
@pytest.mark.parametrize("causal, short_side", ((False, 64), (True, 64), (False, 32), (True, 32)))
def test_lengths_at_the_borders_of_tiles(n, m, causal, short_side, monkeypatch):
    monkeypatch.setattr(attention, "SIDE", 64)
    monkeypatch.setattr(attention, "SHORT_SIDE", short_side)
    monkeypatch.setattr(attention_backward, "READY", 2)
    monkeypatch.setattr(attention, "tile_size", lambda device: 64 * 64)
    x = hs.PoincareBall(-1.0)
    q, k = (torch.tanh(0.3 * normal(2, r, 4, seed=r)) * 0.45 for r in (n, m))
    ours, true = both(q, k, normal(2, m, 3), x, is_causal=causal)
    if not m:
        assert (ours[0] == 0).all() and (ours[1] == -torch.inf).all()
        return
    torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("threads", (1, 2))
def test_heads_share_tiles(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, k, v = (normal(3, 5, r, 4, seed=r) for r in (40, 50, 50))
        for manifold in (hs.Euclidean(), hs.Stereographic(torch.tensor([-1e-3, 0.0, 0.0, 1e-3, 1e-3]))):
            ours, true = both(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, manifold)
            torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-11)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "weight, power, spread",
    (("inverse", 2.0, 1.0), ("inverse", 2.0, 1e9), ("softmax", 5.0, 1.0), ("gaussian", 1.0, 1.0)),
)
def test_plain_sums_and_running_maximum_meet(weight, power, spread, monkeypatch):
    """Both sides of the switch by moving it; beyond the range of plain sums the maximum is needed."""
    q, k, v = spread * normal(90, 4), spread * normal(600, 4, seed=1), normal(600, 3, seed=2)
    found = []
    for limit in (0.0, 1e3):
        monkeypatch.setitem(weights.PLAIN, torch.float64, limit)
        found.append(both(q, k, v, hs.Euclidean(), weight=weight, power=power, eps=1e-3)[0])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    ours, true = both(q.float(), k.float(), v.float(), hs.Euclidean(), weight=weight, power=20.0, eps=1e-3)
    assert all(t.isfinite().all() for t in ours)
    torch.testing.assert_close(ours[:2], true[:2], rtol=2e-3, atol=1e-4)


def test_large_biases_do_not_overflow():
    q, k, v = (normal(r, 4, seed=r, dtype=torch.float32) for r in (50, 70, 70))
    bias = 100 * normal(50, 70, seed=3, dtype=torch.float32)
    ours, true = both(q, k, v, hs.Euclidean(), attn_mask=bias)
    torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", ((1, 1), (7, 1), (1, 9), (3, 7, 9), (2, 1, 7, 9), (1, 3, 1, 9)))
def test_gradient_of_a_bias_is_summed_over_what_it_was_broadcast_to(shape):
    q, k, v = (normal(2, 3, r, 4, seed=r) for r in (7, 9, 9))
    found = []
    for impl in ("tiled", "reference"):
        bias = normal(*shape, seed=4).requires_grad_()
        out = geodesic_attention(q, k, v, hs.Euclidean(), attn_mask=bias, impl=impl)
        found.append(torch.autograd.grad((out * normal(2, 3, 7, 4, seed=8)).sum(), bias)[0])
    torch.testing.assert_close(*found)


def test_keys_shared_by_heads_get_the_sum_of_their_gradients():
    q, v = normal(2, 3, 40, 4), normal(1, 3, 50, 2, seed=2)
    for shape in ((50, 4), (1, 3, 50, 4), (2, 1, 50, 4)):
        ours, true = both(q, normal(*shape, seed=1), v, hs.PoincareBall(-1e-2))
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("space", ("flat", "ball", "sphere", "hyperboloid"))
def test_gradcheck(space):
    case = attention_cases.Case(space, 3, 4, dtype=torch.float64)
    learned, others = attention_cases.tensors(case, "cpu")
    learned["key"] = (learned["key"].detach() * 0.9).requires_grad_()
    names = list(learned)

    def call(*tensors):
        arguments = {**dict(zip(names, tensors, strict=True)), **others, "impl": "tiled"}
        return geodesic_attention(**arguments, return_lse=True)

    assert torch.autograd.gradcheck(call, tuple(learned.values()), eps=1e-6, atol=1e-6)


def test_second_derivatives_are_those_of_the_plain_form():
    ball = hs.PoincareBall(-1.0, learnable=True)
    found = []
    for impl in ("tiled", "reference"):
        leaves = [(0.3 * normal(r, 3, seed=r)).requires_grad_() for r in (5, 7, 7)]
        leaves.append(torch.tensor(0.2, dtype=torch.float64, requires_grad=True))
        out = geodesic_attention(*leaves[:3], ball, eps=leaves[3], impl=impl)
        every = (*leaves, *ball.parameters())
        first = torch.autograd.grad((out * out).sum(), every, create_graph=True)
        found.append((first, torch.autograd.grad(sum((g * g).sum() for g in first), every)))
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


def test_torch_func_takes_the_reference():
    q, k, v = (normal(3, r, 4, seed=r) for r in (5, 6, 6))
    flat = hs.Euclidean()
    together = torch.func.vmap(lambda a, b, c: geodesic_attention(a, b, c, flat))(q, k, v)
    torch.testing.assert_close(together, geodesic_attention(q, k, v, flat))
    jacobian = torch.func.jacrev(lambda a: geodesic_attention(a, k[0], v[0], flat))(q[0])
    assert jacobian.shape == (5, 4, 5, 4) and jacobian.isfinite().all()
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.vmap(lambda a, b, c: geodesic_attention(a, b, c, flat, impl="tiled"))(q, k, v)


def test_one_graph_with_queries_that_are_keys_and_values():
    ball = hs.PoincareBall(-1.0, learnable=True)
    compiled = torch.compile(
        lambda x, e: geodesic_attention(x, x, x, ball, is_causal=True, eps=e), fullgraph=True, backend="aot_eager"
    )
    x = (0.5 * torch.tanh(normal(2, 40, 3))).requires_grad_()
    eps = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    leaves = (x, eps, *ball.parameters())
    true = geodesic_attention(x, x, x, ball, is_causal=True, eps=eps, impl="reference")
    found = compiled(x, eps)
    torch.testing.assert_close(found, true, rtol=1e-9, atol=1e-11)
    ours, theirs = (torch.autograd.grad((t * t).sum(), leaves) for t in (found, true))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_autocast_changes_nothing():
    q, k, v = (normal(2, 300, 4, seed=s, dtype=torch.float32).requires_grad_() for s in range(3))
    plain = geodesic_attention(q, k, v, hs.Euclidean())
    gradients = torch.autograd.grad(plain.sum(), (q, k, v))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = geodesic_attention(q, k, v, hs.Euclidean())
        again = torch.autograd.grad(inside.sum(), (q, k, v))
    assert torch.equal(plain, inside) and all(map(torch.equal, gradients, again))


def test_meta_and_fake_tensors_have_the_shape_and_type():
    for context, device in ((FakeTensorMode(), "cpu"), (torch.no_grad(), "meta")):
        with context:
            q, k, v = (torch.empty(2, r, w, device=device) for r, w in ((500, 4), (600, 4), (600, 3)))
            out, lse = geodesic_attention(q, k, v, hs.Lorentz(-1.0), return_lse=True, impl="tiled")
            assert out.shape == (2, 500, 3) and lse.shape == (2, 500) and out.device.type == device


def test_dropout_keeps_the_share_it_should_and_forgets_with_the_seed():
    v = torch.eye(200)
    x = normal(200, 3, dtype=torch.float32)
    w = geodesic_attention(x, x, v, hs.Euclidean())
    torch.manual_seed(0)
    once, again = (geodesic_attention(x, x, v, hs.Euclidean(), dropout_p=0.3, impl="tiled") for _ in range(2))
    assert not torch.equal(once, again)
    kept = once != 0
    assert abs(kept.float().mean().item() - 0.7) < 0.01
    torch.testing.assert_close(once[kept], w[kept] / 0.7)


SETUP = """
import torch, horosphere as hs
from horosphere.attention import geodesic_attention
torch.set_num_threads(1)
x = [torch.randn(1, 2, 4096, 32).requires_grad_() for _ in range(3)]
def step(n):
    torch.autograd.grad(geodesic_attention(*(t[:, :, :n] for t in x), hs.Euclidean(), eps=1e-6).sum(), x)
step(1024)
"""
CALL = """
step(4096)
for t in x:
    t.data[:] = 0.3
step(4096)
"""


def test_memory_does_not_grow_like_the_matrix(peak_mib):
    """4,096 tokens: the matrix of one head is 64 MiB, and it would be held several times. Also of equal tokens, all of
    whose pairs are unresolved.
    """
    assert peak_mib(SETUP, CALL) < 48

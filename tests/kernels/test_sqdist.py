"""The tiled distance kernel against the reference, and what cdist makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import horosphere as hs
from horosphere.kernels.tiled import tiles, workspace
from tests.kernels import cases
from tests.manifolds import hard_pairs

BIG = (131, 300)  # over dispatch.SMALL entries, so that "auto" is the tiled form


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_tiled_is_the_reference(case):
    cases.check(case, "tiled")


@pytest.mark.parametrize("size", (1, 64, 4096))
@pytest.mark.parametrize("case", [c for c in cases.CASES if c.n * c.m > 2000 or c.batch], ids=lambda c: c.name)
def test_tiles_of_any_size_give_the_same(case, size, monkeypatch):
    monkeypatch.setattr(tiles, "CPU_TILE", size)
    monkeypatch.setattr(tiles, "GROUP", 16)
    monkeypatch.setattr(tiles, "COLUMNS", 40)
    cases.check(case, "tiled")


@pytest.mark.parametrize("batch, rows, columns", ((1, 5, 7), (4, 3, 130), (2, 300, 1000), (0, 3, 3), (1, 1, 1)))
def test_tiles_cover_the_matrix_once(batch, rows, columns):
    width = tiles.group_width(columns)
    padded = columns + -columns % width
    assert padded - columns < -(-columns // tiles.GROUP)
    for alike in (False, True):
        seen = torch.zeros(batch, rows, padded)
        for e, i, j in tiles.tiles(batch, rows, padded, 1024, width, alike):
            seen[e, i, j] += 1
            assert j.start % width == 0 and (j.stop - j.start) % width == 0
        assert (seen == 1).all()


MANIFOLDS = (
    lambda: hs.PoincareBall(-1.0),
    lambda: hs.Sphere(0.5),
    lambda: hs.Lorentz(-2.0),
    lambda: hs.Stereographic(1e-6),
    lambda: hs.Product((hs.PoincareBall(-1.0), 3), (hs.Sphere(1.0), 4), (hs.Euclidean(), 2)),
)


@pytest.mark.parametrize("make", MANIFOLDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_auto_keeps_the_promise_on_hard_pairs(make, dtype):
    manifold = make()
    x, y = hard_pairs.stored(manifold, np.random.default_rng(0), 200, 3, dtype)
    true = hs.cdist(x.double(), y.double(), manifold, precision="exact")
    covered = hard_pairs.promised(manifold, x, y)
    found = hs.cdist(x, y, manifold, impl="tiled")
    error = ((found.double() - true).abs() / true.clamp(min=1e-300))[covered]
    assert error.max() <= (1e-5 if dtype == torch.float32 else 1e-11)
    assert (hs.cdist(x, x.clone(), manifold, impl="tiled").diagonal() == 0).all()


def test_points_outside_of_the_ball_have_no_distance():
    x = hs.PoincareBall(-1.0).random(200, 2) * 0.5
    y = x.clone()
    y[3] = torch.tensor([1.5, 0.0])
    d = hs.cdist(x, y, hs.PoincareBall(-1.0), impl="tiled")
    assert d[:, 3].isnan().all() and d[:, :3].isfinite().all()
    assert hs.cdist(y, y, hs.PoincareBall(-1.0), impl="tiled")[3, 3].isnan()


@pytest.mark.parametrize("squared", (False, True))
@pytest.mark.parametrize("precision", ("auto", "fast"))
def test_second_derivatives_are_those_of_the_reference(squared, precision):
    torch.manual_seed(0)
    manifold = hs.PoincareBall(-1.0, learnable=True)
    x, y = (manifold.random(n, 3, dtype=torch.float64).detach() * 0.5 for n in (6, 9))
    if precision == "auto":  # in "fast" rounding decides whether equal points are apart, and so the slope of d there
        y[0] = x[0]
    found = []
    for impl in ("tiled", "reference"):
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        d = hs.cdist(a, b, manifold, squared=squared, precision=precision, impl=impl)
        first = torch.autograd.grad((d * d).sum(), (a, b, *manifold.parameters()), create_graph=True)
        found += [first, torch.autograd.grad(sum((g * g).sum() for g in first), (a, b, *manifold.parameters()))]
    for ours, theirs in ((found[0], found[2]), (found[1], found[3])):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_x_against_itself_sums_the_gradients_of_both_sides():
    manifold = hs.PoincareBall(-1.0)
    generator = torch.Generator().manual_seed(0)
    x = (0.3 * torch.randn(300, 3, generator=generator, dtype=torch.float64)).tanh().requires_grad_()
    (both,) = torch.autograd.grad(hs.cdist(x, x, manifold).sum(), x)
    y = x.detach().clone().requires_grad_()
    apart = torch.autograd.grad(hs.cdist(x, y, manifold).sum(), (x, y))
    torch.testing.assert_close(both, sum(apart), rtol=0, atol=1e-11 * float(both.abs().max()))


def test_an_impl_asked_for_by_name_is_used_or_refused():
    manifold = hs.PoincareBall(-1.0)
    x = manifold.random(5, 3)
    with pytest.raises(ValueError, match="impl must be one of"):
        hs.cdist(x, x, manifold, impl="cuda")
    with pytest.raises(ValueError, match="it runs on GPUs"):
        hs.cdist(x, x, manifold, impl="triton")
    with pytest.raises(ValueError, match="precision='exact' works pair by pair"):
        hs.cdist(x, x, manifold, precision="exact", impl="tiled")
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.vmap(lambda a: hs.cdist(a, a, manifold, precision="fast", impl="tiled"))(x[None])


def test_torch_func_takes_the_reference():
    manifold = hs.PoincareBall(-1.0)
    x, y = (manifold.random(3, n, 4, dtype=torch.float64) * 0.5 for n in (4, 5))
    together = torch.func.vmap(lambda a, b: hs.cdist(a, b, manifold))(x, y)
    torch.testing.assert_close(together, hs.cdist(x, y, manifold), rtol=1e-11, atol=0)
    jacobian = torch.func.jacrev(lambda a: hs.cdist(a, y[0], manifold))(x[0])
    assert jacobian.shape == (4, 5, 4, 4) and jacobian.isfinite().all()


@pytest.mark.parametrize("impl", ("auto", "tiled"))
def test_autocast_changes_nothing(impl):
    manifold = hs.PoincareBall(-1.0)
    x, y = (manifold.random(n, 4) * 0.5 for n in BIG)
    plain = hs.cdist(x, y, manifold, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = hs.cdist(x, y, manifold, impl=impl)
    assert inside.dtype == torch.float32 and torch.equal(plain, inside)


def test_meta_and_fake_tensors_have_the_shape_and_type():
    manifold = hs.Lorentz(-1.0)
    for context, device in ((FakeTensorMode(), "cpu"), (torch.no_grad(), "meta")):
        with context:
            x, y = (torch.empty(2, n, 4, device=device) for n in BIG)
            out = hs.cdist(x, y, manifold)
            assert out.shape == (2, *BIG) and out.dtype == torch.float32 and out.device.type == device


def test_one_graph_with_x_against_itself_and_any_number_of_points():
    """Two compilations: the plain form with gradients and dynamic shapes, and the operator asked for by name."""
    manifold = hs.PoincareBall(-1.0)
    plain = torch.compile(lambda a: hs.cdist(a, a, manifold), fullgraph=True, dynamic=True, backend="aot_eager")
    named = torch.compile(
        lambda a: hs.cdist(a, a, manifold, impl="tiled"), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for n in (40, 190):
        x = (manifold.random(n, 3, dtype=torch.float64) * 0.5).requires_grad_()
        apart = ~torch.eye(n, dtype=torch.bool)
        true = hs.cdist(x, x, manifold)
        (gradient,) = torch.autograd.grad(true[apart].sum(), x)
        for compiled in (plain, named):
            found = compiled(x)
            torch.testing.assert_close(found[apart], true[apart], rtol=1e-11, atol=0)
            torch.testing.assert_close(torch.autograd.grad(found[apart].sum(), x)[0], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n, m", ((0, 5), (5, 0), (0, 0)))
def test_no_points(n, m):
    manifold = hs.Product((hs.PoincareBall(-1.0), 3), (hs.Sphere(1.0), 4))
    x, y = (torch.ones(2, k, 7).mul(0.1).requires_grad_() for k in (n, m))
    out = hs.cdist(x, y, manifold, impl="tiled")
    assert out.shape == (2, n, m)
    assert all(
        g.shape == t.shape and (g == 0).all()
        for g, t in zip(torch.autograd.grad(out.sum(), (x, y)), (x, y), strict=True)
    )
    if m:
        assert hs.knn(x, y, manifold, 2, impl="tiled").indices.shape == (2, n, 2)


def test_backward_holds_tiles_beside_the_matrix():
    """Nothing of the matrix's size is kept for the backward pass."""
    manifold = hs.PoincareBall(-1.0)
    x = (manifold.random(600, 3) * 0.5).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        out = hs.cdist(x, x, manifold)
    assert max(saved) < out.numel() / 4


@pytest.mark.parametrize("platform", ("linux", "win32"))
def test_the_hint_for_large_pages_changes_no_value(platform, monkeypatch):
    workspace._madvise.cache_clear()
    monkeypatch.setattr(workspace.sys, "platform", platform)
    try:
        for size in (workspace.SMALLEST // 4 + 1, 10):
            t = workspace.prefer_large(torch.empty(size)).fill_(1.5)
            assert (t == 1.5).all()
    finally:
        workspace._madvise.cache_clear()

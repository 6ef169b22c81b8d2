"""The loops compiled by numba, which serve large float32 matrices on CPUs, on small ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import horosphere as hs
from horosphere.kernels import dispatch
from horosphere.kernels.numba import sqdist_loops as compiled_tiles
from horosphere.kernels.tiled import tiles
from tests.kernels import cases
from tests.manifolds import hard_pairs

SERVED = [c for c in cases.CASES if len(c.parts) == 1 and c.dtype != torch.float64]


@pytest.fixture
def calls(monkeypatch):
    """Every size counts as large; the list grows by one for every tile."""
    made, tile = [], compiled_tiles.tile

    def counted(*arguments):
        made.append(arguments[-1].size)
        return tile(*arguments)

    monkeypatch.setattr(dispatch, "COMPILED", 1)
    monkeypatch.setattr(compiled_tiles, "tile", counted)
    return made


@pytest.mark.parametrize("case", SERVED, ids=lambda c: c.name)
def test_the_loops_are_the_reference(case, calls):
    if isinstance(case.parts[0][1], tuple):  # curvatures of several signs
        with pytest.raises(ValueError, match="curvatures have several signs"):
            cases.check(case, "numba")
        cases.check(case, "auto")
        assert not calls
    else:
        cases.check(case, "numba")
        assert calls


@pytest.mark.parametrize("threads", (1, 3))
def test_small_tiles_and_threads_give_the_same(calls, threads, monkeypatch):
    manifold = hs.Sphere(0.5)
    x = manifold.random(130, 5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    whole = hs.cdist(x, x, manifold, impl="numba")
    assert len(calls) == 1
    monkeypatch.setattr(tiles, "CPU_TILE", 600)
    monkeypatch.setattr(tiles, "COLUMNS", 40)
    assert torch.equal(hs.cdist(x, x, manifold, impl="numba"), whole)
    assert len(calls) > 30


@pytest.mark.parametrize(
    "manifold", (hs.PoincareBall(-1.0), hs.Sphere(0.5), hs.Lorentz(-2.0), hs.Stereographic(1e-6), hs.Euclidean())
)
def test_the_promise_holds_on_hard_pairs(manifold, calls):
    x, y = hard_pairs.stored(manifold, np.random.default_rng(0), 200, 3, torch.float32)
    true = hs.cdist(x.double(), y.double(), manifold, precision="exact")
    found = hs.cdist(x, y, manifold)  # by numba's loops, but for tiles where squares leave their range
    error = (found.double() - true).abs() / true.clamp(min=1e-300)
    assert error[hard_pairs.promised(manifold, x, y)].max() <= 1e-5
    assert (hs.cdist(x, x.clone(), manifold, impl="numba").diagonal() == 0).all()
    assert calls


def test_equal_points_are_all_unresolved(calls):
    x = torch.full((40, 3), 0.25)
    assert (hs.cdist(x, x, hs.PoincareBall(-1.0), impl="numba") == 0).all()
    assert calls == [tiles.CPU_TILE]


def test_what_may_overflow_is_left_to_torch(calls):
    ball = hs.PoincareBall(-1.0)
    x = ball.random(50, 2) * 0.5
    x[3] = torch.tensor([1.5, 0.0])
    with pytest.raises(ValueError, match="squares leave the range of float32"):
        hs.cdist(x, x, ball, impl="numba", precision="fast")
    d = hs.cdist(x, x, ball, precision="fast")
    assert d[3].isnan().all() and d[0, :3].isfinite().all()
    assert not calls


def test_scalar_functions():
    t = np.concatenate([np.zeros(1), np.logspace(-37, 18, 20_000)]).astype(np.float32)
    arcosh, arccos = (np.array([f(v) for v in t]) for f in (compiled_tiles.hyperbolic, compiled_tiles.spherical))
    wide = t.astype(np.float64)
    true = np.log1p(wide + np.sqrt(wide * (wide + 2)))
    np.testing.assert_allclose(arcosh, true, rtol=4e-7)
    turn = t <= 2
    np.testing.assert_allclose(arccos[turn], 2 * np.arcsin(np.sqrt(wide[turn] / 2)), rtol=4e-7)
    assert abs(compiled_tiles.spherical(np.float32(2)) - math.pi) < 3e-7


def test_a_compiled_matrix_takes_the_loops(calls):
    ball = hs.PoincareBall(-1.0)
    x = (ball.random(40, 3) * 0.5).requires_grad_()
    step = torch.compile(lambda a: hs.cdist(a, a, ball, squared=True), fullgraph=True, backend="aot_eager")
    found = step(x)
    expected = hs.cdist(x, x, ball, precision="fast", impl="reference", squared=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    weights = torch.rand(40, 40, generator=torch.Generator().manual_seed(0)) * (1 - torch.eye(40))
    torch.testing.assert_close(
        *(torch.autograd.grad((d * weights).sum(), x)[0] for d in (found, expected)), rtol=1e-4, atol=1e-5
    )
    assert calls

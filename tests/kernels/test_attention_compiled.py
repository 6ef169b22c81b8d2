"""Attention in loops compiled by numba, which serve long float32 sequences on CPUs, on short ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

import horosphere as hs
from horosphere.attention import geodesic_attention
from horosphere.kernels import dispatch
from horosphere.kernels.numba import attention as compiled_attention
from tests.kernels import attention_cases

SPACES = {"flat": hs.Euclidean(), "ball": hs.PoincareBall(-1.3), "sphere": hs.Sphere(0.8)}


@pytest.fixture
def calls(monkeypatch):
    """Every size counts as long, tiles are small; the list gets "forward" or "backward" for every group served."""
    made = []

    def counted(name):
        method = getattr(compiled_attention.CompiledGroup, name)

        def call(*arguments):
            made.append(name)
            return method(*arguments)

        return call

    monkeypatch.setattr(dispatch, "COMPILED", 1)
    monkeypatch.setattr(compiled_attention, "HEIGHT", 16)
    monkeypatch.setattr(compiled_attention, "SIDE", 32)
    for name in ("forward", "backward"):
        monkeypatch.setattr(compiled_attention.CompiledGroup, name, counted(name))
    return made


@pytest.fixture(params=(1, 2, 3))
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def points(space, *shape, seed=0, spread=0.5):
    x = spread * normal(*shape, seed=seed)
    return {"flat": x, "ball": SPACES["ball"].expmap0(x), "sphere": SPACES["sphere"].projx(x)}[space].float()


def errors(tensors, manifold, eps=1e-2, **arguments):
    """Largest errors of out, lse and gradients by the tensors and eps, relative to the largest entries."""
    found = []
    for impl, dtype in (("numba", torch.float32), ("reference", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        leaves.append(torch.as_tensor(eps, dtype=torch.float64).requires_grad_())
        out, lse = geodesic_attention(*leaves[:3], manifold, eps=leaves[3], impl=impl, return_lse=True, **arguments)
        upper = [normal(*t.shape, seed=7).to(dtype) for t in (out, lse)]
        seen = torch.where(lse == -torch.inf, 0.0, lse)
        found.append([out, seen, *torch.autograd.grad((out, seen), leaves, upper)])
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("case", attention_cases.CASES, ids=lambda c: c.name)
def test_the_loops_are_the_reference(case, calls):
    """Those of the cases that are served; all learn power or curvature, whose gradients tiles take."""
    served = case.space in ("flat", "ball", "sphere", "signs") and case.dtype != torch.float64 and not case.dropout
    served = served and case.weight == "inverse" and case.power == 1.0 and case.mask in (None, "causal", "lower right")
    if not served:
        with pytest.raises(ValueError, match="impl='numba' cannot serve this call: its loops"):
            attention_cases.check(case, "numba")
        attention_cases.check(case, "auto")
        assert not calls
        return
    attention_cases.check(case, "numba")
    assert bool(calls) == (case.n > 0 and case.m > 0)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("causal", (False, True))
def test_gradients_over_heads_blocks_and_threads(space, causal, calls, threads):
    eps = torch.tensor([0.1, 0.02, 0.5])
    for n, m in ((50, 75), (75, 50), (1, 33)):
        tensors = points(space, 2, 3, n, 5), points(space, 2, 3, m, 5, seed=1), normal(2, 3, m, 4, seed=2)
        assert max(errors(tensors, SPACES[space], eps, is_causal=causal)) < 3e-5
    assert calls.count("backward") == calls.count("forward") >= 3


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("causal", (False, True))
def test_threads_share_the_rows_of_one_head(space, causal, calls, threads):
    tensors = points(space, 150, 5), points(space, 170, 5, seed=1), normal(170, 4, seed=2)
    *found, of_eps = errors(tensors, SPACES[space], is_causal=causal)
    assert max(found) < 3e-5 and of_eps < 1e-3  # one number, in which most cancels
    assert calls.count("backward") == 1


@pytest.mark.parametrize("space", SPACES)
def test_what_heads_share_gets_the_sum_of_their_gradients(space, calls, threads):
    for keys, values in (((1, 3), (2, 1)), ((1, 1), (1, 1)), ((2, 1), (2, 3))):
        tensors = points(space, 2, 3, 40, 5), points(space, *keys, 70, 5, seed=1), normal(*values, 70, 4, seed=2)
        assert max(errors(tensors, SPACES[space])) < 3e-5
    assert calls


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("eps", (1e-6, 1e-12))
def test_equal_and_near_pairs(space, eps, calls):
    for spread in (0.3, 1.5):  # on the ball up to the rim
        q, k = points(space, 2, 60, 6, spread=spread), points(space, 2, 90, 6, seed=1, spread=spread)
        near = q[:, :30] + 1e-4 * normal(2, 30, 6, seed=3) if space == "sphere" else q[:, :30] * (1 - 1e-4)
        k[:, :30], k[:, 30:60] = q[:, :30], near
        found = errors((q, k, normal(2, 90, 4, seed=2)), SPACES[space], eps)
        # features on the sphere are rounded before they are compared
        assert max(found[:2]) < 1e-5 and max(found[2:]) < (2e-3 if space == "sphere" else 1e-5)
    assert "backward" in calls


def test_antipodes_have_gradient_0(calls):
    q = points("sphere", 20, 5)
    leaves = [q.clone().requires_grad_(), (-q[:1]).requires_grad_(), normal(1, 4, seed=2).float()]
    lse = geodesic_attention(*leaves, SPACES["sphere"], impl="numba", return_lse=True)[1]
    gradients = torch.autograd.grad(lse.sum(), leaves[:2])
    assert (gradients[0][0] == 0).all() and all(g.isfinite().all() and g.abs().amax() > 0.1 for g in gradients)
    assert "backward" in calls


def test_gradients_of_retrieval(calls):
    """Keys from N(0, I_64), of which a query equals one, eps far below what a product in float32 resolves."""
    k = normal(400, 64, seed=1).float()
    assert max(errors((k[:50], k, normal(400, 3, seed=2)), hs.Euclidean(), 1e-6)[:5]) < 1e-5
    assert "backward" in calls


def test_rows_that_see_nothing_give_and_take_nothing(calls):
    q, k, v = points("ball", 70, 5), points("ball", 40, 5, seed=1), normal(40, 4, seed=2)
    with pytest.warns(UserWarning):
        mask = causal_lower_right(70, 40)
    assert max(errors((q, k, v), SPACES["ball"], attn_mask=mask)) < 3e-5
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    out, lse = geodesic_attention(*leaves, SPACES["ball"], attn_mask=mask, impl="numba", return_lse=True)
    (gradient, *_) = torch.autograd.grad(out.sum(), leaves)
    assert (out[:30] == 0).all() and (lse[:30] == -torch.inf).all() and (gradient[:30] == 0).all()
    assert lse[30:].isfinite().all() and calls.count("backward") == 2


def test_points_outside_of_the_ball_have_no_result(calls):
    q, k, v = points("ball", 40, 5), points("ball", 70, 5, seed=1), normal(70, 4, seed=2).float()
    q[3] = 2.0
    with pytest.raises(ValueError, match="leave the range of float32"):
        geodesic_attention(q, k, v, SPACES["ball"], impl="numba")
    out = geodesic_attention(q, k, v, SPACES["ball"])
    assert out[3].isnan().all() and out[torch.arange(40) != 3].isfinite().all()
    assert not calls  # nothing bounds their distances


def test_torch_serves_where_its_library_does_not_offer_what_the_loops_need(calls, monkeypatch):
    tensors = points("ball", 40, 5), points("ball", 70, 5, seed=1), normal(70, 4, seed=2).float()
    ours = geodesic_attention(*tensors, SPACES["ball"], impl="numba")
    assert calls == ["forward"]
    monkeypatch.setattr(dispatch, "libtorch", lambda: None)
    torch.testing.assert_close(geodesic_attention(*tensors, SPACES["ball"]), ours)
    with pytest.raises(ValueError, match="does not offer its threads"):
        geodesic_attention(*tensors, SPACES["ball"], impl="numba")
    assert calls == ["forward"]


def test_values_of_no_numbers(calls):
    leaves = [points("flat", n, 5).requires_grad_() for n in (20, 30)]
    out, lse = geodesic_attention(*leaves, torch.zeros(30, 0), hs.Euclidean(), return_lse=True)
    assert out.shape == (20, 0) and not calls
    assert all(g.isfinite().all() for g in torch.autograd.grad(lse.sum(), leaves))


def test_memory_is_lent_to_one_call_at_a_time(calls):
    """Also where it was made under inference mode."""
    sets = [[normal(3, n, 5, seed=s + n) for n in (50, 60, 60)] for s in range(8)]

    def step(tensors):
        leaves = [t.float().requires_grad_() for t in tensors]
        return torch.autograd.grad(geodesic_attention(*leaves, hs.Euclidean(), impl="numba").sum(), leaves)

    with torch.inference_mode():
        geodesic_attention(*(t.float() for t in sets[0]), hs.Euclidean(), impl="numba")
    alone = [step(s) for s in sets]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(step, sets * 4))
    for found, true in zip(together, alone * 4, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, true, strict=True))

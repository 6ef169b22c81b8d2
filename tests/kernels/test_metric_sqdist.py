"""Distances under per-token metrics: the formula pair by pair, gradients, memory, near pairs."""

import mpmath
import numpy as np
import pytest
import torch

import horosphere as hs

ENDS = ("query", "key", "mean")
SHAPES = (((), 1, 1, 3, 1), ((), 17, 63, 5, 2), ((2, 3), 40, 17, 4, 3), ((), 300, 270, 8, 4), ((3,), 129, 5, 2, 0))


def inputs(batch, n, m, d, r, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*batch, *shape, generator=generator, dtype=torch.float64).to(dtype)

    return [draw(n, d), draw(m, d), draw(n).abs() + 0.5, draw(n, d, r), draw(m).abs() + 0.5, draw(m, d, r)]


def distance(q, k, sq, uq, sk, uk, **options):
    return hs.metric_sqdist(q, k, hs.TokenMetric(sq, uq), hs.TokenMetric(sk, uk), **options)


def by_definition(q, k, sq, uq, sk, uk, end):
    """delta^T G delta with dense matrices: (N, M, D) exists here."""
    delta = (q.unsqueeze(-2) - k.unsqueeze(-3)).double()
    gq, gk = (hs.TokenMetric(s.double(), u.double()).dense() for s, u in ((sq, uq), (sk, uk)))
    at_q = torch.einsum("...nmd,...nde,...nme->...nm", delta, gq, delta)
    at_k = torch.einsum("...nmd,...mde,...nme->...nm", delta, gk, delta)
    return {"query": at_q, "key": at_k, "mean": (at_q + at_k) / 2}[end]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("impl", ("auto", "reference", "tiled"))
def test_value_and_every_gradient(shape, end, impl):
    leaves = [t.requires_grad_() for t in inputs(*shape)]
    found, true = distance(*leaves, end=end, impl=impl), by_definition(*leaves, end)
    torch.testing.assert_close(found, true, rtol=1e-11, atol=1e-12)
    upper = torch.randn(true.shape, generator=torch.Generator().manual_seed(1), dtype=true.dtype)
    ours = torch.autograd.grad(found, leaves, upper, allow_unused=True)
    theirs = torch.autograd.grad(true, leaves, upper, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        a, b = (torch.zeros(()).double() if t is None or not t.numel() else t for t in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("precision, tolerance", (("auto", 2e-6), ("fast", 1e-4)))
def test_float32(end, precision, tolerance):
    tensors = inputs((2,), 50, 60, 16, 4, torch.float32)
    found, true = distance(*tensors, end=end, precision=precision), by_definition(*tensors, end)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), true, rtol=tolerance, atol=0)


@pytest.mark.parametrize("ratio", (1e-3, 1.0, 1e3))
def test_near_pairs_against_mpmath(ratio):
    """Points 1e-6 apart of their length, and across a long column: float32 as stored."""
    generator = torch.Generator().manual_seed(2)
    d = 6
    q = torch.randn(1, d, generator=generator) * 5
    u = torch.randn(1, d, 2, generator=generator) * ratio
    beside = torch.linalg.qr(u[0])[0] if ratio > 1 else torch.zeros(d, 2)
    step = torch.randn(8, d, generator=generator)
    step = step - (step @ beside) @ beside.T
    k = q + step * torch.logspace(-6, 0, 8)[:, None]
    s = torch.ones(1)
    sk, uk = torch.full((8,), 2.0), torch.randn(8, d, 2, generator=generator)
    found = distance(q, k, s, u, sk, uk)[0]
    with mpmath.workdps(40):
        for j in range(8):
            delta = mpmath.matrix(q[0].double().tolist()) - mpmath.matrix(k[j].double().tolist())
            square = (delta.T * delta)[0]
            terms = [mpmath.matrix(t.double().tolist()).T * delta for t in (u[0], uk[j])]
            true = (mpmath.mpf(5) * square + sum((t.T * t)[0] for t in terms)) / 2
            assert abs(found[j].item() / float(true) - 1) <= 1e-5, (j, found[j].item(), float(true))


def test_34_the_mean_of_both_ends_is_symmetric_and_zero_at_coincidence():
    """Fault 34."""
    q, _, s, u, *_ = inputs((), 70, 1, 5, 2, torch.float32)
    g = hs.TokenMetric(s, u)
    d2 = hs.metric_sqdist(q, q, g, g)
    assert torch.equal(d2, d2.T) and (d2.diagonal() == 0).all()
    one_end = hs.metric_sqdist(q, q, g, None, end="query")
    assert (one_end.diagonal() == 0).all() and (one_end - one_end.T).abs().max() > 1


def test_it_is_no_metric():
    x, s = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([10.0, 1.0, 10.0])
    g = hs.TokenMetric(s, torch.zeros(3, 1, 0))
    d = hs.metric_sqdist(x, x, g, g).sqrt()
    assert d[0, 2].item() == pytest.approx(20.0) and (d[0, 1] + d[1, 2]).item() == pytest.approx(14.2126704)


def test_without_columns_it_is_flat_and_a_shared_metric_is_its_chord():
    q, k, _, u, *_ = inputs((), 40, 50, 6, 3, torch.float32)
    flat = [hs.TokenMetric(torch.ones(n), torch.zeros(n, 6, 0)) for n in (40, 50)]
    squares = hs.cdist(q, k, hs.Euclidean(), squared=True)
    for end in ENDS:
        torch.testing.assert_close(hs.metric_sqdist(q, k, *flat, end=end), squares)
    shared = hs.LowRankMetric(0.5, u[0])
    alike = [hs.TokenMetric(torch.full((n,), 0.5), u[0].expand(n, 6, 3)) for n in (40, 50)]
    chord = hs.cdist(q, k, shared, squared=True)
    for end in ENDS:
        torch.testing.assert_close(hs.metric_sqdist(q, k, *alike, end=end), chord)


def test_ranks():
    """At most D + 2 for a shared metric, (D + 1)(D + 2)/2 for one end, (D + 1)(D + 2) for the mean of both."""
    tensors = inputs((), 256, 256, 8, 2, seed=3)
    shared = [*tensors[:2], *(t[:1].expand(256, *t.shape[1:]) for t in tensors[2:])]
    shared[4:] = shared[2:4]
    ranks = [
        int(torch.linalg.matrix_rank(distance(*t, end=end), rtol=1e-6))
        for t, end in ((shared, "mean"), (tensors, "query"), (tensors, "mean"))
    ]
    assert ranks == [10, 45, 90]
    # the weights of attention are no such thing
    assert int(torch.linalg.matrix_rank(1 / (distance(*shared) + 1e-3), rtol=1e-6)) >= 255


def test_second_derivatives():
    leaves = [t.requires_grad_() for t in inputs((), 3, 2, 2, 1)]
    assert torch.autograd.gradgradcheck(lambda *t: distance(*t, impl="tiled"), leaves)


def test_memory_is_that_of_the_matrix():
    """Neither (N, M, R) nor (N, M, D), forward or backward."""
    leaves = [t.requires_grad_() for t in inputs((), 400, 500, 16, 8)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        out = distance(*leaves)
    assert max(saved) < out.numel() / 2
    with torch.profiler.profile(profile_memory=True) as profile:
        distance(*leaves).sum().backward()
    largest = max(e.self_cpu_memory_usage for e in profile.events())
    assert largest <= 8 * 2**18 * 3 * 1.1  # the three buffers of a tile; the matrix itself is 1.6 MB


def test_in_one_graph_and_half_precision():
    leaves = [t.requires_grad_() for t in inputs((2,), 9, 8, 4, 2, torch.float32)]
    compiled = torch.compile(distance, fullgraph=True, backend="aot_eager")(*leaves)
    eager = distance(*leaves)
    torch.testing.assert_close(compiled, eager)
    for a, b in zip(torch.autograd.grad(compiled.sum(), leaves), torch.autograd.grad(eager.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)
    half = distance(*(t.bfloat16() for t in leaves))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), distance(*(t.bfloat16().float() for t in leaves)), rtol=5e-3, atol=0)


@pytest.mark.parametrize("n, m", ((0, 5), (5, 0)))
def test_no_points(n, m):
    leaves = [t.requires_grad_() for t in inputs((2,), n, m, 3, 2)]
    out = distance(*leaves)
    assert out.shape == (2, n, m)
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize(
    "change, error, word",
    (
        ({"end": "both"}, ValueError, "end must be one of"),
        ({"precision": "high"}, ValueError, "precision"),
        ({"impl": "triton"}, ValueError, "triton"),
        ({"g_q": None}, TypeError, "g_q must be a TokenMetric"),
        ({"g_k": hs.TokenMetric(torch.ones(3), torch.ones(3, 4, 1))}, ValueError, "g_k has shape"),
        ({"g_q": hs.TokenMetric(torch.ones(5), torch.ones(5, 3, 1))}, ValueError, "dimension 4"),
        ({"k": torch.ones(6, 3), "g_k": hs.TokenMetric(torch.ones(6), torch.ones(6, 3, 1))}, ValueError, "one size"),
        ({"q": torch.ones(4)}, ValueError, "rows"),
        ({"q": torch.ones(2, 5, 4), "k": torch.ones(3, 6, 4)}, ValueError, "do not broadcast"),
    ),
)
def test_bad_input_is_named(change, error, word):
    metrics = [hs.TokenMetric(torch.ones(n), torch.ones(n, 4, 2)) for n in (5, 6)]
    good = {"q": torch.ones(5, 4), "k": torch.ones(6, 4), "g_q": metrics[0], "g_k": metrics[1]}
    with pytest.raises(error, match=word):
        hs.metric_sqdist(**(good | change))
    assert np.isfinite(hs.metric_sqdist(**good).numpy()).all()

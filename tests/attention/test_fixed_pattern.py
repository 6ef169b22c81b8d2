"""The fixed pattern: its key set, dense attention with its mask, decoding, gradients."""

import itertools
import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import horosphere as hs
from horosphere.attention.patterns.fixed import fixed_pattern_attention, fixed_pattern_mask, pattern_of
from horosphere.kernels import pattern as sums
from tests.attention.spaces import SPACES, f64, of_head, tokens, weight


def key_set(i, n, n_max, w, g, causal):
    """MATHS as it stands: the keys of position i in a sequence of n."""
    keys = {j for j in range(n) if abs(i - j) <= w} | {i}
    keys |= {math.floor(t * n_max / g) for t in range(g)}
    for k in range(64):
        keys |= {i + 2**k, i - 2**k}
    return {j for j in keys if 0 <= j < n and not (causal and j > i)}


def naive(query, key, value, manifold, sees, eps=1e-3, power=1.0, mask=None):
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=f64)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            m = of_head(manifold, h)
            for i, q in enumerate(query[b, h]):
                keys = [j for j in range(key.shape[-2]) if sees[i, j] and (mask is None or mask[b, h, j])]
                if keys:
                    w = weight(m, q, key[b, h, keys], eps, power)
                    out[b, h, i] = (w / w.sum()) @ value[b, h, keys]
    return out


@pytest.fixture(params=["sums", "gathered"])
def form(request, monkeypatch):
    """Both forms at sizes where only one would be taken, the first in several blocks of rows."""
    few = 0 if request.param == "sums" else 10**9
    monkeypatch.setattr("horosphere.attention.patterns.fixed.FEW_PAIRS", few)
    return request.param


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "n, n_max, w, g",
    [(1, 1, 1, 1), (2, 3, 0, 0), (30, 40, 2, 0), (17, 17, 2, 3), (50, 64, 3, 7), (40, 100, 8, 40), (9, 9, 20, 20)],
)
def test_the_key_set(n, n_max, w, g, causal):
    mask = fixed_pattern_mask(n, n, n_max=n_max, window=w, global_keys=g, is_causal=causal)
    for i in range(n):
        assert set(mask[i].nonzero().flatten().tolist()) == key_set(i, n, n_max, w, g, causal)


def test_each_key_counts_once_and_a_query_sees_few():
    for n_max in (1, 2, 100, 1000, 5000):
        pattern = pattern_of(n_max)
        log = max(1, math.ceil(math.log2(n_max)))
        assert pattern.columns <= (2 * log + 1) + log + 2 * (log + 1) + 1
        at, valid = sums.keys_of(pattern, 0, min(n_max, 300), n_max, torch.device("cpu"))
        for row, good in zip(at, valid, strict=True):
            seen = row[good].tolist()
            assert len(seen) == len(set(seen))


def test_defaults_are_logarithms_of_the_longest_sequence():
    assert pattern_of(1000) == pattern_of(1000, window=10, global_keys=10)
    assert pattern_of(1024).band == (-10, 10) and pattern_of(1025, is_causal=True).band == (-11, 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SPACES)
def test_equals_dense_attention_with_the_mask_of_the_pattern(name, causal, form):
    manifold = SPACES[name]()
    given = tokens(manifold, 36, batch=(1, 2))
    options = {"n_max": 50, "window": 2, "global_keys": 3, "is_causal": causal}
    mask = fixed_pattern_mask(36, 36, **options)
    out = fixed_pattern_attention(*given, manifold, eps=0.02, power=1.5, **options)
    right = naive(*given, manifold, mask, eps=0.02, power=1.5)
    torch.testing.assert_close(out, right, rtol=1e-9, atol=1e-10)
    dense = hs.attention.geodesic_attention(*given, manifold, eps=0.02, power=1.5, attn_mask=mask)
    torch.testing.assert_close(out, dense, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_take_no_part_leave_no_trace(causal, form):
    manifold = hs.Sphere()
    query, key, value = tokens(manifold, 40, batch=(2, 2))
    mask = torch.rand(2, 2, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[1] = False
    mask[0, 0, :5] = False
    key = torch.where(mask[..., None], key, torch.nan).requires_grad_()
    value = torch.where(mask[..., None], value, torch.nan).requires_grad_()
    out = fixed_pattern_attention(query, key, value, manifold, is_causal=causal, key_mask=mask)
    right = naive(query, key, value, manifold, fixed_pattern_mask(40, 40, is_causal=causal), mask=mask)
    torch.testing.assert_close(out, right, rtol=1e-9, atol=1e-10)
    assert out[1].abs().max() == 0
    out.sum().backward()
    assert key.grad.isfinite().all() and value.grad.isfinite().all() and value.grad[~mask].abs().max() == 0


@pytest.mark.parametrize("name", ["euclidean", "heads", "only dist"])
def test_decoding_position_by_position_equals_the_parallel_form(name, form):
    manifold = SPACES[name]()
    query, key, value = tokens(manifold, 45, batch=(1, 2))
    whole = fixed_pattern_attention(query, key, value, manifold, n_max=64, is_causal=True)
    for cuts in (list(range(46)), [0, 7, 8, 31, 45]):
        outs = []
        for a, b in itertools.pairwise(cuts):
            held = (query[..., a:b, :], key[..., :b, :], value[..., :b, :])
            outs.append(fixed_pattern_attention(*held, manifold, n_max=64, is_causal=True, offset=a))
        torch.testing.assert_close(torch.cat(outs, -2), whole, rtol=1e-9, atol=1e-10)


def test_the_future_moves_nothing(form):
    manifold = hs.PoincareBall()
    query, key, value = tokens(manifold, 80)
    before = fixed_pattern_attention(query, key, value, manifold, is_causal=True)
    for t in (query, key, value):
        t[..., 60:, :] = t[..., 60:, :].flip(-2)
    after = fixed_pattern_attention(query, key, value, manifold, is_causal=True)
    torch.testing.assert_close(after[..., :60, :], before[..., :60, :], rtol=0, atol=1e-14)
    assert (after[..., 60:, :] - before[..., 60:, :]).abs().max() > 1e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("start, n, m", [(0, 40, 40), (5, 7, 12), (40, 1, 41)])
def test_the_sums_are_each_others_derivatives(start, n, m, causal):
    pattern = pattern_of(64, window=2, global_keys=3, is_causal=causal)
    torch.manual_seed(0)
    x, y = (torch.randn(2, k, 3, dtype=f64, requires_grad=True) for k in (n, m))
    at, valid = sums.keys_of(pattern, start, n, m, torch.device("cpu"))
    w = torch.randn(2, n, pattern.columns, dtype=f64, requires_grad=True)

    def dots(x, y):
        return sums.dots(x, y, pattern, start) * valid

    def gather(w, y):
        return sums.gather(w * valid, y, pattern, start)

    def scatter(w, x):
        return sums.scatter(w * valid, x, pattern, start, m)

    plain = y[:, at]
    torch.testing.assert_close(dots(x, y), (x.unsqueeze(2) * plain).sum(-1) * valid)
    torch.testing.assert_close(gather(w, y), ((w * valid).unsqueeze(-1) * plain).sum(2))
    dense = torch.zeros(2, n, m, dtype=f64).scatter_add(2, at.expand(2, -1, -1), w * valid)
    torch.testing.assert_close(scatter(w, x), dense.mT @ x)
    for call, given in ((dots, (x, y)), (gather, (w, y)), (scatter, (w, x))):
        assert gradcheck(call, given, fast_mode=True) and gradgradcheck(call, given, fast_mode=True)


@pytest.mark.parametrize("name", ["euclidean", "ball", "sphere", "lorentz", "product", "heads"])
def test_gradients(name, form):
    manifold = SPACES[name]()
    given = [t.requires_grad_() for t in tokens(manifold, 12, batch=(1, 2), values=2)]
    if name == "lorentz":  # the stored time is not read
        given[0].data[..., 0] = given[1].data[..., 0] = 0.0
    eps = torch.tensor([0.3, 0.5], dtype=f64, requires_grad=True)
    power = torch.tensor(1.2, dtype=f64, requires_grad=True)

    def call(query, key, value, eps, power):
        return fixed_pattern_attention(query, key, value, manifold, window=1, global_keys=2, eps=eps, power=power)

    assert gradcheck(call, (*given, eps, power), atol=1e-6, fast_mode=True)


def test_the_curvature_learns(form):
    ball = hs.PoincareBall(torch.tensor([-0.5, -1.0], dtype=f64), learnable=True)
    given = tokens(ball, 12, batch=(1, 2))
    out = fixed_pattern_attention(*given, ball, eps=0.1)
    out.pow(2).sum().backward()
    step = 1e-6
    for h in range(2):
        losses = []
        for sign in (1, -1):
            kappa = ball.kappa.detach().clone()
            kappa[h] += sign * step
            losses.append(fixed_pattern_attention(*given, hs.PoincareBall(kappa), eps=0.1).pow(2).sum())
        slope = (losses[0] - losses[1]) / (2 * step)
        assert abs(ball.kappa.grad[h] - slope) < 1e-6 * (1 + slope.abs())


@pytest.mark.parametrize("name", ["ball", "product", "only dist"])
def test_several_blocks_give_the_same(name, form, monkeypatch):
    manifold = SPACES[name]()
    given = [t.requires_grad_() for t in tokens(manifold, 45, batch=(1, 2))]
    whole = fixed_pattern_attention(*given, manifold, is_causal=True)
    right = torch.autograd.grad(whole.pow(2).sum(), given)
    monkeypatch.setattr("horosphere.attention.patterns.fixed.BLOCK_PAIRS", 700)
    monkeypatch.setattr("horosphere.attention.patterns.fixed.BLOCK_NUMBERS", 2800)
    monkeypatch.setattr("horosphere.attention.patterns.fixed.LARGEST_BLOCKS", 100)
    monkeypatch.setattr("horosphere.kernels.pattern.CACHED", 20)
    out = fixed_pattern_attention(*given, manifold, is_causal=True)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(torch.autograd.grad(out.pow(2).sum(), given), right)


@pytest.mark.parametrize("name", ["euclidean", "ball", "sphere", "lorentz", "product"])
def test_a_query_finds_the_key_it_equals_in_float32(name, form):
    """Where the product form loses the distance 0: with eps = 1e-8 the output is the key's own value."""
    manifold = SPACES[name]()
    _, key, value = tokens(manifold, 60, batch=(1, 2), dtype=torch.float32)
    out = fixed_pattern_attention(key.clone(), key, value, manifold, eps=1e-8)
    assert (out - value).abs().max() < 1e-4
    mask = torch.ones(1, 2, 60, dtype=torch.bool)
    mask[0, 1, 20:40] = False
    out = fixed_pattern_attention(key.clone(), key, value, manifold, eps=1e-8, key_mask=mask)
    assert (out - value)[mask].abs().max() < 1e-4


def test_large_powers_do_not_overflow(form):
    manifold = hs.PoincareBall()
    given = tokens(manifold, 30, dtype=torch.float32)
    out = fixed_pattern_attention(*given, manifold, eps=1e-6, power=6.0)
    right = fixed_pattern_attention(*(t.double() for t in given), manifold, eps=1e-6, power=6.0)
    torch.testing.assert_close(out.double(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-4), (torch.bfloat16, 2e-2)])
def test_lower_precision(dtype, tolerance, form):
    manifold = hs.PoincareBall()
    given = [t.to(dtype) for t in tokens(manifold, 70)]
    out = fixed_pattern_attention(*given, manifold)
    right = fixed_pattern_attention(*(t.to(f64) for t in given), manifold)
    assert out.dtype == dtype
    torch.testing.assert_close(out.to(f64), right, rtol=tolerance, atol=tolerance)


def test_no_tokens_and_no_streams():
    manifold = hs.Euclidean()
    for n, batch in ((0, (1, 2)), (3, (0, 2))):
        given = [t.requires_grad_() for t in tokens(manifold, n, batch=batch)]
        out = fixed_pattern_attention(*given, manifold)
        assert out.shape == (*batch, n, 3)
        out.sum().backward()
    query, key, value = tokens(manifold, 3, 0, batch=(1, 2))
    assert fixed_pattern_attention(query, key, value, manifold, n_max=3).abs().max() == 0


def test_bad_arguments_are_named():
    manifold = hs.Euclidean()
    given = tokens(manifold, 10)
    for options, message in (
        ({"n_max": 9}, "do not fit a pattern with n_max = 9"),
        ({"offset": 1}, "positions 1 to 10 do not fit"),
        ({"offset": -1}, "do not fit"),
        ({"n_max": 0}, "do not fit"),
        ({"window": -1}, "must not be negative"),
        ({"global_keys": -2}, "must not be negative"),
        ({"eps": 0.0}, "eps must be"),
    ):
        with pytest.raises(ValueError, match=message):
            fixed_pattern_attention(*given, manifold, **options)
    with pytest.raises(ValueError, match="n_max must be at least 1"):
        pattern_of(0)

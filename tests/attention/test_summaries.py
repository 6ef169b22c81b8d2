"""Running summaries against the rule written out token by token, and the laws of a stream."""

import pytest
import torch
from torch.autograd import gradcheck

import horosphere as hs
from horosphere.attention.patterns.summary import (
    Summaries,
    empty_summaries,
    move_centroids,
    summary_attention,
    summary_step,
)
from tests.attention.spaces import SPACES, crowd, f64, of_head, tokens, weight


def naive(query, key, value, manifold, slots, chunk, eps=1e-3, power=1.0, mask=None):
    """One stream (N, D), slot by slot: the rule of the paper with centroids that move at the borders."""
    centroids, counts, sums, out = [], [], [], []
    start, new = [], []  # the centroids of this chunk and the keys that each took
    for t, (q, k, v) in enumerate(zip(query, key, value, strict=True)):
        if mask is None or mask[t]:
            if len(start) < slots:
                start.append(k)
                counts.append(0)
                sums.append(torch.zeros_like(v))
                new.append([])
                a = len(start) - 1
            else:
                a = min(range(slots), key=lambda s: manifold.dist(k, start[s]).item())
            counts[a] += 1
            sums[a] = sums[a] + v
            new[a].append(k)
        w = weight(manifold, q, torch.stack(start), eps, power) if start else []
        top = sum((w[s] * sums[s] for s in range(len(start))), torch.zeros_like(value[0]))
        below = sum(w[s] * counts[s] for s in range(len(start)))
        out.append(top / below if start else top)
        if (t + 1) % chunk == 0:
            for s, taken in enumerate(new):
                if taken:
                    mean = sum(manifold.logmap(start[s], k) for k in taken) / len(taken)
                    start[s] = manifold.expmap(start[s], mean * (len(taken) / counts[s]))
                new[s] = []
    centroids = start
    return torch.stack(out), centroids, counts


def naive_batch(query, key, value, manifold, *args, mask=None, **kwargs):
    out = torch.empty_like(value)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            own = None if mask is None else mask[b, h]
            streams = (t[b, h] for t in (query, key, value))
            out[b, h] = naive(*streams, of_head(manifold, h), *args, mask=own, **kwargs)[0]
    return out


@pytest.mark.parametrize("chunk", [1, 4, 32])
@pytest.mark.parametrize("name", SPACES)
def test_equals_the_rule_token_by_token(name, chunk):
    manifold = SPACES[name]()
    given = tokens(manifold, 13, batch=(2, 2))
    out = summary_attention(*given, manifold, slots=4, chunk=chunk, eps=0.02, power=1.5)
    right = naive_batch(*given, manifold, 4, chunk, eps=0.02, power=1.5)
    torch.testing.assert_close(out, right, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 4])
def test_keys_that_take_no_part_leave_no_trace(chunk):
    manifold = hs.PoincareBall()
    query, key, value = tokens(manifold, 19)
    mask = torch.rand(3, 2, 19, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[0, 0, :4] = False  # a stream that starts with nothing: zeros come out
    mask[1] = False
    right = naive_batch(query, key, value, manifold, 3, chunk, mask=mask)
    spoiled_key = torch.where(mask[..., None], key, torch.nan).requires_grad_()
    spoiled_value = torch.where(mask[..., None], value, torch.nan).requires_grad_()
    out = summary_attention(query, spoiled_key, spoiled_value, manifold, slots=3, chunk=chunk, key_mask=mask)
    torch.testing.assert_close(out, right, rtol=1e-9, atol=1e-10)
    assert out[0, 0, :4].abs().max() == 0 and out[1].abs().max() == 0
    out.sum().backward()
    assert spoiled_key.grad.isfinite().all() and spoiled_value.grad.isfinite().all()
    assert spoiled_value.grad[~mask].abs().max() == 0


@pytest.mark.parametrize("chunk", [1, 5, 8])
@pytest.mark.parametrize("name", ["euclidean", "sphere", "heads"])
def test_any_cut_of_the_stream_gives_the_same(name, chunk):
    manifold = SPACES[name]()
    query, key, value = tokens(manifold, 40)
    whole = summary_attention(query, key, value, manifold, slots=6, chunk=chunk)
    for seed in range(3):
        cuts = torch.randint(0, 41, (5,), generator=torch.Generator().manual_seed(seed)).sort().values.tolist()
        stream, outs = Summaries(manifold, 6, chunk=chunk), []
        for a, b in zip([0, *cuts], [*cuts, 40], strict=True):
            outs.append(stream.step(query[..., a:b, :], key[..., a:b, :], value[..., a:b, :]))
        torch.testing.assert_close(torch.cat(outs, -2), whole, rtol=1e-10, atol=1e-11)
        assert stream.state.seen == 40 and bool((stream.state.counts.sum(-1) == 40).all())


@pytest.mark.parametrize("chunk", [1, 8])
def test_equal_tokens_share_the_first_slot_they_filled(chunk):
    """Ties go to the smaller slot, however the stream is cut."""
    point = torch.full((1, 1, 1, 3), 0.2, dtype=f64)
    key = point.expand(1, 1, 12, 3)
    value = torch.arange(12.0, dtype=f64).view(1, 1, 12, 1)
    stream = Summaries(hs.PoincareBall(), 3, chunk=chunk)
    out = torch.cat(
        [stream.step(key[..., t : t + 1, :], key[..., :1, :], value[..., t : t + 1, :]) for t in range(12)], -2
    )
    assert stream.state.counts.tolist() == [[[10.0, 1.0, 1.0]]]
    torch.testing.assert_close(out.flatten(), torch.arange(12.0, dtype=f64) / 2)


def test_the_future_moves_nothing():
    manifold = hs.Lorentz()
    query, key, value = tokens(manifold, 21)
    before = summary_attention(query, key, value, manifold, slots=4, chunk=4)
    for t in (query, key, value):
        t[..., 13:, :] = t[..., 13:, :].flip(-2)
    after = summary_attention(query, key, value, manifold, slots=4, chunk=4)
    torch.testing.assert_close(after[..., :13, :], before[..., :13, :], rtol=0, atol=0)
    assert (after[..., 13:, :] - before[..., 13:, :]).abs().max() > 1e-3


def test_with_a_slot_for_every_token_it_is_dense_causal_attention():
    manifold = hs.Sphere()
    query, key, value = tokens(manifold, 9, batch=(2, 2))
    out = summary_attention(query, key, value, manifold, slots=9, chunk=3, eps=0.1)
    w = 1 / (hs.cdist(query, key, manifold, squared=True) + 0.1)
    w = w.tril()
    torch.testing.assert_close(out, (w / w.sum(-1, keepdim=True)) @ value)


def test_a_centroid_of_flat_space_is_the_mean_of_its_keys():
    x = torch.randn(30, 2, dtype=f64, generator=torch.Generator().manual_seed(0))
    stream = Summaries(hs.Euclidean(), 1, chunk=1)
    for row in x:
        stream.step(row.view(1, 2), row.view(1, 2), row.view(1, 2))
    torch.testing.assert_close(stream.state.centroids[0], x.mean(0))
    again = x[:1]
    for n in range(2, 31):
        again = move_centroids(again, x[n - 1] - again, torch.tensor([n]), hs.Euclidean())
    torch.testing.assert_close(again[0], x.mean(0))


def test_an_empty_slot_stays_where_it_is():
    at = hs.PoincareBall().random(1, 3, dtype=f64)
    assert torch.equal(move_centroids(at, torch.zeros_like(at), torch.tensor([0]), hs.PoincareBall()), at)


@pytest.mark.parametrize("name", ["euclidean", "ball", "sphere", "heads"])
def test_gradients(name):
    manifold = SPACES[name]()
    given = [t.requires_grad_() for t in tokens(manifold, 8, batch=(1, 2), size=3, values=2)]
    eps = torch.tensor([0.3, 0.5], dtype=f64, requires_grad=True)
    power = torch.tensor(1.2, dtype=f64, requires_grad=True)

    def call(query, key, value, eps, power):
        return summary_attention(query, key, value, manifold, slots=3, chunk=3, eps=eps, power=power)

    assert gradcheck(call, (*given, eps, power), atol=1e-6, fast_mode=True)


def test_the_curvature_learns():
    ball = hs.PoincareBall(torch.tensor([-0.5, -1.0], dtype=f64), learnable=True)
    given = tokens(ball, 10, batch=(1, 2))

    def loss(kappa):
        return torch.func.functional_call(Wrapped(ball), {"manifold._learnable_kappa": kappa}, given).pow(2).sum()

    assert gradcheck(loss, (ball.kappa,), atol=1e-6)


class Wrapped(torch.nn.Module):
    def __init__(self, manifold):
        super().__init__()
        self.manifold = manifold

    def forward(self, *given):
        return summary_attention(*given, self.manifold, slots=3, chunk=2, eps=0.1)


def test_weights_worked_again_in_the_backward_pass(monkeypatch):
    manifold = hs.PoincareBall()
    given = [t.requires_grad_() for t in tokens(manifold, 24)]
    whole = summary_attention(*given, manifold, slots=4, chunk=4)
    right = torch.autograd.grad(whole.pow(2).sum(), given)
    monkeypatch.setattr("horosphere.attention.patterns.summary.KEPT_WEIGHTS", 100)
    out = summary_attention(*given, manifold, slots=4, chunk=4)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(torch.autograd.grad(out.pow(2).sum(), given), right)


@pytest.mark.parametrize("name", ["euclidean", "ball", "sphere", "lorentz", "product"])
def test_a_query_finds_the_slot_it_equals_in_float32(name):
    """Where the product form loses the distance 0: every key has its own slot, so its value comes back."""
    manifold = SPACES[name]()
    key, value = crowd(manifold, 60)
    out = summary_attention(key.clone(), key, value, manifold, slots=60, eps=1e-12)
    assert (out - value).abs().max() < 1e-3


@pytest.mark.parametrize("power", [6.0, torch.tensor(6.0)])
def test_large_powers_do_not_overflow(power):
    manifold = hs.PoincareBall()
    given = tokens(manifold, 20, dtype=torch.float32)
    out = summary_attention(*given, manifold, slots=5, chunk=4, eps=1e-6, power=power)
    right = summary_attention(*(t.double() for t in given), manifold, slots=5, chunk=4, eps=1e-6, power=6.0)
    torch.testing.assert_close(out.double(), right, rtol=1e-3, atol=1e-3)


def test_half_precision_is_summed_in_float32():
    manifold = hs.Sphere()
    query, key, value = tokens(manifold, 32, dtype=torch.float32)
    half = [t.to(torch.bfloat16) for t in (query, key, value)]
    out = summary_attention(*half, manifold, slots=8, chunk=1)
    right = summary_attention(*(t.float() for t in half), manifold, slots=8, chunk=1)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, right.bfloat16())


def test_no_tokens_and_no_streams():
    manifold = hs.Euclidean()
    for n, batch in ((0, (1, 2)), (3, (0, 2))):
        out = summary_attention(*tokens(manifold, n, batch=batch), manifold)
        assert out.shape == (*batch, n, 3)


def test_bad_arguments_are_named_and_change_nothing():
    manifold = hs.Euclidean()
    query, key, value = tokens(manifold, 4)
    stream = Summaries(manifold, 2)
    stream.step(query, key, value)
    before = stream.state
    bad = [
        ((query, key[..., :3], value), {}, "points of one size"),
        ((query, key[..., :3, :], value[..., :3, :]), {}, "the same tokens"),
        ((query, key, value[..., :3, :]), {}, "every key needs a value"),
        ((query, key[:2], value[:2]), {}, "do not broadcast"),
        ((query[:1], key[:1], value[:1]), {}, "do not fit"),
        ((query, key, value), {"key_mask": torch.ones(7, dtype=torch.bool)}, "does not broadcast"),
    ]
    for given, other, message in bad:
        with pytest.raises(ValueError, match=message):
            stream.step(*given, **other)
    with pytest.raises(TypeError, match="bool"):
        stream.step(query, key, value, key_mask=torch.ones(4))
    assert stream.state is before
    for other, message in (
        ({"eps": 0.0}, "eps"),
        ({"power": -1.0}, "power"),
        ({"chunk": 0}, "chunk"),
        ({"slots": 0}, "slots"),
    ):
        with pytest.raises(ValueError, match=message):
            summary_attention(query, key, value, manifold, **other)
    with pytest.raises(ValueError, match="eps must be a number"):
        summary_step(empty_summaries(key, value, manifold, 2), query, key, value, manifold, eps=torch.ones(3))

"""Attention through anchors: against the sums written out, as a stream, and its Nystrom form."""

import copy
import io

import pytest
import torch
from torch.autograd import gradcheck

import horosphere as hs
from horosphere.attention.nystrom import METHODS, choose_landmarks, nystrom_attention
from horosphere.attention.patterns import Landmarks, empty_landmarks, landmark_attention, landmark_step
from tests.attention.spaces import SPACES, crowd, f64, of_head, tokens, weight


def naive(query, key, value, anchors, manifold, causal, eps=1e-3, power=1.0, mask=None):
    """One head, query by query."""
    to_anchors = []
    for k in key:
        w = weight(manifold, k, anchors, eps, power)
        to_anchors.append(w / w.sum())
    out = torch.zeros(len(query), value.shape[-1], dtype=f64)
    for i, q in enumerate(query):
        seen = [j for j in range(len(key)) if (not causal or j <= i) and (mask is None or mask[j])]
        if not seen:
            continue
        w = weight(manifold, q, anchors, eps, power)
        top = sum(w[a] * sum(to_anchors[j][a] * value[j] for j in seen) for a in range(len(anchors)))
        out[i] = top / sum(w[a] * sum(to_anchors[j][a] for j in seen) for a in range(len(anchors)))
    return out


def naive_batch(query, key, value, anchors, manifold, *args, mask=None, **kwargs):
    anchors = anchors.expand(*query.shape[:-2], *anchors.shape[-2:])
    out = value.new_empty(*query.shape[:-1], value.shape[-1])
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            own = None if mask is None else mask[b, h]
            one = (t[b, h] for t in (query, key, value, anchors))
            out[b, h] = naive(*one, of_head(manifold, h), *args, mask=own, **kwargs)
    return out


def anchors_on(manifold, *shape):
    return tokens(manifold, shape[-1], batch=(1, 2), seed=5)[0][0]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr("horosphere.attention.patterns.landmark.BLOCK", 8)
    monkeypatch.setattr("horosphere.attention.patterns.landmark.PIECE", 3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SPACES)
def test_equals_the_sums_written_out(name, causal, small_pieces):
    manifold = SPACES[name]()
    given = tokens(manifold, 11, 11 if causal else 9, batch=(2, 2))
    anchors = anchors_on(manifold, 4)  # (H, m, D)
    out = landmark_attention(*given, anchors, manifold, is_causal=causal, eps=0.02, power=1.5)
    right = naive_batch(*given, anchors, manifold, causal, eps=0.02, power=1.5)
    torch.testing.assert_close(out, right, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_take_no_part_leave_no_trace(causal, small_pieces):
    manifold = hs.Sphere()
    query, key, value = tokens(manifold, 12, batch=(2, 2))
    anchors = anchors_on(manifold, 3)
    mask = torch.rand(2, 2, 12, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[0, 0, :4] = False
    mask[1] = False
    key = torch.where(mask[..., None], key, torch.nan).requires_grad_()
    value = torch.where(mask[..., None], value, torch.nan).requires_grad_()
    out = landmark_attention(query, key, value, anchors, manifold, is_causal=causal, key_mask=mask)
    right = naive_batch(query, key, value, anchors, manifold, causal, mask=mask)
    torch.testing.assert_close(out, right, rtol=1e-9, atol=1e-10)
    assert out[1].abs().max() == 0
    out.sum().backward()
    assert key.grad.isfinite().all() and value.grad.isfinite().all() and value.grad[~mask].abs().max() == 0


@pytest.mark.parametrize("name", ["euclidean", "product", "heads"])
def test_any_cut_of_the_stream_gives_the_same(name, small_pieces):
    manifold = SPACES[name]()
    query, key, value = tokens(manifold, 40)
    anchors = anchors_on(manifold, 5)
    whole = landmark_attention(query, key, value, anchors, manifold, is_causal=True)
    for seed in range(3):
        cuts = torch.randint(0, 41, (5,), generator=torch.Generator().manual_seed(seed)).sort().values.tolist()
        state, outs = empty_landmarks(value, anchors), []
        for a, b in zip([0, *cuts], [*cuts, 40], strict=True):
            some = (t[..., a:b, :] for t in (query, key, value))
            out, state = landmark_step(state, *some, anchors, manifold)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, -2), whole, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(state.mass.sum(-1), torch.full((3, 2), 40.0, dtype=f64))


def test_the_future_moves_nothing():
    manifold = hs.PoincareBall()
    query, key, value = tokens(manifold, 100)
    anchors = anchors_on(manifold, 4)
    before = landmark_attention(query, key, value, anchors, manifold, is_causal=True)
    for t in (query, key, value):
        t[..., 70:, :] = t[..., 70:, :].flip(-2)
    after = landmark_attention(query, key, value, anchors, manifold, is_causal=True)
    torch.testing.assert_close(after[..., :70, :], before[..., :70, :], rtol=0, atol=1e-15)
    assert (after[..., 70:, :] - before[..., 70:, :]).abs().max() > 1e-3


def test_the_last_query_sees_all_keys_either_way():
    manifold = hs.Lorentz()
    given = tokens(manifold, 30)
    anchors = anchors_on(manifold, 4)
    causal = landmark_attention(*given, anchors, manifold, is_causal=True)
    full = landmark_attention(*given, anchors, manifold)
    torch.testing.assert_close(causal[..., -1, :], full[..., -1, :])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["ball", "sphere", "heads"])
def test_gradients(name, causal, small_pieces):
    manifold = SPACES[name]()
    given = [t.requires_grad_() for t in tokens(manifold, 9, batch=(1, 2), size=3, values=2)]
    anchors = tokens(manifold, 3, batch=(1, 2), size=3, seed=4)[0][0].requires_grad_()
    eps = torch.tensor([0.3, 0.5], dtype=f64, requires_grad=True)
    power = torch.tensor(1.2, dtype=f64, requires_grad=True)

    def call(query, key, value, anchors, eps, power):
        return landmark_attention(query, key, value, anchors, manifold, is_causal=causal, eps=eps, power=power)

    assert gradcheck(call, (*given, anchors, eps, power), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("causal", [False, True])
def test_weights_worked_again_in_the_backward_pass(causal, monkeypatch, small_pieces):
    manifold = hs.PoincareBall()
    given = [t.requires_grad_() for t in tokens(manifold, 20)]
    anchors = anchors_on(manifold, 3).requires_grad_()
    whole = landmark_attention(*given, anchors, manifold, is_causal=causal)
    right = torch.autograd.grad(whole.pow(2).sum(), (*given, anchors))
    monkeypatch.setattr("horosphere.attention.patterns.landmark.KEPT_WEIGHTS", 0)
    out = landmark_attention(*given, anchors, manifold, is_causal=causal)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(torch.autograd.grad(out.pow(2).sum(), (*given, anchors)), right)


def test_anchors_are_learned_on_their_manifold_and_saved():
    torch.manual_seed(0)
    manifold = hs.PoincareBall()
    layer = Landmarks(manifold, 3, 4, heads=2, dtype=f64)
    given = tokens(manifold, 10)
    before = layer.anchors.detach().clone()
    optimizer = hs.optim.RiemannianAdam(layer.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        layer(*given).pow(2).sum().backward()
        optimizer.step()
    assert (layer.anchors - before).abs().max() > 0.01
    assert manifold.check_point_on_manifold(layer.anchors.detach())
    again = copy.deepcopy(layer)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file))
    assert torch.equal(again(*given, is_causal=True), layer(*given, is_causal=True))


@pytest.mark.parametrize("method", METHODS)
def test_landmarks_are_some_of_the_points(method):
    manifold = hs.PoincareBall()
    points = tokens(manifold, 30)[1]
    mask = torch.rand(3, 2, 30, generator=torch.Generator().manual_seed(2)) < 0.5
    generator = torch.Generator().manual_seed(0)
    spoiled = torch.where(mask[..., None], points, torch.nan)
    found = choose_landmarks(spoiled, 6, manifold, method, key_mask=mask, generator=generator)
    assert found.shape == (3, 2, 6, 4)
    same = (found.unsqueeze(-2) == points.unsqueeze(-3)).all(-1)  # (3, 2, 6, 30)
    assert bool((same.sum(-1) == 1).all()) and bool((same.sum(-2) <= 1).all())
    assert not bool((same.any(-2) & ~mask).any())
    again = choose_landmarks(points, 6, manifold, method, key_mask=mask, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found, again)


def test_spread_landmarks_find_every_cluster():
    torch.manual_seed(0)
    centers = torch.tensor([[0.0, 0], [10, 0], [0, 10], [10, 10], [-10, 0]], dtype=f64)
    sizes = (200, 3, 2, 2, 1)
    points = torch.cat([c + 0.01 * torch.randn(n, 2, dtype=f64) for c, n in zip(centers, sizes, strict=True)])
    for method in ("k-means++", "farthest"):
        found = choose_landmarks(points, 5, hs.Euclidean(), method)
        assert sorted(hs.cdist(found, centers, hs.Euclidean()).argmin(-1).tolist()) == [0, 1, 2, 3, 4]


def test_copies_of_a_point_are_chosen_last():
    points = torch.zeros(6, 2, dtype=f64)
    points[4] = 1.0
    for method in ("k-means++", "farthest"):
        found = choose_landmarks(points, 4, hs.Euclidean(), method, generator=torch.Generator().manual_seed(0))
        assert sorted(found[:, 0].tolist()) == [0, 0, 0, 1]


def test_a_layer_chooses_its_anchors():
    torch.manual_seed(0)
    manifold = hs.Sphere()
    points = tokens(manifold, 20)[1][0]
    layer = Landmarks(manifold, 5, 4, heads=2, dtype=f64)
    layer.choose_(points, "farthest")
    assert torch.equal(layer.anchors, choose_landmarks(points, 5, manifold, "farthest"))
    with pytest.raises(ValueError, match="are chosen among points"):
        layer.choose_(points[:1])


@pytest.mark.parametrize("name", ["euclidean", "ball", "sphere", "heads", "only dist"])
def test_nystrom_with_every_key_a_landmark_is_dense_attention(name):
    manifold = SPACES[name]()
    query, key, value = tokens(manifold, 9, 14)
    found = nystrom_attention(query, key, value, key, manifold, eps=0.05)
    w = 1 / (hs.cdist(query, key, manifold, squared=True) + 0.05)
    torch.testing.assert_close(found.out, (w / w.sum(-1, keepdim=True)) @ value, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(found.smallest_denominator, w.sum(-1).amin(-1), rtol=1e-7, atol=1e-8)
    mask = torch.arange(14) < 9
    masked = nystrom_attention(query, key, value, key, manifold, eps=0.05, key_mask=mask)
    short = w[..., :9]
    torch.testing.assert_close(
        masked.out, (short / short.sum(-1, keepdim=True)) @ value[..., :9, :], rtol=1e-7, atol=1e-8
    )


def test_nystrom_converges_to_dense_attention_and_plain_landmarks_do_not():
    """Relative error with every key an anchor: rounding against almost half of the answer."""
    manifold = hs.PoincareBall()
    torch.manual_seed(0)
    query, key = (manifold.random(64, 2, dtype=f64) for _ in range(2))
    value = torch.randn(64, 8, dtype=f64)
    dense = hs.attention.geodesic_attention(query, key, value, manifold, eps=0.1)

    def error(out):
        return ((out - dense).norm() / dense.norm()).item()

    few, all_of_them = (choose_landmarks(key, m, manifold, "farthest") for m in (16, 64))
    assert error(nystrom_attention(query, key, value, all_of_them, manifold, eps=0.1).out) < 1e-10
    assert error(nystrom_attention(query, key, value, few, manifold, eps=0.1).out) > 0.1
    assert error(landmark_attention(query, key, value, all_of_them, manifold, eps=0.1)) > 0.4


def test_nystrom_denominators_may_be_negative_and_are_reported():
    manifold = hs.Sphere()
    torch.manual_seed(0)
    query, key = (manifold.random(100, 2, dtype=f64) for _ in range(2))
    value = torch.randn(100, 2, dtype=f64)
    found = nystrom_attention(query, key, value, choose_landmarks(key, 30, manifold, "random"), manifold, eps=10.0)
    assert found.smallest_denominator < 0


def test_nystrom_gradients():
    manifold = hs.Sphere()
    given = [t.requires_grad_() for t in tokens(manifold, 5, batch=(1, 2), size=3, values=2)]
    landmarks = tokens(manifold, 3, batch=(1, 2), size=3, seed=4)[0].requires_grad_()
    eps = torch.tensor([0.3, 0.5], dtype=f64, requires_grad=True)

    def call(query, key, value, landmarks, eps):
        return nystrom_attention(query, key, value, landmarks, manifold, eps=eps).out

    assert gradcheck(call, (*given, landmarks, eps), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("name", ["euclidean", "ball", "sphere", "lorentz", "product"])
def test_a_query_finds_the_anchor_it_equals_in_float32(name):
    """Where the product form loses the distance 0: every key has its own anchor, so its value comes back."""
    manifold = SPACES[name]()
    key, value = crowd(manifold, 60)
    out = landmark_attention(key.clone(), key, value, key, manifold, eps=1e-12)
    assert (out - value).abs().max() < 1e-3


@pytest.mark.parametrize("causal", [False, True])
def test_large_powers_do_not_overflow(causal):
    manifold = hs.PoincareBall()
    given = tokens(manifold, 20, dtype=torch.float32)
    anchors = given[1][0, :, :3]
    out = landmark_attention(*given, anchors, manifold, is_causal=causal, eps=1e-6, power=6.0)
    wide = (t.double() for t in (*given, anchors))
    right = landmark_attention(*wide, manifold, is_causal=causal, eps=1e-6, power=6.0)
    torch.testing.assert_close(out.double(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_lower_precision(dtype, tolerance):
    manifold = hs.PoincareBall()
    given = [t.to(dtype) for t in tokens(manifold, 70)]
    anchors = anchors_on(manifold, 4).to(dtype)
    for causal in (False, True):
        out = landmark_attention(*given, anchors, manifold, is_causal=causal)
        right = landmark_attention(*(t.to(f64) for t in given), anchors.to(f64), manifold, is_causal=causal)
        assert out.dtype == dtype
        torch.testing.assert_close(out.to(f64), right, rtol=tolerance, atol=tolerance)


def test_no_tokens_and_no_streams():
    manifold = hs.Euclidean()
    anchors = torch.zeros(2, 4, dtype=f64)
    for n, m, batch in ((0, 0, (1, 2)), (0, 3, (1, 2)), (3, 3, (0, 2))):
        for causal in {False, n == m}:
            out = landmark_attention(*tokens(manifold, n, m, batch=batch), anchors, manifold, is_causal=causal)
            assert out.shape == (*batch, n, 3)
    query, key, value = tokens(manifold, 3, 0, batch=(1, 2))
    assert landmark_attention(query, key, value, anchors, manifold).abs().max() == 0


def test_bad_arguments_are_named():
    manifold = hs.Euclidean()
    query, key, value = tokens(manifold, 4, 5)
    anchors = torch.zeros(2, 4, dtype=f64)
    with pytest.raises(ValueError, match="the same tokens"):
        landmark_attention(query, key, value, anchors, manifold, is_causal=True)
    for bad in (anchors[0], anchors[:, :3], anchors[:0], anchors.expand(3, 2, 4)):
        with pytest.raises(ValueError, match="anchors must be points"):
            landmark_attention(query, key, value, bad, manifold)
    with pytest.raises(ValueError, match="the state holds values"):
        landmark_step(empty_landmarks(value, anchors[:1]), key, key, value, anchors, manifold)
    with pytest.raises(ValueError, match="count must be at least 1"):
        Landmarks(manifold, 0, 4)
    for count in (0, 6):
        with pytest.raises(ValueError, match="count must lie between 1 and"):
            choose_landmarks(key, count, manifold)
    with pytest.raises(ValueError, match="method must be one of"):
        choose_landmarks(key, 2, manifold, "kmeans")

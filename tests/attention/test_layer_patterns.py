"""GeodesicAttention with the patterns of the HIDA family: the functions themselves, masks, decoding."""

import copy
import pickle

import pytest
import torch

import horosphere as hs
from horosphere.attention import AttentionCache, GeodesicAttention, TransformerBlock
from horosphere.attention.patterns import fixed_pattern_attention, landmark_attention, summary_attention

F64 = torch.float64
SIZES = {"fixed": {"n_max": 20}, "landmark": {"landmarks": 5}, "summary": {"slots": 3, "chunk": 4}}


def layer(pattern, manifold=None, **kwargs):
    torch.manual_seed(0)
    options = {"num_kv_heads": 2, "dtype": F64, "rotary": 100.0} | SIZES[pattern] | kwargs
    return GeodesicAttention(16, 4, manifold=manifold or hs.PoincareBall(-0.7), pattern=pattern, **options)


def tokens(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def decode(ours, x, pieces, padding=None, cache=None):
    cache = ours.new_cache() if cache is None else cache
    outs, at = [], 0
    for n in pieces:
        part = x[:, at : at + n]
        mask = None if padding is None else padding[:, at : at + n]
        outs.append(ours(part, part, part, mask, cache=cache)[0])
        at += n
    return torch.cat(outs, 1)


@pytest.mark.parametrize("pattern", SIZES)
def test_the_layer_is_the_function(pattern):
    for manifold in (hs.Sphere(), hs.Lorentz(torch.tensor([-0.5, -1.0, -1.5, -2.0], dtype=F64))):
        ours = layer(pattern, manifold)
        x = tokens(2, 9, 16)
        padding = torch.arange(9) >= torch.tensor([[9], [6]])
        out, weights = ours(x, x, x, padding, is_causal=True)
        q, k, v = ours._heads(x, x, x, None)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        how = {"eps": ours.eps, "key_mask": ~padding[:, None]}
        if pattern == "fixed":
            right = fixed_pattern_attention(q, k, v, manifold, n_max=20, is_causal=True, **how)
        elif pattern == "landmark":
            right = landmark_attention(q, k, v, ours.scheme.landmarks.anchors, manifold, is_causal=True, **how)
        else:
            right = summary_attention(q, k, v, manifold, slots=3, chunk=4, **how)
        close(out, ours.out_proj(right.transpose(1, 2).flatten(-2)))
        assert weights is None


@pytest.mark.parametrize("pattern", SIZES)
def test_a_later_token_changes_nothing_before_it(pattern):
    ours = layer(pattern)
    x = tokens(1, 12, 16)
    other = torch.cat((x[:, :8], tokens(1, 4, 16, seed=1)), 1)
    before, after = (ours(t, t, t, is_causal=True)[0] for t in (x, other))
    close(before[:, :8], after[:, :8], 0)
    assert (before[:, 8:] - after[:, 8:]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("pattern", SIZES)
@pytest.mark.parametrize("pieces", [[1] * 11, [6, 1, 1, 3], [11]], ids=str)
def test_decoding_equals_the_whole(pattern, pieces):
    ours = layer(pattern)
    x = tokens(3, 11, 16)
    left = torch.arange(11).flip(0) >= torch.tensor([[11], [7], [5]])
    cache = ours.new_cache()
    assert isinstance(cache, AttentionCache) and cache.seen == 0
    with torch.no_grad():
        for padding in (None, left):
            right = ours(x, x, x, padding, is_causal=True)[0]
            close(decode(ours, x, pieces, padding), right)
            cache.reset()
            close(decode(ours, x, pieces, padding, cache), right)


@pytest.mark.parametrize("pattern", SIZES)
def test_caches_are_reordered_copied_and_moved(pattern):
    ours = layer(pattern)
    x = tokens(3, 8, 16)
    order = torch.tensor([2, 0])
    with torch.no_grad():
        right = ours(x, x, x, is_causal=True)[0]
        cache = ours.new_cache()
        decode(ours, x[:, :5], [5], cache=cache)
        loaded = ours.new_cache()
        loaded.load_state_dict(cache.state_dict())
        for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), loaded):
            assert copied.seen == 5
            close(decode(ours, x[:, 5:], [1, 2], cache=copied), right[:, 5:])
        cache.reorder(order)
        close(decode(ours, x[order, 5:], [3], cache=cache), right[order, 5:])
        with pytest.raises(ValueError, match="another layer"):
            decode(layer(pattern), x[order, 5:], [3], cache=cache)
        with pytest.raises(ValueError, match="one cache a layer and batch"):
            decode(ours, x[:, 5:], [3], cache=cache)
        assert cache.seen == 8


@pytest.mark.parametrize("pattern", SIZES)
def test_every_parameter_gets_a_gradient(pattern):
    ball = hs.PoincareBall(torch.tensor([-0.5, -1.0, -1.5, -2.0], dtype=F64), learnable=True)
    block = TransformerBlock(layer(pattern, ball))
    x = tokens(2, 9, 16)
    copied = copy.deepcopy(block)
    block(x, is_causal=True).square().sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name
    if pattern == "landmark":
        anchors = block.attention.scheme.landmarks.anchors
        assert isinstance(anchors, hs.ManifoldParameter) and anchors.manifold is ball
        assert copied.attention.scheme.landmarks.anchors.manifold is copied.attention.manifold
        groups = {group["name"]: group["params"] for group in hs.optim.param_groups(block)}
        assert any(p is anchors for p in groups["manifold"])


def test_landmarks_without_causality_see_everything():
    ours = layer("landmark", rotary=None, num_kv_heads=None)
    x, memory = tokens(1, 4, 16), tokens(1, 7, 16, seed=1)
    out = ours(x, memory, memory)[0]
    shuffled = memory[:, torch.randperm(7, generator=torch.Generator().manual_seed(2))]
    close(ours(x, shuffled, shuffled)[0], out)


def test_more_tokens_than_the_pattern_was_made_for():
    ours = layer("fixed", n_max=6)
    x = tokens(1, 7, 16)
    with pytest.raises(ValueError, match="n_max = 6"):
        ours(x, x, x, is_causal=True)
    cache = ours.new_cache()
    with torch.no_grad():
        decode(ours, x[:, :5], [5], cache=cache)
        with pytest.raises(ValueError, match="5 tokens are held and 2 more"):
            decode(ours, x[:, 5:], [2], cache=cache)
        assert cache.seen == 5
        close(decode(ours, x[:, 5:6], [1], cache=cache), ours(*[x[:, :6]] * 3, is_causal=True)[0][:, 5:])


@pytest.mark.parametrize(
    "made, message",
    [
        ({"dropout": 0.1}, "no dropout"),
        ({"weight": "softmax"}, "no dropout and no weight"),
        ({"n_max": 5}, "n_max=5 means nothing with pattern='landmark'"),
        ({"pattern": "fixed", "landmarks": None}, "needs n_max"),
        ({"landmarks": 0}, "at least 1"),
        ({"pattern": "dense"}, "landmarks=5 means nothing with pattern='dense'"),
        ({"pattern": "summary", "landmarks": None, "slots": 0}, "at least 1"),
    ],
)
def test_constructor_refuses(made, message):
    given = {"manifold": hs.Sphere(), "pattern": "landmark", "landmarks": 5} | made
    with pytest.raises(ValueError, match=message):
        GeodesicAttention(16, 4, **given)


@pytest.mark.parametrize("pattern", SIZES)
def test_forward_refuses(pattern):
    ours = layer(pattern)
    x = tokens(2, 5, 16)
    with pytest.raises(ValueError, match="takes no attn_mask"):
        ours(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="must be bool"):
        ours(x, x, x, torch.zeros(2, 5), is_causal=True)
    if pattern == "summary":
        with pytest.raises(ValueError, match="is_causal=True"):
            ours(x, x, x)

"""Decoding: step by step, in pieces and all at once give the same."""

import copy
import pickle

import pytest
import torch

import horosphere as hs
from horosphere.attention import AttentionCache, DenseCache, GeodesicAttention, TransformerBlock
from horosphere.attention.patterns.fixed import FixedCache
from horosphere.attention.patterns.landmark import LandmarkCache

F64 = torch.float64


def layer(manifold=None, **kwargs):
    torch.manual_seed(0)
    return GeodesicAttention(16, 4, manifold=manifold or hs.PoincareBall(), num_kv_heads=2, dtype=F64, **kwargs)


def tokens(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def decode(ours, x, pieces, padding=None, cache=None):
    """The output for x (B, N, E) taken in pieces of the given lengths."""
    cache = ours.new_cache() if cache is None else cache
    outs, at = [], 0
    for n in pieces:
        part = x[:, at : at + n]
        mask = None if padding is None else padding[:, at : at + n]
        outs.append(ours(part, part, part, mask, False, cache=cache)[0])
        at += n
    return torch.cat(outs, 1)


def close(a, b, tolerance=1e-11):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 1, 3], [9], [0, 2, 0, 7]], ids=str)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_pieces_equal_the_whole(pieces, grad):
    curved = hs.Lorentz(torch.tensor([-0.5, -1.0, -1.5, -2.0], dtype=F64))
    for ours in (layer(rotary=100.0), layer(hs.Sphere(), power=2.0), layer(curved), layer(weight="dot")):
        x = tokens(2, 9, 16)
        with torch.set_grad_enabled(grad):
            close(decode(ours, x, pieces), ours(x, x, x, is_causal=True)[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_remembered(side):
    ours = layer(rotary=100.0)
    x = tokens(3, 6, 16)
    padding = torch.arange(6) >= torch.tensor([[6], [4], [3]])
    padding = padding.flip(1) if side == "left" else padding
    right = ours(x, x, x, padding, is_causal=True)[0]
    with torch.no_grad():
        for pieces in ([6], [1] * 6, [3, 1, 2]):
            close(decode(ours, x, pieces, padding), right)
        cache = ours.new_cache()  # a mask that begins late, and one that ends early
        decode(ours, x[:, :2], [2], cache=cache)
        late = decode(ours, x[:, 2:], [2, 2], padding[:, 2:], cache)
        decode(ours, x, [1], cache=cache)
        some = torch.cat((torch.zeros_like(padding[:, :2]), padding[:, 2:]), 1)
        close(late, ours(x, x, x, some, is_causal=True)[0][:, 2:])


def test_an_unbatched_sequence():
    ours = layer()
    x = tokens(5, 16)
    right = ours(x, x, x, is_causal=True)[0]
    cache = ours.new_cache()
    padding = torch.zeros(1, dtype=torch.bool)
    with torch.no_grad():
        steps = [ours(*[x[t : t + 1]] * 3, padding, cache=cache) for t in range(5)]
    close(torch.cat([out for out, _ in steps]), right)
    assert all(weights is None for _, weights in steps)


def test_gradients_reach_the_tokens_held():
    ours = layer()
    x = tokens(2, 5, 16).requires_grad_()
    (right,) = torch.autograd.grad(ours(x, x, x, is_causal=True)[0].sin().sum(), x)
    (found,) = torch.autograd.grad(decode(ours, x, [2, 1, 2]).sin().sum(), x)
    close(found, right)


def test_gradients_after_a_start_without():
    ours = layer()
    x = tokens(2, 5, 16)
    cache = ours.new_cache()
    with torch.no_grad():
        decode(ours, x[:, :3], [3], cache=cache)
    held = cache.key.clone()
    out = decode(ours, x[:, 3:], [1, 1], cache=cache)
    with torch.no_grad():
        decode(ours, x, [1], cache=cache)  # does not write into what the backward pass needs
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters())
    assert torch.equal(cache.key[:, :, :3], held)


def test_inference_mode_and_out_of_it():
    ours = layer()
    x = tokens(2, 6, 16)
    cache = ours.new_cache()
    with torch.inference_mode():
        first = decode(ours, x[:, :3], [1, 1, 1], cache=cache)
    with torch.no_grad():
        second = decode(ours, x[:, 3:], [1, 1, 1], cache=cache)
        close(torch.cat((first, second), 1), ours(x, x, x, is_causal=True)[0])


def test_growth_is_amortised():
    """A step writes into the store; a new one is made where it is full, at doubled size."""
    cache = DenseCache()
    key = tokens(1, 2, 1, 3)
    stores = set()
    with torch.no_grad():
        for step in range(200):
            cache.append(key + step, key - step)
            stores.add(cache.key_store.data_ptr())
    assert cache.seen == 200 and len(stores) <= 10
    assert cache.key_store.shape[2] < 2 * 200 + 1
    assert cache.nbytes == cache.key_store.nbytes + cache.value_store.nbytes
    assert torch.equal(cache.key, key + torch.arange(200, dtype=F64)[:, None])
    assert torch.equal(cache.value, key - torch.arange(200, dtype=F64)[:, None])


def test_reorder_and_reset():
    ours = layer()
    x = tokens(3, 6, 16)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, :2] = True
    cache = ours.new_cache()
    order = torch.tensor([2, 1, 1, 0])
    with torch.no_grad():
        decode(ours, x[:, :4], [4], padding[:, :4], cache)
        cache.reorder(order)
        mixed = torch.cat((x[order, :4], tokens(4, 2, 16, seed=1)), 1)
        found = decode(ours, mixed[:, 4:], [1, 1], cache=cache)
        close(found, ours(mixed, mixed, mixed, padding[order], is_causal=True)[0][:, 4:])
        cache.reset()
        assert cache.seen == 0 and cache.key is None and cache.key_mask is None
        close(decode(ours, x, [6], cache=cache), ours(x, x, x, is_causal=True)[0])
    with pytest.raises(ValueError, match="empty cache"):
        DenseCache().reorder(order)


def test_copies_go_their_own_way():
    ours = layer()
    x = tokens(2, 6, 16)
    cache = ours.new_cache()
    padding = torch.tensor([[True, False, False], [False] * 3])
    with torch.no_grad():
        decode(ours, x[:, :3], [3], padding, cache)
        loaded = DenseCache()
        loaded.append(*torch.ones(2, 5, 7, 7, 7))
        loaded.load_state_dict(cache.state_dict())
        right = decode(ours, x[:, 3:], [1, 2], cache=copy.deepcopy(cache))
        assert cache.seen == 3
        for copied in (pickle.loads(pickle.dumps(cache)), loaded, cache):
            close(decode(ours, x[:, 3:], [1, 2], cache=copied), right)
        single = copy.deepcopy(cache).to(torch.float32)
        assert single.key.dtype == torch.float32 and single.key_mask.dtype == torch.bool
        half = copy.deepcopy(ours).float()
        assert half(*[x[:, 5:].float()] * 3, cache=single)[0].dtype == torch.float32


def test_wrong_use_is_refused_and_changes_nothing():
    ours, other = layer(), layer()
    x = tokens(2, 3, 16)
    cache = ours.new_cache()
    with torch.no_grad():
        right = decode(ours, x, [2, 1])
        decode(ours, x[:, :2], [2], cache=cache)
        wrong = (
            (lambda: decode(other, x[:, 2:], [1], cache=cache), "another layer"),
            (lambda: decode(ours, x[:1, 2:], [1], cache=cache), "one cache a layer and batch"),
            (lambda: decode(copy.deepcopy(ours).float(), x[:, 2:].float(), [1], cache=cache), "one cache a layer"),
            (lambda: ours(x[:, 2:], x[:, 1:], x[:, 1:], cache=cache), "same new tokens"),
            (lambda: cache.append(x, x), "takes query, key and value"),
            (lambda: cache.append(tokens(2, 2, 1, 3), tokens(2, 2, 1, 3), torch.ones(2, 1)), "key_mask must be bool"),
            (lambda: cache.append(tokens(2, 2, 1, 3), tokens(2, 2, 2, 3)), "same new tokens"),
        )
        for call, message in wrong:
            with pytest.raises(ValueError, match=message):
                call()
        assert cache.seen == 2
        close(decode(ours, x[:, 2:], [1], cache=cache), right[:, 2:])


@pytest.mark.parametrize("kind", ["dense", "fixed", "landmark", "summary", "compressed"])
def test_a_wrong_option_appends_nothing(kind):
    ball = hs.PoincareBall()
    anchors = ball.random(4, 4, dtype=F64)
    cache = {
        "dense": DenseCache,
        "fixed": lambda: FixedCache(8),
        "landmark": lambda: LandmarkCache(anchors),
        "summary": lambda: hs.memory.SummaryCache(ball, 4),
        "compressed": lambda: hs.memory.CompressedCache(hs.memory.HyperbolicCompressor(manifold=ball)),
    }[kind]()
    points, value = ball.random(1, 2, 3, 4, dtype=F64), tokens(1, 2, 3, 5)
    assert cache.attend(points, points, value, ball).shape == (1, 2, 3, 5)
    held = {name: t.clone() for name, t in cache.state_dict().items() if isinstance(t, torch.Tensor)}
    wrong = ({"eps": -1.0}, {"power": 0.0}, {"weight": "near"}, {"precision": "high"}, {"manifold": "ball"})
    for options in wrong:
        with pytest.raises((ValueError, TypeError), match=next(iter(options))):
            cache.attend(points, points, value, **({"manifold": ball} | options))
    assert cache.seen == 3 and all(torch.equal(cache.state_dict()[name], t) for name, t in held.items())


def test_a_block_decodes():
    block = TransformerBlock(layer(rotary=100.0))
    x = tokens(2, 5, 16)
    cache = block.new_cache()
    assert isinstance(cache, AttentionCache)
    with torch.no_grad():
        steps = [block(x[:, t : t + 1], cache=cache) for t in range(5)]
        close(torch.cat(steps, 1), block(x, is_causal=True))

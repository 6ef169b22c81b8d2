"""Decoding with coded tokens and with summaries, beside the parallel forward and the dense cache."""

import copy
import io

import pytest
import torch

import horosphere as hs
from horosphere.attention import DenseCache, GeodesicAttention
from horosphere.memory import CompressedCache, HyperbolicCompressor, SummaryCache

MANIFOLDS = {
    "ball": lambda: hs.PoincareBall(-1.0),
    "ball of every head": lambda: hs.PoincareBall(torch.tensor([-1.0, -0.5], dtype=torch.float64), learnable=True),
    "hyperboloid": lambda: hs.Lorentz(-1.0),
    "sphere": lambda: hs.Sphere(1.0),
    "flat": lambda: hs.Euclidean(),
}


def layer_and_tokens(manifold, n=150, **other):
    torch.manual_seed(0)
    layer = GeodesicAttention(16, 2, manifold=manifold, eps=0.1, **other).eval()
    return layer, torch.randn(2, n, 16)


def decoded(layer, x, cache, sizes):
    outs = [layer(t, t, t, cache=cache)[0] for t in x.split(sizes, 1)]
    return torch.cat(outs, 1)


@pytest.mark.parametrize("name", MANIFOLDS)
@torch.no_grad()
def test_error_falls_with_bits(name):
    layer, x = layer_and_tokens(MANIFOLDS[name]())
    right = layer(x, x, x, need_weights=False, is_causal=True)[0]
    assert torch.allclose(decoded(layer, x, DenseCache(), [100] + [1] * 50), right, atol=1e-4)
    errors = []
    for bits in (2, 4, 6, 8):
        cache = CompressedCache(HyperbolicCompressor(bits, 10, manifold=layer.manifold), block=16)
        out = decoded(layer, x, cache, [100] + [1] * 50)
        assert cache.seen == 150 and cache.coded == 144
        errors.append(((out - right).norm() / right.norm()).item())
    assert errors[0] > 1.5 * errors[1] > 3 * errors[2] > 4 * errors[3] and errors[3] < 0.01


@torch.no_grad()
def test_tokens_of_the_last_block_are_exact():
    layer, x = layer_and_tokens(hs.PoincareBall(), n=40)
    right = layer(x, x, x, need_weights=False, is_causal=True)[0]
    cache = CompressedCache(HyperbolicCompressor(2), block=64)
    assert torch.allclose(decoded(layer, x, cache, 7), right, atol=1e-5) and cache.coded == 0


@torch.no_grad()
@pytest.mark.parametrize("code_values", [True, False])
def test_one_call_equals_a_call_for_every_token(code_values):
    """Given the same points: a layer's projection of 1 token and of 150 differ by roundings, which may turn a code."""
    generator = torch.Generator().manual_seed(0)
    ball = hs.PoincareBall()
    query, key = (ball.expmap0(0.5 * torch.randn(2, 2, 150, 8, generator=generator)) for _ in range(2))
    value = torch.randn(2, 2, 150, 4, generator=generator)
    outs, codes = [], []
    for sizes in (150, 1, [3, 90, 57]):
        cache = CompressedCache(HyperbolicCompressor(), block=16, code_values=code_values)
        pieces = zip(*(t.split(sizes, 2) for t in (query, key, value)), strict=True)
        outs.append(torch.cat([cache.attend(*piece, ball) for piece in pieces], 2))
        codes.append(cache.key_codes)
    assert torch.allclose(outs[0], outs[1], atol=1e-5) and torch.allclose(outs[0], outs[2], atol=1e-5)
    assert torch.equal(codes[0], codes[1]) and torch.equal(codes[0], codes[2])


@torch.no_grad()
def test_a_float64_layer_decodes_from_codes():
    """Fault 33."""
    layer, x = layer_and_tokens(hs.PoincareBall())
    layer, x = layer.double(), x.double()
    right = layer(x, x, x, need_weights=False, is_causal=True)[0]
    cache = CompressedCache(HyperbolicCompressor(8, 10, manifold=layer.manifold), block=16)
    out = decoded(layer, x, cache, [100] + [1] * 50)
    assert out.dtype == torch.float64 and cache.coded == 144
    assert ((out - right).norm() / right.norm()).item() < 0.01


@torch.no_grad()
def test_appended_tokens_are_seen_like_those_that_asked():
    torch.manual_seed(0)
    ball = hs.PoincareBall()
    key, value = ball.random(2, 1, 50, 8), torch.randn(2, 1, 50, 4)
    asked, appended = (CompressedCache(HyperbolicCompressor(), block=16) for _ in range(2))
    asked.attend(key[:, :, :40], key[:, :, :40], value[:, :, :40], ball)
    appended.append(key[:, :, :40], value[:, :, :40])
    last = (key[:, :, 40:], key[:, :, 40:], value[:, :, 40:], ball)
    assert torch.equal(asked.attend(*last), appended.attend(*last)) and appended.seen == 50


@torch.no_grad()
def test_changing_the_last_token_moves_no_earlier_output():
    layer, x = layer_and_tokens(hs.PoincareBall())
    other = x.clone()
    other[:, -1] += 1
    for make in (lambda: CompressedCache(HyperbolicCompressor(), 16), lambda: SummaryCache(layer.manifold, 8, 8)):
        a, b = (layer(t, t, t, cache=make())[0] for t in (x, other))
        assert torch.equal(a[:, :-1], b[:, :-1]) and not torch.equal(a[:, -1], b[:, -1])


@torch.no_grad()
def test_summary_cache_equals_the_parallel_forward_of_its_pattern():
    layer, x = layer_and_tokens(hs.PoincareBall(), pattern="summary", slots=8, chunk=16)
    right = layer(x, x, x, need_weights=False, is_causal=True)[0]
    for sizes in (1, 16, [5, 100, 45]):
        cache = SummaryCache(layer.manifold, slots=8, chunk=16)
        assert torch.allclose(decoded(layer, x, cache, sizes), right, atol=1e-4)
        assert cache.nbytes == 2 * 2 * 8 * (8 + 1 + 8 + 8) * 4


@torch.no_grad()
def test_grouped_heads_and_padding():
    layer, x = layer_and_tokens(hs.PoincareBall(), num_kv_heads=1)
    padding = torch.zeros(2, 150, dtype=torch.bool)
    padding[1, :70] = True
    right = layer(x, x, x, key_padding_mask=padding, need_weights=False, is_causal=True)[0]
    cache = CompressedCache(HyperbolicCompressor(8, 10), block=16)
    first = layer(x[:, :90], x[:, :90], x[:, :90], key_padding_mask=padding[:, :90], cache=cache)[0]
    out = torch.cat((first, decoded(layer, x[:, 90:], cache, 1)), 1)
    assert ((out - right)[:, 75:].norm() / right[:, 75:].norm()) < 0.02
    assert (out[1, :70] == layer.out_proj.bias).all()


@torch.no_grad()
def test_bytes():
    torch.manual_seed(0)
    layer = GeodesicAttention(64, 1, manifold=hs.PoincareBall())
    x = torch.randn(1, 2048, 64)
    coded, kept = (CompressedCache(HyperbolicCompressor(), code_values=c) for c in (True, False))
    for cache in (coded, kept):
        layer(x, x, x, cache=cache)
    dense = 2048 * 64 * 4
    assert dense / coded.key_bytes > 7.7 and 2 * dense / coded.nbytes > 7.5
    assert kept.key_bytes == coded.key_bytes and kept.nbytes == coded.key_bytes + dense


@torch.no_grad()
def test_state_copies_reorder_and_reset():
    layer, x = layer_and_tokens(hs.PoincareBall())
    cache = CompressedCache(HyperbolicCompressor(), block=16)
    layer(x, x, x, cache=cache)
    copied, loaded = copy.deepcopy(cache), CompressedCache(HyperbolicCompressor(), block=16)
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file))
    token = torch.randn(2, 1, 16)
    swapped = copy.deepcopy(cache)
    swapped.reorder(torch.tensor([1, 0]))
    right = layer(token, token, token, cache=cache)[0]
    for same in (copied, loaded):
        assert torch.equal(layer(token, token, token, cache=same)[0], right)
    assert torch.allclose(
        layer(token.flip(0), token.flip(0), token.flip(0), cache=swapped)[0], right.flip(0), atol=1e-6
    )
    cache.reset()
    assert cache.seen == 0 and cache.coded == 0 and cache.nbytes == 0


def test_gradients_reach_recent_tokens():
    layer, x = layer_and_tokens(hs.PoincareBall(), n=40)
    x.requires_grad_()
    out = layer(x, x, x, cache=CompressedCache(HyperbolicCompressor(), block=16))[0]
    out[:, -1].sum().backward()
    assert x.grad[:, 32:].norm() > 0 and (x.grad[:, :32] == 0).all()


@torch.no_grad()
def test_wrong_use_is_named_and_leaves_the_cache_as_it_was():
    layer, x = layer_and_tokens(hs.PoincareBall(), n=40)
    cache = CompressedCache(HyperbolicCompressor(), block=16)
    layer(x, x, x, cache=cache)
    before = copy.deepcopy(cache.state_dict())
    other, _ = layer_and_tokens(hs.PoincareBall())
    curved, _ = layer_and_tokens(hs.PoincareBall(-2.0))
    dot, _ = layer_and_tokens(hs.PoincareBall(), weight="dot")
    for wrong, tokens in ((other, x), (curved, x), (layer, x[:1]), (dot, x), (layer, x * float("nan"))):
        with pytest.raises(ValueError):
            wrong(tokens, tokens, tokens, cache=cache)
    after = cache.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before if isinstance(before[n], torch.Tensor))
    assert cache.seen == 40
    with pytest.raises(ValueError, match="manifold"):
        layer(x, x, x, cache=SummaryCache(hs.Sphere()))
    with pytest.raises(TypeError, match="code"):
        CompressedCache("4 bits")
    with pytest.raises(ValueError, match="block"):
        CompressedCache(HyperbolicCompressor(), block=0)
    with pytest.raises(ValueError, match="slots"):
        SummaryCache(hs.PoincareBall(), slots=0)

"""A cache of a user's own, from the documented hooks alone; caches of a kind that a layer's pattern does not decode."""

import copy
import io

import pytest
import torch

import horosphere as hs
from horosphere.attention import DenseCache, GeodesicAttention, TokenCache, geodesic_attention
from horosphere.memory import CompressedCache, HyperbolicCompressor, SummaryCache


class WindowCache(TokenCache):
    """The last ``size`` tokens."""

    names = ("keys", "values")

    def __init__(self, size):
        super().__init__()
        self.size = size

    def answer(self, query, key, value, manifold, *, key_mask, **options):
        if key_mask is not None:
            raise ValueError("WindowCache has no masks")
        if self.keys is not None:
            key, value = torch.cat((self.keys, key), 2), torch.cat((self.values, value), 2)
        n, m = query.shape[2], key.shape[2]
        near = torch.ones(n, m, dtype=torch.bool).tril(m - n).triu(m - n - self.size + 1)
        self.keys, self.values = key[:, :, 1 - self.size :], value[:, :, 1 - self.size :]
        return geodesic_attention(query, key, value, manifold, attn_mask=near, **options)


def layer_and_tokens(**other):
    torch.manual_seed(0)
    layer = GeodesicAttention(16, 4, manifold=hs.PoincareBall(), eps=0.1, **other).eval()
    return layer, torch.randn(3, 20, 16)


@pytest.mark.parametrize("groups", [4, 2, 1])
@torch.no_grad()
def test_a_window_decodes_as_the_masked_forward(groups):
    """Fault 40: with grouped heads too."""
    layer, x = layer_and_tokens(num_kv_heads=groups, rotary=100.0)
    outside = torch.ones(20, 20, dtype=torch.bool).tril(-6) | torch.ones(20, 20, dtype=torch.bool).triu(1)
    right = layer(x, x, x, attn_mask=outside)[0]
    for sizes in (20, 1, [3, 10, 7]):
        cache = WindowCache(6)
        out = torch.cat([layer(t, t, t, cache=cache)[0] for t in x.split(sizes, 1)], 1)
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
        assert cache.seen == 20 and cache.keys.shape == (3, groups, 5, 4)


@torch.no_grad()
def test_state_comes_with_the_base():
    layer, x = layer_and_tokens()
    cache = WindowCache(6)
    layer(x[:, :8], x[:, :8], x[:, :8], cache=cache)
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    loaded = WindowCache(6)
    loaded.load_state_dict(torch.load(file))
    beams = copy.deepcopy(cache)
    beams.reorder(torch.tensor([2, 0]))
    rest = x[:, 8:]
    right = layer(rest, rest, rest, cache=cache)[0]
    assert torch.equal(layer(rest, rest, rest, cache=loaded)[0], right) and loaded.seen == 20
    picked = rest[[2, 0]]
    torch.testing.assert_close(layer(picked, picked, picked, cache=beams)[0], right[[2, 0]], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="another layer"):
        other, y = layer_and_tokens()
        other(y, y, y, cache=cache)
    with pytest.raises(ValueError, match="WindowCache has no masks"):
        layer(x, x, x, key_padding_mask=torch.zeros(3, 20, dtype=torch.bool), cache=(fresh := WindowCache(2)))
    assert fresh.seen == 0 and fresh.keys is None
    cache.reset()
    assert cache.seen == 0 and cache.keys is None and cache.nbytes == 0


SIZES = {"dense": {}, "fixed": {"n_max": 32}, "landmark": {"landmarks": 4}, "summary": {"slots": 4}}
CACHES = {
    "DenseCache": lambda layer: DenseCache(),
    "CompressedCache": lambda layer: CompressedCache(HyperbolicCompressor(manifold=layer.manifold)),
    "SummaryCache": lambda layer: SummaryCache(layer.manifold),
    "WindowCache": lambda layer: WindowCache(4),
    **{
        name: lambda layer, pattern=pattern: GeodesicAttention(
            16, 4, manifold=layer.manifold, pattern=pattern, **SIZES[pattern]
        ).new_cache()
        for name, pattern in (("FixedCache", "fixed"), ("LandmarkCache", "landmark"))
    },
}
SERVED = {
    "DenseCache": {"dense"},
    "CompressedCache": {"dense"},
    "SummaryCache": {"dense", "summary"},
    "WindowCache": {"dense"},
    "FixedCache": {"fixed"},
    "LandmarkCache": {"landmark"},
}


@pytest.mark.parametrize("pattern", SIZES)
@pytest.mark.parametrize("name", CACHES)
@torch.no_grad()
def test_a_cache_of_another_kind_is_refused(name, pattern):
    """Fault 35: logits were off by 0.9 and 1.8, and nobody was told."""
    layer, x = layer_and_tokens(pattern=pattern, **SIZES[pattern])
    cache = CACHES[name](layer)
    assert type(cache).__name__ == name
    if pattern in SERVED[name]:
        assert layer(x, x, x, cache=cache)[0].shape == x.shape
        return
    with pytest.raises(ValueError, match=rf"{name} decodes layers with pattern .*, this one has {pattern!r}"):
        layer(x, x, x, cache=cache)
    assert cache.seen == 0


@torch.no_grad()
def test_a_cache_of_the_protocol_alone_is_trusted():
    """What has no ``patterns`` may decode anything."""
    layer, x = layer_and_tokens(pattern="fixed", n_max=32)
    inner = layer.new_cache()

    class Wrapped:
        seen = property(lambda self: inner.seen)

        def attend(self, *arguments, **options):
            return inner.attend(*arguments, **options)

    assert torch.equal(layer(x, x, x, cache=Wrapped())[0], layer(x, x, x, cache=layer.new_cache())[0])

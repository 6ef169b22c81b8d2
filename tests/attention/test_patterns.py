"""The registry of patterns: one class, one call; what is unknown or half-made is refused."""

import pytest
import torch

import horosphere as hs
from horosphere.attention import DenseCache, GeodesicAttention, Pattern, geodesic_attention, register_pattern
from horosphere.attention.patterns import base, pattern_names


class Near(Pattern):
    """Keys before the query by less than a width."""

    name = "near"
    sizes = {"width": 4}  # noqa: RUF012 - as a user would write it

    def __init__(self, heads, width):
        super().__init__(heads)
        self.width, self.heads = width, heads

    def forward(self, query, key, value, manifold, *, key_mask, is_causal, eps, power):
        near = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1 - self.width)
        options = {"is_causal": is_causal, "eps": eps, "power": power}
        return geodesic_attention(query, key, value, manifold, attn_mask=near, **options)

    def new_cache(self):
        return DenseCache()


@pytest.fixture
def near():
    register_pattern(Near)
    yield
    del base.PATTERNS["near"]


def test_a_registered_pattern_is_the_layers(near):
    assert pattern_names()[-1] == "near"
    torch.manual_seed(0)
    layer = GeodesicAttention(8, 2, manifold=hs.Lorentz(), pattern="near", width=3)
    assert (layer.scheme.heads.size, layer.scheme.heads.count) == (5, 2)
    x = torch.randn(1, 9, 8)
    before = layer(x, x, x, is_causal=True)[0]
    x[:, 0] += 1.0  # three tokens see it
    changed = (layer(x, x, x, is_causal=True)[0] != before).any(-1)[0]
    assert changed.tolist() == [True] * 3 + [False] * 6
    assert GeodesicAttention(8, 2, manifold=hs.Sphere(), pattern="near").scheme.width == 4
    with pytest.raises(ValueError, match=r"slots=3 means nothing with pattern='near', whose sizes are \('width',\)"):
        GeodesicAttention(8, 2, manifold=hs.Sphere(), pattern="near", slots=3)


def test_a_registered_pattern_is_the_models(near):
    config = hs.models.GeoResolverConfig(vocab_size=16, dim=8, depth=1, heads=2, pattern="near", memory_capacity=0)
    model = hs.models.GeoResolverLM(config)
    assert isinstance(model.blocks[0].attention.scheme, Near)
    assert model(torch.randint(16, (1, 6))).logits.shape == (1, 6, 16)


def test_what_is_unknown_or_half_made_is_refused(near):
    with pytest.raises(ValueError, match=r"pattern must be one of .*'near'.* got 'far'"):
        GeodesicAttention(8, 2, manifold=hs.Sphere(), pattern="far")
    with pytest.raises(ValueError, match=r"pattern must be one of .* got 'far'"):
        hs.models.GeoResolverConfig(vocab_size=16, pattern="far")
    with pytest.raises(ValueError, match="pattern='fixed' needs n_max"):
        GeodesicAttention(8, 2, manifold=hs.Sphere(), pattern="fixed")
    with pytest.raises(TypeError, match="Half lacks new_cache, name"):
        register_pattern(type("Half", (Pattern,), {"forward": Near.forward}))
    with pytest.raises(TypeError, match="'depth', which its constructor does not take"):
        register_pattern(type("Odd", (Near,), {"name": "odd", "sizes": {"depth": 1}}))
    with pytest.raises(TypeError, match="takes a subclass of Pattern"):
        register_pattern(torch.nn.Linear)
    for name in ("near", "dense", "summary"):
        with pytest.raises(ValueError, match=f"there is a pattern '{name}' already"):
            register_pattern(type("Other", (Near,), {"name": name}))

"""Optional methods of a manifold: defaults of one that has geoopt's methods alone, lookup, names in files."""

import pytest
import torch

import horosphere as hs
from horosphere.manifolds import hooks, manifold_config, manifold_from_config
from horosphere.manifolds._geoopt import geoopt


class Bare(geoopt.Manifold):
    """The unit sphere with dist, expmap, logmap and what geoopt makes abstract: no chord, no origin, no random."""

    name = "Bare"
    ndim = 1
    reversible = False
    sphere = hs.Sphere()

    def dist(self, x, y, *, keepdim=False):
        return self.sphere.dist(x, y, keepdim=keepdim)

    def inner(self, x, u, v=None, *, keepdim=False):
        return self.sphere.inner(x, u, v, keepdim=keepdim)

    def projx(self, x):
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # NaN at 0

    def proju(self, x, u):
        return self.sphere.proju(x, u)

    egrad2rgrad = proju

    def expmap(self, x, u):
        return self.sphere.expmap(x, u)

    retr = expmap

    def logmap(self, x, y):
        return self.sphere.logmap(x, y)

    def transp(self, x, y, v):
        return self.sphere.transp(x, y, v)

    def _check_point_on_manifold(self, x, *, atol=1e-5, rtol=1e-5):
        return self.sphere._check_point_on_manifold(x, atol=atol, rtol=rtol)

    def _check_vector_on_tangent(self, x, u, *, atol=1e-5, rtol=1e-5):
        return True, None


class TestBare(hs.testing.ManifoldContract):
    size = 3

    def make_manifold(self):
        return Bare()

    def sample(self, n, dtype, generator):
        x = torch.randn(n, 3, generator=generator, dtype=torch.float64) + torch.tensor([2.0, 0.0, 0.0])
        return Bare().projx(x).to(dtype)


class WithArguments(Bare):
    def __init__(self, size: int = 1):
        super().__init__()
        self.size = size


class Described(WithArguments):
    def config(self):
        return {"type": "test_hooks.described", "size": self.size}

    @classmethod
    def from_config(cls, config):
        return cls(config["size"])


def test_defaults():
    bare = Bare()
    assert hs.chord_of(bare, torch.eye(3)) is None
    assert torch.equal(hooks.origin(bare, 2, 3), torch.tensor([[1.0, 0.0, 0.0]] * 2))
    torch.manual_seed(0)
    assert bare.check_point_on_manifold(hooks.random_points(bare, 5, 3))
    assert hooks.ambient_dim(bare, 3) == hooks.intrinsic_dim(bare, 3) == hooks.lifted_size(bare, 3) == 3
    assert hooks.factors(bare) is None and hooks.picture(bare) == "tangent"
    assert hooks.take_batch(bare, (2,), torch.tensor([0])) is bare and hooks.at_rows(bare, torch.tensor([0])) is bare


def test_every_feature_serves_it(tmp_path):
    bare, sphere = Bare(), hs.Sphere()
    torch.manual_seed(0)
    x = bare.projx(torch.randn(2, 20, 3, dtype=torch.float64) + torch.tensor([3.0, 0.0, 0.0]))
    torch.testing.assert_close(hs.midpoint(x, bare), hs.frechet_mean(x, sphere).mean, rtol=1e-8, atol=1e-9)
    out = hs.attention.geodesic_attention(x, x, x, bare, eps=0.1, value_manifold=bare)
    weights = 1 / (hs.cdist(x, x, sphere, squared=True) + 0.1)
    weights = weights / weights.sum(-1, keepdim=True)
    mean = weights @ sphere.logmap0(x)  # the tangent space at the origin
    torch.testing.assert_close(out, sphere.expmap0(mean), rtol=1e-6, atol=1e-7)
    router = hs.routing.GeodesicRouter(3, 4, top_k=1, manifold=bare)
    assert router(x.float()).indices.shape == (2, 20, 1)
    code = hs.memory.HyperbolicCompressor(bits=8, radius_bits=10, manifold=bare)
    assert sphere.dist(code.decode(code.encode(x.float())), x.float()).max() < 0.05
    block = hs.attention.TransformerBlock(
        hs.attention.GeodesicAttention(8, 2, manifold=bare, rotary=10.0, pattern="summary", slots=4)
    )
    assert block(torch.randn(2, 5, 8), is_causal=True).isfinite().all()
    product = hs.Product((bare, 3), (hs.PoincareBall(), 2))
    assert product.check_point_on_manifold(product.random(4, 5)) and product.ambient_dim(5) == 5

    hs.register_manifold("test_hooks.bare", Bare)
    ring = [(i, (i + 1) % 6) for i in range(6)]
    model = hs.embedding.GraphEmbedding(Bare(), 3, n_epochs=5, random_state=0).fit(ring)
    model.save(tmp_path / "bare")
    assert type(hs.embedding.GraphEmbedding.load(tmp_path / "bare").manifold_) is Bare
    assert model.plot().axes


def test_names_in_files():
    for manifold, reason in ((WithArguments(), "has no name for files: call horosphere.register_manifold"),):
        with pytest.raises(TypeError, match=reason):
            manifold_config(manifold)
    hs.register_manifold("test_hooks.arguments", WithArguments)
    with pytest.raises(TypeError, match=r"takes arguments, which a file must keep: define config\(\)"):
        manifold_config(WithArguments())
    hs.register_manifold("test_hooks.described", Described)
    product = hs.Product((hs.Scaled(Described(7), 2.0), 3), (hs.Sphere(), 3))
    again = manifold_from_config(manifold_config(product))
    assert again.manifolds[0].base.size == 7 and manifold_config(again) == manifold_config(product)
    assert type(hs.manifolds.manifold_by_name("test_hooks.described")) is Described

    hs.register_manifold("test_hooks.described", Described)  # again: the same class
    with pytest.raises(ValueError, match="taken by Sphere"):
        hs.register_manifold("Sphere", Bare)
    with pytest.raises(TypeError, match=r"subclass of geoopt\.Manifold"):
        hs.register_manifold("test_hooks.other", int)
    with pytest.raises(ValueError, match=r"class of your own is known after horosphere.register_manifold"):
        manifold_from_config({"type": "test_hooks.unheard"})
    with pytest.raises(ValueError, match=r"unknown manifold 'test_hooks\.unheard'"):
        hs.embedding.GraphEmbedding("test_hooks.unheard").fit([(0, 1)])


class Unwritable(Described):
    def config(self):
        return {"type": "test_hooks.unwritable", "size": torch.ones(2)}


def test_a_config_that_json_cannot_keep(tmp_path):
    hs.register_manifold("test_hooks.unwritable", Unwritable)
    model = hs.embedding.GraphEmbedding(Unwritable(), 3, n_epochs=1, random_state=0).fit([(0, 1), (1, 2)])
    for save in (lambda: manifold_config(Unwritable()), lambda: model.save(tmp_path / "model")):
        with pytest.raises(TypeError, match=r"Unwritable\.config\(\) must return what JSON can keep.*tensor.*tolist"):
            save()
    with pytest.raises(TypeError, match=r"Unwritable\.config"):
        manifold_config(hs.Product((Unwritable(), 3), (hs.Sphere(), 3)))


def test_a_subclass_of_ours_without_a_name_is_refused():
    class Named(hs.PoincareBall):
        pass

    with pytest.raises(TypeError, match=r"register_manifold\('Named', Named\)"):
        manifold_config(Named())


def test_lookup_follows_the_distance_and_is_not_fooled_by_forwarding():
    class Doubled(hs.Sphere):
        def dist(self, x, y, *, keepdim=False):
            return 2 * super().dist(x, y, keepdim=keepdim)

    assert hooks.own(hs.Sphere(), "lift") is not None
    assert hooks.own(Doubled(), "lift") is None and hooks.own(Doubled(), "factors") is None
    assert hooks.own(Doubled(), "ambient_dim") is not None  # how points are stored is inherited

    class Forwarded(Bare):
        def ambient_dim(self, n):
            return n + 5

    scaled = geoopt.Scaled(Forwarded(), 2.0)
    assert scaled.ambient_dim(1) == 6  # geoopt's object forwards
    assert hooks.ambient_dim(scaled, 1) == 1
    assert hooks.ambient_dim(geoopt.Lorentz(), 3) == 4 and hooks.ambient_dim(geoopt.Sphere(), 3) == 4

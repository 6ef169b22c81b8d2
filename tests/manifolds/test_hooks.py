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


class DistanceOnly(Bare):
    """geoopt's required methods and dist."""

    logmap = geoopt.Manifold.logmap
    transp = geoopt.Manifold.transp


def _points():
    torch.manual_seed(0)
    return Bare().projx(torch.randn(20, 3) + torch.tensor([3.0, 0.0, 0.0]))


def _embedding():
    ring = [(i, (i + 1) % 6) for i in range(6)]
    return hs.embedding.GraphEmbedding(DistanceOnly(), 3, n_epochs=2, random_state=0).fit(ring)


def _write(memory, x):
    for _ in range(3):
        memory.write(x, torch.ones(20, 2), torch.ones(20))


WANT_A_LOGARITHM = {
    "frechet_mean": (lambda m, x: hs.frechet_mean(x, m), "a Frechet mean"),
    "midpoint": (lambda m, x: hs.midpoint(x, m), "a Frechet mean"),
    "midpoint of a product": (
        lambda m, x: hs.midpoint(torch.cat((x, x), -1), hs.Product((hs.Sphere(), 3), (m, 3))),
        "a Frechet mean",
    ),
    "midpoint of geoopt's scaled": (lambda m, x: hs.midpoint(x, geoopt.Scaled(m, 2.0)), "a Frechet mean"),
    "value_manifold": (
        lambda m, x: hs.attention.geodesic_attention(x, x, x, m, value_manifold=m),
        r"a mean of values on it needs: define it, or lift\(x\) and settle\(mean\)",
    ),
    "summary_attention": (
        lambda m, x: hs.attention.summary_attention(x, x, x, m, slots=2),
        "running mean of a summary",
    ),
    "DynamicMemory": (lambda m, x: _write(hs.memory.DynamicMemory(3, 2, 4, m), x), r"DynamicMemory\.write"),
    "HyperbolicCompressor": (
        lambda m, x: hs.memory.HyperbolicCompressor(manifold=m).encode(x),
        r"or to_polar\(x\) and from_polar\(unit, radius\)",
    ),
    "plot": (lambda m, x: _embedding().plot(), r"picture\(\) that is not"),
    "partial_fit": (lambda m, x: _embedding().partial_fit([(0, 9)]), "beside its neighbours"),
    "Product.logmap": (lambda m, x: hs.Product((m, 3)).logmap(x, x), r"Product\.logmap"),
    "Scaled.logmap": (lambda m, x: hs.Scaled(m).logmap(x, x), r"Scaled\.logmap"),
}


@pytest.mark.parametrize("name", WANT_A_LOGARITHM)
def test_a_missing_logarithm_is_named(name):
    use, user = WANT_A_LOGARITHM[name]
    match = rf"DistanceOnly has no logmap\(x, y\), which .*{user}.*docs/add_a_manifold\.md"
    with pytest.raises(NotImplementedError, match=match):
        use(DistanceOnly(), _points())


def test_an_error_of_a_logarithm_that_is_there_is_kept():
    class Antipodal(Bare):
        def logmap(self, x, y):
            raise NotImplementedError("of antipodes")

    with pytest.raises(NotImplementedError, match=r"^of antipodes$"):
        hs.frechet_mean(_points(), Antipodal())


OPTIMIZERS = {
    "Adam": lambda p, **how: hs.optim.RiemannianAdam([p], lr=0.05, **how),
    "SGD": lambda p, **how: hs.optim.RiemannianSGD([p], lr=0.05, momentum=0.9, **how),
}
SPACES = {
    "itself": lambda m: m,
    "product": lambda m: hs.Product((m, 3), (hs.Sphere(), 3)),
    "scaled": lambda m: hs.Scaled(m, 2.0),
    "geoopt's product": lambda m: geoopt.ProductManifold((m, 3)),
}


@pytest.mark.parametrize("retraction", [False, True])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_without_transport_are_projected(optimizer, space, retraction):
    manifold = SPACES[space](DistanceOnly())
    x = _points().repeat(1, getattr(manifold, "n_elements", 3) // 3)
    p = hs.ManifoldParameter(x, manifold)
    steps = OPTIMIZERS[optimizer](p, retraction=retraction)
    for _ in range(150):
        steps.zero_grad()
        (p[:, 0] + 2 * p[:, 1]).sum().backward()
        steps.step()
    assert manifold.check_point_on_manifold(p.detach())
    lowest = torch.tensor([-1.0, -2.0, 0.0]) / 5**0.5
    assert (p.detach()[:, :3] - lowest).norm(dim=-1).max() < 0.1
    (moment,) = (s for name, s in steps.state[p].items() if name in ("exp_avg", "momentum_buffer"))
    torch.testing.assert_close(manifold.proju(p.detach(), moment), moment, rtol=1e-4, atol=1e-5)


def test_transport_by_default_projects():
    bare, sphere, x = DistanceOnly(), hs.Sphere(), _points().double()
    y = x.flip(0)
    v = sphere.proju(x, torch.randn(20, 3, dtype=torch.float64))
    assert torch.equal(hooks.transp(bare, x, y, v), sphere.proju(y, v))
    assert torch.equal(hooks.transp(Bare(), x, y, v), sphere.transp(x, y, v))


def _lift(self, x):
    return x


def _settle(self, mean):
    return self.projx(mean)


def _wide(self, x):
    return torch.cat((x, x), -1)


HALF_MADE = {
    "lift alone": ({"lift": _lift}, "has lift and no settle"),
    "settle alone": ({"settle": _settle}, "has settle and no lift"),
    "lifted_size alone": ({"lifted_size": lambda self, stored: 6}, "has lifted_size and neither"),
    "no lifted_size": (
        {"lift": _wide, "settle": _settle},
        r"lift gives vectors of 6 numbers for points of 3, and lifted_size\(3\) is 3",
    ),
}


@pytest.mark.parametrize("what", HALF_MADE)
def test_half_a_mean_is_refused(what):
    methods, reason = HALF_MADE[what]
    half, x = type("Half", (Bare,), methods)(), _points()
    for use in (
        lambda: hs.midpoint(x, half),
        lambda: hs.midpoint(_wide(None, x), hs.Product((hs.Sphere(), 3), (half, 3))),
        lambda: hs.attention.geodesic_attention(x, x, x, half, value_manifold=half),
        lambda: hs.attention.geodesic_attention(x, x, x, hs.Sphere(), value_manifold=hs.Scaled(half)),
    ):
        with pytest.raises(TypeError, match=rf"Half.*{reason}.*docs/add_a_manifold\.md"):
            use()


def test_a_whole_mean_is_used():
    whole = type("Whole", (Bare,), {"lift": _lift, "settle": _settle})()
    x = _points()
    torch.testing.assert_close(hs.midpoint(x, whole), hs.midpoint(x, hs.Sphere()))


def _drawn_as(kind, **more):
    return type("Drawn", (Bare,), {"picture": lambda self: kind, **more})()


def test_pictures_of_an_unknown_word_or_without_curvature():
    with pytest.raises(ValueError, match=r"Drawn\.picture\(\) must return one of 'flat', 'ball'.*'none', got 'disk'"):
        hooks.picture(_drawn_as("disk"))
    for kind in ("ball", "hyperboloid"):
        with pytest.raises(TypeError, match=rf"picture\(\) is '{kind}'.*has no kappa: give it the attribute kappa"):
            hooks.picture(_drawn_as(kind))
        assert hooks.picture(_drawn_as(kind, kappa=-1.0)) == kind
    for kind in ("flat", "sphere", "tangent", "none"):
        assert hooks.picture(_drawn_as(kind)) == kind


def test_equivalents_that_have_no_chord():
    class Theirs(Bare):
        pass

    hs.manifolds.register_equivalent(Theirs, lambda theirs: theirs)
    x = _points()
    for wrong, got in ((lambda theirs: theirs, "Theirs"), (lambda theirs: Bare(), "Bare"), (lambda theirs: 3, "int")):
        hs.manifolds.register_equivalent(Theirs, wrong)
        with pytest.raises(TypeError, match=rf"register_equivalent for Theirs must return .* or None; got {got}"):
            hs.cdist(x, x, Theirs())
    hs.manifolds.register_equivalent(Theirs, lambda theirs: None)
    torch.testing.assert_close(hs.cdist(x, x, Theirs()), hs.cdist(x, x, hs.Sphere()), rtol=1e-4, atol=1e-3)
    hs.manifolds.register_equivalent(Theirs, lambda theirs: hs.Sphere())
    assert torch.equal(hs.cdist(x, x, Theirs()), hs.cdist(x, x, hs.Sphere()))


@pytest.mark.parametrize("made", [lambda x: x, lambda x: (hs.Chord(x, None, 0, 1.0), x)], ids=["tensor", "pair"])
def test_a_chord_that_is_none_is_refused(made):
    wrong, x = type("Wrong", (Bare,), {"chord": lambda self, x: made(x)})(), _points()
    for use in (lambda: hs.cdist(x, x, wrong), lambda: hs.knn(x, x, wrong, 2), lambda: hs.chord_of(wrong, x)):
        with pytest.raises(TypeError, match=r"Wrong\.chord\(x\) must return a horosphere\.Chord.*got Tensor"):
            use()


A_CLASS = {
    "cdist": lambda cls, x: hs.cdist(x, x, cls),
    "knn": lambda cls, x: hs.knn(x, x, cls, 2),
    "frechet_mean": lambda cls, x: hs.frechet_mean(x, cls),
    "convert": lambda cls, x: hs.convert(x, hs.Sphere(), cls),
    "GraphEmbedding": lambda cls, x: hs.embedding.GraphEmbedding(cls).fit([(0, 1)]),
    "GeodesicRouter": lambda cls, x: hs.routing.GeodesicRouter(3, 4, manifold=cls),
    "DynamicMemory": lambda cls, x: hs.memory.DynamicMemory(3, 2, 4, manifold=cls),
    "SummaryCache": lambda cls, x: hs.memory.SummaryCache(cls),
    "HyperbolicCompressor": lambda cls, x: hs.memory.HyperbolicCompressor(manifold=cls),
    "geodesic_attention": lambda cls, x: hs.attention.geodesic_attention(x, x, x, cls),
    "value_manifold": lambda cls, x: hs.attention.geodesic_attention(x, x, x, hs.Sphere(), value_manifold=cls),
    "GeodesicAttention": lambda cls, x: hs.attention.GeodesicAttention(8, 2, manifold=cls),
    "ManifoldParameter": lambda cls, x: hs.ManifoldParameter(x, cls),
    "Product": lambda cls, x: hs.Product((cls, 3)),
    "Scaled": lambda cls, x: hs.Scaled(cls),
}


@pytest.mark.parametrize("cls", [Bare, hs.PoincareBall])
@pytest.mark.parametrize("door", A_CLASS)
def test_a_class_in_place_of_an_instance(door, cls):
    with pytest.raises(TypeError, match=rf"got the class {cls.__name__}; make an instance: {cls.__name__}\(\)"):
        A_CLASS[door](cls, _points())


def test_the_origin_of_a_class_with_random_points_alone_is_one_point():
    class Own(geoopt.Euclidean):
        origin = geoopt.Manifold.origin  # draws a point for every row

        def random(self, *size, dtype=None, device=None):
            return torch.randn(*size, dtype=dtype, device=device)

    assert torch.equal(hooks.origin(Own(ndim=1), 5, 3), torch.zeros(5, 3))

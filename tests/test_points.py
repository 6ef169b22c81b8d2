"""Points come in by one door, and the default device plays no part."""

import warnings

import numpy as np
import pytest
import torch

import horosphere as hs
from horosphere._points import as_points
from horosphere.attention import GeodesicAttention, geodesic_attention
from horosphere.embedding import GraphEmbedding
from horosphere.memory import DynamicMemory
from horosphere.models import FiberBundleConfig, FiberBundleLM, GeoResolverConfig, GeoResolverLM, HyperGate
from horosphere.optim import RiemannianAdam
from horosphere.routing import GeodesicRouter

NUMBERS = np.array([[0.1, 0.2], [0.3, -0.4], [0.0, 0.5]])


class Frame:
    """What pandas and polars frames have in common: columns behind [], numbers behind to_numpy."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, name):
        raise KeyError(name)

    def __len__(self):
        return len(self.array)

    def to_numpy(self):
        return self.array


def read_only():
    array = NUMBERS.copy()
    array.flags.writeable = False
    return array


ROWS = {
    "list": NUMBERS.tolist(),
    "reversed": NUMBERS[::-1].copy()[::-1],
    "big endian": NUMBERS.astype(">f8"),
    "columns": np.asfortranarray(NUMBERS),
    "read-only": read_only(),
    "long double": NUMBERS.astype(np.longdouble),
    "field of a record": np.rec.fromarrays([np.zeros(3, "i1"), NUMBERS], dtype=[("a", "i1"), ("b", "f8", 2)])["b"],
    "frame": Frame(NUMBERS),
    "list of arrays": list(NUMBERS),
}


@pytest.mark.parametrize("kind", ROWS)
def test_every_kind_of_rows_is_read(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = as_points(ROWS[kind], "x")
    assert torch.equal(found.double(), torch.tensor(NUMBERS).to(found.dtype).double())


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8])
def test_integers_become_the_default_type(dtype):
    rows = torch.tensor([[3, 0], [0, 4]], dtype=dtype)
    flat = hs.Euclidean()
    assert hs.cdist(rows, rows, flat).tolist() == [[0.0, 5.0], [5.0, 0.0]]
    assert flat.dist(rows[0], rows[1]).item() == 5.0
    assert hs.frechet_mean(rows, flat).mean.tolist() == [1.5, 2.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.eye(2).to_sparse(), "x must be a dense tensor.*sparse_coo.*to_dense"),
        (torch.eye(2, dtype=torch.complex64), "x must hold real numbers, got torch.complex64"),
        (torch.eye(2, dtype=torch.bool), "x must hold real numbers, got torch.bool"),
        (np.array([["a", "b"]]), "x must hold real numbers, got a array of type <U1"),
        (Frame(np.array([[1.0, "a"]], dtype=object)), "x must hold real numbers, got a Frame.*select numeric columns"),
        (np.ma.masked_equal(NUMBERS, 0.5), "x must have every number"),
        ({}, "x must be a tensor, an array.*got dict"),
        (None, "x must be a tensor, an array.*got NoneType"),
        ("points", "x must be a tensor, an array.*got str"),
        ([[1.0], [1.0, 2.0]], "x must be a tensor, an array.*got list"),
    ],
)
def test_what_is_no_points_is_named(value, message):
    with pytest.raises(TypeError, match=message):
        hs.cdist(value, torch.eye(2), hs.PoincareBall())


def adam_step(x, ball):
    point = hs.ManifoldParameter(x.clone(), ball)
    optimizer = RiemannianAdam([point], lr=0.1)
    point.square().sum().backward()
    optimizer.step()
    return point.detach()


def fitted(x, ball):
    model = GraphEmbedding(n_epochs=2, random_state=0).fit([(0, 1), (1, 2), (0, 2)])
    return torch.from_numpy(model.embedding_)


CALLS = {
    "cdist": lambda x, ball: hs.cdist(x, x, ball),
    "attention": lambda x, ball: geodesic_attention(x, x, x, ball),
    "knn": lambda x, ball: hs.knn(x, x, ball, 3).distances,
    "convert": lambda x, ball: hs.convert(x, ball, hs.Lorentz()),
    "mean": lambda x, ball: hs.frechet_mean(x, ball).mean,
    "midpoint": lambda x, ball: hs.midpoint(x, ball),
    "adam": adam_step,
    "fit": fitted,
    "lists": lambda x, ball: hs.cdist(NUMBERS.tolist(), NUMBERS.tolist(), ball),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_default_device_plays_no_part(name):
    x = torch.rand(1, 300, 3, generator=torch.Generator().manual_seed(0)) * 0.3
    expected = CALLS[name](x, hs.PoincareBall())
    with torch.device("meta"):
        found = CALLS[name](x, hs.PoincareBall())
    assert torch.equal(found, expected)


MODULES = {
    "sphere": lambda: GeodesicAttention(8, 2, manifold=hs.Sphere()),
    "learnable": lambda: GeodesicAttention(8, 2, manifold=hs.PoincareBall(learnable=True)),
    "gate": lambda: HyperGate(8, 2),
    "router": lambda: GeodesicRouter(8, 4, 2, learn_eps=True),
    "memory": lambda: DynamicMemory(8, 8, 16),
    "georesolver": lambda: GeoResolverLM(GeoResolverConfig(20, 16, 1, 2)),
    "fiber bundle": lambda: FiberBundleLM(FiberBundleConfig(20, 16, 1, 2)),
    "ball": lambda: hs.PoincareBall(-2.0, learnable=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_built_on_meta_and_filled_later(name):
    expected = MODULES[name]().state_dict()
    with torch.device("meta"):
        module = MODULES[name]()
    assert all(t.is_meta for t in module.state_dict().values())
    module.to_empty(device="cpu").load_state_dict(expected)
    found = module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


ONE_SET = {
    "ball": hs.PoincareBall(),
    "hyperboloid": hs.Lorentz(),
    "sphere": hs.Sphere(),
    "flat": hs.Euclidean(),
    "product": hs.Product((hs.PoincareBall(), 2), (hs.Euclidean(), 2)),
}


ONE_SET_CASES = [
    *(
        (name, dtype, impl)
        for name in ONE_SET
        for dtype in (torch.float32, torch.float64)
        for impl in ("reference", "tiled")
    ),
    *((name, torch.float32, "numba") for name in ONE_SET if name != "product"),  # its loop takes one float32 part
]


@pytest.mark.parametrize(("name", "dtype", "impl"), ONE_SET_CASES)
def test_distances_of_one_set_are_symmetric(name, dtype, impl):
    manifold = ONE_SET[name]
    torch.manual_seed(0)
    x = manifold.projx(0.5 * torch.randn(1301, 4, dtype=dtype))
    x[700:704] = x[3]  # pairs that are not resolved, below the diagonal too
    d = hs.cdist(x, x, manifold, impl=impl)
    assert torch.equal(d, d.mT)
    assert not d.diagonal().any()
    assert not d[700:704, 3].any()
    other = hs.cdist(x, x.clone(), manifold, impl=impl)
    promise = 2e-5 if dtype == torch.float32 else 2e-12
    assert ((d - other).abs() <= promise * other).all()


@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_batches_of_one_set_are_symmetric(impl):
    torch.manual_seed(0)
    x = hs.Sphere().projx(torch.randn(3, 70, 4))
    x[:, 20] = x[:, 10]
    d = hs.cdist(x, x, hs.Sphere(), impl=impl)
    assert torch.equal(d, d.mT)
    torch.testing.assert_close(d, hs.cdist(x, x.clone(), hs.Sphere(), impl=impl), rtol=2e-5, atol=0)


@pytest.mark.parametrize("impl", ["reference", "tiled", "auto"])
def test_gradients_of_the_symmetric_matrix_are_those_of_both_sides(impl):
    torch.manual_seed(0)
    x = (0.1 * torch.randn(300, 3, dtype=torch.float64)).requires_grad_()
    weight = torch.randn(300, 300, dtype=torch.float64)
    ball = hs.PoincareBall()
    one = torch.autograd.grad((weight * hs.cdist(x, x, ball, squared=True, impl=impl)).sum(), x)[0]
    two = torch.autograd.grad((weight * hs.cdist(x, x.clone(), ball, squared=True, impl=impl)).sum(), x)[0]
    torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


def test_sizes_and_numbers_out_of_range_are_refused():
    empty, x, ball = torch.zeros(3, 0), torch.zeros(3, 2), hs.PoincareBall()
    for call in (
        lambda: hs.cdist(empty, empty, ball),
        lambda: hs.knn(empty, empty, ball, 1),
        lambda: geodesic_attention(empty, empty, x, ball),
    ):
        with pytest.raises(ValueError, match=r"at least one number, got shape \(3, 0\)"):
            call()
    with pytest.raises(ValueError, match="power must be at most 1e"):
        geodesic_attention(x, x, x, ball, power=1e300)
    for kappa in (1e300, -1e300, torch.tensor(1e300, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"Stereographic: kappa must be finite, at most 1e\+16"):
            hs.Stereographic(kappa)
    with pytest.raises(TypeError, match=r"manifold must be a geoopt.Manifold.*got str"):
        GeodesicAttention(8, 2, manifold="poincare")


def test_the_first_row_that_is_no_point_is_named():
    x = torch.zeros(2, 5, 3)
    x[1, 2, 0], x[1, 4, 0] = 1.5, torch.nan
    assert hs.validate_points(x[0], hs.PoincareBall()) is not None
    with pytest.raises(ValueError, match=r"query\[1, 2\] is no point of PoincareBall.*outside the ball"):
        hs.validate_points(x, hs.PoincareBall(), name="query")
    with pytest.raises(ValueError, match=r"x\[0, 0\] is no point of Lorentz.*time coordinate"):
        hs.validate_points(x, hs.Lorentz())
    with pytest.raises(ValueError, match=r"x\[1, 4\].*finite"):
        hs.validate_points(x, hs.Euclidean())


def test_neighbours_of_deep_float32_points_are_exact():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 10, generator=generator, dtype=torch.float64).repeat_interleave(500, 0)
    near = centres + 1e-4 * torch.randn(2000, 10, generator=generator, dtype=torch.float64)
    radius = 8 + 2.9 * torch.rand(2000, 1, generator=generator, dtype=torch.float64)
    x = (torch.nn.functional.normalize(near, dim=-1) * torch.tanh(radius / 2)).float()
    found = hs.knn(x[:40], x, hs.PoincareBall(), 5)
    wanted = hs.knn(x[:40], x, hs.PoincareBall(), 5, precision="exact")
    assert torch.equal(found.indices, wanted.indices)

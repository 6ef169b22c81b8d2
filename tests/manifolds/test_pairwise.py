"""cdist and knn: shapes, types, batches, curvature per batch entry, level 0, blocks, ties, and what is refused."""

import math

import numpy as np
import pytest
import torch

import horosphere as hs
from horosphere.manifolds import pairwise
from horosphere.manifolds._geoopt import geoopt

F32, F64 = torch.float32, torch.float64
PRECISIONS = ("auto", "exact", "fast")
MANIFOLDS = {
    "flat": hs.Euclidean,
    "ball": lambda: hs.PoincareBall(-0.7),
    "ball learnable": lambda: hs.PoincareBall(-0.7, learnable=True),
    "sphere": lambda: hs.Sphere(0.5),
    "hyperboloid": lambda: hs.Lorentz(-2.0),
    "stereographic": lambda: hs.Stereographic(0.3, learnable=True),
    "product": lambda: hs.Product((hs.PoincareBall(-1.0), 2), (hs.Sphere(), 3)),
    "scaled": lambda: hs.Scaled(hs.PoincareBall(-1.0), 2.5, learnable=True),
}
every_manifold = pytest.mark.parametrize("name", MANIFOLDS)


def draw(manifold, *shape, dtype=F64, seed=0):
    size = getattr(manifold, "n_elements", 4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return manifold.random(*shape, size, dtype=dtype)


class Taxicab(geoopt.Euclidean):
    """Level 0: a manifold of a user's own, with only a distance."""

    def __init__(self):
        super().__init__(1)

    def dist(self, x, y, *, keepdim=False):
        return (x - y).abs().sum(-1, keepdim=keepdim)


class StretchedBall(hs.PoincareBall):
    """A subclass that overrides dist: the parent's chord is not its own."""

    def dist(self, x, y, *, keepdim=False):
        return 3 * super().dist(x, y, keepdim=keepdim)


class ChordOnly(geoopt.Euclidean):
    """Level 1 without the exact hook: the line x -> (x, x^2) of R^2, straight chords between its points."""

    def __init__(self):
        super().__init__(1)

    def chord(self, x):
        return hs.Chord(torch.cat((x, x**2), -1), None, 0, 0.0)


# shapes and types


@every_manifold
@pytest.mark.parametrize("precision", PRECISIONS)
def test_batch_dimensions_broadcast(name, precision):
    manifold = MANIFOLDS[name]()
    x, y = draw(manifold, 2, 1, 5), draw(manifold, 3, 4, seed=1)
    d = hs.cdist(x, y, manifold, precision=precision)
    assert d.shape == (2, 3, 5, 4)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(d[i, j], hs.cdist(x[i, 0], y[j], manifold, precision=precision))
    near = hs.knn(x, y, manifold, 2, precision=precision)
    assert near.distances.shape == near.indices.shape == (2, 3, 5, 2)
    torch.testing.assert_close(near.distances, d.sort(-1).values[..., :2], rtol=1e-6, atol=1e-7)


@every_manifold
@pytest.mark.parametrize("precision", PRECISIONS)
def test_squared_is_the_square(name, precision):
    manifold = MANIFOLDS[name]()
    x, y = draw(manifold, 5, dtype=F32), draw(manifold, 3, dtype=F32, seed=1)
    squared = hs.cdist(x, y, manifold, squared=True, precision=precision)
    torch.testing.assert_close(hs.cdist(x, y, manifold, precision=precision) ** 2, squared)


@every_manifold
def test_types_are_promoted_and_kept(name):
    manifold = MANIFOLDS[name]()
    x = draw(manifold, 5)
    for dtype in (torch.float16, torch.bfloat16, F32, F64):
        y = manifold.projx(x.to(dtype)).detach()
        for precision in PRECISIONS:
            assert hs.cdist(y, y, manifold, precision=precision).dtype == dtype
        assert hs.knn(y, y, manifold, 2).distances.dtype == dtype
    assert hs.cdist(x.float(), x, manifold).dtype == F64


def test_numpy_arrays_and_lists_are_accepted():
    x = np.random.default_rng(0).normal(size=(5, 3)) * 0.3
    for manifold in (hs.PoincareBall(), hs.Euclidean()):
        expected = hs.cdist(torch.from_numpy(x), torch.from_numpy(x), manifold)
        assert torch.equal(hs.cdist(x, x, manifold), expected)
        assert hs.cdist(x.astype(np.float32), x.astype(np.float32), manifold).dtype == F32
        assert torch.equal(hs.knn(x, torch.from_numpy(x), manifold, 2).indices[:, 0], torch.arange(5))
    assert hs.cdist([[0, 0]], [[3, 4]], hs.Euclidean()).item() == 5.0


@every_manifold
@pytest.mark.parametrize("precision", PRECISIONS)
def test_empty_sets(name, precision):
    manifold = MANIFOLDS[name]()
    x = draw(manifold, 3)
    for n, m in ((0, 3), (3, 0), (0, 0)):
        d = hs.cdist(x[:n], x[:m], manifold, precision=precision)
        assert d.shape == (n, m) and d.dtype == F64
    assert hs.cdist(x[None][:0], x, manifold, precision=precision).shape == (0, 3, 3)
    near = hs.knn(x[:0], x, manifold, 2, precision=precision)
    assert near.distances.shape == near.indices.shape == (0, 2)


def test_non_contiguous_points():
    manifold = hs.PoincareBall()
    x = draw(manifold, 8).mT.contiguous().mT[::2]
    torch.testing.assert_close(hs.cdist(x, x, manifold), hs.cdist(x.contiguous(), x.contiguous(), manifold))


# what is refused


def test_bad_input_is_named():
    ball = hs.PoincareBall()
    x = torch.zeros(3, 2)
    refused = (
        (ValueError, r"x must hold points as rows.*\(2,\)", (x[0], x, ball), {}),
        (ValueError, r"points of one size.*\(3, 2\) and \(3, 3\)", (x, torch.zeros(3, 3), ball), {}),
        (
            ValueError,
            r"batch dimensions of x \(2, 3, 2\) and y \(3, 3, 2\)",
            (x.expand(2, 3, 2), x.expand(3, 3, 2), ball),
            {},
        ),
        (ValueError, "precision must be one of.*'high'", (x, x, ball), {"precision": "high"}),
        (ValueError, "x is on meta and y on cpu", (x.to("meta"), x, ball), {}),
        (TypeError, "manifold must be a geoopt.Manifold.*got str", (x, x, "ball"), {}),
        (TypeError, "x must hold real numbers, got torch.complex64", (x.to(torch.complex64), x, ball), {}),
        (TypeError, "y must be a tensor, an array.*got dict", (x, {}, ball), {}),
    )
    for kind, message, args, options in refused:
        with pytest.raises(kind, match=message):
            hs.cdist(*args, **options)
        with pytest.raises(kind, match=message):
            hs.knn(*args, 1, **options)
    with pytest.raises(ValueError, match=r"stores 5 numbers a point, got shape \(3, 2\)"):
        hs.cdist(x, x, hs.Product((ball, 2), (hs.Sphere(), 3)))


@pytest.mark.parametrize("k", (0, -1, 4))
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=rf"k must lie between 1 and .* 3; got {k}"):
        hs.knn(torch.zeros(5, 2), torch.zeros(3, 2), hs.Euclidean(), k)


# curvature per batch entry


@pytest.mark.parametrize("cls", (hs.PoincareBall, hs.Sphere, hs.Lorentz, hs.Stereographic))
@pytest.mark.parametrize("learnable", (False, True))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_curvature_of_each_head(cls, learnable, precision):
    values = torch.tensor([0.5, 1.0, 2.0], dtype=F64)
    values = values if cls is hs.Sphere else torch.tensor([-0.5, 0.0, 2.0]) if cls is hs.Stereographic else -values
    manifold = cls(values, learnable=learnable)
    single = [cls(v.item()) for v in values]
    x, y = (torch.stack([draw(m, 2, n, seed=n) for m in single], 1) for n in (5, 4))
    x[..., 0, :] = y[..., 0, :]  # a coincident pair, which "auto" and "exact" take another way
    assert x.shape == (2, 3, 5, 4)
    d = hs.cdist(x, y, manifold, precision=precision)
    assert d.shape == (2, 3, 5, 4)
    for h, m in enumerate(single):
        torch.testing.assert_close(d[:, h], hs.cdist(x[:, h], y[:, h], m, precision=precision), rtol=1e-6, atol=1e-7)
    near = hs.knn(x, y, manifold, 2, precision=precision)
    torch.testing.assert_close(near.distances, d.sort(-1).values[..., :2], rtol=1e-6, atol=2e-7)
    if learnable:
        if precision != "fast":
            (grad,) = torch.autograd.grad(d.sum(), manifold.kappa)
            for h, m in enumerate(single):
                own = cls(m.kappa, learnable=True)
                (one,) = torch.autograd.grad(hs.cdist(x[:, h], y[:, h], own, precision="exact").sum(), own.kappa)
                assert grad[h].item() == pytest.approx(one.item(), rel=1e-6)
    wrong = r"kappa of shape \(3,\).*points of shape "
    with pytest.raises(ValueError, match=wrong + r"\(5, 4\)"):
        hs.cdist(x[0, 0], y[0, 0], manifold, precision=precision)
    with pytest.raises(ValueError, match=wrong + r"\(2, 5, 4\)"):
        hs.cdist(x[:, 0], y[:, 0], manifold, precision=precision)


@pytest.mark.parametrize("cls", (hs.PoincareBall, hs.Sphere, hs.Lorentz, hs.Stereographic))
def test_maps_with_a_curvature_of_each_head(cls):
    values = torch.tensor([0.5, 1.0, 2.0], dtype=F64)
    values = values if cls is hs.Sphere else torch.tensor([-0.5, 0.0, 2.0]) if cls is hs.Stereographic else -values
    manifold, single = cls(values), [cls(v.item()) for v in values]
    x, y = (torch.stack([draw(m, 2, 5, seed=n) for m in single], 1) for n in (0, 1))
    v = manifold.proju(x, draw(hs.Euclidean(), 2, 3, 5, seed=2))
    assert torch.equal(manifold.take_batch((2, 3), torch.tensor([1, 5])).kappa, values[[1, 2]])
    for method, args in (
        ("dist", (x, y)),
        ("logmap", (x, y)),
        ("expmap", (x, v)),
        ("retr", (x, v)),
        ("transp", (x, y, v)),
        ("inner", (x, v)),
        ("norm", (x, v)),
        ("projx", (3 * x,)),
        ("proju", (x, y)),
        ("egrad2rgrad", (x, y)),
        ("dist0", (x,)),
        ("expmap0", (manifold.proju(torch.zeros_like(x), v) if cls is not hs.Sphere else 0 * v,)),
    ):
        found = getattr(manifold, method)(*args)
        for h, m in enumerate(single):
            expected = getattr(m, method)(*(a[:, h] for a in args))
            torch.testing.assert_close(
                found[:, h], expected, rtol=1e-10, atol=1e-12, msg=lambda e, n=method: f"{n}: {e}"
            )


def test_curvature_of_each_head_in_a_scaled_product():
    kappa = torch.tensor([-0.5, -2.0], dtype=F64)
    manifold = hs.Scaled(hs.Product((hs.PoincareBall(kappa), 2), (hs.Sphere(), 3)), 1.5)
    x = torch.stack([draw(hs.Product((hs.PoincareBall(k), 2), (hs.Sphere(), 3)), 4) for k in (-0.5, -2.0)])
    for precision in ("auto", "exact"):
        d = hs.cdist(x, x, manifold, precision=precision)
        assert torch.equal(d.diagonal(dim1=-2, dim2=-1), torch.zeros(2, 4, dtype=F64))
        for h, k in enumerate((-0.5, -2.0)):
            one = hs.Scaled(hs.Product((hs.PoincareBall(k), 2), (hs.Sphere(), 3)), 1.5)
            torch.testing.assert_close(d[h], hs.cdist(x[h], x[h], one, precision=precision))


# levels


@pytest.mark.parametrize("precision", PRECISIONS)
def test_level_0_goes_through_dist(precision, monkeypatch):
    manifold = Taxicab()
    x, y = draw(manifold, 2, 7), draw(manifold, 5, seed=1)
    true = (x[:, :, None] - y).abs().sum(-1)
    assert hs.chord_of(manifold, x) is None
    torch.testing.assert_close(hs.cdist(x, y, manifold, precision=precision), true)
    near = hs.knn(x, y, manifold, 3, precision=precision)
    torch.testing.assert_close(near.distances, true.sort(-1).values[..., :3])
    monkeypatch.setattr(pairwise, "BLOCK_NUMBERS", 60)
    torch.testing.assert_close(hs.cdist(x, y, manifold, precision=precision), true)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(hs.cdist(x, y, manifold, precision=precision).sum(), x)
    torch.testing.assert_close(grad, (x[:, :, None] - y).sign().sum(-2))


def test_level_0_inside_of_a_product_and_a_scale():
    part = hs.Product((Taxicab(), 2), (hs.Sphere(), 3))
    x = draw(part, 6)
    flat = (x[:, None, :2] - x[:, :2]).abs().sum(-1)
    true = torch.sqrt(flat**2 + hs.cdist(x[:, 2:], x[:, 2:], hs.Sphere()) ** 2)
    for manifold, scale in ((part, 1.0), (hs.Scaled(part, 2.0), 2.0), (geoopt.Scaled(Taxicab(), 2.0), None)):
        if scale is None:
            torch.testing.assert_close(hs.cdist(x[:, :2], x[:, :2], manifold), 2 * flat, rtol=1e-6, atol=0)
            continue
        assert hs.chord_of(manifold, x) is None
        for precision in PRECISIONS:
            torch.testing.assert_close(hs.cdist(x, x, manifold, precision=precision), scale * true)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_subclass_with_its_own_dist_does_not_inherit_the_chord(precision):
    own, parent = StretchedBall(-1.0), hs.PoincareBall(-1.0)
    x = draw(parent, 5)
    assert hs.chord_of(own, x) is None and hs.chord_of(parent, x) is not None
    torch.testing.assert_close(
        hs.cdist(x, x, own, precision=precision), 3 * hs.cdist(x, x, parent, precision="exact"), rtol=1e-10, atol=1e-12
    )
    inside = hs.Scaled(own, 2.0)
    torch.testing.assert_close(hs.cdist(x, x, inside, precision=precision), 6 * hs.cdist(x, x, parent))


def test_level_1_without_a_hook_takes_differences_of_features():
    x = torch.tensor([[0.5], [0.5 + 1e-6], [2.0]], dtype=F32)
    wide = x.double()
    delta, square = wide - wide.mT, wide**2 - (wide**2).mT
    true = torch.sqrt(delta**2 + square**2)
    for precision in ("auto", "exact"):
        torch.testing.assert_close(hs.cdist(x, x, ChordOnly(), precision=precision).double(), true, rtol=1e-5, atol=0)


def test_geoopts_scaled_is_not_mistaken_for_its_base():
    scaled = geoopt.Scaled(geoopt.PoincareBall(c=1.0), 2.0)
    x = draw(hs.PoincareBall(), 5)
    twice = 2 * hs.cdist(x, x, hs.PoincareBall())
    torch.testing.assert_close(hs.cdist(x, x, scaled), twice, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        hs.cdist(x, x, geoopt.Scaled(geoopt.Scaled(geoopt.PoincareBall(c=1.0), 2.0), 3.0)), 3 * twice, rtol=1e-6, atol=0
    )


# neighbours


@every_manifold
@pytest.mark.parametrize("dtype", (F32, F64), ids=("float32", "float64"))
def test_108_neighbours_equal_brute_force(name, dtype):
    manifold = MANIFOLDS[name]()
    x, y = draw(manifold, 7, dtype=dtype), draw(manifold, 300, dtype=dtype, seed=1)
    true = hs.cdist(x, y, manifold, precision="exact").detach()
    order = true.sort(dim=-1, stable=True)
    near = hs.knn(x, y, manifold, 10)
    assert torch.equal(near.indices, order.indices[:, :10])
    torch.testing.assert_close(near.distances, order.values[:, :10], rtol=1e-6, atol=0)
    assert torch.equal(hs.knn(x, y, manifold, 300).distances.sort(-1).values, hs.knn(x, y, manifold, 300).distances)


@every_manifold
def test_ties_go_to_the_smaller_index(name):
    manifold = MANIFOLDS[name]()
    y = draw(manifold, 4, dtype=F32)[[2, 0, 1, 0, 3, 0, 2, 1]].detach()
    x = y[[1, 0]]
    for precision in PRECISIONS:
        for k in (1, 2, 3, 5, 8):
            near = hs.knn(x, y, manifold, k, precision=precision)
            brute = hs.cdist(x, y, manifold, precision="exact").sort(dim=-1, stable=True).indices[:, :k]
            if precision != "fast" or k in (3, 8):  # "fast" may rank coincident points in any order
                assert torch.equal(near.indices[:1, :3], brute[:1, :3])
            assert torch.equal(near.indices, brute) or precision == "fast"


def test_all_points_equal():
    x = torch.full((6, 3), 0.1)
    near = hs.knn(x, x, hs.PoincareBall(), 4)
    assert torch.equal(near.indices, torch.arange(4).expand(6, 4))
    assert torch.equal(near.distances, torch.zeros(6, 4))


@every_manifold
def test_gradients_of_neighbours(name):
    manifold = MANIFOLDS[name]()
    x, y = draw(manifold, 3).requires_grad_(), draw(manifold, 6, seed=1).requires_grad_()
    inputs = (x, y, *manifold.parameters())
    near = hs.knn(x, y, manifold, 2)
    weights = torch.tensor([1.0, 2.0], dtype=F64)
    found = torch.autograd.grad((near.distances * weights).sum(), inputs)
    picked = torch.gather(hs.cdist(x, y, manifold), -1, near.indices)
    for a, b in zip(found, torch.autograd.grad((picked * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    x = x.detach().requires_grad_()  # a point is its own neighbour: gradient 0, not NaN
    (grad,) = torch.autograd.grad(hs.knn(x, x, manifold, 1).distances.sum(), x)
    assert torch.equal(grad, torch.zeros_like(x))


# blocks


@every_manifold
@pytest.mark.parametrize("precision", ("auto", "fast"))
def test_both_engines_agree(name, precision):
    manifold = MANIFOLDS[name]()
    x, y = draw(manifold, 2, 37).requires_grad_(), draw(manifold, 1, 29, seed=1).requires_grad_()
    with torch.no_grad():
        x[0, 3] = y[0, 5]
    inputs = (x, y, *manifold.parameters())

    def everything(impl):
        d = hs.cdist(x, y, manifold, precision=precision, impl=impl, squared=True)
        first = torch.autograd.grad((d * d.detach().cos()).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), inputs)
        return (d, *first, *second)

    for a, b in zip(everything("tiled"), everything("reference"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_an_engine_is_used_or_refused():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="impl must be one of"):
        hs.cdist(x, x, hs.Euclidean(), impl="fastest")
    with pytest.raises(ValueError, match=r"impl='tiled'.*use impl='auto'"):
        hs.cdist(x, x, hs.Euclidean(), precision="exact", impl="tiled")
    with pytest.raises(ValueError, match=r"impl='tiled'.*dist alone"):
        hs.cdist(x, x, Taxicab(), impl="tiled")


@every_manifold
@pytest.mark.parametrize("precision", PRECISIONS)
def test_blocks_equal_one_block(name, precision, monkeypatch):
    manifold = MANIFOLDS[name]()
    x, y = draw(manifold, 2, 11).requires_grad_(), draw(manifold, 5, seed=1).requires_grad_()
    inputs = (x, y, *manifold.parameters())

    def everything():
        d = hs.cdist(x, y, manifold, precision=precision)
        first = torch.autograd.grad((d * d.detach().cos()).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), inputs)
        near = hs.knn(x, y, manifold, 3, precision=precision)
        with torch.no_grad():
            plain = hs.cdist(x, y, manifold, precision=precision)
        return (d, plain, *first, *second, near.distances, near.indices)

    whole = everything()
    for numbers in (1, 30, 100):
        monkeypatch.setattr(pairwise, "BLOCK_NUMBERS", numbers)
        for a, b in zip(everything(), whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_blocks_under_vmap(monkeypatch):
    manifold = hs.PoincareBall()
    x, y = draw(manifold, 2, 11), draw(manifold, 2, 5, seed=1)
    monkeypatch.setattr(pairwise, "BLOCK_NUMBERS", 30)

    def total(a, b):
        return hs.cdist(a, b, manifold).sum()

    found = torch.func.vmap(torch.func.grad(total))(x, y)
    x.requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(hs.cdist(x, y, manifold).sum(), x)[0])


# numbers too large or small for the square


def test_infinity_stays_infinity():
    ball = hs.PoincareBall()
    x = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    for precision in ("auto", "exact"):
        d = hs.cdist(x, x[1:], ball, precision=precision)
        assert d[0, 0] == math.inf and d[1, 0] == 0

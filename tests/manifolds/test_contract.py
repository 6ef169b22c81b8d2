"""Every law on every manifold of ours, on geoopt's objects what holds there, and the contract itself on broken
manifolds.
"""

import ast
import inspect

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

import horosphere as hs
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import chords
from horosphere.testing import _checks, contract
from tests.manifolds import hard_pairs, oracle


class TestEuclidean(hs.testing.ManifoldContract):
    def make_manifold(self):
        return hs.Euclidean()


class TestPoincareBall(hs.testing.ManifoldContract):
    def make_manifold(self):
        return hs.PoincareBall(-1.0)


class TestPoincareBallLearnable(hs.testing.ManifoldContract):
    size = 3

    def make_manifold(self):
        return hs.PoincareBall(-0.3, learnable=True)


class TestSphere(hs.testing.ManifoldContract):
    def make_manifold(self):
        return hs.Sphere(1.0)


class TestSphereOfRadius2(hs.testing.ManifoldContract):
    size = 3

    def make_manifold(self):
        return hs.Sphere(0.25, learnable=True)


class TestLorentz(hs.testing.ManifoldContract):
    def make_manifold(self):
        return hs.Lorentz(-1.0)


class TestLorentzLearnable(hs.testing.ManifoldContract):
    size = 3

    def make_manifold(self):
        return hs.Lorentz(-2.0, learnable=True)


class TestStereographicHyperbolic(hs.testing.ManifoldContract):
    def make_manifold(self):
        return hs.Stereographic(-0.7, learnable=True)


class TestStereographicFlat(hs.testing.ManifoldContract):
    def make_manifold(self):
        return hs.Stereographic(0.0)


class TestStereographicThroughZero(hs.testing.ManifoldContract):
    def make_manifold(self):
        return hs.Stereographic(0.0, learnable=True)


class TestStereographicSpherical(hs.testing.ManifoldContract):
    def make_manifold(self):
        return hs.Stereographic(0.5)


class TestStereographicSphericalLearnable(hs.testing.ManifoldContract):
    def make_manifold(self):
        return hs.Stereographic(0.5, learnable=True)


def mixed(learnable=True):
    return hs.Product(
        (hs.PoincareBall(-1.0, learnable), 3),
        (hs.Sphere(0.5), 3),
        (hs.Euclidean(), 2),
        (hs.Stereographic(0.2, learnable), 2),
        (hs.Lorentz(-0.5), 3),
    )


class TestProduct(hs.testing.ManifoldContract):
    def make_manifold(self):
        return mixed()


class TestScaled(hs.testing.ManifoldContract):
    def make_manifold(self):
        return hs.Scaled(hs.PoincareBall(-1.0, learnable=True), 1.7, learnable=True)


class TestScaledProduct(hs.testing.ManifoldContract):
    size = 13

    def make_manifold(self):
        return hs.Scaled(mixed(learnable=False), 0.4)


class TestProductOfScaled(hs.testing.ManifoldContract):
    def make_manifold(self):
        return hs.Product((hs.Scaled(hs.Sphere(), 2.0), 3), (hs.Lorentz(), 3))


# geoopt's own objects: registered, so their distances, neighbours and chords are ours
GEOOPT = {
    "Euclidean": (lambda: geoopt.Euclidean(ndim=1), lambda m: hs.Euclidean()),
    "Sphere": (geoopt.Sphere, lambda m: hs.Sphere()),
    "PoincareBall": (lambda: geoopt.PoincareBall(c=0.7), lambda m: hs.PoincareBall(-m.c.item())),
    "PoincareBall learnable": (
        lambda: geoopt.PoincareBall(c=0.5, learnable=True),
        lambda m: hs.PoincareBall(-m.c.item()),
    ),
    "Stereographic hyperbolic": (lambda: geoopt.Stereographic(k=-2.0), lambda m: hs.Stereographic(-2.0)),
    "Stereographic flat": (lambda: geoopt.Stereographic(k=0.0), lambda m: hs.Stereographic(0.0)),
    "SphereProjection": (lambda: geoopt.SphereProjection(k=0.5), lambda m: hs.Stereographic(m.k.item())),
    "Lorentz": (lambda: geoopt.Lorentz(k=4.0), lambda m: hs.Lorentz(-0.25)),
    "ProductManifold": (
        lambda: geoopt.ProductManifold((geoopt.PoincareBall(c=1.0), 2), (geoopt.Sphere(), 3)),
        lambda m: hs.Product((hs.PoincareBall(-1.0), 2), (hs.Sphere(), 3)),
    ),
    "Scaled": (
        lambda: geoopt.Scaled(geoopt.PoincareBall(c=1.0), 3.0),
        lambda m: hs.Scaled(hs.PoincareBall(-1.0), m.scale.item()),
    ),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=("float32", "float64"))
@pytest.mark.parametrize("name", GEOOPT)
def test_geoopt_objects_have_our_distances(name, dtype):
    make, equivalent = GEOOPT[name]
    theirs = make()
    ours = equivalent(theirs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size = getattr(ours, "n_elements", 4)
        x, y = (ours.random(6, size, dtype=dtype) for _ in range(2))
    y[0] = x[0]
    true = oracle.matrix(ours, x, y)
    for precision in ("auto", "exact"):
        found = hs.cdist(x, y, theirs, precision=precision)
        assert (oracle.relative_error(found, true) <= hard_pairs.tolerance(ours, x, y).numpy()).all()
    assert torch.equal(hs.knn(x, y, theirs, 3).indices, hs.knn(x, y, ours, 3).indices)
    for a, b in zip(chords(theirs, x), chords(ours, x), strict=True):
        torch.testing.assert_close(a.features, b.features, rtol=1e-6, atol=0.0)
        assert a.time_dims == b.time_dims
        assert torch.as_tensor(a.kappa).item() == pytest.approx(b.kappa, rel=1e-6)
    if any(p.requires_grad for p in theirs.parameters()):
        hs.cdist(x, y, theirs).sum().backward()
        assert all(p.grad.isfinite() and p.grad != 0 for p in theirs.parameters())


def test_a_geoopt_manifold_without_an_equivalent_has_no_chord():
    manifold = geoopt.Scaled(geoopt.BirkhoffPolytope(), 2.0)
    assert hs.chord_of(manifold, torch.eye(3)) is None


class Halfway(geoopt.Euclidean):
    """Level 0: flat space with only what geoopt gives it, and its own dist."""

    def __init__(self):
        super().__init__(1)

    def dist(self, x, y, *, keepdim=False):
        return (x - y).norm(dim=-1, keepdim=keepdim)


class TestLevel0(hs.testing.ManifoldContract):
    def make_manifold(self):
        return Halfway()


class Spoiled(hs.PoincareBall):
    """One method is wrong, by name."""

    def __init__(self, method, wrong):
        super().__init__(-1.0)
        setattr(self, method, wrong.__get__(self))


def _asymmetric(self, x, y, *, keepdim=False):
    out = hs.PoincareBall.dist(self, x, y) + 1e-3 * x.norm(dim=-1)
    return out.unsqueeze(-1) if keepdim else out


def _textbook(self, x, y, *, keepdim=False):
    gap = (1 - (x * x).sum(-1)) * (1 - (y * y).sum(-1))
    return torch.acosh(1 + 2 * ((x - y) ** 2).sum(-1) / gap)


BROKEN = {
    "dist asymmetric": ("dist", _asymmetric, "test_distance_is_positive_and_symmetric"),
    "dist not 0": ("dist", _asymmetric, "test_distance_is_zero_on_the_diagonal"),
    "dist of the textbook": ("dist", _textbook, "test_gradient_of_the_distance_is_finite_at_coincident_points"),
    "dist squared": (
        "dist",
        lambda self, x, y, keepdim=False: self.dist2(x, y, keepdim=keepdim),
        "test_triangle_inequality",
    ),
    "expmap flat": ("expmap", lambda self, x, u: x + u, "test_exp_undoes_log"),
    "retr is nothing": ("retr", lambda self, x, u: x, "test_retraction_agrees_with_exp_to_second_order"),
    "logmap flat": ("logmap", lambda self, x, y: y - x, "test_length_of_log_is_the_distance"),
    "transp flat": ("transp", lambda self, x, y, v: v, "test_transport_is_an_isometry"),
    "transp unturned": (
        "transp",
        lambda self, x, y, v: v * (self.lambda_x(x) / self.lambda_x(y)).unsqueeze(-1),
        "test_transport_turns_the_geodesic_round",
    ),
    "egrad2rgrad flat": ("egrad2rgrad", lambda self, x, u: u, "test_riemannian_gradient_represents_the_differential"),
    "projx does nothing": ("projx", lambda self, x: x, "test_projection_of_points"),
    "random outside": (
        "random",
        lambda self, *size, dtype=None: 5 + torch.randn(*size, dtype=dtype),
        "test_random_and_origin_are_on_the_manifold",
    ),
    "settle not smooth": (
        "settle",
        lambda self, mean: hs.PoincareBall.settle(self, mean) + 0 * ((mean - mean.detach()) ** 2).sum().sqrt(),
        "test_gradient_of_a_settled_mean_is_finite_at_coincident_points",
    ),
    "gradient cut": (
        "logmap",
        lambda self, x, y: hs.PoincareBall.logmap(self, x.detach(), y),
        "test_derivatives",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_contract_catches_a_broken_manifold(what):
    method, wrong, law = BROKEN[what]

    class Contract(hs.testing.ManifoldContract):
        def make_manifold(self):
            return Spoiled(method, wrong)

    argument = {
        "test_retraction_agrees_with_exp_to_second_order": (),
        "test_derivatives": (method,),
        "test_gradient_of_a_settled_mean_is_finite_at_coincident_points": (torch.float64, 5),
    }.get(law, (torch.float64,))
    with pytest.raises((AssertionError, GradcheckError)):
        getattr(Contract(), law)(*argument)


class Steep(hs.PoincareBall):
    """Its curvature has a gradient that is not finite where two points are one."""

    def __init__(self):
        super().__init__(-1.0, learnable=True)

    def dist(self, x, y, *, keepdim=False):
        square = hs.PoincareBall(-1.0).dist2(x, y, keepdim=keepdim) * self.kappa.abs()
        return square.to(x.dtype).sqrt()


class Deaf(hs.PoincareBall):
    """Its distance does not hear of the curvature that it says it learns."""

    def __init__(self):
        super().__init__(-1.0, learnable=True)

    def dist(self, x, y, *, keepdim=False):
        return hs.PoincareBall(-1.0).dist(x, y, keepdim=keepdim)


@pytest.mark.parametrize(("cls", "reason"), [(Steep, "not finite in 1 of 1"), (Deaf, "does not read it live")])
def test_the_contract_catches_a_curvature_that_cannot_be_learned(cls, reason):
    class Contract(hs.testing.ManifoldContract):
        def make_manifold(self):
            return cls()

    with pytest.raises(AssertionError, match=f"in the learned .*{reason}"):
        Contract().test_gradient_of_learned_numbers_through_attention_is_finite(torch.float64)


@pytest.mark.parametrize(
    ("method", "wrong", "law", "error", "match"),
    [
        (
            "picture",
            lambda self: "disk",
            "picture_is_one_that_can_be_drawn",
            ValueError,
            "'flat', 'ball', .*got 'disk'",
        ),
        (
            "chord",
            lambda self, x: x,
            "chord_is_consistent_with_distance",
            TypeError,
            r"must return a horosphere\.Chord",
        ),
    ],
)
def test_the_contract_shows_what_a_method_must_return(method, wrong, law, error, match):
    class Contract(hs.testing.ManifoldContract):
        def make_manifold(self):
            return Spoiled(method, wrong)

    with pytest.raises(error, match=match):
        getattr(Contract(), f"test_{law}")(*([torch.float64] if method == "chord" else []))


def test_a_disk_picture_of_a_sphere_is_caught():
    class Contract(hs.testing.ManifoldContract):
        def make_manifold(self):
            return type("Disk", (hs.Stereographic,), {"picture": lambda self: "ball"})(0.5)

    with pytest.raises(AssertionError, match=r"the picture 'ball' is of kappa < 0, got kappa = 0\.5"):
        Contract().test_picture_is_one_that_can_be_drawn()


def test_every_law_has_a_message():
    for file in (contract, _checks):
        bare = [
            n.lineno for n in ast.walk(ast.parse(inspect.getsource(file))) if isinstance(n, ast.Assert) and not n.msg
        ]
        assert not bare, f"{file.__name__} asserts without a message in lines {bare}"


def test_a_type_and_a_shape_are_named():
    class Wide(hs.testing.ManifoldContract):
        def make_manifold(self):
            return Spoiled("dist", lambda self, x, y, keepdim=False: hs.PoincareBall.dist(self, x, y).double())

    with pytest.raises(AssertionError, match=r"dist must be of type torch\.float32, .*got torch\.float64"):
        Wide().test_distance_is_positive_and_symmetric(torch.float32)
    with pytest.raises(AssertionError, match=r"keepdim=True\) must have shape \(12, 1\), got \(12,\)"):
        Wide().test_distance_is_positive_and_symmetric(torch.float64)


def test_the_contract_skips_aloud():
    class NoLog(hs.testing.ManifoldContract):
        def make_manifold(self):
            return Spoiled("logmap", lambda self, x, y: geoopt.Manifold.logmap(self, x, y))

    with pytest.raises(pytest.skip.Exception, match="has no"):
        NoLog().test_exp_undoes_log(torch.float64)
    with pytest.raises(pytest.skip.Exception, match=r"Halfway has no chord \(level 0\)"):
        TestLevel0().test_derivatives_of_cdist()

"""The promise about distances, against 60-digit arithmetic on exactly the stored numbers.

"exact", "auto" and ``manifold.dist``: relative error at most 1e-5 in float32 and 1e-12 in float64 (1e-11 with a
point beyond radius 10 of a hyperboloid); "fast": a bound on the squared chord. Every example is a batch whose
pairs are near (along and across the radius), at the rim, far out, antipodal, and all mixtures of these.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpmath import mpf

import horosphere as hs
from horosphere import _numerics
from horosphere.kernels.reference.sqdist import product_chord2
from tests.manifolds import hard_pairs, oracle

DTYPES = (torch.float32, torch.float64)
ROWS = 12
ENGINES = (("auto", "reference"), ("auto", "tiled"), ("exact", "auto"))
examples = settings(
    max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
seeds = st.integers(0, 2**32 - 1)
dims = st.sampled_from((1, 2, 3, 5, 10, 64))


def mixed(scale: float = 1.0, learnable: bool = False) -> hs.Product:
    return hs.Product(
        (hs.PoincareBall(-1.0 / scale, learnable), 3),
        (hs.Sphere(1.0 * scale), 4),
        (hs.Euclidean(), 2),
        (hs.Stereographic(0.3, learnable), 2),
        (hs.Lorentz(-0.5 * scale), 4),
    )


KAPPAS = {
    hs.PoincareBall: (-1.0, -0.3, -25.0, -1e-6),
    hs.Stereographic: (-0.7, -1e-6, 0.0, 1e-6, 0.5, 1.0),
    hs.Sphere: (1.0, 0.25, 1e-6),
    hs.Lorentz: (-1.0, -2.0, -1e-6),
}
FAMILIES = {
    "Euclidean": st.builds(hs.Euclidean),
    **{
        cls.__name__: st.builds(cls, st.sampled_from(kappas), learnable=st.booleans()) for cls, kappas in KAPPAS.items()
    },
    "Product": st.builds(mixed, st.sampled_from((1.0, 0.1)), st.booleans()),
    "Scaled": st.builds(
        lambda base, scale, learnable: hs.Scaled(base(), scale, learnable),
        st.sampled_from((mixed, lambda: hs.PoincareBall(-0.3), lambda: hs.Sphere(2.0), lambda: hs.Lorentz(-0.5))),
        st.sampled_from((1e-3, 0.7, 40.0)),
        st.booleans(),
    ),
}


def assert_within(found: torch.Tensor, true: np.ndarray, tolerance: torch.Tensor, covered: torch.Tensor, what: str):
    error = np.where(covered.numpy(), oracle.relative_error(found, true) / tolerance.numpy(), 0.0)
    i, j = np.unravel_index(error.argmax(), error.shape)
    assert error[i, j] <= 1, (
        f"{what}: pair {i, j} at distance {mpmath.nstr(true[i, j], 17)} came out {found[i, j].item():.17g}: "
        f"{error[i, j]:.3g} times the tolerance {tolerance[i, j]:.0e}"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "float64"))
@pytest.mark.parametrize("family", FAMILIES)
def test_distances_keep_the_promise(family, dtype):
    @examples
    @given(manifold=FAMILIES[family], dim=dims, seed=seeds)
    def check(manifold, dim, seed):
        x, y = hard_pairs.stored(manifold, np.random.default_rng(seed), ROWS, dim, dtype)
        true = oracle.matrix(manifold, x, y)
        covered, tolerance = hard_pairs.promised(manifold, x, y), hard_pairs.tolerance(manifold, x, y)
        assert covered.float().mean() > 0.5, "the points do not exercise the promise"
        for precision, impl in ENGINES:
            found = hs.cdist(x, y, manifold, precision=precision, impl=impl)
            assert found.dtype == dtype
            assert_within(found, true, tolerance, covered, f"cdist {precision} {impl}, {manifold}, dim {dim}")
        assert_within(manifold.dist(x[:, None], y), true, tolerance, covered, f"dist, {manifold}, dim {dim}")
        squared = manifold.dist2(x[:, None], y)
        assert_within(squared.double().sqrt(), true, tolerance, covered, f"dist2, {manifold}, dim {dim}")

    check()


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "float64"))
@pytest.mark.parametrize("family", FAMILIES)
def test_identical_points_are_exactly_0_apart(family, dtype):
    @examples
    @given(manifold=FAMILIES[family], dim=dims, seed=seeds)
    def check(manifold, dim, seed):
        x, _ = hard_pairs.stored(manifold, np.random.default_rng(seed), ROWS, dim, dtype)
        zero = torch.zeros(ROWS, dtype=dtype)
        for precision, impl in ENGINES:
            for y in (x, x.clone()):
                found = hs.cdist(x, y, manifold, precision=precision, impl=impl)
                assert torch.equal(found.diagonal(), zero)
        assert torch.equal(manifold.dist(x, x.clone()), zero)
        assert torch.equal(manifold.dist2(x, x.clone()), zero)

    check()


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "float64"))
@pytest.mark.parametrize("kappa", (1.0, 0.25, 1e-6))
def test_antipodes_are_half_a_great_circle_apart(kappa, dtype):
    rng = np.random.default_rng(0)
    for manifold in (hs.Sphere(kappa), hs.Stereographic(kappa)):
        x = torch.from_numpy(rng.normal(size=(20, 3)) * kappa**-0.5).to(dtype)
        if isinstance(manifold, hs.Sphere):
            x = manifold.projx(x)
            y = -x
        else:
            y = -x / (kappa * (x * x).sum(-1, keepdim=True))
        tolerance = torch.full((20, 20), _numerics.promised_tolerance(dtype), dtype=torch.float64)
        true = oracle.matrix(manifold, x, y)
        assert abs(float(true[0, 0]) * kappa**0.5 - math.pi) < 1e-6
        for precision, impl in ENGINES:
            found = hs.cdist(x, y, manifold, precision=precision, impl=impl)
            assert_within(found, true, tolerance, torch.ones(20, 20, dtype=bool), f"{manifold} {precision}")


# the squared chord by the oracle's distance: 4/kappa sin^2(sqrt(kappa) d/2), sinh for kappa < 0, and d^2 for 0
def chord2(d: mpf, kappa: float) -> mpf:
    if kappa == 0:
        return d * d
    root = mpmath.sqrt(abs(mpf(kappa)))
    s = mpmath.sin(root * d / 2) if kappa > 0 else mpmath.sinh(root * d / 2)
    return 4 * s * s / abs(mpf(kappa))


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "float64"))
@pytest.mark.parametrize("family", ("Euclidean", "PoincareBall", "Stereographic", "Sphere", "Lorentz"))
def test_fast_keeps_its_bound_on_the_squared_chord(family, dtype):
    @examples
    @given(manifold=FAMILIES[family], dim=dims, seed=seeds)
    def check(manifold, dim, seed):
        x, y = hard_pairs.stored(manifold, np.random.default_rng(seed), ROWS, dim, dtype)
        covered = hard_pairs.promised(manifold, x, y).numpy()
        kappa = hard_pairs.curvature_of(manifold)
        a, b = hs.chord_of(manifold, x), hs.chord_of(manifold, y)
        u, size = (t.detach().double() for t in product_chord2(a, b))
        with mpmath.workdps(oracle.DIGITS):
            exact = [[chord2(d, kappa) for d in row] for row in oracle.matrix(manifold, x, y)]
            error = np.array(
                [
                    [float(abs(mpf(v) - t)) for v, t in zip(*rows, strict=True)]
                    for rows in zip(u.tolist(), exact, strict=True)
                ]
            )
        # inner products of F terms, and four roundings of weights and their products, which count for F < 4 only
        bound = 4 * _numerics.unit_roundoff(dtype) * (math.sqrt(a.features.shape[-1]) * size + u.abs()).numpy()
        assert (error <= bound)[covered].all(), (
            f"{manifold}, dim {dim}: {(error / bound)[covered].max():.3g} of the bound"
        )
        fast = hs.cdist(x, y, manifold, precision="fast", squared=True, impl="reference").detach().double()
        flat_enough = (u >= 0) & (kappa * u < 3)  # nearer to the antipode arc2 magnifies a rounding of u
        torch.testing.assert_close(
            fast[flat_enough], _numerics.arc2(u, kappa)[flat_enough], rtol=20 * torch.finfo(dtype).eps, atol=0.0
        )

    check()


def test_the_oracle_gives_known_distances():
    x = torch.tensor([0.3, 0.4], dtype=torch.float64)
    y = torch.tensor([0.1, -0.2], dtype=torch.float64)
    assert float(oracle.distance(hs.PoincareBall(-1.0), x, y)) == pytest.approx(1.385123994547563, rel=1e-15)
    assert float(oracle.distance(hs.PoincareBall(-0.5), x, y)) == pytest.approx(1.320929868677592, rel=1e-15)
    assert float(oracle.distance(hs.Stereographic(0.0), x, y)) == pytest.approx(2 * math.sqrt(0.4), rel=1e-15)
    pole, side = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 3.0, 0.0])
    assert float(oracle.distance(hs.Sphere(0.25), pole, side)) == pytest.approx(math.pi, rel=1e-15)
    far = torch.tensor([0.0, math.sinh(2.0), 0.0], dtype=torch.float64)
    assert float(oracle.distance(hs.Lorentz(-1.0), torch.zeros(3), far)) == pytest.approx(2.0, rel=1e-15)


def test_radial_pairs_far_out_on_the_hyperboloid():
    """Beyond the promised radius: a difference along the radius is not mistaken for one across it (at 30: 3e-9)."""
    generator = torch.Generator().manual_seed(0)
    for radius in (15.0, 20.0):
        short = torch.randn(8, 3, generator=generator).double()  # of few bits, so that 1.5 x is exact
        space = short * 2.0 ** round((radius - 2) / math.log(2))
        x = hs.Lorentz().projx(torch.cat((torch.zeros(8, 1), space), -1))
        y = hs.Lorentz().projx(torch.cat((torch.zeros(8, 1), 1.5 * space), -1))
        true = np.diag(oracle.matrix(hs.Lorentz(), x, y))[:, None]
        assert (oracle.relative_error(hs.Lorentz().dist(x, y)[:, None], true) < 1e-12).all()


@pytest.mark.parametrize("scale", (1e-30, 1e-25, 1e-20, 1e-12, 1e12, 9e18, 1e25))
def test_float32_distances_whose_square_leaves_float32(scale, monkeypatch):
    monkeypatch.setattr(oracle, "DIGITS", 120)  # 1 + d^2 / 2 is to be told from 1
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, 3, generator=generator) * scale for _ in range(2))
    manifolds = [hs.Euclidean(), hs.Stereographic(0.0), hs.Scaled(hs.Euclidean(), 0.5)]
    manifolds += [hs.Product((hs.Euclidean(), 1), (hs.Euclidean(), 2))]
    manifolds += [hs.PoincareBall(-1.0), hs.Stereographic(1.0), hs.Lorentz(-1.0)] if scale < 1 else []
    for manifold in manifolds:
        if isinstance(manifold, hs.Lorentz):
            x, y = (manifold.projx(torch.cat((torch.ones(6, 1), t), -1)) for t in (x, y))
        true = oracle.matrix(manifold, x, y)
        assert (oracle.relative_error(manifold.dist(x, y)[:, None], np.diag(true)[:, None]) <= 1e-5).all(), manifold
        for precision, impl in ENGINES:
            found = hs.cdist(x, y, manifold, precision=precision, impl=impl)
            assert (oracle.relative_error(found, true) <= 1e-5).all(), (manifold, precision, impl)
            near = hs.knn(x, y, manifold, 3, precision=precision, impl=impl)
            assert np.array_equal(near.indices, true.argsort(-1)[:, :3]), (manifold, precision, impl)
            assert (oracle.relative_error(near.distances, np.sort(true, -1)[:, :3]) <= 1e-5).all()


def points_of_all_sizes(n: int) -> torch.Tensor:
    """Ordinary points, and eight each that are close to the origin or far off."""
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    for k, scale in enumerate((1e-30, 1e-21, 1e-15, 1e17, 9e18, 1e25)):
        x[8 * k : 8 * k + 8] *= scale
    return x


@pytest.mark.parametrize("n", (300, 1100))  # from a million entries on distances come from one pass over the matrix
@pytest.mark.parametrize("impl", ("reference", "tiled"))
def test_close_and_far_points_among_others(n, impl):
    x = points_of_all_sizes(n)
    true = torch.linalg.vector_norm(x.double().unsqueeze(1) - x.double(), dim=-1)
    for manifold in (hs.Euclidean(), hs.Product((hs.Euclidean(), 1), (hs.Euclidean(), 2))):
        found = hs.cdist(x, x, manifold, impl=impl).double()
        assert ((found - true).abs() <= 1e-5 * true).all()
        near = hs.knn(x, x, manifold, 10, impl=impl).indices
        torch.testing.assert_close(true.gather(-1, near), true.sort(dim=-1).values[:, :10], rtol=1e-14, atol=0)


@pytest.mark.parametrize(("precision", "impl"), ENGINES)
def test_gradients_of_close_and_far_points(precision, impl):
    x = points_of_all_sizes(60).requires_grad_()
    y = x.detach()[torch.arange(60).flip(0)]
    upper = torch.rand(60, 60, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(hs.cdist(x, y, hs.Euclidean(), precision=precision, impl=impl), x, upper)[0]
    delta = x.detach().double().unsqueeze(1) - y.double()
    length = delta.norm(dim=-1, keepdim=True)
    true = (upper.double().unsqueeze(-1) * delta / torch.where(length > 0, length, 1.0)).sum(1)
    torch.testing.assert_close(found.double(), true, rtol=0, atol=2e-5 * float(true.abs().max()))


@pytest.mark.parametrize("impl", ("reference", "tiled"))
def test_the_nearest_point_may_be_the_only_one_whose_square_is_too_large(impl):
    x = torch.tensor([[4e18, 0.0]])
    y = torch.stack((torch.linspace(-1e18, -2e18, 40), torch.zeros(40)), -1)
    y[7] = torch.tensor([5e18, 0.0])
    for manifold in (hs.Euclidean(), hs.Product((hs.Euclidean(), 1), (hs.Euclidean(), 1))):
        assert hs.knn(x, y, manifold, 1, impl=impl).indices == 7

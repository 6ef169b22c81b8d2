"""Hyperbolic MDS: exact on exact distances (mpmath), and what it does with others."""

import mpmath
import numpy as np
import pytest
import torch

from horosphere import Euclidean, Lorentz, PoincareBall, Stereographic, cdist
from horosphere.embedding.mds import hyperbolic_mds, hyperbolic_mds_spectrum, hyperbolic_mds_start


def hyperboloid(n, dimension, seed, nearest=0.0, farthest=10.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, dimension))
    radius = rng.uniform(nearest, farthest, (n, 1))
    space = x / np.linalg.norm(x, axis=1, keepdims=True) * np.sinh(radius)
    return np.concatenate([np.sqrt(1 + np.sum(space**2, axis=1, keepdims=True)), space], axis=1)


def exact_distances(points):
    """acosh(t t' - <s, s'>) of spatial coordinates, the time recomputed, in 60 digits."""
    with mpmath.workdps(60):
        space = [[mpmath.mpf(float(v)) for v in row[1:]] for row in points]
        time = [mpmath.sqrt(1 + mpmath.fdot(row, row)) for row in space]
        out = np.zeros((len(points), len(points)))
        for i in range(len(points)):
            for j in range(i):
                out[i, j] = out[j, i] = float(mpmath.acosh(time[i] * time[j] - mpmath.fdot(space[i], space[j])))
    return out


@pytest.mark.parametrize("model", ["lorentz", "poincare"])
@pytest.mark.parametrize("nearest", [0.0, 9.9], ids=["all radii", "all far out"])
@pytest.mark.parametrize("dimension", [2, 5, 10])
def test_points_are_recovered(dimension, nearest, model):
    points = torch.from_numpy(hyperboloid(200, dimension, dimension, nearest))
    want = cdist(points, points, Lorentz(), precision="exact").numpy()
    want = (want + want.T) / 2
    found = torch.from_numpy(hyperbolic_mds(want, dimension, model=model))
    manifold = Lorentz() if model == "lorentz" else PoincareBall()
    assert found.shape == (200, dimension + (model == "lorentz"))
    assert np.abs(cdist(found, found, manifold, precision="exact").numpy() - want).max() < 1e-9


@pytest.mark.parametrize(("dimension", "nearest"), [(2, 0.0), (5, 9.9), (10, 0.0)])
def test_points_are_recovered_as_mpmath_measures_them(dimension, nearest):
    want = exact_distances(hyperboloid(30, dimension, 7, nearest))
    assert np.abs(exact_distances(hyperbolic_mds(want, dimension)) - want).max() < 1e-9


def test_curvature_scales_lengths():
    want = exact_distances(hyperboloid(12, 3, 0, farthest=4))
    found = torch.from_numpy(hyperbolic_mds(want / 2, 3, kappa=-4.0))
    assert np.abs(cdist(found, found, Lorentz(-4.0), precision="exact").numpy() - want / 2).max() < 1e-10


def test_the_spectrum_tells_the_dimension():
    values = hyperbolic_mds_spectrum(exact_distances(hyperboloid(40, 3, 1)))
    assert values[0] > 0.1 and (values[-3:] < -0.01).all() and np.abs(values[1:-3]).max() < 1e-12
    # a square's distances are not hyperbolic in a plane: a fourth negative eigenvalue or a second positive one shows it
    circle = np.abs(np.subtract.outer(np.arange(8), np.arange(8)))
    values = hyperbolic_mds_spectrum(np.minimum(circle, 8 - circle))
    assert np.sum(np.abs(values) > 1e-3) > 3


@pytest.mark.parametrize("noise", [1e-8, 1e-6, 1e-4])
def test_noise_moves_distances_in_proportion(noise):
    want = exact_distances(hyperboloid(60, 3, 2, farthest=5))
    error = np.random.default_rng(0).uniform(-noise, noise, want.shape)
    noisy = np.maximum(want + np.tril(error, -1) + np.tril(error, -1).T, 0)
    np.fill_diagonal(noisy, 0)
    found = torch.from_numpy(hyperbolic_mds(noisy, 3))
    got = cdist(found, found, Lorentz(), precision="exact").numpy()
    assert noise / 100 < np.abs(got - want).max() < 300 * noise
    assert np.median(np.abs(got - want)) < 3 * noise


def test_distances_of_hundreds_neither_overflow_nor_spoil():
    line = 340.0 * np.abs(np.subtract.outer(np.arange(3.0), np.arange(3.0)))
    with mpmath.workdps(400):
        left, middle, right = (mpmath.mpf(float(v)) for v in hyperbolic_mds(line, 1)[:, 1])
        assert sorted([abs(mpmath.asinh(left)), abs(mpmath.asinh(right))]) == pytest.approx([340, 340], rel=1e-12)
        assert left * right < 0 and abs(middle) < 1e-12
    with pytest.raises(ValueError, match="float64 does not"):
        hyperbolic_mds(3 * line, 1)


def test_points_are_centred_and_spare_dimensions_are_zero():
    points = hyperbolic_mds(exact_distances(hyperboloid(50, 2, 3, farthest=3)), 4)
    assert np.linalg.norm((points[:, 1:3] / points[:, :1]).mean(0)) < 1e-3
    assert np.abs(points[:, 3:]).max() < 1e-6
    assert hyperbolic_mds([[0.0, 1.0], [1.0, 0.0]], 5).shape == (2, 6)


@pytest.mark.parametrize("manifold", [PoincareBall(-0.5), Lorentz(-0.5), Stereographic(-0.5)], ids=str)
def test_the_start_lies_on_the_manifold_and_keeps_distances(manifold):
    want = exact_distances(hyperboloid(20, 3, 4, farthest=2)) / np.sqrt(0.5)
    start = hyperbolic_mds_start(want, manifold, 3, np.random.default_rng(0))
    assert manifold.check_point_on_manifold(start) and start.dtype == torch.float64
    error = np.abs(cdist(start, start, manifold).numpy() - want)
    assert 0 < error.max() < 1e-4


def test_the_start_parts_points_that_coincide():
    start = hyperbolic_mds_start(np.zeros((3, 3)), PoincareBall(), 2, np.random.default_rng(0))
    assert len(np.unique(start.numpy(), axis=0)) == 3


@pytest.mark.parametrize(
    ("distances", "message"),
    [
        (np.zeros((2, 3)), r"square matrix, got shape \(2, 3\)"),
        ([[0, np.inf], [np.inf, 0]], "connected"),
        ([[0, -1.0], [-1.0, 0]], ">= 0"),
        ([[1.0, 1.0], [1.0, 0]], "0 on the diagonal"),
        ([[0, 1.0], [2.0, 0]], "symmetric"),
    ],
)
def test_bad_distances_are_named(distances, message):
    with pytest.raises(ValueError, match=message):
        hyperbolic_mds(distances, 2)


def test_bad_settings_are_named():
    good = [[0.0, 1.0], [1.0, 0.0]]
    with pytest.raises(ValueError, match="kappa must be a number < 0"):
        hyperbolic_mds(good, 2, 1.0)
    with pytest.raises(ValueError, match="n_components"):
        hyperbolic_mds(good, 0)
    with pytest.raises(ValueError, match="model must be"):
        hyperbolic_mds(good, 1, model="klein")
    with pytest.raises(ValueError, match="needs hyperbolic space"):
        hyperbolic_mds_start(good, Euclidean(), 1, np.random.default_rng(0))

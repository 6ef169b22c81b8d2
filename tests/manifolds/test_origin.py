"""Distances and maps at the origin, on every manifold; normal points around it."""

import math

import pytest
import torch

import horosphere as hs

SPACES = {
    "euclidean": (hs.Euclidean, 3),
    "ball": (lambda: hs.PoincareBall(-0.7), 3),
    "lorentz": (lambda: hs.Lorentz(-0.7), 4),
    "sphere": (lambda: hs.Sphere(0.6), 4),
    "stereographic": (lambda: hs.Stereographic(0.4), 3),
    "product": (lambda: hs.Product((hs.PoincareBall(), 2), (hs.Sphere(), 3), (hs.Euclidean(), 1)), 6),
    "scaled": (lambda: hs.Scaled(hs.Lorentz(), 2.5), 4),
}


@pytest.mark.parametrize("name", SPACES)
def test_maps_at_the_origin_are_the_maps_there(name):
    make, size = SPACES[name]
    manifold = make()
    torch.manual_seed(0)
    x = manifold.random(5, size, dtype=torch.float64)
    origin = manifold.origin(5, size, dtype=torch.float64)
    u = manifold.logmap0(x)
    torch.testing.assert_close(u, manifold.logmap(origin, x), rtol=0, atol=0)
    torch.testing.assert_close(manifold.expmap0(u), x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(manifold.dist0(x), manifold.norm(origin, u), rtol=1e-12, atol=0)
    assert manifold.dist0(x, keepdim=True).shape == (5, 1) and manifold.dist0(origin).max() == 0
    assert manifold.dist0(x.float()).dtype == manifold.expmap0(u.float()).dtype == torch.float32


def test_normal_points_of_the_sphere_lie_around_its_origin():
    torch.manual_seed(0)
    sphere = hs.Sphere(0.25)
    x = sphere.random(20_000, 3, std=0.1, dtype=torch.float64)
    assert sphere.check_point_on_manifold(x)
    # |u|^2 / std^2 is chi-squared with 2 degrees of freedom, mean 2 and deviation 2: 5 deviations of the average
    share = sphere.dist0(x).square() / 0.1**2
    assert abs(share.mean() - 2) < 5 * 2 / math.sqrt(20_000)

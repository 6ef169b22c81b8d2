"""The loss against its definition, on every manifold, with and without the chord."""

import math

import pytest
import torch

from horosphere.embedding import ranking_loss
from horosphere.embedding.losses import pair_distances
from horosphere.manifolds import Euclidean, Lorentz, PoincareBall, Product, Sphere, Stereographic
from horosphere.manifolds._geoopt import geoopt

MANIFOLDS = [
    (PoincareBall(kappa=-2.0), 3),
    (Lorentz(kappa=-0.5), 4),
    (Euclidean(), 3),
    (Sphere(kappa=2.0), 4),
    (Stereographic(kappa=0.7), 3),
    (Product((PoincareBall(), 2), (Sphere(), 3)), 5),
    (geoopt.PoincareBall(c=1.0), 3),
]
names = [type(m).__name__ for m, _ in MANIFOLDS]


def points_on(manifold, size):
    generator = torch.Generator().manual_seed(0)
    return manifold.projx(0.3 * torch.randn(9, size, generator=generator, dtype=torch.float64))


INDEX = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 4], [8, 0, 8, 7]])


@pytest.mark.parametrize(("manifold", "size"), MANIFOLDS, ids=names)
def test_distances_are_those_of_the_manifold(manifold, size):
    x = points_on(manifold, size)
    want = manifold.dist(x[INDEX[:, :1]], x[INDEX[:, 1:]])
    torch.testing.assert_close(pair_distances(x, INDEX, manifold), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("manifold", "size"), MANIFOLDS, ids=names)
def test_loss_is_the_formula_and_its_gradient_is_finite_at_coincident_points(manifold, size):
    x = points_on(manifold, size).requires_grad_()
    d = manifold.dist(x[INDEX[:, :1]], x[INDEX[:, 1:]]).detach().tolist()
    want = sum(-math.log(math.exp(-row[0]) / sum(math.exp(-v) for v in row)) for row in d)
    loss = ranking_loss(x, INDEX, manifold)
    assert loss.item() == pytest.approx(want, rel=1e-9)
    loss.backward()
    assert torch.isfinite(x.grad).all()


def test_gradient():
    ball = PoincareBall(kappa=-1.5)
    x = points_on(ball, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ranking_loss(x, INDEX[:2, :3], ball), x)

"""What a user of a type checker writes: it passes ``mypy --strict``, and runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import horosphere as hs
from horosphere.attention import GeodesicAttention, geodesic_attention

EDGES = [("animal", "dog"), ("animal", "cat"), ("dog", "poodle"), ("cat", "siamese")]


class Classifier(nn.Module):
    def __init__(self, dim: int, classes: int, manifold: hs.PoincareBall) -> None:
        super().__init__()
        self.attention = GeodesicAttention(dim, 2, manifold=manifold)
        self.prototypes = hs.ManifoldParameter(0.1 * torch.randn(classes, dim), manifold)
        self.manifold = manifold

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        points: Tensor = self.manifold.expmap0(0.1 * mixed.mean(1))
        return -hs.cdist(points, self.prototypes, self.manifold)


def train(steps: int) -> float:
    ball = hs.PoincareBall(kappa=-1.0, learnable=True)
    model = Classifier(8, 3, ball)
    optimizer = hs.optim.RiemannianAdam(hs.optim.param_groups(model), lr=1e-2)
    x, labels = torch.randn(4, 6, 8), torch.tensor([0, 1, 2, 0])
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        torch.autograd.backward(loss)
        optimizer.step()
    return loss.item()


def nearest() -> list[str]:
    embedding = hs.embedding.GraphEmbedding(n_components=2, n_epochs=2, random_state=0).fit(EDGES)
    return [str(label) for label in embedding.kneighbors("dog", 2).labels]


def attend(sphere: hs.Sphere) -> tuple[Tensor, Tensor]:
    points = sphere.projx(torch.randn(2, 5, 4))
    mean: Tensor = geodesic_attention(points, points, points, sphere)
    out, lse = geodesic_attention(points, points, mean, sphere, eps=1e-2, return_lse=True)
    found: hs.Neighbors = hs.knn(points[0], points[1], sphere, 2)
    assert found.distances.shape == found.indices.shape
    return out, lse

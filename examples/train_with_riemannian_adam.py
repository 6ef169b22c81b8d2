"""Classify handwritten digits in hyperbolic space, and learn how curved it should be.

A linear layer makes a tangent vector at the origin of a Poincare ball; the exponential map turns it into a point. Every
class has a prototype, a point of the ball that is trained too, and an image belongs to the class whose prototype is
nearest: logits are -d^2. One Riemannian Adam trains all of it: weights of the layer (flat), prototypes (on the
manifold) and the curvature, each kind at its own rate.

    python examples/train_with_riemannian_adam.py [--quick]
"""

import argparse

import torch
from sklearn.datasets import load_digits

import horosphere as hs


class BallClassifier(torch.nn.Module):
    def __init__(self, inputs: int, classes: int, dim: int = 8):
        super().__init__()
        self.ball = hs.PoincareBall(kappa=-1.0, learnable=True)
        self.linear = torch.nn.Linear(inputs, dim)
        self.prototypes = hs.ManifoldParameter(0.1 * torch.randn(classes, dim), self.ball)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        points = self.ball.expmap0(self.linear(x))
        return -hs.cdist(points, self.prototypes, self.ball, squared=True)


def main(quick: bool = False) -> float:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    train, test = order[:1400], order[1400:]

    model = BallClassifier(images.shape[1], classes=10)
    rates = {"manifold": 0.02, "flat": 0.01}
    groups = [group | {"lr": rates[group["name"]]} for group in hs.optim.param_groups(model)]
    optimizer = hs.optim.RiemannianAdam(groups)

    for epoch in range(3 if quick else 20):
        for batch in train[torch.randperm(len(train))].split(100):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(images[test]).argmax(-1) == labels[test]).float().mean().item()
        kappa = model.ball.kappa.item()
        print(f"epoch {epoch + 1:2d}  loss {loss.item():.3f}  test accuracy {accuracy:.3f}  curvature {kappa:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three epochs: a few seconds")
    main(parser.parse_args().quick)

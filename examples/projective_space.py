"""Projective space: lines through 0 as points, from one class to embeddings, means, attention and routing.

A line is stored as a unit vector x of R^(n+1); -x is the same point. The distance is the angle of two lines,

    d(x, y) = arccos |<x, y>|.

The matrices x x^T / sqrt(2) have the squared chords |x x^T - y y^T|^2 / 2 = sin(d)^2, and those are chords
of a sphere of curvature 4: one `Chord` makes every fast path of the library serve the space.

    python examples/projective_space.py [--quick]
"""

import argparse
import math
import tempfile
from pathlib import Path

import torch

import horosphere as hs  # before geoopt, whose own import warns

# isort: split
from geoopt import Manifold


def facing(x, y):
    """y or -y, whichever is nearer to x, and its sign (..., 1)."""
    sign = torch.where((x * y).sum(-1, keepdim=True) < 0, -1.0, 1.0).to(y.dtype)
    return sign * y, sign


def first_axis(matrix):
    """The unit eigenvector (..., n) of the largest eigenvalue l of symmetric matrices A (..., n, n).

    Its derivative is (l - A)^+ dA x. torch.linalg.eigh differentiates every eigenvector, divides by the difference of
    every pair of eigenvalues, and so answers NaN where any two are equal, as for the matrix x x^T of a single line.
    Here only a tie for the first axis has no derivative; the part of it within the tie is set to 0. First derivatives.
    """
    with torch.no_grad():
        values, axes = torch.linalg.eigh(matrix)
        gap = values[..., -1:] - values
        apart = gap > 4 * torch.finfo(values.dtype).eps * values.abs().amax(-1, keepdim=True)
        inverse = torch.where(apart, 1 / torch.where(apart, gap, 1.0), 0.0).unsqueeze(-1)
    x = axes[..., -1:]
    step = axes @ (inverse * (axes.mT @ (matrix @ x)))
    return (x + (step - step.detach())).squeeze(-1)


class ProjectiveSpace(Manifold):
    """Unit vectors up to sign with the metric of the sphere that they cover twice."""

    name = "ProjectiveSpace"
    ndim = 1
    reversible = False

    # what geoopt asks for

    def dist(self, x, y, *, keepdim=False):
        y, _ = facing(x, y)
        norm = torch.linalg.vector_norm
        return 2 * torch.atan2(norm(x - y, dim=-1, keepdim=keepdim), norm(x + y, dim=-1, keepdim=keepdim))

    def dist2(self, x, y, *, keepdim=False):
        return self.dist(x, y, keepdim=keepdim) ** 2

    def inner(self, x, u, v=None, *, keepdim=False):
        return (u * (u if v is None else v)).sum(-1, keepdim=keepdim)

    def projx(self, x):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        axis = torch.nn.functional.one_hot(x.new_zeros(x.shape[:-1], dtype=torch.int64), x.shape[-1]).to(x.dtype)
        return torch.where(norm > 0, x / torch.where(norm > 0, norm, 1.0), axis)

    def proju(self, x, u):
        return u - x * (x * u).sum(-1, keepdim=True)

    def egrad2rgrad(self, x, u):
        return self.proju(x, u)

    def expmap(self, x, u):
        length = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
        return self.projx(torch.cos(length) * x + torch.sinc(length / math.pi) * u)

    def retr(self, x, u):
        return self.projx(x + u)

    def logmap(self, x, y):
        y, _ = facing(x, y)
        toward = self.proju(x, y - x)
        sine = torch.linalg.vector_norm(toward, dim=-1, keepdim=True)
        apart = sine > 0
        return toward * torch.where(apart, self.dist(x, y, keepdim=True) / torch.where(apart, sine, 1.0), 1.0)

    def transp(self, x, y, v):
        y, sign = facing(x, y)
        along = (y * v).sum(-1, keepdim=True) / (1 + (x * y).sum(-1, keepdim=True))
        return sign * (v - along * (x + y))

    def random(self, *size, dtype=None, device=None):
        return self.projx(torch.randn(*size, dtype=dtype, device=device))

    def origin(self, *size, dtype=None, device=None, seed=None):
        return self.projx(torch.zeros(*size, dtype=dtype, device=device))

    def _check_point_on_manifold(self, x, *, atol=1e-5, rtol=1e-5):
        good = bool(((torch.linalg.vector_norm(x, dim=-1) - 1).abs() <= atol).all())
        return good, None if good else "a vector is not of length 1; see projx"

    def _check_vector_on_tangent(self, x, u, *, atol=1e-5, rtol=1e-5):
        good = bool(((x * u).sum(-1).abs() <= atol + rtol * torch.linalg.vector_norm(u, dim=-1)).all())
        return good, None if good else "a vector is not across its point; see proju"

    # level 1: distances as matrix products, close pairs from the vectors themselves

    def chord(self, x):
        x = self.projx(x)
        matrices = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
        return hs.Chord(matrices * 0.5**0.5, None, 0, 4.0)

    def pair_dist2(self, x, y):
        return self.dist(self.projx(x.to(torch.float64)), self.projx(y.to(torch.float64))) ** 2

    # optional: n + 1 numbers store a point of n dimensions; the mean line is the first axis of the mean matrix

    def ambient_dim(self, n):
        return n + 1

    def lift(self, x):
        x = self.projx(x)
        return (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)

    def lifted_size(self, stored):
        return stored**2

    def settle(self, mean):
        n = math.isqrt(mean.shape[-1])
        wide = mean.to(torch.float64).unflatten(-1, (n, n))
        return first_axis((wide + wide.mT) / 2).to(mean.dtype)


hs.register_manifold("projective", ProjectiveSpace)  # its name in files, and of GraphEmbedding(manifold="projective")


def main(quick: bool = False) -> None:
    torch.manual_seed(0)
    space = ProjectiveSpace()

    # opposite nodes of a ring are farthest apart, and a projective line is a ring
    ring = [(i, (i + 1) % 12) for i in range(12)]
    model = hs.embedding.GraphEmbedding(
        manifold="projective", n_components=2, n_epochs=20 if quick else 300, random_state=0
    ).fit(ring)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "ring.safetensors")
        again = hs.embedding.GraphEmbedding.load(Path(folder) / "ring.safetensors")
    print(
        f"ring embedded: MAP {model.evaluate(ring).map:.2f}, read back {(again.embedding_ == model.embedding_).all()}"
    )

    lines = space.projx(torch.tensor([1.0, 0.0, 0.0]) + 0.3 * torch.randn(50, 3))
    lines[::2] *= -1  # the same lines
    for name, mean in (("midpoint", hs.midpoint(lines, space)), ("Frechet mean", hs.frechet_mean(lines, space).mean)):
        print(f"{name} of lines around the first axis: {mean[0].abs():.3f} of length 1 along it")

    keys = space.random(2, 100, 3)
    values = hs.attention.geodesic_attention(keys, keys, keys, space, eps=0.01, value_manifold=space)
    print(f"attended: each line and the mean of those near it are {space.dist(keys, values).mean():.2f} rad apart")
    block = hs.attention.TransformerBlock(hs.attention.GeodesicAttention(16, 2, manifold=space, rotary=100.0))
    print(f"a block of a transformer: {tuple(block(torch.randn(2, 10, 16), is_causal=True).shape)}")

    router = hs.routing.GeodesicRouter(3, 4, top_k=1, manifold=space)
    chosen, opposite = (router(points).indices for points in (lines, -lines))
    print(f"routed: {len(chosen.unique())} of 4 prototypes chosen, the same for -x: {torch.equal(chosen, opposite)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 epochs of training")
    main(parser.parse_args().quick)

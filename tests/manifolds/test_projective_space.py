"""Projective space, a manifold of one file (examples/projective_space.py), through every feature of the library."""

import importlib.util
import math
import sys
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

import horosphere as hs
from horosphere.attention.points import rotate
from horosphere.manifolds import hooks
from horosphere.testing import ManifoldContract

_PATH = Path(__file__).parents[2] / "examples" / "projective_space.py"
_SPEC = importlib.util.spec_from_file_location("projective_space", _PATH)
projective_space = importlib.util.module_from_spec(_SPEC)
sys.modules["projective_space"] = projective_space  # where pickle looks for the class
_SPEC.loader.exec_module(projective_space)
ProjectiveSpace = projective_space.ProjectiveSpace


class TestProjectiveSpace(ManifoldContract):
    size = 4

    def make_manifold(self):
        return ProjectiveSpace()


def points(*size, seed=0, dtype=torch.float64):
    return ProjectiveSpace().projx(torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def around(n, seed=0, spread=0.2):
    """Lines around one of R^3, every other one given by the opposite vector."""
    x = points(n, 3, seed=seed) * spread + torch.tensor([0.6, -0.8, 0.0], dtype=torch.float64)
    x[::2] *= -1
    return ProjectiveSpace().projx(x)


@pytest.mark.parametrize("precision", ["auto", "exact"])
def test_distances_are_the_angles_of_lines(precision):
    x, y = points(5, 4), points(6, 4, seed=1)
    y[0], y[1] = -x[0], ProjectiveSpace().projx(-x[1] + 1e-9 * y[1])
    found = hs.cdist(x, y, ProjectiveSpace(), precision=precision)
    with mpmath.workdps(40):
        for i, a in enumerate(x.tolist()):
            for j, b in enumerate(y.tolist()):
                norms = [mpmath.sqrt(mpmath.fsum(mpmath.mpf(v) ** 2 for v in row)) for row in (a, b)]
                dot = mpmath.fsum(mpmath.mpf(p) * q for p, q in zip(a, b, strict=True))
                right = float(mpmath.acos(min(mpmath.mpf(1), abs(dot) / norms[0] / norms[1])))
                assert abs(found[i, j] - right) <= 2e-12 * right + 2e-16, (i, j)


def test_embedded_saved_and_loaded(tmp_path):
    ring = [(i, (i + 1) % 10) for i in range(10)]
    model = hs.embedding.GraphEmbedding("projective", n_epochs=60, random_state=0).fit(ring)
    assert model.embedding_.shape == (10, 3)  # n_components = 2 dimensions are 3 numbers
    np.testing.assert_allclose(np.linalg.norm(model.embedding_, axis=1), 1.0, rtol=1e-12)
    assert model.evaluate(ring).map > 0.6
    model.save(tmp_path / "ring.safetensors")
    again = hs.embedding.GraphEmbedding.load(tmp_path / "ring.safetensors")
    assert type(again.manifold_) is ProjectiveSpace and np.array_equal(again.embedding_, model.embedding_)
    assert again.plot().axes[0].collections and again.plot(centre=0).axes[0].collections
    again.partial_fit([(10, 3)])
    assert again.embedding_.shape == (11, 3)


def test_parameter_and_optimizer_through_a_file(tmp_path):
    parameter = hs.ManifoldParameter(points(5, 3), ProjectiveSpace())
    hs.optim.RiemannianAdam([parameter], lr=0.1)
    torch.save(parameter, tmp_path / "p.pt")
    again = torch.load(tmp_path / "p.pt")  # weights_only
    assert type(again.manifold) is ProjectiveSpace and torch.equal(again.data, parameter.data)


def test_means():
    space, x = ProjectiveSpace(), around(40)
    w = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    middle, frechet = hs.midpoint(x, space, w), hs.frechet_mean(x, space, w)
    assert frechet.converged
    # the midpoint is the first axis of sum w x x^T; the Frechet mean's mean tangent is 0; both turn with the lines
    axis = torch.linalg.svd(w.sqrt()[:, None] * x).Vh[0]
    assert space.dist(middle, axis) < 1e-12
    assert (w[:, None] * space.logmap(frechet.mean.expand_as(x), x)).sum(0).norm() < 1e-8
    turn = torch.linalg.qr(points(3, 3, seed=5)).Q
    for mean, before in ((hs.midpoint, middle), (lambda *a: hs.frechet_mean(*a).mean, frechet.mean)):
        assert space.dist(mean(x @ turn.T, space, w), turn @ before) < 1e-8


def test_attention_weighs_by_distance_and_averages_on_the_space():
    space = ProjectiveSpace()
    q, k = points(2, 7, 3), around(20, seed=2).expand(2, 20, 3)
    out = hs.attention.geodesic_attention(q, k, k, space, eps=0.01, value_manifold=space)
    weights = 1 / (hs.cdist(q, k, space, squared=True) + 0.01)
    for b in range(2):
        for i in range(7):
            assert space.dist(out[b, i], hs.midpoint(k[b], space, weights[b, i])) < 1e-9
    assert (
        space.dist(hs.attention.geodesic_attention(-q, k, -k, space, eps=0.01, value_manifold=space), out).max() < 1e-9
    )


@pytest.mark.parametrize("pattern", [{}, {"pattern": "summary", "slots": 8, "chunk": 4}], ids=["dense", "summary"])
@pytest.mark.parametrize("rotary", [None, 100.0])
def test_layer_trains_and_decodes(pattern, rotary):
    torch.manual_seed(0)
    attention = hs.attention.GeodesicAttention(16, 2, manifold=ProjectiveSpace(), rotary=rotary, **pattern)
    layer = hs.attention.TransformerBlock(attention)
    x = torch.randn(2, 9, 16)
    whole = layer(x, is_causal=True)
    whole.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    with torch.no_grad():
        cache = layer.new_cache()
        steps = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(9)], 1)
    torch.testing.assert_close(steps, whole.detach(), rtol=1e-4, atol=1e-5)


def test_rotary_positions_count_by_their_difference():
    """A rotation in planes is an isometry of lines, so weights of equal tokens depend on the distance in time."""
    space = ProjectiveSpace()
    q, k = (points(8, seed=seed).expand(6, 8) for seed in (0, 1))
    q, k = (rotate(x, 0, hooks.rotary_slices(space, 8), 50.0) for x in (q, k))
    d = hs.cdist(hs.attention.into_manifold(q, space), hs.attention.into_manifold(k, space), space)
    torch.testing.assert_close(d[1:, 1:], d[:-1, :-1])
    assert (d[0] - d[0, 0]).abs().max() > 0.01


def test_routed():
    space, x = ProjectiveSpace(), points(30, 3, dtype=torch.float32)
    prototypes = points(5, 3, seed=9, dtype=torch.float32)
    found = hs.routing.route(x, prototypes, space, top_k=1)
    assert torch.equal(found.indices[:, 0], (x @ prototypes.T).abs().argmax(-1))
    router = hs.routing.GeodesicRouter(3, 5, top_k=2, manifold=space)
    assert torch.equal(router(x).indices, router(-x).indices)


def test_compressed():
    space, x = ProjectiveSpace(), points(1, 1, 200, 16, dtype=torch.float32)
    code = hs.memory.HyperbolicCompressor(bits=8, radius_bits=8, manifold=space)
    again = code.decode(code.encode(x))
    assert again.shape == x.shape and space.dist(again, x).max() < 0.05


def test_the_farthest_lines_are_a_right_angle_apart():
    space, eye = ProjectiveSpace(), torch.eye(3, dtype=torch.float64)
    d = hs.cdist(eye, eye, space)
    torch.testing.assert_close(d, math.pi / 2 * (1 - eye), rtol=1e-12, atol=0)


def test_means_have_gradients_where_eigenvalues_are_equal():
    """A causal first row sees one key, whose matrix x x^T has the eigenvalue 0 n times: eigh alone answers NaN."""
    space = ProjectiveSpace()

    def attend(keys):
        keys = space.projx(keys)
        mean = hs.attention.geodesic_attention(keys, keys, keys, space, eps=0.1, value_manifold=space, is_causal=True)
        return mean.unsqueeze(-1) * mean.unsqueeze(-2)  # the sign of a line says nothing

    one_line = torch.eye(4, dtype=torch.float64)[:1].expand(3, 4)
    for keys in (torch.eye(4, dtype=torch.float64)[:2], one_line):
        (grad,) = torch.autograd.grad(attend(keys := keys.clone().requires_grad_()).sum(), keys)
        assert grad.isfinite().all()
    drawn = points(2, 5, 4).requires_grad_()
    assert torch.autograd.gradcheck(attend, (drawn,), rtol=1e-4, atol=1e-6)
    matrix = torch.diag(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)).requires_grad_()
    first_axis = projective_space.first_axis
    assert torch.autograd.gradcheck(lambda a: (x := first_axis((a + a.mT) / 2)).unsqueeze(-1) * x, (matrix,))
    (grad,) = torch.autograd.grad(torch.linalg.eigh(matrix).eigenvectors[:, -1].sum(), matrix)
    assert grad.isnan().any()

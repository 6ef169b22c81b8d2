"""Curvatures learned along with the ranking loss, by the torch engine's optimizer."""

import numpy as np
import pytest
import torch

from horosphere import Lorentz, PoincareBall, Product, Scaled, Sphere, Stereographic
from horosphere.embedding import GraphEmbedding
from horosphere.embedding.curvature import fixed, learnable
from horosphere.embedding.graph import Graph
from horosphere.embedding.losses import ranking_loss
from horosphere.embedding.schedule import Schedule
from horosphere.embedding.torch_engine import TorchEngine

TREE = [(f"n{i}", f"n{(i - 1) // 2}") for i in range(1, 31)]


def fitted(manifold, **changes):
    return GraphEmbedding(manifold, **{"n_epochs": 20, "random_state": 0, "batch_size": 10, **changes}).fit(TREE)


@pytest.mark.parametrize(
    "manifold",
    [
        PoincareBall(-1.0, learnable=True),
        Stereographic(-0.2, learnable=True),
        Scaled(Sphere(), 2.0, learnable=True),
        Product((Lorentz(-0.5, learnable=True), 4), (Sphere(), 4)),
    ],
    ids=str,
)
def test_a_learnable_manifold_moves_with_its_points(manifold):
    before = fixed(manifold).config()
    model = fitted(manifold, n_components=6 if isinstance(manifold, Product) else 3)
    assert model.manifold_.config() != before and not list(model.manifold_.parameters())
    assert fixed(manifold).config() == before
    assert model.manifold_.check_point_on_manifold(torch.from_numpy(model.embedding_))
    assert model.loss_curve_[-1] < 0.8 * model.loss_curve_[0]


def test_a_step_is_the_gradient_of_the_curvature():
    ball = PoincareBall(-0.5, learnable=True)
    torch.manual_seed(0)
    start = ball.random(3, 2, dtype=torch.float64).detach()
    graph = Graph([0, 1, 2], np.asarray([[0, 1]]), np.ones(1))
    engine = TorchEngine(start.numpy(), graph, graph, ball, Schedule(1, 0.1, 1, 4, 0, 0))
    engine.run(0)

    def loss(kappa):
        return ranking_loss(start, torch.tensor([[0, 1, 2]]), PoincareBall(kappa)).item()

    slope = (loss(-0.5 + 1e-6) - loss(-0.5 - 1e-6)) / 2e-6
    # The rate of the points, shared by the pairs of a batch.
    assert engine.manifold.kappa == pytest.approx(-0.5 - 0.1 / 4 * slope, rel=1e-6)


@pytest.mark.parametrize("start", [-0.5, 0.0])
def test_no_step_of_the_curvature_is_longer_than_a_tenth(start):
    """Of itself; where it may cross 0, of 1."""
    torch.manual_seed(0)
    space = Stereographic(start, learnable=True) if start == 0 else PoincareBall(start, learnable=True)
    points = PoincareBall(-0.5).random(3, 2, dtype=torch.float64).numpy()
    graph = Graph([0, 1, 2], np.asarray([[0, 1]]), np.ones(1))
    engine = TorchEngine(points, graph, graph, space, Schedule(1, 1e3, 1, 4, 0, 0))
    engine.run(0)
    assert abs(engine.manifold.kappa - start) == pytest.approx(0.1 * (abs(start) or 1.0))


@pytest.mark.parametrize("space", ["lorentz", "sphere", "H2xS2"])
def test_a_curvature_does_not_run_off_at_a_large_rate(space):
    """Towards 1e50 all points would fall together, at a loss of log 51 = 3.93."""
    model = fitted(space, learn_curvature=True, learning_rate=1.0)
    parts = getattr(model.manifold_, "manifolds", [model.manifold_])
    assert all(1e-2 < abs(part.kappa) < 1e2 for part in parts) and model.loss_curve_[-1] < 3.5


def test_by_name_and_by_argument():
    model = fitted("H2xS2", learn_curvature=True)
    assert [part.kappa for part in model.manifold_.manifolds] != [-1.0, 1.0]
    assert fitted(PoincareBall(-2.0), learn_curvature=True).manifold_.kappa != -2.0
    assert learnable(Scaled(PoincareBall(), 2.0)).base.learnable
    with pytest.raises(ValueError, match=r"numba.*fixed curvature"):
        fitted("H2", learn_curvature=True, engine="numba")


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path):
    want = fitted("H2xS2", learn_curvature=True)

    def interrupt(info):
        if info.epoch == 9:
            raise InterruptedError

    kept = {"checkpoint": tmp_path / "c", "checkpoint_every": 4}
    with pytest.raises(InterruptedError):
        fitted("H2xS2", learn_curvature=True, callbacks=[interrupt], **kept)
    found = fitted("H2xS2", learn_curvature=True, **kept)
    assert np.array_equal(found.embedding_, want.embedding_)
    assert found.manifold_.config() == want.manifold_.config()

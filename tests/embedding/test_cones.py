"""Entailment cones against the source's formula, and learned on a tree."""

import math

import numpy as np
import pytest
import torch

from horosphere import PoincareBall
from horosphere.data import mammals_closure
from horosphere.embedding import GraphEmbedding
from horosphere.embedding.losses.cones import (
    APERTURE,
    INNER,
    LONGEST_STEP,
    REACH,
    bounded,
    cone_excess,
    cone_loss,
    drawn_in,
    excess_to_all,
    outside_centre,
)
from horosphere.embedding.schedule import Schedule

TREE = [(f"n{i}", f"n{(i - 1) // 2}") for i in range(1, 31)]


def in_shell(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    return torch.from_numpy(x / np.linalg.norm(x, axis=1, keepdims=True) * rng.uniform(INNER * 1.01, 0.97, (n, 1)))


def test_excess_is_the_formula_of_the_source():
    x, y = in_shell(50), in_shell(50, 1)
    for a, b, found in zip(x.numpy(), y.numpy(), cone_excess(x, y).tolist(), strict=True):
        a2, b2, ab = a @ a, b @ b, a @ b
        below = math.sqrt(a2) * np.linalg.norm(a - b) * math.sqrt(1 + a2 * b2 - 2 * ab)
        want = math.acos((ab * (1 + a2) - a2 * (1 + b2)) / below) - math.asin(APERTURE * (1 - a2) / math.sqrt(a2))
        assert found == pytest.approx(want, abs=1e-9)


def test_the_excess_to_all_points_is_that_of_each_pair():
    points = in_shell(40)
    found = excess_to_all(PoincareBall(-4.0), points / 2, np.asarray([3, 0, 17]))
    np.testing.assert_allclose(found, cone_excess(points, points[[3, 0, 17], None]).numpy(), atol=1e-7)


def test_cones_are_nested():
    rng = np.random.default_rng(0)
    x, y, z = (
        torch.from_numpy(np.stack([np.full(5000, radius), *rng.normal(0, 0.03, (2, 5000))], axis=1))
        for radius in (0.3, 0.5, 0.7)
    )
    both = (cone_excess(x, y) < 0) & (cone_excess(y, z) < 0)
    assert both.sum() > 100 and (cone_excess(x, z)[both] < 1e-9).all()
    assert (cone_excess(x, z) > 0).sum() > 100


def test_gradients_are_finite_on_the_axis_and_at_the_inner_border():
    x = torch.tensor([[INNER, 0.0], [0.3, 0.0], [0.3, 0.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[0.5, 0.1], [0.6, 0.0], [0.3, 0.0]], dtype=torch.float64, requires_grad=True)
    for gradient in torch.autograd.grad(cone_excess(x, y).sum(), (x, y)):
        assert gradient.isfinite().all()
    assert torch.autograd.gradcheck(cone_excess, (in_shell(4).requires_grad_(), in_shell(4, 1).requires_grad_()))


def test_the_loss_by_hand_and_in_any_curvature():
    points = in_shell(4)
    index = torch.tensor([[0, 1, 2, 3]])
    excess = cone_excess(points[1:], points[:1]).clamp(min=0)
    want = excess[0] + (0.01 - excess[1:]).clamp(min=0).sum()
    assert cone_loss(points, index, PoincareBall()).item() == pytest.approx(want.item())
    assert cone_loss(2 * points, index, PoincareBall(-0.25)).item() == pytest.approx(want.item())


def test_points_near_the_centre_move_out():
    points = torch.tensor([[0.01, 0.0], [0.0, 0.5]], dtype=torch.float64)
    moved = outside_centre(points, PoincareBall(-4.0))
    assert moved.tolist() == [[pytest.approx(INNER / 2), 0.0], [0.0, 0.5]]


def test_points_far_out_are_drawn_in_by_one_factor():
    ball = PoincareBall(-4.0)
    direction = torch.nn.functional.normalize(in_shell(200), dim=1)
    radii = torch.linspace(0.01, 3, 200, dtype=torch.float64)
    moved = drawn_in(ball.expmap0(direction * radii[:, None] / 2), ball)
    found = ball.dist0(moved)
    assert torch.quantile(found, 0.99).item() == pytest.approx(REACH / 2)
    torch.testing.assert_close(found / radii, (found[0] / radii[0]).expand(200))
    torch.testing.assert_close(torch.nn.functional.normalize(moved, dim=1), direction)
    torch.testing.assert_close(drawn_in(moved, ball), moved)


def test_no_step_is_longer_than_its_bound():
    ball = PoincareBall(-4.0)
    points, gradient = in_shell(3) / 2, torch.tensor([[1e6, 0, 0], [0, 1e-6, 0], [0, 0, 0]], dtype=torch.float64)
    found = bounded(gradient, points, ball, 0.05, 0.1)
    length = 0.05 * ball.norm(points, ball.egrad2rgrad(points, found))
    assert length[0].item() == pytest.approx(LONGEST_STEP / 2 * 0.5) and torch.equal(found[1:], gradient[1:])


def test_a_run_ranks_first_unless_its_start_is_given():
    plan = {"n_epochs": 10, "learning_rate": 0.1, "n_negatives": 5, "batch_size": 10, "burn_in": 0, "seed": 0}
    for settled, first in ((False, 5), (True, 0)):
        schedule = Schedule(**plan, loss="cones", settled=settled)
        assert [schedule.own(epoch) for epoch in range(10)] == [epoch >= first for epoch in range(10)]
        assert schedule.rate(first) == pytest.approx(0.1)
    assert Schedule(**plan).own(0)
    model = GraphEmbedding("poincare", 3, loss="cones", closure=True, n_epochs=60, n_negatives=10, random_state=0)
    learned = model.fit(TREE).embedding_
    again = model.set_params(init=learned, n_epochs=1, learning_rate=1e-9).fit(TREE).embedding_
    assert np.abs(again - learned).max() < 1e-6


def test_a_tree_is_learned_and_saved(tmp_path):
    model = GraphEmbedding("poincare", 3, loss="cones", closure=True, n_epochs=60, n_negatives=10, random_state=0)
    scores = model.fit(TREE).evaluate(TREE)
    assert scores.map > 0.99 and scores.mean_rank < 1.1
    assert np.linalg.norm(model.embedding_, axis=1).min() > 0.999 * INNER
    model.save(tmp_path / "m")
    assert GraphEmbedding.load(tmp_path / "m").evaluate(TREE) == scores
    added = model.partial_fit([("new", "n3")])
    assert added.embedding_.shape == (32, 3)


def test_carnivores_are_found_in_the_cones_of_their_ancestors():
    pairs = mammals_closure()
    below = {child for child, parent in pairs if parent == "carnivore.n.01"}
    pairs = [(child, parent) for child, parent in pairs if child in below and parent in below]
    model = GraphEmbedding("poincare", 5, loss="cones", n_epochs=60, n_negatives=10, random_state=0).fit(pairs)
    assert model.score(pairs) > 0.97
    points = torch.from_numpy(model.embedding_)
    inside = (cone_excess(points, points[:, None]) <= 0).fill_diagonal_(False)
    child, parent = model.graph_.edges.T
    assert inside[child, parent].float().mean() > 0.95 and len(pairs) / inside.sum() > 0.9


def test_only_the_ball_has_cones():
    for changes, message in (
        ({"manifold": "H3"}, "PoincareBall of fixed curvature"),
        ({"engine": "numba"}, "no cones"),
    ):
        with pytest.raises(ValueError, match=message):
            GraphEmbedding(**{"loss": "cones", "n_epochs": 2, **changes}).fit(TREE)

"""The compiled engine against the torch engine, which is the reference."""

import numpy as np
import pytest
import torch

from horosphere import Euclidean, Lorentz, PoincareBall, Product, Scaled, Sphere, Stereographic
from horosphere.embedding import GraphEmbedding, compiled, compiled_ball
from horosphere.embedding.compiled_engine import CompiledEngine, _excluded, working_manifold
from horosphere.embedding.graph import Graph
from horosphere.embedding.schedule import Schedule
from horosphere.embedding.torch_engine import TorchEngine

TREE = [(f"n{i}", f"n{(i - 1) // 2}") for i in range(1, 31)]
# Source 0 has one neighbour, 1, and one stranger, 2: the only node that can be drawn.
FORCED = Graph([0, 1, 2], np.asarray([[0, 1]]), np.ones(1))
MANIFOLDS = [
    (Euclidean(), 3),
    (PoincareBall(-1.0), 3),
    (PoincareBall(-0.3), 2),
    (Lorentz(-2.0), 4),
    (Sphere(0.5), 4),
    (Product((PoincareBall(-1.0), 2), (Lorentz(-0.5), 3), (Sphere(2.0), 3), (Euclidean(), 2)), 10),
]


@pytest.mark.parametrize(("manifold", "size"), MANIFOLDS, ids=str)
@pytest.mark.parametrize("n_fixed", [0, 1, 2])
def test_a_step_on_one_pair_is_that_of_the_torch_engine(manifold, size, n_fixed):
    torch.manual_seed(0)
    start = manifold.random(3, size, dtype=torch.float64).numpy()
    schedule = Schedule(n_epochs=1, learning_rate=0.05, n_negatives=1, batch_size=1, burn_in=0, seed=0)
    got = CompiledEngine(start, FORCED, FORCED, manifold, schedule, n_fixed)
    want = TorchEngine(start, FORCED, FORCED, manifold, schedule, n_fixed)
    assert got.run(0) == pytest.approx(want.run(0), rel=1e-10)
    np.testing.assert_allclose(got.points(), want.points(), rtol=1e-9, atol=1e-11)
    moved = np.abs(got.points() - start).max(axis=1) > 1e-4
    assert moved.tolist() == [i >= n_fixed for i in range(3)]
    assert np.array_equal(got.points()[:n_fixed], start[:n_fixed])


@pytest.mark.parametrize("length", [1e-8, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("gap", [1e-10, 3e-10, 1e-9])
def test_a_step_from_the_rim_inwards_stays_a_number(length, gap):
    table = np.asarray([[1.0 - gap, 0.0]])
    compiled._move(compiled.BALL, 1.0, table, 0, np.asarray([-length, 0.0]), 0, 2)
    assert np.isfinite(table).all() and abs(table[0, 0]) < 1.0


@pytest.mark.parametrize("kernel", ["general", "ball"])
def test_a_row_that_another_thread_is_writing_does_no_harm(kernel):
    """Half old and half new, a row can look as if it lay outside of the ball."""
    table = np.asarray([[0.3, 0.2], [0.99, 0.4], [0.1, -0.4]])
    settings = (table, 0, FORCED.edges, *_excluded(FORCED), np.empty(0, np.int64), 1, 0.1)
    if kernel == "ball":
        loss = compiled_ball.ball_pairs(*settings, 1.0, np.uint64(3))
    else:
        parts = (np.asarray([compiled.BALL]), np.ones(1), np.asarray([0, 2]))
        loss = compiled.ranking_pairs(*settings, *parts, np.uint64(3))
    assert np.isfinite(loss) and np.isfinite(table).all()
    assert (np.linalg.norm(table[[0, 2]], axis=1) < 1).all()


def test_strangers_are_drawn_all_alike_and_neighbours_never():
    excluded, starts = np.asarray([0, 3, 4, 9]), np.asarray([0, 4])
    state, drawn = np.asarray([7], np.uint64), np.zeros(10, int)
    for _ in range(60_000):
        drawn[compiled._stranger(state, starts, excluded, 0, 10)] += 1
    assert drawn[excluded].sum() == 0
    # six strangers, 10,000 expected each, standard deviation 91
    assert np.abs(drawn[[1, 2, 5, 6, 7, 8]] - 10_000).max() < 450


def test_a_pool_sets_the_odds_and_is_left_when_it_holds_neighbours_only():
    excluded, starts = np.asarray([0, 3]), np.asarray([0, 2])
    state = np.asarray([7], np.uint64)
    pool = np.asarray([1, 1, 1, 2, 3])
    drawn = np.bincount([compiled._negative(state, starts, excluded, pool, 0, 5) for _ in range(20_000)], minlength=5)
    assert drawn[[0, 3, 4]].sum() == 0 and drawn[1] / drawn[2] == pytest.approx(3, rel=0.1)
    alone = {int(compiled._negative(state, starts, excluded, np.asarray([3]), 0, 5)) for _ in range(100)}
    assert alone == {1, 2, 4}


def test_both_engines_learn_equally_well():
    scores = {
        engine: np.mean(
            [
                GraphEmbedding(
                    Sphere(0.1), 3, n_epochs=60, learning_rate=0.3, closure=True, random_state=seed, engine=engine
                )
                .fit(TREE)
                .score(TREE)
                for seed in range(4)
            ]
        )
        for engine in ("numba", "torch")
    }
    # eight seeds of either lie between 0.585 and 0.609
    assert scores["numba"] == pytest.approx(scores["torch"], abs=0.02)


def test_one_thread_repeats_itself_and_several_learn_as_well():
    def fitted(n_jobs):
        return GraphEmbedding("poincare", 3, n_epochs=40, closure=True, random_state=3, n_jobs=n_jobs).fit(TREE)

    one = fitted(1)
    assert np.array_equal(one.embedding_, fitted(None).embedding_)
    assert fitted(2).score(TREE) == pytest.approx(one.score(TREE), abs=0.05)


def test_what_it_does_not_serve_goes_to_torch_or_is_refused():
    for manifold in (Stereographic(-1.0), Scaled(PoincareBall(), 2.0), PoincareBall(torch.tensor([-1.0, -2.0]))):
        assert working_manifold(manifold) is None
    with pytest.raises(ValueError, match=r"Stereographic.*torch"):
        GraphEmbedding(Stereographic(-1.0), 2, n_epochs=1, engine="numba").fit(TREE)
    with pytest.raises(ValueError, match="engine must be"):
        GraphEmbedding(engine="fast").fit(TREE)
    assert GraphEmbedding(Stereographic(-1.0), 2, n_epochs=1, random_state=0).fit(TREE).embedding_.shape == (31, 2)

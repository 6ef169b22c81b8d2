"""The kernel for one ball against the kernel for all products, which it must follow step by step."""

import numpy as np
import pytest

from horosphere import PoincareBall
from horosphere.embedding import compiled, compiled_ball
from horosphere.embedding.compiled_engine import CompiledEngine
from horosphere.embedding.graph import as_graph
from horosphere.embedding.schedule import Schedule

# A node with 40 neighbours (a list that is searched) and many with few (lists that are walked).
STAR = as_graph([(i, i // 2) for i in range(1, 60)] + [("hub", i) for i in range(40)])


def tables(dimension, kappa):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(STAR.nodes), dimension))
    radius = np.tanh(rng.uniform(0, 8, (len(x), 1))) / np.sqrt(-kappa)
    return x / np.linalg.norm(x, axis=1, keepdims=True) * radius


@pytest.mark.parametrize(("dimension", "kappa"), [(2, -1.0), (5, -1.0), (10, -0.3), (3, -4.0)])
@pytest.mark.parametrize("pooled", [False, True])
def test_the_steps_are_those_of_the_kernel_for_products(dimension, kappa, pooled):
    engine = CompiledEngine(tables(dimension, kappa), STAR, STAR, PoincareBall(kappa), Schedule(1, 0.1, 1, 1, 0, 0))
    starts, excluded = engine._starts, engine._excluded
    pool = STAR.edges[:, 1].copy() if pooled else STAR.edges[:0, 1].copy()
    shared = (3, STAR.edges, starts, excluded, pool, 30, 0.3)
    want, got = engine.state.copy(), engine.state.copy()
    parts = np.asarray([compiled.BALL]), np.asarray([-kappa]), np.asarray([0, dimension])
    for epoch in range(3):
        seed = np.uint64(epoch)
        loss = compiled.ranking_pairs(want, *shared, *parts, seed)
        assert compiled_ball.ball_pairs(got, *shared, -kappa, seed) == pytest.approx(loss, rel=1e-9)
    moved = np.abs(want - engine.state).max()
    assert moved > 0.01 and np.abs(want - got).max() < 1e-7
    assert np.array_equal(got[:3], engine.state[:3])


def test_far_points_stay_inside_the_ball_and_finite():
    start = tables(4, -1.0)
    start *= (1 - 1e-9) / np.linalg.norm(start, axis=1, keepdims=True)
    engine = CompiledEngine(start, STAR, STAR, PoincareBall(), Schedule(3, 50.0, 20, 1, 0, 0))
    assert all(np.isfinite(engine.run(epoch)) for epoch in range(3))
    assert np.linalg.norm(engine.state, axis=1).max() <= 1 - compiled.RIM + 1e-15


def test_points_that_coincide_stay_finite():
    engine = CompiledEngine(np.zeros((len(STAR.nodes), 3)), STAR, STAR, PoincareBall(), Schedule(3, 0.1, 20, 1, 0, 0))
    assert all(np.isfinite(engine.run(epoch)) for epoch in range(3))
    assert np.array_equal(engine.state, np.zeros_like(engine.state))


def test_strangers_are_the_same_nodes():
    engine = CompiledEngine(tables(2, -1.0), STAR, STAR, PoincareBall(), Schedule(1, 0.1, 1, 1, 0, 0))
    a, b = np.asarray([9], np.uint64), np.asarray([9], np.uint64)
    n = len(STAR.nodes)
    for u in (STAR.index["hub"], STAR.index[30]):
        for _ in range(200):
            want = compiled._stranger(a, engine._starts, engine._excluded, u, n)
            assert compiled_ball._uniform_stranger(b, engine._starts, engine._excluded, u, n) == want


def test_threads_learn_as_well():
    """Threads write without locks, so their result is another one each time: what is compared is how far they came."""
    losses = []
    for n_threads in (1, 2):
        engine = CompiledEngine(
            1e-3 * tables(3, -1.0), STAR, STAR, PoincareBall(), Schedule(60, 0.3, 10, 1, 0, 0), n_threads=n_threads
        )
        losses.append([engine.run(epoch) for epoch in range(60)])
    first, alone, together = losses[0][0], *(np.mean(some[-20:]) for some in losses)
    assert alone < 0.5 * first
    assert together < alone + 0.1 * (first - alone)

"""Distances fitted to lengths: both engines, learned curvatures, inputs, scores."""

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
import torch

from horosphere import Euclidean, Lorentz, PoincareBall, Product, Sphere, Stereographic
from horosphere.embedding import GraphEmbedding, as_lengths, distortion, lengths
from horosphere.embedding.curvature import CurvatureSteps, curvatures, with_curvatures
from horosphere.embedding.distortion_engine import DistortionEngine
from horosphere.embedding.lengths import Lengths, start_at_mean
from horosphere.embedding.schedule import DistortionSchedule

TREE = [(f"n{i}", f"n{(i - 1) // 2}") for i in range(1, 31)]
MANIFOLDS = [
    (Euclidean(), 3),
    (PoincareBall(-0.3), 2),
    (Lorentz(-2.0), 4),
    (Sphere(0.5), 4),
    (Product((PoincareBall(-1.0), 2), (Lorentz(-0.5), 3), (Sphere(2.0), 3), (Euclidean(), 2)), 10),
]


def schedule(n_epochs=1, learning_rate=0.01, learn_curvature=False, extent=(1.0, 1.0, 1.0), batch_size=1):
    return DistortionSchedule(n_epochs, learning_rate, batch_size, 0, "shortest_path", learn_curvature, *extent)


def fitted(graph=TREE, manifold="H3", **changes):
    return GraphEmbedding(manifold, loss="distortion", **{"random_state": 0, "n_epochs": 30, **changes}).fit(graph)


@pytest.mark.parametrize(("manifold", "size"), MANIFOLDS, ids=str)
@pytest.mark.parametrize("stress", [True, False])
@pytest.mark.parametrize("n_fixed", [0, 1])
@pytest.mark.parametrize("length", [0.3, 4.0])
def test_a_step_on_one_pair_is_that_of_the_torch_engine(manifold, size, stress, n_fixed, length):
    torch.manual_seed(0)
    start = manifold.random(2, size, dtype=torch.float64).numpy()
    asked = Lengths(as_lengths([(0, 1, length)], "shortest_path"), "shortest_path")
    # Of two epochs the first is one of the stress.
    plan = schedule(2, 0.02, extent=(length / 2, length * 2, 2.0))
    assert plan.stress_epochs == 1
    compiled, plain = (DistortionEngine(start, asked, manifold, plan, name, n_fixed) for name in ("numba", "torch"))
    epoch = 0 if stress else 1
    assert compiled.run(epoch) == pytest.approx(plain.run(epoch), rel=1e-10)
    np.testing.assert_allclose(compiled.points(), plain.points(), rtol=1e-9, atol=1e-10)
    moved = np.abs(compiled.points() - start).max(axis=1) > 1e-4
    assert moved.tolist() == [i >= n_fixed for i in range(2)]


@pytest.mark.parametrize(("manifold", "size"), MANIFOLDS, ids=str)
def test_a_full_step_closes_the_gap_and_a_small_one_has_the_stated_length(manifold, size):
    torch.manual_seed(1)
    start = manifold.random(2, size, dtype=torch.float64)
    before = manifold.dist(start[0], start[1]).item()
    asked = Lengths(as_lengths([(0, 1, 0.8 * before)], "shortest_path"), "shortest_path")
    full = DistortionEngine(start.numpy(), asked, manifold, schedule(2, extent=(before, before, 1.0)), "numba")
    full.run(0)
    points = torch.from_numpy(full.points())
    assert manifold.dist(points[0], points[1]).item() == pytest.approx(0.8 * before, rel=1e-9)
    small = DistortionEngine(start.numpy(), asked, manifold, schedule(1, 1e-3 * before**2), "numba")
    small.run(0)
    points = torch.from_numpy(small.points())
    # Each end moves by rate / g.
    assert manifold.dist(points[0], start[0]).item() == pytest.approx(1e-3 * before / 0.8, rel=1e-7)
    assert manifold.dist(points[0], points[1]).item() == pytest.approx((1 - 2e-3 / 0.8) * before, rel=1e-7)


@pytest.mark.parametrize("engine", ["numba", "torch"])
def test_exact_distances_are_found_again(engine):
    points = torch.from_numpy(np.random.default_rng(0).normal(size=(25, 3)))
    wanted = torch.cdist(points, points).numpy()
    model = fitted(wanted, "E3", metric="precomputed", engine=engine, n_epochs=120, batch_size=20)
    scores = model.evaluate(wanted)
    assert scores.average_distortion < 0.01 and scores.worst_distortion < 1.5 and scores.map is None
    assert model.score(wanted) == -scores.average_distortion and scores.n_pairs == 300


def test_the_curvature_of_the_data_is_learned():
    """Great circles on a sphere of radius 2, from a sphere 1.8 times too large and one half as large."""
    sphere = Sphere(0.25)
    torch.manual_seed(0)
    points = sphere.random(60, 3, dtype=torch.float64)
    wanted = sphere.dist(points[:, None], points[None]).numpy()
    for kappa in (0.08, 1.0):
        model = fitted(wanted, Sphere(kappa, learnable=True), metric="precomputed", n_epochs=100)
        assert model.manifold_.kappa == pytest.approx(0.25, rel=0.1)
        assert not list(model.manifold_.parameters()) and model.evaluate(wanted).average_distortion < 0.03


def test_a_sphere_too_small_for_a_tree_grows():
    with pytest.warns(UserWarning, match=r"farther apart than 3\.142, and the longest distance asked for is 8"):
        scores = {learn: fitted(manifold="S3", learn_curvature=learn).evaluate(TREE) for learn in (False, True)}
    assert scores[True].average_distortion < 0.2 < 0.3 < scores[False].average_distortion


def test_a_curvature_that_is_not_wanted_goes_to_nearly_flat_and_no_further():
    points = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 2)))
    wanted = torch.cdist(points, points).numpy()
    model = fitted(wanted, Sphere(1e-5), metric="precomputed", learn_curvature=True, n_epochs=60)
    assert 0.99e-6 < model.manifold_.kappa * wanted.max() ** 2 < 1e-3


def test_normal_coordinates_stay_when_curvatures_move():
    manifold, size = MANIFOLDS[-1]
    torch.manual_seed(0)
    points = manifold.random(7, size, dtype=torch.float64)
    kappas = np.asarray([-0.2, -2.0, 0.7, 0.0])
    bent, moved = with_curvatures(manifold, points, kappas)
    assert curvatures(bent).tolist() == kappas.tolist()

    def radii(space, at):
        origin = space.origin(*at.shape, dtype=torch.float64)
        parts = zip(space.manifolds, space.slices, strict=True)
        return torch.stack([part.dist(origin[:, where], at[:, where]) for part, where in parts])

    torch.testing.assert_close(radii(bent, moved), radii(manifold, points), rtol=1e-10, atol=1e-10)


def test_a_space_without_curvature_has_none_to_learn():
    for manifold in ("E3", Stereographic(-1.0)):
        with pytest.raises(ValueError, match="no curvature to learn"):
            fitted(manifold=manifold, learn_curvature=True)
    with pytest.raises(ValueError, match="no curvature to learn"):
        GraphEmbedding("E3", learn_curvature=True).fit(TREE)
    assert CurvatureSteps(MANIFOLDS[-1][0]).state.shape == (2, 3)


@pytest.mark.parametrize("learn", [False, True])
def test_seeds_threads_and_saved_models(tmp_path, learn):
    model = fitted(manifold="H2xS2", learn_curvature=learn)
    assert np.array_equal(model.embedding_, fitted(manifold="H2xS2", learn_curvature=learn).embedding_)
    assert not np.array_equal(model.embedding_, fitted(manifold="H2xS2", random_state=1).embedding_)
    # On so small a table two threads collide all the time: 0.05 to 0.13 over 12 seeds on one, 0.05 to 0.17 on two.
    assert fitted(manifold="H2xS2", learn_curvature=learn, n_jobs=2).evaluate(TREE).average_distortion < 0.4
    model.save(tmp_path / "m")
    loaded = GraphEmbedding.load(tmp_path / "m")
    assert loaded.evaluate(TREE) == model.evaluate(TREE) and loaded.n_components_ == 4
    assert loaded.manifold_.config() == model.manifold_.config() and loaded.loss == "distortion"


@pytest.mark.parametrize("engine", ["numba", "torch"])
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path, engine):
    settings = {"manifold": "H2xS2", "learn_curvature": True, "n_epochs": 12, "engine": engine}
    want = fitted(**settings)

    def interrupt(info):
        if info.epoch == 9:
            raise InterruptedError

    kept = {"checkpoint": tmp_path / "c", "checkpoint_every": 2}
    with pytest.raises(InterruptedError):
        fitted(callbacks=[interrupt], **settings, **kept)
    epochs = []
    found = fitted(callbacks=[lambda info: epochs.append(info.epoch)], **settings, **kept)
    assert epochs == [9, 10, 11, 12]
    assert np.array_equal(found.embedding_, want.embedding_) and found.loss_curve_ == want.loss_curve_
    assert found.manifold_.config() == want.manifold_.config()
    with pytest.raises(ValueError, match="other settings"):
        fitted(**{**settings, "learn_curvature": False}, **kept)


def test_new_nodes_join_and_old_ones_stay():
    model = fitted(n_epochs=60)
    old, manifold = model.embedding_.copy(), model.manifold_
    model.partial_fit([("new", "n3", 2.0), ("newer", "new")])
    assert np.array_equal(model.embedding_[:31], old) and model.manifold_ is manifold
    found = model.manifold_.dist(*torch.from_numpy(model.embedding_[[31, 32]])).item()
    assert found == pytest.approx(1.0, rel=0.3)


def test_lengths_are_those_of_shortest_paths():
    rng = np.random.default_rng(0)
    graph = nx.gnm_random_graph(30, 60, seed=1)
    for _, _, data in graph.edges(data=True):
        data["weight"] = rng.uniform(0.5, 3)
    want = dict(nx.all_pairs_dijkstra_path_length(graph))
    found = Lengths(as_lengths(graph, "shortest_path"), "shortest_path")
    rows = found.rows(np.arange(30))
    for u in graph:
        for v in graph:
            assert rows[u, v] == pytest.approx(want[u].get(v, np.inf))
    pairs, values = found.epoch(rng)
    assert len({frozenset(pair) for pair in pairs.tolist()}) == len(pairs)
    np.testing.assert_allclose(values, rows[tuple(pairs.T)])
    assert len(pairs) == (np.isfinite(rows).sum() - 30) // 2


def test_of_a_large_graph_an_epoch_sees_the_paths_of_some_nodes(monkeypatch):
    monkeypatch.setattr(lengths, "MAX_PAIRS", 100)
    graph = as_lengths(TREE, "shortest_path")
    pairs, values = Lengths(graph, "shortest_path").epoch(np.random.default_rng(0))
    assert len(np.unique(pairs[:, 0])) == 3 and len(pairs) == 3 * 30 and values.min() == 1.0
    assert fitted(manifold="E5", n_epochs=200).evaluate(TREE).average_distortion < 0.2


def test_weights_are_lengths_and_the_shortest_of_several_counts():
    edges = [("a", "b", 2.0), ("b", "a", 5.0), ("a", "b", 3.0), ("b", "c", 1.0)]
    rows = Lengths(as_lengths(edges, "shortest_path"), "shortest_path").rows(np.arange(3))
    assert rows.tolist() == [[0, 2, 3], [2, 0, 1], [3, 1, 0]]


def test_components_have_no_distance():
    with pytest.warns(UserWarning, match="falls into 2 components"):
        model = fitted([("a", "b"), ("b", "c"), ("d", "e")], "E2")
    assert model.evaluate([("a", "b"), ("b", "c"), ("d", "e")]).n_pairs == 4


def test_known_distances_only():
    sparse = scipy.sparse.csr_array(([1.0, 1.0, 2.0], ([0, 1, 2], [1, 2, 3])), shape=(4, 4))
    rows = Lengths(as_lengths(sparse, "precomputed"), "precomputed").rows(np.arange(4))
    assert rows[0].tolist() == [0, 1, np.inf, np.inf] and rows[3, 2] == 2
    model = fitted(sparse, "E2", metric="precomputed", n_epochs=60)
    assert model.evaluate(sparse).n_pairs == 3 and model.evaluate(sparse).average_distortion < 0.01


def test_matrices_that_are_no_distances_are_refused():
    good = np.asarray([[0.0, 1, 2], [1, 0, 1], [2, 1, 0]])
    assert len(as_lengths(good, "precomputed").edges) == 3
    for (i, j), value in (((0, 1), 3.0), ((0, 1), 0.0), ((2, 1), -1.0), ((1, 2), np.nan)):
        bad = good.copy()
        bad[i, j] = value
        with pytest.raises(ValueError, match="distance"):
            as_lengths(bad, "precomputed")
    with pytest.raises(ValueError, match=r"\(n, n\), got shape \(2, 3\)"):
        as_lengths(good[:2], "precomputed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "stress"}, 'loss must be "cones", "distortion" or "ranking"'),
        ({"metric": "matrix"}, 'metric must be "shortest_path" or "precomputed"'),
        ({"loss": "ranking", "metric": "precomputed"}, "other losses want edges"),
        ({"closure": True}, "closure=True is for"),
        ({"manifold": "H3", "n_components": 4}, "H3 has 3 dimensions, and n_components is 4"),
    ],
)
def test_arguments_that_contradict_each_other(changes, message):
    with pytest.raises(ValueError, match=message):
        GraphEmbedding(**{"loss": "distortion", **changes}).fit(TREE)


@pytest.mark.parametrize("block", [1, 10**6])
def test_scores_are_the_definition(monkeypatch, block):
    monkeypatch.setattr("horosphere.embedding.scores._BLOCK", block)
    graph = nx.cycle_graph(8)
    points = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 2)) * 0.3)
    ball = PoincareBall()
    ratios = [
        ball.dist(points[u], points[v]).item() / min(abs(u - v), 8 - abs(u - v)) for u in range(8) for v in range(u)
    ]
    found = distortion(as_lengths(graph, "shortest_path"), points, ball)
    assert found.average_distortion == pytest.approx(np.mean(np.abs(np.asarray(ratios) - 1)))
    assert found.worst_distortion == pytest.approx(max(ratios) / min(ratios))
    assert found.n_pairs == 28 and 0 < found.map <= 1


def test_nodes_on_one_point_are_infinitely_distorted():
    graph = as_lengths([("a", "b"), ("b", "c")], "shortest_path")
    points = torch.tensor([[0.0], [0.0], [1.0]], dtype=torch.float64)
    assert distortion(graph, points, Euclidean()).worst_distortion == np.inf


@pytest.mark.parametrize(("manifold", "size"), MANIFOLDS, ids=str)
def test_a_start_has_the_wanted_mean_distance(manifold, size):
    dimension = {3: 3, 2: 2, 4: 3, 10: 8}[size]
    start = start_at_mean(manifold, 200, dimension, 1.2, np.random.default_rng(0))
    assert start.shape == (200, size)
    assert manifold.dist(start[:100], start[100:]).mean().item() == pytest.approx(1.2, rel=0.15)


@pytest.mark.parametrize("init", ["mds", "tree"])
def test_a_constructed_start_is_kept_and_improved(init):
    one = fitted(manifold="H2", init=init, n_epochs=1, learning_rate=1e-9).evaluate(TREE).average_distortion
    done = fitted(manifold="H2", init=init, n_epochs=40).evaluate(TREE).average_distortion
    assert done < 0.8 * one and done < 0.15
    assert GraphEmbedding("H2", init=init, n_epochs=5, random_state=0).fit(TREE).embedding_.shape == (31, 3)


def test_given_points_are_a_start(tmp_path):
    start = np.random.default_rng(0).normal(size=(31, 2))
    model = fitted(manifold="E2", init=start, n_epochs=1, learning_rate=1e-12)
    np.testing.assert_allclose(model.embedding_, start, atol=1e-9)
    model.save(tmp_path / "m")
    assert GraphEmbedding.load(tmp_path / "m").init == "random"
    for init, message in (
        (start[:-1], r"\(31, 2\), got \(30, 2\)"),
        ("spectral", "init must be"),
        ("mds", "hyperbolic"),
    ):
        with pytest.raises(ValueError, match=message):
            fitted(manifold="E2", init=init)

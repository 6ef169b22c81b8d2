"""GraphEmbedding as scikit-learn users and graph users expect it."""

import inspect

import networkx as nx
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from horosphere.embedding import GraphEmbedding
from horosphere.manifolds import Euclidean, Lorentz, PoincareBall, Product, Sphere
from horosphere.manifolds._geoopt import geoopt

TREE = [(f"n{i}", f"n{(i - 1) // 2}") for i in range(1, 31)]


def fitted(graph=TREE, **changes):
    return GraphEmbedding(**{"n_epochs": 20, "random_state": 0, "closure": True, **changes}).fit(graph)


def test_constructor_arguments_are_stored_unchanged_and_checked_in_fit_only():
    ball, callbacks = PoincareBall(kappa=-2.0), []
    model = GraphEmbedding(ball, "three", n_epochs=-1, callbacks=callbacks, learning_rate="fast")
    assert model.manifold is ball and model.n_components == "three" and model.callbacks is callbacks
    assert set(model.get_params()) == set(inspect.signature(GraphEmbedding).parameters)
    model.set_params(n_components=2, n_epochs=1, learning_rate=0.1)
    assert model.fit(TREE).n_components == 2


def test_clone_is_unfitted_with_equal_arguments():
    model = fitted(n_components=3)
    copy = clone(model)
    assert copy.get_params() == model.get_params() and not hasattr(copy, "embedding_")


def test_fit_returns_self_and_leaves_the_manifold_alone():
    ball = PoincareBall(kappa=-2.0)
    model = GraphEmbedding(ball, 2, n_epochs=2, random_state=0)
    assert model.fit(TREE) is model
    assert model.manifold is ball and model.manifold_ is not ball and model.manifold_.kappa == -2.0
    assert model.embedding_.shape == (31, 2) and model.embedding_.dtype == np.float64
    assert len(model.loss_curve_) == 2


@pytest.mark.parametrize(
    ("manifold", "size", "least"),
    [
        (PoincareBall(kappa=-0.5), 3, 0.9),
        (Lorentz(kappa=-2.0), 4, 0.9),
        (Euclidean(), 3, 0.6),
        (Sphere(kappa=0.1), 4, 0.57),  # a sphere has little room for a tree: 0.585 to 0.609 over eight seeds
        (geoopt.PoincareBall(c=1.0), 3, 0.9),
    ],
)
def test_any_manifold_learns_a_tree(manifold, size, least):
    model = fitted(manifold=manifold, n_components=3, n_epochs=60, learning_rate=0.3)
    assert model.embedding_.shape == (31, size)
    assert model.loss_curve_[-1] < 0.7 * model.loss_curve_[0]
    assert model.score(TREE) > least
    assert model.manifold_.check_point_on_manifold(torch.from_numpy(model.embedding_))


def test_product_manifold():
    product = Product((PoincareBall(), 2), (Euclidean(), 2))
    model = fitted(manifold=product, n_components=4, n_epochs=40, learning_rate=0.3)
    assert model.embedding_.shape == (31, 4) and model.score(TREE) > 0.6


def test_a_small_tree_is_reconstructed_in_the_ball():
    scores = fitted(n_components=3, n_epochs=150).evaluate(TREE)
    assert scores.map > 0.9 and scores.mean_rank < 1.5
    assert (scores.n_nodes, scores.n_candidates) == (31, 30)


def test_the_seed_decides_every_bit():
    first, second, other = fitted(), fitted(), fitted(random_state=1)
    assert np.array_equal(first.embedding_, second.embedding_)
    assert not np.array_equal(first.embedding_, other.embedding_)
    state = np.random.RandomState(5)
    assert not np.array_equal(fitted(random_state=state).embedding_, fitted(random_state=state).embedding_)


def test_both_quadrants_are_used():
    assert all({-1.0, 1.0} <= set(np.sign(column)) for column in fitted(n_components=3).embedding_.T)


def test_kneighbors():
    model = fitted(n_components=3, n_epochs=100)
    labels, distances = model.kneighbors("n0", k=5)
    assert len(labels) == 5 and "n0" not in labels and np.all(np.diff(distances) >= 0)
    points = torch.from_numpy(model.embedding_)
    row = model.nodes_.index("n0")
    want = model.manifold_.dist(points[row], points).numpy()
    assert distances[0] == pytest.approx(np.sort(want)[1], rel=1e-9)
    assert len(model.kneighbors("n0", k=30).labels) == 30 and len(model.kneighbors("n0").labels) == 10
    with pytest.raises(ValueError, match=r"k must be at most 30, the number of other nodes in the embedding, got 31"):
        model.kneighbors("n0", k=31)
    with pytest.raises(ValueError, match="'n99' is not in the embedding; similar: n9"):
        model.kneighbors("n99")
    with pytest.raises(ValueError, match="k must be at least 1"):
        model.kneighbors("n0", k=0)


def test_evaluate_names_unknown_nodes():
    with pytest.raises(ValueError, match=r"2 of 3 nodes are not in the embedding: 'cat', 'dog'"):
        fitted().evaluate([("cat", "n1"), ("dog", "n1")])


def test_evaluate_ranks_a_subgraph_among_all_nodes():
    assert fitted().evaluate(TREE[:3]).n_candidates == 30


def test_an_unfitted_model_says_so(tmp_path):
    model = GraphEmbedding()
    for call in (
        lambda: model.score(TREE),
        lambda: model.kneighbors("n0"),
        lambda: model.plot(),
        lambda: model.save(tmp_path / "m"),
    ):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            call()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"n_components": 0}, ValueError, "n_components must be at least 1, got 0"),
        ({"n_components": 2.0}, TypeError, "n_components must be an integer"),
        ({"n_epochs": 0}, ValueError, "n_epochs"),
        ({"n_negatives": 0}, ValueError, "n_negatives"),
        ({"batch_size": True}, TypeError, "batch_size"),
        ({"burn_in": -1}, ValueError, "burn_in"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate"),
        ({"learning_rate": float("nan")}, ValueError, "learning_rate"),
        ({"learning_rate": "0.1"}, ValueError, "learning_rate"),
        ({"random_state": -1}, ValueError, "random_state"),
        ({"manifold": "torus"}, ValueError, "torus.*poincare"),
        ({"manifold": 3}, TypeError, "manifold must be"),
        ({"manifold": PoincareBall(kappa=-1.0, learnable=True), "engine": "numba"}, ValueError, "fixed curvature"),
        ({"loss": "stress"}, ValueError, 'loss must be "cones", "distortion" or "ranking"'),
        ({"callbacks": ["print"]}, TypeError, "callbacks"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        fitted(**changes)


def test_partial_fit_adds_nodes_beside_their_neighbours_and_moves_nothing():
    model = fitted(n_components=3, n_epochs=100)
    before = model.embedding_.copy()
    assert model.partial_fit([("leaf", "n5"), ("leaf2", "leaf")]) is model
    assert np.array_equal(model.embedding_[:31], before)
    assert model.nodes_[31:] == ["leaf", "leaf2"] and np.isfinite(model.embedding_).all()
    assert model.evaluate([("leaf", "n5")]).mean_rank < 4
    again = fitted(n_components=3, n_epochs=100).partial_fit([("leaf", "n5"), ("leaf2", "leaf")])
    assert np.array_equal(again.embedding_, model.embedding_)


@pytest.mark.parametrize("manifold", [Lorentz(), Sphere(), Euclidean()])
def test_partial_fit_on_other_manifolds(manifold):
    model = fitted(manifold=manifold, n_components=3)
    before = model.embedding_.copy()
    model.partial_fit([("leaf", "n5")])
    assert np.array_equal(model.embedding_[:31], before) and len(model.embedding_) == 32


def test_partial_fit_of_known_nodes_only_keeps_the_edges():
    model = fitted()
    before = model.embedding_.copy()
    model.partial_fit([("n30", "n2")])
    assert np.array_equal(model.embedding_, before)
    assert len(model.graph_.edges) == 31


def test_partial_fit_without_fit_is_fit():
    model = GraphEmbedding(n_epochs=20, random_state=0, closure=True).partial_fit(TREE)
    assert np.array_equal(model.embedding_, fitted().embedding_)


def test_partial_fit_of_nodes_without_old_neighbours():
    model = fitted().partial_fit([("x", "y"), ("z", "y")])
    assert len(model.nodes_) == 34 and np.isfinite(model.embedding_).all()


def test_partial_fit_goes_on_after_load(tmp_path):
    model = fitted()
    model.save(tmp_path / "m")
    loaded = GraphEmbedding.load(tmp_path / "m")
    addition = [("leaf", "n5")]
    assert np.array_equal(loaded.partial_fit(addition).embedding_, model.partial_fit(addition).embedding_)


def test_undirected_graphs():
    graph = nx.balanced_tree(2, 3)
    model = fitted(graph, closure=False, n_epochs=60)
    assert model.evaluate(graph).n_edges == 2 * graph.number_of_edges()
    assert model.nodes_ == list(graph.nodes)
    flagged = fitted([*graph.edges], closure=False, undirected=True, n_epochs=60)
    assert flagged.evaluate([*graph.edges]).n_edges == 2 * graph.number_of_edges()


def test_verbose_shows_a_bar_on_stderr(capsys):
    fitted(verbose=True, n_epochs=3)
    captured = capsys.readouterr()
    assert "3/3" in captured.err and not captured.out

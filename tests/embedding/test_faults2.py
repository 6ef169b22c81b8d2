"""Inputs on which the estimator was seen to fail; the number is that of the collected case."""

import subprocess
import sys

import numpy as np
import pytest
from sklearn.model_selection import GridSearchCV

from horosphere.embedding import DivergenceError, GraphEmbedding

TREE = [(k // 2, k) for k in range(2, 32)]


@pytest.mark.filterwarnings("ignore:.*not in the embedding:UserWarning")
def test_29_a_grid_search_has_scores():
    """They were NaN, and a winner was named all the same."""
    grid = [(k, j) for k in range(1, 9) for j in range(k + 1, 9)]
    search = GridSearchCV(GraphEmbedding(n_epochs=20, random_state=0), {"n_components": [2, 3]}, cv=3)
    search.fit(np.array(grid))
    scores = search.cv_results_["mean_test_score"]
    assert np.isfinite(scores).all() and (scores > 0).all() and (scores <= 1).all()
    assert search.best_score_ == scores.max()


def test_29_pairs_with_unknown_nodes_count_as_not_found():
    model = GraphEmbedding(n_epochs=20, random_state=0).fit(TREE)
    known = model.score(TREE[:10])
    with pytest.warns(UserWarning, match="10 of 20 pairs have a node that is not in the embedding"):
        found = model.score(TREE[:10] + [("new", k) for k in range(1, 11)])
    assert found == pytest.approx(known / 2)
    with pytest.warns(UserWarning, match="2 of 2 pairs"):
        assert model.score([("a", "b"), ("c", "d")]) == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kappa", r"no argument 'kappa': a curvature belongs to the manifold, as in manifold=horosphere.PoincareBall"),
        ("dim", "no argument 'dim': did you mean n_components"),
        ("lr", "did you mean learning_rate"),
        ("n_epoch", "did you mean n_epochs"),
        ("manifolds", "did you mean manifold"),
        ("zzz", "no argument 'zzz': there are"),
    ],
)
def test_30_a_wrong_name_is_met_with_the_right_one(name, message):
    with pytest.raises(TypeError, match=message):
        GraphEmbedding(**{name: 3})


def test_30_a_label_of_another_type():
    model = GraphEmbedding(n_epochs=2, random_state=0).fit([(str(a), str(b)) for a, b in TREE])
    with pytest.raises(ValueError, match="the node 1 is not in the embedding, which holds the str '1', not the int"):
        model.kneighbors(1)
    with pytest.raises(ValueError, match="similar: 31"):
        model.kneighbors("311")


THREADS = """
import threading, warnings
from horosphere.embedding import GraphEmbedding
graph, done = [(k // 2, k) for k in range(2, 400)], []
def fit():
    done.append(GraphEmbedding(n_jobs=2, n_epochs=20, random_state=0).fit(graph).embedding_.shape)
threads = [threading.Thread(target=fit) for _ in range(2)]
for t in threads: t.start()
for t in threads: t.join()
print(done)
"""


@pytest.mark.parametrize("layer", ["workqueue", "omp"])
def test_31_two_threads_each_with_two_jobs(layer, monkeypatch):
    """With numba's workqueue layer the process was ended, exit 134."""
    monkeypatch.setenv("NUMBA_THREADING_LAYER", layer)
    run = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120, check=False)
    if "No threading layer could be loaded" in run.stderr:
        pytest.skip(f"numba has no {layer} layer here")
    assert run.returncode == 0 and run.stdout.strip() == "[(399, 2), (399, 2)]", run.stderr[-2000:]


@pytest.mark.parametrize("length", [1e160, 1e300, 1e-160, 1e-300])
@pytest.mark.parametrize("learn", [False, True])
def test_54_lengths_beyond_the_range_of_their_squares(length, learn):
    with pytest.raises(ValueError, match=r"lengths must lie between 1e-75 and 1e\+75, and reach from 1e"):
        GraphEmbedding(loss="distortion", learn_curvature=learn, n_epochs=5).fit([(a, b, length) for a, b in TREE])


@pytest.mark.parametrize("length", [1e-6, 1e60])
def test_54_lengths_within_it_are_fitted(length):
    graph = [(a, b, length) for a, b in TREE]
    model = GraphEmbedding(loss="distortion", learn_curvature=True, n_epochs=60, random_state=0).fit(graph)
    plain = GraphEmbedding(loss="distortion", learn_curvature=True, n_epochs=60, random_state=0).fit(TREE)
    assert model.score(graph) == pytest.approx(plain.score(TREE), abs=0.02)


@pytest.mark.parametrize("engine", ["torch", "numba"])
@pytest.mark.filterwarnings("ignore:.*is not finite and stayed:RuntimeWarning")
def test_55_a_rate_that_leads_nowhere_is_a_divergence(engine):
    """The torch engine left the points where they were, with a warning."""
    with pytest.raises(DivergenceError, match="take a smaller learning_rate than") as caught:
        GraphEmbedding(engine=engine, learning_rate=1e300, n_epochs=5, random_state=0).fit(TREE)
    assert np.isfinite(caught.value.embedding).all() and caught.value.epoch == 0

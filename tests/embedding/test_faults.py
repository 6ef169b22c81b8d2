"""Inputs on which other embedding tools were seen to fail; the numbers are those of the list they come from."""

import tomllib
import warnings
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from horosphere.embedding import GraphEmbedding, as_graph, read_edge_list
from horosphere.embedding.plot import to_disk
from horosphere.manifolds import Lorentz

SMALL_TREE = [("b", "a"), ("c", "a"), ("d", "b"), ("e", "b"), ("f", "c"), ("g", "c")]


def fit(graph, **changes):
    return GraphEmbedding(**{"n_epochs": 30, "random_state": 0, **changes}).fit(graph)


def test_84_labels_that_look_like_missing_values_are_labels(tmp_path):
    path = tmp_path / "edges.csv"
    path.write_text("NA,africa\nnull,a\nNone,c\nnan,a\n")
    want = [("NA", "africa"), ("null", "a"), ("None", "c"), ("nan", "a")]
    assert read_edge_list(path) == want
    model = fit(path)
    assert model.nodes_ == ["NA", "africa", "null", "a", "None", "c", "nan"]
    model.save(tmp_path / "m")
    assert GraphEmbedding.load(tmp_path / "m").nodes_ == model.nodes_


@pytest.mark.parametrize(
    ("name", "content"),
    [("e.csv", "a,b\nb,c\n"), ("e.tsv", "a\tb\nb\tc\n"), ("e.txt", "a b\nb c\n"), ("csv/x.tsv", "a\tb\nb\tc\n")],
)
def test_86_two_columns_of_any_separator_whatever_the_name(tmp_path, name, content):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    assert read_edge_list(tmp_path / name) == [("a", "b"), ("b", "c")]


def test_90_a_weight_of_two_is_the_edge_given_twice():
    twice = fit([*SMALL_TREE, SMALL_TREE[2]])
    weighted = fit([(u, v, 2.0 if (u, v) == SMALL_TREE[2] else 1.0) for u, v in SMALL_TREE])
    assert np.array_equal(twice.embedding_, weighted.embedding_)


def test_91_weights_matter_and_a_common_factor_does_not():
    plain = fit(SMALL_TREE)
    heavy = fit([(u, v, 1000.0 if u == "d" else 1.0) for u, v in SMALL_TREE])
    assert not np.array_equal(plain.embedding_, heavy.embedding_)
    assert heavy.kneighbors("d", 1).labels == ["b"]
    assert np.array_equal(plain.embedding_, fit([(u, v, 3.0) for u, v in SMALL_TREE]).embedding_)


@pytest.mark.parametrize("graph", [[], nx.DiGraph(), np.zeros((5, 5))])
def test_92_no_edges_is_said(graph):
    with pytest.raises(ValueError, match="no edges between different nodes"):
        fit(graph)


def test_92_only_self_loops_is_said():
    with pytest.warns(UserWarning, match="left out 1 self-loop:"), pytest.raises(ValueError, match="only 1 self-loops"):
        fit([("a", "a")])


@pytest.mark.parametrize(
    "graph",
    [
        [(0, 1), (2, 1), (3, 1)],
        [("naïve", "日本"), ("🙂", "日本"), ("x", "naïve")],
        [*SMALL_TREE, *[("d", "b")] * 11],
        [(0, "a"), ("0", "a"), (1.5, "a")],
    ],
)
def test_93_labels_of_any_kind_and_duplicates(graph):
    model = fit(graph)
    given = list(dict.fromkeys(label for edge in graph for label in edge))
    assert model.nodes_ == given and [type(x) for x in model.nodes_] == [type(x) for x in given]
    assert np.isfinite(model.embedding_).all()


def test_93_a_self_loop_among_others_is_counted_and_harmless():
    with pytest.warns(UserWarning, match="left out 2 self-loops"):
        model = fit([*SMALL_TREE, ("a", "a"), ("d", "d")])
    assert np.array_equal(model.embedding_, fit(SMALL_TREE).embedding_)


def test_97_every_hyperbolic_model_is_shown_inside_the_unit_disk():
    for manifold in ("poincare", Lorentz(kappa=-3.0)):
        model = fit(SMALL_TREE, manifold=manifold, n_components=3)
        assert np.all(np.abs(to_disk(model.embedding_, model.manifold_)) < 1)


def test_98_a_small_tree_has_one_stated_score():
    # horosphere embed tree.tsv --dim 2 --closure --epochs 200 --seed 0 --out tree.safetensors prints the same.
    scores = [fit(SMALL_TREE, closure=True, n_epochs=200).evaluate(SMALL_TREE) for _ in range(2)]
    assert scores[0] == scores[1]
    assert scores[0].map == 1.0 and scores[0].mean_rank == 1.0


def test_101_callbacks_are_called_once_an_epoch_and_pictures_are_drawn():
    seen = []
    model = fit(SMALL_TREE, n_epochs=7, callbacks=[lambda info: seen.append((info.epoch, info.embedding.copy()))])
    assert [epoch for epoch, _ in seen] == list(range(1, 8))
    assert np.array_equal(seen[-1][1], model.embedding_) and not np.array_equal(seen[0][1], model.embedding_)
    assert model.plot() is not None


def test_102_a_node_can_be_added_later():
    model = fit(SMALL_TREE, closure=True)
    before = dict(zip(model.nodes_, model.embedding_, strict=True))
    model.partial_fit([("h", "d")])
    assert all(np.array_equal(model.embedding_[model.nodes_.index(node)], row) for node, row in before.items())
    assert model.kneighbors("h", 1).labels in (["d"], ["b"], ["a"])


def test_105_106_nothing_to_compile_and_no_upper_pins():
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["build-system"]["build-backend"] == "setuptools.build_meta"
    assert not list((root / "horosphere").rglob("*.pyx")) and not list((root / "horosphere").rglob("*.cpp"))
    wanted = project["project"]["dependencies"]
    assert all("<" not in line and "==" not in line.split(";")[0] and "~=" not in line for line in wanted)


def test_107_a_symmetric_tree_uses_every_quadrant():
    model = fit(nx.balanced_tree(3, 3), n_epochs=60)
    signs = {tuple(row) for row in np.sign(model.embedding_)}
    assert signs == {(-1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1.0)}


def test_a_graph_in_which_all_are_neighbours_warns_and_stays_finite():
    with pytest.warns(UserWarning, match="nothing to push apart"):
        model = fit(nx.complete_graph(4))
    assert np.isfinite(model.embedding_).all() and model.score(nx.complete_graph(4)) == 1.0


def test_reading_and_fitting_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = as_graph(SMALL_TREE, closure=True)
        model = fit(SMALL_TREE, n_epochs=2)
    assert model.nodes_ == graph.nodes

"""The tree construction: exact where exact is claimed, and honest about float64."""

import mpmath
import networkx as nx
import numpy as np
import pytest
import torch

from horosphere import Euclidean, Lorentz, PoincareBall, cdist
from horosphere.embedding import as_graph, distortion, embed_tree
from horosphere.embedding.trees import tree_start

BINARY = [(i, (i - 1) // 2) for i in range(1, 63)]
PATH = [(i, i + 1) for i in range(40)]
STAR = [(0, i) for i in range(1, 9)]


def hops(edges, nodes):
    lengths = dict(nx.all_pairs_shortest_path_length(nx.Graph(edges)))
    return np.asarray([[lengths[u][v] for v in nodes] for u in nodes], dtype=float)


@pytest.mark.parametrize("edges", [BINARY, PATH, STAR], ids=["binary", "path", "star"])
def test_long_edges_keep_distances_and_neighbours(edges):
    tree = embed_tree(edges, tau=60.0)
    wanted = hops(edges, tree.nodes)
    got = tree.distances()
    off = ~np.eye(len(got), dtype=bool)
    ratio = got[off] / wanted[off]
    assert np.abs(got - got.T).max() < 1e-10 and not np.diag(got).any()
    # a corner of angle a costs 2 log(1 / sin(a / 2)) of two edges of 60: for the star's sharpest, 1.92 of 120
    assert ratio.max() < 1 + 1e-12 and ratio.min() > 1 - 0.017
    scores = tree.scores()
    assert scores.map == 1.0 and scores.n_pairs == off.sum() // 2
    assert scores.average_distortion == pytest.approx(np.abs(ratio - 1).mean(), rel=1e-12)
    assert scores.worst_distortion == pytest.approx(ratio.max() / ratio.min(), rel=1e-12)


def test_edges_have_their_length_and_angles_are_equal():
    tree = embed_tree(STAR, tau=3.0)
    x = tree.to_float64() * tree.tau
    assert tree.root == 0 and not x[tree.nodes.index(0)].any()
    leaves = np.delete(x, tree.nodes.index(0), axis=0)
    assert np.linalg.norm(leaves, axis=1) == pytest.approx(np.tanh(1.5) * np.ones(8), abs=1e-15)
    angles = np.sort(np.arctan2(leaves[:, 1], leaves[:, 0]))
    assert np.diff(angles) == pytest.approx(np.pi / 4 * np.ones(7), abs=1e-14)
    path = embed_tree(PATH, tau=2.0)
    assert path.root == 20 and path.distances() == pytest.approx(hops(PATH, path.nodes), abs=1e-13)


def test_distances_are_those_of_mpmath():
    tree = embed_tree(BINARY, tau=25.0)
    got = tree.distances([0, 40])
    with mpmath.workprec(2 * tree.precision + 60):
        points = [[mpmath.mpf(int(v)) / 2**tree.precision for v in row] for row in tree.coordinates]
        for at, i in enumerate([0, 40]):
            for j in (0, 1, 17, 39, 41, 62):
                chord2 = sum((a - b) ** 2 for a, b in zip(points[i], points[j], strict=True))
                gaps = [1 - mpmath.fdot(points[k], points[k]) for k in (i, j)]
                want = float(mpmath.acosh(1 + 2 * chord2 / (gaps[0] * gaps[1])) / 25)
                assert got[at, j] == pytest.approx(want, rel=1e-13, abs=1e-14)


def test_the_bits_asked_for_are_the_bits_needed():
    fine, coarse = embed_tree(BINARY, tau=20.0, precision=1000), embed_tree(BINARY, tau=20.0)
    assert coarse.precision == int(np.ceil(20 * 5 / np.log(2))) + 100
    assert np.abs(fine.distances() - coarse.distances()).max() < 1e-12
    assert embed_tree(BINARY, precision=coarse.precision).tau == pytest.approx(20, rel=0.01)
    assert embed_tree(BINARY).tau == 40.0
    with pytest.raises(ValueError, match=r"100 bits are too few for tau = 20.*245 bits hold it"):
        embed_tree(BINARY, tau=20.0, precision=100)


def test_weights_are_lengths():
    tree = embed_tree([("a", "b", 2.0), ("c", "b", 0.5), ("d", "a", 1.0)], tau=30.0)
    got = dict(zip(tree.nodes, tree.distances([tree.nodes.index("b")])[0], strict=True))
    assert got["a"] == pytest.approx(2, rel=1e-12) and got["c"] == pytest.approx(0.5, rel=1e-12)
    assert tree.root == "a" and got["d"] == pytest.approx(3, rel=0.03)


def test_float64_keeps_short_edges_and_loses_long_ones():
    near, far = embed_tree(BINARY, tau=3.0), embed_tree(BINARY, tau=12.0)
    for tree, same in ((near, True), (far, False)):
        points = torch.from_numpy(tree.to_float64())
        assert tree.manifold.check_point_on_manifold(points)
        error = np.abs(cdist(points, points, tree.manifold).numpy() - tree.distances()).max()
        assert (error < 1e-8) == same
    rounded = distortion(far.graph, torch.from_numpy(far.to_float64()), far.manifold)
    assert rounded.average_distortion > 5 * far.scores().average_distortion


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(0, 1), (1, 2), (2, 0)], r"tree of 3 nodes is connected and has 2 edges, this graph has 3 edges in 1"),
        ([(0, 1), (2, 3)], r"this graph has 2 edges in 2 connected part"),
    ],
)
def test_what_is_no_tree_is_refused(edges, message):
    with pytest.raises(ValueError, match=message):
        embed_tree(edges)


@pytest.mark.parametrize("arguments", [{"tau": 0.0}, {"tau": float("nan")}, {"precision": 80}, {"n_components": 3}])
def test_bad_settings_are_refused(arguments):
    with pytest.raises(ValueError, match=r"tau must be|n_components must be 2"):
        embed_tree(BINARY, **arguments)


@pytest.mark.parametrize(("manifold", "dimension"), [(PoincareBall(), 2), (Lorentz(-0.5), 4), (PoincareBall(-2.0), 3)])
def test_a_start_is_near_the_tree(manifold, dimension):
    graph = as_graph([*BINARY, (62, 61), ("x", "y")])  # one edge more than a tree, and a part of its own
    start = tree_start(graph, manifold, dimension, np.random.default_rng(0))
    assert start.shape[0] == 65 and start.dtype == torch.float64 and manifold.check_point_on_manifold(start)
    distances = cdist(start, start, manifold).numpy()
    u, v = graph.edges[graph.edges[:, 0] != graph.index[62]].T
    assert distances[u[:60], v[:60]] == pytest.approx(np.ones(60), abs=0.02)
    assert len(np.unique(start.numpy(), axis=0)) == 65
    if dimension > 2:
        assert np.abs(start.numpy()[:, -1]).max() > 0


def test_a_start_needs_a_hyperbolic_space_and_two_dimensions():
    with pytest.raises(ValueError, match="hyperbolic space"):
        tree_start(as_graph(BINARY), Euclidean(), 2, np.random.default_rng(0))
    with pytest.raises(ValueError, match="two dimensions"):
        tree_start(as_graph(BINARY), PoincareBall(), 1, np.random.default_rng(0))


def test_a_deep_start_stays_where_it_can_be_trained():
    start = tree_start(as_graph([(i, i + 1) for i in range(200)]), PoincareBall(), 2, np.random.default_rng(0))
    assert start.norm(dim=1).max() < 1 - 1e-6

"""Scores against a definition written out node by node, and against scikit-learn's average precision."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

import horosphere.embedding.scores as scores
from horosphere.embedding import as_graph, reconstruction
from horosphere.manifolds import Euclidean, PoincareBall


def line(*positions):
    return torch.tensor(positions, dtype=torch.float64).unsqueeze(1)


def test_a_case_by_hand():
    # On a line: a at 0, its true neighbours b at 1 and d at 3, others c at 2 and e at 3 (a tie with d).
    graph = as_graph([("a", "b"), ("a", "d"), ("c", "b")])
    assert graph.nodes == ["a", "b", "d", "c"]
    graph.nodes.append("e")
    found = reconstruction(graph, line(0, 1, 3, 2, 3), Euclidean())
    # a: b has rank 1; d stands behind c and the tie e: rank 3, precisions 1/1 and 2/4.
    # c: b at distance 1 ties with d and e: rank 3; precision 1/3.
    assert found.mean_rank == pytest.approx((1 + 3 + 3) / 3)
    assert found.map == pytest.approx(((1 + 0.5) / 2 + 1 / 3) / 2)
    assert (found.n_nodes, found.n_edges, found.n_sources, found.n_candidates) == (5, 3, 2, 4)


@pytest.mark.parametrize("block", [1, 200, 10**6])
def test_random_graph_equals_the_definition_in_any_block_size(monkeypatch, block):
    monkeypatch.setattr(scores, "_BLOCK", block)
    rng = np.random.default_rng(0)
    n = 40
    adjacency = np.triu(rng.random((n, n)) < 0.15, 1)
    graph = as_graph(adjacency.astype(float))
    points = torch.from_numpy(rng.normal(size=(n, 3)) * 0.2)
    ball = PoincareBall()
    distance = ball.dist(points[:, None], points[None]).numpy()
    ranks, precisions = [], []
    for u in range(n):
        true = np.flatnonzero(adjacency[u])
        others = np.setdiff1d(np.arange(n), [*true, u])
        ranks += [1 + np.sum(distance[u, others] <= distance[u, v]) for v in true]
        if len(true):
            rest = np.delete(np.arange(n), u)
            precisions.append(average_precision_score(adjacency[u, rest], -distance[u, rest]))
    found = reconstruction(graph, points, ball)
    assert found.mean_rank == pytest.approx(np.mean(ranks))
    assert found.map == pytest.approx(np.mean(precisions))


def test_a_damaged_embedding_is_not_perfect():
    graph = as_graph([("a", "b"), ("a", "c"), ("d", "c")])
    points = torch.full((4, 2), torch.nan, dtype=torch.float64)
    with pytest.raises(ValueError, match="NaN"):
        reconstruction(graph, points, PoincareBall())


def test_no_edges_is_an_error():
    with pytest.raises(ValueError, match="without edges"):
        reconstruction(as_graph([("a", "a")]), line(0.0), Euclidean())

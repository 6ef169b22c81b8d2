"""Compiled ranks against `reconstruction`, which is the definition."""

import numpy as np
import pytest
import torch

from horosphere import PoincareBall
from horosphere.embedding import as_graph, reconstruction
from horosphere.embedding.compiled_ranks import ball_ranks


@pytest.mark.parametrize("kappa", [-1.0, -0.3])
def test_ranks_and_precisions_are_those_of_reconstruction(kappa):
    rng = np.random.default_rng(0)
    random = [(int(u), int(v)) for u, v in rng.integers(0, 120, (400, 2)) if u != v]
    graph = as_graph([*random, ("one target", 4)])
    n = len(graph.nodes)
    points = rng.normal(size=(n, 3))
    points *= np.tanh(rng.uniform(0, 4, (n, 1))) / np.linalg.norm(points, axis=1, keepdims=True) / np.sqrt(-kappa)
    points[graph.index[5]] = points[graph.index[4]]  # a tie with a farthest target counts against it too
    source, target = graph.edges[np.lexsort(graph.edges.T[::-1])].T
    starts = np.searchsorted(source, np.arange(n + 1))
    sources = np.unique(source)
    total, precisions = ball_ranks(points, sources, starts, np.ascontiguousarray(target), -kappa)
    want = reconstruction(graph, torch.from_numpy(points), PoincareBall(kappa))
    assert total / len(target) == pytest.approx(want.mean_rank, rel=1e-12) and want.mean_rank > 20
    assert precisions.mean() == pytest.approx(want.map, rel=1e-12)

"""Held-out link prediction: edges that training does not see against pairs that are no edges."""

from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from sklearn.utils import check_random_state

from horosphere.embedding.graph import Graph, as_graph

__all__ = ["EdgeSplit", "link_auc", "split_edges"]


class EdgeSplit(NamedTuple):
    """Edges to train on and edges held out.

    Attributes:
        train: a graph of *all* nodes and the remaining edges, in both directions.
        validation, test: (E, 2) held-out edges, as rows of ``train.nodes``.
        validation_strangers, test_strangers: as many pairs that are edges nowhere; no pair is in both.
    """

    train: Graph
    validation: np.ndarray
    validation_strangers: np.ndarray
    test: np.ndarray
    test_strangers: np.ndarray


def split_edges(graph: Any, validation: float = 0.05, test: float = 0.1, *, random_state: Any = None) -> EdgeSplit:
    """Hold out edges of a graph, directions ignored, and draw as many pairs that are not edges of the *whole* graph.

    A node may lose all its edges; it stays a node. Nothing is kept connected on purpose: choosing what to hold out by
    the structure of the graph would tell the training about it.

    Args:
        graph: anything `as_graph` reads.
        validation, test: shares of the edges, each at least one edge, together less than 1.
        random_state: int, numpy RandomState or None.

    Raises:
        ValueError: shares out of range; a graph with too few edges, or too few pairs that are none.

    Source: the protocol of I. Chami et al., Hyperbolic graph convolutional neural networks, 2019.
    """
    given = as_graph(graph)
    rng = check_random_state(random_state)
    edges, first = np.unique(np.sort(given.edges, axis=1), axis=0, return_index=True)
    weights = given.weights[first]
    for name, share in (("validation", validation), ("test", test)):
        if not 0 < share < 1:
            raise ValueError(f"{name} must be a share of the edges in (0, 1), got {share}")
    held = [max(1, round(share * len(edges))) for share in (validation, test)]
    if sum(held) >= len(edges):
        raise ValueError(f"of {len(edges)} edges, validation={validation} and test={test} leave none to train on")
    order = rng.permutation(len(edges))
    n = len(given.nodes)
    strangers = _strangers(edges @ np.asarray([n, 1]), n, sum(held), rng)
    kept = np.sort(order[sum(held) :])
    train = Graph(given.nodes, edges[kept], weights[kept], directed=False).both_directions()
    return EdgeSplit(
        train,
        edges[order[: held[0]]],
        strangers[: held[0]],
        edges[order[held[0] : sum(held)]],
        strangers[held[0] :],
    )


def link_auc(model: Any, edges: np.ndarray, strangers: np.ndarray) -> float:
    """Probability that an edge is shorter than a pair that is none: the ROC AUC of the score -d.

    Any decreasing function of d gives the same number, the Fermi-Dirac score 1 / (exp((d - r) / t) + 1) of the
    literature too.

    Args:
        model: a fitted `GraphEmbedding`.
        edges, strangers: (E, 2) rows of its embedding, as in `EdgeSplit`.
    """
    points = torch.from_numpy(model.embedding_)
    pairs = torch.from_numpy(np.concatenate([edges, strangers]))
    distances = model.manifold_.dist(points[pairs[:, 0]], points[pairs[:, 1]]).numpy()
    return float(roc_auc_score(np.repeat([1, 0], [len(edges), len(strangers)]), -distances))


def _strangers(keys: np.ndarray, n: int, count: int, rng: np.random.RandomState) -> np.ndarray:
    """Different pairs u < v whose key n u + v is not among the sorted keys, all alike."""
    free = n * (n - 1) // 2 - len(keys)
    if free < count:
        raise ValueError(f"{count} pairs that are no edges are wanted, and the graph has {free}")
    found = np.empty(0, dtype=np.int64)
    while len(found) < count:
        pairs = np.sort(rng.randint(0, n, (2 * count, 2)), axis=1)
        drawn = pairs[pairs[:, 0] < pairs[:, 1]] @ np.asarray([n, 1])
        together = np.concatenate([found, drawn[~np.isin(drawn, keys)]])
        _, first = np.unique(together, return_index=True)
        found = together[np.sort(first)]
    return np.stack(np.divmod(found[:count], n), axis=1)

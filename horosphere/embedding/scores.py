"""How well distances reconstruct a graph: mean rank and mean average precision, exact over all pairs."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from horosphere.embedding.graph import Graph
from horosphere.manifolds import cdist

__all__ = ["Scores", "distances_to_all", "reconstruction"]

_BLOCK = 2**21  # Distances held at once: 16 MB.


@dataclass(frozen=True)
class Scores:
    """Reconstruction of a graph by distance order.

    For a source u with true neighbours, the candidates are all other nodes. The rank of a true neighbour v counts the
    candidates that are *not* true neighbours of u and are as near as v or nearer (ties count against): 1 is best.

    Attributes:
        mean_rank: mean rank over all true pairs.
        map: mean over sources of the average precision, sum_i i / (r_i - 1 + i) / m for the ranks r_1 <= ... <= r_m.
        n_nodes: number of nodes.
        n_edges: number of true pairs (an undirected edge counts twice).
        n_sources: number of nodes with at least one true neighbour.
        n_candidates: nodes among which a source looks, n_nodes - 1.
    """

    mean_rank: float
    map: float
    n_nodes: int
    n_edges: int
    n_sources: int
    n_candidates: int


def distances_to_all(manifold, points: Tensor, rows: np.ndarray) -> np.ndarray:
    """(len(rows), N) distances from the given rows to every point.

    Raises:
        ValueError: if a distance is NaN, naming the row.
    """
    with torch.no_grad():
        distances = cdist(points[torch.from_numpy(rows)], points, manifold).numpy()
    if np.isnan(distances).any():
        row, column = np.argwhere(np.isnan(distances))[0]
        raise ValueError(f"the distance between the points {rows[row]} and {column} is NaN: the embedding is damaged")
    return distances


def reconstruction(graph: Graph, points: Tensor, manifold) -> Scores:
    """Score the points (row i: node i of the graph) against the graph's pairs.

    Source: M. Nickel and D. Kiela, 2017, section 4.1, "reconstruction", with exact ranks.

    Raises:
        ValueError: if the graph has no edges or a distance is NaN.
    """
    n = len(graph.nodes)
    if not len(graph.edges):
        raise ValueError("a graph without edges has no ranks to score")
    order = np.lexsort((graph.edges[:, 1], graph.edges[:, 0]))
    source, target = graph.edges[order].T
    sources, starts = np.unique(source, return_index=True)
    ends = np.append(starts[1:], len(source))
    ranks_total, precisions = 0, []
    per_block = max(1, _BLOCK // n)
    for first in range(0, len(sources), per_block):
        block = slice(first, first + per_block)
        rows = distances_to_all(manifold, points, sources[block])
        for u, start, end, row in zip(sources[block], starts[block], ends[block], rows, strict=True):
            true = target[start:end]
            positive = np.sort(row[true])
            row[true] = np.inf
            row[u] = np.inf
            # A candidate counts against every true neighbour that is not nearer than itself.
            beaten = np.bincount(np.searchsorted(positive, row), minlength=len(positive) + 1)
            ranks = 1 + np.cumsum(beaten[:-1])
            found = np.arange(1, len(ranks) + 1)
            ranks_total += int(ranks.sum())
            precisions.append(float(np.mean(found / (ranks - 1 + found))))
    return Scores(ranks_total / len(source), float(np.mean(precisions)), n, len(source), len(sources), n - 1)

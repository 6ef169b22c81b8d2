"""How well distances reconstruct a graph: ranks, mean average precision and distortion, exact over all pairs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from horosphere.embedding.graph import Graph
from horosphere.embedding.lengths import Lengths
from horosphere.manifolds import cdist

__all__ = ["DistortionScores", "Scores", "distances_to_all", "distortion", "reconstruction"]

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


@dataclass(frozen=True)
class DistortionScores:
    """How well distances d keep wanted ones g, over the pairs of different nodes that have one.

    Attributes:
        average_distortion: mean of |d / g - 1|; 0 is perfect. No factor is taken out.
        worst_distortion: max(d / g) / min(d / g); 1 is perfect, infinite where two nodes lie on one point.
        map: mean average precision of the edges, directions ignored (see `Scores`); None where distances were given and
            there are no edges.
        n_nodes: number of nodes.
        n_pairs: number of pairs, each once.
    """

    average_distortion: float
    worst_distortion: float
    map: float | None
    n_nodes: int
    n_pairs: int


def distances_to_all(manifold: Any, points: Tensor, rows: np.ndarray) -> np.ndarray:
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


def reconstruction(graph: Graph, points: Tensor, manifold: Any, to_all: Callable = distances_to_all) -> Scores:
    """Score the points (row i: node i of the graph) against the graph's pairs.

    Args:
        graph, points, manifold: what is scored.
        to_all: what orders the candidates, (manifold, points, rows) -> (len(rows), N) numbers, the least first.

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
        rows = to_all(manifold, points, sources[block])
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


def distortion(graph: Graph, points: Tensor, manifold: Any, *, metric: str = "shortest_path") -> DistortionScores:
    """Score the points (row i: node i of the graph) against the graph's lengths, see `Lengths`.

    Source: A. Gu, F. Sala, B. Gunel and C. Re, Learning mixed-curvature representations in product spaces, 2019.

    Raises:
        ValueError: if no pair has a length or a distance is NaN.
    """
    lengths, n = Lengths(graph, metric), len(graph.nodes)
    total, count, least, greatest = 0.0, 0, np.inf, 0.0
    per_block = max(1, _BLOCK // max(1, n))
    for first in range(0, n, per_block):
        rows = np.arange(first, min(n, first + per_block))
        wanted = lengths.rows(rows)
        asked = np.isfinite(wanted) & (wanted > 0) & (rows[:, None] < np.arange(n))
        ratio = distances_to_all(manifold, points, rows)[asked] / wanted[asked]
        if len(ratio):
            total, count = total + float(np.abs(ratio - 1).sum()), count + len(ratio)
            least, greatest = min(least, float(ratio.min())), max(greatest, float(ratio.max()))
    if not count:
        raise ValueError("a graph without edges has no lengths to score")
    precision = None if metric == "precomputed" else reconstruction(graph.both_directions(), points, manifold).map
    return DistortionScores(total / count, greatest / least if least else np.inf, precision, n, count)

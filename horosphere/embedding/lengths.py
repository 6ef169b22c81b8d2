"""The distances that an embedding is asked to keep: lengths of shortest paths, or given ones."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.csgraph import connected_components, dijkstra
from torch import Tensor

from horosphere import _numerics
from horosphere.embedding.graph import Graph, as_graph, square_table
from horosphere.embedding.initialise import ambient_dim
from horosphere.manifolds import hooks

__all__ = ["Lengths", "as_lengths", "start_at_mean", "symmetric"]

# Pairs held, and trained on in an epoch: 128 MB twice. All pairs of 4,096 nodes.
MAX_PAIRS = 2**23


class Lengths:
    """Wanted distances of the pairs of a graph's nodes, symmetric.

    All pairs are held where they are at most `MAX_PAIRS`. Of a larger graph each epoch takes the shortest paths from as
    many random nodes as fill that number.

    Args:
        graph: its weights are lengths. Directions are ignored; of several edges between two nodes the shortest counts.
        metric: "shortest_path": the length of the shortest path, infinite where there is none; "precomputed": the
            weight of an edge is the distance of its ends, and nothing is asked of other pairs.
        n_fixed: pairs of two rows before this one are left out.

    Attributes:
        components: connected components of the graph.
    """

    def __init__(self, graph: Graph, metric: str, n_fixed: int = 0) -> None:
        self._n, self._n_fixed = len(graph.nodes), n_fixed
        self._given = metric == "precomputed"
        self._matrix = symmetric(graph)
        self._equal = bool(np.all(self._matrix.data == 1.0))
        self.components = connected_components(self._matrix, directed=False)[0]

    @cached_property
    def _held(self) -> tuple[np.ndarray, np.ndarray] | None:
        if self._given:
            upper = scipy.sparse.triu(self._matrix, 1, format="coo")
            return self._moving(np.stack([upper.row, upper.col], axis=1).astype(np.int32), upper.data)
        if self._n * (self._n - 1) // 2 <= MAX_PAIRS:
            return self._from(np.arange(self._n), half=True)
        return None

    @cached_property
    def extent(self) -> tuple[float, float, float]:
        """Shortest, longest and mean length of the pairs held, or of a sample of them.

        ValueError where their squares leave the range that training works in.
        """
        _, lengths = self.epoch(np.random.default_rng(0))
        shortest, longest = float(lengths.min()), float(lengths.max())
        least, most = _numerics.LENGTHS
        if shortest < least or longest > most:
            raise ValueError(
                f"lengths must lie between {least:g} and {most:g}, and reach from {shortest:g} to {longest:g}: "
                "multiply them by one number; with learn_curvature=True the distortion stays the same"
            )
        return shortest, longest, float(lengths.mean())

    def epoch(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of one epoch in their order, (E, 2) int32, and their lengths, (E,)."""
        pairs, lengths = self._held or self._from(rng.choice(self._n, max(1, MAX_PAIRS // self._n), replace=False))
        order = rng.permutation(len(lengths))
        return pairs[order], lengths[order]

    def rows(self, sources: np.ndarray) -> np.ndarray:
        """(len(sources), n_nodes) lengths to all nodes, 0 to itself, infinite where nothing is asked."""
        if not self._given:
            return dijkstra(self._matrix, directed=False, indices=sources, unweighted=self._equal)
        block = self._matrix[sources].tocoo()
        found = np.full(block.shape, np.inf)
        found[block.row, block.col] = block.data
        found[np.arange(len(sources)), sources] = 0.0
        return found

    def _from(self, sources: np.ndarray, half: bool = False) -> tuple[np.ndarray, np.ndarray]:
        pairs, lengths = [], []
        for first in range(0, len(sources), 256):
            block = sources[first : first + 256]
            found = self.rows(block)
            found[found == 0.0] = np.inf
            if half:
                found[np.arange(self._n) <= block[:, None]] = np.inf
            row, column = np.nonzero(np.isfinite(found))
            pairs.append(np.stack([block[row], column], axis=1).astype(np.int32))
            lengths.append(found[row, column])
        return self._moving(np.concatenate(pairs), np.concatenate(lengths))

    def _moving(self, pairs: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self._n_fixed:
            return pairs, lengths
        moving = (pairs >= self._n_fixed).any(axis=1)
        return pairs[moving], lengths[moving]


def as_lengths(graph: Any, metric: str) -> Graph:
    """Read a graph whose weights are lengths or, of ``metric="precomputed"``, distances.

    Args:
        graph: anything `as_graph` reads. With "precomputed" a dense (n, n) array, tensor or labelled data frame is
            the distances of all pairs; the entries of a sparse matrix, or the edges, are the distances that are known.
            One direction of each is enough.

    Raises:
        ValueError: for a dense matrix with a distance between different nodes that is not finite and positive, and
            for two different distances of one pair; else as `as_graph`.
    """
    if metric != "precomputed":
        return as_graph(graph, lengths=True)
    table = square_table(graph)
    if table is None:
        result = as_graph(graph, lengths=True)
    else:
        matrix, nodes = table
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"a matrix of distances must be (n, n), got shape {matrix.shape}")
        values = matrix.astype(np.float64)
        np.fill_diagonal(values, 1.0)
        bad = np.argwhere(~(np.isfinite(values) & (values > 0)))
        if len(bad):
            i, j = bad[0]
            raise ValueError(
                f"the distance [{i}, {j}] is {values[i, j]}: distances of different nodes must be finite and positive; "
                "join nodes at distance 0, and leave unknown distances out of a scipy.sparse matrix"
            )
        np.fill_diagonal(values, 0.0)
        result = as_graph(scipy.sparse.coo_array(values), lengths=True)
        result = result if nodes is None else replace(result, nodes=nodes)
    order = np.lexsort(np.sort(result.edges, axis=1).T)
    ends, values = np.sort(result.edges, axis=1)[order], result.weights[order]
    twice = np.flatnonzero((ends[1:] == ends[:-1]).all(axis=1))
    apart = twice[np.abs(values[1:] - values[:-1])[twice] > _numerics.SAME_LENGTH * values[twice]]
    if len(apart):
        u, v = (result.nodes[i] for i in ends[apart[0]])
        raise ValueError(
            f"two distances of {u!r} and {v!r}: {values[apart[0]]} and {values[apart[0] + 1]}; distances are symmetric"
        )
    once = np.ones(len(order), dtype=bool)
    once[order[twice + 1]] = False
    return replace(result, edges=result.edges[once], weights=result.weights[once])


def start_at_mean(manifold: Any, n_points: int, n_components: int, mean: float, rng: np.random.Generator) -> Tensor:
    """Points exp_o(s v), v standard normal in the tangent space at the origin o, s such that the mean distance of a
    sample of them is ``mean`` (or as near as the manifold allows).

    Returns:
        (n_points, ambient_dim) float64.
    """
    size = (n_points, ambient_dim(manifold, n_components))
    origin = hooks.origin(manifold, *size, dtype=torch.float64, device="cpu")
    tangent = manifold.proju(origin, torch.from_numpy(rng.standard_normal(size)))
    pairs = torch.from_numpy(rng.integers(0, n_points, (2, 1000)))

    def at(scale: float) -> Tensor:
        return manifold.projx(manifold.expmap(origin, scale * tangent))

    low, high = 0.0, mean
    for _ in range(30):
        middle = (low + high) / 2
        points = at(middle)
        if manifold.dist(points[pairs[0]], points[pairs[1]]).mean() < mean:
            low = middle
        else:
            high = middle
    return at(low)


def symmetric(graph: Graph) -> scipy.sparse.csr_array:
    """The shortest of the edges between each two nodes, in both directions."""
    n = len(graph.nodes)
    ends = np.sort(graph.edges, axis=1)
    order = np.lexsort((graph.weights, ends[:, 1], ends[:, 0]))
    _, first = np.unique(ends[order] @ np.asarray([n, 1]), return_index=True)
    (u, v), weights = ends[order][first].T, graph.weights[order][first]
    both = (np.concatenate([weights, weights]), (np.concatenate([u, v]), np.concatenate([v, u])))
    return scipy.sparse.csr_array(both, shape=(n, n))

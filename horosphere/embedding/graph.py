"""The one form in which every graph reaches the embedding: labels, directed index pairs, weights."""

import math
import os
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import numpy as np
import scipy.sparse

from horosphere.embedding.edgelist import read_edge_list

__all__ = ["Graph", "as_graph"]


@dataclass(frozen=True, eq=False)
class Graph:
    """Directed pairs (source, target) over labelled nodes; an undirected edge is two pairs.

    Attributes:
        nodes: the labels, in order of first appearance, unchanged.
        edges: (E, 2) int64, each pair once, no self-loops.
        weights: (E,) float64, finite and positive. For the ranking loss a weight is a *multiplicity* (a similarity): a
            pair of weight 2 is the same thing as the pair given twice. For the distortion loss it is a *length*, and
            of several edges between two nodes the shortest counts.
        self_loops: how many self-loops the input had; they carry no distance and are left out.
        directed: False if the input was an undirected networkx graph, both of whose directions are in `edges`.
    """

    nodes: list[Hashable]
    edges: np.ndarray
    weights: np.ndarray
    self_loops: int = 0
    directed: bool = True
    index: dict[Hashable, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {label: i for i, label in enumerate(self.nodes)})

    def closed(self) -> "Graph":
        """The graph with its transitive closure added (new pairs of weight 1).

        Raises:
            ValueError: for an undirected graph, in whose closure all nodes of a component are neighbours.
        """
        if not self.directed:
            raise ValueError(
                "closure=True needs directed (child, parent) pairs: the closure of an undirected graph joins every "
                "pair of a component; pass a networkx.DiGraph or a list of pairs"
            )
        digraph = nx.DiGraph()
        digraph.add_nodes_from(range(len(self.nodes)))
        digraph.add_edges_from(self.edges.tolist())
        closure = nx.transitive_closure(digraph, reflexive=None)
        known = set(map(tuple, self.edges.tolist()))
        # A pair u -> u, reached on a cycle, has no distance and no meaning here.
        added = sorted((u, v) for u, v in closure.edges if u != v and (u, v) not in known)
        if not added:
            return self
        edges = np.concatenate([self.edges, np.asarray(added, dtype=np.int64)])
        weights = np.concatenate([self.weights, np.ones(len(added))])
        return replace(self, edges=edges, weights=weights)

    def both_directions(self) -> "Graph":
        """The graph in which each pair also counts from its target to its source."""
        edges, weights = _merged(
            np.concatenate([self.edges, self.edges[:, ::-1]]), np.tile(self.weights, 2), len(self.nodes)
        )
        return replace(self, edges=edges, weights=weights)

    def expanded(self, *, closure: bool, undirected: bool) -> "Graph":
        """The pairs that are trained and scored: the closure first, then both directions."""
        graph = self.closed() if closure else self
        return graph.both_directions() if undirected else graph

    def joined(self, other: "Graph", *, lengths: bool = False) -> "Graph":
        """Both graphs over the labels of this one followed by the new labels of the other; weights add up, of lengths
        the least is kept."""
        nodes = self.nodes + [label for label in other.nodes if label not in self.index]
        index = {label: i for i, label in enumerate(nodes)}
        where = np.asarray([index[label] for label in other.nodes], dtype=np.int64)
        edges, weights = _merged(
            np.concatenate([self.edges, where[other.edges]]),
            np.concatenate([self.weights, other.weights]),
            len(nodes),
            lengths,
        )
        loops = self.self_loops + other.self_loops
        return Graph(nodes, edges, weights, loops, self.directed and other.directed)


def as_graph(graph: Any, *, closure: bool = False, undirected: bool = False, lengths: bool = False) -> Graph:
    """Read any of the accepted inputs as a `Graph`.

    Args:
        graph: one of
            - a networkx graph of any kind (edge attribute ``weight``, default 1; an undirected graph counts in both
              directions; parallel edges add up);
            - an iterable, or an (E, 2) or (E, 3) array, of (source, target) or (source, target, weight);
            - a square scipy sparse or dense numpy matrix, whose entry [i, j] != 0 is the weight of i -> j, with the
              nodes 0 ... n - 1;
            - the path (str or os.PathLike) of an edge-list file, see `read_edge_list`;
            - a `Graph`.
        closure: add the transitive closure.
        undirected: count each pair in both directions (after the closure).
        lengths: weights are lengths: of a pair given more than once the shortest is kept, where weights add up
            otherwise (a `Graph` stays as it is).

    Raises:
        ValueError: for weights that are not finite and positive, a matrix that is not square, closure of an
            undirected graph (every connected component would be complete), an array that could be read both as pairs
            and as a matrix.
        TypeError: for anything else.
    """
    if isinstance(graph, Graph):
        result = graph
    elif isinstance(graph, nx.Graph):
        result = _from_networkx(graph, lengths)
    elif isinstance(graph, str | os.PathLike):
        result = _from_pairs(read_edge_list(graph), lengths)
    elif scipy.sparse.issparse(graph):
        result = _from_matrix(graph)
    elif isinstance(graph, np.ndarray):
        result = _from_array(graph, lengths)
    elif isinstance(graph, Iterable) and not isinstance(graph, bytes | dict) and not hasattr(graph, "columns"):
        result = _from_pairs(graph, lengths)
    else:
        raise TypeError(
            f"graph must be a networkx graph, an iterable of (source, target[, weight]), a square matrix or the path "
            f"of an edge-list file, got {type(graph).__name__}"
            + ("; pass frame.itertuples(index=False)" if hasattr(graph, "columns") else "")
        )
    return result.expanded(closure=closure, undirected=undirected)


def _from_networkx(graph: nx.Graph, lengths: bool) -> Graph:
    pairs = [(u, v, _weight(data.get("weight", 1), f"edge {u!r} -> {v!r}")) for u, v, data in graph.edges(data=True)]
    result = _from_pairs(pairs, lengths, nodes=graph.nodes)
    return result if graph.is_directed() else replace(result.both_directions(), directed=False)


def _from_array(array: np.ndarray, lengths: bool) -> Graph:
    if array.ndim != 2:
        raise ValueError(f"an array must be (E, 2), (E, 3) or square (n, n), got shape {array.shape}")
    rows, columns = array.shape
    if rows == columns and columns in (2, 3):
        raise ValueError(
            f"an array of shape {array.shape} can be read as {rows} edges and as the matrix of {rows} nodes: pass "
            "edges as a list of tuples (array.tolist()), a matrix as scipy.sparse.csr_array(array)"
        )
    if columns in (2, 3):
        if array.dtype.kind == "f" and np.all(array[:, :2] == np.floor(array[:, :2])):
            # Index pairs that became floats only because a weight stands beside them are indices again.
            return _from_pairs(((int(row[0]), int(row[1]), *row[2:]) for row in array.tolist()), lengths)
        return _from_pairs(map(tuple, array.tolist()), lengths)
    if rows != columns:
        raise ValueError(f"an array must be (E, 2), (E, 3) or square (n, n), got shape {array.shape}")
    return _from_matrix(scipy.sparse.coo_array(array))


def _from_matrix(matrix: Any) -> Graph:
    coo = scipy.sparse.coo_array(matrix)
    if coo.ndim != 2 or coo.shape[0] != coo.shape[1]:
        raise ValueError(f"an adjacency matrix must be square, got shape {coo.shape}")
    coo.sum_duplicates()
    coo.eliminate_zeros()
    values = coo.data.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if bad.size:
        i, j = int(coo.row[bad[0]]), int(coo.col[bad[0]])
        raise ValueError(f"entry [{i}, {j}] of the matrix is {values[bad[0]]}: a weight must be finite and positive")
    edges = np.stack([coo.row, coo.col], axis=1).astype(np.int64)
    return _assembled(list(range(coo.shape[0])), edges, values)


def _from_pairs(pairs: Iterable, lengths: bool, nodes: Iterable[Hashable] = ()) -> Graph:
    index: dict[Hashable, int] = {label: i for i, label in enumerate(nodes)}
    edges, weights = [], []
    for number, pair in enumerate(pairs, start=1):
        where = f"edge {number} ({pair!r})"
        if isinstance(pair, str | bytes) or not hasattr(pair, "__len__") or len(pair) not in (2, 3):
            raise TypeError(f"{where}: expected (source, target) or (source, target, weight)")
        for label in pair[:2]:
            if label is None or label != label:
                raise ValueError(f"{where}: {label!r} is a missing value and cannot be a label; the string 'None' can")
            try:
                index.setdefault(label, len(index))
            except TypeError:
                raise TypeError(f"{where}: the label {label!r} is not hashable") from None
        edges.append((index[pair[0]], index[pair[1]]))
        weights.append(_weight(pair[2], where) if len(pair) == 3 else 1.0)
    return _assembled(
        list(index), np.asarray(edges, dtype=np.int64).reshape(-1, 2), np.asarray(weights, dtype=np.float64), lengths
    )


def _weight(value: Any, where: str) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: the weight {value!r} is not a number") from None
    if not (math.isfinite(weight) and weight > 0):
        raise ValueError(f"{where}: the weight {value!r} must be finite and positive")
    return weight


def _assembled(nodes: list[Hashable], edges: np.ndarray, weights: np.ndarray, lengths: bool = False) -> Graph:
    proper = edges[:, 0] != edges[:, 1]
    merged = _merged(edges[proper], weights[proper], len(nodes), lengths)
    return Graph(nodes, *merged, self_loops=int(np.count_nonzero(~proper)))


def _merged(
    edges: np.ndarray, weights: np.ndarray, n_nodes: int, lengths: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Each pair once, in order of first appearance, with the sum of its weights, or the least of its lengths."""
    keys = edges[:, 0] * n_nodes + edges[:, 1]
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    if lengths:
        merged = np.full(len(first), np.inf)
        np.minimum.at(merged, inverse, weights)
    else:
        merged = np.bincount(inverse, weights, minlength=len(first))
    return edges[first[order]], merged[order]

"""The one form in which every graph reaches the embedding: labels, directed index pairs, weights."""

import math
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import numpy as np
import scipy.sparse
import torch

from horosphere.embedding.edgelist import read_edge_list

__all__ = ["Graph", "as_graph", "square_table"]


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


def as_graph(
    graph: Any, *, closure: bool = False, undirected: bool = False, lengths: bool = False, edge_index: bool = False
) -> Graph:
    """Read any of the accepted inputs as a `Graph`.

    Args:
        graph: one of
            - a networkx graph of any kind (edge attribute ``weight``, default 1; an undirected graph counts in both
              directions; parallel edges add up);
            - an iterable, or an (E, 2) or (E, 3) array or tensor, of (source, target) or (source, target, weight);
            - a square scipy sparse or dense matrix (array or tensor), whose entry [i, j] != 0 is the weight of i -> j,
              with the nodes 0 ... n - 1;
            - a data frame whose rows and columns have the same labels in the same order, the nodes of such a matrix;
            - an object with an ``edge_index`` of shape (2, E), as PyTorch Geometric's ``Data``, with ``edge_weight``
              and ``num_nodes`` where they are set;
            - the path (str or os.PathLike) of an edge-list file, see `read_edge_list`;
            - a `Graph`.
        closure: add the transitive closure.
        undirected: count each pair in both directions (after the closure).
        lengths: weights are lengths: of a pair given more than once the shortest is kept, where weights add up
            otherwise (a `Graph` stays as it is).
        edge_index: ``graph`` is (2, E), a row of sources and a row of targets.

    Labels are kept as they are; a tensor or array of one number is that number.

    Raises:
        ValueError: for weights that are not finite and positive, missing labels, a matrix that is not square, closure
            of an undirected graph (every connected component would be complete), numbers that could be read as pairs
            and as a matrix or an ``edge_index``.
        TypeError: for anything else.
    """
    if edge_index:
        result = _from_columns(graph, lengths)
    elif isinstance(graph, Graph):
        result = graph
    elif isinstance(graph, nx.Graph):
        result = _from_networkx(graph, lengths)
    elif isinstance(graph, str | os.PathLike):
        result = _from_pairs(read_edge_list(graph), lengths)
    elif hasattr(graph, "columns"):
        result = _from_frame(graph)
    elif getattr(graph, "edge_index", None) is not None:
        result = _from_columns(
            graph.edge_index, lengths, getattr(graph, "edge_weight", None), getattr(graph, "num_nodes", None)
        )
    elif scipy.sparse.issparse(graph):
        result = _from_matrix(graph)
    elif isinstance(graph, np.ndarray | torch.Tensor):
        result = _from_array(_as_array(graph), lengths)
    elif isinstance(graph, Iterable) and not isinstance(graph, bytes | dict):
        _refuse_rows_or_columns(graph)
        result = _from_pairs(graph, lengths)
    else:
        raise TypeError(
            f"graph must be a networkx graph, an iterable of (source, target[, weight]), a square matrix or the path "
            f"of an edge-list file, got {type(graph).__name__}"
        )
    return result.expanded(closure=closure, undirected=undirected)


def square_table(graph: Any) -> tuple[np.ndarray, list[Hashable] | None] | None:
    """The entries and, of a data frame, the labels of a dense matrix; None for anything else."""
    if isinstance(graph, np.ndarray | torch.Tensor):
        array = _as_array(graph)
        return None if scipy.sparse.issparse(array) else (array, None)
    if hasattr(graph, "columns") and (labels := _labels_of(graph)) is not None:
        return np.asarray(graph.to_numpy(), dtype=np.float64), labels
    return None


def _as_array(array: np.ndarray | torch.Tensor) -> Any:
    """A tensor as the numpy array or, if it is sparse, the scipy matrix of its numbers."""
    if not isinstance(array, torch.Tensor):
        return array
    plain = array.detach().cpu()
    if plain.is_floating_point():
        plain = plain.double()
    if plain.layout == torch.strided:
        return plain.numpy()
    entries = plain.to_sparse_coo().coalesce()
    return scipy.sparse.coo_array((entries.values().numpy(), entries.indices().numpy()), shape=tuple(entries.shape))


_ANYWAY = (
    "pass edges as a list of tuples, list(map(tuple, array.tolist())), a matrix as scipy.sparse.csr_array(array), a "
    "row of sources over a row of targets by horosphere.embedding.as_graph(array, edge_index=True)"
)


def _refuse_rows_or_columns(pairs: Iterable) -> None:
    """Two rows of two or three whole numbers are two edges, or the sources and targets of two or three."""
    if not isinstance(pairs, Sequence) or len(pairs) != 2 or any(isinstance(row, tuple | str) for row in pairs):
        return
    rows = [row.tolist() if isinstance(row, np.ndarray | torch.Tensor) else row for row in pairs]
    if not all(isinstance(row, list) and len(row) in (2, 3) for row in rows) or len(rows[0]) != len(rows[1]):
        return
    if all(isinstance(value, int | np.integer) and not isinstance(value, bool) for row in rows for value in row):
        raise ValueError(
            f"{rows} can be read as 2 edges and as the sources and targets of {len(rows[0])}: pass edges as tuples, or "
            "columns by horosphere.embedding.as_graph(columns, edge_index=True)"
        )


def _from_columns(columns: Any, lengths: bool, weights: Any = None, n_nodes: Any = None) -> Graph:
    if isinstance(columns, np.ndarray | torch.Tensor):
        columns = _as_array(columns)
        if columns.ndim != 2:
            raise ValueError(f"edge_index must be (2, E), got shape {columns.shape}")
        if columns.dtype.kind == "f" and np.all(columns == np.floor(columns)):
            columns = columns.astype(np.int64)
        columns = columns.tolist()
    columns = list(columns)
    if len(columns) != 2 or len(columns[0]) != len(columns[1]):
        raise ValueError(
            f"edge_index must be (2, E), a row of sources and a row of targets, got rows of "
            f"{', '.join(str(len(row)) for row in columns[:5])}{', ...' if len(columns) > 5 else ''}"
        )
    nodes: Iterable[Hashable] = () if n_nodes is None else range(int(n_nodes))
    if weights is None:
        return _from_pairs(zip(*columns, strict=True), lengths, nodes)
    values = np.asarray(_as_array(weights)).reshape(-1)
    if len(values) != len(columns[0]):
        raise ValueError(f"edge_weight must hold {len(columns[0])} numbers, one an edge, got {len(values)}")
    return _from_pairs(zip(*columns, values.tolist(), strict=True), lengths, nodes)


def _labels_of(frame: Any) -> list[Hashable] | None:
    """The labels that a data frame's rows and columns share, or None."""
    columns = list(frame.columns)
    index = list(frame.index) if hasattr(frame, "index") and not callable(frame.index) else None
    return columns if index == columns else None


def _from_frame(frame: Any) -> Graph:
    labels = _labels_of(frame)
    if labels is None:
        raise TypeError(
            f"a {type(frame).__name__} is read as a matrix, and its rows and columns have different labels: pass a "
            "table of edges as frame.itertuples(index=False, name=None), an adjacency matrix with the same labels in "
            "the same order, frame.loc[labels, labels], or without labels, frame.to_numpy()"
        )
    values = frame.to_numpy()
    if labels == list(range(len(labels))) and len(labels) in (2, 3):
        raise ValueError(
            f"a {type(frame).__name__} of shape {values.shape} without names can be read as {len(labels)} edges and as "
            "a matrix: pass edges as frame.itertuples(index=False, name=None), a matrix as "
            "scipy.sparse.csr_array(frame.to_numpy())"
        )
    _check_labels(labels)
    return replace(_from_matrix(scipy.sparse.coo_array(np.asarray(values, dtype=np.float64))), nodes=labels)


def _check_labels(labels: list[Hashable]) -> None:
    for number, label in enumerate(labels):
        _label(label, f"row {number}")
    if len(set(labels)) != len(labels):
        twice = next(label for number, label in enumerate(labels) if label in labels[:number])
        raise ValueError(f"two rows of the matrix have the label {twice!r}")


def _from_networkx(graph: nx.Graph, lengths: bool) -> Graph:
    pairs = [(u, v, _weight(data.get("weight", 1), f"edge {u!r} -> {v!r}")) for u, v, data in graph.edges(data=True)]
    result = _from_pairs(pairs, lengths, nodes=graph.nodes)
    return result if graph.is_directed() else replace(result.both_directions(), directed=False)


def _from_array(array: Any, lengths: bool) -> Graph:
    if scipy.sparse.issparse(array):
        return _from_matrix(array)
    if array.ndim != 2:
        raise ValueError(f"an array must be (E, 2), (E, 3) or square (n, n), got shape {array.shape}")
    rows, columns = array.shape
    if rows == columns and columns in (2, 3):
        raise ValueError(
            f"an array of shape {array.shape} can be read as {rows} edges and as the matrix of {rows} nodes: {_ANYWAY}"
        )
    whole = array.dtype.kind in "iu" or (array.dtype.kind == "f" and bool(np.all(array == np.floor(array))))
    if rows == 2 and columns == 3 and whole:
        raise ValueError(
            f"an array of shape {array.shape} can be read as 2 edges with weights and as the sources and targets of 3: "
            f"{_ANYWAY}"
        )
    if columns in (2, 3):
        if array.dtype.kind == "f" and np.all(array[:, :2] == np.floor(array[:, :2])):
            # Index pairs that became floats only because a weight stands beside them are indices again.
            return _from_pairs(((int(row[0]), int(row[1]), *row[2:]) for row in array.tolist()), lengths)
        return _from_pairs(map(tuple, array.tolist()), lengths)
    if rows != columns:
        advice = f"; {_ANYWAY}" if rows == 2 else ""
        raise ValueError(f"an array must be (E, 2), (E, 3) or square (n, n), got shape {array.shape}{advice}")
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
        ends = [_label(label, where) for label in pair[:2]]
        for label in ends:
            index.setdefault(label, len(index))
        edges.append((index[ends[0]], index[ends[1]]))
        weights.append(_weight(pair[2], where) if len(pair) == 3 else 1.0)
    return _assembled(
        list(index), np.asarray(edges, dtype=np.int64).reshape(-1, 2), np.asarray(weights, dtype=np.float64), lengths
    )


def _label(label: Any, where: str) -> Hashable:
    """The label as it is, of a tensor or array of one number that number.

    Raises:
        ValueError: for a missing value: None, nan, pandas' NA and NaT.
        TypeError: for a label that is not hashable, or an array.
    """
    if type(label) is str or type(label) is int:
        return label
    if isinstance(label, torch.Tensor | np.ndarray):
        if label.ndim:
            raise TypeError(f"{where}: the label {label!r} is an array, not one number or name")
        label = label.item()
    try:
        missing = label is None or bool(label != label)
    except TypeError:
        missing = True  # What does not say whether it equals itself is pandas' NA.
    except ValueError:
        missing = False  # A container of arrays: not hashable.
    if missing:
        raise ValueError(f"{where}: {label!r} is a missing value and cannot be a label; the string 'None' can")
    try:
        hash(label)
    except TypeError:
        raise TypeError(f"{where}: the label {label!r} is not hashable") from None
    return label


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

"""Tensors, data frames and other libraries' graphs: read, or refused with the way out."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st

from horosphere.embedding import GraphEmbedding, as_graph, as_lengths

SOURCES, TARGETS = [0, 1, 2, 3], [1, 2, 3, 1]
INDEX = np.array([SOURCES, TARGETS])
WANTED = {(0, 1): 1.0, (1, 2): 1.0, (2, 3): 1.0, (3, 1): 1.0}


def pairs(graph):
    found = zip(graph.edges.tolist(), graph.weights.tolist(), strict=True)
    return {(graph.nodes[u], graph.nodes[v]): weight for (u, v), weight in found}


class Frame:
    """What a pandas data frame shows of itself."""

    def __init__(self, values, index, columns):
        self._values, self.index, self.columns = np.asarray(values), index, columns

    def to_numpy(self):
        return self._values

    def __iter__(self):
        return iter(self.columns)


class Missing:
    """As pandas.NA: comparisons give itself, which is neither true nor false."""

    def __eq__(self, other):
        return self

    __ne__ = __eq__

    def __hash__(self):
        return 1

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")

    def __repr__(self):
        return "<NA>"


class Data(SimpleNamespace):
    """As torch_geometric.data.Data: an edge_index, and an iterator over its stores."""

    def __iter__(self):
        return iter(self.__dict__.items())


TENSOR = torch.tensor(INDEX)


@pytest.mark.parametrize(
    "graph",
    [
        zip(TENSOR[0], TENSOR[1], strict=True),
        list(zip(TENSOR[0], TENSOR[1], strict=True)),
        [(np.array(u), np.array(v)) for u, v in WANTED],
        TENSOR.T,
        list(TENSOR.T),
        list(INDEX.T),
        TENSOR.T.to(torch.int32),
        TENSOR.T.double().requires_grad_(),
        TENSOR.T.bfloat16(),
        Data(edge_index=TENSOR),
        Data(edge_index=TENSOR, edge_weight=None, num_nodes=None, x=torch.ones(4, 3)),
    ],
)
def test_tensors_are_read_by_value(graph):
    found = as_graph(graph)
    assert pairs(found) == WANTED and all(isinstance(label, int | np.integer) for label in found.nodes)


@pytest.mark.parametrize("form", [np.asarray, torch.tensor, np.ndarray.tolist, lambda a: list(torch.tensor(a)), list])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_an_edge_index_of_any_length_is_read_where_it_is_said(form, n):
    found = as_graph(form(INDEX[:, :n]), edge_index=True)
    assert pairs(found) == dict(list(WANTED.items())[:n]) and all(
        isinstance(label, int | np.integer) for label in found.nodes
    )


def test_columns_of_names_are_read_where_it_is_said():
    assert pairs(as_graph([["a", "b"], ["b", "c"]], edge_index=True)) == {("a", "b"): 1.0, ("b", "c"): 1.0}


def test_weights_and_nodes_without_edges_come_with_an_edge_index():
    weight = torch.tensor([[0.5], [2.0], [1.0], [4.0]])
    found = as_graph(Data(edge_index=TENSOR, edge_weight=weight, num_nodes=6))
    assert pairs(found) == dict(zip(WANTED, weight.flatten().tolist(), strict=True))
    assert found.nodes == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="edge_weight must hold 4 numbers, one an edge, got 3"):
        as_graph(Data(edge_index=TENSOR, edge_weight=weight[:3]))


@pytest.mark.parametrize("form", [np.asarray, torch.tensor, np.ndarray.tolist, lambda a: list(torch.tensor(a)), list])
@pytest.mark.parametrize("n", [2, 3])
def test_two_rows_that_may_be_edges_or_columns_are_refused_with_the_way_out(form, n):
    with pytest.raises(ValueError, match=r"can be read as 2 edges .*edge_index=True"):
        as_graph(form(INDEX[:, :n]))


def test_two_edges_that_can_only_be_edges_are_read():
    wanted = {(0, 1): 0.5, (1, 2): 1.0}
    for edges in ([(0, 1, 0.5), (1, 2, 1.0)], [[0, 1, 0.5], [1, 2, 1.0]], np.array([[0, 1, 0.5], [1, 2, 1.0]])):
        assert pairs(as_graph(edges)) == wanted
    assert pairs(as_graph([["a", "b"], ["b", "c"]])) == {("a", "b"): 1.0, ("b", "c"): 1.0}
    assert pairs(as_graph([(0, 1, 2), (1, 2, 3)])) == {(0, 1): 2.0, (1, 2): 3.0}


@pytest.mark.parametrize("form", [np.asarray, torch.tensor])
def test_an_array_of_two_rows_is_told_of_edge_index(form):
    with pytest.raises(ValueError, match=r"got shape \(2, 4\).*edge_index=True"):
        as_graph(form(INDEX))


@pytest.mark.parametrize(
    "columns",
    [INDEX.T, [SOURCES], [SOURCES, TARGETS[:-1]], [SOURCES, TARGETS, TARGETS], np.arange(4), torch.ones(2, 2, 2)],
)
def test_what_is_no_edge_index_is_refused(columns):
    with pytest.raises(ValueError, match=r"edge_index must be \(2, E\)"):
        as_graph(columns, edge_index=True)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_matrices_as_tensors_dense_and_sparse():
    dense = torch.zeros(4, 4)
    dense[INDEX[0], INDEX[1]] = 1
    for matrix in (dense, dense.bool(), dense.to_sparse_coo(), dense.to_sparse_csr(), dense.half()):
        assert pairs(as_graph(matrix)) == WANTED


@pytest.mark.parametrize("label", [torch.tensor([0, 1]), np.array([0, 1]), np.array(["a"]), torch.ones(2)])
def test_an_array_as_a_label_is_named(label):
    with pytest.raises(TypeError, match=r"edge 2 .*is an array, not one number or name"):
        as_graph([("a", "b"), ("a", label)])


@pytest.mark.parametrize(
    "missing",
    [Missing(), None, float("nan"), np.nan, np.datetime64("NaT"), torch.tensor(float("nan")), np.array(np.nan)],
)
@pytest.mark.parametrize("end", [0, 1])
def test_a_missing_label_is_named_by_its_edge(missing, end):
    pair = (missing, "c") if end == 0 else ("c", missing)
    with pytest.raises(ValueError, match=r"edge 2 .*is a missing value"):
        as_graph([("a", "b"), pair])


def test_a_missing_weight_is_named_by_its_edge():
    with pytest.raises(ValueError, match=r"edge 2 .*the weight <NA> is not a number"):
        as_graph([("a", "b", 1.0), ("b", "c", Missing())])


def test_an_adjacency_frame_is_a_matrix_with_names():
    values = [[0, 2, 0], [0, 0, 1], [0.5, 0, 0]]
    graph = as_graph(Frame(values, ["a", "b", "c"], ["a", "b", "c"]))
    assert pairs(graph) == {("a", "b"): 2.0, ("b", "c"): 1.0, ("c", "a"): 0.5} and graph.index == {
        "a": 0,
        "b": 1,
        "c": 2,
    }
    assert as_graph(Frame(np.ones((4, 4)), range(4), range(4))).nodes == [0, 1, 2, 3]


def test_a_positive_frame_of_three_nodes_is_not_read_as_weighted_edges():
    graph = as_graph(Frame(np.full((3, 3), 2.0), list("abc"), list("abc")))
    assert len(graph.edges) == 6 and graph.self_loops == 3 and set(graph.weights) == {2.0}


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [
        (Frame([["a", "b"]], range(1), ["child", "parent"]), TypeError, r"itertuples.*loc\[labels, labels\].*to_numpy"),
        (Frame(np.ones((2, 2)), ["a", "b"], ["b", "a"]), TypeError, r"itertuples.*loc\[labels, labels\].*to_numpy"),
        (Frame(np.ones((3, 3)), range(3), range(3)), ValueError, "as 3 edges and as a matrix"),
        (Frame(np.ones((2, 2)), range(2), range(2)), ValueError, "as 2 edges and as a matrix"),
        (Frame(np.ones((2, 2)), ["a", "a"], ["a", "a"]), ValueError, "two rows of the matrix have the label 'a'"),
        (Frame(np.ones((2, 2)), ["a", None], ["a", None]), ValueError, "row 1: None is a missing value"),
        (Frame([[0, np.nan], [1, 0]], ["a", "b"], ["a", "b"]), ValueError, r"entry \[0, 1\] of the matrix is nan"),
    ],
)
def test_other_frames_are_told_how(frame, error, message):
    with pytest.raises(error, match=message):
        as_graph(frame)


def test_distances_as_a_frame_or_tensor_are_distances():
    values = np.array([[0, 1, 2.5], [1, 0, 2], [2.5, 2, 0]])
    wanted = {frozenset((u, v)): w for (u, v), w in pairs(as_lengths(values, "precomputed")).items()}
    tensor = as_lengths(torch.tensor(values), "precomputed")
    assert {frozenset((u, v)): w for (u, v), w in pairs(tensor).items()} == wanted
    frame = as_lengths(Frame(values, list("abc"), list("abc")), "precomputed")
    named = {frozenset("abc"[i] for i in pair): w for pair, w in wanted.items()}
    assert frame.nodes == ["a", "b", "c"] and {frozenset((u, v)): w for (u, v), w in pairs(frame).items()} == named
    values[0, 1] = 0
    for table in (values, torch.tensor(values), Frame(values, list("abc"), list("abc"))):
        with pytest.raises(ValueError, match=r"the distance \[0, 1\] is 0.0"):
            as_lengths(table, "precomputed")


def test_fit_takes_tensors():
    model = GraphEmbedding(n_epochs=1, random_state=0).fit(TENSOR.T)
    assert model.nodes_ == [0, 1, 2, 3] and model.kneighbors(0, 1).labels


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_every_way_to_give_integer_pairs_is_the_same_graph(edges):
    wanted = as_graph(edges)
    index = torch.tensor(edges).T
    rows = scipy.sparse.coo_array((np.ones(len(edges)), index.numpy()), shape=(10, 10))
    ways = [
        as_graph(index, edge_index=True),
        as_graph(index.tolist(), edge_index=True),
        as_graph(zip(index[0], index[1], strict=True)),
        as_graph(Data(edge_index=index)),
    ]
    assert all(pairs(way) == pairs(wanted) and way.nodes == wanted.nodes for way in ways)
    assert pairs(as_graph(rows)) == pairs(wanted)

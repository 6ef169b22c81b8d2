"""Every input ends as the same labelled pairs."""

import networkx as nx
import numpy as np
import pytest
import scipy.sparse

from horosphere.embedding import as_graph


def pairs(graph):
    return {
        (graph.nodes[u], graph.nodes[v]): w
        for (u, v), w in zip(graph.edges.tolist(), graph.weights.tolist(), strict=True)
    }


def test_all_forms_of_one_graph_agree(tmp_path):
    triples = [(0, 1, 2.0), (1, 2, 1.0), (3, 2, 0.5)]
    want = {(u, v): w for u, v, w in triples}
    digraph = nx.DiGraph()
    digraph.add_weighted_edges_from(triples)
    dense = np.zeros((4, 4))
    for u, v, w in triples:
        dense[u, v] = w
    forms = [
        triples,
        iter(triples),
        [np.array(t) for t in triples],
        digraph,
        dense,
        scipy.sparse.csr_array(dense),
        scipy.sparse.coo_matrix(dense),
        np.array([*triples, (0, 1, 0.0 + 1e-300)])[:, :],
    ]
    for form in forms:
        assert pairs(as_graph(form)) == pytest.approx(want), type(form)
    (tmp_path / "e.tsv").write_text("0\t1\t2\n1\t2\t1\n3\t2\t0.5\n")
    assert pairs(as_graph(tmp_path / "e.tsv")) == {(str(u), str(v)): w for (u, v), w in want.items()}
    assert pairs(as_graph(str(tmp_path / "e.tsv"))) == pairs(as_graph(tmp_path / "e.tsv"))


def test_undirected_graphs_count_both_ways_and_parallel_edges_add_up():
    assert pairs(as_graph(nx.Graph([("a", "b")]))) == {("a", "b"): 1.0, ("b", "a"): 1.0}
    assert pairs(as_graph(nx.MultiDiGraph([("a", "b"), ("a", "b")]))) == {("a", "b"): 2.0}
    assert pairs(as_graph([("a", "b")], undirected=True)) == {("a", "b"): 1.0, ("b", "a"): 1.0}


def test_isolated_nodes_stay():
    graph = nx.DiGraph([("a", "b")])
    graph.add_node("alone")
    assert as_graph(graph).nodes == ["a", "b", "alone"]
    assert as_graph(scipy.sparse.csr_array(([1.0], ([0], [1])), shape=(5, 5))).nodes == [0, 1, 2, 3, 4]


def test_closure_adds_ancestors_with_weight_one_and_comes_before_both_directions():
    chain = [("a", "b", 3.0), ("b", "c", 1.0)]
    assert pairs(as_graph(chain, closure=True)) == {("a", "b"): 3.0, ("b", "c"): 1.0, ("a", "c"): 1.0}
    both = as_graph(chain, closure=True, undirected=True)
    assert len(both.edges) == 6 and ("c", "a") in pairs(both)


def test_closure_of_a_cycle_has_no_self_pairs():
    graph = as_graph([("a", "b"), ("b", "c"), ("c", "a")], closure=True)
    assert len(graph.edges) == 6 and (graph.edges[:, 0] != graph.edges[:, 1]).all()


def test_closure_of_an_undirected_graph_is_refused():
    with pytest.raises(ValueError, match="closure=True needs directed"):
        as_graph(nx.Graph([("a", "b")]), closure=True)


def test_self_loops_are_counted():
    graph = as_graph([("a", "a"), ("a", "b"), ("c", "c")])
    assert graph.self_loops == 2 and pairs(graph) == {("a", "b"): 1.0} and graph.nodes == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("graph", "error", "message"),
    [
        ([("a",)], TypeError, r"edge 1 .* expected \(source, target\)"),
        (["ab"], TypeError, "edge 1 .*'ab'"),
        ([("a", "b"), ("a", None)], ValueError, "edge 2 .* missing value"),
        ([("a", float("nan"))], ValueError, "edge 1 .* missing value"),
        ([(["x"], "b")], TypeError, "not hashable"),
        ([("a", "b", float("nan"))], ValueError, "edge 1 .* finite and positive"),
        ([("a", "b", 0)], ValueError, "finite and positive"),
        ([("a", "b", "heavy")], ValueError, "not a number"),
        (nx.DiGraph([("a", "b", {"weight": -1})]), ValueError, "'a' -> 'b'.*finite and positive"),
        (np.ones((4, 5)), ValueError, r"\(4, 5\)"),
        (np.ones(4), ValueError, r"\(4,\)"),
        (np.array([[0, 1], [1, 2]]), ValueError, "2 edges and as the matrix of 2 nodes"),
        (scipy.sparse.csr_array(np.ones((2, 3))), ValueError, "square"),
        (np.diag([1.0, -1.0, 1.0, 1.0]), ValueError, r"entry \[1, 1\]"),
        (7, TypeError, "graph must be"),
        ({"a": "b"}, TypeError, "graph must be"),
    ],
)
def test_refuses(graph, error, message):
    with pytest.raises(error, match=message):
        as_graph(graph)


def test_a_data_frame_is_told_how():
    class Frame:
        columns = ("a", "b")

        def __iter__(self):
            return iter(self.columns)

    with pytest.raises(TypeError, match="itertuples"):
        as_graph(Frame())


def test_joined_keeps_old_rows_and_adds_weights():
    joined = as_graph([("a", "b"), ("b", "c")]).joined(as_graph([("d", "b"), ("a", "b")]))
    assert joined.nodes == ["a", "b", "c", "d"]
    assert pairs(joined) == {("a", "b"): 2.0, ("b", "c"): 1.0, ("d", "b"): 1.0}

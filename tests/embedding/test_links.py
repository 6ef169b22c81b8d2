"""Held-out edges and their scores."""

import networkx as nx
import numpy as np
import pytest

from horosphere.embedding import GraphEmbedding, link_auc, split_edges

GRAPH = nx.relabel_nodes(nx.gnm_random_graph(40, 120, seed=0), str)


def key(graph, rows):
    return {frozenset((graph.nodes[u], graph.nodes[v])) for u, v in rows.tolist()}


def test_nothing_is_in_two_places():
    split = split_edges(GRAPH, 0.1, 0.2, random_state=0)
    whole = {frozenset(edge) for edge in GRAPH.edges}
    parts = [key(split.train, rows) for rows in (split.train.edges, split.validation, split.test)]
    assert [len(part) for part in parts] == [84, 12, 24]
    assert set.union(*parts) == whole and sum(map(len, parts)) == len(whole)
    strangers = [key(split.train, rows) for rows in (split.validation_strangers, split.test_strangers)]
    assert [len(part) for part in strangers] == [12, 24] and not strangers[0] & strangers[1]
    assert not (strangers[0] | strangers[1]) & whole
    assert all(len(pair) == 2 for pair in strangers[0] | strangers[1])
    assert split.train.nodes == list(GRAPH.nodes)


def test_seeds_and_directions():
    first, again, other = (split_edges(GRAPH, random_state=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.test, again.test) and not np.array_equal(first.test, other.test)
    both = split_edges(GRAPH.to_directed(), random_state=0)
    assert len(both.test) == len(first.test) == 12


def test_all_pairs_that_are_no_edges_can_be_needed():
    graph = nx.complete_graph(8)
    graph.remove_edges_from([(0, 1), (2, 3)])
    split = split_edges(graph, 0.01, 0.01, random_state=0)
    assert key(split.train, np.concatenate([split.validation_strangers, split.test_strangers])) == {
        frozenset((0, 1)),
        frozenset((2, 3)),
    }
    with pytest.raises(ValueError, match="the graph has 2"):
        split_edges(graph, 0.2, 0.2)


@pytest.mark.parametrize(("shares", "message"), [((0, 0.1), "validation must be"), ((0.5, 0.5), "leave none")])
def test_shares_out_of_range(shares, message):
    with pytest.raises(ValueError, match=message):
        split_edges(GRAPH, *shares)


def test_auc_by_hand():
    model = GraphEmbedding("E1", n_epochs=1, random_state=0).fit([("a", "b"), ("c", "d")])
    model.embedding_ = np.asarray([[0.0], [1.0], [3.0], [7.0]])
    # edges of length 1 and 4, others of length 2 and 6: three of four comparisons are right
    assert link_auc(model, np.asarray([[0, 1], [2, 3]]), np.asarray([[1, 2], [1, 3]])) == 0.75


@pytest.mark.filterwarnings("ignore:the graph falls into")
def test_a_trained_embedding_predicts_the_links_of_a_grid():
    split = split_edges(nx.grid_2d_graph(8, 8), random_state=0)
    model = GraphEmbedding("E2", loss="distortion", n_epochs=40, random_state=0).fit(split.train)
    assert link_auc(model, split.test, split.test_strangers) > 0.8

"""Negatives are never true neighbours and follow their distribution exactly; epochs honour weights."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horosphere.embedding.sampling import NegativeSampler, epoch_edges, epoch_rng


@st.composite
def graphs(draw):
    n = draw(st.integers(2, 12))
    pair = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    edges = draw(st.sets(pair.filter(lambda p: p[0] != p[1]), min_size=1, max_size=40))
    mass = draw(st.none() | st.lists(st.integers(0, 4), min_size=n, max_size=n).map(np.array))
    return n, np.array(sorted(edges), dtype=np.int64), mass


@settings(max_examples=200, deadline=None)
@given(graphs(), st.integers(0, 2**31))
def test_draws_are_exactly_the_admissible_nodes(graph, seed):
    n, edges, mass = graph
    sampler = NegativeSampler(edges, n, mass)
    weight = np.ones(n, dtype=int) if mass is None else mass
    for u in range(n):
        allowed = np.array([v != u and (u, v) not in set(map(tuple, edges.tolist())) for v in range(n)])
        assert sampler.remaining[u] == weight[allowed].sum()
        if not sampler.remaining[u]:
            with pytest.raises(ValueError, match="remaining"):
                sampler.draw(np.array([u]), 1, epoch_rng(seed, 0))
            continue

        class EachOnce:
            """Stands in for the generator: every value of the range once, so that counts are exact."""

            def integers(self, low, high, size):
                return np.arange(size[1])[None, :] + 0 * high

        drawn = sampler.draw(np.array([u]), int(sampler.remaining[u]), EachOnce())
        assert np.array_equal(np.bincount(drawn.ravel(), minlength=n), np.where(allowed, weight, 0))


def test_draws_for_many_sources_at_once_equal_one_by_one():
    rng = np.random.default_rng(0)
    edges = np.unique(rng.integers(0, 30, (200, 2)), axis=0)
    edges = edges[edges[:, 0] != edges[:, 1]]
    sampler = NegativeSampler(edges, 30, np.bincount(edges[:, 1], minlength=30))
    drawn = sampler.draw(edges[:, 0], 20, epoch_rng(1, 2))
    true = set(map(tuple, edges.tolist()))
    assert not any((u, v) in true or u == v for u, row in zip(edges[:, 0], drawn, strict=True) for v in row)


def test_equal_weights_visit_each_pair_once():
    order = epoch_edges(np.full(50, 3.0), epoch_rng(0, 0))
    assert sorted(order) == list(range(50)) and list(order) != list(range(50))


def test_weights_set_how_often_a_pair_is_visited():
    weights = np.array([1.0, 2.0, 4.0, 1.0])
    counts = np.bincount(np.concatenate([epoch_edges(weights, epoch_rng(0, e)) for e in range(2000)]), minlength=4)
    assert counts.sum() == 8000
    assert counts / 8000 == pytest.approx(weights / 8, abs=0.01)
    one = np.bincount(epoch_edges(weights, epoch_rng(0, 0)), minlength=4)
    assert np.all(np.abs(one - weights / 2) < 1)


def test_epochs_differ_and_repeat():
    draws = [epoch_rng(0, e).integers(0, 1000, 5).tolist() for e in (0, 1, 0)]
    assert draws[0] == draws[2] != draws[1]

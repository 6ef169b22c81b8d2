"""When a training steps at which rate, and what short trainings come to."""

import networkx as nx
import numpy as np
import pytest

import horosphere as hs
from horosphere.embedding import GraphEmbedding
from horosphere.embedding.schedule import Schedule

TREE = nx.balanced_tree(2, 4)


def rates(n_epochs: int, **changes) -> list[float]:
    """The rate of each epoch, as callbacks are told."""
    seen = []
    model = GraphEmbedding(
        n_epochs=n_epochs, random_state=0, callbacks=[lambda info: seen.append(info.learning_rate)], **changes
    )
    model.fit(TREE)
    return seen


@pytest.mark.parametrize(("n_epochs", "stages"), [(1, 10), (3, 4), (9, 2), (10, 1), (300, 1)])
def test_a_short_training_is_cut_into_at_least_ten_stages(n_epochs, stages):
    pairs = np.arange(46).reshape(23, 2)
    schedule = Schedule(n_epochs, 1.0, 5, 1, 0.3 * n_epochs, 0)
    parts = list(schedule.stages(pairs))
    assert len(parts) == stages and np.array_equal(np.concatenate([some for _, some in parts]), pairs)
    times = [epoch + done for epoch in range(n_epochs) for done, _ in parts]
    burning = [schedule.burning_in(time) for time in times]
    assert sum(burning) == pytest.approx(0.3 * len(times), abs=1) and sorted(burning, reverse=True) == burning
    falling = [schedule.rate(time) for time in times][sum(burning) :]
    assert falling[0] > 0.8 and np.all(np.diff(falling) < 0) and 0 < falling[-1] < 0.2


def test_short_rankings_by_pairs_take_larger_steps_and_a_longer_burn_in():
    assert rates(10)[:4] == pytest.approx([0.2, 0.2, 0.2, 2.0])
    assert rates(30)[8:10] == pytest.approx([0.1, 1.0])
    assert rates(10, burn_in=1)[:2] == pytest.approx([0.2, 2.0])
    assert rates(300)[9:11] == pytest.approx([0.01, 0.1])


@pytest.mark.parametrize("changes", [{"engine": "torch"}, {"init": "tree"}, {"learning_rate": 0.1}])
def test_other_rankings_keep_their_rate(changes):
    assert rates(10, **changes)[3] == pytest.approx(0.1)


@pytest.mark.parametrize(("n_epochs", "least"), [(3, 0.7), (10, 0.8), (30, 0.88)])
def test_few_epochs_are_enough_for_most_of_the_order(n_epochs, least):
    graph = hs.data.mammals_closure()
    model = GraphEmbedding("poincare", 5, n_epochs=n_epochs, random_state=0).fit(graph)
    assert model.evaluate(graph).map > least

"""An interrupted run goes on to the numbers of an undisturbed one."""

import numpy as np
import pytest

from horosphere.embedding import GraphEmbedding

TREE = [(i, (i - 1) // 2) for i in range(1, 31)]


class Interrupt(Exception):
    pass


def model(**changes):
    return GraphEmbedding(**{"n_epochs": 12, "random_state": 3, "closure": True, **changes})


@pytest.mark.parametrize("manifold", ["poincare", "lorentz", "sphere", "euclidean"])
@pytest.mark.parametrize("stop", [1, 4, 9])
def test_resumed_equals_undisturbed_bit_for_bit(tmp_path, manifold, stop):
    want = model(manifold=manifold).fit(TREE)

    def interrupt(info):
        if info.epoch == stop:
            raise Interrupt

    kept = {"checkpoint": tmp_path / "c", "checkpoint_every": 2, "manifold": manifold}
    with pytest.raises(Interrupt):
        model(callbacks=[interrupt], **kept).fit(TREE)
    epochs = []
    found = model(callbacks=[lambda info: epochs.append(info.epoch)], **kept).fit(TREE)
    assert epochs == list(range(stop // 2 * 2 + 1, 13))
    assert np.array_equal(found.embedding_, want.embedding_) and found.loss_curve_ == want.loss_curve_


def test_a_finished_checkpoint_gives_its_result_without_training(tmp_path):
    first = model(checkpoint=tmp_path / "c").fit(TREE)
    epochs = []
    second = model(checkpoint=tmp_path / "c", callbacks=[epochs.append]).fit(TREE)
    assert not epochs and np.array_equal(first.embedding_, second.embedding_)


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 0.2},
        {"n_epochs": 13},
        {"random_state": 4},
        {"closure": False},
        {"n_negatives": 3},
        {"manifold": "lorentz"},
        {"n_components": 3},
        {"batch_size": 7},
    ],
)
def test_other_settings_are_refused(tmp_path, changes):
    model(checkpoint=tmp_path / "c").fit(TREE)
    with pytest.raises(ValueError, match="belongs to another graph or to other settings"):
        model(checkpoint=tmp_path / "c", **changes).fit(TREE)


def test_another_graph_is_refused(tmp_path):
    model(checkpoint=tmp_path / "c").fit(TREE)
    for graph in (TREE[:-1], [(u, v, 1 + (u == 3)) for u, v in TREE], [(str(u), str(v)) for u, v in TREE]):
        with pytest.raises(ValueError, match="another graph"):
            model(checkpoint=tmp_path / "c").fit(graph)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    (tmp_path / "c").write_bytes(b"half")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        model(checkpoint=tmp_path / "c").fit(TREE)


def test_a_checkpoint_needs_a_seed(tmp_path):
    with pytest.raises(ValueError, match="checkpoint needs random_state"):
        model(checkpoint=tmp_path / "c", random_state=None).fit(TREE)

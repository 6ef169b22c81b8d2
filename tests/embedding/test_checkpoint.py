"""An interrupted run goes on to the numbers of an undisturbed one; one that diverges keeps its last good ones."""

import numpy as np
import pytest
import torch

from horosphere.embedding import DivergenceError, GraphEmbedding, trainer

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


@pytest.mark.parametrize("manifold", ["poincare", "lorentz", "sphere", "euclidean"])
@pytest.mark.parametrize(
    "changes", [{"engine": "torch"}, {"engine": "numba"}, {"loss": "distortion", "engine": "torch", "closure": False}]
)
@pytest.mark.filterwarnings("ignore:RiemannianSGD", "ignore:no two points of Sphere")
def test_a_run_that_diverges_says_so_and_keeps_its_last_points(tmp_path, manifold, changes):
    want = model(manifold=manifold, **changes).fit(TREE)
    seen = []

    def spoil(info):
        seen.append(info.embedding.copy())
        if info.epoch == 5:
            working[0].state[...] = np.nan

    working = []
    with pytest.MonkeyPatch.context() as patch:
        epochs = trainer._epochs
        patch.setattr(trainer, "_epochs", lambda work, *other: working.append(work) or epochs(work, *other))
        spoilt = model(manifold=manifold, callbacks=[spoil], checkpoint=tmp_path / "c", **changes)
        with pytest.raises(DivergenceError, match=r"epoch 6 of 12 .*smaller learning_rate than \d") as caught:
            spoilt.fit(TREE)
    assert caught.value.epoch == 5 and np.array_equal(caught.value.embedding, seen[-1])
    assert caught.value.manifold.check_point_on_manifold(torch.from_numpy(caught.value.embedding))
    assert not hasattr(spoilt, "embedding_")
    epochs = []
    again = model(manifold=manifold, checkpoint=tmp_path / "c", callbacks=[lambda info: epochs.append(info.epoch)])
    found = again.set_params(**changes).fit(TREE)
    assert epochs[0] == 6
    assert np.array_equal(found.embedding_, want.embedding_) and found.loss_curve_ == want.loss_curve_


@pytest.mark.parametrize("manifold, engine", [("poincare", "numba"), ("lorentz", "numba"), ("euclidean", "torch")])
@pytest.mark.filterwarnings("ignore:RiemannianSGD")
def test_a_rate_beyond_all_measure(manifold, engine):
    fitted = model(manifold=manifold).fit(TREE)
    before = fitted.embedding_.copy()
    with pytest.raises(DivergenceError, match=r"learning_rate than 1e\+300"):
        fitted.set_params(learning_rate=1e300, engine=engine).fit(TREE)
    assert np.array_equal(fitted.embedding_, before)


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

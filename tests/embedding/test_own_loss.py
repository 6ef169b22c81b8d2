"""A loss of a user's own: one class, one registration; unknown and half-made ones are errors."""

from typing import ClassVar

import numpy as np
import pytest
import torch

import horosphere as hs
from horosphere.embedding import GraphEmbedding, PairLoss, register_loss
from horosphere.embedding.losses import base, loss_by_name, loss_names, pair_distances

TREE = [(str(k // 2), str(k)) for k in range(2, 32)]


class Hinge(PairLoss):
    """sum max(0, 1 + d(u, v) - d(u, n_k)): a true neighbour is nearer than a drawn node by a margin."""

    name: ClassVar[str] = "hinge"

    def batch(self, points, index, manifold):
        d = pair_distances(points, index, manifold)
        return (1 + d[:, :1] - d[:, 1:]).clamp(min=0).sum()


@pytest.fixture
def hinge():
    register_loss(Hinge)
    yield
    del base._LOSSES["hinge"]


def model(loss, **other):
    options = {"n_components": 2, "n_epochs": 40, "random_state": 0, "engine": "torch", "burn_in": 0} | other
    return GraphEmbedding(loss=loss, **options)


def own_value(fitted):
    """The hinge of all edges, in the mean over the nodes that are no neighbours of the source."""
    points = torch.from_numpy(fitted.embedding_)
    d = hs.cdist(points, points, fitted.manifold_)
    graph = fitted.graph_
    known = torch.eye(len(graph.nodes), dtype=torch.bool)
    known[tuple(torch.from_numpy(graph.edges.T))] = True
    costs = [(1 + d[u, v] - d[u][~known[u]]).clamp(min=0).mean() for u, v in graph.edges.tolist()]
    return float(torch.stack(costs).mean())


@pytest.mark.usefixtures("hinge")
def test_it_trains_as_itself():
    """Before, any name that was let through trained the ranking loss, bit for bit."""
    seen = []
    fitted = model("hinge", callbacks=[lambda info: seen.append(info.loss)]).fit(TREE)
    start = model("hinge", n_epochs=1, learning_rate=1e-12).fit(TREE)
    ranking = model("ranking").fit(TREE)
    assert not np.array_equal(fitted.embedding_, ranking.embedding_)
    # points start within 1e-3 of the origin, where every cost is 1
    assert own_value(start) == pytest.approx(1, abs=0.01)
    assert start.loss_curve_[0] / start.n_negatives == pytest.approx(1, abs=0.01)
    assert own_value(fitted) < 0.5 and seen[-1] < 0.5 * seen[0] and fitted.loss_curve_ == seen
    assert fitted.score(TREE) > start.score(TREE) + 0.2
    assert "hinge" in loss_names()


@pytest.mark.usefixtures("hinge")
def test_the_engine_that_lacks_it_refuses_it_by_name():
    with pytest.raises(ValueError, match='engine="numba" has no hinge: use engine="torch"'):
        model("hinge", engine="numba").fit(TREE)
    fitted = model("hinge", engine="auto").fit(TREE)
    assert np.array_equal(fitted.embedding_, model("hinge").fit(TREE).embedding_)


@pytest.mark.usefixtures("hinge")
def test_it_is_saved_loaded_and_goes_on(tmp_path):
    fitted = model("hinge").fit(TREE)
    fitted.save(tmp_path / "hinge.safetensors")
    loaded = GraphEmbedding.load(tmp_path / "hinge.safetensors")
    assert loaded.loss == "hinge" and loaded.score(TREE) == fitted.score(TREE)
    more = loaded.partial_fit([("31", "new")])
    assert len(more.nodes_) == len(fitted.nodes_) + 1

    class Interrupted(Exception):
        pass

    def interrupt(info):
        if info.epoch == 23:
            raise Interrupted

    options = {"checkpoint": tmp_path / "run.safetensors", "checkpoint_every": 7}
    with pytest.raises(Interrupted):
        model("hinge", callbacks=[interrupt], **options).fit(TREE)
    assert np.array_equal(model("hinge", **options).fit(TREE).embedding_, fitted.embedding_)


def test_an_unknown_name_lists_those_that_there_are():
    with pytest.raises(ValueError, match='loss must be "cones", "distortion" or "ranking", got \'hinge\''):
        model("hinge").fit(TREE)


def kind(label, parents=(Hinge,), **inside):
    return type(label, parents, inside)


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (kind("Half", (PairLoss,), name="half"), TypeError, "Half is half a loss: it does not say batch"),
        (kind("Nameless", (PairLoss,), batch=Hinge.batch), TypeError, "it does not say name"),
        (kind("Numbered", name=7), TypeError, "must be a string, got 7"),
        (kind("Again", name="ranking"), ValueError, 'there is a loss "ranking" already, Ranking'),
        (kind("Gpu", name="gpu", engines=("cuda",)), ValueError, 'among "numba" and "torch"'),
        (kind("Nowhere", name="nowhere", engines=()), ValueError, 'among "numba" and "torch"'),
        (kind("Fast", name="fast", engines=("numba",)), ValueError, "those of the package"),
        (Hinge(), TypeError, "a loss is a subclass of PairLoss"),
        (dict, TypeError, "a loss is a subclass of PairLoss"),
    ],
)
def test_half_made_ones_are_refused(made, error, message):
    before = loss_names()
    with pytest.raises(error, match=message):
        register_loss(made)
    assert loss_names() == before


def test_each_loss_says_which_engines_serve_it():
    assert {name: loss_by_name(name).engines for name in ("ranking", "distortion", "cones")} == {
        "ranking": ("numba", "torch"),
        "distortion": ("numba", "torch"),
        "cones": ("torch",),
    }

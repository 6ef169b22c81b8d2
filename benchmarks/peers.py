"""The libraries that are measured beside this one, a small function each; a library is imported when it is called.

They are the extra ``bench``: pip install "horosphere[bench]". One that is not there, or that does not work with the
other packages here, raises `PeerMissing` with the reason, and is left out of the tables.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, embedding

from horosphere.manifolds._geoopt import geoopt

__all__ = ["Gensim", "Geoopt", "PeerMissing", "geomstats_distances", "hypll_distances", "versions"]

PEERS = ("gensim", "geoopt", "hypll", "geomstats")


class PeerMissing(RuntimeError):
    """The library cannot be imported here."""


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PeerMissing(f"{module} is left out: {error}") from error


def versions() -> dict[str, str]:
    """Of the peers that are installed, whether or not they import."""
    found = {}
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def hypll_distances(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """(N, N) distances in the ball of curvature -1."""
    ball, tensors = _load("hypll.manifolds.poincare_ball"), _load("hypll.tensors")
    manifold = ball.PoincareBall(ball.Curvature(1.0, constraining_strategy=lambda value: value))
    points = tensors.ManifoldTensor(x[None], manifold=manifold)
    return lambda: manifold.cdist(points, points)[0]


def geomstats_distances(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """(N, N) distances in the ball of curvature -1; its intermediates are (N, N, D)."""
    os.environ.setdefault("GEOMSTATS_BACKEND", "pytorch")
    if not hasattr(np, "trapz"):
        # geomstats 2.8 imports this name, which NumPy 2.4 no longer has, whatever its backend.
        vars(np)["trapz"] = np.trapezoid
    manifold = _load("geomstats.geometry.poincare_ball").PoincareBall(x.shape[1])
    return lambda: manifold.metric.dist(x[:, None], x[None])


class Gensim:
    """gensim's PoincareModel on pairs of node numbers.

    Args:
        edges: (E, 2) all true pairs, which it never draws as negatives.
        start: (n, D) points to start from.
        negatives, batch_size, workers: its own.
        uniform: draw negatives from all nodes alike, and never the source itself, as we do; otherwise by how often
            a node occurs, as it comes.
        regularization: its own (1.0 as it comes): pulls targets to the origin, which the loss itself does not.
    """

    def __init__(
        self,
        edges: np.ndarray,
        start: np.ndarray,
        negatives: int,
        batch_size: int,
        *,
        workers: int = 1,
        uniform: bool = True,
        regularization: float = 0.0,
    ) -> None:
        poincare = _load("gensim.models.poincare")
        named = [(str(u), str(v)) for u, v in edges.tolist()]
        self._batch_size = batch_size
        self._model = model = poincare.PoincareModel(
            named,
            size=start.shape[1],
            negative=negatives,
            workers=workers,
            burn_in=0,
            regularization_coeff=regularization,
        )
        self._node = np.asarray([int(key) for key in model.kv.index_to_key])
        self._start = start
        self._row = np.full(len(start), -1)
        self._row[self._node] = np.arange(len(self._node))
        model.kv.vectors = start[self._node].copy()
        # One more each: no source is without a stranger to draw.
        self._popularity = np.bincount(edges[:, 1], minlength=len(start))[self._node] * 100 + 1
        if uniform:
            self.draw_by_targets(False)
            for row in range(len(self._node)):
                model.node_relations[row].add(row)

    def draw_by_targets(self, yes: bool) -> None:
        """Draw negatives by how often a node is a target, or from all alike."""
        self._model.kv.expandos["count"][:] = self._popularity if yes else 1
        self._model._init_node_probabilities()
        self._model._negatives_buffer = type(self._model._negatives_buffer)([])

    def seed(self, seed: int) -> None:
        """Start its draws anew."""
        self._model._np_random.seed(seed)

    def pairs(self, edges: np.ndarray) -> list[tuple[int, int]]:
        """Pairs in the form that `train` takes."""
        return [(u, v) for u, v in self._row[edges].tolist()]

    def train(self, pairs: list[tuple[int, int]], rate: float) -> None:
        """One pass over the pairs."""
        self._model.all_relations, self._model.train_alpha = pairs, rate
        self._model.train(1, batch_size=self._batch_size)

    def refusal(self, workers: int) -> str:
        """What it says to so many workers; empty if it trains with them."""
        kept, self._model.workers = self._model.workers, workers
        try:
            self._model.train(0)
        except NotImplementedError as error:
            return str(error)
        finally:
            self._model.workers = kept
        return ""

    def points(self) -> np.ndarray:
        points = self._start.copy()
        points[self._node] = self._model.kv.vectors
        return points


class Geoopt:
    """A table of geoopt's Poincare ball under one of its optimizers, with its distance and torch's cross entropy.

    Args:
        optimizer: "RiemannianAdam", "RiemannianSGD", "SparseRiemannianAdam" or "SparseRiemannianSGD".
        start: (n, D) points to start from.
        dtype: of the table.
    """

    def __init__(self, optimizer: str, start: np.ndarray, dtype: torch.dtype = torch.float64) -> None:
        self._ball = geoopt.PoincareBall(c=1.0)
        self._table = geoopt.ManifoldParameter(torch.from_numpy(start).to(dtype).clone(), manifold=self._ball)
        self._optimizer = getattr(geoopt.optim, optimizer)([self._table], lr=0.1)
        self._sparse = optimizer.startswith("Sparse")

    def step(self, batch: np.ndarray, rate: float) -> None:
        """One step on the summed loss of (B, 2 + K) rows: source, target, negatives."""
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.zero_grad()
        x = embedding(torch.from_numpy(batch), self._table, sparse=self._sparse)
        distance = self._ball.dist(x[:, :1], x[:, 1:])
        target = torch.zeros(len(batch), dtype=torch.long)
        cross_entropy(-distance, target, reduction="sum").backward()
        self._optimizer.step()

    def points(self) -> np.ndarray:
        return self._table.detach().double().numpy()

"""The training loop: epochs of an engine, resumable at every epoch."""

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from horosphere.embedding.compiled_engine import CompiledEngine, working_manifold
from horosphere.embedding.distortion_engine import DistortionEngine
from horosphere.embedding.graph import Graph
from horosphere.embedding.io import load_tensors, save_tensors
from horosphere.embedding.lengths import Lengths
from horosphere.embedding.losses import Loss, loss_by_name
from horosphere.embedding.schedule import DistortionSchedule, Schedule
from horosphere.embedding.torch_engine import TorchEngine
from horosphere.manifolds import manifold_config
from horosphere.manifolds.hooks import own

__all__ = ["Checkpoint", "DivergenceError", "EpochInfo", "Run", "engine_name", "train"]


@dataclass(frozen=True)
class EpochInfo:
    """What a callback is told after an epoch.

    Attributes:
        epoch: number of epochs done, from 1.
        n_epochs: how many there will be.
        loss: mean loss per pair of this epoch.
        learning_rate: the rate of this epoch (of the distortion loss: in units of length squared).
        embedding: (n_nodes, D) float64, the points now; a view that the next epoch changes: copy to keep.
        nodes: the labels of the rows.
    """

    epoch: int
    n_epochs: int
    loss: float
    learning_rate: float
    embedding: np.ndarray
    nodes: list


class Engine(Protocol):
    """What trains: points of a manifold, an epoch at a time.

    Attributes:
        state: everything that changes.
    """

    state: np.ndarray

    @property
    def manifold(self) -> Any:
        """Of the points, with the curvatures as they are now."""
        ...

    def points(self) -> np.ndarray:
        """(n_nodes, D) float64, the points now."""
        ...

    def run(self, epoch: int) -> float:
        """Train one epoch; the loss of its pairs on the way."""
        ...


class DivergenceError(ValueError):
    """A training step led to numbers that are not finite: the learning rate is too large.

    Attributes:
        epoch: number of epochs done before, from 0.
        embedding: (n_nodes, D) float64, the points after them; they can be the ``init`` of another `fit`.
        manifold: the manifold of these points, learned curvatures as numbers.
    """

    def __init__(self, message: str, epoch: int, embedding: np.ndarray, manifold) -> None:
        super().__init__(message)
        self.epoch, self.embedding, self.manifold = epoch, embedding, manifold


class Checkpoint:
    """A file from which an interrupted run goes on to exactly the numbers of an undisturbed one.

    It holds the points, the losses so far and a digest of the settings, the starting points and the graph; the draws of
    an epoch depend on (seed, epoch) only, so no generator state is kept.
    """

    def __init__(self, path: str | os.PathLike, every: int, digest: str) -> None:
        self.path = Path(path)
        self.every = every
        self._digest = digest

    def load(self) -> tuple[np.ndarray, list[float]] | None:
        """(state of the engine, losses of the epochs done), or None if there is no file.

        Raises:
            ValueError: if the file belongs to another graph or other settings.
        """
        if not self.path.exists():
            return None
        tensors, about = load_tensors(self.path, "checkpoint", {"embedding": None, "loss": 1})
        if about.get("digest") != self._digest:
            raise ValueError(
                f"the checkpoint {self.path} belongs to another graph or to other settings: delete it to start anew, "
                "or name another file"
            )
        return tensors["embedding"], tensors["loss"].tolist()

    def save(self, state: np.ndarray, losses: list[float]) -> None:
        tensors = {"embedding": state, "loss": np.asarray(losses)}
        save_tensors(self.path, "checkpoint", tensors, {"digest": self._digest})


def run_digest(
    graph: Graph, start: np.ndarray, schedule: Schedule | DistortionSchedule, manifold, n_fixed: int, engine: str
) -> str:
    """A fingerprint of everything that the result depends on."""
    digest = hashlib.sha256()
    space = repr(manifold) if own(manifold, "config") is None else manifold_config(manifold)
    about = [space, n_fixed, engine, asdict(schedule)]
    digest.update(json.dumps(about, sort_keys=True).encode())
    digest.update(repr(graph.nodes).encode())
    for array in (graph.edges, graph.weights, start):
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Run:
    """How a training is run, whatever it trains.

    Attributes:
        engine: "numba" (a pair at a time; for products of flat, hyperbolic and spherical parts), "torch" (batches; any
            manifold) or "auto": numba where it can.
        n_threads: of the numba engine.
        n_fixed: rows before this one do not move, and pairs between them are not trained on.
        callbacks: called with an `EpochInfo` after each epoch.
        checkpoint_path: where to keep a `Checkpoint`, taken up if it exists; None: nowhere.
        checkpoint_every: epochs between two writes.
    """

    engine: str = "auto"
    n_threads: int = 1
    n_fixed: int = 0
    callbacks: Sequence[Callable[[EpochInfo], None]] = ()
    checkpoint_path: str | os.PathLike | None = None
    checkpoint_every: int = 10


def train(
    start: np.ndarray,
    graph: Graph,
    manifold,
    schedule: Schedule | DistortionSchedule,
    run: Run = Run(),
    *,
    lengths: Lengths | None = None,
) -> tuple[np.ndarray, list[float], Any]:
    """Minimise a loss of the graph's pairs, or of lengths of all pairs of nodes, by Riemannian SGD.

    Args:
        start: (n_nodes, D) float64 points.
        graph: the pairs to train on.
        manifold: a `geoopt.Manifold`.
        schedule: the settings; a `DistortionSchedule` goes with ``lengths``.
        run: engine, threads, callbacks and checkpoint.
        lengths: of the graph, to be fitted.

    Returns:
        The points, the mean loss of each epoch (of lengths: the mean of |d / g - 1| on the way), and the manifold,
        whose learned curvatures are numbers now.

    Raises:
        ValueError: the engine does not serve the manifold or the loss; a checkpoint of another run; a curvature to be
            learned where there is none.
        DivergenceError: the loss or a point is not finite after an epoch. It holds the points of the epoch before, and
            so does the checkpoint.
    """
    work: Engine
    if isinstance(schedule, DistortionSchedule):
        if lengths is None:
            raise ValueError("a DistortionSchedule goes with lengths")
        name = engine_name(run.engine, manifold)
        work = DistortionEngine(start, lengths, manifold, schedule, name, run.n_fixed, run.n_threads)
        share = 1.0
    else:
        pairs = _usable(graph, run.n_fixed)
        name = engine_name(run.engine, manifold, loss_by_name(schedule.loss))
        if name == "torch":
            work = TorchEngine(start, pairs, graph, manifold, schedule, run.n_fixed)
        else:
            work = CompiledEngine(start, pairs, graph, manifold, schedule, run.n_fixed, run.n_threads)
        share = 1 / max(1, len(pairs.edges))
    kept = None
    if run.checkpoint_path is not None:
        digest = run_digest(graph, start, schedule, manifold, run.n_fixed, name)
        kept = Checkpoint(run.checkpoint_path, run.checkpoint_every, digest)
    points, losses = _epochs(work, share, schedule, graph.nodes, run.callbacks, kept)
    return points, losses, work.manifold


def _epochs(work: Engine, share: float, schedule, nodes: list, callbacks, checkpoint: Checkpoint | None):
    losses: list[float] = []
    if checkpoint is not None and (saved := checkpoint.load()) is not None:
        work.state[...], losses = saved
    good = work.state.copy()
    for epoch in range(len(losses), schedule.n_epochs):
        loss = work.run(epoch) * share
        if not (math.isfinite(loss) and np.isfinite(work.state).all()):
            bad = np.count_nonzero(~np.isfinite(work.state))
            work.state[...] = good
            if checkpoint:
                checkpoint.save(good, losses)
            raise DivergenceError(
                f"epoch {epoch + 1} of {schedule.n_epochs} led to a loss of {loss} and to {bad} coordinates that are "
                f"not finite: take a smaller learning_rate than {schedule.learning_rate:g}. The points before it are "
                "the embedding of this error",
                epoch,
                work.points().copy(),
                work.manifold,
            )
        good[...] = work.state
        losses.append(loss)
        if checkpoint and ((epoch + 1) % checkpoint.every == 0 or epoch + 1 == schedule.n_epochs):
            checkpoint.save(work.state, losses)
        if callbacks:
            rate, points = schedule.rate(epoch), work.points()
            for callback in callbacks:
                callback(EpochInfo(epoch + 1, schedule.n_epochs, losses[-1], rate, points, nodes))
    return work.points(), losses


def engine_name(name: str, manifold, loss: Loss | None = None) -> str:
    """Which engine, "numba" or "torch", a choice ("auto" too) comes to on a manifold and for a loss.

    Raises:
        ValueError: the loss has no meaning on the manifold, or the engine that was asked for does not serve them.
    """
    if loss is not None:
        loss.check_manifold(manifold)
        if name != "auto" and name not in loss.engines:
            raise ValueError(f'engine="{name}" has no {loss.name}: use engine="{loss.engines[0]}"')
        if "numba" not in loss.engines:
            return "torch"
    served = working_manifold(manifold) is not None
    if name == "numba" and not served:
        raise ValueError(
            f'engine="numba" serves Euclidean, PoincareBall, Lorentz, Sphere of fixed curvature and products of them, '
            f'not {manifold}; use engine="torch"'
        )
    return "torch" if name == "torch" or not served else "numba"


def _usable(graph: Graph, n_fixed: int) -> Graph:
    """The pairs that can be trained on: one end moves, and the source has a stranger to stand against its neighbour."""
    degree = np.bincount(graph.edges[:, 0], minlength=len(graph.nodes))
    usable = (degree[graph.edges[:, 0]] < len(graph.nodes) - 1) & (graph.edges >= n_fixed).any(axis=1)
    if not usable.any() and len(graph.edges):
        warnings.warn(
            "every source is a neighbour of all other nodes: the ranking loss has nothing to push apart and the "
            "points stay where they started",
            UserWarning,
            stacklevel=4,
        )
    return replace(graph, edges=graph.edges[usable], weights=graph.weights[usable])

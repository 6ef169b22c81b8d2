"""The training loop: epochs of row-sparse Riemannian steps on the ranking loss, resumable at every epoch."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from horosphere.embedding.graph import Graph
from horosphere.embedding.io import load_tensors, save_tensors
from horosphere.embedding.losses import ranking_loss
from horosphere.embedding.sampling import NegativeSampler, epoch_edges, epoch_rng
from horosphere.manifolds.parameter import ManifoldParameter
from horosphere.optim import RiemannianSGD

__all__ = ["Checkpoint", "EpochInfo", "Schedule", "train"]


@dataclass(frozen=True)
class Schedule:
    """Settings of a training run.

    The rate is per pair, in units of the manifold's tangent vectors: a tenth of it during the burn-in epochs (in which
    negatives are drawn in proportion to how often a node is a target), then falling linearly from it to 0.
    """

    n_epochs: int
    learning_rate: float
    n_negatives: int
    batch_size: int
    burn_in: int
    seed: int

    def rate(self, epoch: int) -> float:
        if epoch < self.burn_in:
            return self.learning_rate / 10
        return self.learning_rate * (self.n_epochs - epoch) / max(1, self.n_epochs - self.burn_in)


@dataclass(frozen=True)
class EpochInfo:
    """What a callback is told after an epoch.

    Attributes:
        epoch: number of epochs done, from 1.
        n_epochs: how many there will be.
        loss: mean ranking loss per pair of this epoch.
        learning_rate: the rate of this epoch.
        embedding: (n_nodes, D) float64, the points now; a view that the next epoch changes: copy to keep.
        nodes: the labels of the rows.
    """

    epoch: int
    n_epochs: int
    loss: float
    learning_rate: float
    embedding: np.ndarray
    nodes: list


class Checkpoint:
    """A file from which an interrupted run goes on to exactly the numbers of an undisturbed one.

    It holds the points, the losses so far and a digest of the settings, the starting points and the graph; the draws of
    an epoch depend on (seed, epoch) only, so no generator state is kept.
    """

    def __init__(self, path: str | os.PathLike, every: int, digest: str) -> None:
        self.path = Path(path)
        self.every = every
        self._digest = digest

    def load(self) -> tuple[Tensor, list[float]] | None:
        """(points, losses of the epochs done), or None if there is no file.

        Raises:
            ValueError: if the file belongs to another graph or other settings.
        """
        if not self.path.exists():
            return None
        tensors, about = load_tensors(self.path, "checkpoint")
        if about["digest"] != self._digest:
            raise ValueError(
                f"the checkpoint {self.path} belongs to another graph or to other settings: delete it to start anew, "
                "or name another file"
            )
        return torch.from_numpy(tensors["embedding"].copy()), tensors["loss"].tolist()

    def save(self, table: Tensor, losses: list[float]) -> None:
        tensors = {"embedding": table.detach().numpy(), "loss": np.asarray(losses)}
        save_tensors(self.path, "checkpoint", tensors, {"digest": self._digest})


def run_digest(graph: Graph, start: Tensor, schedule: Schedule, manifold, n_fixed: int) -> str:
    """A fingerprint of everything that the result depends on."""
    digest = hashlib.sha256()
    space = manifold.config() if hasattr(type(manifold), "config") else repr(manifold)
    about = [space, n_fixed, asdict(schedule)]
    digest.update(json.dumps(about, sort_keys=True).encode())
    digest.update(repr(graph.nodes).encode())
    for array in (graph.edges, graph.weights, start.numpy()):
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def train(
    start: Tensor,
    graph: Graph,
    manifold,
    schedule: Schedule,
    *,
    n_fixed: int = 0,
    callbacks: Sequence[Callable[[EpochInfo], None]] = (),
    checkpoint_path: str | os.PathLike | None = None,
    checkpoint_every: int = 10,
) -> tuple[Tensor, list[float]]:
    """Minimise the ranking loss of the graph's pairs by Riemannian SGD.

    Args:
        start: (n_nodes, D) float64 points.
        graph: the pairs to train on.
        manifold: a `geoopt.Manifold`.
        schedule: the settings.
        n_fixed: rows before this one do not move, and pairs between them are not trained on.
        callbacks: called with an `EpochInfo` after each epoch.
        checkpoint_path: where to keep a `Checkpoint`, taken up if it exists; None: nowhere.
        checkpoint_every: epochs between two writes.

    Returns:
        The points and the mean loss of each epoch.
    """
    points, losses = start, []
    checkpoint = None
    if checkpoint_path is not None:
        digest = run_digest(graph, start, schedule, manifold, n_fixed)
        checkpoint = Checkpoint(checkpoint_path, checkpoint_every, digest)
        if (saved := checkpoint.load()) is not None:
            points, losses = saved
    draws = _Draws(graph, schedule, n_fixed)
    table = ManifoldParameter(points, manifold)
    with torch.no_grad():
        # Projecting a point of a sphere again may turn its last bit: these are on the manifold already.
        table.copy_(points)
    optimizer = RiemannianSGD([table], lr=schedule.learning_rate)
    view = table.detach().numpy()
    with _one_thread():
        for epoch in range(len(losses), schedule.n_epochs):
            rate = optimizer.param_groups[0]["lr"] = schedule.rate(epoch)
            total, pairs = 0.0, 0
            for batch in draws.batches(epoch):
                total += _step(optimizer, table, batch, n_fixed)
                pairs += len(batch)
            losses.append(total / max(1, pairs))
            if checkpoint and ((epoch + 1) % checkpoint.every == 0 or epoch + 1 == schedule.n_epochs):
                checkpoint.save(table, losses)
            for callback in callbacks:
                callback(EpochInfo(epoch + 1, schedule.n_epochs, losses[-1], rate, view, graph.nodes))
    return table.detach(), losses


@contextmanager
def _one_thread() -> Iterator[None]:
    """A step works on so few numbers that sharing it costs more than it saves, up to tenfold on a busy machine; and
    one order of summation gives the same bits on every machine of a kind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Draws:
    """The batches of an epoch, (B, 2 + K) node indices: source, true neighbour, negatives."""

    def __init__(self, graph: Graph, schedule: Schedule, n_fixed: int) -> None:
        n = len(graph.nodes)
        self._schedule = schedule
        self._uniform = NegativeSampler(graph.edges, n)
        self._by_degree = NegativeSampler(graph.edges, n, np.bincount(graph.edges[:, 1], minlength=n))
        usable = (self._uniform.remaining[graph.edges[:, 0]] > 0) & (graph.edges >= n_fixed).any(axis=1)
        if not usable.any() and len(graph.edges):
            warnings.warn(
                "every source is a neighbour of all other nodes: the ranking loss has nothing to push apart and the "
                "points stay where they started",
                UserWarning,
                stacklevel=4,
            )
        self._edges, self._weights = graph.edges[usable], graph.weights[usable]

    def batches(self, epoch: int) -> Iterator[np.ndarray]:
        if not len(self._edges):
            return
        rng = epoch_rng(self._schedule.seed, epoch)
        pairs = self._edges[epoch_edges(self._weights, rng)]
        count = self._schedule.n_negatives
        size = self._schedule.batch_size
        # A whole epoch at once is cheap for small graphs; slices keep the memory of large ones bounded.
        slice_size = size * max(1, 2**22 // (size * count))
        for first in range(0, len(pairs), slice_size):
            part = pairs[first : first + slice_size]
            nodes = np.concatenate([part, self._negatives(part[:, 0], count, rng, epoch)], axis=1)
            yield from (nodes[i : i + size] for i in range(0, len(nodes), size))

    def _negatives(self, sources: np.ndarray, count: int, rng: np.random.Generator, epoch: int) -> np.ndarray:
        if epoch >= self._schedule.burn_in:
            return self._uniform.draw(sources, count, rng)
        # A source all of whose non-neighbours are leaves has no target left to draw.
        some = self._by_degree.remaining[sources] > 0
        drawn = np.empty((len(sources), count), dtype=np.int64)
        drawn[some] = self._by_degree.draw(sources[some], count, rng)
        drawn[~some] = self._uniform.draw(sources[~some], count, rng)
        return drawn


def _step(optimizer: RiemannianSGD, table: ManifoldParameter, batch: np.ndarray, n_fixed: int) -> float:
    rows, local = np.unique(batch, return_inverse=True)
    index = torch.from_numpy(rows)
    points = table.detach().index_select(0, index).requires_grad_()
    loss = ranking_loss(points, torch.from_numpy(local.reshape(batch.shape)), table.manifold)
    (gradient,) = torch.autograd.grad(loss, points)
    first = int(np.searchsorted(rows, n_fixed))
    table.grad = torch.sparse_coo_tensor(
        index[first:].unsqueeze(0), gradient[first:], table.shape, is_coalesced=True, check_invariants=False
    )
    optimizer.step()
    return loss.item()

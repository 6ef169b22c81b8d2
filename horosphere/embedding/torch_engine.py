"""Batches of pairs as torch tensors: any manifold, and a sparse optimizer step on the rows it touches."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from horosphere.embedding.curvature import fixed
from horosphere.embedding.graph import Graph
from horosphere.embedding.losses import PairLoss, Ranking, loss_by_name
from horosphere.embedding.sampling import NegativeSampler, epoch_edges, epoch_rng
from horosphere.embedding.schedule import Schedule
from horosphere.manifolds.parameter import ManifoldParameter
from horosphere.optim import RiemannianSGD

__all__ = ["TorchEngine"]

# The longest step of a learned curvature, of itself: beyond it the slope that was taken says nothing, and curvatures of
# 1e50 follow. Where it may cross 0, a tenth of the curvature 1 at least.
LONGEST = 0.1
# What losses that rank first begin with.
RANKING = Ranking()


class TorchEngine:
    """Epochs of row-sparse Riemannian steps, ``batch_size`` pairs a step.

    Args:
        points: (n_nodes, D) float64 points of the manifold.
        pairs: the pairs to train on; every source has a node that is not its neighbour.
        graph: all true pairs, which are never drawn as negatives.
        manifold: any `geoopt.Manifold`; parameters of it (curvatures, scales) move with the mean gradient of a batch,
            where points move with the sum, and by a tenth of themselves at most.
        schedule: the settings.
        n_fixed: rows before this one do not move.
    """

    name = "torch"

    def __init__(self, points: np.ndarray, pairs: Graph, graph: Graph, manifold, schedule: Schedule, n_fixed: int = 0):
        n = len(graph.nodes)
        self._schedule, self._n_fixed = schedule, n_fixed
        loss = loss_by_name(schedule.loss)
        if not isinstance(loss, PairLoss):
            raise TypeError(f'loss="{schedule.loss}" is no loss of pairs')
        self._loss = loss
        self._edges, self._weights = pairs.edges, pairs.weights
        self._uniform = NegativeSampler(graph.edges, n)
        self._by_degree = NegativeSampler(graph.edges, n, np.bincount(graph.edges[:, 1], minlength=n))
        self._learned = [parameter for parameter in manifold.parameters() if parameter.requires_grad]
        numbers = [np.asarray([parameter.item()]) for parameter in self._learned]
        # One vector holds everything that changes; points and parameters are views of it.
        self.state = np.concatenate([np.array(points).ravel(), *numbers])
        table = torch.from_numpy(self.state[: points.size]).view(points.shape)
        self._table = ManifoldParameter(table, manifold)
        with torch.no_grad():
            # Projecting a point of a sphere again may turn its last bit: these are on the manifold already.
            table.copy_(torch.from_numpy(points))
            self._table.data = table
            for i, parameter in enumerate(self._learned, start=points.size):
                parameter.data = torch.from_numpy(self.state[i : i + 1]).view(())
        groups = [{"params": [self._table]}] + [{"params": self._learned}] * bool(self._learned)
        self._optimizer = RiemannianSGD(groups, lr=schedule.learning_rate)

    @property
    def manifold(self):
        """The manifold of `points`; learned parameters are the numbers they are now."""
        return fixed(self._table.manifold)

    def points(self) -> np.ndarray:
        """(n_nodes, D) float64, the points now; a view that the next epoch changes."""
        return self._table.detach().numpy()

    def run(self, epoch: int) -> float:
        """Train one epoch; the sum of the losses of its pairs."""
        with _one_thread():
            if epoch == self._schedule.first_own:
                self._begin()
            if not len(self._edges):
                return 0.0
            rng = epoch_rng(self._schedule.seed, epoch)
            pairs = self._edges[epoch_edges(self._weights, rng)]
            total = sum(self._run(epoch + done, some, rng) for done, some in self._schedule.stages(pairs))
        # a point whose step led to no number stayed where it was: that is no training
        return math.nan if self._optimizer.skipped_rows else total

    def _run(self, epoch: float, pairs: np.ndarray, rng: np.random.Generator) -> float:
        rate = self._schedule.rate(epoch)
        for group, share in zip(self._optimizer.param_groups, (1, self._schedule.batch_size), strict=False):
            group["lr"] = rate / share
        loss = self._loss if self._schedule.own(epoch) else RANKING
        return sum(self._step(loss, batch, rate) for batch in self._batches(epoch, pairs, rng))

    def _batches(self, epoch: float, pairs: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
        count = self._schedule.n_negatives
        size = self._schedule.batch_size
        # A whole epoch at once is cheap for small graphs; slices keep the memory of large ones bounded.
        slice_size = size * max(1, 2**22 // (size * count))
        for first in range(0, len(pairs), slice_size):
            part = pairs[first : first + slice_size]
            nodes = np.concatenate([part, self._negatives(part[:, 0], count, rng, epoch)], axis=1)
            yield from (nodes[i : i + size] for i in range(0, len(nodes), size))

    def _negatives(self, sources: np.ndarray, count: int, rng: np.random.Generator, epoch: float) -> np.ndarray:
        if not self._schedule.burning_in(epoch):
            return self._uniform.draw(sources, count, rng)
        # A source all of whose non-neighbours are leaves has no target left to draw.
        some = self._by_degree.remaining[sources] > 0
        drawn = np.empty((len(sources), count), dtype=np.int64)
        drawn[some] = self._by_degree.draw(sources[some], count, rng)
        drawn[~some] = self._uniform.draw(sources[~some], count, rng)
        return drawn

    @torch.no_grad()
    def _begin(self) -> None:
        if not self._schedule.settled:
            points = self._table.detach()
            started = self._loss.start(points, self._table.manifold)
            if started is not points:
                self._table.copy_(started)
        self._keep(self._loss, torch.arange(self._n_fixed, len(self._table), device="cpu"))

    @torch.no_grad()
    def _keep(self, loss: PairLoss, rows: torch.Tensor) -> None:
        points = self._table.detach()[rows]
        kept = loss.kept(points, self._table.manifold)
        if kept is not points:
            self._table[rows] = kept

    def _step(self, loss: PairLoss, batch: np.ndarray, rate: float) -> float:
        """One step on a batch."""
        rows, local = np.unique(batch, return_inverse=True)
        index = torch.from_numpy(rows)
        points = self._table.detach().index_select(0, index).requires_grad_()
        manifold = self._table.manifold
        cost = loss.batch(points, torch.from_numpy(local.reshape(batch.shape)), manifold)
        gradient, *slopes = torch.autograd.grad(cost, [points, *self._learned])
        gradient = loss.bounded(gradient, points.detach(), manifold, rate, self._schedule.learning_rate)
        for parameter, slope in zip(self._learned, slopes, strict=True):
            parameter.grad = _bounded_slope(slope, parameter, self._optimizer.param_groups[1]["lr"])
        first = int(np.searchsorted(rows, self._n_fixed))
        self._table.grad = torch.sparse_coo_tensor(
            index[first:].unsqueeze(0), gradient[first:], self._table.shape, is_coalesced=True, check_invariants=False
        )
        self._optimizer.step()
        self._keep(loss, index[first:])
        return cost.item()


def _bounded_slope(slope: torch.Tensor, parameter: torch.Tensor, rate: float) -> torch.Tensor:
    """The slope of a learned number, such that a step at this rate is none too long."""
    size = parameter.detach().abs()
    if getattr(parameter, "low", -math.inf) < 0 < getattr(parameter, "high", math.inf):
        size = size.clamp(min=1.0)
    longest = LONGEST * size / rate
    return slope.clamp(-longest, longest)


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

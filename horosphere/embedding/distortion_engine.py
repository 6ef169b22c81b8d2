"""Epochs of the distortion loss: compiled, a pair at a time, or in batches on any manifold."""

import numpy as np
import torch

from horosphere.embedding.compiled_engine import working_manifold
from horosphere.embedding.curvature import CurvatureSteps, curvatures, with_curvatures
from horosphere.embedding.lengths import Lengths
from horosphere.embedding.losses.pairs import pair_distances
from horosphere.embedding.sampling import epoch_rng
from horosphere.embedding.schedule import DistortionSchedule
from horosphere.manifolds import Euclidean, PoincareBall, Product, Sphere, convert
from horosphere.manifolds.parameter import ManifoldParameter
from horosphere.optim import RiemannianSGD

__all__ = ["DistortionEngine"]

# Epochs before curvatures move: the first ones throw the points about.
SETTLING = 2


class DistortionEngine:
    """Steps on the stress, then on |d / g - 1|, of all pairs each epoch; then, where asked, a step of the curvatures.

    Args:
        points: (n_nodes, D) float64 points of the manifold.
        lengths: the wanted distances.
        manifold: any `geoopt.Manifold`; with ``schedule.learn_curvature`` one that `CurvatureSteps` takes.
        schedule: the settings.
        name: "numba": a pair at a time, where the manifold has a `working_manifold`; "torch": batches, in which a
            node takes the mean of its pairs' steps.
        n_fixed: rows before this one do not move.
        n_threads: of the compiled steps; more than one writes the table without locks.

    Attributes:
        state: everything that changes, one float64 vector: working points, curvatures and their steps.
    """

    def __init__(
        self,
        points: np.ndarray,
        lengths: Lengths,
        manifold,
        schedule: DistortionSchedule,
        name: str,
        n_fixed: int = 0,
        n_threads: int = 1,
    ) -> None:
        self.name, self._given, self._lengths, self._schedule = name, points, lengths, schedule
        self._n_fixed, self._n_threads = n_fixed, n_threads
        self._manifold = manifold
        self._working = working_manifold(manifold) if name == "numba" else manifold
        start = _between(points, manifold, self._working)
        self._curvature_steps = CurvatureSteps(self._working) if schedule.learn_curvature else None
        parts = [start]
        if self._curvature_steps is not None:
            parts += curvatures(manifold), self._curvature_steps.state
        self.state = np.concatenate([part.ravel() for part in parts])
        self._table: np.ndarray = self.state[: start.size].reshape(start.shape)
        if self._curvature_steps is not None:
            self._kappas, steps = np.split(self.state[start.size :], [parts[1].size])
            self._curvature_steps.state = steps.reshape(2, -1)

    @property
    def manifold(self):
        """The manifold of `points`, with the curvatures as they are now."""
        return self._now(self._manifold)

    def points(self) -> np.ndarray:
        """(n_nodes, D) float64, the points now."""
        moved = _between(self._table, self._now(self._working), self.manifold)
        moved[: self._n_fixed] = self._given[: self._n_fixed]
        return moved

    def run(self, epoch: int) -> float:
        """Train one epoch; the mean of |d / g - 1| over its pairs on the way."""
        pairs, lengths = self._lengths.epoch(epoch_rng(self._schedule.seed, epoch))
        stress, rate = epoch < self._schedule.stress_epochs, self._schedule.rate(epoch)
        total = (self._compiled_epoch if self.name == "numba" else self._torch_epoch)(pairs, lengths, rate, stress)
        if self._curvature_steps is not None and epoch >= min(SETTLING, self._schedule.n_epochs - 1):
            space = self._now(self._working)
            space, points = self._curvature_steps.step(space, torch.from_numpy(self._table), pairs, lengths, stress)
            self._table[...], self._kappas[...] = points.numpy(), curvatures(space)
        return total / len(pairs)

    def _now(self, manifold):
        return manifold if self._curvature_steps is None else with_curvatures(manifold, None, self._kappas)[0]

    def _compiled_epoch(self, pairs: np.ndarray, lengths: np.ndarray, rate: float, stress: bool) -> float:
        from horosphere.embedding import compiled

        whole = self._now(self._working)
        parts = whole.manifolds if isinstance(whole, Product) else [whole]
        kinds = {Euclidean: compiled.FLAT, PoincareBall: compiled.BALL, Sphere: compiled.SPHERE}
        described = (
            np.asarray([kinds[type(part)] for part in parts], dtype=np.int64),
            np.abs(curvatures(whole)),
            np.cumsum([0, *whole.sizes]) if isinstance(whole, Product) else np.asarray([0, self._table.shape[1]]),
        )
        arguments = (self._table, self._n_fixed, pairs, lengths, rate, stress, *described)
        if self._n_threads == 1:
            return compiled.distortion_pairs(*arguments)
        with compiled.PARALLEL:
            total = compiled.distortion_pairs_threaded(*arguments, self._n_threads)
        # two threads may each have written a part of one row
        self._table[...] = whole.projx(torch.from_numpy(self._table)).numpy()
        return total

    def _torch_epoch(self, pairs: np.ndarray, lengths: np.ndarray, rate: float, stress: bool) -> float:
        table = ManifoldParameter(torch.from_numpy(self._table), self._now(self._working))
        with torch.no_grad():
            table.copy_(torch.from_numpy(self._table))
        optimizer = RiemannianSGD([table], lr=1.0)
        size = self._schedule.batch_size
        total = 0.0
        for i in range(0, len(pairs), size):
            total += self._step(table, optimizer, pairs[i : i + size], lengths[i : i + size], rate, stress)
        self._table[...] = table.detach().numpy()
        return total

    def _step(self, table, optimizer, pairs: np.ndarray, lengths: np.ndarray, rate: float, stress: bool) -> float:
        rows, local, count = np.unique(pairs, return_inverse=True, return_counts=True)
        local = local.reshape(pairs.shape)
        index = torch.from_numpy(rows.astype(np.int64))
        points = table.detach().index_select(0, index).requires_grad_()
        wanted = torch.from_numpy(lengths)
        distance = pair_distances(points, torch.from_numpy(local), table.manifold).squeeze(1)
        gap = distance.detach() - wanted
        if stress:
            change = gap * (rate / wanted**2).clamp(max=1.0) / 2
        else:
            change = torch.sign(gap) * torch.minimum(rate / wanted, gap.abs() / 2)
        # The gradient of d has length 1 at both ends, so the gradient of change . d is the step itself.
        share = torch.from_numpy(1.0 / count[local].max(axis=1))
        (gradient,) = torch.autograd.grad((change * share) @ distance, points)
        first = int(np.searchsorted(rows, self._n_fixed))
        table.grad = torch.sparse_coo_tensor(
            index[first:].unsqueeze(0), gradient[first:], table.shape, is_coalesced=True, check_invariants=False
        )
        optimizer.step()
        return float((gap.abs() / wanted).sum())


def _between(points: np.ndarray, source, target) -> np.ndarray:
    return np.array(points) if source is target else convert(torch.from_numpy(points), source, target).numpy()

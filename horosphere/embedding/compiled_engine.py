"""Pairs one at a time through numba: every product of flat, hyperbolic and spherical parts of fixed curvature."""

import numpy as np
import torch

from horosphere.embedding.graph import Graph
from horosphere.embedding.sampling import epoch_edges, epoch_rng
from horosphere.embedding.schedule import Schedule
from horosphere.manifolds import Euclidean, Lorentz, PoincareBall, Product, Sphere, convert

__all__ = ["CompiledEngine", "working_manifold"]


def working_manifold(manifold):
    """The manifold, isometric to this one, in whose coordinates the compiled steps work; None where they cannot.

    The hyperboloid is worked as a ball; a subclass, a learned curvature and a curvature per batch entry are not served.
    """
    if type(manifold) is Product:
        parts = [working_manifold(part) for part in manifold.manifolds]
        if any(part is None for part in parts):
            return None
        shrunk = [size - (type(m) is Lorentz) for m, size in zip(manifold.manifolds, manifold.sizes, strict=True)]
        return Product(*zip(parts, shrunk, strict=True))
    if type(manifold) is Euclidean and manifold.ndim == 1:
        return manifold
    if type(manifold) in (PoincareBall, Sphere, Lorentz) and isinstance(manifold.kappa, float):
        return PoincareBall(manifold.kappa) if type(manifold) is Lorentz else manifold
    return None


class CompiledEngine:
    """Epochs of Riemannian steps, a pair at a time.

    Args:
        points: (n_nodes, D) float64 points of the manifold.
        pairs: the pairs to train on; every source has a node that is not its neighbour.
        graph: all true pairs, which are never drawn as negatives.
        manifold: one that has a `working_manifold`.
        schedule: the settings (``batch_size`` has no meaning here).
        n_fixed: rows before this one do not move.
        n_threads: more than one writes the table without locks: faster, and no two runs are equal to the last bit.
    """

    name = "numba"

    def __init__(
        self,
        points: np.ndarray,
        pairs: Graph,
        graph: Graph,
        manifold,
        schedule: Schedule,
        n_fixed: int = 0,
        n_threads: int = 1,
    ):
        # Compiled code is loaded, or made (some ten seconds, once an installation), by whoever trains with it.
        from horosphere.embedding import compiled, compiled_ball

        self._compiled, self._compiled_ball = compiled, compiled_ball
        self.manifold, self._working = manifold, working_manifold(manifold)
        self._schedule, self._n_fixed, self._n_threads = schedule, n_fixed, n_threads
        self._edges, self._weights = pairs.edges, pairs.weights
        self._targets = np.ascontiguousarray(graph.edges[:, 1])
        self._starts, self._excluded = _excluded(graph)
        self._given = points
        self.state = self._between(points, manifold, self._working)
        self._parts = self._describe()

    def points(self) -> np.ndarray:
        """(n_nodes, D) float64, the points now."""
        moved = self._between(self.state, self._working, self.manifold)
        # Rows that did not move are given back as they came, not as the way there and back rounds them.
        moved[: self._n_fixed] = self._given[: self._n_fixed]
        return moved

    def run(self, epoch: int) -> float:
        """Train one epoch; the sum of the losses of its pairs."""
        if not len(self._edges):
            return 0.0
        rng = epoch_rng(self._schedule.seed, epoch)
        pairs = self._edges[epoch_edges(self._weights, rng)]
        return sum(self._run(epoch + done, some, rng) for done, some in self._schedule.stages(pairs))

    def _run(self, epoch: float, pairs: np.ndarray, rng: np.random.Generator) -> float:
        pool = self._targets if self._schedule.burning_in(epoch) else self._targets[:0]
        seeds = rng.integers(0, 2**63, self._n_threads, dtype=np.uint64)
        whole = self._working
        if type(whole) is PoincareBall and -whole.kappa >= self._compiled_ball.LEAST_CURVATURE:
            one, several = self._compiled_ball.ball_pairs, self._compiled_ball.ball_pairs_threaded
            parts: tuple = (-whole.kappa,)
        else:
            one, several = self._compiled.ranking_pairs, self._compiled.ranking_pairs_threaded
            parts = self._parts
        arguments = (
            self.state,
            self._n_fixed,
            pairs,
            self._starts,
            self._excluded,
            pool,
            self._schedule.n_negatives,
            self._schedule.rate(epoch),
            *parts,
        )
        if self._n_threads == 1:
            return one(*arguments, seeds[0])
        with self._compiled.PARALLEL:
            total = several(*arguments, seeds)
        # two threads may each have written a part of one row
        self.state[...] = whole.projx(torch.from_numpy(self.state)).numpy()
        return total

    def _describe(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Kind, |curvature| and first coordinate of each part."""
        whole = self._working
        parts = whole.manifolds if isinstance(whole, Product) else [whole]
        kinds = {
            Euclidean: self._compiled.FLAT,
            PoincareBall: self._compiled.BALL,
            Sphere: self._compiled.SPHERE,
        }
        return (
            np.asarray([kinds[type(part)] for part in parts], dtype=np.int64),
            np.asarray([abs(part.kappa) for part in parts], dtype=np.float64),
            np.cumsum([0, *whole.sizes]) if isinstance(whole, Product) else np.asarray([0, self.state.shape[1]]),
        )

    @staticmethod
    def _between(points: np.ndarray, source, target) -> np.ndarray:
        if source is target:
            return np.array(points)
        return convert(torch.from_numpy(points), source, target).numpy()


def _excluded(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """For each node the sorted nodes never drawn against it: itself and its neighbours, as (starts, nodes)."""
    n = len(graph.nodes)
    own = np.arange(n, dtype=np.int64)
    keys = np.unique(np.concatenate([graph.edges[:, 0] * n + graph.edges[:, 1], own * n + own]))
    source, node = np.divmod(keys, n)
    return np.searchsorted(source, np.arange(n + 1)), node

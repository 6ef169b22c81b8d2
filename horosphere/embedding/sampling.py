"""Which pairs an epoch trains on and which nodes stand against them, as a function of (seed, epoch) alone."""

import numpy as np

__all__ = ["NegativeSampler", "epoch_edges", "epoch_rng"]


def epoch_rng(seed: int, epoch: int) -> np.random.Generator:
    """The generator of one epoch: a run that resumes at an epoch needs no state but the two numbers."""
    return np.random.default_rng([seed, epoch])


def epoch_edges(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The order in which one epoch visits E pairs, (E,) int64.

    Equal weights: each pair once, shuffled. Otherwise systematic sampling: pair e is visited floor or ceil of
    E w_e / sum(w) times, E w_e / sum(w) on average. Source: W. G. Madow, On the theory of systematic sampling, 1949.
    """
    order = rng.permutation(len(weights))
    if np.all(weights == weights[0]):
        return order
    cumulative = np.cumsum(weights[order])
    ticks = (np.arange(len(weights)) + rng.random()) * (cumulative[-1] / len(weights))
    drawn = order[np.minimum(np.searchsorted(cumulative, ticks, side="right"), len(weights) - 1)]
    return rng.permutation(drawn)


class NegativeSampler:
    """Draws nodes that are neither the source nor one of its true neighbours; exact, without rejection.

    Every node has an integer mass. Laid end to end without the excluded nodes of source u, the masses fill
    [0, remaining[u]); a uniform integer there is shifted by the excluded mass before it and looked up.

    Args:
        edges: (E, 2) int64, the true pairs (source, target).
        n_nodes: number of nodes.
        mass: (n_nodes,) non-negative integers, the odds of each node; default 1 each.
    """

    def __init__(self, edges: np.ndarray, n_nodes: int, mass: np.ndarray | None = None) -> None:
        own = np.arange(n_nodes, dtype=np.int64)
        excluded = np.unique(np.concatenate([edges[:, 0] * n_nodes + edges[:, 1], own * n_nodes + own]))
        source, node = np.divmod(excluded, n_nodes)
        self._ends = ends = None if mass is None else np.cumsum(mass.astype(np.int64))
        node_mass = np.ones(len(node), dtype=np.int64) if mass is None else mass[node].astype(np.int64)
        self._total = n_nodes if ends is None else int(ends[-1])
        start = np.searchsorted(source, own)
        # Excluded mass before each excluded node of its source, and where that node is cut out of the line.
        self._before = np.concatenate([[0], np.cumsum(node_mass)])
        before_in_row = self._before[:-1] - self._before[start][source]
        position = node if ends is None else ends[node] - node_mass
        self._cuts = source * (self._total + 1) + position - before_in_row
        self._start = start
        self.remaining = self._total - np.add.reduceat(node_mass, start) if n_nodes else np.zeros(0, np.int64)

    def draw(self, sources: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """(len(sources), count) nodes, drawn with replacement.

        Raises:
            ValueError: if for some source nothing remains to draw (``remaining[source] == 0``).
        """
        room = self.remaining[sources]
        if np.any(room == 0):
            raise ValueError("a source has no node left to draw: filter the sources by `remaining` first")
        ticks = rng.integers(0, room[:, None], size=(len(sources), count))
        line = sources[:, None] * (self._total + 1) + ticks
        passed = np.searchsorted(self._cuts, line.ravel(), side="right").reshape(line.shape)
        ticks += self._before[passed] - self._before[self._start[sources]][:, None]
        return ticks if self._ends is None else np.searchsorted(self._ends, ticks, side="right")

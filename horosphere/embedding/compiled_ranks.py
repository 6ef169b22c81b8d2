"""Ranks in one Poincare ball, compiled: a large graph is scored exactly in about a minute."""

from __future__ import annotations

import numpy as np

from horosphere import _compiled

__all__ = ["ball_ranks"]


@_compiled.njit(fastmath=_compiled.ANY_ORDER)
def ball_ranks(table, sources, starts, targets, curvature):
    """Ranks of the true targets of some sources, and average precisions, as `scores.reconstruction` has them.

    Distances are compared by t = |x - y|^2 / (1 - c |y|^2), which grows with the distance from x: no root and no log.

    Args:
        table: (n, D) float64 points of the ball of curvature -c.
        sources: (S,) rows with at least one target.
        starts, targets: the targets of row u, sorted, are ``targets[starts[u]:starts[u + 1]]``; u is not among them.
        curvature: c > 0.

    Returns:
        Sum of the ranks, and the average precision of each source.
    """
    n, size = table.shape
    gaps = np.empty(n)
    for v in range(n):
        y2 = 0.0
        for i in range(size):
            y2 += table[v, i] * table[v, i]
        gaps[v] = 1.0 - curvature * y2
    total = 0
    precisions = np.empty(len(sources))
    t = np.empty(n)
    for row in range(len(sources)):
        u = sources[row]
        for v in range(n):
            delta2 = 0.0
            for i in range(size):
                delta2 += (table[u, i] - table[v, i]) ** 2
            t[v] = delta2 / gaps[v]
        true = targets[starts[u] : starts[u + 1]]
        positive = np.sort(t[true])
        m = len(positive)
        for v in true:
            t[v] = np.inf
        t[u] = np.inf
        # A candidate counts against every true target that is not nearer than itself.
        beaten = np.zeros(m, np.int64)
        for v in range(n):
            if t[v] <= positive[m - 1]:
                k = 0
                while positive[k] < t[v]:
                    k += 1
                beaten[k] += 1
        rank, precision = 1, 0.0
        for k in range(m):
            rank += beaten[k]
            total += rank
            precision += (k + 1) / (rank + k)
        precisions[row] = precision / m
    return total, precisions

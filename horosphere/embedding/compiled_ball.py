"""The ranking steps of `compiled` for one Poincare ball: no logarithm, no power, and no move that would not show.

On the ball of curvature -1, exp(-d) = 1 / (1 + t + sqrt(t (t + 2))), t = 2 |x - y|^2 / ((1 - |x|^2) (1 - |y|^2)): the
softmax over a pair and its negatives needs neither log nor exp. Late in a training nearly all negatives have a weight
of nothing, and cost the reading of their row.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from horosphere import _compiled, _numerics
from horosphere.embedding.compiled import LONGEST, RIM, _below, _negative

__all__ = ["LEAST_CURVATURE", "ball_pairs", "ball_pairs_threaded"]

UNSEEN = _numerics.UNSEEN_SHARE
# exp(-d) underflows for no pair of the ball's points (radius 23.7) as long as the curvature is not flatter.
LEAST_CURVATURE = 0.01
# Lists of excluded nodes up to this long are walked, longer ones searched.
SHORT = 24

# Sums over coordinates may be reordered: that is what puts them into vector registers.
_jit = _compiled.njit(fastmath=_compiled.ANY_ORDER)
# Inlined, not linked: linked code differs, and its last bits, when a callee is read from the cache.
_inline = _compiled.inline


@_inline
def _uniform_stranger(state, starts, excluded, u, n):
    """As `compiled._stranger`, the same node for the same draw, by a walk without branches where the list is short."""
    lo, hi = starts[u], starts[u + 1]
    rank = _below(state, n - (hi - lo))
    if hi - lo <= SHORT:
        for i in range(lo, hi):
            rank += excluded[i] <= rank
        return rank
    low, high = np.int64(0), hi - lo
    while low < high:
        middle = (low + high) >> 1
        if excluded[lo + middle] - middle <= rank:
            low = middle + 1
        else:
            high = middle
    return rank + low


@_inline
def _tanh_over(z):
    """tanh(z) / z; below 0.01 by its series, whose first term left out is 17/315 z^6 < 6e-14."""
    if z < 0.01:
        z2 = z * z
        return 1.0 - z2 * (1.0 / 3.0 - z2 * (2.0 / 15.0))
    return math.tanh(z) / z


@_inline
def _step_to(table, v, root, own, j, of_own, others, k, of_other, length):
    """table[v] <- exp at table[v] of length * (of_own own[j] + of_other others[k]), in place.

    own[j] is the row as the distances saw it: a node drawn twice has moved once by its second step.
    """
    c = root * root
    size = table.shape[1]
    x2, v2, xv = 0.0, 0.0, 0.0
    for i in range(size):
        step = length * (of_own * own[j, i] + of_other * others[k, i])
        x2 += table[v, i] * table[v, i]
        v2 += step * step
        xv += table[v, i] * step
    if v2 == 0.0 or not math.isfinite(v2):
        return
    norm = math.sqrt(v2)
    gap = max(1.0 - c * x2, RIM)
    half = root * norm / gap
    if half > LONGEST:
        length *= LONGEST / half
        norm, v2, xv, half = norm * LONGEST / half, v2 * (LONGEST / half) ** 2, xv * LONGEST / half, LONGEST
    ratio = _tanh_over(half) / gap
    y2, xy = ratio * ratio * v2, ratio * xv
    below = 1.0 / (1.0 + 2.0 * c * xy + c * c * x2 * y2)
    of_x, of_v = (1.0 + 2.0 * c * xy + c * y2) * below, gap * ratio * below * length
    if not math.isfinite(of_x + of_v):
        return
    new2 = 0.0
    for i in range(size):
        table[v, i] = of_x * table[v, i] + of_v * (of_own * own[j, i] + of_other * others[k, i])
        new2 += table[v, i] * table[v, i]
    limit = (1.0 - RIM) / root
    if new2 > limit * limit:
        shrink = limit / math.sqrt(new2)
        for i in range(size):
            table[v, i] *= shrink


@_jit
def ball_pairs(table, first, pairs, starts, excluded, pool, count, rate, curvature, seed):
    """`compiled.ranking_pairs` on one ball: the same draws, and the same steps but those too short to see.

    Args:
        table: (n, D) float64 points.
        curvature: c > 0 of the ball of curvature -c, at least `LEAST_CURVATURE`.
        first, pairs, starts, excluded, pool, count, rate, seed: as in `compiled.ranking_pairs`.
    """
    size = table.shape[1]
    root = math.sqrt(curvature)
    unit = root == 1.0
    state = np.empty(1, np.uint64)
    state[0] = seed
    nodes = np.empty(count + 1, np.int64)
    near = np.empty(count + 1)
    chord2 = np.empty(count + 1)
    gaps = np.empty(count + 1)
    sines = np.empty(count + 1)
    points = np.empty((count + 1, size))
    source, pull = np.empty((1, size)), np.zeros((1, size))
    total = 0.0
    for row in range(len(pairs)):
        u = pairs[row, 0]
        nodes[0] = pairs[row, 1]
        if len(pool):
            for k in range(1, count + 1):
                nodes[k] = _negative(state, starts, excluded, pool, u, len(table))
        else:
            for k in range(1, count + 1):
                nodes[k] = _uniform_stranger(state, starts, excluded, u, len(table))
        x2 = 0.0
        for i in range(size):
            source[0, i] = table[u, i]
            pull[0, i] = 0.0
            x2 += table[u, i] * table[u, i]
        gx = max(1.0 - curvature * x2, RIM)
        scale = 2.0 * curvature / gx
        normaliser = 0.0
        for k in range(count + 1):
            v = nodes[k]
            delta2, y2 = 0.0, 0.0
            for i in range(size):
                y = table[v, i]
                points[k, i] = y
                delta2 += (source[0, i] - y) ** 2
                y2 += y * y
            gy = max(1.0 - curvature * y2, RIM)
            t = scale * delta2 / gy
            s = math.sqrt(t * (t + 2.0))
            near[k] = 1.0 / (1.0 + t + s) if unit else math.exp(-math.log1p(t + s) / root)
            chord2[k], gaps[k], sines[k] = delta2, gy, s
            normaliser += near[k]
        total += math.log(normaliser / near[0])
        seen = UNSEEN * normaliser
        for k in range(count + 1):
            if (k > 0 and near[k] < seen) or sines[k] == 0.0:
                continue
            weight = -near[k] / normaliser
            if k == 0:
                weight += 1.0
            gy, v = gaps[k], nodes[k]
            at_x, at_y = weight * root * gx / (gy * sines[k]), weight * root * gy / (gx * sines[k])
            own_x = at_x * (1.0 + curvature * chord2[k] / gx)
            for i in range(size):
                pull[0, i] += own_x * source[0, i] - at_x * points[k, i]
            if v >= first:
                own_y = at_y * (1.0 + curvature * chord2[k] / gy)
                _step_to(table, v, root, points, k, own_y, source, 0, -at_y, -rate)
        if u >= first:
            _step_to(table, u, root, pull, 0, 1.0, source, 0, 0.0, -rate)
    return total


@_compiled.njit(parallel=True, fastmath=_compiled.ANY_ORDER)
def ball_pairs_threaded(table, first, pairs, starts, excluded, pool, count, rate, curvature, seeds):
    """`ball_pairs` with a share of the pairs a thread: see `compiled.ranking_pairs_threaded`."""
    threads, edges = len(seeds), len(pairs)
    losses = np.zeros(threads)
    for t in numba.prange(threads):
        share = pairs[edges * t // threads : edges * (t + 1) // threads]
        losses[t] = ball_pairs(table, first, share, starts, excluded, pool, count, rate, curvature, seeds[t])
    return losses.sum()

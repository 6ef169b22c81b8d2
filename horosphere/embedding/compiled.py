"""Stochastic gradient steps on single pairs, compiled by numba: in small dimensions a framework's overhead is the cost.

A space is a row of *parts*, each flat (FLAT), a Poincare ball of curvature -c (BALL) or a sphere of curvature c
(SPHERE), and d^2 is the sum of the parts' d^2. On each of them the Riemannian gradient of d(x, y) at x is a
combination a x + b y, so a pair costs one pass over its coordinates whatever the part.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from horosphere import _compiled, _numerics
from horosphere._compiled import PARALLEL

__all__ = [
    "BALL",
    "FLAT",
    "PARALLEL",
    "SPHERE",
    "distortion_pairs",
    "distortion_pairs_threaded",
    "ranking_pairs",
    "ranking_pairs_threaded",
]

FLAT, BALL, SPHERE = 0, 1, 2
# A row that another thread is halfway through writing may look as if it lay outside of the ball: gaps are never taken
# for less than RIM, and moves that are no numbers are not made.
RIM = _numerics.TRAINING_RIM
_LEAST_SINE = _numerics.LEAST_SINE
# Half the longest step on a ball of curvature -1: from the rim inwards the exponential map divides by (1 - tanh)^2,
# 8e-9 for this one and no number at all for three times it.
LONGEST = 5.0
# Draws from a pool after which a source, all of whose targets in it may be excluded, takes any stranger.
MAX_DRAWS = 64

_jit = _compiled.njit()
# Inlined, not linked: linked code differs, and its last bits, when a callee is read from the cache.
_inline = _compiled.inline


@_inline
def _next(state):
    """splitmix64 (Steele, Lea and Flood 2014): one 64-bit number; state is an array of one."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_inline
def _below(state, n):
    """A number in [0, n); n is far below 2^32, so the bias of the multiplication is below 2^-32."""
    return np.int64(((_next(state) >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))


@_inline
def _excluded_up_to(starts, excluded, u, v):
    """How many of the sorted excluded nodes of u are <= v, and whether v is one of them."""
    low, high = starts[u], starts[u + 1]
    while low < high:
        middle = (low + high) >> 1
        if excluded[middle] <= v:
            low = middle + 1
        else:
            high = middle
    return low - starts[u], low > starts[u] and excluded[low - 1] == v


@_inline
def _stranger(state, starts, excluded, u, n):
    """A node that is not excluded for u, all alike: the r-th of them is r + (how many excluded come before it)."""
    rank = _below(state, n - (starts[u + 1] - starts[u]))
    low, high = np.int64(0), starts[u + 1] - starts[u]
    while low < high:
        middle = (low + high) >> 1
        if excluded[starts[u] + middle] - middle <= rank:
            low = middle + 1
        else:
            high = middle
    return rank + low


@_inline
def _negative(state, starts, excluded, pool, u, n):
    """From the pool, which repeats nodes for their odds, else (no pool, or only excluded nodes met) from all alike."""
    if len(pool):
        for _ in range(MAX_DRAWS):
            v = pool[_below(state, len(pool))]
            if not _excluded_up_to(starts, excluded, u, v)[1]:
                return v
    return _stranger(state, starts, excluded, u, n)


@_inline
def _distance(kind, c, xs, x, ys, y, lo, hi):
    """d of one part and the coefficients (a, b, e, f) of its Riemannian gradients: a x + b y at x, e y + f x at y."""
    delta2 = 0.0
    for i in range(lo, hi):
        delta2 += (xs[x, i] - ys[y, i]) ** 2
    if delta2 == 0.0:
        return 0.0, 0.0, 0.0, 0.0, 0.0
    if kind == FLAT:
        d = math.sqrt(delta2)
        return d, 1.0 / d, -1.0 / d, 1.0 / d, -1.0 / d
    x2, y2 = 0.0, 0.0
    for i in range(lo, hi):
        x2 += xs[x, i] * xs[x, i]
        y2 += ys[y, i] * ys[y, i]
    root = math.sqrt(c)
    if kind == BALL:
        gx, gy = max(1.0 - c * x2, RIM), max(1.0 - c * y2, RIM)
        t = 2.0 * c * delta2 / (gx * gy)
        s = math.sqrt(t * (t + 2.0))
        d = math.log1p(t + s) / root
        at_x, at_y = root * gx / (gy * s), root * gy / (gx * s)
        return d, at_x * (1.0 + c * delta2 / gx), -at_x, at_y * (1.0 + c * delta2 / gy), -at_y
    # unit tangent at x away from y: (cos x - y) / (R sin), on a sphere of radius R
    half = min(1.0, 0.5 * root * math.sqrt(delta2))
    angle = 2.0 * math.asin(half)
    sine = max(2.0 * half * math.sqrt(1.0 - half * half), _LEAST_SINE) / root
    cosine = 1.0 - 2.0 * half * half
    return angle / root, cosine / sine, -1.0 / sine, cosine / sine, -1.0 / sine


@_inline
def _move(kind, c, xs, x, v, lo, hi):
    """x <- exp_x(v), in place."""
    v2 = 0.0
    for i in range(lo, hi):
        v2 += v[i] * v[i]
    if v2 == 0.0 or not math.isfinite(v2):
        return
    if kind == FLAT:
        for i in range(lo, hi):
            xs[x, i] += v[i]
        return
    root = math.sqrt(c)
    norm = math.sqrt(v2)
    x2, xv = 0.0, 0.0
    for i in range(lo, hi):
        x2 += xs[x, i] * xs[x, i]
        xv += xs[x, i] * v[i]
    if kind == BALL:
        gap = max(1.0 - c * x2, RIM)
        ratio = math.tanh(min(root * norm / gap, LONGEST)) / (root * norm)
        y2, xy = ratio * ratio * v2, ratio * xv
        below = 1.0 + 2.0 * c * xy + c * c * x2 * y2
        of_x, of_v = (1.0 + 2.0 * c * xy + c * y2) / below, gap * ratio / below
        limit = (1.0 - RIM) / root
    else:
        of_x, of_v = math.cos(root * norm), math.sin(root * norm) / (root * norm)
        limit = 1.0 / root
    if not math.isfinite(of_x + of_v):
        return
    new2 = 0.0
    for i in range(lo, hi):
        xs[x, i] = of_x * xs[x, i] + of_v * v[i]
        new2 += xs[x, i] * xs[x, i]
    new = math.sqrt(new2)
    if kind == SPHERE or new > limit:
        for i in range(lo, hi):
            xs[x, i] *= limit / new


@_jit
def ranking_pairs(table, first, pairs, starts, excluded, pool, count, rate, kinds, curvatures, bounds, seed):
    """Steps of the ranking loss on pairs in their order, in place; returns the sum of their losses.

    Args:
        table: (n, D) float64 points; rows before ``first`` stay.
        pairs: (E, 2) int64 (source, true neighbour); every source has a node that is not excluded.
        starts, excluded: the nodes never drawn against u, sorted, are ``excluded[starts[u]:starts[u + 1]]``.
        pool: nodes to draw negatives from, with repetition for their odds; empty: all alike.
        count: negatives a pair.
        rate: step length per pair.
        kinds, curvatures, bounds: the parts; part p has coordinates ``bounds[p]:bounds[p + 1]``.
        seed: uint64.
    """
    parts, size = len(kinds), table.shape[1]
    state = np.empty(1, np.uint64)
    state[0] = seed
    nodes = np.empty(count + 1, np.int64)
    points = np.empty((count + 1, size))
    distances = np.empty(count + 1)
    part_d = np.empty((count + 1, parts))
    slopes = np.empty((count + 1, parts, 4))
    pull, step, source = np.empty(size), np.empty(size), np.empty((1, size))
    total = 0.0
    for row in range(len(pairs)):
        u = pairs[row, 0]
        nodes[0] = pairs[row, 1]
        for k in range(1, count + 1):
            nodes[k] = _negative(state, starts, excluded, pool, u, len(table))
        for i in range(size):
            source[0, i] = table[u, i]
            pull[i] = 0.0
        nearest = np.inf
        for k in range(count + 1):
            for i in range(size):
                points[k, i] = table[nodes[k], i]
            d2 = 0.0
            for p in range(parts):
                d, a, b, e, f = _distance(kinds[p], curvatures[p], source, 0, points, k, bounds[p], bounds[p + 1])
                part_d[k, p] = d
                slopes[k, p, 0], slopes[k, p, 1], slopes[k, p, 2], slopes[k, p, 3] = a, b, e, f
                d2 += d * d
            distances[k] = math.sqrt(d2)
            nearest = min(nearest, distances[k])
        normaliser = 0.0
        for k in range(count + 1):
            normaliser += math.exp(nearest - distances[k])
        total += distances[0] - nearest + math.log(normaliser)
        for k in range(count + 1):
            if distances[k] == 0.0:
                continue
            weight = -math.exp(nearest - distances[k]) / normaliser
            if k == 0:
                weight += 1.0
            v = nodes[k]
            for p in range(parts):
                share = weight * part_d[k, p] / distances[k]
                lo, hi = bounds[p], bounds[p + 1]
                for i in range(lo, hi):
                    pull[i] += share * (slopes[k, p, 0] * source[0, i] + slopes[k, p, 1] * points[k, i])
                    step[i] = -rate * share * (slopes[k, p, 2] * points[k, i] + slopes[k, p, 3] * source[0, i])
                if v >= first:
                    _move(kinds[p], curvatures[p], table, v, step, lo, hi)
        if u >= first:
            for i in range(size):
                step[i] = -rate * pull[i]
            for p in range(parts):
                _move(kinds[p], curvatures[p], table, u, step, bounds[p], bounds[p + 1])
    return total


@_compiled.njit(parallel=True)
def ranking_pairs_threaded(table, first, pairs, starts, excluded, pool, count, rate, kinds, curvatures, bounds, seeds):
    """The same with a share of the pairs for each of ``len(seeds)`` threads, which write one table without locks.

    Source: Niu, Recht, Re and Wright (2011), Hogwild. Which write comes last is chance, so the last bits differ.
    """
    threads, edges = len(seeds), len(pairs)
    losses = np.zeros(threads)
    for t in numba.prange(threads):
        share = pairs[edges * t // threads : edges * (t + 1) // threads]
        losses[t] = ranking_pairs(
            table, first, share, starts, excluded, pool, count, rate, kinds, curvatures, bounds, seeds[t]
        )
    return losses.sum()


@_jit
def distortion_pairs(table, first, pairs, lengths, rate, stress, kinds, curvatures, bounds):
    """Steps towards wanted distances on pairs in their order, in place; returns the sum of |d / g - 1| on the way.

    With d the distance and g the wanted length of a pair, each end moves along the geodesic by
    - ``stress``: min(rate / g^2, 1) |d - g| / 2, the step on (d / g - 1)^2 that closes at most the gap;
    - else: min(rate / g, |d - g| / 2), the step on |d / g - 1|, whose slope is 1 / g until it reaches 0.

    Args:
        table: (n, D) float64 points; rows before ``first`` stay.
        pairs: (E, 2) different nodes.
        lengths: (E,) positive.
        rate: in units of length squared.
        stress: which of the two steps.
        kinds, curvatures, bounds: the parts; part p has coordinates ``bounds[p]:bounds[p + 1]``.

    Source: Zheng, Pawar and Goodman, Graph drawing by stochastic gradient descent, 2019 (the stress).
    """
    parts, size = len(kinds), table.shape[1]
    step, ends = np.empty((2, size)), np.empty((2, size))
    part_d, slopes = np.empty(parts), np.empty((parts, 4))
    total = 0.0
    for row in range(len(pairs)):
        u, v, length = pairs[row, 0], pairs[row, 1], lengths[row]
        for i in range(size):
            ends[0, i], ends[1, i] = table[u, i], table[v, i]
        d2 = 0.0
        for p in range(parts):
            d, a, b, e, f = _distance(kinds[p], curvatures[p], ends, 0, ends, 1, bounds[p], bounds[p + 1])
            part_d[p] = d
            slopes[p, 0], slopes[p, 1], slopes[p, 2], slopes[p, 3] = a, b, e, f
            d2 += d * d
        d = math.sqrt(d2)
        error = d / length - 1.0
        total += abs(error)
        if d == 0.0 or error == 0.0:
            continue
        if stress:
            change = 0.5 * min(rate / (length * length), 1.0) * (d - length)
        else:
            change = math.copysign(min(rate / length, 0.5 * abs(d - length)), error)
        for p in range(parts):
            share = -change * part_d[p] / d
            lo, hi = bounds[p], bounds[p + 1]
            for i in range(lo, hi):
                step[0, i] = share * (slopes[p, 0] * ends[0, i] + slopes[p, 1] * ends[1, i])
                step[1, i] = share * (slopes[p, 2] * ends[1, i] + slopes[p, 3] * ends[0, i])
            if u >= first:
                _move(kinds[p], curvatures[p], table, u, step[0], lo, hi)
            if v >= first:
                _move(kinds[p], curvatures[p], table, v, step[1], lo, hi)
    return total


@_compiled.njit(parallel=True)
def distortion_pairs_threaded(table, first, pairs, lengths, rate, stress, kinds, curvatures, bounds, threads):
    """The same with a share of the pairs for each of ``threads`` threads, which write one table without locks."""
    losses = np.zeros(threads)
    edges = len(pairs)
    for t in numba.prange(threads):
        low, high = edges * t // threads, edges * (t + 1) // threads
        share, wanted = pairs[low:high], lengths[low:high]
        losses[t] = distortion_pairs(table, first, share, wanted, rate, stress, kinds, curvatures, bounds)
    return losses.sum()

"""Trees in the hyperbolic plane by construction, in as many digits as their depth asks for."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mpmath
import numpy as np
import scipy.sparse
import torch
from scipy.sparse.csgraph import breadth_first_order, connected_components, dijkstra
from torch import Tensor

from horosphere.embedding.graph import Graph
from horosphere.embedding.lengths import Lengths, as_lengths, symmetric
from horosphere.embedding.mds import hyperbolic_curvature
from horosphere.embedding.scores import DistortionScores
from horosphere.manifolds import PoincareBall, convert

__all__ = ["TreeEmbedding", "embed_tree", "tree_start"]

# Bits beyond those that tell a node's distance to the rim from 0: distances then hold to float64's own digits.
_MARGIN = 100
_LEAST_MARGIN = 60
# Extra bits of the frames, for the roundings on a path of a million nodes.
_GUARD = 32
# How far out, in units of the curvature, a start may reach: float64 moves points of the ball in all directions there.
_START_RADIUS = 12.0
_NOISE = 1e-3
# Norm of a point that would round onto the rim.
_RIM = 1 - 2.0**-52


@dataclass(frozen=True, eq=False)
class TreeEmbedding:
    """A tree in the disk of curvature -tau^2, in fixed-point coordinates: distances there are nearly those of the tree.

    Attributes:
        nodes: the labels of the rows.
        graph: the tree; its weights are the lengths of the edges.
        root: the label at the origin, a centre of the tree.
        tau: length of an edge of length 1 in the disk of curvature -1.
        precision: bits after the point.
        coordinates: (N, 2) object array of Python integers: x 2^precision, x in the unit disk.
    """

    nodes: list[Hashable]
    graph: Graph
    root: Hashable
    tau: float
    precision: int
    coordinates: np.ndarray

    @property
    def manifold(self) -> PoincareBall:
        """The space in which `to_float64` and `distances` measure."""
        return PoincareBall(-(self.tau**2))

    def to_float64(self) -> np.ndarray:
        """(N, 2) points of `manifold`, each coordinate rounded to float64; points that round onto the rim stay inside.

        Radii beyond 36 (in units of the curvature) cannot be told apart in these coordinates.
        """
        return _unit_floats(self.coordinates, self.precision) / self.tau

    def distances(self, rows: np.ndarray | None = None) -> np.ndarray:
        """(len(rows), N) distances to all nodes, in the tree's unit of length, as float64.

        Differences, squares and gaps to the rim are exact integers; only the logarithm at the end is float64's:
        d = arcosh(1 + t), t = 2 |x - y|^2 / ((1 - |x|^2) (1 - |y|^2)).
        """
        x, y = self.coordinates.T
        rows = np.arange(len(x)) if rows is None else np.asarray(rows)
        log_gap = _log((1 << 2 * self.precision) - x * x - y * y)
        out = np.empty((len(rows), len(x)))
        for at, i in enumerate(rows):
            chord2 = (x - x[i]) ** 2 + (y - y[i]) ** 2
            apart = chord2 != 0
            out[at] = 0.0
            log_t = _log(chord2[apart]) + (2 * self.precision + 1) * math.log(2) - log_gap[apart] - log_gap[i]
            # Beyond t = e^40, arcosh(1 + t) is log(2 t).
            near = 2 * np.arcsinh(np.exp(np.minimum(log_t, 40) / 2) / math.sqrt(2))
            out[at, apart] = np.where(log_t > 40, log_t + math.log(2), near)
        return out / self.tau

    def scores(self) -> DistortionScores:
        """Distortion and mean average precision at the full precision, over all pairs; no factor is taken out."""
        lengths, n = Lengths(self.graph, "shortest_path"), len(self.nodes)
        neighbours: list[set[int]] = [set() for _ in range(n)]
        for u, v in self.graph.edges.tolist():
            neighbours[u].add(v)
            neighbours[v].add(u)
        total, least, greatest, precisions = 0.0, np.inf, 0.0, []
        for i in range(n):
            row = np.asarray([i])
            (got,), (wanted,) = self.distances(row), lengths.rows(row)
            if i + 1 < n:
                ratio = got[i + 1 :] / wanted[i + 1 :]
                total += float(np.abs(ratio - 1).sum())
                least, greatest = min(least, float(ratio.min())), max(greatest, float(ratio.max()))
            precisions.append(_average_precision(got, i, sorted(neighbours[i])))
        pairs = n * (n - 1) // 2
        return DistortionScores(
            total / pairs, greatest / least if least else np.inf, float(np.mean(precisions)), n, pairs
        )


def embed_tree(
    graph: Any, n_components: int = 2, *, tau: float | None = None, precision: int | None = None
) -> TreeEmbedding:
    """Place a tree in the hyperbolic plane so that all its distances hold to a relative error of about log(2) / tau.

    A centre of the tree is the origin; around every node its neighbours stand at equal angles, at the length of their
    edge times tau. Two edges that meet at an angle a make a path shorter than their sum by about 2 log(1 / sin(a / 2)),
    whatever tau is: long edges make that small, and cost tau * radius / log 2 bits (the radius of a tree is the length
    of its longest path from the centre).

    Args:
        graph: a tree: anything `as_graph` reads, directions ignored, weights are lengths.
        n_components: 2; the construction is that of the plane.
        tau: length of an edge of length 1 in units of the curvature; default: the longest that ``precision`` holds, and
            40 where that is not given either.
        precision: bits after the point of the coordinates; default: what ``tau`` needs and 100 more.

    Returns:
        A `TreeEmbedding`.

    Raises:
        ValueError: for a graph that is not a tree, n_components other than 2, tau <= 0, a precision too low for tau.

    Source: R. Sarkar, Low distortion Delaunay embedding of trees in hyperbolic plane, 2011; F. Sala, C. De Sa, A. Gu,
    C. Re, Representation tradeoffs for hyperbolic embeddings, 2018, section 3.

    Example:
        >>> import horosphere as hs
        >>> tree = hs.embedding.embed_tree([("b", "a"), ("c", "a"), ("d", "c")], tau=30.0)
        >>> tree.scores().map
        1.0
    """
    if n_components != 2:
        raise ValueError(
            f"the construction is that of the plane, n_components must be 2, got {n_components}; a plane lies in every "
            "space: append zeros"
        )
    graph = as_lengths(graph, "shortest_path")
    matrix = symmetric(graph)
    n, edges = len(graph.nodes), matrix.nnz // 2
    parts = connected_components(matrix, directed=False)[0]
    if edges != n - 1 or parts != 1:
        raise ValueError(
            f"a tree of {n} nodes is connected and has {n - 1} edges, this graph has {edges} edges in {parts} "
            "connected part(s); networkx.minimum_spanning_tree gives a tree of a connected graph"
        )
    root, radius = _centre(matrix)
    needed = 0.0 if radius == 0 else radius / math.log(2)
    if tau is None:
        tau = 40.0 if precision is None or not needed else (precision - _MARGIN) / needed
    if not (math.isfinite(tau) and tau > 0):
        raise ValueError(f"tau must be a finite number > 0, got {tau}; a precision given alone must exceed {_MARGIN}")
    if precision is None:
        precision = math.ceil(tau * needed) + _MARGIN
    if precision < tau * needed + _LEAST_MARGIN:
        raise ValueError(
            f"{precision} bits are too few for tau = {tau} on a tree of radius {radius:g}: "
            f"{math.ceil(tau * needed) + _MARGIN} bits hold it, and these bits tau = "
            f"{max(0.0, (precision - _MARGIN) / needed):.3g}"
        )
    coordinates = _build(matrix, root, tau, precision)
    return TreeEmbedding(graph.nodes, graph, graph.nodes[root], float(tau), precision, coordinates)


def tree_start(graph: Graph, manifold, n_components: int, rng: np.random.Generator) -> Tensor:
    """Starting points for training: a breadth-first tree of the graph from a centre, as `embed_tree` places it.

    Parts that are not connected hang on the centre of the first. Edges have length 1 in the manifold, less where the
    tree would reach too far out for training. In more than two dimensions the tree lies in a plane through the origin;
    noise of 1e-3 lets points leave it.

    Args:
        graph: any graph; only who is joined to whom counts.
        manifold: `PoincareBall`, `Lorentz` or `Stereographic` of negative curvature.
        n_components: dimension, at least 2.

    Returns:
        (n_nodes, stored numbers) float64.

    Raises:
        ValueError: for another manifold or one dimension.
    """
    kappa = hyperbolic_curvature(manifold, "tree")
    if n_components < 2:
        raise ValueError(f"a tree needs at least two dimensions, got n_components = {n_components}")
    matrix = _spanning(symmetric(graph))
    root, radius = _centre(matrix)
    tau = min(math.sqrt(-kappa), _START_RADIUS / max(1.0, radius))
    precision = math.ceil(tau * radius / math.log(2)) + _MARGIN
    plane = _unit_floats(_build(matrix, root, tau, precision), precision) / math.sqrt(-kappa)
    ball = PoincareBall(kappa)
    points = torch.from_numpy(np.pad(plane, ((0, 0), (0, n_components - 2))))
    noise = torch.from_numpy(rng.uniform(-_NOISE, _NOISE, points.shape))
    # Half the gap to the rim is the length of a coordinate step of length 1.
    step = noise * (1 + kappa * (points * points).sum(1, keepdim=True)) / 2
    return convert(ball.projx(ball.expmap(points, step)), ball, manifold)


def _build(matrix, root: int, tau: float, precision: int) -> np.ndarray:
    """Fixed-point coordinates in the unit disk, node by node from the root outwards.

    A node's frame is the isometry z -> (a z + b) / (conj(b) z + conj(a)), |a|^2 - |b|^2 = 1, that takes the origin to
    it and the direction -1 to its parent. A child's frame is that of its parent, times a rotation, times the
    translation along the edge: rotations by p and translations by r are a = e^{i p / 2}, and a = cosh(r / 2),
    b = sinh(r / 2). In this form no digits cancel, however near the rim.
    """
    bits = precision + _GUARD
    order, before = breadth_first_order(matrix, root, directed=False)
    children: list[list[int]] = [[] for _ in order]
    for i in order[1:]:
        children[before[i]].append(int(i))
    place = np.zeros((len(order), 2), dtype=object)
    frames = {int(root): (1 << bits, 0, 0, 0)}
    turns, lengths = lru_cache(None)(_half_turn), lru_cache(None)(_half_length)
    for i in order.tolist():
        frame = frames.pop(i)
        ar, ai, br, bi = frame
        square = ar * ar + ai * ai
        place[i] = ((br * ar - bi * ai) << precision) // square, ((br * ai + bi * ar) << precision) // square
        degree = len(children[i]) + (i != root)
        for k, j in enumerate(children[i], start=0 if i == root else 1):
            # A child of the root: angle 2 pi k / degree; of another node, counted from its parent at pi.
            numerator = 2 * k + (0 if i == root else degree)
            common = math.gcd(numerator, 2 * degree)
            cosine, sine = turns(numerator // common, 2 * degree // common, bits)
            cosh, sinh = lengths(float(matrix[i, j]) * tau, bits)
            xr, xi = (ar * cosine - ai * sine) >> bits, (ar * sine + ai * cosine) >> bits
            yr, yi = (br * cosine + bi * sine) >> bits, (bi * cosine - br * sine) >> bits
            frames[j] = (
                (xr * cosh + yr * sinh) >> bits,
                (xi * cosh + yi * sinh) >> bits,
                (xr * sinh + yr * cosh) >> bits,
                (xi * sinh + yi * cosh) >> bits,
            )
    return place


def _half_turn(numerator: int, denominator: int, bits: int) -> tuple[int, int]:
    """cos and sin of pi numerator / denominator in fixed point: the half angle of a turn by twice that."""
    with mpmath.workprec(bits + 16):
        part = mpmath.mpf(numerator) / denominator
        return int(mpmath.ldexp(mpmath.cospi(part), bits)), int(mpmath.ldexp(mpmath.sinpi(part), bits))


def _half_length(length: float, bits: int) -> tuple[int, int]:
    """cosh and sinh of half a length in fixed point."""
    with mpmath.workprec(bits + 16 + math.ceil(length)):
        half = mpmath.mpf(length) / 2
        return int(mpmath.ldexp(mpmath.cosh(half), bits)), int(mpmath.ldexp(mpmath.sinh(half), bits))


def _centre(matrix) -> tuple[int, float]:
    """A node from which the longest path of a tree is shortest, and the length of that path.

    The node farthest from any node is one end of a longest path, the node farthest from it the other; the longest path
    from any node ends at one of them.
    """
    end = int(np.argmax(dijkstra(matrix, directed=False, indices=0)))
    from_end = dijkstra(matrix, directed=False, indices=end)
    farthest = np.maximum(from_end, dijkstra(matrix, directed=False, indices=int(np.argmax(from_end))))
    centre = int(np.argmin(farthest))
    return centre, float(farthest[centre])


def _spanning(matrix):
    """A breadth-first tree with edges of length 1 from a middle node of each part, all hung on that of the first."""
    parts, labels = connected_components(matrix, directed=False)
    hops = scipy.sparse.csr_array((np.ones(matrix.nnz), matrix.indices, matrix.indptr), shape=matrix.shape)
    pairs: list[tuple[int, int]] = []
    middles: list[int] = []
    for part in range(parts):
        members = np.flatnonzero(labels == part)
        middle = int(members[_centre(hops[members][:, members])[0]])
        order, before = breadth_first_order(hops, middle, directed=False)
        pairs += [(int(before[i]), int(i)) for i in order[1:]]
        pairs += [(middles[0], middle)] if middles else []
        middles.append(middle)
    u, v = np.asarray(pairs, dtype=np.int64).reshape(-1, 2).T
    ends = (np.concatenate([u, v]), np.concatenate([v, u]))
    return scipy.sparse.csr_array((np.ones(2 * len(u)), ends), shape=matrix.shape)


def _unit_floats(coordinates: np.ndarray, precision: int) -> np.ndarray:
    """Fixed-point coordinates as float64, inside the unit disk."""
    one = 1 << precision
    unit = np.asarray([[int(v) / one for v in row] for row in coordinates])
    norm = np.linalg.norm(unit, axis=1, keepdims=True)
    return np.where(norm > _RIM, unit * (_RIM / np.maximum(norm, _RIM)), unit)


def _log(values: np.ndarray) -> np.ndarray:
    return np.frompyfunc(math.log, 1, 1)(values).astype(np.float64)


def _average_precision(distances: np.ndarray, source: int, neighbours: list[int]) -> float:
    """As in `Scores`: ties count against."""
    positive = np.sort(distances[neighbours])
    others = np.delete(distances, [source, *neighbours])
    found = np.arange(1, len(positive) + 1)
    return float(np.mean(found / (found + np.searchsorted(np.sort(others), positive, side="right"))))

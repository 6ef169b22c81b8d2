"""A picture of an embedding: the Poincare disk with geodesic edges, the plane, or a sphere seen from outside."""

import io
import math
import os
import re
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from horosphere import _numerics
from horosphere.embedding.graph import Graph
from horosphere.embedding.io import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["depths", "figure_of", "geodesics", "great_circles", "to_disk", "to_globe", "write_figure"]

_SAMPLES = 48  # Points on an arc: below a pixel of a chord's error in a picture of 2,000 pixels.
_KINDS = ("flat", "ball", "hyperboloid", "sphere", "tangent")
_FAINT = 0.2  # How much of the far side of a sphere shines through.
_SYNSET = re.compile(r"^(.+)\.[nvars]\.\d+$")


def to_disk(points: np.ndarray, manifold: Any, centre: int | None = None) -> np.ndarray:
    """The points in the open unit disk, as complex numbers.

    Two-dimensional hyperbolic points are shown as they are, x -> sqrt(|kappa|) x. In more dimensions the points
    (t, s) of the hyperboloid are moved by an isometry so that their centre (normalised mean) is the origin,
    s is projected onto its two principal axes, (t, s1, s2) is scaled back to the hyperboloid: (t, s1, s2) /
    sqrt(t^2 - s1^2 - s2^2), and shown by s / (1 + t).

    Args:
        points: (N, D) stored numbers.
        manifold: a ball, a stereographic model of negative curvature or a hyperboloid.
        centre: the row that an isometry (a translation along a geodesic) takes to the origin; None: none in two
            dimensions, the centre of all points in more.

    Raises:
        ValueError: for another manifold, or points of fewer than two dimensions.
    """
    kind = _kind(manifold)
    if kind not in ("ball", "hyperboloid"):
        raise ValueError(f"a disk picture needs a hyperbolic space, got {manifold}")
    scaled = points * np.sqrt(-_curvature(manifold))
    dimension = points.shape[1] - (kind == "hyperboloid")
    if dimension < 2:
        raise ValueError(f"a disk picture needs points of at least 2 dimensions, got {dimension}")
    if kind == "ball" and dimension == 2:
        z = scaled[:, 0] + 1j * scaled[:, 1]
        return z if centre is None else (z - z[centre]) / (1 - z[centre].conj() * z)
    if kind == "hyperboloid":
        space = scaled[:, 1:]
    else:
        space = 2 * scaled / (1 - np.sum(scaled**2, axis=1, keepdims=True))
    time = np.sqrt(1 + np.sum(space**2, axis=1))
    if centre is not None:
        time, space = _centred(time, space, slice(centre, centre + 1))
    if dimension > 2:
        if centre is None:
            time, space = _centred(time, space, slice(None))
        origin = space.mean(axis=0) if centre is None else 0.0
        axes = np.linalg.svd(space - origin, full_matrices=False)[2][:2]
        space = space @ axes.T
        # The plane's points have time sqrt(1 + s1^2 + s2^2) once the scale is right; the scale is the norm left over.
        norm = np.sqrt(time**2 - np.sum(space**2, axis=1))
        time, space = time / norm, space / norm[:, None]
    flat = space / (1 + time)[:, None]
    return flat[:, 0] + 1j * flat[:, 1]


def _centred(time: np.ndarray, space: np.ndarray, rows: slice) -> tuple[np.ndarray, np.ndarray]:
    """The Lorentz boost that takes the normalised mean of some of the points to (1, 0)."""
    t, s = time[rows].mean(), space[rows].mean(axis=0)
    norm = np.sqrt(t**2 - s @ s)
    t, s = t / norm, s / norm
    along = space @ s
    return t * time - along, space + np.outer(along / (1 + t) - time, s)


def geodesics(start: np.ndarray, end: np.ndarray, samples: int = _SAMPLES) -> np.ndarray:
    """Points on the geodesics of the unit disk, evenly spaced in hyperbolic length: (E, samples, 2).

    gamma(t) = a + tanh(t artanh |w|) w/|w| (Mobius addition), w = (b - a) / (1 - conj(a) b): an arc of the circle
    through a and b that meets the boundary at right angles.
    """
    a, b = start[:, None], end[:, None]
    w = (b - a) / (1 - a.conj() * b)
    length = np.minimum(np.abs(w), 1 - 2.0**-53)
    direction = np.divide(w, length, out=np.zeros_like(w), where=length > 0)
    p = np.tanh(np.linspace(0, 1, samples) * np.arctanh(length)) * direction
    z = (p + a) / (1 + a.conj() * p)
    return np.stack([z.real, z.imag], axis=-1)


def to_globe(points: np.ndarray, centre: int | None = None) -> np.ndarray:
    """(N, 3) points of the unit sphere, turned so that a row, or the mean direction, points at the reader (axis 2).

    Args:
        points: (N, 3) stored numbers of a sphere of two dimensions.
        centre: the row that is turned to the front; None: the mean.

    Raises:
        ValueError: for points of another dimension.
    """
    if points.shape[1] != 3:
        raise ValueError(f"a picture of a sphere needs points of 2 dimensions, got {points.shape[1] - 1}")
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    to = unit.mean(axis=0) if centre is None else unit[centre]
    norm = np.linalg.norm(to)
    # Two half-turns make the rotation that takes the direction to axis 2 in the plane of both.
    front = np.asarray([0.0, 0.0, 1.0])
    to = to / norm if norm > _numerics.NO_DIRECTION else front
    half = to + front
    if half @ half < _numerics.NO_DIRECTION**2:
        return unit * [1.0, -1.0, -1.0]
    half /= np.linalg.norm(half)
    turned = 2 * np.outer(unit @ half, half) - unit
    return turned * [-1.0, -1.0, 1.0]


def great_circles(start: np.ndarray, end: np.ndarray, samples: int = _SAMPLES) -> np.ndarray:
    """Points on the shortest great circles between unit vectors, evenly spaced: (E, samples, 3).

    gamma(t) = cos(t a) x + sin(t a) w, a the angle, w the unit tangent at x towards y (of antipodes: any).
    """
    angle = 2 * np.arctan2(np.linalg.norm(start - end, axis=1), np.linalg.norm(start + end, axis=1))[:, None, None]
    tangent = end - np.sum(start * end, axis=1, keepdims=True) * start
    length = np.linalg.norm(tangent, axis=1, keepdims=True)
    some = np.cross(start, np.eye(3)[np.argmin(np.abs(start), axis=1)])
    some /= np.linalg.norm(some, axis=1, keepdims=True)
    direction = np.where(
        length > _numerics.NO_DIRECTION, tangent / np.maximum(length, _numerics.SMALLEST_DIVISOR), some
    )
    t = np.linspace(0, 1, samples)[:, None] * angle
    return np.cos(t) * start[:, None] + np.sin(t) * direction[:, None]


def depths(graph: Graph, radius: np.ndarray) -> np.ndarray:
    """Steps from the top: from the nodes that are only targets (parents); in a component without one, from its
    innermost node."""
    n = len(graph.nodes)
    below: list[list[int]] = [[] for _ in range(n)]
    around: list[list[int]] = [[] for _ in range(n)]
    for u, v in graph.edges.tolist():
        below[v].append(u)
        around[u].append(v)
        around[v].append(u)
    depth = np.full(n, -1)
    is_child = np.bincount(graph.edges[:, 0], minlength=n) > 0
    roots = [i for i in range(n) if not is_child[i]]
    _spread(depth, roots, below)
    for i in np.argsort(radius, kind="stable").tolist():
        if depth[i] < 0:
            _spread(depth, [i], around)
    return depth


def _spread(depth: np.ndarray, roots: list[int], neighbours: list[list[int]]) -> None:
    depth[roots] = 0
    queue = deque(roots)
    while queue:
        i = queue.popleft()
        for j in neighbours[i]:
            if depth[j] < 0:
                depth[j] = depth[i] + 1
                queue.append(j)


def figure_of(
    points: np.ndarray, manifold: Any, graph: Graph, *, labels: bool = True, centre: int | None = None
) -> "Figure":
    """Draw nodes, edges and names.

    Hyperbolic spaces appear as the Poincare disk (`to_disk`), flat space as the plane of its two principal axes (two
    dimensions: as it is), the two-dimensional sphere from afar, its other side faint (`to_globe`), products and
    manifolds of your own as the tangent space at the origin, or at the row ``centre``. Colour is depth below the top of
    the hierarchy, size the number of direct children; edges are the given pairs, not their closure.

    Args:
        points: (N, D) stored numbers.
        manifold: hyperbolic, Euclidean, a sphere of two dimensions, a product, or one of your own.
        graph: the given pairs.
        labels: write names, the best connected nodes first, where they fit.
        centre: the row that an isometry takes to the middle of the picture.

    Returns:
        A `matplotlib.figure.Figure` with an Agg canvas; pyplot and its state are not touched.

    Raises:
        ValueError: for a projected sphere, for points of fewer than two dimensions, and for points that are not finite
            or so far out that float64 cannot place them in the picture.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle

    kind = _kind(manifold)
    if kind == "tangent":
        points, kind = _tangent(manifold, points, centre), "flat"
    front = np.ones(len(points), dtype=bool)
    _check_finite(points, graph, "is not finite")
    if kind == "sphere":
        globe = to_globe(points, centre)
        z, front = globe[:, 0] + 1j * globe[:, 1], globe[:, 2] >= 0
        depth = depths(graph, -globe[:, 2])
    else:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            try:
                z = _plane(points, centre) if kind == "flat" else to_disk(points, manifold, centre)
            except np.linalg.LinAlgError:  # The principal axes of numbers that have overflowed.
                z = np.full(len(points), np.nan)
            _check_finite(4 * z, graph, "lies too far out to be drawn")  # 4: the axes have margins.
        depth = depths(graph, np.abs(z))
    pairs = np.unique(np.sort(graph.edges, axis=1), axis=0)
    children = np.bincount(graph.edges[:, 1], minlength=len(z))

    figure = Figure(figsize=(10, 10), dpi=200, layout=None)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_aspect("equal")
    colours = colormaps["viridis"](0.95 * depth / max(1, depth.max()))
    if kind != "flat":
        axes.add_patch(Circle((0, 0), 1, facecolor="#fbfbfd", edgecolor="#3a3a44", linewidth=1.2, zorder=0))
    if kind == "flat":
        ends = z[pairs]
        arcs = np.stack([ends.real, ends.imag], axis=-1)
    elif kind == "sphere":
        arcs = great_circles(globe[pairs[:, 0]], globe[pairs[:, 1]])
    else:
        arcs = geodesics(z[pairs[:, 0]], z[pairs[:, 1]])
    lower = np.where(depth[pairs[:, 0]] > depth[pairs[:, 1]], pairs[:, 0], pairs[:, 1])
    alpha = float(np.clip(20 / np.sqrt(len(pairs)), 0.3, 0.8))
    order = np.argsort(-depth, kind="stable")
    sizes = 5 + 5 * np.sqrt(children)

    def edges(lines: np.ndarray, opacity: float) -> None:
        axes.add_collection(LineCollection(list(lines), colors=colours[lower], linewidths=0.6, alpha=opacity, zorder=1))

    def nodes(rows: np.ndarray, opacity: float | None) -> None:
        axes.scatter(
            z.real[rows],
            z.imag[rows],
            s=sizes[rows],
            c=colours[rows],
            linewidths=0.3,
            edgecolors="white",
            alpha=opacity,
            zorder=2,
        )

    if kind == "sphere":
        # What is not a number is not drawn: each side of the sphere draws its part of every edge.
        far = arcs[..., 2:] < 0
        edges(np.where(far, arcs[..., :2], np.nan), _FAINT * alpha)
        nodes(order[~front[order]], _FAINT)
        edges(np.where(far, np.nan, arcs[..., :2]), alpha)
    else:
        edges(arcs, alpha)
    nodes(order[front[order]], None)
    if kind == "flat":
        axes.margins(0.08)
    else:
        limit = 1.2 if labels and kind != "sphere" else 1.02
        axes.set_xlim(-limit, limit)
        axes.set_ylim(-limit, limit)
    if labels:
        from horosphere.embedding.labels import write_labels

        names = [short_name(label) for label in graph.nodes]
        order = np.lexsort((depth, -children))
        if centre is not None:
            order = np.concatenate([[centre], order[order != centre]])
        write_labels(axes, z, names, priority=order[front[order]], on_disk=kind in ("ball", "hyperboloid"))
    return figure


def _check_finite(points: np.ndarray, graph: Graph, problem: str) -> None:
    bad = np.flatnonzero(~np.isfinite(points).reshape(len(points), -1).all(axis=1))
    if bad.size:
        raise ValueError(
            f"the point of {graph.nodes[bad[0]]!r} {problem} (one of {bad.size}): there is no picture of it"
        )


def short_name(label: Any) -> str:
    """How a label is written: WordNet's dog.n.01 as dog, underscores as blanks."""
    text = str(label)
    match = _SYNSET.match(text)
    return (match[1] if match else text).replace("_", " ")


def check_ending(path: str | os.PathLike) -> str:
    """The picture format that a file's ending names.

    Raises:
        ValueError: for an ending that matplotlib does not know.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    ending = os.path.splitext(os.fspath(path))[1].lower().lstrip(".")
    known = FigureCanvasAgg.get_supported_filetypes()
    if ending not in known:
        raise ValueError(f"{os.fspath(path)}: the ending must name a picture format, one of {', '.join(sorted(known))}")
    return ending


def write_figure(figure: Any, path: str | os.PathLike) -> None:
    """Write a figure, whole or not at all, in the format of the file's ending (`check_ending`)."""
    ending = check_ending(path)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=ending, bbox_inches="tight", pad_inches=0.1)
    write_atomically(path, buffer.getvalue())


def _plane(points: np.ndarray, centre: int | None) -> np.ndarray:
    if centre is not None:
        points = points - points[centre]
    if points.shape[1] < 2:
        raise ValueError(f"a picture needs points of at least 2 dimensions, got {points.shape[1]}")
    if points.shape[1] > 2:
        centred = points - points.mean(axis=0)
        points = (centred if centre is None else points) @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    return points[:, 0] + 1j * points[:, 1]


def _curvature(manifold: Any) -> float:
    """kappa as a number, also where it is learned; ValueError where it is not that of a hyperbolic space."""
    from horosphere.manifolds.chord import resolve

    kappa = getattr(resolve(manifold)[0], "kappa", math.nan)
    kappa = kappa.item() if hasattr(kappa, "item") else kappa
    if not kappa < 0:
        raise ValueError(f"a picture of the Poincare disk needs an attribute kappa < 0 of the manifold {manifold}")
    return kappa


def _kind(manifold: Any) -> str:
    from horosphere.manifolds import hooks

    kind = hooks.picture(manifold)
    if kind == "none":
        raise ValueError(
            "pictures are drawn of hyperbolic (kappa < 0), Euclidean and Sphere embeddings and of manifolds of your "
            f"own, not of {manifold}"
        )
    if kind not in _KINDS:
        raise ValueError(f"picture() of {manifold} must return {', '.join(_KINDS)} or none, got {kind!r}")
    return kind


def _tangent(manifold: Any, points: np.ndarray, centre: int | None) -> np.ndarray:
    """Logarithms of the points at the origin, or at the point ``centre``."""
    import torch

    from horosphere.manifolds import hooks

    x = torch.from_numpy(points)
    start = hooks.origin(manifold, *x.shape, dtype=x.dtype, device="cpu") if centre is None else x[centre].expand_as(x)
    other = 'a picture() that is not "tangent"'
    return hooks.log(manifold, start, x, "a picture of points by their logarithms", other).detach().numpy()

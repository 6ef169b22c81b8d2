"""Names of nodes where they fit: greedy, best first, no two overlapping."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import RendererBase
    from matplotlib.transforms import Bbox

__all__ = ["write_labels"]

_RIM = 0.93  # Beyond this radius a name is written outside the disk, along the radius.


def write_labels(
    axes: "Axes", z: np.ndarray, names: list[str], priority: np.ndarray, *, on_disk: bool, most: int = 150
) -> None:
    """Write names into the axes, in the order of `priority`, each only if it touches none written before.

    Args:
        axes: matplotlib axes with final limits, on an Agg canvas.
        z: (N,) complex positions.
        names: the texts.
        priority: node indices, most important first.
        on_disk: names of points near the unit circle are written outside of it.
        most: no more names than this inside, and as many outside.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = axes.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    renderer = canvas.get_renderer()
    axes.apply_aspect()
    frame = axes.get_window_extent(renderer)
    boxes: list[tuple[float, float, float, float]] = []
    angles: list[float] = []
    inside = 0
    rank = 0
    size_outside = 5.5
    # Two names along neighbouring radii touch when they are nearer than one line of text.
    line = size_outside * 1.25 / 72 * axes.figure.dpi / (frame.width / np.ptp(axes.get_xlim()))
    for i in priority.tolist():
        if on_disk and abs(z[i]) > _RIM:
            angle = float(np.angle(z[i]))
            gap = min((abs((angle - other + np.pi) % (2 * np.pi) - np.pi) for other in angles), default=np.pi)
            if len(angles) < most and gap > line:
                _radial(axes, angle, names[i], size_outside)
                angles.append(angle)
        elif inside < most and _beside(axes, z[i], names[i], 9.0 if rank < 12 else 7.0, boxes, frame, renderer):
            inside += 1
        rank += 1


def _radial(axes: "Axes", angle: float, name: str, size: float) -> None:
    degrees = np.degrees(angle)
    flip = abs(degrees) > 90
    axes.text(
        1.012 * np.cos(angle),
        1.012 * np.sin(angle),
        name,
        fontsize=size,
        color="#3a3a44",
        rotation=degrees + 180 * flip,
        rotation_mode="anchor",
        ha="right" if flip else "left",
        va="center",
        parse_math=False,
    )


def _beside(
    axes: "Axes",
    z: complex,
    name: str,
    size: float,
    boxes: list[tuple[float, float, float, float]],
    frame: "Bbox",
    renderer: "RendererBase",
) -> bool:
    from matplotlib.patheffects import withStroke

    for dx, dy, ha, va in (
        (4, 0, "left", "center"),
        (-4, 0, "right", "center"),
        (0, 4, "center", "bottom"),
        (0, -4, "center", "top"),
    ):
        text = axes.annotate(
            name,
            (z.real, z.imag),
            xytext=(dx, dy),
            textcoords="offset points",
            fontsize=size,
            ha=ha,
            va=va,
            color="#16161d",
            zorder=3,
            parse_math=False,
            path_effects=[withStroke(linewidth=1.8, foreground="white")],
        )
        box = text.get_window_extent(renderer).extents
        fits = box[0] >= frame.x0 and box[1] >= frame.y0 and box[2] <= frame.x1 and box[3] <= frame.y1
        if fits and not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in boxes):
            boxes.append((box[0], box[1], box[2], box[3]))
            return True
        text.remove()
    return False

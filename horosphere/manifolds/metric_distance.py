"""Distances between tokens each of which has a metric of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from horosphere._numerics import without_autocast
from horosphere._points import as_points
from horosphere.kernels import operators
from horosphere.kernels.geometry import MetricPairs
from horosphere.kernels.low_rank.pair import ENDS, MetricPair
from horosphere.manifolds.pairwise import PRECISIONS
from horosphere.manifolds.token_metric import TokenMetric


def metric_sqdist(
    q: Tensor,
    k: Tensor,
    g_q: TokenMetric | None,
    g_k: TokenMetric | None,
    *,
    end: str = "mean",
    precision: str = "auto",
    impl: str = "auto",
) -> Tensor:
    r"""Squared lengths of all differences under per-token metrics, :math:`\delta_{ij} = q_i - k_j`.

    .. math::
        d_{ij}^2 = \tfrac12 (s_i^2 + s_j^2) |\delta_{ij}|^2 + \tfrac12 |U_i^T \delta_{ij}|^2
        + \tfrac12 |U_j^T \delta_{ij}|^2

    at "mean"; :math:`\delta^T G_i \delta` at "query", :math:`\delta^T G_j \delta` at "key". A *surrogate* of the
    squared geodesic length: right up to a factor :math:`1 + O(|\delta|^2)` where the metrics come from a smooth field
    (:math:`1 + O(|\delta|)` for one end), symmetric at "mean", 0 only at coincidence; but no metric. With G = 100, 1,
    100 at 0, 1, 2 on a line the distance from 0 to 2 is 20, by way of 1 it is 14.2.

    Work O(N M D R), memory that of the matrix, forward and backward.

    Args:
        q: points (..., N, D).
        k: points (..., M, D); batch dimensions broadcast.
        g_q: metrics of shape (..., N), not used (None is accepted) for end="key".
        g_k: metrics of shape (..., M), not used for end="query".
        end: whose metric measures.
        precision: "auto" and "exact" work in float64, and pairs near coincidence from differences: relative error of
            d^2 at most 2e-5 (float32 points) or 2e-12 (float64). "fast" multiplies matrices in the points' own type.
        impl: "auto", "reference", "tiled" or "triton", as in :func:`horosphere.cdist`.

    Returns:
        (..., N, M) in the points' type. Gradients flow to q, k and the scales and factors of the metrics, twice if
        wanted.

    Raises:
        TypeError: no floating point tensors, or no TokenMetric.
        ValueError: shapes that do not fit, an unknown end, precision or impl.
    """
    f, dtype = metric_pair(q, k, g_q, g_k, end)
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    resolve = precision != "fast"
    with without_autocast(f.q.device):
        out, _ = operators.sqdist(MetricPairs(f), squared=True, resolve=resolve, impl=impl)
        return out.to(dtype)


def metric_pair(
    q: Tensor,
    k: Tensor,
    g_q: TokenMetric | None,
    g_k: TokenMetric | None,
    end: str,
    names: tuple[str, str] = ("q", "k"),
) -> tuple[MetricPair, torch.dtype]:
    """The arguments checked and brought to the form that kernels take, and the type of the points."""
    if end not in ENDS:
        raise ValueError(f"end must be one of {ENDS}, got {end!r}")
    points = {name: as_points(t, name) for name, t in zip(names, (q, k), strict=True)}
    sides: list[Tensor | None] = []
    for (name, t), metric, used in zip(points.items(), (g_q, g_k), (end != "key", end != "query"), strict=True):
        if t.dim() < 2:
            raise ValueError(f"{name} must hold points as rows, shape (..., length, D); got {tuple(t.shape)}")
        if not used:
            sides += [None, None]
            continue
        label = f"g_{name[0]}"
        if not isinstance(metric, TokenMetric):
            raise TypeError(f"{label} must be a TokenMetric for end={end!r}, got {type(metric).__name__}")
        if metric.dim != t.shape[-1] or not metric.shape or metric.shape[-1] not in (1, t.shape[-2]):
            raise ValueError(
                f"{name} of shape {tuple(t.shape)} needs a metric of dimension {t.shape[-1]} for each of its rows; "
                f"{label} has shape {tuple(metric.shape)} and dimension {metric.dim}"
            )
        rows = torch.Size((*metric.shape[:-1], t.shape[-2]))
        sides += [metric.scale.expand(rows), metric.factor.expand(*rows, *metric.factor.shape[-2:])]
    a, b = points.values()
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"{names[0]} and {names[1]} must have points of one size, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    for other in (b, *sides):
        if other is not None and other.device != a.device:
            raise ValueError(
                f"{names[0]} is on {a.device} and another argument on {other.device}; move them to one device"
            )
    f = MetricPair(a, b, *sides)
    try:
        f.batch  # noqa: B018 - asked for its error
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in f.tensors())
        raise ValueError(f"batch dimensions of points and metrics do not broadcast: {shapes}") from error
    return f, torch.promote_types(a.dtype, b.dtype)

"""An opt-in check of points, which costs a pass over them: other functions give NaN or plausible numbers instead."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horosphere._points import as_points
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve


def validate_points(x: Tensor, manifold: geoopt.Manifold, *, name: str = "x") -> Tensor:
    """x as a tensor if every row of it is a point of the manifold, by its own ``check_point_on_manifold``.

    Args:
        x: points (..., N, D), or one point (D,).
        manifold: any geoopt.Manifold whose points are vectors.
        name: what the message calls x.

    Returns:
        x, so that a call can be wrapped: ``cdist(validate_points(x, m), y, m)``.

    Raises:
        ValueError: a row is no point; the message gives the first such index and why.
        TypeError: x holds no real numbers, or no manifold.
    """
    x = as_points(x, name)
    resolve(manifold)
    rows = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if not len(rows) or _fault(rows, manifold) is None:
        return x
    first, last = 0, len(rows)  # halved: a fault lies in rows[first:last], none before
    while last - first > 1:
        middle = (first + last) // 2
        if _fault(rows[first:middle], manifold) is not None:
            last = middle
        else:
            first = middle
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first, device="cpu"), x.shape[:-1]))
    raise ValueError(f"{name}{list(index)} is no point of {manifold}: {_fault(rows[first:last], manifold)}")


def _fault(rows: Tensor, manifold: geoopt.Manifold) -> str | None:
    good, why = manifold.check_point_on_manifold(rows, explain=True)
    if good and not bool(rows.isfinite().all()):
        return "a coordinate is not finite"
    return None if good else str(why)

"""Means of values that lie on a manifold, as linear sums: lift each value, average, settle the average.

The weighted ambient midpoint of horosphere.midpoint is a function of one weighted sum, so the streaming kernels compute
it like any other mean of vectors. A manifold without ``lift`` and ``settle`` is averaged in its tangent space at the
origin (:mod:`horosphere.manifolds.hooks`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from horosphere._numerics import without_autocast
from horosphere.attention.arguments import Arguments
from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import check_manifold


def averaged(
    args: Arguments,
    value_manifold: geoopt.Manifold | None,
    return_lse: bool,
    attend: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> Tensor | tuple[Tensor, Tensor]:
    """What an attention returns; ``attend`` takes values (..., M, E) to their weighted means and the lse."""
    if value_manifold is not None:
        check_manifold(value_manifold, "value_manifold")
    values = args.value if value_manifold is None else hooks.lift(value_manifold, args.value)
    with without_autocast(args.query.device):
        out, lse = attend(values)
        if value_manifold is not None:
            out = hooks.settle(value_manifold, out, args.value.shape[-1])
    out = args.joined(out, 2).to(args.value.dtype)
    return (out, args.joined(lse, 1)) if return_lse else out

"""RiemannianAdam's step in one pass over a table, compiled by numba: large tables of points on CPUs.

As tensor operations a step reads and writes the table some sixty times, most of them in float64. Here a thread takes
some rows at a time, which stay in its cache from the gradient to the finished update. The tensor operations of
:class:`~horosphere.optim.RiemannianAdam` are the reference, and serve all that this does not.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._libtorch import libtorch
from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt

# Numbers that a gradient holds from which on the first step's import of numba and compilation, some seconds, may pay.
COMPILED = 2**15
# Numbers of a thread's rows at a time, in each of four arrays: within a first- or second-level cache. Lanes of them.
BLOCK, MOST_LANES, LEAST_LANES = 2**11, 64, 8
STATE = {"step", "exp_avg", "exp_avg_sq"}

_log = logging.getLogger("horosphere.optim")


def refuses(
    p: Tensor, rows: Tensor | None, grad: Tensor, manifold: geoopt.Manifold, group: Mapping[str, Any], state: Any
) -> str | None:
    """Why the loop does not serve a step, None where it does."""
    if grad.numel() < COMPILED:
        return f"the gradient holds {grad.numel()} numbers, fewer than {COMPILED}, which would not pay for compilation"
    reason = next((why for true, why in _reasons(p, rows, grad, manifold, group, state or {}) if true), None)
    _log.debug("step of %s: %s", tuple(p.shape), "numba" if reason is None else f"tensors ({reason})")
    return reason


def _reasons(
    p: Tensor,
    rows: Tensor | None,
    grad: Tensor,
    manifold: geoopt.Manifold,
    group: Mapping[str, Any],
    state: Mapping[str, Tensor],
) -> Iterator[tuple[bool, str]]:
    point = p.detach()
    yield group["amsgrad"] or group["retraction"], "it has no amsgrad and no retraction"
    yield torch.compiler.is_compiling() or _numerics.transformed(), "a transformation of torch watches"
    yield bool(state) and set(state) != STATE, "the state is another optimizer's"
    moments = [state["exp_avg"], state["exp_avg_sq"]] if state else []
    shapes = [p.shape, torch.Size((*p.shape[:-1], 1))] if state else []
    yield [t.shape for t in moments] != shapes, "the state is another optimizer's"
    tensors = [point, grad, *moments]
    yield any(type(t) is not Tensor for t in tensors), "a tensor is of another class"
    yield any(t.device.type != "cpu" for t in tensors), "its loop runs on CPUs"
    yield p.dtype not in (torch.float32, torch.float64), f"its loop takes float32 and float64, not {p.dtype}"
    yield any(t.dtype != p.dtype for t in tensors), "the types of points, gradient and moments differ"
    yield not all(t.is_contiguous() for t in (point, *moments)), "points or moments are strided"
    yield hooks.row_maps(manifold) is None, f"its loop does not know the maps of {manifold}"
    yield libtorch() is None, "this build of torch does not offer its threads"
    yield rows is not None and not _within(rows, len(p)), "a row is not there"


def _within(rows: Tensor, size: int) -> bool:
    low, high = rows.aminmax()
    return int(low) >= 0 and int(high) < size


def step(
    p: Tensor,
    rows: Tensor | None,
    grad: Tensor,
    manifold: geoopt.Manifold,
    group: Mapping[str, Any],
    state: Mapping[str, Tensor],
) -> tuple[int, int, int]:
    """Step ``state["step"] + 1``, in place, of a call that :func:`refuses` lets through; the count is left alone.

    Returns how many rows the gradient touches, how many of its rows are not finite, and how many rows, those among
    them, stayed where they were.
    """
    from horosphere.optim._fused_loops import GIVEN, steps

    torch_library, maps = libtorch(), hooks.row_maps(manifold)
    assert torch_library is not None and maps is not None  # refuses() has looked
    kind, kappa = maps
    point, dim = p.detach(), p.shape[-1]
    grad = grad.contiguous()
    index = None if rows is None else rows.contiguous()
    count = state["step"].item() + 1
    beta1, beta2 = group["betas"]
    shares = torch.get_num_threads()
    bad = np.zeros((shares, 2), np.int64)
    given = {
        "wide": p.dtype == torch.float64,
        "shares": shares,
        "count": grad.numel() // dim,
        "size": p.numel() // dim,
        "dim": dim,
        "lanes": max(LEAST_LANES, min(MOST_LANES, BLOCK // dim)),
        "points": point.data_ptr(),
        "grads": grad.data_ptr(),
        "firsts": state["exp_avg"].data_ptr(),
        "seconds": state["exp_avg_sq"].data_ptr(),
        "rows": 0 if index is None else index.data_ptr(),
        "bad": bad.ctypes.data,
        "kappa": kappa,
        "limit": limit(kind, kappa, p.dtype),
        "beta1": beta1,
        "beta2": beta2,
        "rate": -float(group["lr"]) / (1 - beta1**count),
        "bias": 1 - beta2**count,
        "eps": group["eps"],
        "decay": group["weight_decay"] if group["decay_points"] else 0.0,
    }
    record = np.zeros(1, GIVEN)
    for name, value in given.items():
        record[name] = value
    loop = steps(kind, np.float64 if p.dtype == torch.float64 else np.float32)
    if torch_library.parallel_for(0, shares, 1, loop.address, record.ctypes.data):
        raise RuntimeError("torch_parallel_for failed")
    # what autograd has kept of them for a backward pass is not theirs any more
    torch.autograd.graph.increment_version((point, state["exp_avg"], state["exp_avg_sq"]))
    return given["count"], *(int(n) for n in bad.sum(0))


def limit(kind: str, kappa: float, dtype: torch.dtype) -> float:
    """Norm at which points of a ball, or spatial parts, are kept, and of the points of a sphere."""
    radius = abs(kappa) ** -0.5
    if kind == "ball":
        return (1 - _numerics.ball_margin(dtype)) * radius
    return math.sinh(_numerics.hyperboloid_max_radius(dtype)) * radius if kind == "hyperboloid" else radius

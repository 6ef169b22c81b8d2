"""Which rows of a parameter a gradient touches, reading and writing only those; which points are finite."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt


def gradient_of(parameter: Tensor) -> Tensor:
    """The gradient of a parameter that has one."""
    grad = parameter.grad
    assert grad is not None  # a step leaves out those that have none
    return grad


def touched(parameter: Tensor, grad: Tensor, ndim: int) -> tuple[Tensor | None, Tensor]:
    """The rows a gradient touches (None: all) and their gradients, duplicate rows of a sparse one summed.

    A sparse gradient whose rows are not just one point each (``ndim`` dimensions) becomes dense.
    """
    if not grad.is_sparse:
        return None, grad
    if grad.sparse_dim() != 1 or parameter.dim() - 1 != ndim:
        return None, grad.to_dense()
    grad = grad.coalesce()
    return grad.indices()[0], grad.values()


def at_rows(manifold: geoopt.Manifold, rows: Tensor | None) -> geoopt.Manifold:
    """The manifold of some rows of a parameter: another one only where each row has a metric of its own."""
    return manifold if rows is None else hooks.at_rows(manifold, rows)


def read(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor.detach() if rows is None else tensor.detach().index_select(0, rows)


def write(tensor: Tensor, rows: Tensor | None, values: Tensor, good: Tensor | None) -> None:
    """Write rows back; where ``good`` (a mask over points, None: all) is False the old numbers stay."""
    if good is not None:
        values = torch.where(over_points(good, values), values, read(tensor, rows))
    if rows is None:
        tensor.copy_(values)
    else:
        tensor.index_copy_(0, rows, values)


def zeros_for(parameter: Tensor, rows: Tensor | None, values: Tensor) -> Tensor:
    """Zeros for a state that holds for every point of a parameter what ``values`` holds for the read ones."""
    shape = values.shape if rows is None else parameter.shape[:1] + values.shape[1:]
    return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)


def over_points(good: Tensor, values: Tensor) -> Tensor:
    """A mask over points, shaped to broadcast against numbers of those points."""
    return good.reshape(good.shape + (1,) * (values.dim() - good.dim()))


def finite_points(ndim: int, *tensors: Tensor) -> Tensor | None:
    """None when every number is finite (the usual case: one cheap pass), else a mask over the points.

    One NaN or infinity makes a sum non-finite; a sum of finite numbers may overflow: the mask settles that.
    """
    if math.isfinite(sum((t.sum() for t in tensors[1:]), tensors[0].sum()).item()):
        return None
    masks = [torch.isfinite(t) for t in tensors]
    if ndim:
        masks = [mask.flatten(mask.dim() - ndim).all(-1) for mask in masks]
    good = functools.reduce(torch.logical_and, masks)
    return None if bool(good.all()) else good

"""Maps worked in float64: a decorator that widens the points that come in and rounds what goes out.

In float32 the textbook maps lose most of their digits near the rim of a ball or far out on a hyperboloid. Points are
few compared with pairs, so their maps are worked in float64 throughout and rounded once.
"""

from __future__ import annotations

import functools
import inspect

import torch
from torch import Tensor

from horosphere import _numerics


def as_points(value, name: str) -> Tensor:
    """value as a floating tensor: arrays and lists are converted; anything else is a TypeError naming the argument."""
    if isinstance(value, Tensor):
        if not value.dtype.is_floating_point:
            raise TypeError(
                f"{name} must be a floating point tensor, got {value.dtype}; convert it with .to(torch.float32)"
            )
        return value
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a tensor or convertible to one, got {type(value).__name__}") from error
    return tensor if tensor.dtype.is_floating_point else tensor.to(torch.get_default_dtype())


def in_float64(method):
    """Widen the tensor arguments of a manifold method to float64 and round its result to their common dtype."""
    names = [name for name in inspect.signature(method).parameters if name != "self"]

    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        values = dict(zip(names, args, strict=False))
        values.update(kwargs)
        dtype = None
        for name, value in values.items():
            if name in ("keepdim", "dim") or value is None:
                continue
            tensor = as_points(value, name)
            dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
            values[name] = tensor.to(_numerics.compute_dtype(tensor.dtype))
        out = method(self, **values)
        return out if dtype == torch.float64 else out.to(dtype)

    return wrapped

"""Maps worked in float64: a decorator that widens the points that come in and rounds what goes out.

In float32 the textbook maps lose most of their digits near the rim of a ball or far out on a hyperboloid. Points are
few compared with pairs, so their maps are worked in float64 throughout and rounded once.
"""

from __future__ import annotations

import functools
import inspect

import torch

from horosphere import _numerics
from horosphere._points import as_points


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

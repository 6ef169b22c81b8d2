"""The one reader of points: what every public function makes of the points that it is given."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def as_points(value: object, name: str) -> Tensor:
    """``value`` as a dense, real, floating tensor; a tensor keeps its device, anything else goes to the CPU.

    Read are tensors, NumPy arrays (of any stride and byte order, read-only too), nested lists of numbers, and whatever
    offers ``to_numpy`` (pandas, polars). Integers become the default floating type. The default device plays no part.

    Raises:
        TypeError: bool, complex or sparse points, frames with columns that hold no numbers, and foreign types. The
            message names the argument.
    """
    tensor = value if isinstance(value, Tensor) else _read(value, name)
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}; convert it with .to_dense()")
    if tensor.dtype.is_floating_point:
        return tensor
    if tensor.dtype == torch.bool or tensor.dtype.is_complex or tensor.is_quantized:
        raise TypeError(f"{name} must hold real numbers, got {tensor.dtype}")
    return tensor.to(torch.get_default_dtype())


def _read(value: object, name: str) -> Tensor:
    if hasattr(value, "toarray"):
        raise TypeError(f"{name} must be dense, got the sparse {type(value).__name__}; convert it with .toarray()")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must have every number, got a masked array; fill it with .filled(number)")
    to_numpy = getattr(value, "to_numpy", None)
    try:
        if callable(to_numpy):
            return _from_array(np.asarray(to_numpy()), name, type(value).__name__)
        if isinstance(value, np.ndarray):
            return _from_array(value, name, "array")
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], np.ndarray):
            return _from_array(np.asarray(value), name, "list of arrays")
        return torch.as_tensor(value, device="cpu")
    except (ValueError, RuntimeError, KeyError, OverflowError, TypeError) as error:
        if isinstance(error, TypeError) and str(error).startswith(name):
            raise
        raise TypeError(
            f"{name} must be a tensor, an array, a frame of numbers or nested lists of numbers, "
            f"got {type(value).__name__}: {error}"
        ) from error


def _from_array(array: np.ndarray, name: str, kind: str) -> Tensor:
    if array.dtype.kind not in "fiu":
        raise TypeError(
            f"{name} must hold real numbers, got a {kind} of type {array.dtype}; "
            "select numeric columns, or convert them with .astype(float)"
        )
    # torch knows neither long doubles nor foreign byte orders, and shares no read-only or reversed memory
    dtype = np.dtype(np.float64) if array.dtype.kind == "f" and array.itemsize > 8 else array.dtype.newbyteorder("=")
    plain = np.asarray(array, dtype=dtype)
    if not plain.flags.writeable or any(step < 0 or step % plain.itemsize for step in plain.strides):
        plain = plain.copy()
    return torch.as_tensor(plain, device="cpu")

"""What compiled loops call of torch's own library: its threads (its stable C interface) and its matrix product (BLAS).

Threads of their own would wait for cores that torch's keep busy for a while after every operation; and a product of
their own takes twice the time.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch


class Libtorch(NamedTuple):
    parallel_for: Callable[..., int]  # (begin, end, grain, function, its argument)
    sgemm: int  # address of BLAS' SGEMM with 32-bit integers, which torch itself calls


@functools.cache
def libtorch() -> Libtorch | None:
    """None where torch's library does not offer both."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        found = next(p for p in folder.glob("*torch_cpu.*") if p.suffix in (".so", ".dylib", ".dll"))
        library = ctypes.CDLL(str(found))
        parallel_for, sgemm = library.torch_parallel_for, library.sgemm_
    except (StopIteration, OSError, AttributeError):
        return None
    parallel_for.argtypes = [*[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_void_p]
    parallel_for.restype = ctypes.c_int32
    address = ctypes.cast(sgemm, ctypes.c_void_p).value
    return None if address is None else Libtorch(parallel_for, address)

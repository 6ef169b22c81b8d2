"""Large results in large pages, where the operating system has them.

Writing a fresh matrix of 64 MiB for the first time costs more in page faults of 4 KiB than all arithmetic of a distance
matrix. numpy gives the same hint for its own arrays of 4 MiB and more.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

from torch import Tensor

SMALLEST = 2**22
_PAGE = 4096
_MADV_HUGEPAGE = 14


@functools.cache
def _madvise() -> Callable | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def prefer_large(t: Tensor) -> Tensor:
    """t, not yet written, with the hint given; a hint that the system does not take changes nothing."""
    size = t.numel() * t.element_size()
    if t.device.type == "cpu" and size >= SMALLEST and (madvise := _madvise()) is not None:
        start = -(-t.data_ptr() // _PAGE) * _PAGE
        madvise(start, t.data_ptr() + size - start, _MADV_HUGEPAGE)
    return t

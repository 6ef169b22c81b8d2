"""Memory: that of tiles, kept from call to call, and large results in large pages where the system has them.

Pages that the operating system hands out fresh cost more at their first touch (4 MiB: milliseconds on a virtual
machine) than everything that short sequences do in them. The first write of a matrix of 64 MiB costs more in page
faults of 4 KiB than all arithmetic of a distance matrix; numpy gives the same hint for arrays of 4 MiB and more.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

# Bytes up to which memory of one name is kept.
MOST = 2**24

# What no call holds at present, by name and type. A call takes it out, so that threads never share it.
_spare: dict[tuple[str, torch.dtype], Tensor] = {}


class Workspace:
    """Uninitialised memory by name, one tensor of a name at a time, for one call."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self.held: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        numbers = math.prod(shape)
        flat = self.held.get(name)
        if flat is None and self.device.type == "cpu":
            flat = _spare.pop((name, self.dtype), None)
        if flat is None or flat.numel() < numbers:
            with torch.inference_mode(False):  # later calls may be outside of it
                flat = torch.empty(numbers, dtype=self.dtype, device=self.device)
        self.held[name] = flat
        return flat[:numbers].view(shape)

    def back(self) -> None:
        """The call is over. One that fails leaves nothing, and the next takes fresh memory."""
        for name, flat in self.held.items():
            if flat.device.type == "cpu" and flat.numel() * flat.element_size() <= MOST:
                _spare[name, self.dtype] = flat
        self.held = {}


# Bytes from which on the hint is given; a page; the hint's number.
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

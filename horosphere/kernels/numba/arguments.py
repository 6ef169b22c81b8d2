"""What a launcher hands to a compiled loop: one record of whole numbers and addresses, by name, checked before it goes.

A loop gets a bare address from torch's threads. The record behind it is laid out once, as a :class:`Layout`, from which
both sides take it: the launcher fills it by name, the loop reads its fields.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from horosphere._libtorch import libtorch


@dataclass(frozen=True)
class Layout:
    """The fields of a record.

    Attributes:
        numbers: names of whole numbers.
        arrays: names of float32 arrays, which go by their addresses, and their shapes: names of numbers, or numbers.
        optional: which of the arrays may be None, address 0.
    """

    numbers: tuple[str, ...]
    arrays: Mapping[str, tuple[str | int, ...]]
    optional: frozenset[str] = frozenset()

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """Of the record: 64-bit whole numbers, "sgemm" (the address of the matrix product) first."""
        return np.dtype([(name, np.int64) for name in ("sgemm", *self.numbers, *self.arrays)])

    def record(self, given: Mapping[str, int | Tensor | None]) -> np.ndarray:
        """One record (1,) of what is ``given`` by name; it holds addresses, not the tensors.

        Raises:
            ValueError: a name too many or too few, or a tensor of another type, device, layout or size than stated.
        """
        names = {*self.numbers, *self.arrays}
        if names != set(given):
            raise ValueError(f"a loop takes {sorted(names)}; {sorted(names ^ set(given))} is missing or unknown")
        numbers: dict[str, int] = {}
        for name in self.numbers:
            number = given[name]
            if number is None or isinstance(number, Tensor):
                raise ValueError(f"{name} must be a whole number, got {type(number).__name__}")
            numbers[name] = int(number)
        addresses = [self._address(name, shape, given[name], numbers) for name, shape in self.arrays.items()]
        return np.array([(0, *numbers.values(), *addresses)], self.dtype)

    def _address(
        self, name: str, shape: tuple[str | int, ...], t: int | Tensor | None, numbers: Mapping[str, int]
    ) -> int:
        if t is None and name in self.optional:
            return 0
        sizes = [numbers[size] if isinstance(size, str) else size for size in shape]
        if isinstance(t, Tensor):
            fits = t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous()
            if fits and t.numel() == math.prod(sizes):
                return t.data_ptr()
            layout = "contiguous" if t.is_contiguous() else "strided"
            found = f"{layout} {t.dtype} {tuple(t.shape)} on {t.device}"
        else:
            found = type(t).__name__
        wanted = f"a contiguous float32 tensor on the CPU of {' x '.join(map(str, sizes))} numbers"
        raise ValueError(f"{name} must be {wanted}, got {found}")


def launch(loop, layout: Layout, given: Mapping[str, int | Tensor | None], shares: int) -> None:
    """Run a loop over shares 0 to ``shares`` on torch's threads, with what is ``given``."""
    torch_library = libtorch()
    assert torch_library is not None  # no form is chosen that needs it without
    record = layout.record(given)
    record["sgemm"] = torch_library.sgemm
    if torch_library.parallel_for(0, shares, 1, loop.address, record.ctypes.data):
        raise RuntimeError("torch_parallel_for failed")

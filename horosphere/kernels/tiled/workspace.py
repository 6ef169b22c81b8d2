"""Memory of tiles that is kept from call to call.

Pages that the operating system hands out fresh cost more at their first touch (4 MiB: milliseconds on a virtual
machine) than everything that short sequences do in them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Bytes up to which memory of one name is kept.
MOST = 2**24

# What no call holds at present, by name and type. A call takes it out, so that threads never share it.
_spare: dict[tuple[str, torch.dtype], Tensor] = {}


class Lent:
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

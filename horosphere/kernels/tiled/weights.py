"""From the tile z = d^2 + eps to weights, and which keys take part in it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.dropout import kept, row_keys
from horosphere.kernels.tiled.entries import Entries

# Largest |log weight| at which sums of weights stay plain: e^60 times 2^40 keys are a float32 number.
PLAIN = {torch.float32: 60.0, torch.float64: 600.0}


class WeightFunction:
    """Weights of a group of batch entries.

    Args:
        kind: "inverse", "softmax" or "gaussian".
        power: (E,).
        shift: (E,) eps.
        extent: a bound of d^2.
        biased: whether numbers are added to the logarithms.
    """

    def __init__(self, kind: str, power: Tensor, shift: Tensor, extent: float, dtype: torch.dtype, biased: bool):
        self.kind = kind
        powers: list[float] = power.tolist()
        alike = all(p == powers[0] for p in powers)
        self.power: float | Tensor = powers[0] if alike else power.to(dtype)[:, None, None]
        if kind == "inverse":
            low, high = float(shift.min()), float(shift.max()) + extent
            reach = max(abs(math.log(low)) if low > 0 else math.inf, abs(math.log(high)) if high > 0 else math.inf)
        else:
            reach = math.sqrt(extent) if kind == "softmax" else extent
        self.plain = not biased and max(powers) * reach <= PLAIN[dtype]
        self.reciprocal = kind == "inverse" and self.plain and alike and powers[0] == 1.0

    def logits_(self, z: Tensor) -> Tensor:
        """log w in place of z."""
        if self.kind == "inverse":
            z.log_()
        elif self.kind == "softmax":
            z.sqrt_()
        return z.mul_(-self.power)

    def weights_(self, z: Tensor) -> Tensor:
        """w in place of z."""
        if self.kind == "inverse" and isinstance(self.power, float) and self.power in (0.5, 1.0, 2.0):
            if self.power == 0.5:
                return z.rsqrt_()
            z.reciprocal_()
            return z if self.power == 1.0 else z.mul_(z)
        return self.logits_(z).exp_()

    def measure(self, z: Tensor) -> Tensor:
        """What the power multiplies, fresh: log z, d or d^2."""
        return z.log() if self.kind == "inverse" else z.sqrt() if self.kind == "softmax" else z

    def slope_(self, g: Tensor, z: Tensor) -> Tensor:
        """g times the derivative of :meth:`measure` by z, in place."""
        if self.kind == "inverse":
            return g.div_(z)
        if self.kind == "gaussian":
            return g
        # the slope of d at coincident points is defined as 0
        return g.masked_fill_(z <= _numerics.COINCIDENT, 0.0).div_(z.sqrt_()).mul_(0.5)


class Mask:
    """Which keys take part, and what is added to the logarithms of their weights, tile by tile."""

    def __init__(self, bias: Tensor | None, causal: int | None, batch: torch.Size):
        self.causal = causal
        self.allowed: Entries | None = None
        self.added: Entries | None = None
        if bias is not None and bias.dtype == torch.bool:
            self.allowed = Entries(bias, batch, 2)
        elif bias is not None:
            self.added = Entries(bias, batch, 2)
        self.triangles: dict[tuple[int, int, int], Tensor] = {}

    @property
    def some(self) -> bool:
        """Whether there may be keys that take no part."""
        return self.causal is not None or self.allowed is not None or self.added is not None

    @property
    def biased(self) -> bool:
        return self.added is not None

    def nobody(self, i: slice, j: slice) -> bool:
        """Whether no key of the tile takes part."""
        return self.causal is not None and j.start > i.stop - 1 + self.causal

    def _partly(self, i: slice, j: slice) -> bool:
        return self.causal is not None and j.stop - 1 > i.start + self.causal

    def weights_(self, w: Tensor, e: slice, i: slice, j: slice) -> Tensor:
        """w, 0 where a key takes no part."""
        if self.allowed is not None:
            w.mul_(self.allowed.block(e, i, j))
        if self._partly(i, j):
            w.tril_(self.causal + i.start - j.start)
        return w

    def logits_(self, logits: Tensor, e: slice, i: slice, j: slice) -> Tensor:
        """logits with the bias, -inf where a key takes no part."""
        if self.allowed is not None:
            logits.masked_fill_(~self.allowed.block(e, i, j), -torch.inf)
        elif self.added is not None:
            logits.add_(self.added.block(e, i, j))
        if self._partly(i, j):
            rows, columns = logits.shape[-2:]
            key = rows, columns, self.causal + i.start - j.start
            if key not in self.triangles:
                here = torch.ones(rows, columns, dtype=torch.bool, device=logits.device)
                self.triangles = {key: here.triu_(key[2] + 1)}
            logits.masked_fill_(self.triangles[key], -torch.inf)
        return logits


class Dropout:
    """The weights that dropout keeps, times 1 / (1 - p), tile by tile."""

    def __init__(self, seed: Tensor, entries: int, rows: int, p: float):
        self.keys, self.p = row_keys(seed, entries, rows), p

    def apply_(self, t: Tensor, e: slice, i: slice, j: slice) -> Tensor:
        return t.mul_(kept(self.keys[e, i], j.start, j.stop, self.p)).mul_(1 / (1 - self.p))

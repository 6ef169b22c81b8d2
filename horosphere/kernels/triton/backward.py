"""What the backward passes of all attention kernels are given, and the sums they leave beside those of the points."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from horosphere.kernels.chord.augment import flat


class Given:
    """Values and results in the layout of the kernels."""

    def __init__(
        self,
        batch: torch.Size,
        dtype: torch.dtype,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor,
        gain: float,
    ):
        self.values, out, dout = (flat(t, batch, 2).to(dtype).contiguous() for t in (value, out, dout))
        self.lse = flat(lse, batch, 1).contiguous()
        self.mean = (out * dout).sum(-1) - flat(dlse, batch, 1)
        self.dout = dout * gain
        self._transposed = self.dout.mT.contiguous(), self.values.mT.contiguous()

    def sides(self, swapped: bool) -> tuple[Tensor, Tensor]:
        """The gradients of the results and the values, (B, V, N) and (B, V, M), own first."""
        return self._transposed[::-1] if swapped else self._transposed


class Sums:
    """The gradients of eps, power and bias.

    Each sum has one writer at a time, in an order that is fixed, so that the same call gives the same bits: a bias is
    summed over the columns or rows along which it was broadcast by the program that has all of them; batch entries that
    share one go in launches one after the other.

    Args:
        wanted: whether those of eps, power and bias are.
    """

    def __init__(
        self,
        batch: torch.Size,
        dtype: torch.dtype,
        n: int,
        m: int,
        bias: Tensor | None,
        wanted: tuple[bool, bool, bool],
        device: torch.device,
    ):
        self.batch, self.bias, self.wanted = batch, bias, wanted
        entries = batch.numel()
        self.rates = torch.zeros(2, entries, n, dtype=dtype, device=device)
        self.by_rows = self.by_columns = False
        self._into = self.rates[0]
        if wanted[2]:
            self.by_rows = bias.shape[-1] == 1
            self.by_columns = bias.shape[-2] == 1 and not self.by_rows
            shape = (entries, n) if self.by_rows else (entries, m) if self.by_columns else bias.shape
            self._into = torch.zeros(shape, dtype=dtype, device=device)
            self._places = places(bias, batch).tolist()

    def constants(self, swapped: bool, first: bool) -> dict:
        """What is compiled into a launch; ``first``: the first with these sides."""
        kind = 0
        if self.wanted[2] and first and swapped == self.by_columns:
            kind = 2 if self.by_rows or self.by_columns else 1
        return {"RATES": first and not swapped and any(self.wanted[:2]), "BIAS_GRADIENT": kind}

    def runs(self, e: slice, constants: dict) -> Iterator[slice]:
        """``e`` cut so that no launch has two entries that write into the same place."""
        if constants["BIAS_GRADIENT"] != 1:
            yield e
            return
        start, seen = e.start, set()
        for k in range(e.start, e.stop):
            if self._places[k] in seen:
                yield slice(start, k)
                start, seen = k, set()
            seen.add(self._places[k])
        yield slice(start, e.stop)

    def into(self, e: slice, constants: dict) -> Tensor:
        """Where a launch of the entries ``e`` adds the bias's gradient."""
        return self._into[e] if constants["BIAS_GRADIENT"] == 2 else self._into

    def gradients(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of eps (B,) and power (B,) in float64, and of the bias where it is wanted."""
        deps, dpower = self.rates.sum(-1, dtype=torch.float64)
        if not self.wanted[2]:
            return deps, dpower, None
        found = self._into
        if self.by_rows or self.by_columns:
            found = found.view(*self.batch, -1).unsqueeze(-1 if self.by_rows else -2).sum_to_size(self.bias.shape)
        return deps, dpower, found.to(self.bias.dtype)


def places(bias: Tensor, batch: torch.Size) -> Tensor:
    """(B,) where the matrix of every batch entry starts in the bias."""
    starts = torch.arange(bias.shape[:-2].numel(), device="cpu").view(bias.shape[:-2]) * bias.shape[-2:].numel()
    return starts.expand(batch).reshape(-1).contiguous()  # kernels step from one to the next

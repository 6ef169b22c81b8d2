"""The chords of two sets of points, packed into the flat lists that custom operators take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.inputs import broadcast


class ChordPair(NamedTuple):
    """One chord part of both sets: features (..., N, F) and (..., M, F), kappa () or batch-shaped, weights or None."""

    x: Tensor
    y: Tensor
    kappa: Tensor
    wx: Tensor | None
    wy: Tensor | None
    time_dims: int

    def chords(self) -> tuple[Chord, Chord]:
        """The two sides as the reference takes them."""
        return Chord(self.x, self.wx, self.time_dims, self.kappa), Chord(self.y, self.wy, self.time_dims, self.kappa)


def batch_of(parts: Sequence[ChordPair]) -> torch.Size:
    """The batch dimensions of the matrix."""
    return broadcast(*(t.shape[:-2] for p in parts for t in (p.x, p.y)))


def dtype_of(parts: Sequence[ChordPair]) -> torch.dtype:
    """The type in which matrix products run, and of the result."""
    dtype = parts[0].x.dtype
    for p in parts:
        dtype = torch.promote_types(dtype, torch.promote_types(p.x.dtype, p.y.dtype))
    return _numerics.fast_dtype(dtype)


class Chord(NamedTuple):
    """One side of a part; the fields of horosphere.manifolds.Chord, which kernels do not import."""

    features: Tensor
    weight: Tensor | None
    time_dims: int
    kappa: Tensor


def pack(xs: Sequence, ys: Sequence) -> tuple[list[Tensor], str]:
    """Chords of both sets as tensors x, y, kappa and any weights, part by part, and how to read them.

    That is a word for each part, its time coordinates and "w" where it has weights: "0w 1" is a ball and a hyperboloid.
    """
    tensors, layout = [], []
    for a, b in zip(xs, ys, strict=True):
        kappa = a.kappa if isinstance(a.kappa, Tensor) else torch.tensor(a.kappa, dtype=torch.float64, device="cpu")
        tensors += [a.features, b.features, kappa]
        if a.weight is not None:
            tensors += [a.weight, b.weight]
        layout.append(f"{a.time_dims}{'' if a.weight is None else 'w'}")
    return tensors, " ".join(layout)


def unpack(tensors: Sequence[Tensor], layout: str) -> list[ChordPair]:
    """The inverse of :func:`pack`."""
    parts, at = [], 0
    for word in layout.split():
        size = 5 if word.endswith("w") else 3
        x, y, kappa, *weights = tensors[at : at + size]
        wx, wy = weights or (None, None)
        parts.append(ChordPair(x, y, kappa, wx, wy, int(word.removesuffix("w"))))
        at += size
    return parts


def theta(features: int, dtype: torch.dtype) -> float:
    """Pairs with ``u < theta w_i w_j (|f_i|^2 + |f_j|^2)`` may miss the promised tolerance in inner-product form.

    The error of u is at most ``4 sqrt(F)`` units of what was subtracted, and a relative error of ``2 tol`` in u is one
    of tol in d. Two more features hold the norms of the augmented product; the last factor covers the rounding of the
    comparison itself.
    """
    unit = _numerics.unit_roundoff(dtype)
    return 2 * (features + 2) ** 0.5 * unit / _numerics.promised_tolerance(dtype) * (1 + 1e-4)

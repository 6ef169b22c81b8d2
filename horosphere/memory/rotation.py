"""A random rotation of O(D log D) that spreads every direction over all coordinates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["SignedHadamard"]


class SignedHadamard:
    r"""The orthogonal map :math:`x \mapsto H S x`: random signs, then Hadamard matrices over the binary parts of D.

    D = 80 is 64 + 16: coordinates 0 to 63 are mixed among each other and 64 to 79 among each other, so no padding is
    needed. A coordinate of a rotated unit vector is nearly N(0, 1/D) whatever the vector was, which is what a codebook
    for N(0, 1) asks for.

    Args:
        dim: D.
        seed: of the signs; the same seed gives the same map everywhere.

    Source: Ailon and Chazelle (2006), the fast Johnson-Lindenstrauss transform.
    """

    def __init__(self, dim: int, seed: int = 0):
        self.dim = dim
        generator = torch.Generator().manual_seed(seed)
        self.signs = torch.randint(0, 2, (dim,), generator=generator, device="cpu").mul_(2).sub_(1).to(torch.float32)
        self.sizes = [1 << k for k in range(dim.bit_length() - 1, -1, -1) if dim >> k & 1]

    def __call__(self, x: Tensor) -> Tensor:
        """H S x for x (..., D)."""
        return self._mixed(x * self.signs.to(x))

    def inverse(self, y: Tensor) -> Tensor:
        """S H y for y (..., D): the map undone."""
        return self._mixed(y) * self.signs.to(y)

    def _mixed(self, x: Tensor) -> Tensor:
        return torch.cat([_hadamard(part) for part in x.split(self.sizes, dim=-1)], dim=-1)


def _hadamard(x: Tensor) -> Tensor:
    """The symmetric orthogonal Hadamard transform of the last dimension, a power of two."""
    size = x.shape[-1]
    shape = x.shape
    step = 1
    while step < size:
        a, b = x.reshape(*shape[:-1], size // (2 * step), 2, step).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).reshape(shape)
        step *= 2
    return x * (1 / math.sqrt(size))

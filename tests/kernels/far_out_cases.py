"""Cases of attention between coincident and close points far out, where sums over j of r_ij x_i - r_ij x_j would cancel
by the square of the conformal factor, 1e7 to 1e9; and the check of one of them against the reference in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import horosphere as hs
from tests.kernels.attention_cases import TOLERANCE


class Case(NamedTuple):
    """The distance of all points from the centre; "ball" or "hyperboloid"."""

    space: str
    radius: float
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.space} {self.radius} {str(self.dtype)[6:]}"


CASES = [
    Case(space, radius, dtype)
    for radius in (9.0, 11.0)
    for space, dtype in (("ball", torch.float64), ("ball", torch.float32), ("hyperboloid", torch.float64))
]


def points(radius: float) -> tuple[Tensor, Tensor]:
    """Points of the ball, and the same in another order, every other one 1e-6 away."""
    generator = torch.Generator().manual_seed(0)
    direction, step = torch.nn.functional.normalize(
        torch.randn(2, 12, 10, generator=generator, dtype=torch.float64), dim=-1
    )
    x = direction * torch.tanh(torch.tensor(radius / 2, dtype=torch.float64))
    step[::2] = 0
    return x, (x + 1e-6 * step * (1 - (x * x).sum(-1, keepdim=True)) / 2).roll(5, 0)


def check(case: Case, impl: str, device: str = "cpu") -> None:
    """The mean and the gradients of points, values and curvature."""
    x, y = points(case.radius)
    manifold: hs.PoincareBall | hs.Lorentz = hs.PoincareBall(-1.0, learnable=True)
    if case.space == "hyperboloid":
        x, y = (hs.convert(p, hs.PoincareBall(-1.0), hs.Lorentz(-1.0)) for p in (x, y))
        manifold = hs.Lorentz(-1.0, learnable=True)
    manifold = manifold.to(device)
    value, upper = torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    stored = [t.to(case.dtype).to(device) for t in (x, y, value)]
    results = []
    for how, work in ((impl, case.dtype), ("reference", torch.float64)):
        leaves = [t.to(work).requires_grad_() for t in stored]
        out = hs.attention.geodesic_attention(*leaves, manifold, eps=1e-2, impl=how)
        leaves += manifold.parameters()
        results.append([out, *torch.autograd.grad((out * upper.to(out)).sum(), leaves)])
    of_result, of_gradients = TOLERANCE[case.dtype]
    for ours, true, limit in zip(*results, [of_result] + [of_gradients] * 4, strict=True):
        off, largest = (ours.double() - true).abs().max(), true.abs().max()
        assert off <= limit * largest, f"off by {off:.1e} of {largest:.1e}"

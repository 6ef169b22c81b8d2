"""Cases of the kernels of per-token metrics, and the check of one of them against dense matrices in float64."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from horosphere.kernels import operators
from horosphere.kernels.geometry import MetricPairs
from horosphere.kernels.low_rank.pair import MetricPair

# largest error of squared distances and of gradients, relative to the largest entry
TOLERANCE = {torch.float64: (1e-11, 1e-11), torch.float32: (2e-6, 2e-5), torch.bfloat16: (2e-6, 1e-2)}


class Case(NamedTuple):
    """Sizes, whose metric measures, and whether near pairs are resolved."""

    n: int
    m: int
    dim: int
    rank: int
    end: str = "mean"
    batch: tuple = ()
    dtype: torch.dtype = torch.float32
    resolve: bool = True

    @property
    def name(self) -> str:
        words = (self.end, *self[:4], *self.batch, str(self.dtype).split(".")[1], "auto" if self.resolve else "fast")
        return " ".join(str(w) for w in words)


CASES = [
    *(Case(n, m, 5, 2, end) for n, m in ((1, 1), (17, 35)) for end in ("query", "key", "mean")),
    Case(33, 40, 6, 3, batch=(2,)),
    Case(17, 17, 3, 1, dtype=torch.float64, batch=(2, 2)),
    Case(63, 17, 5, 0, "query"),
    Case(33, 17, 8, 2, resolve=False),
    Case(17, 40, 7, 2, dtype=torch.bfloat16),
]


def metric_pair(case: Case, device: str) -> MetricPair:
    generator = torch.Generator().manual_seed(sum(case[:4]))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*case.batch, *shape, generator=generator).to(case.dtype).to(device)

    n, m, d, r = case[:4]
    q, k = draw(n, d), draw(m, d)
    k[..., 0, :] = q[..., 0, :]
    k[..., -1, :] = q[..., -1, :] * (1 + 1e-4)
    query = (draw(n).abs() + 0.5, draw(n, d, r)) if case.end != "key" else (None, None)
    key = (draw(m).abs() + 0.5, draw(m, d, r)) if case.end != "query" else (None, None)
    return MetricPair(q, k, *query, *key)


def dense(f: MetricPair) -> Tensor:
    """delta^T G delta, with (N, M, D) differences."""
    delta = f.q.unsqueeze(-2) - f.k.unsqueeze(-3)
    total = 0.0
    for scale, factor, where in ((f.scale_q, f.factor_q, "n"), (f.scale_k, f.factor_k, "m")):
        if scale is not None:
            inside = torch.einsum(f"...nmd,...{where}dr->...nmr", delta, factor)
            scales = scale.unsqueeze(-1) if where == "n" else scale.unsqueeze(-2)
            total = total + scales**2 * (delta * delta).sum(-1) + (inside * inside).sum(-1)
    return f.share * total


@contextlib.contextmanager
def filled_with_nan():
    """torch.empty is full of NaN, so that an element which a kernel leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def check(case: Case, impl: str, device: str = "cpu") -> None:
    """Value and every gradient."""
    f = metric_pair(case, device)
    leaves = [t.clone().requires_grad_() for t in f.tensors()]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    with filled_with_nan():
        pairs = MetricPairs(like(f, leaves))
        found, _ = operators.sqdist(pairs, squared=True, resolve=case.resolve, impl=impl)
        true = dense(like(f, wide))
        upper = torch.randn(true.shape, generator=torch.Generator().manual_seed(1), dtype=true.dtype).to(device)
        ours = torch.autograd.grad(found, leaves, upper.to(found.dtype))
    theirs = torch.autograd.grad(true, wide, upper)
    value, gradient = TOLERANCE[case.dtype]
    assert found.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    largest = true.abs().max()
    assert (found.double() - true).abs().max() <= value * largest
    if case.resolve:
        assert (found.double() - true).abs().le(2 * value * true + 1e-300).all(), (
            "near pairs are relative to themselves"
        )
    for a, b in zip(ours, theirs, strict=True):
        if b.numel():
            assert (a.double() - b).abs().max() <= gradient * b.abs().max(), (a, b)


def like(f: MetricPair, tensors: list[Tensor]) -> MetricPair:
    given = iter(tensors)
    return MetricPair(*(None if t is None else next(given) for t in f))

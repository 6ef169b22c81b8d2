"""Cases of attention under per-token metrics, and the check of one of them against the plain form in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch

from horosphere.kernels import operators
from horosphere.kernels.geometry import MetricPairs
from tests.kernels import metric_cases
from tests.kernels.metric_cases import Case, filled_with_nan

# largest error of the mean and of gradients, relative to the largest entry
TOLERANCE = {
    torch.float64: (1e-10, 1e-9),
    torch.float32: (1e-4, 5e-4),
    torch.float16: (1e-4, 1e-3),
    torch.bfloat16: (1e-4, 1e-2),
}


class AttentionCase(NamedTuple):
    """MetricPair, and what attention makes of them.

    ``bias``: "bool" (with a row that sees nothing), or one that learns, of "all" pairs, those of "each" batch entry,
    or the "rows" or "columns" alone.
    """

    points: Case
    width: int = 3
    weight: str = "inverse"
    power: float | tuple = 1.0
    eps: float | tuple = 1e-2
    causal: int | None = None
    bias: str = ""
    dropout_p: float = 0.0

    @property
    def name(self) -> str:
        words = (
            self.points.name,
            self.weight,
            self.power,
            self.bias,
            "" if self.causal is None else f"causal {self.causal}",
        )
        return " ".join(str(w) for w in words if w != "") + (" dropout" if self.dropout_p else "")


CASES = [
    AttentionCase(Case(1, 1, 3, 1)),
    AttentionCase(Case(20, 40, 5, 2, batch=(2,)), causal=3),
    AttentionCase(Case(20, 40, 5, 2, "query"), width=20, weight="softmax", bias="all"),
    AttentionCase(Case(20, 17, 5, 2, "key"), weight="gaussian", power=0.3, bias="bool"),
    AttentionCase(Case(17, 17, 3, 0), power=3.0, eps=1e-6, dropout_p=0.3),
    AttentionCase(Case(17, 20, 3, 1, dtype=torch.float64), eps=1e-6),
    AttentionCase(Case(17, 20, 3, 1, resolve=False), causal=0),
    AttentionCase(Case(17, 20, 3, 1, dtype=torch.bfloat16)),
    AttentionCase(Case(9, 17, 3, 4, dtype=torch.float16), bias="rows"),
    AttentionCase(Case(9, 17, 3, 2, "query"), eps=1e-6, bias="columns"),
    AttentionCase(Case(17, 9, 3, 2, "key"), eps=1e-6, causal=-2),
    AttentionCase(
        Case(5, 9, 37, 1, batch=(2,), resolve=False), width=35, eps=(1e-2, 0.3), power=(0.5, 2.0), bias="all"
    ),
    AttentionCase(Case(5, 9, 3, 1, batch=(2, 2), dtype=torch.float64), bias="each", dropout_p=0.3),
    AttentionCase(Case(17, 9, 3, 1, batch=(2,), dtype=torch.float64), weight="softmax", causal=0, bias="columns"),
]


def check(case: AttentionCase, impl: str, device: str = "cpu") -> None:
    """Mean, lse and every gradient."""
    p = case.points
    f = metric_cases.metric_pair(p, device)
    generator = torch.Generator().manual_seed(5)
    value = torch.randn(*p.batch, p.m, case.width, generator=generator).to(p.dtype).to(device)
    bias = []
    if case.bias:
        shape = {"rows": (p.n, 1), "columns": (1, p.m), "each": (*p.batch, p.n, p.m)}.get(case.bias, (p.n, p.m))
        bias = [torch.randn(shape, generator=generator).to(p.dtype).to(device)]
    if case.bias == "bool":
        mask = bias.pop() > -0.5
        mask[1] = False
    rates = [torch.tensor(x, dtype=torch.float64, device=device) for x in (case.eps, case.power)]
    options = {"causal": case.causal, "weight": case.weight, "dropout_p": case.dropout_p}
    options |= {"seed": torch.tensor(11, device=device), "resolve": p.resolve}
    results = []
    for dtype, how in ((p.dtype, impl), (torch.float64, "reference")):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (*f.tensors(), value, *bias)]
        points, (given, *added) = leaves[: len(f.tensors())], leaves[len(f.tensors()) :]
        added = mask if case.bias == "bool" else added[0] if added else None
        scalars = [t.clone().requires_grad_() for t in rates]
        with filled_with_nan():
            out, lse = operators.attention(
                MetricPairs(metric_cases.like(f, points)),
                given,
                eps=scalars[0],
                power=scalars[1],
                impl=how,
                bias=added,
                **options,
            )
            upper = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(out)
            some = torch.where(lse.isinf(), 0.0, lse)
            gradients = torch.autograd.grad((out * upper).sum() + some.sum(), [*leaves, *scalars], allow_unused=True)
        results.append([out, some, *(torch.zeros(1) if g is None else g for g in gradients)])
    limits = [TOLERANCE[p.dtype][0]] * 2 + [TOLERANCE[p.dtype][1]] * (len(results[0]) - 2)
    for k, (ours, true, limit) in enumerate(zip(*results, limits, strict=True)):
        if true.numel() and ours.numel():
            error = (ours.double().cpu() - true.cpu()).abs().max()
            assert error <= limit * max(1.0, true.abs().max().item()), (k, error, true.abs().max())

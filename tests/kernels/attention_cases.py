"""One list of cases for every form of attention, and the check that runs one of them against the reference.

The truth is the reference in float64 on the same stored numbers. Outputs are allocated full of NaN, so that an element
which a kernel leaves out shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import horosphere as hs
from horosphere.attention import geodesic_attention
from tests.kernels.cases import filled_with_nan

# largest error of out and lse, and of gradients, relative to the largest entry
TOLERANCE = {torch.float64: (1e-11, 1e-9), torch.float32: (5e-5, 3e-4), torch.bfloat16: (8e-3, 8e-3)}
SPACES: dict[str, Callable[[], hs.PoincareBall]] = {
    "flat": lambda: hs.Euclidean(),
    "ball": lambda: hs.PoincareBall(-1.3, learnable=True),
    "sphere": lambda: hs.Sphere(0.8, learnable=True),
    "hyperboloid": lambda: hs.Lorentz(-0.7, learnable=True),
    "signs": lambda: hs.Stereographic(torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64), learnable=True),
    "product": lambda: hs.Product(
        (hs.PoincareBall(-1.0, learnable=True), 2), (hs.Sphere(1.0), 3), (hs.Lorentz(-1.0), 3), (hs.Euclidean(), 1)
    ),
}


class Case(NamedTuple):
    """``mask``: None, "causal", "lower right", "bool" (with a row that sees nothing), or "added" (which learns), of
    all pairs or of the "rows" or "columns" alone.
    """

    space: str
    n: int
    m: int
    batch: tuple = ()
    size: int = 5
    width: int = 3
    dtype: torch.dtype = torch.float32
    weight: str = "inverse"
    power: float | tuple = 1.0
    eps: float | tuple = 1e-2
    mask: str | None = None
    dropout: float = 0.0
    groups: int = 1
    equal: bool = False
    precision: str = "auto"

    @property
    def name(self) -> str:
        changed = [
            f"{name}{value}" for name, value in self._asdict().items() if value != self._field_defaults.get(name, value)
        ]
        return f"{self.space}-{self.n}x{self.m}-" + "-".join(changed).replace(" ", "").replace("torch.", "")


f64, bf16 = torch.float64, torch.bfloat16
CASES = [
    *(Case(s, 17, 33) for s in ("flat", "ball", "sphere", "hyperboloid")),
    *(Case(s, 5, 9, dtype=f64, weight="softmax") for s in ("flat", "ball", "sphere", "hyperboloid")),
    Case("signs", 5, 9, batch=(2, 3), dtype=f64, mask="causal", eps=(0.1, 1e-6, 2.0), power=(0.5, 1.0, 3.0)),
    Case("product", 9, 17, dtype=f64),
    Case("product", 9, 17, size=9, mask="causal", weight="gaussian", power=0.7),
    *(Case("flat", n, m) for n, m in ((1, 1), (1, 129), (129, 1))),
    *(Case("ball", n, m) for n, m in ((0, 3), (3, 0))),
    Case("ball", 65, 33, mask="lower right"),
    Case("ball", 33, 65, mask="lower right", weight="softmax"),
    Case("ball", 9, 17, batch=(2, 2), mask="bool"),
    Case("hyperboloid", 9, 17, batch=(2, 2), mask="added", power=2.5),
    Case("sphere", 17, 35, mask="added", dropout=0.3),
    Case("product", 5, 9, batch=(2,), mask="added rows"),
    Case("ball", 5, 9, batch=(2,), mask="added columns"),
    Case("ball", 17, 9, batch=(2, 4), groups=2, eps=(0.1, 0.2, 0.3, 0.4)),
    Case("ball", 5, 9, size=70),
    Case("flat", 2, 3, size=130, width=140, dtype=f64),
    Case("ball", 17, 9, dtype=bf16),
    Case("ball", 33, 35, equal=True, eps=1e-6),
    Case("hyperboloid", 33, 35, equal=True, eps=1e-6),
    Case("sphere", 17, 33, precision="fast"),
]


def tensors(case: Case, device: str) -> tuple[dict[str, Tensor], dict]:
    """What learns, and the other arguments."""
    manifold = SPACES[case.space]()
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=f64)

    few = (*case.batch[:-1], case.batch[-1] // case.groups) if case.batch else ()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        size = case.size + 4 if case.space == "product" and case.size < 9 else case.size
        spread = hs.PoincareBall(-1.0) if case.space == "signs" else manifold
        query, key = (
            spread.random(*batch, rows, size, dtype=f64).detach().as_subclass(Tensor)
            for batch, rows in ((case.batch, case.n), (few, case.m))
        )
    if case.equal:
        query, key = (p[..., :1, :].expand(p.shape).clone() for p in (query, key))
    same = min(case.n, case.m, 3) if case.groups == 1 and not case.equal else 0
    if same:
        key[..., :same, :] = query[..., :same, :]
    learned = {"query": query.to(case.dtype), "key": key.to(case.dtype), "value": normal(*few, case.m, case.width)}
    learned["value"] = learned["value"].to(case.dtype)
    if case.weight == "inverse":
        learned["eps"] = torch.tensor(case.eps, dtype=f64)
    learned["power"] = torch.tensor(case.power, dtype=f64)
    others = {"dropout_p": case.dropout, "enable_gqa": case.groups > 1, "weight": case.weight}
    others |= {"is_causal": case.mask == "causal", "precision": case.precision}
    if case.mask == "lower right":
        with warnings.catch_warnings(action="ignore"):  # of rows that see nothing
            others["attn_mask"] = causal_lower_right(case.n, case.m)
    elif case.mask == "bool":
        others["attn_mask"] = (normal(*case.batch[-1:], case.n, case.m) > 0).to(device)
        others["attn_mask"][..., 1, :] = False
    elif (case.mask or "").startswith("added"):
        n, m = 1 if "columns" in case.mask else case.n, 1 if "rows" in case.mask else case.m
        learned["attn_mask"] = normal(*case.batch[:1], *[1] * len(case.batch[1:]), n, m).to(case.dtype)
    learned = {name: t.to(device).requires_grad_() for name, t in learned.items()}
    return learned, {**others, "manifold": manifold.to(device)}


def results(learned: dict[str, Tensor], others: dict, impl: str) -> list[Tensor]:
    """out, lse and the gradients of everything that learns."""
    with torch.random.fork_rng():
        torch.manual_seed(1)  # of dropout
        out, lse = geodesic_attention(**learned, **others, return_lse=True, impl=impl)
    if not lse.requires_grad:  # there are no keys
        return [out, lse]
    generator = torch.Generator().manual_seed(2)
    upper = [torch.randn(t.shape, generator=generator, dtype=f64).to(t) for t in (out, lse)]
    lse = torch.where(lse == -torch.inf, 0.0, lse)  # rows without keys
    leaves = [*learned.values(), *others["manifold"].parameters()]
    gradients = torch.autograd.grad((out, lse), leaves, upper, materialize_grads=True, allow_unused=True)
    return [out.detach(), lse.detach(), *gradients]


def check(case: Case, impl: str, device: str = "cpu") -> None:
    """Everything that ``impl`` gives against the reference."""
    learned, others = tensors(case, device)
    with filled_with_nan():
        found = results(learned, others, impl)
    wide = {name: t.detach().to(f64).requires_grad_() for name, t in learned.items()}
    true = results(wide, others, "reference")
    names = ["out", "lse", *learned, *(f"curvature {k}" for k in range(len(found)))]
    of_results, of_gradients = TOLERANCE[case.dtype]
    for name, ours, truth in zip(names, found, true, strict=False):
        assert ours.shape == truth.shape
        if not truth.numel():
            continue
        off, largest = (ours.to(f64) - truth).abs().max(), truth.abs().max()
        limit = of_results if name in ("out", "lse") else of_gradients
        # a coarse type's gradients of all-equal points are sums of what cancels
        assert off <= limit * max(largest, 1e-3), f"{name} off by {off:.1e} of {largest:.1e}"

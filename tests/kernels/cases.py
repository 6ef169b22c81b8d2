"""One list of cases for every form of the distance kernel, and the check that runs one of them against the reference.

The truth is the reference in float64 on the same stored numbers. Outputs are allocated full of NaN, so that an element
which a kernel leaves out shows.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from horosphere.kernels import operators
from horosphere.kernels.chord.pair import Chord
from horosphere.kernels.geometry import ChordPairs

# largest error of distances of resolved pairs, relative, and of gradients, relative to the largest entry
TOLERANCE = {torch.float64: (1e-12, 1e-11), torch.float32: (1e-5, 3e-5), torch.bfloat16: (1e-5, 6e-3)}


class Case(NamedTuple):
    """Parts (kind, kappa, features), kappa a number or one for every entry of the last batch dimension."""

    parts: tuple
    n: int
    m: int
    batch: tuple = ()
    dtype: torch.dtype = torch.float32
    squared: bool = False

    @property
    def name(self) -> str:
        parts = "+".join(f"{kind}{kappa}x{f}" for kind, kappa, f in self.parts)
        return (
            f"{parts}-{self.batch}{self.n}x{self.m}-{str(self.dtype)[6:]}{'-squared' if self.squared else ''}".replace(
                " ", ""
            )
        )


PRODUCT = (("conformal", -1.0, 3), ("sphere", 1.0, 4), ("lorentz", -0.5, 5), ("flat", 0.0, 2))
CASES = [
    *(Case((("conformal", k, 5),), 17, 63) for k in (-2.0, -1.0, -1e-6, 0.0, 1e-6, 1.0)),
    *(Case((("conformal", k, 5),), 63, 17, dtype=torch.float64, squared=True) for k in (-2.0, -1e-6, 0.0, 1e-6, 1.0)),
    *(Case((("conformal", -1.0, 3),), n, m) for n, m in ((1, 1), (1, 129), (129, 1), (129, 129))),
    Case((("conformal", -1.0, 17),), 63, 129),
    Case((("conformal", -1.0, 70),), 17, 129),
    Case((("conformal", -1.0, 5),), 17, 63, dtype=torch.bfloat16),
    Case((("flat", 0.0, 1),), 63, 129),
    Case((("flat", 0.0, 5),), 17, 17, dtype=torch.bfloat16, squared=True),
    Case((("sphere", 0.5, 4),), 63, 129),
    Case((("sphere", 1.0, 4),), 17, 63, dtype=torch.float64, squared=True),
    Case((("lorentz", -2.0, 6),), 63, 129),
    Case((("lorentz", -1.0, 6),), 17, 63, dtype=torch.float64, squared=True),
    Case((("conformal", -1.0, 4),), 17, 33, batch=(2, 3)),
    Case((("conformal", (-1.0, 0.0, 0.5), 4),), 17, 33, batch=(2, 3)),
    Case((("conformal", (-1.0, 0.0, 0.5), 4),), 17, 33, batch=(2, 3), dtype=torch.float64, squared=True),
    Case(PRODUCT, 33, 65),
    Case(PRODUCT, 17, 33, batch=(2,), dtype=torch.float64),
    Case(PRODUCT, 17, 33, squared=True),
]


def _points(kind: str, kappa: Tensor, shape: tuple, generator: torch.Generator) -> Tensor:
    """Features in float64, kappa (..., 1, 1)."""
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    radius = kappa.abs().clamp(min=1e-2).rsqrt()
    if kind == "sphere":
        return radius * torch.nn.functional.normalize(x, dim=-1)
    if kind == "lorentz":
        x = x[..., 1:] * radius
        return torch.cat((torch.sqrt(radius**2 + (x * x).sum(-1, keepdim=True)), x), -1)
    x = x / x.norm(dim=-1, keepdim=True) * torch.rand(*shape[:-1], 1, generator=generator, dtype=torch.float64)
    return 0.95 * radius * x


def chords(case: Case, device: str = "cpu") -> tuple[list[Chord], list[Chord]]:
    """Both sides of every part; all tensors are leaves. The first points of both sides coincide, or are antipodes."""
    generator = torch.Generator().manual_seed(0)
    sides = [], []
    for kind, number, f in case.parts:
        kappa = torch.as_tensor(number, dtype=torch.float64)
        k = kappa[..., None, None]
        x, y = (_points(kind, k, (*case.batch, r, f), generator) for r in (case.n, case.m))
        few = min(case.n, case.m, 3)
        if few > 1:
            y[..., :few, :] = x[..., :few, :]
            if kind == "sphere":
                y[..., 1, :] *= -1
        kappa = kappa.to(device).requires_grad_()
        for side, p in zip(sides, (x, y), strict=True):
            p = p.to(case.dtype)
            w = None
            if kind == "conformal":
                exact = 2 / (1 + k.squeeze(-1) * (p.double() ** 2).sum(-1))
                w = exact.to(torch.promote_types(case.dtype, torch.float32)).to(device).requires_grad_()
            side.append(Chord(p.to(device).requires_grad_(), w, int(kind == "lorentz"), kappa))
    return sides


def _leaves(xs: list[Chord], ys: list[Chord]) -> list[Tensor]:
    found = []
    for x, y in zip(xs, ys, strict=True):
        found += [x.features, y.features, x.kappa] + ([x.weight, y.weight] if x.weight is not None else [])
    return found


def widened(sides: tuple[list[Chord], list[Chord]]) -> tuple[list[Chord], list[Chord]]:
    kappas = [x.kappa.detach().clone().requires_grad_() for x in sides[0]]

    def wide(t):
        return None if t is None else t.detach().double().requires_grad_()

    return tuple(
        [Chord(wide(p.features), wide(p.weight), p.time_dims, k) for p, k in zip(side, kappas, strict=True)]
        for side in sides
    )


@contextlib.contextmanager
def filled_with_nan():
    """torch.empty gives NaN within."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check(case: Case, impl: str, device: str = "cpu") -> None:
    """Distances, unresolved pairs and every gradient of ``impl`` against the reference."""
    xs, ys = chords(case, device)
    wide_xs, wide_ys = widened((xs, ys))
    with filled_with_nan():
        found, picked = operators.sqdist(ChordPairs(xs, ys), squared=case.squared, resolve=True, impl=impl)
    true, _ = operators.sqdist(ChordPairs(wide_xs, wide_ys), squared=case.squared, resolve=False, impl="reference")
    _, by_rule = operators.sqdist(ChordPairs(xs, ys), squared=case.squared, resolve=True, impl="reference")
    picked = picked.cpu()
    assert found.shape == (*case.batch, case.n, case.m)
    assert picked.numel() == picked.unique().numel(), "a pair is reported twice"
    missed = set(by_rule.tolist()) - set(picked.tolist())
    assert not missed, f"{len(missed)} of {by_rule.numel()} unresolved pairs are missed"
    assert picked.numel() <= 2 * by_rule.numel() + 0.1 * found.numel(), "too many pairs count as unresolved"
    kept = torch.ones(found.numel(), dtype=torch.bool)
    kept[picked] = False
    relative, of_largest = TOLERANCE[case.dtype]
    error = ((found.detach().cpu().double() - true.detach().cpu()).abs() / true.detach().cpu()).flatten()[kept]
    assert not kept.any() or error.max() <= relative * (2 if case.squared else 1), f"distance off by {error.max():.1e}"

    kept = kept.view(found.shape).to(device)
    upper = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device) * kept
    with filled_with_nan():
        gradients = torch.autograd.grad(found, _leaves(xs, ys), upper.to(found.dtype))
    truths = torch.autograd.grad(true, _leaves(wide_xs, wide_ys), upper, allow_unused=True, materialize_grads=True)
    names = [f"part {i // 5 if xs[0].weight is not None else i // 3}, tensor {i}" for i in range(len(gradients))]
    for name, leaf, ours, truth in zip(names, _leaves(xs, ys), gradients, truths, strict=True):
        assert ours.dtype == leaf.dtype and ours.shape == leaf.shape
        off = (ours.double() - truth).abs().max()
        assert off <= of_largest * truth.abs().max() + 1e-300, (
            f"gradient of {name} off by {off:.1e} of {truth.abs().max():.1e}"
        )

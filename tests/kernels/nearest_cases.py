"""One list of cases for every form of the nearest neighbours, and the check that runs one of them against the
reference, and against the distances of the stored numbers in float64.

Outputs are allocated full of NaN, so that an element which a kernel leaves out shows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels import operators
from horosphere.kernels.geometry import ChordPairs
from tests.kernels import cases

MIXED = (("conformal", (-1.0, 0.0, 0.5), 4),)
PRODUCT = (("conformal", (-1.0, -0.5, -3.0), 3), ("sphere", (1.0, 0.25, 4.0), 3))
MIXED_PRODUCT = (("conformal", (-1.0, 0.0, 0.5), 3), ("flat", 0.0, 2))
BALL = (("conformal", -1.0, 3),)


class Case(NamedTuple):
    """``of`` gives the points; ``spoiled``: the first and last but one of the columns are no points."""

    of: cases.Case
    k: int
    spoiled: bool = False

    @property
    def name(self) -> str:
        return f"{self.of.name}-k{self.k}{'-spoiled' if self.spoiled else ''}"


CASES = [
    *(Case(c, 10) for c in cases.CASES if c.m >= 17),
    *(Case(cases.Case(BALL, 5, m), min(m, k)) for m in (1, 63, 64, 65, 127, 129, 257) for k in (1, m - 1) if k),
    *(Case(cases.Case(BALL, 3, m, dtype=d), m) for m in (1, 129, 257) for d in (torch.float32, torch.float64)),
    Case(cases.Case(cases.PRODUCT, 65, 257), 3),
    Case(cases.Case(cases.PRODUCT, 7, 129), 128),
    *(Case(cases.Case(p, 7, 257, batch=(3,)), 2) for p in (PRODUCT, MIXED_PRODUCT)),
    Case(cases.Case(MIXED, 7, 257, batch=(2, 3)), 2),
    Case(cases.Case(BALL, 17, 200, dtype=torch.float16), 17),
    Case(cases.Case((("flat", 0.0, 4),), 9, 129, dtype=torch.float64), 7),
    *(Case(cases.Case(p, 5, 130), k, spoiled=True) for p in (BALL, cases.PRODUCT) for k in (128, 130)),
    Case(cases.Case((("flat", 0.0, 4),), 5, 130), 129, spoiled=True),
    Case(cases.Case((("sphere", 1.0, 4),), 5, 130), 130, spoiled=True),
]


def _spoil(side: list) -> None:
    """The first column is NaN, the last but one infinite."""
    with torch.no_grad():
        side[0].features[..., 0, :] = torch.nan
        side[0].features[..., -2, :] = torch.inf


def check(case: Case, impl: str, device: str = "cpu") -> None:
    """Bounds and indices of ``impl``."""
    xs, ys = cases.chords(case.of, device)
    if case.spoiled:
        _spoil(ys)
    k, m = case.k, case.of.m
    with cases.filled_with_nan():
        bounds, indices = operators.nearest(ChordPairs(xs, ys), k, impl=impl)
    bounds, indices = bounds.cpu(), indices.cpu()
    assert bounds.shape == indices.shape == (*case.of.batch, case.of.n, k)
    assert bounds.dtype == _numerics.fast_dtype(case.of.dtype) and indices.dtype == torch.int64
    assert (bounds[..., 1:] >= bounds[..., :-1]).all(), "bounds do not ascend"
    assert ((indices >= 0) & (indices < m)).all() and (indices.sort(-1).values.diff(dim=-1) > 0).all()
    proper = torch.ones(m, dtype=torch.bool)
    if case.spoiled:
        proper[[0, -2]] = False
    known = min(k, int(proper.sum()))
    assert proper[indices[..., :known]].all() and not proper[indices[..., known:]].any(), "no points come last"

    true = operators.nearest(ChordPairs(xs, ys), m, impl="reference")[0].cpu()[..., :known].to(bounds.dtype)
    slack = (1e-9 if case.of.dtype == torch.float64 else 1e-4) * float(true[..., -1].abs().max())
    torch.testing.assert_close(bounds[..., :known], true, rtol=1e-4, atol=slack)

    d2 = _distances(xs, ys)
    within = bounds * (1 - 64 * _numerics.unit_roundoff(bounds.dtype))
    assert (within[..., :known] <= d2.gather(-1, indices[..., :known])).all(), "no lower bounds"
    others = d2.scatter(-1, indices, torch.inf)[..., proper]
    assert (within[..., known - 1 : known] <= others).all(), "a point that is not among them is nearer"


def _distances(xs: list, ys: list) -> Tensor:
    """(..., N, M) squares of the stored numbers, in float64, on the CPU."""
    sides = cases.widened((xs, ys))
    with torch.no_grad():
        return operators.sqdist(ChordPairs(*sides), squared=True, resolve=False, impl="reference")[0].cpu()

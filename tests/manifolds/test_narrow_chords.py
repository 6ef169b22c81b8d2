"""Chords of float32 points, which are worked in float64 some rows at a time, against all at once."""

from __future__ import annotations

import pytest
import torch

import horosphere as hs
from horosphere import _numerics


@pytest.mark.parametrize("learnable", (False, True))
@pytest.mark.parametrize("space", (hs.PoincareBall, hs.Sphere))
@pytest.mark.parametrize("rows", (1, 7, 700))
def test_values_and_both_derivatives(space, learnable, rows, monkeypatch):
    manifold = space(-1.3 if space is hs.PoincareBall else 0.8, learnable=learnable)
    points = torch.randn(40, 3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = manifold.expmap0(0.5 * points) if space is hs.PoincareBall else manifold.projx(points)
    points = points.detach().to(torch.float32).transpose(0, 1)
    found, asked = [], []
    narrow = _numerics.narrow
    monkeypatch.setattr(_numerics, "_WIDE", 9 * rows)
    for serves in (lambda x: asked.append(x) or narrow(x), lambda x: False):
        monkeypatch.setattr(_numerics, "narrow", serves)
        x = points.clone().requires_grad_()
        learned = [x, *(p for p in manifold.parameters() if p.requires_grad)]
        features, weight, *_ = manifold.chord(x)
        made = weight if space is hs.PoincareBall else features
        upper = torch.randn(made.shape, generator=torch.Generator().manual_seed(1)).to(made)
        first = torch.autograd.grad((made * upper).sum(), learned, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), learned)
        assert torch.equal(
            first[0], torch.autograd.grad((manifold.chord(x)[1 if made is weight else 0] * upper).sum(), x)[0]
        )
        found.append((made, *first, *second))
    assert len(asked) == 2 and torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)

"""The retrieval margin of keys."""

from __future__ import annotations

import pytest
import torch

import horosphere as hs
from horosphere.attention import geodesic_attention
from horosphere.diagnostics import retrieval_margin


def test_it_bounds_what_the_other_keys_take():
    ball = hs.PoincareBall(-1.0)
    k = 0.45 * torch.tanh(torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    for eps in (1e-6, 1e-3, 1e-1):
        margin = retrieval_margin(k, ball, eps)
        own = geodesic_attention(k, k, torch.eye(30, dtype=torch.float64).expand(2, 30, 30), ball, eps=eps)
        share = 1 / own.diagonal(dim1=-2, dim2=-1) - 1
        assert margin.shape == (2, 30) and (share <= margin).all()
        d = hs.cdist(k, k, ball) + 1e9 * torch.eye(30, dtype=torch.float64)
        torch.testing.assert_close(margin, eps * 29 / d.amin(-1) ** 2)


def test_equal_keys_cannot_be_told_apart():
    k = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    margin = retrieval_margin(k, hs.Euclidean(), 0.25)
    assert margin[:2].isinf().all() and margin[2] == 0.5


def test_bad_arguments():
    with pytest.raises(ValueError, match="at least two points"):
        retrieval_margin(torch.ones(1, 2), hs.Euclidean(), 0.1)
    with pytest.raises(ValueError, match="eps must be positive"):
        retrieval_margin(torch.ones(3, 2), hs.Euclidean(), 0.0)

"""Ranks and rank collapse."""

import math

import pytest
import torch

from horosphere.diagnostics import effective_rank, numerical_rank, rank_residual


def test_numerical_rank():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3, 20, 4, generator=generator) @ torch.randn(3, 4, 30, generator=generator)
    assert numerical_rank(a.double()).tolist() == [4, 4, 4] and numerical_rank(torch.zeros(5, 5)).item() == 0
    assert numerical_rank(torch.diag(torch.tensor([1.0, 1e-3, 1e-7]))).item() == 2
    assert numerical_rank(torch.diag(torch.tensor([1.0, 1e-3, 1e-7])), 1e-8).item() == 3
    assert numerical_rank(torch.zeros(2, 4, 0)).tolist() == [0, 0]


def test_effective_rank():
    assert effective_rank(torch.eye(6)).item() == pytest.approx(6)
    assert effective_rank(torch.ones(6, 6)).item() == pytest.approx(1, abs=1e-5)
    p = torch.tensor([0.5, 0.25, 0.25])
    assert effective_rank(torch.diag(p)).item() == pytest.approx(math.exp(0.5 * math.log(2) + 0.5 * math.log(4)))
    assert effective_rank(torch.zeros(2, 3, 3)).tolist() == [0, 0]


def test_rank_residual():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 10, 5, generator=generator)
    rest = x - x.mean(1, keepdim=True)
    torch.testing.assert_close(rank_residual(x), rest.flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1))
    found = rank_residual(x, "composite")[2].item()
    norms = [math.sqrt(torch.linalg.matrix_norm(t[2], 1) * torch.linalg.matrix_norm(t[2], math.inf)) for t in (rest, x)]
    assert found == pytest.approx(norms[0] / norms[1])
    for norm in ("frobenius", "composite"):
        assert rank_residual(torch.ones(7, 3), norm).item() == 0 and rank_residual(torch.zeros(7, 3), norm).item() == 0
    with pytest.raises(ValueError, match="norm must be one of"):
        rank_residual(x, "nuclear")

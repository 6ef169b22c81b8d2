"""Attention in tiles against the reference, over the list of cases that every form of it goes through."""

from __future__ import annotations

import pytest
import torch

import horosphere as hs
from horosphere.kernels import dispatch
from tests.kernels import attention_cases


@pytest.mark.parametrize("case", attention_cases.CASES, ids=lambda c: c.name)
def test_tiled_is_the_reference(case):
    attention_cases.check(case, "tiled")


def test_an_impl_asked_for_by_name_is_used_or_refused():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="it runs on GPUs, and the points are on cpu"):
        hs.attention.geodesic_attention(x, x, x, hs.Euclidean(), impl="triton")
    gpu = torch.device("cuda")
    assert dispatch.choose("auto", gpu, torch.float32, 1) == (
        "triton" if dispatch.importlib.util.find_spec("triton") else "tiled"
    )
    assert dispatch.choose("auto", gpu, torch.complex64, 1) == "tiled"

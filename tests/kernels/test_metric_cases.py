"""The tiled forms of the kernels of per-token metrics; Triton's run in interpreted.py."""

import pytest

from horosphere.kernels.tiled import metric_tiles
from tests.kernels import metric_attention_cases, metric_cases


@pytest.mark.parametrize("case", metric_cases.CASES, ids=lambda c: c.name)
def test_distances(case):
    metric_cases.check(case, "tiled")


@pytest.mark.parametrize("case", metric_attention_cases.CASES, ids=lambda c: c.name)
def test_attention(case):
    metric_attention_cases.check(case, "tiled")


@pytest.mark.parametrize("case", metric_attention_cases.CASES, ids=lambda c: c.name)
def test_attention_with_tiles_made_again_in_float64(case, monkeypatch):
    """Where more pairs of a tile are near than are worked one by one."""
    monkeypatch.setattr(metric_tiles, "PAIRS", 1)
    metric_attention_cases.check(case, "tiled")

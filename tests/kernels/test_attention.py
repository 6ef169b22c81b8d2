"""Attention in tiles against the reference, over the list of cases that every form of it goes through."""

from __future__ import annotations

import pytest

from tests.kernels import attention_cases


@pytest.mark.parametrize("case", attention_cases.CASES, ids=lambda c: c.name)
def test_tiled_is_the_reference(case):
    attention_cases.check(case, "tiled")

"""What tests of several kernels need."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def peak_mib(monkeypatch) -> Callable[[str, str], float]:
    """benchmarks/peak.py: peak memory of statements, in MiB, in a process of its own."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read from /proc, which is not here")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from peak import peak_mib

    return peak_mib

"""Triton kernels without a GPU: run by the interpreter, and compiled to machine code for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def test_importing_horosphere_does_not_load_triton_kernels():
    code = "import sys, horosphere; assert not any(m.startswith('horosphere.kernels.triton') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_cases_under_the_interpreter():
    """In a process of its own: Triton decides when a kernel's module is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/kernels/interpreted.py"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout


@pytest.mark.parametrize("target", ("sm_80", "sm_90", "gfx942"))
def test_kernels_compile_ahead_of_time(target, tmp_path, monkeypatch):
    """One variant of every kernel, type and sign of curvature; benchmarks/compile_kernels.py builds all of them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from horosphere.kernels.triton import ahead

    chosen = {(v.kernel, v.dtype, v.constants["SIGN"]): v for v in ahead.variants()}
    assert len(chosen) == 12
    # of attention one kernel: it takes seconds to compile
    of_attention = next(v for v in ahead.attention_variants() if v.name == "gradient of keys product inverse fp32")
    of_nearest = [v for v in ahead.nearest_variants() if v.name.endswith("product fp32")]
    assert len(of_nearest) == 2
    of_metrics = [v for v in ahead.metric_variants() if "both" in v.name]
    for variant in (*chosen.values(), *of_nearest, of_attention, *of_metrics):
        usage = ahead.build(variant, target)
        assert 0 < usage.registers <= 512 and usage.shared <= 48 * 1024
        assert usage.spills <= 256, f"{variant.name} spills {usage.spills}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in full where there is a GPU")
def test_the_gpu_check_says_that_it_is_skipped():
    run = subprocess.run([sys.executable, "tests/gpu/check.py"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "skipped: no GPU\n", run.stderr

"""Triton kernels without a GPU: run by the interpreter, and compiled to machine code for GPUs that are not here."""

from __future__ import annotations

import ast
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


def test_no_list_of_arguments_is_longer_than_16():
    """Pointers and sizes that belong together come as one named tuple."""
    longest = {}
    for path in (ROOT / "horosphere/kernels/triton").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                longest[f"{path.name} {node.name}"] = len(given)
    assert len(longest) > 50 and {name: count for name, count in longest.items() if count > 16} == {}


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

    chosen = {(v.launch.kernel, v.dtype, v.launch.given["SHAPE"].sign): v for v in ahead.variants()}
    assert len(chosen) == 12
    # of attention one kernel: it takes seconds to compile
    of_attention = next(v for v in ahead.attention_variants() if v.name == "gradient of keys product inverse fp32")
    of_nearest = [v for v in ahead.nearest_variants() if v.name.endswith("product fp32")]
    assert len(of_nearest) == 2
    of_metrics = [v for v in ahead.metric_variants() if "both" in v.name and "gradient of" not in v.name]
    of_metrics.append(next(v for v in ahead.metric_variants() if v.name == "gradient of metric keys, both fp32"))
    for variant in (*chosen.values(), *of_nearest, of_attention, *of_metrics):
        usage = ahead.build(variant, target)
        assert 0 < usage.registers <= 512 and usage.shared <= 48 * 1024
        assert usage.spills <= 256, f"{variant.name} spills {usage.spills}"


def test_variants_have_names_of_their_own():
    from horosphere.kernels.triton import ahead

    names = [v.name for v in ahead.every_variant()]
    assert len(names) == len(set(names)) == 100


def test_lengths_of_one_compile(tmp_path, monkeypatch):
    """A whole number that is 1 reaches a kernel as a constant: one query against the keys of a cache, a rank of 1."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from horosphere.kernels.triton import ahead

    f32 = torch.float32
    part, pair = ahead.part(f32, 1, -1, 1, 1), ahead.metric_pair(f32, True, True, 1, 1, 1)
    upper = torch.ones(2, 1, 1)
    with ahead.recorded() as launches:
        ahead.sqdist([part], squared=False, resolve=True)
        ahead.sqdist_backward(upper, [part], squared=False, curvature=True)
        ahead.metric_sqdist(pair, f32, None)
        ahead.metric_sqdist_backward(upper, pair, f32)
        ahead.nearest([part], 1)
    for points in (
        ahead.Points([part], torch.Size((2,)), f32, resolve=True, curvature=True),
        ahead.Tokens(pair, torch.Size((2,)), f32, resolve=True),
    ):
        launches += ahead.attend(points, "inverse", upper[0], 1, 0.0)
    assert len(launches) == 15
    for launch in {(launch.kernel, launch.given.get("OF_ENTRY")): launch for launch in launches}.values():
        assert ahead.build(ahead.Variant("", f32, launch), "sm_90", ones=True).registers > 0


@pytest.mark.parametrize(
    ("shape", "batch", "runs"),
    [
        ((3, 5), (2, 2), [1, 1, 1, 1]),
        ((2, 3, 5), (3, 2), [2, 2, 2]),
        ((3, 1, 3, 5), (3, 2), [1, 2, 2, 1]),
        ((3, 2, 3, 5), (3, 2), [6]),
        ((2, 1, 5), (3, 2), [6]),
        ((3, 1), (4,), [4]),
    ],
)
def test_launches_write_a_bias_gradient_once(shape, batch, runs):
    """No launch has two entries of one matrix: programs of a launch run side by side. Sums of rows are their own."""
    from horosphere.kernels.triton.weights import Tally, kind_of, places

    bias, batch = torch.zeros(shape), torch.Size(batch)
    tally = Tally(batch, 3, 5, bias, (False, False, True), torch.zeros(()))
    kind = kind_of("inverse", bias, None, 0.0, "ieee")
    kinds = [tally.kind(kind, swapped, True) for swapped in (False, True)]
    assert sorted(k.bias_gradient > 0 for k in kinds) == [False, True]
    written = kinds[kinds[1].bias_gradient > 0]
    slices = list(tally.runs(slice(0, batch.numel()), written))
    assert [s.stop - s.start for s in slices] == runs
    if written.bias_gradient == 1:
        assert all(len(set(found)) == len(found) for found in (places(bias, batch)[s].tolist() for s in slices))
    assert tally.gradients()[2].shape == bias.shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in full where there is a GPU")
def test_the_gpu_check_says_that_it_is_skipped():
    run = subprocess.run([sys.executable, "tests/gpu/check.py"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "skipped: no GPU\n", run.stderr

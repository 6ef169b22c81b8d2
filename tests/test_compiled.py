"""Code that numba compiled: when it is taken from disk, and when it is made again. Each run is a fresh process."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import horosphere

PACKAGE = Path(horosphere.__file__).parent
# Prints the weight of one of two keys: a function of what sqdist_loops.hyperbolic says of their distances.
ATTENTION = """
import torch, horosphere as hs
x = torch.tensor([[0.1, 0.0], [0.5, 0.2]])
out = hs.attention.geodesic_attention(x[:1], x, torch.eye(2), hs.PoincareBall(), eps=0.5, impl="numba")
print(hs.__file__)
print(f"{out[0, 0].item():.5f}")
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the package, without compiled code."""
    shutil.copytree(PACKAGE, tmp_path / "horosphere", ignore=shutil.ignore_patterns("__pycache__", "data"))
    return tmp_path


def run(folder: Path, code: str = ATTENTION, **environment: str) -> tuple[str, str]:
    """What it prints last, and its log."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    settings |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    code = f"import logging; logging.basicConfig(level=logging.INFO)\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=settings, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    file, result = done.stdout.split()
    assert Path(file).parent.parent == folder
    return result, done.stderr


def compiled_files(folder: Path) -> list[Path]:
    return sorted((folder / "horosphere" / "kernels" / "numba" / "__pycache__").glob("*.nb?"))


def test_a_change_in_a_shared_helper_is_seen(copy):
    """Doubling hyperbolic() of one file changed the distances and left attention, in another, on the old code.

    About 20 s: the loops are compiled three times.
    """
    before, log = run(copy)
    assert log.count("numba compiles loops of horosphere") == 1  # said once
    again, log = run(copy)
    assert again == before and "compiles" not in log
    helper = copy / "horosphere" / "kernels" / "numba" / "sqdist_loops.py"
    text = helper.read_text()
    assert text.count("    return log1p(t + np.sqrt(t * (t + _TWO)))") == 1
    helper.write_text(text.replace("return log1p(t +", "return _TWO * log1p(t +"))
    after, log = run(copy)
    assert after != before and "compiles" in log
    helper.write_text(text)
    assert run(copy)[0] == before


def test_cut_and_foreign_files_are_made_again(copy):
    before, _ = run(copy)
    files = compiled_files(copy)
    assert {f.suffix for f in files} == {".nbi", ".nbc"}
    for f in files:
        f.write_bytes(f.read_bytes()[:100])
    after, log = run(copy)
    assert after == before and "made again" in log
    assert run(copy) == (before, "")
    for f in compiled_files(copy):
        f.write_bytes(b"no pickle")
    assert run(copy)[0] == before


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of another kind")
def test_without_a_folder_that_can_be_written(copy):
    """A package, a home and a cache that are read-only: "cannot cache function" was raised."""
    before, _ = run(copy)
    shutil.rmtree(copy / "horosphere" / "kernels" / "numba" / "__pycache__")
    blocked = copy / "blocked"
    blocked.write_text("a file where a folder would have to be")
    here = copy / "horosphere" / "kernels" / "numba" / "__pycache__"
    here.write_text("neither here")
    result, log = run(copy, HOME=str(blocked), XDG_CACHE_HOME=str(blocked / "cache"))
    assert result == before and "the result is not kept" in log
    assert stat.S_ISREG(here.stat().st_mode)


def test_other_processors_have_code_of_their_own(copy):
    before, _ = run(copy)
    number = len(compiled_files(copy))
    result, log = run(copy, NUMBA_CPU_NAME="generic")
    assert float(result) == pytest.approx(float(before), abs=1e-4)  # printed to 1e-5
    assert "compiles" in log and len(compiled_files(copy)) > number
    assert run(copy) == (before, "")

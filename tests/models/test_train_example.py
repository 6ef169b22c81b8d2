"""Training of examples/train_georesolver.py: a killed run goes on to the same bits, and the small model learns."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_georesolver.py"


def command(folder: Path, *more: str) -> list[str]:
    checkpoint = ["--checkpoint", str(folder / "run.pt"), "--every", "3", "--out", str(folder / "model.safetensors")]
    return [sys.executable, "-W", "error", str(SCRIPT), "--quick", "--steps", "12", *checkpoint, *more]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    """Slow because three fresh processes train: one to the end, one killed after a checkpoint, one that goes on."""
    through, killed = tmp_path / "through", tmp_path / "killed"
    through.mkdir()
    killed.mkdir()
    report = ("--report", str(through / "report.json"))
    subprocess.run(command(through, *report), env=environment(), check=True, capture_output=True, timeout=120)
    run = subprocess.Popen(command(killed), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (killed / "run.pt").exists() and run.poll() is None:  # it ends by itself after 12 steps
        with suppress(subprocess.TimeoutExpired):
            run.wait(timeout=0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert (killed / "run.pt").exists() and not (killed / "model.safetensors").exists()
    done = subprocess.run(command(killed), env=environment(), check=True, capture_output=True, text=True, timeout=120)
    assert int(re.search(r"goes on after step (\d+)", done.stdout)[1]) in (3, 6, 9)
    assert (killed / "model.safetensors").read_bytes() == (through / "model.safetensors").read_bytes()
    found = json.loads((through / "report.json").read_text())
    assert found["steps"] == 12 and 0 < found["cut"] < 6 and all(0 < g < 1 for g in found["gate"])
    assert found["coding"]["paper"] > 1.5 * found["coding"]["rotated"]

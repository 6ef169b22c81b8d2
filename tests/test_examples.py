"""Every script in examples/ runs as a user would run it, with --quick."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture
def run(tmp_path):
    def run(name):
        done = subprocess.run(
            [sys.executable, "-W", "error", ROOT / "examples" / name, "--quick"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_there_are_examples():
    assert "train_with_riemannian_adam.py" in EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_and_prints(run, name):
    output = run(name)
    assert output.strip()
    if name == "train_with_riemannian_adam.py":
        accuracy, kappa = re.findall(r"accuracy (\S+)  curvature (\S+)", output)[-1]
        assert float(accuracy) > 0.8
        assert float(kappa) < 0 and abs(float(kappa) + 1) > 0.05

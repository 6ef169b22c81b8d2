"""Every script in examples/ runs as a user would run it, with --quick."""

import importlib.util
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
    if name == "transformers_plugin.py" and importlib.util.find_spec("transformers") is None:
        pytest.skip("the extra 'transformers' is not installed")
    output = run(name)
    assert output.strip()
    if name == "train_with_riemannian_adam.py":
        accuracy, kappa = re.findall(r"accuracy (\S+)  curvature (\S+)", output)[-1]
        assert float(accuracy) > 0.8
        assert float(kappa) < 0 and abs(float(kappa) + 1) > 0.05
    if name == "custom_manifold_attention.py":
        line, clock = map(float, re.findall(r"by (\S+) around midnight", output))
        assert clock < 0.6 * line
        gaps = re.findall(r"level (\d).*step by step (\S+) off", output)
        assert [level for level, _ in gaps] == ["0"] * 4 + ["1"] * 4 and all(float(gap) < 1e-4 for _, gap in gaps)
    if name == "transformers_plugin.py":
        assert len(re.findall(r"horosphere:\w+ +test loss \d\.\d+", output)) == 3

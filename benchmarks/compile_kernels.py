"""Compile every Triton kernel for GPUs that are not at hand; what they use goes to benchmarks/results/.

python benchmarks/compile_kernels.py
"""

import json
import sys
from pathlib import Path

import torch
import triton

from horosphere.kernels.triton import ahead

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    rows = [
        {"kernel": variant.name, "target": target, **ahead.build(variant, target)._asdict()}
        for variant in ahead.every_variant()
        for target in ahead.TARGETS
    ]
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "compiled_kernels.json").write_text(json.dumps({**versions, "rows": rows}, indent=1) + "\n")
    lines = [f"{'kernel':42s} {'target':8s} registers  spills  shared"]
    lines += ["{kernel:42s} {target:8s} {registers:9d} {spills:7d} {shared:7d}".format(**row) for row in rows]
    text = f"Compiled ahead of time, {versions}; not run on these devices.\n" + "\n".join(lines) + "\n"
    (RESULTS / "compiled_kernels.txt").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The GeoResolver after a short training, each pattern beside a softmax model of its size; memory writes a second.

    python benchmarks/georesolver.py [PART ...] [--seconds 80]

Parts: the names in RUNS, each a fresh process of examples/train_georesolver.py that trains for so many seconds on all
threads (start-up and report come on top), and writes. Without PART all run: ten minutes. Parts run before keep their
results. Tables and numbers in benchmarks/results/georesolver.*; exits with 1 where a bar is missed: held-out loss at
most 0.8 of the unigram entropy, 50,000 writes a second, coding error of the paper's scheme at least 1.5 times this
package's on the trained model's keys.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from report import report, saved, verdict
from rich.table import Table

import horosphere as hs

RUNS = {name: ["--pattern", name] for name in ("dense", "fixed", "landmark", "summary", "softmax")}
RUNS["fixed-without-memory"] = ["--pattern", "fixed", "--memory", "0"]
RUNS["fixed-without-memory-400-steps"] = ["--pattern", "fixed", "--memory", "0", "--steps", "400"]
RUNS["softmax-400-steps"] = ["--pattern", "softmax", "--steps", "400"]
ROOT = Path(__file__).parents[1]
LOSS_BAR, WRITES_BAR, CODING_BAR = 0.8, 50_000, 1.5


def train(name: str, seconds: float) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        script = [str(ROOT / "examples" / "train_georesolver.py"), "--steps", "1000000", *RUNS[name]]
        start = time.perf_counter()
        subprocess.run([sys.executable, *script, "--seconds", str(seconds), "--report", str(out)], check=True)
        return json.loads(out.read_text()) | {"wall": time.perf_counter() - start}


def writes() -> dict:
    """Chunked writes to a full pool, D = 64, capacity 1024, chunk 256: the best of 10 runs of 40 chunks."""
    torch.manual_seed(0)
    ball, count = hs.PoincareBall(), 40 * 256
    memory = hs.memory.DynamicMemory(64, 64, 1024, ball, chunk=256)
    keys, values, losses = ball.expmap0(torch.randn(count, 64) / 8), torch.randn(count, 64), torch.randn(count)
    filler = hs.memory.DynamicMemory(64, 64, 1024, ball, k=0.0)  # about every other token founds a prototype
    filler.write(keys[:4096], values[:4096], losses[:4096])
    memory.load_state_dict(filler.state_dict())
    if len(memory) != 1024:
        raise RuntimeError(f"the pool holds {len(memory)} prototypes, not 1024")
    best = min(timed(lambda: memory.write(keys, values, losses)) for _ in range(10))
    return {"writes_per_second": count / best, "threads": torch.get_num_threads()}


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(parts: list[str], seconds: float) -> int:
    found = {name: part for name, part in saved("georesolver").items() if name in (*RUNS, "writes")}
    for name in parts:
        found[name] = writes() if name == "writes" else train(name, seconds)
    table = Table(
        "model", "held out, nats", "of unigram", "steps", "tokens/s", "memory cut", "mean gate", "prototypes", "bar"
    )
    passed = True
    for name in RUNS:
        if name not in found:
            continue
        run = found[name]
        good = run["ratio"] <= LOSS_BAR
        passed &= good
        of_memory = ["", "", ""]
        if run.get("prototypes"):
            of_memory = [f"{run['cut']:.3f}", str(run["gate"]), str(run["prototypes"])]
        row = [f"{run['loss']:.3f}", f"{run['ratio']:.3f}", str(run["steps"]), str(run["tokens_per_second"])]
        table.add_row(name, *row, *of_memory, verdict(good))
    shown = [table]
    if "coding" in found.get("dense", {}):
        error = found["dense"]["coding"]
        good = error["paper"] >= CODING_BAR * error["rotated"]
        passed &= good
        shown.append(
            f"attention of the dense model with keys in 4 bits: error {error['rotated']:.4f} rotated, "
            f"{error['paper']:.4f} as in the paper, {error['paper'] / error['rotated']:.1f}x (bar {CODING_BAR}x) "
            f"{verdict(good)}"
        )
    if "writes" in found:
        speed = found["writes"]["writes_per_second"]
        good = speed >= WRITES_BAR
        passed &= good
        threads = found["writes"]["threads"]
        shown.append(f"{speed:,.0f} memory writes/s, {threads} threads (bar {WRITES_BAR:,}) {verdict(good)}")
    report("georesolver", *shown, **found)
    return int(not passed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*RUNS, "writes"])
    parser.add_argument("--seconds", type=float, default=80.0)
    given = parser.parse_args()
    sys.exit(main(given.parts or [*RUNS, "writes"], given.seconds))

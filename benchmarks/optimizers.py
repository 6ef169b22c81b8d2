"""A step of RiemannianAdam beside geoopt's on tables of points, and beside torch's Adam on flat tensors.

    python benchmarks/optimizers.py [--rounds 60] [--quick]

Tables of 100,000 points with dense gradients that were there before; contenders alternate within one process and minima
are compared. Figures go to benchmarks/results/optimizers.json and optimizers.txt. Exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable

import torch
from report import report

import horosphere as hs

with warnings.catch_warnings():  # geoopt's import is noisy
    warnings.simplefilter("ignore")
    import geoopt

ROWS = 100_000
SPACES = {
    "ball": (hs.PoincareBall, geoopt.PoincareBall),
    "sphere": (hs.Sphere, geoopt.Sphere),
    "hyperboloid": (hs.Lorentz, geoopt.Lorentz),
}
FLAT = (100, 10_000)  # tensors, numbers of each
TABLE_BAR, FLAT_BAR = 0.5, 1.1


def table(manifold, parameter_class: type, optimizer_class: type, rows: int, dim: int, dtype) -> Callable[[], object]:
    """A function that takes one step on a fresh table, always with the same gradients."""
    generator = torch.Generator().manual_seed(0)
    raw = 0.3 * dim**-0.5 * torch.randn(rows, dim, generator=generator, dtype=dtype)
    p = parameter_class(manifold.projx(raw), manifold=manifold)
    p.grad = torch.randn(rows, dim, generator=generator, dtype=dtype)
    return optimizer_class([p], lr=1e-3).step


def flat(optimizer_class: type, dtype) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for _ in range(FLAT[0]):
        p = torch.nn.Parameter(torch.randn(FLAT[1], generator=generator, dtype=dtype))
        p.grad = torch.randn(FLAT[1], generator=generator, dtype=dtype)
        parameters.append(p)
    return optimizer_class(parameters, lr=1e-3).step


def minima(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Milliseconds: the least of so many rounds, in which all are called in turn."""
    best = [math.inf] * len(calls)
    for at in range(rounds + 3):
        for k, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if at >= 3:  # the first rounds compile and make the moments
                best[k] = min(best[k], 1e3 * (time.perf_counter() - start))
    return best


def measure(rounds: int, rows: int) -> list[dict]:
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.float64):
            common = {"threads": threads, "dtype": str(dtype).removeprefix("torch.")}
            for space, (ours, theirs) in SPACES.items():
                for dim in (10, 50):
                    calls = [
                        table(ours(), hs.ManifoldParameter, hs.optim.RiemannianAdam, rows, dim, dtype),
                        table(theirs(), geoopt.ManifoldParameter, geoopt.optim.RiemannianAdam, rows, dim, dtype),
                    ]
                    mine, other = minima(calls, rounds)
                    row = {"what": space, "dim": dim, **common, "ms": mine, "other": other, "bar": TABLE_BAR}
                    found.append(row)
            mine, other = minima([flat(hs.optim.RiemannianAdam, dtype), flat(torch.optim.Adam, dtype)], 10 * rounds)
            found.append({"what": "flat", "dim": FLAT[1], **common, "ms": mine, "other": other, "bar": FLAT_BAR})
    return found


def lines_of(found: list[dict], rows: int) -> list[str]:
    lines = [
        f"A step of RiemannianAdam, ms: {rows:,} points beside geoopt's, {FLAT[0]} flat tensors beside torch's Adam",
        f"{'':12s} {'d':>6s}  {'type':8s} threads  {'ours':>8s} {'theirs':>8s}  ratio  bar",
    ]
    for row in found:
        ratio = row["ms"] / row["other"]
        held = "held" if ratio <= row["bar"] else "MISSED"
        lines.append(
            f"{row['what']:12s} {row['dim']:6d}  {row['dtype']:8s} {row['threads']:7d}  {row['ms']:8.2f} "
            f"{row['other']:8.2f}  {ratio:5.2f}  {row['bar']:g} {held}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing written, no bars")
    options = parser.parse_args()
    found = measure(3 if options.quick else options.rounds, ROWS)
    lines = lines_of(found, ROWS)
    if options.quick:
        print("\n".join(lines))
        return 0
    report("optimizers", *lines, rows=found)
    return int(any(row["ms"] > row["bar"] * row["other"] for row in found))


if __name__ == "__main__":
    sys.exit(main())

"""Time of the three patterns of attention against the length of the sequence, and from where on they beat dense.

    python benchmarks/patterns.py [--threads 2]

Causal, forward, float32, 8 heads of 64 numbers, one sequence; the fixed pattern with the defaults of its length, 64
landmarks, 64 summaries in chunks of 64. Contenders take turns; the smallest of the rounds counts. The slope is that of
a straight line through log time against log N, from N = 1024 on: n log n has 1.1 there, n has 1, dense 2. Dense stops
where a round would take more than some seconds.
"""

import argparse
import math
import time

import matplotlib
import numpy as np
import torch
from report import RESULTS, report
from rich.table import Table

import horosphere as hs
from horosphere.attention import fixed_pattern_attention, geodesic_attention, landmark_attention, summary_attention

SIZES = tuple(2**k for k in range(8, 17))
FITTED_FROM = 1024
HEADS, SIZE, ANCHORS = 8, 64, 64
MANIFOLDS = {"flat": hs.Euclidean, "ball": hs.PoincareBall}
DENSE_TO = {"flat": 16384, "ball": 16384}
# Seconds a contender may take in all at one length, after its first round.
PATIENCE = 2.0
LARGEST_ROUNDS = 10


def contenders(manifold, n: int, dense_to: int) -> dict:
    generator = torch.Generator().manual_seed(0)

    def points(rows: int) -> torch.Tensor:
        return manifold.projx(torch.randn(1, HEADS, rows, SIZE, generator=generator) / SIZE)

    query, key, anchors = points(n), points(n), points(ANCHORS)[0]
    value = torch.randn(1, HEADS, n, SIZE, generator=generator)
    found = {
        "fixed": lambda: fixed_pattern_attention(query, key, value, manifold, is_causal=True),
        "landmark": lambda: landmark_attention(query, key, value, anchors, manifold, is_causal=True),
        "summary": lambda: summary_attention(query, key, value, manifold),
        "dense": lambda: geodesic_attention(query, key, value, manifold, is_causal=True),
    }
    if n > dense_to:
        del found["dense"]
    return found


@torch.no_grad()
def measured(calls: dict) -> dict[str, float]:
    """Seconds of each contender, smallest of its rounds, which take turns."""
    best, spent = {name: math.inf for name in calls}, dict.fromkeys(calls, 0.0)
    for call in calls.values():
        call()
    for _ in range(LARGEST_ROUNDS):
        for name, call in calls.items():
            if spent[name] > PATIENCE:
                continue
            began = time.perf_counter()
            call()
            took = time.perf_counter() - began
            best[name], spent[name] = min(best[name], took), spent[name] + took
    return best


def slope(times: dict[int, float]) -> float:
    """Of the straight line through log time against log N."""
    sizes = [n for n in times if n >= FITTED_FROM]
    return float(np.polyfit(np.log(sizes), np.log([times[n] for n in sizes]), 1)[0])


def crossing(times: dict[int, float], dense: dict[int, float]) -> str:
    """The length from which a pattern is faster than dense in every measurement, between two of them interpolated."""
    gaps = [(n, math.log(times[n] / dense[n])) for n in sorted(dense)]
    slower = [i for i, (_, gap) in enumerate(gaps) if gap >= 0]
    if not slower:
        return f"< {gaps[0][0]}"
    last = slower[-1]
    if last == len(gaps) - 1:
        return f"> {gaps[-1][0]}"
    (n, gap), (m, other) = gaps[last], gaps[last + 1]
    return f"{n * (m / n) ** (gap / (gap - other)):.0f}"


def draw(times: dict) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(times), figsize=(5 * len(times), 4), sharey=True)
    for axis, (name, of_manifold) in zip(axes, times.items(), strict=True):
        for pattern, by_size in of_manifold.items():
            axis.loglog(list(by_size), [1e3 * t for t in by_size.values()], "o-", base=2, label=pattern)
        axis.set_title(name)
        axis.set_xlabel("tokens N")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds")
    axes[0].set_yscale("log", base=10)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "patterns.png", dpi=150)


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    times: dict = {}
    for name, kind in MANIFOLDS.items():
        of_manifold = times.setdefault(name, {})
        for n in SIZES:
            for pattern, seconds in measured(contenders(kind(), n, DENSE_TO[name])).items():
                of_manifold.setdefault(pattern, {})[n] = seconds
    shown = [n for n in SIZES if n >= FITTED_FROM]
    table = Table(title=f"milliseconds, causal forward, float32, {HEADS} heads of {SIZE}, {threads} threads")
    for column in ("space", "pattern", *map(str, shown), "slope", "beats dense from N ="):
        table.add_column(column, justify="right")
    fits = {}
    for name, of_manifold in times.items():
        for pattern, by_size in of_manifold.items():
            cells = [f"{1e3 * by_size[n]:.3g}" if n in by_size else "" for n in shown]
            fit = {"slope": slope(by_size)}
            if pattern != "dense":
                fit["beats_dense_from"] = crossing(by_size, of_manifold["dense"])
            fits.setdefault(name, {})[pattern] = fit
            table.add_row(name, pattern, *cells, f"{fit['slope']:.2f}", fit.get("beats_dense_from", ""))
    report("patterns", table, threads=threads, seconds=times, fits=fits)
    draw(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    main(parser.parse_args().threads)

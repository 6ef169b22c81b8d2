"""Reconstruction of the mammals' closure in four spaces.

Each run is a process of its own, so its wall clock holds the start of Python and torch as a user's would.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from report import report, verdict
from rich.table import Table

__all__ = ["GRAPHS", "main"]

GRAPHS = ()
SEEDS = (0, 1, 2)
# Published for the 5-D ball (Nickel & Kiela 2017): MAP 0.927, mean rank 1.26.
EPOCHS = 500

# The ball's rate was the best of four (0.1, 0.15, 0.2, 0.3); the flat baseline gets four of its own, each run in full
# and wider apart, because its unit of length is another one.
RATES = (0.1, 0.3, 1.0, 3.0)
SPACES = {
    "ball, 5-D": {"manifold": "poincare", "n_components": 5, "n_epochs": EPOCHS},
    "hyperboloid, 5-D": {"manifold": "lorentz", "n_components": 5, "n_epochs": EPOCHS},
    "flat, 5-D": {"manifold": "euclidean", "n_components": 5, "n_epochs": EPOCHS},
    "ball, 2-D": {"manifold": "poincare", "n_components": 2, "n_epochs": EPOCHS},
}
# Least median MAP, largest median of the mean rank, longest run in seconds, start-up included.
BARS = {"ball, 5-D": (0.975, 1.12, 60.0), "hyperboloid, 5-D": (0.95, 1.26, 180.0)}


def one(settings: dict) -> None:
    """The body of one run: embed, score, print one line of JSON."""
    import horosphere as hs

    pairs = hs.data.mammals_closure()
    model = hs.embedding.GraphEmbedding(**settings).fit(pairs)
    scores = model.evaluate(pairs)
    print(json.dumps({"map": scores.map, "mean_rank": scores.mean_rank}))


def timed(settings: dict) -> dict:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(settings)], stdout=subprocess.PIPE, text=True, check=True
    )
    result = {**settings, **json.loads(done.stdout), "seconds": time.perf_counter() - start}
    print(
        f"{settings}: MAP {result['map']:.4f}, mean rank {result['mean_rank']:.3f}, {result['seconds']:.0f} s",
        file=sys.stderr,
    )
    return result


def main(_: dict[str, Path]) -> bool:
    runs: dict[str, list[dict]] = {}
    for name, settings in SPACES.items():
        if name == "flat, 5-D":
            search = [timed({**settings, "learning_rate": rate, "random_state": SEEDS[0]}) for rate in RATES]
            best = max(search, key=lambda run: run["map"])
            settings = {**settings, "learning_rate": best["learning_rate"]}
            runs[name] = [best, *(timed({**settings, "random_state": seed}) for seed in SEEDS[1:])]
        else:
            runs[name] = [timed({**settings, "random_state": seed}) for seed in SEEDS]

    table = Table(title="mammals, transitive closure: 1,180 nodes, 6,540 pairs; every node ranked against all others")
    for column in ("space", "MAP, seeds 0 1 2", "median", "mean rank, seeds 0 1 2", "median", "seconds", "bars"):
        table.add_column(column)
    passed = True
    for name, results in runs.items():
        maps, ranks, seconds = ([run[key] for run in results] for key in ("map", "mean_rank", "seconds"))
        bars = "-"
        if name in BARS:
            least, most, longest = BARS[name]
            good = statistics.median(maps) >= least and statistics.median(ranks) <= most and max(seconds) < longest
            passed &= good
            bars = f"{verdict(good)}: {least}, {most}, {longest:.0f} s"
        table.add_row(
            name,
            " ".join(f"{value:.4f}" for value in maps),
            f"{statistics.median(maps):.4f}",
            " ".join(f"{value:.3f}" for value in ranks),
            f"{statistics.median(ranks):.3f}",
            " ".join(f"{value:.0f}" for value in seconds),
            bars,
        )
    note = "bars: median MAP at least, median mean rank at most, each run shorter than, start-up included"
    report("mammals", table, note, runs=runs)
    return passed


if __name__ == "__main__":
    one(json.loads(sys.argv[1]))

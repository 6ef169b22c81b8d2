"""Run an operation's tests, then measure it beside its peers; figures go to benchmarks/results/ as JSON and text.

    python benchmarks/run.py distance nearest [--rounds 30] [--threads 1] [--geoopt 2]
    python benchmarks/run.py training precision_10 precision_50 --threads 1 --rounds 15 --wordnet /usr/share/wordnet

Contenders alternate within one process, so that they share whatever else the machine does; minima and medians of wall
time are printed, and of the process's CPU time, which other programs disturb less. Bars compare minima of wall time.
Exits with 1 where one is missed, 2 where tests fail.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from attention import attention_tables
from peak import peak_mib
from peers import PeerMissing, geomstats_distances, hypll_distances, versions
from tables import Bar, Contender, Table
from training import precision_tables, training_tables

import horosphere as hs
from horosphere.manifolds._geoopt import geoopt

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


class Operation(NamedTuple):
    """What is measured, and the tests that must pass before."""

    tests: list[str]
    tables: Callable[[argparse.Namespace], Iterable[Table]]


def ball_points(n: int, d: int) -> torch.Tensor:
    """Images of normal tangent vectors at the origin whose root mean square length is 1.5."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(n, d, generator=generator) * (0.75 / d**0.5)
    return hs.PoincareBall(-1.0).expmap0(u)


def distance_tables(options: argparse.Namespace) -> list[Table]:
    """The distance matrix of the ball against a bare matrix product of the same points."""
    ball, n = hs.PoincareBall(-1.0), options.points
    theirs = geoopt.PoincareBall(c=1.0)
    tables = []
    for d in (10, 64):
        x = ball_points(n, d)
        kept = torch.empty(n, n)
        compiled = torch.compile(lambda a, b: hs.cdist(a, b, ball), fullgraph=True)
        leaf = x.clone().requires_grad_()
        upper = torch.ones(n, n)

        def train(leaf=leaf, upper=upper):
            return torch.autograd.grad(hs.cdist(leaf, leaf, ball), leaf, upper)

        contenders = [
            Contender("x @ x.T, fresh", lambda x=x: x @ x.T),
            Contender("x @ x.T, kept buffer", lambda x=x, kept=kept: torch.mm(x, x.T, out=kept)),
            Contender("torch.cdist", lambda x=x: torch.cdist(x, x)),
            Contender("cdist", lambda x=x: hs.cdist(x, x, ball)),
            Contender('cdist, precision="fast"', lambda x=x: hs.cdist(x, x, ball, precision="fast")),
            Contender("cdist inside torch.compile", lambda x=x, compiled=compiled: compiled(x, x)),
            Contender("cdist, forward and backward", train, max(3, options.rounds // 5)),
        ]
        bars = [
            Bar("cdist", "x @ x.T, fresh", 5.0),
            Bar("cdist", 'cdist, precision="fast"', 1.5),
            Bar("cdist inside torch.compile", "x @ x.T, fresh", 1.8 if d == 10 else 2.2),
        ]
        if d == 10 and options.geoopt:
            # every intermediate is (n, n, d); in d = 64 that is 4 GiB each
            contenders.append(Contender("geoopt, broadcast", lambda x=x: theirs.dist(x[:, None], x), options.geoopt))
            bars += [Bar("cdist", "geoopt, broadcast", 1 / 10)]
            bars += [Bar("cdist inside torch.compile", "geoopt, broadcast", 1 / 30)]
        for name, peer in (("hypll", hypll_distances), ("geomstats, broadcast", geomstats_distances)):
            if d == 10 and options.geoopt:
                try:
                    contenders.append(Contender(name, peer(x), options.geoopt))
                except PeerMissing as missing:
                    print(missing, file=sys.stderr)
        tables.append(Table(f"distance matrix, ball, float32, n = {n}, d = {d}", contenders, bars))
    return tables


def nearest_tables(options: argparse.Namespace) -> list[Table]:
    """The 10 nearest of every point of the ball; peak memory of the large case goes into its title."""
    ball = hs.PoincareBall(-1.0)
    small, large = ball_points(4_000, 10), ball_points(50_000, 10)
    setup = f"import torch\nfrom run import ball_points, hs\ntorch.set_num_threads({options.threads})\n"
    setup += "ball, x = hs.PoincareBall(-1.0), ball_points(50_000, 10)\nhs.knn(x[:300], x[:300], ball, 10)"
    mib = peak_mib(setup, "hs.knn(x, x, ball, 10)")
    if mib > 512:
        raise SystemExit(f"knn of 50,000 points took {mib:.0f} MiB above the loaded package, more than 512")

    def by_matrix():
        return hs.cdist(small, small, ball).topk(10, largest=False)

    return [
        Table(
            "10 nearest, ball, float32, n = 4000, d = 10",
            [Contender("matrix and topk", by_matrix), Contender("knn", lambda: hs.knn(small, small, ball, 10))],
            [],
        ),
        Table(
            f"10 nearest, ball, float32, n = 50000, d = 10: peak {mib:.0f} MiB above the loaded package (bar 512)",
            [Contender("knn", lambda: hs.knn(large, large, ball, 10), 2)],
            [],
        ),
    ]


OPERATIONS = {
    "attention": Operation(
        ["tests/kernels/test_attention.py", "tests/kernels/test_attention_tiled.py"], attention_tables
    ),
    "distance": Operation(["tests/kernels/test_sqdist.py", "tests/kernels/test_compiled.py"], distance_tables),
    "nearest": Operation(["tests/kernels/test_nearest.py"], nearest_tables),
    "training": Operation(
        ["tests/embedding/test_engines.py", "tests/embedding/test_compiled_ball.py"], training_tables
    ),
    "precision_10": Operation(["tests/embedding/test_schedule.py"], precision_tables),
    "precision_50": Operation(["tests/embedding/test_schedule.py"], partial(precision_tables, negatives=50)),
}


def measure(table: Table, rounds: int) -> dict[str, dict]:
    """Alternate the contenders; after one call of each to warm up."""
    wall: dict[str, list[float]] = {c.name: [] for c in table.contenders}
    cpu: dict[str, list[float]] = {c.name: [] for c in table.contenders}
    for c in table.contenders:
        c.call()
    for r in range(rounds):
        for c in table.contenders:
            if c.rounds is not None and r >= c.rounds:
                continue
            start, start_cpu = time.perf_counter(), time.process_time()
            result = c.call()
            wall[c.name].append(time.perf_counter() - start)
            cpu[c.name].append(time.process_time() - start_cpu)
            del result
    return {
        name: {
            "min_ms": 1e3 * min(times),
            "median_ms": 1e3 * statistics.median(times),
            "min_cpu_ms": 1e3 * min(cpu[name]),
            "rounds": len(times),
        }
        for name, times in wall.items()
    }


def describe(options: argparse.Namespace) -> dict:
    """Device and versions."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next(
            (s.split(":")[1].strip() for s in info.read_text().splitlines() if s.startswith("model name")), model
        )
    return {
        "date": datetime.date.today().isoformat(),
        "device": f"CPU, {model}, {options.threads} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **versions(),
        "horosphere": hs.__version__,
    }


def report(table: Table, times: dict[str, dict]) -> tuple[list[str], bool]:
    """Lines of text, and whether all bars hold."""
    if not times:
        return [table.title, *table.notes], table.held
    first = table.contenders[0].name
    speed = "  pairs/s" if table.pairs else ""
    lines = [table.title, f"  {'':32s} min ms  median  CPU ms  times the first{speed}"]
    for name, t in times.items():
        ratio, ratio_cpu = t["min_ms"] / times[first]["min_ms"], t["min_cpu_ms"] / times[first]["min_cpu_ms"]
        figures = f"{t['min_ms']:7.1f} {t['median_ms']:7.1f} {t['min_cpu_ms']:7.1f}"
        speed = f"  {1e3 * table.pairs / t['min_ms']:.0f}" if table.pairs else ""
        lines.append(f"  {name:32s}{figures}  {ratio:.2f} (CPU {ratio_cpu:.2f}){speed}")
    lines += table.notes
    good = table.held
    for bar in table.bars:
        ratio = times[bar.name]["min_ms"] / times[bar.baseline]["min_ms"]
        good = good and ratio <= bar.limit
        word = "holds" if ratio <= bar.limit else "MISSED"
        lines.append(f"  bar: {bar.name} at most {bar.limit:.3g} x {bar.baseline}: {ratio:.3g}, {word}")
    return lines, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("operations", nargs="*", default=list(OPERATIONS), help=f"of {', '.join(OPERATIONS)}")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--points", type=int, default=4000, help="n of the distance matrix")
    parser.add_argument("--geoopt", type=int, default=2, help="rounds of geoopt's broadcast, which takes 3 GB; 0: none")
    parser.add_argument(
        "--wordnet", metavar="FOLDER", help="WordNet's database files; without it training is on mammals"
    )
    parser.add_argument("--synsets", type=int, default=250, help="drawn for the precision of all trainings")
    parser.add_argument("--passes", type=int, default=10, help="over their pairs")
    parser.add_argument("--whole-passes", type=int, default=0, help="over all pairs, ours and the rival's; 0: none")
    options = parser.parse_args()
    unknown = set(options.operations) - set(OPERATIONS)
    if unknown:
        parser.error(f"unknown operations {sorted(unknown)}; there are {', '.join(OPERATIONS)}")
    torch.set_num_threads(options.threads)
    RESULTS.mkdir(exist_ok=True)
    all_good = True
    for name in options.operations:
        operation = OPERATIONS[name]
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *operation.tests]
        if subprocess.run(tests, cwd=ROOT).returncode:
            print(f"{name}: tests fail; nothing is measured", file=sys.stderr)
            return 2
        about = describe(options)
        lines, found = [", ".join(f"{key} {value}" for key, value in about.items())], []
        print(lines[0])
        for table in operation.tables(options):
            times = measure(table, options.rounds)
            text, good = report(table, times)
            all_good = all_good and good
            lines += text
            print("\n".join(text), flush=True)
            bars = [b._asdict() for b in table.bars]
            found.append({"title": table.title, "times": times, "bars": bars, "details": table.details})
            # After every table: what is measured so far outlives a run that is cut short.
            everything = {**about, "tests": "passed", "tables": found}
            (RESULTS / f"{name}.json").write_text(json.dumps(everything, indent=1) + "\n")
            (RESULTS / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())

"""What per-token metrics cost, against D and R; figures go to benchmarks/results/metric.json and metric.txt.

    python benchmarks/metric.py [--rounds 7] [--quick]

Contenders alternate within one process and minima are compared. Slopes are exponents of fitted power laws. Exits with 1
where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

import horosphere as hs
from horosphere.attention import geodesic_attention, metric_attention

RESULTS = Path(__file__).parent / "results"


def minima(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds: the least of so many rounds, in which all are called in turn."""
    best = dict.fromkeys(calls, math.inf)
    for at in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if at:  # the first round warms up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def slope(sizes: list[int], times: list[float]) -> float:
    """Exponent of the least-squares power law."""
    x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (sizes, times))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


def metrics(n: int, dim: int, rank: int, batch: tuple[int, ...] = ()) -> hs.TokenMetric:
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(*batch, n, generator=generator) + 0.5
    return hs.TokenMetric(scale, torch.randn(*batch, n, dim, rank, generator=generator) * dim**-0.5)


def solving(dim: int, rank: int, tokens: int = 32) -> Callable[[], object]:
    g, v = metrics(tokens, dim, rank), torch.randn(tokens, dim)
    return lambda: hs.TokenMetric(g.scale, g.factor).solve(v)


def token_part(dim: int, rank: int, n: int) -> Callable[[], object]:
    """All distances under the metrics of one end."""
    g, q, k = metrics(n, dim, rank), torch.randn(n, dim), torch.randn(n, dim)
    return lambda: hs.metric_sqdist(q, k, g, None, end="query", precision="fast")


def slopes(rounds: int, quick: bool) -> list[dict]:
    dims = [256, 512, 1024] if quick else [512, 1024, 2048, 4096, 8192]
    ranks = [2, 4, 8] if quick else [2, 4, 8, 16, 32]
    n = 128 if quick else 512
    rows = []
    for name, make, along_d, along_r in (
        ("solve", solving, dims, ranks),
        ("distances, one end", lambda d, r: token_part(d, r, n), [d // 4 for d in dims], ranks),
    ):
        fixed_d = max(along_d) // 2
        times = minima({d: make(d, 4) for d in along_d}, rounds)
        rows.append(
            {"what": name, "against": "D", "sizes": along_d, "times": [times[d] for d in along_d], "limit": 1.25}
        )
        times = minima({r: make(fixed_d, r) for r in along_r}, rounds)
        rows.append(
            {"what": name, "against": "R", "sizes": along_r, "times": [times[r] for r in along_r], "limit": 2.0}
        )
    for row in rows:
        row["slope"] = slope(row["sizes"], row["times"])
    return rows


def dense_inverse(rounds: int, quick: bool) -> dict:
    dim, rank = (512, 16) if quick else (4096, 16)
    g, v = metrics(1, dim, rank), torch.randn(1, dim)
    dense = g.dense()[0]
    calls = {
        "low rank": lambda: hs.TokenMetric(g.scale, g.factor).solve(v),
        "dense": lambda: torch.linalg.inv(dense) @ v[0],
    }
    times = minima(calls, min(rounds, 3))
    return {"dim": dim, "rank": rank, **times, "ratio": times["dense"] / times["low rank"]}


def attention(rounds: int, quick: bool) -> dict:
    heads, n, dim = 4, 256 if quick else 2048, 64
    q, k, v = (torch.randn(heads, n, dim, generator=torch.Generator().manual_seed(s)) for s in range(3))
    flat = hs.Euclidean()

    def with_gradients(call: Callable, *leaves: torch.Tensor) -> Callable[[], object]:
        leaves = [t.clone().requires_grad_() for t in leaves]
        return lambda: torch.autograd.grad(call(*leaves).sum(), leaves)

    calls = {
        "flat": lambda: geodesic_attention(q, k, v, flat),
        "flat, gradients": with_gradients(lambda q, k, v: geodesic_attention(q, k, v, flat), q, k, v),
    }
    for rank in (1, 2, 4, 8):
        g = metrics(n, dim, rank, (heads,))
        for end in ("query", "mean"):
            calls[f"{end} {rank}"] = lambda g=g, end=end: metric_attention(q, k, v, g, g, end=end)
    g = metrics(n, dim, 4, (heads,))
    for end in ("query", "mean"):

        def attend(q, k, v, s, u, end=end):
            own = hs.TokenMetric(s, u)
            return metric_attention(q, k, v, own, own, end=end)

        calls[f"{end} 4, gradients"] = with_gradients(attend, q, k, v, g.scale, g.factor)
    times = minima(calls, rounds)
    base = {"flat": times["flat"], "flat, gradients": times["flat, gradients"]}
    ratios = {name: t / base["flat, gradients" if "gradients" in name else "flat"] for name, t in times.items()}
    extra = {end: [times[f"{end} {r}"] - times["flat"] for r in (2, 4, 8)] for end in ("query", "mean")}
    linear = {end: slope([2, 4, 8], [max(t, 1e-9) for t in values]) for end, values in extra.items()}
    return {"heads": heads, "n": n, "dim": dim, "times": times, "ratios": ratios, "slopes in R": linear}


def report(found: dict) -> tuple[list[str], bool]:
    lines, held = [f"{found['device']}, {found['threads']} threads, torch {torch.__version__}, float32", ""], True

    def bar(text: str, value: float, limit: float, below: bool = True) -> None:
        nonlocal held
        good = value <= limit if below else value >= limit
        held &= good
        lines.append(f"{text:58s} {value:8.2f}   bar {limit:g} {'held' if good else 'MISSED'}")

    for row in found["slopes"]:
        times = "  ".join(f"{n}: {1e3 * t:.2f}" for n, t in zip(row["sizes"], row["times"], strict=True))
        lines.append(f"{row['what']} against {row['against']}, ms   {times}")
        bar(f"  slope against {row['against']}", row["slope"], row["limit"])
    inverse = found["dense inverse"]
    text = f"dense inverse over solve, D = {inverse['dim']}, R = {inverse['rank']}, one token"
    lines.append(f"{text:58s} {inverse['ratio']:8.0f}   ({inverse['dense']:.3f} s over {inverse['low rank']:.5f} s)")
    a = found["attention"]
    lines += [
        "",
        f"attention, {a['heads']} heads, N = {a['n']}, D = {a['dim']}; flat takes {1e3 * a['times']['flat']:.1f} ms",
    ]
    limits = {"query 4": 3.5, "mean 4": 6.5}
    for name, ratio in a["ratios"].items():
        if name in limits:
            bar(f"  {name[:-1]}R = 4 over flat", ratio, limits[name])
        elif "flat" not in name:
            lines.append(f"  {name.replace(' ', ' R = ', 1) + ' over flat':56s} {ratio:8.2f}")
    for end, value in a["slopes in R"].items():
        bar(f"  {end}: exponent of R in what is beyond flat, R = 2, 4, 8", value, 1.15)
    return lines, held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written, no bars")
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    found = {"device": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    with torch.no_grad():
        found["slopes"] = slopes(rounds, options.quick)
        found["dense inverse"] = dense_inverse(rounds, options.quick)
    found["attention"] = attention(rounds, options.quick)
    lines, held = report(found)
    print("\n".join(lines))
    if options.quick:
        return 0
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "metric.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "metric.txt").write_text("\n".join(lines) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Does the cost of a sparse step depend on the number of rows?

The step of batch 100 with 50 negatives gathers 100 * 52 rows in 10 dimensions. "Same rows": both tables touch the same
number of distinct rows, so only the size of the table differs; the bar of 1.5 holds for these. "Drawn": rows drawn
uniformly, so that the large table has more distinct rows to move; printed beside, without a bar.
Exits with 1 where the bar is missed.

    python benchmarks/sparse_step.py
"""

import sys
import time

import torch

import horosphere as hs

TABLES = (1_180, 82_115)
GATHERED = 100 * 52
SAME = 1_164  # about as many distinct rows as 5,200 draws from 1,180 hit
ROUNDS = 300
BAR = 1.5


def stepper(rows: int, distinct: int, optimizer_class: type, **settings):
    """A function that takes one step on a fresh table, always with the same gathered gradients."""
    generator = torch.Generator().manual_seed(0)
    table = hs.ManifoldParameter(1e-3 * torch.randn(rows, 10, generator=generator), hs.PoincareBall())
    optimizer = optimizer_class([table], lr=0.1, **settings)
    touched = torch.randperm(rows, generator=generator)[:distinct]
    ids = touched[torch.randint(distinct, (GATHERED,), generator=generator)]
    values = 1e-3 * torch.randn(GATHERED, 10, generator=generator)

    def step() -> float:
        table.grad = torch.sparse_coo_tensor(ids[None], values, (rows, 10), check_invariants=False)
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    return step


def main() -> int:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, CPU, 1 thread; {GATHERED} gathered rows, d = 10, float32, minima of {ROUNDS}")
    worst = 0.0
    for name, optimizer_class, settings in (
        ("RiemannianSGD", hs.optim.RiemannianSGD, {}),
        ("RiemannianSGD, momentum", hs.optim.RiemannianSGD, {"momentum": 0.9}),
        ("RiemannianAdam", hs.optim.RiemannianAdam, {}),
    ):
        for kind in ("same rows", "drawn"):
            steps = [
                stepper(rows, SAME if kind == "same rows" else rows, optimizer_class, **settings) for rows in TABLES
            ]
            times = [[step() for step in steps] for _ in range(ROUNDS)]
            small, large = (min(column) for column in zip(*times, strict=True))
            if kind == "same rows":
                worst = max(worst, large / small)
            print(
                f"{name:24s} {kind:10s} {1e3 * small:.3f} ms at {TABLES[0]:,} rows, "
                f"{1e3 * large:.3f} ms at {TABLES[1]:,}: ratio {large / small:.2f}"
            )
    print(f"worst ratio, same rows: {worst:.2f}, bar {BAR}")
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())

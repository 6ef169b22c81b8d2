"""A memory that grows with surprise, on a stream whose distribution changes four times.

Tokens lie around a centre in the Poincare ball that has a value of its own; at each change a new centre joins the old
ones. The memory predicts a token's value from where the token lies, and where the error exceeds what was usual, a
prototype is born. Three thresholds are compared: mean + 3 sigma of the last losses, the one that grows with time, and
the mean alone.

    python examples/stream_with_change_point.py [--quick] [--out stream.png]
"""

import argparse
from pathlib import Path

import torch

import horosphere as hs

DIM, VALUES, CHUNK, CHANGES = 8, 6, 50, 4


def stream(ball: hs.PoincareBall, tokens: int, changes: list[int]):
    """Chunks (points, values, centres so far)."""
    generator = torch.Generator().manual_seed(0)
    centres = ball.expmap0(0.5 * torch.randn(CHANGES + 1, DIM, generator=generator))
    meanings = torch.randn(CHANGES + 1, VALUES, generator=generator)
    for start in range(0, tokens, CHUNK):
        known = 1 + sum(start >= change for change in changes)
        which = torch.randint(known, (CHUNK,), generator=generator)
        around = 0.1 * torch.randn(CHUNK, DIM, generator=generator)  # at distance 0.28 in the mean
        points = ball.expmap(centres[which], around / ball.lambda_x(centres[which], keepdim=True))
        yield points, meanings[which] + 0.3 * torch.randn(CHUNK, VALUES, generator=generator), centres[:known]


def run(threshold: str, k: float, tokens: int, changes: list[int]):
    """Losses, surprises, how many tokens after each change its centre had a prototype, and the pool's size."""
    ball = hs.PoincareBall()
    memory = hs.memory.DynamicMemory(DIM, VALUES, 256, ball, threshold=threshold, k=k, chunk=CHUNK, eps=0.01)
    losses, surprises, found = [], [], {}
    for start, (points, values, centres) in zip(range(0, tokens, CHUNK), stream(ball, tokens, changes), strict=True):
        predicted = memory.read(points)  # before the memory sees them
        loss = (predicted - values).square().mean(-1)
        losses.append(loss)
        surprises.append(memory.write(points, values, loss).surprising)
        for change, centre in zip(changes, centres[1:], strict=False):
            if change not in found and ball.dist(centre, memory.points).min() < 0.4:
                found[change] = start + CHUNK - change
    return torch.cat(losses), torch.cat(surprises), [found.get(change) for change in changes], len(memory)


def plot(results: dict, changes: list[int], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    for name, (losses, surprises, _, _) in results.items():
        smooth = losses.unfold(0, 200, 50).mean(-1)
        above.plot(200 + 50 * torch.arange(len(smooth)), smooth, label=name)
        below.plot(surprises.cumsum(0), label=name)
    for axis in (above, below):
        for change in changes:
            axis.axvline(change, color="0.7", linestyle=":")
    above.set_ylabel("error, mean of 200 tokens")
    below.set_ylabel("surprises so far")
    below.set_yscale("symlog")
    below.set_ylim(bottom=0)
    below.set_xlabel("tokens")
    below.legend()
    figure.savefig(out, dpi=120)
    plt.close(figure)


def main(quick: bool, out: Path) -> dict:
    tokens = 5000 if quick else 50_000
    changes = [tokens * (i + 1) // (CHANGES + 1) for i in range(CHANGES)]
    results = {}
    for name, threshold, k in (("mean + 3 sigma", "mean", 3.0), ("growing", "growing", 3.0), ("mean", "mean", 0.0)):
        losses, surprises, found, size = results[name] = run(threshold, k, tokens, changes)
        parts = [int(part.sum()) for part in surprises.split(tokens // (CHANGES + 1))]
        print(
            f"{name:15s} surprises from change to change {parts}, prototypes {size}; "
            f"a new centre has one after {found} tokens; last error {losses[-1000:].mean():.3f}"
        )
    plot(results, changes, out)
    print(f"curves in {out}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the stream")
    parser.add_argument("--out", type=Path, default=Path("stream.png"))
    given = parser.parse_args()
    main(given.quick, given.out)

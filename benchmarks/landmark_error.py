"""How far attention through landmarks is from dense attention: L-HIDA, and the Nystrom form beside it.

    python benchmarks/landmark_error.py

256 queries and keys in 16 dimensions, drawn alike; landmarks by k-means++ from the keys; eps a hundredth of the mean
squared distance; float64; the error is |o - dense| / |dense| over all outputs, the median of five draws. Queries and
keys spread out, or in 16 clusters; values unrelated to the keys, or a smooth function of them. "mean of all values" is
what no attention at all would give. A few seconds; it leaves results/landmark_error.txt and .json.
"""

import torch
from report import report
from rich.table import Table

import horosphere as hs

__all__ = ["COUNTS", "errors", "main"]

N, D, HEADS, CLUSTERS, SEEDS = 256, 16, 2, 16, range(5)
COUNTS = (8, 32, 128, 256)
SPACES = {"flat": hs.Euclidean(), "ball": hs.PoincareBall(), "sphere": hs.Sphere()}
KINDS = ("spread, unrelated values", "spread, smooth values", "clusters, smooth values")


def errors(space: str, kind: str, seed: int) -> dict[str, list[float]]:
    """Relative errors of both forms for each number of landmarks, and of the mean."""
    generator = torch.Generator().manual_seed(seed)
    manifold = SPACES[space]
    numbers = torch.randn(3, 1, HEADS, N, D, generator=generator, dtype=torch.float64)
    if kind.startswith("clusters"):
        centres = torch.randn(1, HEADS, CLUSTERS, D, generator=generator, dtype=torch.float64)
        numbers[:2] = (
            centres[:, :, torch.randint(CLUSTERS, (2, N), generator=generator)].movedim(2, 0) + 0.2 * numbers[:2]
        )
    query, key = (hs.attention.into_manifold(x, manifold) for x in numbers[:2])
    value = numbers[2]
    if kind.endswith("smooth values"):
        value = torch.tanh(key @ torch.randn(D, D, generator=generator, dtype=torch.float64))
    eps = 0.01 * hs.cdist(query, key, manifold, squared=True).mean()
    dense = hs.attention.geodesic_attention(query, key, value, manifold, eps=eps)
    found = {"mean of all values": [_error(value.mean(-2, keepdim=True).expand_as(dense), dense)] * len(COUNTS)}
    for m in COUNTS:
        anchors = hs.attention.choose_landmarks(key, m, manifold, generator=generator)
        outs = {
            "L-HIDA, with mass": hs.attention.landmark_attention(query, key, value, anchors, manifold, eps=eps),
            "Nystrom": hs.attention.nystrom_attention(query, key, value, anchors, manifold, eps=eps).out,
        }
        for name, out in outs.items():
            found.setdefault(name, []).append(_error(out, dense))
    return found


def _error(out: torch.Tensor, right: torch.Tensor) -> float:
    return ((out - right).norm() / right.norm()).item()


def main() -> None:
    table = Table(title=f"Relative error against dense attention, {N} keys, median of {len(SEEDS)} draws")
    for column in ("space", "keys and values", "form", *(f"m = {m}" for m in COUNTS)):
        table.add_column(column)
    numbers = {}
    for space in SPACES:
        for kind in KINDS:
            draws = [errors(space, kind, seed) for seed in SEEDS]
            for form in draws[0]:
                median = torch.tensor([draw[form] for draw in draws], dtype=torch.float64).median(0).values.tolist()
                numbers[f"{space}, {kind}, {form}"] = median
                table.add_row(space, kind, form, *(f"{error:.2g}" for error in median))
    report("landmark_error", table, counts=COUNTS, errors=numbers)


if __name__ == "__main__":
    main()

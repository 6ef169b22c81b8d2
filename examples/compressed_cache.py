"""What a cache of coded tokens costs and saves: error by bit width, and memory while decoding.

The first table codes keys of the Poincare ball and measures the error of attention, for queries that are distributed
like the keys and for queries that sit on a key, with this package's scheme and the paper's. The second decodes one
long sequence with every kind of cache and measures what it holds.

    python examples/compressed_cache.py [--quick] [--out cache.png]
"""

import argparse
import math
from pathlib import Path

import torch

import horosphere as hs
from horosphere.attention import DenseCache
from horosphere.memory import CompressedCache, HyperbolicCompressor, SummaryCache

DIM, EPS = 64, 0.02
BALL = hs.PoincareBall()


def points(count: int, clustered: bool, radius: float, generator: torch.Generator) -> torch.Tensor:
    spread = torch.randn(count, DIM, generator=generator)
    if clustered:
        centres = torch.randn(16, DIM, generator=generator)
        spread = centres[torch.randint(16, (count,), generator=generator)] + 0.3 * spread
    return BALL.expmap0(radius * spread / math.sqrt(DIM))


def output_error(code: HyperbolicCompressor, keys, queries, values, eps: float) -> float:
    """Mean relative error of the attention of the queries when the keys are coded."""
    right, coded = (
        hs.attention.geodesic_attention(queries, k, values, BALL, eps=eps)
        for k in (keys, code.decode(code.encode(keys)))
    )
    return ((coded - right).norm(dim=-1) / right.norm(dim=-1)).mean().item()


def errors(quick: bool) -> list[tuple]:
    """Rows (keys, radius, bits, compression, errors of both schemes for both kinds of queries)."""
    rows, count = [], 512 if quick else 4096
    for clustered in (False, True):
        for radius in (1.0,) if quick else (0.3, 1.0, 3.0):
            generator = torch.Generator().manual_seed(0)
            everything = points(count + 256, clustered, radius, generator)
            keys, queries = everything[:count], everything[count:]
            values = torch.randn(count, DIM, generator=generator)
            eps = 0.01 * hs.cdist(queries, keys, BALL, squared=True).mean().item()
            for bits in (2, 4) if quick else (2, 3, 4, 6, 8):
                codes = [HyperbolicCompressor(bits, 6, scheme) for scheme in ("rotated", "paper")]
                codes[0].calibrate_(keys)
                ratio = keys.numel() * 4 / codes[0].encode(keys).nbytes
                found = [output_error(c, keys, q, values, eps) for q in (queries, keys[:256]) for c in codes]
                rows.append(("clustered" if clustered else "random", radius, bits, ratio, *found))
    return rows


def held(cache) -> tuple[int, int]:
    """Bytes of keys and of everything that a cache holds for its tokens."""
    if isinstance(cache, CompressedCache):
        return cache.key_bytes, cache.nbytes
    if isinstance(cache, SummaryCache):
        return cache.nbytes, cache.nbytes
    size = cache.key.element_size()
    return cache.key.numel() * size, (cache.key.numel() + cache.value.numel()) * size


@torch.no_grad()
def decode(quick: bool) -> dict[str, list[tuple]]:
    """By kind of cache (tokens, bytes of keys, bytes, relative error of the newest outputs) while a sequence grows."""
    tokens, piece, last = (2000, 500, 16) if quick else (100_000, 5000, 16)
    generator = torch.Generator().manual_seed(0)
    caches = {
        "dense": DenseCache(),
        "4 bits": CompressedCache(HyperbolicCompressor(4, 6)),
        "4 bits, values kept": CompressedCache(HyperbolicCompressor(4, 6), code_values=False),
        "64 summaries": SummaryCache(BALL, slots=64),
    }
    found: dict[str, list[tuple]] = {name: [] for name in caches}
    for at in range(0, tokens, piece):
        key = points(piece, False, 1.0, generator)[None, None]
        value = torch.randn(1, 1, piece, DIM, generator=generator)
        right = None
        for name, cache in caches.items():
            if isinstance(cache, SummaryCache):
                out = cache.attend(key, key, value, BALL, eps=EPS)[:, :, -last:]
            else:  # only the last tokens of a piece ask
                cache.append(key[:, :, :-last], value[:, :, :-last])
                out = cache.attend(key[:, :, -last:], key[:, :, -last:], value[:, :, -last:], BALL, eps=EPS)
            right = out if right is None else right
            error = ((out - right).norm(dim=-1) / right.norm(dim=-1)).mean().item()
            found[name].append((at + piece, *held(cache), error))
    return found


def plot(rows: list[tuple], found: dict[str, list[tuple]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for column, name in enumerate(("rotated", "paper"), start=4):
        some = [row for row in rows if row[0] == "random" and row[1] == 1.0]
        left.semilogy([row[2] for row in some], [row[column] for row in some], "o-", label=name)
    left.set(xlabel="bits a coordinate", ylabel="relative error of attention", title="random keys, radius 1")
    left.legend()
    for name, rows_of in found.items():
        right.plot([row[0] for row in rows_of], [row[2] / 2**20 for row in rows_of], label=name)
    right.set(xlabel="tokens decoded", ylabel="MiB of keys and values, one head, D = 64", yscale="log")
    right.legend()
    figure.savefig(out, dpi=120)
    plt.close(figure)


def main(quick: bool, out: Path) -> tuple[list[tuple], dict[str, list[tuple]]]:
    rows = errors(quick)
    print("keys       radius  bits  smaller   like the keys: rotated  paper  ratio   on a key: rotated  paper  ratio")
    for keys, radius, bits, smaller, *e in rows:
        print(
            f"{keys:10s} {radius:5.1f} {bits:5d} {smaller:7.2f}x  {e[0]:22.4f} {e[1]:6.3f} {e[1] / e[0]:5.1f}x"
            f" {e[2]:18.3f} {e[3]:6.3f} {e[3] / e[2]:5.1f}x"
        )
    found = decode(quick)
    print(
        "\ncache                 tokens  MiB of keys  MiB in all  keys smaller  all smaller  error of the newest tokens"
    )
    for name, rows_of in found.items():
        tokens, keys, everything, error = rows_of[-1]
        dense = found["dense"][-1]
        print(
            f"{name:20s} {tokens:7d} {keys / 2**20:12.3f} {everything / 2**20:11.3f} {dense[1] / keys:12.2f}x "
            f"{dense[2] / everything:11.2f}x {error:12.3f}"
        )
    plot(rows, found, out)
    print(f"curves in {out}")
    return rows, found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer keys and tokens")
    parser.add_argument("--out", type=Path, default=Path("cache.png"))
    given = parser.parse_args()
    main(given.quick, given.out)

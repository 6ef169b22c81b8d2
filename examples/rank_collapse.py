"""Do metrics of the tokens' own keep attention from making all tokens alike? The numbers, at initialisation.

Two tables. First, ranks: squared distances under one shared metric, under the metric of one end and under the mean of
both ends, and beside each the weights 1/(d^2 + eps) that attention uses. Second, the residual |X - 1 x^T| / |X| by
depth (Dong, Cordonnier and Loukas 2021) in random stacks of softmax attention, inverse distance on flat space and on a
ball, and per-token metrics, each with and without residual connections and feed-forward parts. Per-token metrics come
twice: in the distances alone, and with values carried between the fibres, which multiplies every token's mean by a
matrix of its own.

    python examples/rank_collapse.py [--quick] [--figure rank_collapse.png]
"""

import argparse
import math

import torch
from torch.nn import functional

import horosphere as hs
from horosphere.attention import geodesic_attention, into_manifold, metric_attention
from horosphere.diagnostics import effective_rank, numerical_rank, rank_residual

KINDS = ("softmax", "inverse distance", "ball", "per-token distance", "per-token, carried")
PARTS = (
    ("attention alone", False, False),
    ("with feed-forward", False, True),
    ("with residual", True, False),
    ("with both", True, True),
)


def ranks(n: int = 256, dim: int = 8, rank: int = 2) -> list[tuple[str, int, int, str]]:
    """(metric, rank of d^2, rank of the weights, bound of the first) at threshold 1e-6."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    s = torch.rand(2, n, generator=generator, dtype=torch.float64) + 0.5
    u = torch.randn(2, n, dim, rank, generator=generator, dtype=torch.float64)
    g_q, g_k = (hs.TokenMetric(s[i], u[i]) for i in range(2))
    shared = hs.TokenMetric(s[0, :1].expand(n), u[0, :1].expand(n, dim, rank))
    found = []
    for name, metrics, end, bound in (
        ("shared", (shared, shared), "mean", dim + 2),
        ("one end", (g_q, None), "query", (dim + 1) * (dim + 2) // 2),
        ("mean of both ends", (g_q, g_k), "mean", (dim + 1) * (dim + 2)),
    ):
        d2 = hs.metric_sqdist(q, k, *metrics, end=end)
        weights = 1 / (d2 + 0.01 * d2.mean())
        found.append((name, int(numerical_rank(d2)), int(numerical_rank(weights)), str(bound)))
    return found


class Layer:
    """One random layer: attention of a kind, and a feed-forward part."""

    def __init__(self, kind: str, dim: int, heads: int, rank: int, generator: torch.Generator):
        def draw(*shape, gain=1.0):
            return torch.randn(*shape, generator=generator, dtype=torch.float64) * gain / math.sqrt(shape[0])

        self.kind, self.heads, self.rank = kind, heads, rank
        self.q, self.k, self.v, self.o = (draw(dim, dim) for _ in range(4))
        self.scale, self.factor = draw(dim), draw(dim, dim * rank, gain=0.3)
        self.up, self.down = draw(dim, 4 * dim, gain=math.sqrt(2)), draw(4 * dim, dim)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._split(x @ w) for w in (self.q, self.k, self.v))
        if self.kind == "softmax":
            out = functional.scaled_dot_product_attention(q, k, v)
        elif self.kind.startswith("per-token"):
            g = hs.TokenMetric(
                functional.softplus(x @ self.scale + 0.54), (x @ self.factor).unflatten(-1, (-1, self.rank))
            )
            local = g.heads(self.heads)
            eps = 0.01 * hs.metric_sqdist(q, k, local, local).mean()
            carried = self.kind.endswith("carried")
            if carried:
                v = self._split(g.sqrt_matmul(x @ self.v))
            out = metric_attention(q, k, v, local, local, eps=eps)
            if not carried:
                return self._merge(out) @ self.o
            return g.inv_sqrt_matmul(self._merge(out)) @ self.o
        else:
            manifold = hs.Euclidean() if self.kind == "inverse distance" else hs.PoincareBall(-1.0)
            if self.kind == "ball":
                q, k = into_manifold(q, manifold), into_manifold(k, manifold)
            eps = 0.01 * hs.cdist(q, k, manifold, squared=True).mean()
            out = geodesic_attention(q, k, v, manifold, eps=eps)
        return self._merge(out) @ self.o

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x @ self.up) @ self.down

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)

    def _merge(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-2, -3).flatten(-2)


@torch.no_grad()
def by_depth(
    kind: str, skips: bool, feed_forward: bool, *, depth: int, n: int, dim: int, seeds: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Residual, the same in the composite norm, and effective rank after 0 ... depth layers, means over seeds."""
    found = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, dim, generator=generator, dtype=torch.float64)
        values = []
        for at in range(depth + 1):
            values.append([rank_residual(x), rank_residual(x, "composite"), effective_rank(x)])
            if at == depth:
                break
            layer = Layer(kind, dim, heads=4, rank=4, generator=generator)
            x = layer.attention(x) + (x if skips else 0)
            if feed_forward:
                x = layer.feed_forward(x) + (x if skips else 0)
            # one number for all tokens: the size is kept, and no residual or rank depends on it
            x = x / x.pow(2).mean().sqrt()
        found.append(torch.tensor(values))
    return tuple(torch.stack(found).mean(0).unbind(-1))


def draw(curves: dict, path: str) -> None:
    """Residual against depth, one panel for each choice of parts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PARTS), figsize=(14, 3.6), sharey=True)
    for axis, (label, *_) in zip(axes, PARTS, strict=True):
        for kind in KINDS:
            axis.semilogy(curves[kind, label][0].clamp(min=1e-15), marker=".", label=kind)
        axis.set_title(label)
        axis.set_xlabel("layers")
    axes[0].set_ylabel("|X - 1 x^T| / |X|")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(quick: bool = False, figure: str | None = None) -> dict:
    print("rank at threshold 1e-6, 256 tokens, D = 8, R = 2")
    print(f"{'metric':20s} {'d^2':>5s} {'bound':>6s} {'weights':>8s}")
    for name, of_distances, of_weights, bound in ranks():
        print(f"{name:20s} {of_distances:5d} {bound:>6s} {of_weights:8d}")
    depth = 4 if quick else 12
    sizes = {"depth": depth, "n": 48 if quick else 128, "dim": 32 if quick else 64, "seeds": 1 if quick else 3}
    shown = [d for d in (0, 1, 2, 4, 8, 12) if d <= depth]
    curves = {}
    about = f"{sizes['n']} tokens, D = {sizes['dim']}, mean of {sizes['seeds']} seeds"
    print(f"\n|X - 1 x^T| / |X| after so many layers, {about}")
    print(f"{'':38s}" + "".join(f"{d:>9d}" for d in shown) + "   effective rank at the end, composite norm")
    for label, skips, feed_forward in PARTS:
        for kind in KINDS:
            curves[kind, label] = residual, composite, rank = by_depth(kind, skips, feed_forward, **sizes)
            row = "".join(f"{residual[d]:9.1e}" for d in shown)
            print(f"{label:18s} {kind:19s}{row}   {rank[-1]:6.2f} {composite[-1]:9.1e}")
    if figure:
        draw(curves, figure)
        print(f"figure: {figure}")
    return curves


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: seconds")
    parser.add_argument("--figure", help="also draw the residuals to this file")
    arguments = parser.parse_args()
    main(arguments.quick, arguments.figure)

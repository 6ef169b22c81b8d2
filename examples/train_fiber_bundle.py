"""Train a Fiber Bundle Transformer on text that ships with Python, beside a softmax model of the same size.

The text is pydoc's help on the language; the models predict its characters. Three runs, equal in parameters, batches
and steps: the Fiber Bundle Transformer under RiemannianAdam (the token table preconditioned by its metrics, frames on
the Stiefel manifold), the same under plain Adam, and a softmax transformer under plain Adam.

    python examples/train_fiber_bundle.py [--quick] [--seconds 120]
"""

import argparse
import math
import time
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

import horosphere as hs
from horosphere.models import FiberBundleConfig, FiberBundleLM

# Length of sequences, and how many make a step.
SIZES = {"steps": 300, "length": 128, "batch": 16}


def configuration(vocabulary: int) -> FiberBundleConfig:
    return FiberBundleConfig(vocabulary, dim=64, depth=2, heads=4, rank=4, max_length=128, planes=1)


def characters() -> tuple[torch.Tensor, torch.Tensor, int]:
    """The text as numbers, its last tenth held out, and how many characters there are."""
    text = "\n".join(topics[key] for key in sorted(topics))
    known = sorted(set(text))
    number = {c: n for n, c in enumerate(known)}
    ids = torch.tensor([number[c] for c in text])
    return *ids.split([len(ids) - len(ids) // 10, len(ids) // 10]), len(known)


def unigram_entropy(ids: torch.Tensor) -> float:
    """Of single characters, in nats."""
    p = torch.bincount(ids).double() / len(ids)
    return -torch.special.xlogy(p, p).sum().item()


class SoftmaxBlock(nn.Module):
    def __init__(self, dim: int, heads: int, feedforward: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, feedforward * dim), nn.GELU(), nn.Linear(feedforward * dim, dim)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.feed_forward(self.feed_forward_norm(x))


class SoftmaxLM(nn.Module):
    """The same model with softmax attention; the feed-forward part is wider by what the metrics would take."""

    def __init__(self, config: FiberBundleConfig):
        super().__init__()
        dim = config.dim
        self.table = nn.Parameter(torch.randn(config.vocab_size, dim) * dim**-0.5)
        self.positions = nn.Parameter(torch.randn(config.max_length, dim) * 0.1 * dim**-0.5)
        wide = config.feedforward + config.rank // 2
        self.blocks = nn.Sequential(*(SoftmaxBlock(dim, config.heads, wide) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor):
        x = self.blocks(functional.embedding(ids, self.table) + self.positions[: ids.shape[1]])
        logits = self.norm(x) @ self.table.mT
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, labels=ids).loss if isinstance(model, FiberBundleLM) else model(ids, labels=ids)


@torch.no_grad()
def held_out_loss(model: nn.Module, ids: torch.Tensor, length: int, count: int = 32) -> float:
    """Mean over sequences spread evenly over the held-out text."""
    model.eval()
    starts = torch.linspace(0, len(ids) - length, count).long()
    found = [loss_of(model, ids[starts[i : i + 8, None] + torch.arange(length)]).item() for i in range(0, count, 8)]
    model.train()
    return sum(found) / len(found)


def train(
    model: nn.Module,
    optimizer,
    ids: torch.Tensor,
    held_out: torch.Tensor,
    *,
    steps: int,
    length: int,
    batch: int,
    seconds: float,
    evaluations: int = 8,
) -> list[tuple[int, float, float]]:
    """(step, seconds of training, held-out loss), so many times."""
    generator = torch.Generator().manual_seed(0)
    rates = [group["lr"] for group in optimizer.param_groups]
    curve, spent = [], 0.0
    for step in range(1, steps + 1):
        began = time.perf_counter()
        progress = max(step / steps, spent / seconds)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, step / 20) * (0.05 + 0.95 * (1 + math.cos(math.pi * min(1.0, progress))) / 2)
        starts = torch.randint(len(ids) - length, (batch, 1), generator=generator)
        optimizer.zero_grad()
        loss_of(model, ids[starts + torch.arange(length)]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        spent += time.perf_counter() - began
        last = step == steps or spent >= seconds
        if last or step % max(1, steps // evaluations) == 0:
            curve.append((step, spent, held_out_loss(model, held_out, length)))
        if last:
            break
    return curve


def bundle(config: FiberBundleConfig, riemannian: bool, rate: float = 3e-3):
    """The model and its optimizer, from a fixed seed."""
    torch.manual_seed(0)
    model = FiberBundleLM(config)
    if not riemannian:
        return model, torch.optim.Adam(model.parameters(), lr=rate)
    groups = hs.optim.param_groups(model)
    for group in groups:  # a point moves by lr as a whole, a number of a flat tensor by lr for itself
        group["lr"] = rate * (config.dim**0.5 if group["name"] == "manifold" else 1)
    return model, hs.optim.RiemannianAdam(groups)


def softmax(config: FiberBundleConfig, rate: float = 3e-3):
    torch.manual_seed(0)
    model = SoftmaxLM(config)
    return model, torch.optim.Adam(model.parameters(), lr=rate)


def off_frame(model: FiberBundleLM) -> float:
    """Largest entry of B^T B - I over all frames."""
    gaps = [(b.mT @ b - torch.eye(b.shape[-1])).abs().max() for n, b in model.named_parameters() if n.endswith("frame")]
    return max(g.item() for g in gaps)


def main(quick: bool = False, seconds: float = 120.0) -> dict[str, float]:
    ids, held_out, vocabulary = characters()
    entropy = unigram_entropy(torch.cat((ids, held_out)))
    config = configuration(vocabulary)
    sizes = {"steps": 3, "length": 24, "batch": 4, "evaluations": 1} if quick else SIZES
    print(f"{len(ids)} characters of {vocabulary} kinds, {len(held_out)} held out; unigram entropy {entropy:.3f} nats")
    makers = {
        "fiber bundle, RiemannianAdam": lambda: bundle(config, True),
        "fiber bundle, Adam": lambda: bundle(config, False),
        "softmax, Adam": lambda: softmax(config),
    }
    final = {}
    for name, make in makers.items():
        model, optimizer = make()
        count = sum(p.numel() for p in model.parameters())
        curve = train(model, optimizer, ids, held_out, seconds=seconds, **sizes)
        print(f"\n{name}, {count} parameters")
        for step, spent, loss in curve:
            print(f"  step {step:4d}  {spent:6.1f} s  held-out loss {loss:.3f}  of unigram {loss / entropy:.3f}")
        if isinstance(model, FiberBundleLM):
            out = model(held_out[None, : sizes["length"]], return_geometry=True)
            print(f"  frames off orthonormal by {off_frame(model):.1e}")
            for label, values in zip(out.geometry._fields, out.geometry, strict=True):
                print(f"  {label:10s} by block  {'  '.join(f'{v:.3f}' for v in values.tolist())}")
        final[name] = curve[-1][2] / entropy
    return final


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps: seconds")
    parser.add_argument("--seconds", type=float, default=120.0, help="longest training of each run")
    arguments = parser.parse_args()
    main(arguments.quick, arguments.seconds)

"""Train a GeoResolver on the text of Python's own manual, byte by byte, and look at what its parts do.

Every block attends on curved heads and asks a memory of prototypes, which the training loop lets grow where the loss
surprises. RiemannianAdam trains weights, curvatures and anchors. A checkpoint is written every some steps; run the
same command again after a kill and it goes on, on a CPU to the same last bit. The report tells the loss with the
memory cut off, how much of the work the gate gave to attention, and how well the keys can be coded.

    python examples/train_georesolver.py [--quick] [--pattern dense|fixed|landmark|summary|softmax] [--steps N]

"softmax" is a plain transformer of the same size, to compare with.
"""

import argparse
import io
import json
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import horosphere as hs
from horosphere import _files
from horosphere.attention import DenseCache, GeodesicAttention, TransformerBlock
from horosphere.memory import CompressedCache, HyperbolicCompressor
from horosphere.models import GeoResolverConfig, GeoResolverLM, GeoResolverOutput

LENGTH, BATCH = 128, 8


class SoftmaxLM(nn.Module):
    """A transformer with torch's softmax attention and the sizes of the GeoResolver."""

    def __init__(self, config: GeoResolverConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        nn.init.normal_(self.embedding.weight, std=config.dim**-0.5)
        layers = (
            GeodesicAttention(config.dim, config.heads, manifold=hs.Euclidean(), weight="dot", rotary=10000.0)
            for _ in range(config.depth)
        )
        self.blocks = nn.ModuleList(TransformerBlock(layer) for layer in layers)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> GeoResolverOutput:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, is_causal=True)
        logits = F.linear(self.norm(x), self.embedding.weight)
        losses = F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
        nothing = torch.zeros(len(self.blocks))
        return GeoResolverOutput(logits, losses.mean(), losses, nothing, nothing)


def text() -> tuple[torch.Tensor, torch.Tensor, float]:
    """Bytes to train on, the last tenth held out, and the cross-entropy in nats a byte of guessing by frequency."""
    data = torch.tensor(list("".join(topics[name] for name in sorted(topics)).encode()))
    train, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    frequency = (train.bincount(minlength=256) + 1.0).double()
    entropy = -(frequency / frequency.sum()).log()[held_out].mean().item()
    return train, held_out, entropy


def make_model(pattern: str, quick: bool, memory: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"dim": 32, "memory_capacity": 64, "memory_dim": 8} if quick else {"dim": 128, "memory_capacity": 512}
    if memory is not None:
        sizes["memory_capacity"] = memory
    config = GeoResolverConfig(
        vocab_size=256, depth=2, heads=4, pattern="dense" if pattern == "softmax" else pattern, **sizes
    )
    return SoftmaxLM(config) if pattern == "softmax" else GeoResolverLM(config)


def make_optimizer(model: nn.Module) -> hs.optim.RiemannianAdam:
    rates = {"manifold": 1e-2, "flat": 3e-3}
    return hs.optim.RiemannianAdam([group | {"lr": rates[group["name"]]} for group in hs.optim.param_groups(model)])


def train(
    model: nn.Module, data: torch.Tensor, steps: int, seconds: float, checkpoint: Path | None, every: int
) -> dict:
    """Train to step number ``steps`` or for so many seconds, from the checkpoint where there is one."""
    optimizer, batches = make_optimizer(model), torch.Generator().manual_seed(0)
    first, spent = 0, 0.0
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.set_state(state["batches"])
        first, spent = state["step"], state["seconds"]
        print(f"goes on after step {first} of {checkpoint}", flush=True)
    start, step = time.perf_counter() - spent, first
    progress = tqdm(range(first, steps), initial=first, total=steps, disable=None)
    for step in progress:
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=batches)
        ids = data[starts.unsqueeze(1) + torch.arange(LENGTH)]
        optimizer.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if isinstance(model, GeoResolverLM):
            model.update_memory(out.losses)
        progress.set_postfix(loss=f"{out.loss.item():.3f}", refresh=False)
        spent = time.perf_counter() - start
        if checkpoint is not None and (step + 1) % every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "batches": batches.get_state()}
            file = io.BytesIO()
            torch.save(state | {"step": step + 1, "seconds": spent}, file)
            _files.write_atomically(checkpoint, file.getvalue())
        if spent > seconds:
            break
    return {"steps": step + 1, "tokens_per_second": round((step + 1) * BATCH * LENGTH / spent), "seconds": spent}


@torch.no_grad()
def held_out_loss(model: nn.Module, data: torch.Tensor, rows: int, **options) -> GeoResolverOutput:
    """Over ``rows`` pieces of the text, evenly spread."""
    starts = torch.linspace(0, len(data) - LENGTH, rows).long()
    ids = data[starts.unsqueeze(1) + torch.arange(LENGTH)]
    return model.eval()(ids, labels=ids, **options)


class Listener(DenseCache):
    """A cache that keeps what it was asked."""

    def attend(self, query, key, value, manifold, **options):
        self.asked = (query, key, value, manifold, options["eps"])
        return super().attend(query, key, value, manifold, **options)


@torch.no_grad()
def coding_errors(model: GeoResolverLM, ids: torch.Tensor) -> dict[str, float]:
    """Relative error of every token's attention when the keys are coded, mean over layers and heads, by scheme."""
    caches = model.eval().new_caches(lambda layer: Listener())
    model(ids, caches=caches)
    found = {}
    for scheme in ("rotated", "paper"):
        errors = []
        for cache in caches:
            query, key, value, manifold, eps = cache.asked
            code = HyperbolicCompressor(bits=4, radius_bits=6, scheme=scheme, manifold=manifold).calibrate_(key)
            right, coded = (
                hs.attention.geodesic_attention(query, k, value, manifold, eps=eps, is_causal=True)
                for k in (key, code.decode(code.encode(key)))
            )
            errors.append(((coded - right).norm(dim=-1) / right.norm(dim=-1)).mean())
        found[scheme] = torch.stack(errors).mean().item()
    return found


def report(model: nn.Module, held_out: torch.Tensor, entropy: float, rows: int, done: dict) -> dict:
    whole = held_out_loss(model, held_out, rows)
    found = done | {"loss": whole.loss.item(), "unigram": entropy, "ratio": whole.loss.item() / entropy}
    print(
        f"held out: {found['loss']:.3f} nats a byte, {found['ratio']:.3f} of the {entropy:.3f} of guessing; "
        f"{done['steps']} steps at {done['tokens_per_second']} tokens/s"
    )
    if not isinstance(model, GeoResolverLM):
        return found
    found["cut"] = held_out_loss(model, held_out, rows, use_memory=False).loss.item()
    found["gate"] = [round(g, 3) for g in whole.gate.tolist()]
    found["prototypes"] = [len(block.memory.pool) for block in model.blocks if block.memory is not None]
    found["kappa"] = [[round(k, 3) for k in block.gate.ball.kappa.tolist()] for block in model.blocks]
    print(f"with the memory cut: {found['cut']:.3f}; mean gate (1: attention alone) {found['gate']}")
    print(f"prototypes {found['prototypes']}, curvature of the heads {found['kappa']}")
    if model.config.pattern == "dense":
        found["coding"] = coding_errors(model, held_out[None, : 8 * LENGTH])
        ratio = found["coding"]["paper"] / found["coding"]["rotated"]
        print(
            f"error of attention with keys in 4 bits: {found['coding']['rotated']:.3f} rotated, "
            f"{found['coding']['paper']:.3f} as in the paper, {ratio:.1f} times as much"
        )
    return found


def show(model: GeoResolverLM, new_tokens: int) -> None:
    prompt = torch.tensor([list(b"The statement ")])

    def coded(layer):
        return CompressedCache(HyperbolicCompressor(manifold=layer.manifold))

    caches = {"its own cache": None} | ({"coded tokens": coded} if model.config.pattern == "dense" else {})
    for name, make in caches.items():
        dice = torch.Generator().manual_seed(1)
        out = model.generate(prompt, new_tokens, make_cache=make, temperature=0.7, generator=dice)
        print(f"--- from {name}\n{bytes(out[0].tolist()).decode(errors='replace')}")


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model for a few seconds")
    parser.add_argument("--pattern", default="dense", choices=["dense", "fixed", "landmark", "summary", "softmax"])
    parser.add_argument("--memory", type=int, help="prototypes a block, 0 for none")
    parser.add_argument("--steps", type=int, help="training steps in all; 400, or 20 with --quick")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop training after so long")
    parser.add_argument("--checkpoint", type=Path, help="file to write now and then, and to go on from")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, help="write the model here when it is trained")
    parser.add_argument("--report", type=Path, help="write the figures here as JSON")
    given = parser.parse_args(arguments)
    data, held_out, entropy = text()
    model = make_model(given.pattern, given.quick, given.memory)
    steps = given.steps or (20 if given.quick else 400)
    done = train(model, data, steps, given.seconds, given.checkpoint, given.every)
    found = report(model, held_out, entropy, 4 if given.quick else 64, done)
    if isinstance(model, GeoResolverLM):
        show(model, 20 if given.quick else 200)
        if given.out is not None:
            model.save(given.out)
    if given.report is not None:
        given.report.write_text(json.dumps({"pattern": given.pattern} | found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()

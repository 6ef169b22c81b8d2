"""Multi-query associative recall: how many steps until a model looks values up by their keys.

A sequence shows pairs key, value, key, value, ..., then every key once more in another order; there the model has to
say the value. Two layers: a causal convolution of two tokens, which brings a key to its value, and a block of
attention, which finds it again. Softmax of dot products and inverse distance on flat space, ball and sphere learn it
at four widths, with the same settings and the same batches. A run is solved when 99% of the answers to fresh sequences
are right; it is given up after 3000 steps. A few minutes of one processor in all.

    python examples/associative_recall.py [--quick] [--widths 16 32] [--only softmax ball] [--save results.json]

Source of the task: Arora et al. (2024), Zoology: measuring and improving recall in efficient language models.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

import horosphere as hs

PAIRS, KEYS, VALUES = 16, 128, 128
BATCH, RATE, DECAY, HEADS = 64, 3e-3, 0.01, 2
SOLVED = 0.99
CONTENDERS = {
    "softmax": (hs.Euclidean, "dot"),
    "flat": (hs.Euclidean, "inverse"),
    "ball": (hs.PoincareBall, "inverse"),
    "sphere": (hs.Sphere, "inverse"),
}


def sequences(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (count, 3 PAIRS) and the right answers (count, PAIRS) at the last PAIRS of them."""
    keys = torch.rand(count, KEYS, generator=generator).argsort(-1)[:, :PAIRS]
    values = KEYS + torch.randint(VALUES, (count, PAIRS), generator=generator)
    order = torch.rand(count, PAIRS, generator=generator).argsort(-1)
    pairs = torch.stack((keys, values), -1).flatten(1)
    return torch.cat((pairs, keys.gather(1, order)), 1), values.gather(1, order)


class Recall(nn.Module):
    def __init__(self, width: int, contender: str):
        super().__init__()
        kind, weight = CONTENDERS[contender]
        self.tokens = nn.Embedding(KEYS + VALUES, width)
        self.positions = nn.Embedding(3 * PAIRS, width)
        self.convolution = nn.Conv1d(width, width, 2, padding=1)
        attention = hs.attention.GeodesicAttention(width, HEADS, manifold=kind(), weight=weight)
        self.block = hs.attention.TransformerBlock(attention, 2 * width)
        self.answer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, KEYS + VALUES))
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def first(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        return x + self.convolution(x.mT)[..., :-1].mT

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.answer(self.block(self.first(tokens), is_causal=True)[:, -PAIRS:])

    def calibrate(self, tokens: torch.Tensor) -> None:
        """eps of every head to a hundredth of the mean squared distance."""
        if self.block.attention.weight == "inverse":
            self.block.attention.calibrate_eps_(self.block.attention_norm(self.first(tokens)), is_causal=True)


def train(width: int, contender: str, steps: int, seconds: float) -> dict:
    """Steps and seconds until solved, None where neither was enough, and the last accuracy."""
    torch.manual_seed(0)
    model = Recall(width, contender)
    draw = torch.Generator().manual_seed(1)
    held_out, right = sequences(512, torch.Generator().manual_seed(2))
    with torch.no_grad():
        model.calibrate(held_out[:BATCH])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    began, accuracy = time.process_time(), 0.0
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / 100)
        tokens, answers = sequences(BATCH, draw)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        spent = time.process_time() - began
        if step % 25 == 0 or step == steps or spent > seconds:
            with torch.no_grad():
                accuracy = (model(held_out).argmax(-1) == right).float().mean().item()
            if accuracy >= SOLVED or spent > seconds:
                break
    return {"solved": accuracy >= SOLVED, "steps": step, "seconds": time.process_time() - began, "accuracy": accuracy}


def main(quick: bool, widths: list[int], only: list[str], save: Path | None) -> None:
    torch.set_num_threads(1)  # the matrices are small, and processor time is then the time of a machine left alone
    found = json.loads(save.read_text(encoding="utf-8")) if save and save.exists() else {}
    steps, seconds = (5, 1.0) if quick else (3000, 240.0)
    for width in widths:
        for contender in only:
            name = f"{contender} {width}"
            if name not in found:
                found[name] = train(width, contender, steps, seconds)
                if save:
                    save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            run = found[name]
            what = f"solved after {run['steps']:5d} steps" if run["solved"] else f"not in {run['steps']:5d} steps"
            print(
                f"width {width:4d}  {contender:8s}  {what:25s}  accuracy {run['accuracy']:.3f}  {run['seconds']:.0f} s"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of each")
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--save", type=Path, help="keep results there, and go on where an earlier run ended")
    arguments = parser.parse_args()
    main(arguments.quick, arguments.widths, arguments.only, arguments.save)

"""A language model of the transformers library with attention by distance, trained on the names of mammals.

Two lines make it hyperbolic: one registers a manifold under a name, the other gives that name to the model. Everything
else is the library's: grouped-query heads, rotary positions, its cache and `generate`.

    python examples/transformers_plugin.py [--quick]
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

import horosphere as hs

logging.set_verbosity_error()
SPACES = {
    "sdpa": None,
    "horosphere:flat": hs.Euclidean(),
    "horosphere:poincare": hs.PoincareBall(kappa=-1.0),
    "horosphere:sphere": hs.Sphere(kappa=1.0),
}


def names() -> tuple[torch.Tensor, str]:
    """Rows of letters: 1 starts a name, 0 ends and fills it."""
    words = sorted({label.split(".")[0] for pair in hs.data.mammals() for label in pair})
    letters = "".join(sorted(set("".join(words))))
    rows = torch.zeros(len(words), max(map(len, words)) + 2, dtype=torch.long)
    for row, word in zip(rows, words, strict=True):
        row[: len(word) + 1] = torch.tensor([1] + [2 + letters.index(c) for c in word])
    return rows[torch.randperm(len(rows))], letters


def train(implementation: str, rows: torch.Tensor, letters: str, steps: int) -> tuple[LlamaForCausalLM, float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2 + len(letters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=implementation)
    test, rest = rows[:100], rows[100:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        after_end = (batch == 0) & (batch.roll(1, -1) == 0)
        return model(batch, labels=batch.masked_fill(after_end, -100)).loss

    for _ in range(steps):
        optimizer.zero_grad()
        loss(rest[torch.randint(len(rest), (64,))]).backward()
        optimizer.step()
    with torch.no_grad():
        return model.eval(), loss(test).item()


def main(quick: bool = False) -> None:
    torch.manual_seed(0)
    rows, letters = names()
    for implementation, manifold in SPACES.items():
        if manifold is not None:
            hs.integrations.transformers.register(implementation, manifold, eps=1e-2)
        model, loss = train(implementation, rows, letters, steps=5 if quick else 300)
        start = torch.ones(4, 1, dtype=torch.long)
        found = model.generate(
            start, attention_mask=torch.ones_like(start), do_sample=True, max_new_tokens=8 if quick else 20
        )
        invented = ["".join(letters[i - 2] if i > 1 else "" for i in row) for row in found.tolist()]
        print(f"{implementation:20} test loss {loss:.3f} a letter; invented: {', '.join(invented)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="five steps of training: a few seconds")
    main(parser.parse_args().quick)

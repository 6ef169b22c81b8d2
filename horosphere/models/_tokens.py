"""What the language models share about tokens: their checks, the loss of the next one, and how a text goes on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# A label that is not scored, as torch has it.
LEFT_OUT = -100


def check_tokens(ids: Tensor, labels: Tensor | None, vocab_size: int) -> None:
    """ValueError where ids are not whole numbers (B, N) of the vocabulary, or labels not of their shape."""
    if ids.dim() != 2 or ids.dtype.is_floating_point or ids.dtype == torch.bool or not ids.numel():
        raise ValueError(
            f"ids must be whole numbers of shape (B, N), B and N at least 1; got {ids.dtype} {tuple(ids.shape)}"
        )
    if labels is not None and (labels.shape != ids.shape or ids.shape[1] < 2):
        raise ValueError(
            f"labels must have the shape of ids with N >= 2; got {tuple(labels.shape)}, {tuple(ids.shape)}"
        )
    if torch.compiler.is_compiling():  # numbers are not looked at there; torch's embedding refuses those out of range
        return
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"ids must lie in 0..{vocab_size - 1}; got {int(ids.min())}..{int(ids.max())}")


def real_tokens(ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """The mask of padded sequences as bool (B, N), True where a token is real; None where all are.

    Raises:
        ValueError: another shape, or numbers other than 0 and 1.
    """
    if attention_mask is None:
        return None
    if attention_mask.shape != ids.shape or attention_mask.dtype.is_floating_point:
        raise ValueError(
            f"attention_mask must hold bool or 0 and 1 in the shape of ids, {tuple(ids.shape)}; got "
            f"{attention_mask.dtype} {tuple(attention_mask.shape)}"
        )
    return attention_mask.to(torch.bool)


def scored_labels(labels: Tensor, real: Tensor | None) -> Tensor:
    """Labels, those of padding left out."""
    return labels if real is None else labels.masked_fill(~real, LEFT_OUT)


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross entropy in nats of labels[:, 1:] given what is before, 0 where none of them is scored, and that of
    each token (B, N - 1), 0 where it is left out.
    """
    target = labels[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].mT, target, reduction="none", ignore_index=LEFT_OUT)
    return losses.sum() / (target != LEFT_OUT).sum().clamp(min=1), losses


def continued(
    model: nn.Module,
    ids: Tensor,
    next_logits: Callable[[Tensor, Tensor | None], Tensor],
    new_tokens: int,
    temperature: float,
    generator: torch.Generator | None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """ids (B, N) with ``new_tokens`` more behind, the likeliest at temperature 0, else drawn, in evaluation mode.

    Args:
        next_logits: tokens that follow those of earlier calls (B, M), and their mask -> logits (B, V) of what comes
            next.
        attention_mask: of ids; shorter sequences are padded on the left.

    Raises:
        ValueError: a number of new tokens or a temperature below 0, or padding on the right.
    """
    real = real_tokens(ids, attention_mask)
    if real is not None and not bool(real[:, -1].all()):
        raise ValueError("attention_mask must end with real tokens: pad shorter sequences on the left")
    if new_tokens < 0 or temperature < 0:
        raise ValueError(f"new_tokens and temperature must be at least 0; got {new_tokens} and {temperature}")
    training, fresh = model.training, ids
    model.eval()
    try:
        for _ in range(new_tokens):
            logits = next_logits(fresh, real)
            real = None
            if temperature == 0:
                fresh = logits.argmax(-1, keepdim=True)
            else:
                fresh = torch.multinomial((logits.double() / temperature).softmax(-1), 1, generator=generator)
            ids = torch.cat((ids, fresh), 1)
    finally:
        model.train(training)
    return ids

"""When a loss is a surprise: thresholds from the losses just before it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["THRESHOLDS", "thresholds"]

THRESHOLDS = ("mean", "base", "growing")
# Thresholds worked at a time: 256 windows of 100 float64 are 200 KiB, which stay in a cache.
BLOCK_LOSSES = 256


def thresholds(losses: Tensor, before: Tensor, seen: int, kind: str, k: float, base: float | None) -> Tensor:
    r"""The threshold of every loss, from the W losses before it (itself excluded); infinite while there are fewer.

    With mean :math:`\mu_t` and standard deviation :math:`\sigma_t` of those W, "mean" is :math:`\mu_t + k\sigma_t`;
    "base" is :math:`\tau_0 + k\sigma_t`; "growing" is :math:`\mu_t + \sigma_t\sqrt{k^2 + 2\log(t/W)}`. On a stationary
    stream the first two are exceeded with a fixed probability, so surprises grow like T. The third starts at "mean";
    for normal losses its probability falls like 1/t, so that they grow like log T.

    Args:
        losses: (L,) in order.
        before: (W,) the losses just before them, oldest first; the last min(seen, W) are real.
        seen: how many losses there were before.
        kind, k, base: as above; ``base`` is :math:`\tau_0`, given with "base" alone.

    Returns:
        (L,) in the type of ``before``.
    """
    window = len(before)
    joined = torch.cat((before, losses.to(before.dtype)))
    past = joined.unfold(0, window, 1)[: len(losses)]
    pieces = [_mean_and_deviation(piece) for piece in past.split(BLOCK_LOSSES)] or [(joined[:0], joined[:0])]
    mean, deviation = (torch.cat(each) for each in zip(*pieces, strict=True))
    t = seen + torch.arange(len(losses), device=losses.device)
    factor: float | Tensor = k
    if kind == "growing":
        factor = (k * k + 2 * (t.to(before.dtype).clamp(min=window) / window).log()).sqrt()
    # a mean of equal losses may round below them: a constant stream holds no surprise
    slack = 2 * window * torch.finfo(before.dtype).eps * (mean.abs() + deviation)
    limits = (mean if base is None else base) + factor * deviation + slack
    return torch.where(t >= window, limits, torch.inf)


def _mean_and_deviation(past: Tensor) -> tuple[Tensor, Tensor]:
    mean = past.mean(-1)
    return mean, (past - mean.unsqueeze(-1)).square_().mean(-1).sqrt()

"""Two sets of points whose metrics differ from point to point: what the kernels of per-token metrics take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.inputs import broadcast

ENDS = ("query", "key", "mean")


class Metric(NamedTuple):
    """The metrics of one end: scale (..., N) and factor (..., N, D, R)."""

    scale: Tensor
    factor: Tensor


class MetricPair(NamedTuple):
    r"""Points q (..., N, D) and k (..., M, D), and the metrics :math:`s^2 I + U U^T` that measure their differences.

    A side whose metric is not used has None for scale (..., N) and factor (..., N, D, R).
    """

    q: Tensor
    k: Tensor
    scale_q: Tensor | None
    factor_q: Tensor | None
    scale_k: Tensor | None
    factor_k: Tensor | None

    @property
    def metric_q(self) -> Metric | None:
        """That of the queries, where it is used."""
        return None if self.scale_q is None or self.factor_q is None else Metric(self.scale_q, self.factor_q)

    @property
    def metric_k(self) -> Metric | None:
        """That of the keys, where it is used."""
        return None if self.scale_k is None or self.factor_k is None else Metric(self.scale_k, self.factor_k)

    @property
    def share(self) -> float:
        """What each metric counts: 1, or a half where both ends measure."""
        return 1.0 if self.scale_q is None or self.scale_k is None else 0.5

    @property
    def end(self) -> str:
        """ "query", "key" or "mean"."""
        return "key" if self.scale_q is None else "query" if self.scale_k is None else "mean"

    @property
    def batch(self) -> torch.Size:
        """The batch dimensions of the matrix."""
        shapes = [t.shape[:-own] for t, own in zip(self, OWN, strict=True) if t is not None]
        return broadcast(*shapes)

    @property
    def dtype(self) -> torch.dtype:
        """The type of matrix products where nothing better is asked for."""
        dtype = self.q.dtype
        for t in self.tensors():
            dtype = torch.promote_types(dtype, t.dtype)
        return _numerics.fast_dtype(dtype)

    def tensors(self) -> list[Tensor]:
        """The tensors that there are, in order: what an operator takes."""
        return [t for t in self if t is not None]

    def each(self, change: Callable[[Tensor, int, bool], Tensor]) -> MetricPair:
        """Every tensor changed, given its dimensions that are not batch and whether it is one of the keys' end."""
        q, k, scale_q, factor_q, scale_k, factor_k = self
        return MetricPair(
            change(q, 2, False),
            change(k, 2, True),
            None if scale_q is None else change(scale_q, 1, False),
            None if factor_q is None else change(factor_q, 3, False),
            None if scale_k is None else change(scale_k, 1, True),
            None if factor_k is None else change(factor_k, 3, True),
        )

    def flat(self, batch: torch.Size, dtype: torch.dtype) -> MetricPair:
        """In one type, batch dimensions expanded to ``batch`` and made one."""

        def flatten(t: Tensor, own: int, of_keys: bool) -> Tensor:
            return t.to(dtype).expand(*batch, *t.shape[-own:]).reshape(batch.numel(), *t.shape[-own:])

        return self.each(flatten)

    def pairs(self, rows: tuple[Tensor, ...], columns: tuple[Tensor, ...]) -> MetricPair:
        """Pairs (P, ...): the queries at ``rows`` with their metrics, and the keys at ``columns`` with theirs."""
        return self.each(lambda t, own, of_keys: t[columns if of_keys else rows])


def limits(f: MetricPair, dtype: torch.dtype, tolerance: float) -> tuple[Tensor, Tensor]:
    """p_i (..., N) and p_j (..., M): the product form in ``dtype`` may miss ``tolerance``, relative, at pairs with
    ``d^2 + eps < (|q|^2 + |k|^2)(p_i + p_j)``.

    The error of u is at most 4 sqrt(D + 2) units of what was subtracted, that of U_r^T delta sqrt(D + 1) units of
    |U_r| (|q| + |k|), once in d^2 relative to 2 |U_r^T delta|.
    """
    dim, unit = f.q.shape[-1] + 2, _numerics.unit_roundoff(dtype)
    flat, steep = 2 * 4 * dim**0.5 * unit / tolerance, 32 * dim * (unit / tolerance) ** 2

    def limit(metric: Metric | None, like: Tensor) -> Tensor:
        if metric is None:
            return torch.zeros_like(like[..., 0])
        return f.share * (flat * metric.scale**2 + steep * torch.linalg.vector_norm(metric.factor, dim=(-2, -1)) ** 2)

    return limit(f.metric_q, f.q), limit(f.metric_k, f.k)


# Dimensions of each tensor that are not batch.
OWN = (2, 2, 1, 3, 1, 3)


def metric_pair_of(tensors: list[Tensor], end: str) -> MetricPair:
    """The inverse of :meth:`MetricPair.tensors`."""
    if end == "mean":
        return MetricPair(*tensors)
    q, k, scale, factor = tensors
    return (
        MetricPair(q, k, scale, factor, None, None) if end == "query" else MetricPair(q, k, None, None, scale, factor)
    )

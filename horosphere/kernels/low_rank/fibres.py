"""Two sets of points whose metrics differ from point to point: what the kernels of per-token metrics take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from horosphere import _numerics

ENDS = ("query", "key", "mean")


class Fibres(NamedTuple):
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
        return torch.broadcast_shapes(*shapes)

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

    def flat(self, batch: torch.Size, dtype: torch.dtype) -> Fibres:
        """In one type, batch dimensions expanded to ``batch`` and made one."""

        def flatten(t: Tensor | None, own: int) -> Tensor | None:
            if t is None:
                return None
            return t.to(dtype).expand(*batch, *t.shape[-own:]).reshape(batch.numel(), *t.shape[-own:])

        return Fibres(*(flatten(t, own) for t, own in zip(self, OWN, strict=True)))


def limits(f: Fibres, dtype: torch.dtype, tolerance: float) -> tuple[Tensor, Tensor]:
    """p_i (..., N) and p_j (..., M): the product form in ``dtype`` may miss ``tolerance``, relative, at pairs with
    ``d^2 + eps < (|q|^2 + |k|^2)(p_i + p_j)``.

    The error of u is at most 4 sqrt(D + 2) units of what was subtracted, that of U_r^T delta sqrt(D + 1) units of
    |U_r| (|q| + |k|), once in d^2 relative to 2 |U_r^T delta|.
    """
    dim, unit = f.q.shape[-1] + 2, _numerics.unit_roundoff(dtype)
    flat, steep = 2 * 4 * dim**0.5 * unit / tolerance, 32 * dim * (unit / tolerance) ** 2

    def limit(scale: Tensor | None, factor: Tensor | None, like: Tensor) -> Tensor:
        if scale is None or factor is None:
            return torch.zeros_like(like[..., 0])
        return f.share * (flat * scale**2 + steep * torch.linalg.vector_norm(factor, dim=(-2, -1)) ** 2)

    return limit(f.scale_q, f.factor_q, f.q), limit(f.scale_k, f.factor_k, f.k)


# Dimensions of each tensor that are not batch.
OWN = (2, 2, 1, 3, 1, 3)


def fibres_of(tensors: list[Tensor], end: str) -> Fibres:
    """The inverse of :meth:`Fibres.tensors`."""
    q, k, *metrics = tensors
    if end == "mean":
        return Fibres(q, k, *metrics)
    return Fibres(q, k, *metrics, None, None) if end == "query" else Fibres(q, k, None, None, *metrics)

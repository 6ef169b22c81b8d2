"""Kinds of distance: two sets of points and what measures them, as every form of every kernel takes them.

A kind of distance is one class. It says how its tensors travel through a custom operator, gives the plain form, and
offers tiled, compiled and Triton kernels the objects that they ask for. A kind that is in :data:`KINDS` has distances
and attention, with gradients, by all forms of :mod:`horosphere.kernels.dispatch` that its entries there name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels import dispatch
from horosphere.kernels.chord import fused
from horosphere.kernels.chord.pair import ChordPair, batch_of, dtype_of, pack, unpack
from horosphere.kernels.inputs import Inputs
from horosphere.kernels.low_rank.pair import MetricPair, metric_pair_of
from horosphere.kernels.numba import attention as chord_loops
from horosphere.kernels.numba import metric as metric_loops
from horosphere.kernels.numba.sqdist import sqdist as numba_sqdist
from horosphere.kernels.reference import attention as reference_attention
from horosphere.kernels.reference import metric_sqdist as reference_metric
from horosphere.kernels.reference import sqdist as reference_sqdist
from horosphere.kernels.tiled import metric as tiled_metric
from horosphere.kernels.tiled.chord_scores import ChordScores
from horosphere.kernels.tiled.metric import MetricScores
from horosphere.kernels.tiled.scores import Scores
from horosphere.kernels.tiled.sqdist import sqdist as tiled_sqdist
from horosphere.kernels.tiled.sqdist import sqdist_backward as tiled_sqdist_backward
from horosphere.kernels.tiled.tiles import mirror_


class Packed(NamedTuple):
    """A geometry in the types that a custom operator takes; one tensor may appear several times.

    ``kind`` is a key of :data:`KINDS`, and ``layout`` tells that class how to read the tensors.
    """

    tensors: list[Tensor]
    kind: str
    layout: str


class Geometry(ABC):
    """Queries (..., N, .) and keys (..., M, .) and their distances.

    Attributes:
        family: operations of :data:`horosphere.kernels.dispatch.TABLE` are called family + "sqdist" and so on.
        picks: whether :meth:`sqdist` leaves pairs that it does not resolve to the caller.
        loops: the module of its attention in compiled loops, ``attention`` and ``attention_backward``.
        batch, dtype, n, m, device: of the matrix of distances.
        looks: what dispatch looks at beyond those.
        curved: whether the gradient of a curvature is wanted.
    """

    family: str
    picks: bool
    loops: ModuleType
    batch: torch.Size
    dtype: torch.dtype
    n: int
    m: int
    device: torch.device
    looks: dict[str, Any]
    curved: bool = False

    def call(self, operation: str, **settings: Any) -> dispatch.Call:
        """An operation on it, as the table of forms reads it; ``batch`` and ``dtype`` where they are not its own."""
        entries = settings.pop("batch", self.batch).numel() * self.n * self.m
        dtype = settings.pop("dtype", self.dtype)
        return dispatch.Call(self.family + operation, self.device, dtype, entries, **self.looks, **settings)

    @classmethod
    @abstractmethod
    def of(cls, tensors: Sequence[Tensor], layout: str) -> Geometry:
        """The inverse of :meth:`packed`."""

    @abstractmethod
    def packed(self) -> Packed:
        """What an operator takes of it."""

    @abstractmethod
    def plain_sqdist(self, squared: bool, resolve: bool) -> tuple[Tensor, Tensor | None]:
        """As :func:`horosphere.kernels.operators.sqdist` by the plain form, differentiable any number of times."""

    @abstractmethod
    def plain_attention(self, inputs: Inputs, resolve: bool) -> tuple[Tensor, Tensor]:
        """As :func:`horosphere.kernels.operators.attention` by the plain form."""

    @abstractmethod
    def sqdist(self, form: str, squared: bool, resolve: bool) -> tuple[Tensor, Tensor]:
        """The matrix (..., N, M), and flat indices (P,) of the pairs that are left to the caller."""

    @abstractmethod
    def sqdist_backward(self, form: str, grad: Tensor, squared: bool, resolve: bool, curvature: bool) -> list[Tensor]:
        """Gradients of the packed tensors."""

    @abstractmethod
    def scores(self, batch: torch.Size, dtype: torch.dtype, resolve: bool, curvature: bool) -> Scores:
        """Tiles of squared distances for the streaming loops of attention."""

    @abstractmethod
    def pointers(self, batch: torch.Size, dtype: torch.dtype, resolve: bool, curvature: bool) -> Any:
        """What the streaming Triton kernels read, and the functions that they are compiled with."""


class ChordPairs(Geometry):
    """Points whose distance is a function of squared chords, part by part.

    Args:
        xs, ys: chord parts of both sides, tuples (features, weight, time_dims, kappa), see horosphere.manifolds.Chord;
            features (..., N, F) and (..., M, F), batch dimensions broadcast.
        same: both are one set. The matrix is exactly symmetric then, and half of it is worked; of the unresolved pairs
            those below the diagonal may be left out.
    """

    family = ""
    picks = True
    loops = chord_loops

    def __init__(self, xs: Sequence, ys: Sequence, *, same: bool = False):
        self.xs, self.ys, self.same = xs, ys, same
        self._packed = pack(xs, ys)
        self.parts: list[ChordPair] = unpack(*self._packed)
        first = self.parts[0]
        self.batch, self.dtype = batch_of(self.parts), dtype_of(self.parts)
        self.n, self.m, self.device = first.x.shape[-2], first.y.shape[-2], first.x.device
        self.curved = any(p.kappa.requires_grad for p in self.parts)
        time = any(p.time_dims for p in self.parts)
        self.looks = {"parts": len(self.parts), "time": time, "features": first.x.shape[-1]}

    @classmethod
    def of(cls, tensors: Sequence[Tensor], layout: str) -> ChordPairs:
        xs, ys = zip(*(p.chords() for p in unpack(tensors, layout.removeprefix("="))), strict=True)
        return cls(xs, ys, same=layout.startswith("="))

    def packed(self) -> Packed:
        tensors, layout = self._packed
        return Packed(tensors, "chord", "=" + layout if self.same else layout)

    def plain_sqdist(self, squared: bool, resolve: bool) -> tuple[Tensor, Tensor | None]:
        if dispatch.tracing() == "torch.compile" and not resolve and fused.can_serve(self.xs):
            out = fused.sqdist(self.xs, self.ys, squared)
            return (out + out.mT) / 2 if self.same else out, None
        d2, near = reference_sqdist.sqdist(self.xs, self.ys)
        d2 = (d2 + d2.mT) / 2 if self.same else d2  # of two numbers that are equal up to rounding
        out = d2 if squared else _numerics.safe_sqrt(d2)
        return out, near.flatten().nonzero().squeeze(-1) if resolve else None

    def plain_attention(self, inputs: Inputs, resolve: bool) -> tuple[Tensor, Tensor]:
        return reference_attention.attention(self.xs, self.ys, inputs, resolve)

    def sqdist(self, form: str, squared: bool, resolve: bool) -> tuple[Tensor, Tensor]:
        if form == "triton":
            from horosphere.kernels.triton.sqdist import sqdist as triton_sqdist

            out, picked = triton_sqdist(self.parts, squared, resolve)
            return mirror_(out) if self.same else out, picked
        if form in ("numba", "auto"):  # "auto": points out of the range of numba's loops are left to tiles
            return numba_sqdist(self.parts, squared, resolve, strict=form == "numba", same=self.same)
        return tiled_sqdist(self.parts, squared, resolve, self.same)

    def sqdist_backward(self, form: str, grad: Tensor, squared: bool, resolve: bool, curvature: bool) -> list[Tensor]:
        if form == "triton":
            from horosphere.kernels.triton.sqdist import sqdist_backward as triton_sqdist_backward

            return triton_sqdist_backward(grad, self.parts, squared, curvature)
        return tiled_sqdist_backward(grad, self.parts, squared, curvature)

    def scores(self, batch: torch.Size, dtype: torch.dtype, resolve: bool, curvature: bool) -> Scores:
        return ChordScores(self.parts, batch, dtype, resolve=resolve, curvature=curvature)

    def pointers(self, batch: torch.Size, dtype: torch.dtype, resolve: bool, curvature: bool) -> Any:
        from horosphere.kernels.triton.chord import Points

        return Points(self.parts, batch, dtype, resolve=resolve, curvature=curvature)


class MetricPairs(Geometry):
    """Tokens each of which measures by a metric of its own; distances are squared ones."""

    family = "metric_"
    picks = False
    loops = metric_loops

    def __init__(self, pair: MetricPair):
        self.pair = pair
        self.batch, self.dtype, self.device = pair.batch, pair.dtype, pair.q.device
        self.n, self.m = pair.q.shape[-2], pair.k.shape[-2]
        self.looks = {"parts": 0, "features": pair.q.shape[-1]}

    @classmethod
    def of(cls, tensors: Sequence[Tensor], layout: str) -> MetricPairs:
        return cls(metric_pair_of(list(tensors), layout))

    def packed(self) -> Packed:
        return Packed(self.pair.tensors(), "metric", self.pair.end)

    def plain_sqdist(self, squared: bool, resolve: bool) -> tuple[Tensor, Tensor | None]:
        dtype = torch.float64 if resolve else self.dtype
        return reference_metric.sqdist(self.pair, dtype).to(self.dtype), None

    def plain_attention(self, inputs: Inputs, resolve: bool) -> tuple[Tensor, Tensor]:
        if resolve:
            eps = inputs.eps[..., None, None] if inputs.eps.dim() else inputs.eps
            shift = eps if inputs.weight == "inverse" else 0.0
            dtype = torch.promote_types(self.dtype, _numerics.fast_dtype(inputs.value.dtype))
            tolerance = _numerics.weight_tolerance(dtype)
            d2 = reference_metric.resolved(self.pair, torch.float64, shift, tolerance).to(dtype)
        else:
            d2 = reference_metric.sqdist(self.pair, self.dtype)
        return reference_attention.averaged(d2, inputs)

    def sqdist(self, form: str, squared: bool, resolve: bool) -> tuple[Tensor, Tensor]:
        dtype, tolerance = self._work(resolve)
        if form == "triton":
            from horosphere.kernels.triton.sqdist import metric_sqdist as triton_sqdist

            out = triton_sqdist(self.pair, dtype, tolerance)
        else:
            out = tiled_metric.sqdist(self.pair, dtype, tolerance)
        return out, out.new_empty(0, dtype=torch.int64)

    def sqdist_backward(self, form: str, grad: Tensor, squared: bool, resolve: bool, curvature: bool) -> list[Tensor]:
        if form == "triton":
            from horosphere.kernels.triton.sqdist import metric_sqdist_backward as triton_sqdist_backward

            return triton_sqdist_backward(grad, self.pair, self._work(resolve)[0])
        return tiled_metric.sqdist_backward(grad, self.pair, self._work(resolve)[0])

    def _work(self, resolve: bool) -> tuple[torch.dtype, float | None]:
        """The type of products, and the relative error of d^2 from which on pairs are worked from differences."""
        return (torch.float64, 2 * _numerics.promised_tolerance(self.dtype)) if resolve else (self.dtype, None)

    def scores(self, batch: torch.Size, dtype: torch.dtype, resolve: bool, curvature: bool) -> Scores:
        return MetricScores(self.pair, batch, dtype, resolve=resolve)

    def pointers(self, batch: torch.Size, dtype: torch.dtype, resolve: bool, curvature: bool) -> Any:
        from horosphere.kernels.triton.metric import Tokens

        return Tokens(self.pair, batch, dtype, resolve=resolve)


KINDS: dict[str, type[Geometry]] = {"chord": ChordPairs, "metric": MetricPairs}


def unpacked(tensors: Sequence[Tensor], kind: str, layout: str) -> Geometry:
    """The geometry that :meth:`Geometry.packed` gave."""
    return KINDS[kind].of(tensors, layout)

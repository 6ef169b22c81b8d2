r"""Rows of a tile with pairs that the product form does not resolve, worked again.

A pair is unresolved where the error bound of t reaches the tolerance of :math:`d^2 + \varepsilon`,

    t + c eps < theta c w_i w_j (|f_i|^2 + |f_j|^2) = (p_i + q_i |f_j|^2) w_j.

Both sides are looked at for the whole tile first (one reduction), then for its rows, and pair by pair only in rows that
may hold one. The rows found are made again by a product in float64, whose own error is 1e-9 of the first; where even
that is too much for eps, and for tiles in float64, by differences, feature by feature. So a tile of equal points costs
one more product and no memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.chord.augment import augment
from horosphere.kernels.chord.pair import ChordPair

if TYPE_CHECKING:
    from horosphere.kernels.tiled.chord_features import ChordFeatures


class Unresolved(NamedTuple):
    """Rows of batch entry k of the group with unresolved pairs, whose gradient is worked from differences too."""

    k: int
    rows: Tensor  # (P,) into the tile
    pairs: Tensor  # (P, C) bool: which they are


class Near:
    """The bounds of entries s of a part, and what is done with rows that break them.

    Args:
        features: the part.
        shift: (E,) eps.
        inside: whether t holds eps already.
    """

    def __init__(self, features: ChordFeatures, s: slice, shift: Tensor, inside: bool):
        self.features, self.s, self.work, self.inside = features, s, features.work, inside
        self.p, self.q, self.n, self.w = (t[s] for t in (features.p, features.q, features.n, features.w))
        self.shift = [eps * c for eps, c in zip(shift.tolist(), features.c[s], strict=True)]
        self.offset = [0.0] * len(self.shift) if inside else self.shift
        self.limits: dict[int, float] = {}
        # NaN and infinity count as unresolved
        most = self._limit(slice(None), slice(None), [0.0] * len(self.shift))
        self.never = most <= min(self.shift)

    def resolved(self, low: float, i: slice, j: slice) -> bool:
        """Whether a tile whose smallest t is ``low`` has no unresolved pair, by the bounds of its rows and columns."""
        limit = self.limits.get(i.start)  # of the rows with all columns: most tiles need no more
        if limit is None:
            limit = self.limits[i.start] = self._limit(i, slice(None), self.offset)
        return low >= limit or low >= self._limit(i, j, self.offset)

    def _limit(self, i: slice, j: slice, offset: list[float]) -> float:
        found = [most - o for most, o in zip(self.features.limits(i, j)[self.s], offset, strict=True)]
        return max(found) if all(x == x for x in found) else math.nan

    def rework_(self, t: Tensor, i: slice, j: slice) -> list[Unresolved]:
        """Make the rows of t (E, R, C) with unresolved pairs again, and tell which they were."""
        limit = self.p[:, i] * self.w[:, j].amax(-1, keepdim=True) + self.q[:, i] * self.n[:, j].amax(-1, keepdim=True)
        doubtful = ~(t.amin(-1) + t.new_tensor(self.offset)[:, None] >= limit)
        found = []
        for k in doubtful.any(-1).nonzero().flatten().tolist():
            rows = doubtful[k].nonzero().flatten()
            pairs = self._unresolved(t[k].index_select(0, rows), k, rows + i.start, j, self.offset[k])
            some = pairs.any(-1)
            rows, pairs = rows[some], pairs[some]
            if rows.numel():
                t[k].index_copy_(0, rows, self._exact(k, rows + i.start, j).to(self.work))
                found.append(Unresolved(k, rows, pairs))
        return found

    def _unresolved(self, t: Tensor, k: int, rows: Tensor, j: slice, offset: float, scale: float = 1.0) -> Tensor:
        """(P, C): which pairs of the rows t (P, C) are below scale times their limit, NaN among them."""
        limits = torch.outer(self.p[k].index_select(0, rows), self.w[k, j])
        limits.addcmul_(self.q[k].index_select(0, rows).unsqueeze(-1), self.n[k, j])
        return ~(t + offset >= limits.mul_(scale))

    def _exact(self, k: int, rows: Tensor, j: slice) -> Tensor:
        """t (P, C) of rows of entry k, in float64."""
        part, entry = self.features.part, self.s.start + k

        def of(t: Tensor, at: Tensor | slice) -> Tensor:
            return t[entry if t.shape[0] > 1 else 0][at].to(torch.float64).unsqueeze(0)

        kappa = part.kappa[entry : entry + 1]
        x, y = (with_own_time(of(t, at), kappa, part.time_dims) for t, at in ((part.x, rows), (part.y, j)))
        wx, wy = (None if w is None else of(w, at) for w, at in ((part.wx, rows), (part.wy, j)))
        one = augment(ChordPair(x, y, kappa, wx, wy, part.time_dims), torch.Size((1,)), torch.float64)
        a, b, shift = one.a[0], one.b[0], self.shift[k]
        t = a @ b.mT
        again = torch.ones_like(rows, dtype=torch.bool)
        if self.work != torch.float64:
            # the float64 product errs by the same bound, in smaller units
            scale = _numerics.unit_roundoff(torch.float64) / _numerics.unit_roundoff(self.work)
            again = self._unresolved(t, k, rows, j, shift, scale).any(-1)
        if bool(again.any()):
            s = _differences(x[0, again], y[0], part.time_dims)
            if wx is not None and wy is not None:
                s *= wx[0, again].unsqueeze(-1) * wy
            t[again] = s * self.features.c[entry]
        t.clamp_(min=_numerics.SMALLEST_CHORD2)
        return t.add_(shift) if self.inside else t


def with_own_time(x: Tensor, kappa: Tensor, time_dims: int) -> Tensor:
    """Features x (E, N, F) in float64, the time of points of a hyperboloid to more digits than it is stored with."""
    x = x.to(torch.float64)
    if time_dims != 1:
        return x
    space = x[..., 1:]
    return torch.cat((torch.sqrt((space * space).sum(-1, keepdim=True) - 1 / kappa[:, None, None]), space), -1)


def _differences(x: Tensor, y: Tensor, time_dims: int) -> Tensor:
    r"""s (P, C) feature by feature; times enter as :math:`t_x - t_y = \langle\delta, s\rangle/(t_x + t_y)`."""
    out = x.new_zeros(x.shape[0], y.shape[0])
    along = torch.zeros_like(out) if time_dims else None
    for f in range(time_dims, x.shape[-1]):
        delta = x[:, f, None] - y[:, f]
        out.addcmul_(delta, delta)
        if along is not None:
            along.addcmul_(delta, x[:, f, None] + y[:, f])
    if along is not None:
        out.sub_(along.div_(x[:, :1] + y[:, 0]).square_())
    return out


def pair_differences(x: Tensor, y: Tensor, time_dims: int) -> Tensor:
    """x - y (P, F) of pairs in float64; times as in :func:`_differences`."""
    delta = x - y
    if time_dims:
        along = (delta[..., time_dims:] * (x + y)[..., time_dims:]).sum(-1, keepdim=True)
        delta[..., :time_dims] = along / (x + y)[..., :time_dims]
    return delta

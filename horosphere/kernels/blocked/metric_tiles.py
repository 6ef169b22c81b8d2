r"""Tiles of squared distances under per-token metrics, and what their gradients give to each point.

Features are augmented so that every term is one matrix product, with c the share of a metric:

    |q_i - k_j|^2          = <a_i, b_j>          a_i = (-2 q_i, |q_i|^2, 1)                  b_j = (k_j, 1, |k_j|^2)
    c (U_ir^T delta_ij)^2  = <alpha_ir, y_j>^2   alpha_ir = sqrt(c) (U_ir, -U_ir^T q_i)      y_j = (k_j, 1)
    c (U_jr^T delta_ij)^2  = <x_i, beta_jr>^2    beta_jr = sqrt(c) (U_jr, -U_jr^T k_j)       x_i = (q_i, 1)

so a tile takes 1 + R products for one end, 1 + 2 R for the mean, each squared into the same buffer: (N, M, R) never
exists. Gradients of the augmented features are products with the tile's gradient; the rest is per point.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.blocked.augment import tile_product
from horosphere.kernels.fibres import Fibres
from horosphere.kernels.reference.metric_sqdist import by_differences

# Pairs worked from differences at a time.
PAIRS = 2**14


class Side(NamedTuple):
    """Columns of one end's metrics: (R, B, N, D + 1), and s^2 times the share, (B, N)."""

    columns: Tensor
    scales: Tensor


class MetricTiles:
    """Distances of flat :class:`Fibres` tile by tile, in the type ``dtype``.

    Args:
        f: the fibres, any batch dimensions.
        dtype: type of the matrix products.
        tolerance: relative error of d^2 + eps above which a pair is worked from differences; None: never.
        eps: what is added to distances, (B,); None: nothing.
    """

    def __init__(self, f: Fibres, dtype: torch.dtype, tolerance: float | None, eps: Tensor | None = None):
        self.fibres, self.flat, self.dtype = f, f.flat(), dtype
        q, k = self.flat.q, self.flat.k
        nq, nk = ((t * t).sum(-1, keepdim=True) for t in (q, k))
        one_q, one_k = torch.ones_like(nq), torch.ones_like(nk)
        self.a, self.b = (t.to(dtype) for t in (torch.cat((-2 * q, nq, one_q), -1), torch.cat((k, one_k, nk), -1)))
        self.x, self.y = (t.to(dtype) for t in (torch.cat((q, one_q), -1), torch.cat((k, one_k), -1)))
        self.query = self._side(self.flat.scale_q, self.flat.factor_q, q)
        self.key = self._side(self.flat.scale_k, self.flat.factor_k, k)
        self.tolerance = tolerance
        if tolerance is not None:
            self._bounds(nq.squeeze(-1), nk.squeeze(-1), eps)

    def _side(self, scale: Tensor | None, factor: Tensor | None, points: Tensor) -> Side | None:
        if scale is None:
            return None
        share = self.fibres.share
        columns = factor.permute(3, 0, 1, 2) * share**0.5
        columns = torch.cat((columns, -(columns * points).sum(-1, keepdim=True)), -1)
        return Side(columns.to(self.dtype).contiguous(), (share * scale * scale).to(self.dtype))

    def _bounds(self, nq: Tensor, nk: Tensor, eps: Tensor | None) -> None:
        """Pairs with d^2 + eps < (|q|^2 + |k|^2)(p_i + p_j) may miss the tolerance.

        The error of u is at most 4 sqrt(D + 2) units of what was subtracted, that of U_r^T delta sqrt(D + 1) units of
        |U_r| (|q| + |k|), once in d^2 relative to 2 |U_r^T delta|.
        """
        dim, unit = self.a.shape[-1], _numerics.unit_roundoff(self.dtype)
        flat = 2 * 4 * dim**0.5 * unit / self.tolerance
        steep = 32 * dim * (unit / self.tolerance) ** 2

        def limit(scale: Tensor | None, factor: Tensor | None, like: Tensor) -> Tensor:
            if scale is None:
                return torch.zeros_like(like)
            return self.fibres.share * (flat * scale**2 + steep * (factor**2).sum((-1, -2)))

        self._norms = nq, nk
        self._limits = [
            limit(self.flat.scale_q, self.flat.factor_q, nq),
            limit(self.flat.scale_k, self.flat.factor_k, nk),
        ]
        self._eps = torch.zeros(nq.shape[0], dtype=torch.float64, device=nq.device) if eps is None else eps
        largest = [float(t.amax()) if t.numel() else 0.0 for t in (nq, nk, *self._limits)]
        self._largest = (largest[0] + largest[1]) * (largest[2] + largest[3])

    def tile(self, e: slice, i: slice, j: slice, out: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor | None]:
        """d^2 of a tile in the flat buffer ``out``, and its pairs (P, 3: batch, row, column) worked from differences."""
        d2 = self._product(e, i, j, out, scratch)
        if self.tolerance is None or not d2.numel():
            return d2, None
        near = self._near(d2, e, i, j)
        if near is not None:
            for some in near.split(PAIRS):
                d2[tuple(some.T)] = by_differences(self._pairs(some, e, i, j)).to(d2.dtype)
        return d2, near

    def _product(self, e: slice, i: slice, j: slice, out: Tensor, scratch: Tensor) -> Tensor:
        d2 = tile_product(self.a[e, i], self.b[e, j], out).clamp_(min=0.0)
        self._times_scales(d2, e, i, j, scratch)
        for t in self._columns(e, i, j, scratch):
            d2.addcmul_(t, t)
        return d2

    def _columns(self, e: slice, i: slice, j: slice, scratch: Tensor):
        """The tile of every U_r^T delta, one after the other in the same buffer."""
        for r in range(self.query.columns.shape[0] if self.query else 0):
            yield tile_product(self.query.columns[r, e, i], self.y[e, j], scratch)
        for r in range(self.key.columns.shape[0] if self.key else 0):
            yield tile_product(self.x[e, i], self.key.columns[r, e, j], scratch)

    def _times_scales(self, t: Tensor, e: slice, i: slice, j: slice, scratch: Tensor) -> Tensor:
        """t times what |delta|^2 is multiplied with, in place."""
        if self.query is None:
            return t.mul_(self.key.scales[e, None, j])
        if self.key is None:
            return t.mul_(self.query.scales[e, i, None])
        both = scratch[: t.numel()].view(t.shape)
        torch.add(self.query.scales[e, i, None], self.key.scales[e, None, j], out=both)
        return t.mul_(both)

    def _near(self, d2: Tensor, e: slice, i: slice, j: slice) -> Tensor | None:
        eps = self._eps[e]
        if not float(d2.amin()) + float(eps.amin()) < self._largest:
            return None
        nq, nk = self._norms[0][e, i, None], self._norms[1][e, None, j]
        limit = (nq + nk) * (self._limits[0][e, i, None] + self._limits[1][e, None, j])
        near = (d2 + eps[:, None, None] < limit).nonzero()
        return near if near.shape[0] else None

    def _pairs(self, at: Tensor, e: slice, i: slice, j: slice) -> Fibres:
        entry, row, column = self._places(at, e, i, j)
        return Fibres(
            *(
                None if t is None else t[entry, place]
                for t, place in zip(self.flat, (row, column, row, row, column, column), strict=True)
            )
        )

    def _places(self, at: Tensor, e: slice, i: slice, j: slice) -> tuple[Tensor, Tensor, Tensor]:
        entry, row, column = at.unbind(-1)
        return entry + e.start, row + i.start, column + j.start

    # gradients

    def start_gradients(self) -> None:
        """Zeros for the gradients of everything augmented."""
        self._da, self._db, self._dx, self._dy = (torch.zeros_like(t) for t in (self.a, self.b, self.x, self.y))
        self._sides = [None if s is None else Side(*(torch.zeros_like(t) for t in s)) for s in (self.query, self.key)]
        self._direct = [None if t is None else torch.zeros_like(t) for t in self.flat] if self.tolerance else None

    def add_gradient(
        self, g: Tensor, near: Tensor | None, e: slice, i: slice, j: slice, buffers: tuple[Tensor, Tensor]
    ) -> None:
        """Add what a tile gives, g = dL/d(d^2), which is overwritten; buffers as large as the tile."""
        if near is not None:
            self._add_differences(g, near, e, i, j)
        one, two = buffers
        for r in range(self.query.columns.shape[0] if self.query else 0):
            t = tile_product(self.query.columns[r, e, i], self.y[e, j], one).mul_(g)
            _accumulate(self._sides[0].columns[r, e, i], t, self.y[e, j])
            _accumulate(self._dy[e, j], t.mT, self.query.columns[r, e, i])
        for r in range(self.key.columns.shape[0] if self.key else 0):
            t = tile_product(self.x[e, i], self.key.columns[r, e, j], one).mul_(g)
            _accumulate(self._sides[1].columns[r, e, j], t.mT, self.x[e, i])
            _accumulate(self._dx[e, i], t, self.key.columns[r, e, j])
        u = tile_product(self.a[e, i], self.b[e, j], one).clamp_(min=0.0).mul_(g)
        if self.query:
            self._sides[0].scales[e, i] += u.sum(-1)
        if self.key:
            self._sides[1].scales[e, j] += u.sum(-2)
        self._times_scales(g, e, i, j, two)
        _accumulate(self._da[e, i], g, self.b[e, j])
        _accumulate(self._db[e, j], g.mT, self.a[e, i])

    def _add_differences(self, g: Tensor, near: Tensor, e: slice, i: slice, j: slice) -> None:
        """Pairs worked from differences: their gradients too, and none from the product form."""
        for some in near.split(PAIRS):
            upper = g[tuple(some.T)].to(torch.float64)
            with torch.enable_grad():
                leaves = self._pairs(some, e, i, j)
                leaves = Fibres(*(None if t is None else t.detach().requires_grad_() for t in leaves))
                found = iter(torch.autograd.grad(by_differences(leaves), leaves.tensors(), upper))
            entry, row, column = self._places(some, e, i, j)
            for into, place in zip(self._direct, (row, column, row, row, column, column), strict=True):
                if into is not None:
                    into.index_put_((entry, place), next(found), accumulate=True)
        g[tuple(near.T)] = 0.0

    def gradients(self) -> list[Tensor]:
        """dL/d of every tensor of the fibres, in their shapes and types."""
        f, d = self.flat, self.flat.q.shape[-1]
        wide = torch.float64
        da, db, dx, dy = (t.to(wide) for t in (self._da, self._db, self._dx, self._dy))
        dq = 2 * (f.q * da[..., d : d + 1] - da[..., :d]) + 2 * dx[..., :d]
        dk = 2 * f.k * db[..., d + 1 :] + db[..., :d] + 2 * dy[..., :d]
        found = [dq, dk]
        for at, (scale, factor, points) in enumerate(((f.scale_q, f.factor_q, f.q), (f.scale_k, f.factor_k, f.k))):
            if scale is None:
                found += [None, None]
                continue
            share = self.fibres.share
            columns = 2 * share**0.5 * self._sides[at].columns.to(wide).permute(1, 2, 3, 0)
            last = columns[..., d:, :]
            found += [
                2 * share * scale * self._sides[at].scales.to(wide),
                columns[..., :d, :] - points.unsqueeze(-1) * last,
            ]
            found[at] = found[at] - (factor * last).sum(-1)
        if self._direct is not None:
            found = [None if g is None else g + h for g, h in zip(found, self._direct, strict=True)]
        batch = self.fibres.batch
        return [
            g.reshape(*batch, *g.shape[1:]).sum_to_size(like.shape).to(like.dtype)
            for g, like in zip(found, self.fibres, strict=True)
            if g is not None
        ]


def _accumulate(into: Tensor, g: Tensor, features: Tensor) -> None:
    if g.shape[0] == 1:
        into[0].addmm_(g[0], features[0])
    else:
        into.baddbmm_(g, features)

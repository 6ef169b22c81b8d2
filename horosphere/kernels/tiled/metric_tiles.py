r"""Tiles of squared distances under per-token metrics, and what their gradients give to each point.

Features are augmented so that every term is one matrix product, with c the share of a metric:

    |q_i - k_j|^2          = <a_i, b_j>          a_i = (-2 q_i, |q_i|^2, 1)                  b_j = (k_j, 1, |k_j|^2)
    c (U_ir^T delta_ij)^2  = <alpha_ir, y_j>^2   alpha_ir = (U_ir, -U_ir^T q_i)              y_j = sqrt(c) (k_j, 1)
    c (U_jr^T delta_ij)^2  = <x_i, beta_jr>^2    beta_jr = (U_jr, -U_jr^T k_j)               x_i = sqrt(c) (q_i, 1)

so a tile takes 1 + R products for one end, 1 + 2 R for the mean, each squared into the same buffer: (N, M, R) never
exists. Gradients of the augmented features are products with the tile's gradient; the rest is per point.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.chord.augment import tile_product
from horosphere.kernels.low_rank.fibres import Fibres, limits
from horosphere.kernels.reference.metric_sqdist import by_differences
from horosphere.kernels.tiled.huge_pages import prefer_large

# Pairs worked from differences at a time: 2^12 with metrics of 64 x 4 take 17 MB. Tiles in float32 with more are made
# again by products in float64.
PAIRS = 2**12


class Side(NamedTuple):
    """Columns of one end's metrics: (R, B, N, D + 1), and s^2 times the share, (B, N)."""

    columns: Tensor
    scales: Tensor


class Tile(NamedTuple):
    """z = d^2 + eps (E, R, C); pairs (P, 3: entry, row, column) worked from differences; or all of it from float64."""

    z: Tensor
    near: Tensor | None
    exact: Tile | None


class MetricTiles:
    """Distances of flat :class:`Fibres` tile by tile, in the type ``dtype``.

    Args:
        f: the fibres.
        batch: the batch dimensions of the matrix, to which those of the fibres broadcast.
        dtype: type of the matrix products.
        tolerance: relative error of d^2 + eps above which a pair is worked from differences; None: never.
    """

    def __init__(self, f: Fibres, batch: torch.Size, dtype: torch.dtype, tolerance: float | None):
        self.fibres, self.batch, self.flat, self.dtype = f, batch, f.flat(batch, dtype), dtype
        self.root = f.share**0.5
        q, k = self.flat.q, self.flat.k
        nq, nk = ((t * t).sum(-1, keepdim=True) for t in (q, k))
        one_q, one_k = torch.ones_like(nq), torch.ones_like(nk)
        self.a, self.b = torch.cat((-2 * q, nq, one_q), -1), torch.cat((k, one_k, nk), -1)
        self.x, self.y = (torch.cat(t, -1).mul_(self.root) for t in ((q, one_q), (k, one_k)))
        self.query = self._side(self.flat.scale_q, self.flat.factor_q, q)
        self.key = self._side(self.flat.scale_k, self.flat.factor_k, k)
        self.tolerance = tolerance
        self.wide: MetricTiles | None = None  # the same in float64, for tiles full of near pairs
        self._sides: list[Side | None] | None = None  # gradients, as all that follow
        self._direct: list[Tensor | None] | None = None  # of pairs worked from differences
        self.norms = nq.squeeze(-1), nk.squeeze(-1)
        if tolerance is not None:
            self._bounds(*self.norms, tolerance)

    def _side(self, scale: Tensor | None, factor: Tensor | None, points: Tensor) -> Side | None:
        if scale is None:
            return None
        entries, rows, dim, rank = factor.shape
        columns = prefer_large(factor.new_empty(rank, entries, rows, dim + 1))
        columns[..., :dim] = factor.permute(3, 0, 1, 2)
        columns[..., dim] = -torch.einsum("bndr,bnd->rbn", factor, points)
        return Side(columns, self.fibres.share * scale * scale)

    def _bounds(self, nq: Tensor, nk: Tensor, tolerance: float) -> None:
        self.limits = limits(self.flat, self.dtype, tolerance)
        self._largest = (_most(nq) + _most(nk)) * (_most(self.limits[0]) + _most(self.limits[1]))

    def extent(self) -> float:
        """A bound of d^2: the largest difference times the largest eigenvalues."""
        sides = ((self.flat.scale_q, self.flat.factor_q), (self.flat.scale_k, self.flat.factor_k))
        largest = [_most(s**2 + _square(u)) for s, u in sides if s is not None]
        return (_most(self.norms[0]) ** 0.5 + _most(self.norms[1]) ** 0.5) ** 2 * max(largest)

    def tile(self, e: slice, i: slice, j: slice, eps: Tensor | None, out: Tensor, scratch: Tensor) -> Tile:
        """d^2 + eps, eps (E, 1, 1), of a tile in the flat buffer ``out``."""
        z = tile_product(self.a[e, i], self.b[e, j], out)
        if self.tolerance is None:
            z.clamp_(min=0.0)
        self._times_scales(z, e, i, j, scratch, eps)
        for t in self._columns(e, i, j, scratch):
            z.addcmul_(t, t)
        if self.tolerance is None or not z.numel() or float(z.amin()) >= self._largest:
            return Tile(
                z if eps is None or self.tolerance is not None else z.clamp_(min=_numerics.SMALLEST_CHORD2), None, None
            )
        return self.rework_(z, e, i, j, eps)

    def rework_(self, z: Tensor, e: slice, i: slice, j: slice, eps: Tensor | None) -> Tile:
        """z with its unresolved pairs made again, in place."""
        nq, nk = self.norms[0][e, i, None], self.norms[1][e, None, j]
        limit = (nq + nk) * (self.limits[0][e, i, None] + self.limits[1][e, None, j])
        near = (~(z >= limit)).nonzero()
        if not near.shape[0]:
            return Tile(z, None, None)
        if near.shape[0] > PAIRS and self.dtype != torch.float64:
            if self.wide is None:
                self.wide = MetricTiles(self.fibres, self.batch, torch.float64, self.tolerance)
            buffers = z.new_empty(2, z.numel(), dtype=torch.float64)
            exact = self.wide.tile(e, i, j, None if eps is None else eps.to(torch.float64), *buffers)
            return Tile(z.copy_(exact.z), None, exact)
        for some in near.split(PAIRS):
            d2 = by_differences(self._pairs(some, e, i, j))
            z[tuple(some.T)] = (
                d2 if eps is None else (d2 + eps[some[:, 0], 0, 0]).clamp(min=_numerics.SMALLEST_CHORD2)
            ).to(z.dtype)
        return Tile(z, near, None)

    def _columns(self, e: slice, i: slice, j: slice, scratch: Tensor) -> Iterator[Tensor]:
        """The tile of every U_r^T delta, one after the other in the same buffer."""
        for r in range(self.query.columns.shape[0] if self.query else 0):
            yield tile_product(self.query.columns[r, e, i], self.y[e, j], scratch)
        for r in range(self.key.columns.shape[0] if self.key else 0):
            yield tile_product(self.x[e, i], self.key.columns[r, e, j], scratch)

    def _times_scales(self, t: Tensor, e: slice, i: slice, j: slice, scratch: Tensor, plus: Tensor | None) -> None:
        """t times what |delta|^2 is multiplied with, plus (E, 1, 1), in place."""
        if self.query is None:
            scales = self.key.scales[e, None, j]
        elif self.key is None:
            scales = self.query.scales[e, i, None]
        else:
            scales = scratch[: t.numel()].view(t.shape)
            torch.add(self.query.scales[e, i, None], self.key.scales[e, None, j], out=scales)
        if plus is None:
            t.mul_(scales)
        else:
            torch.addcmul(plus, t, scales, out=t)

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

    def prepare_gradients(self) -> None:
        """Zeros for the gradients of everything augmented."""
        self._da, self._db, self._dx, self._dy = (torch.zeros_like(t) for t in (self.a, self.b, self.x, self.y))
        self._sides = [
            None if s is None else Side(*(prefer_large(torch.empty_like(t)).zero_() for t in s))
            for s in (self.query, self.key)
        ]

    def add_gradient(
        self, g: Tensor, tile: Tile | None, e: slice, i: slice, j: slice, one: Tensor, two: Tensor
    ) -> None:
        """Add what a tile gives, g = dL/d(d^2), which is overwritten; the buffers are as large as the tile."""
        if tile is not None and tile.exact is not None:
            if self.wide._sides is None:
                self.wide.prepare_gradients()
            self.wide.add_gradient(
                g.to(torch.float64), tile.exact, e, i, j, *g.new_empty(2, g.numel(), dtype=torch.float64)
            )
            return
        if tile is not None and tile.near is not None:
            self._add_differences(g, tile.near, e, i, j)
        for r in range(self.query.columns.shape[0] if self.query else 0):
            t = tile_product(self.query.columns[r, e, i], self.y[e, j], one).mul_(g)
            _accumulate(self._sides[0].columns[r, e, i], t, self.y[e, j])
            _accumulate(self._dy[e, j], t.mT, self.query.columns[r, e, i])
        for r in range(self.key.columns.shape[0] if self.key else 0):
            t = tile_product(self.x[e, i], self.key.columns[r, e, j], one).mul_(g)
            _accumulate(self._sides[1].columns[r, e, j], t.mT, self.x[e, i])
            _accumulate(self._dx[e, i], t, self.key.columns[r, e, j])
        u = tile_product(self.a[e, i], self.b[e, j], one).mul_(g)
        if self.query:
            self._sides[0].scales[e, i] += u.sum(-1)
        if self.key:
            self._sides[1].scales[e, j] += u.sum(-2)
        self._times_scales(g, e, i, j, two, None)
        _accumulate(self._da[e, i], g, self.b[e, j])
        _accumulate(self._db[e, j], g.mT, self.a[e, i])

    def _add_differences(self, g: Tensor, near: Tensor, e: slice, i: slice, j: slice) -> None:
        """Pairs worked from differences: their gradients too, and none from the product form."""
        for some in near.split(PAIRS):
            upper = g[tuple(some.T)].to(torch.float64)
            with torch.enable_grad():
                leaves = self._pairs(some, e, i, j)
                leaves = Fibres(*(None if t is None else t.detach().to(torch.float64).requires_grad_() for t in leaves))
                found = iter(torch.autograd.grad(by_differences(leaves), leaves.tensors(), upper))
            if self._direct is None:
                self._direct = [None if t is None else torch.zeros_like(t, dtype=torch.float64) for t in self.flat]
            entry, row, column = self._places(some, e, i, j)
            for into, place in zip(self._direct, (row, column, row, row, column, column), strict=True):
                if into is not None:
                    into.index_put_((entry, place), next(found), accumulate=True)
        g[tuple(near.T)] = 0.0

    def take_gradients(self, keys: bool, features: Tensor, side: Side | None, points: Tensor) -> None:
        """Gradients that others have summed: of one side's a or b, columns and scales, and x or y."""
        if keys:
            self._db, self._dy = features, points
        else:
            self._da, self._dx = features, points
        self._sides = self._sides or [None, None]
        self._sides[keys] = side

    def gradients(self, scale: Tensor | None = None) -> list[Tensor]:
        """dL/d of every tensor of the fibres, in their shapes and types; ``scale`` (B,) multiplies all."""
        found = self._flat_gradients()
        if self.wide is not None and self.wide._sides is not None:
            found = [None if g is None else g + h for g, h in zip(found, self.wide._flat_gradients(), strict=True)]
        out = []
        for g, like in zip(found, self.fibres, strict=True):
            if g is not None:
                g = g if scale is None else g * scale.view(-1, *[1] * (g.dim() - 1))
                out.append(g.reshape(*self.batch, *g.shape[1:]).sum_to_size(like.shape).to(like.dtype))
        return out

    def _flat_gradients(self) -> list[Tensor | None]:
        f, d = self.flat, self.flat.q.shape[-1]
        da, db, dx, dy = self._da, self._db, self._dx, self._dy
        dq = 2 * (f.q * da[..., d : d + 1] - da[..., :d]) + 2 * self.root * dx[..., :d]
        dk = 2 * f.k * db[..., d + 1 :] + db[..., :d] + 2 * self.root * dy[..., :d]
        found = [dq, dk]
        sides = ((self.query, f.scale_q, f.q), (self.key, f.scale_k, f.k))
        for at, (side, scale, points) in enumerate(sides):
            if side is None:
                found += [None, None]
                continue
            columns = 2 * self._sides[at].columns
            last = columns[..., d:]
            found[at] = found[at] - torch.einsum("rbnd,rbn->bnd", side.columns[..., :d], last.squeeze(-1))
            found.append(2 * self.fibres.share * scale * self._sides[at].scales)
            found.append(columns[..., :d].sub_(points * last).permute(1, 2, 3, 0))
        if self._direct is not None:
            found = [None if g is None else g + h for g, h in zip(found, self._direct, strict=True)]
        return found


def _square(factor: Tensor) -> Tensor:
    """|U|^2 of every token."""
    return torch.linalg.vector_norm(factor, dim=(-2, -1)) ** 2


def _most(t: Tensor) -> float:
    return float(t.amax()) if t.numel() else 0.0


def _accumulate(into: Tensor, g: Tensor, features: Tensor) -> None:
    if g.shape[0] == 1:
        into[0].addmm_(g[0], features[0])
    else:
        into.baddbmm_(g, features)

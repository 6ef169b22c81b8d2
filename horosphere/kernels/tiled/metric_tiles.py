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
from horosphere.kernels.low_rank.pair import Metric, MetricPair, limits
from horosphere.kernels.reference.metric_sqdist import by_differences
from horosphere.kernels.tiled.workspace import prefer_large

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
    """Distances of flat :class:`MetricPair` tile by tile, in the type ``dtype``.

    Args:
        f: the pair.
        batch: the batch dimensions of the matrix, to which those of the pair broadcast.
        dtype: type of the matrix products.
        tolerance: relative error of d^2 + eps above which a pair is worked from differences; None: never.
    """

    # Gradients, once they are prepared or taken: of all features, and of the metrics of the ends that have them.
    _da: Tensor
    _db: Tensor
    _dx: Tensor
    _dy: Tensor
    _dquery: Side
    _dkey: Side

    def __init__(self, f: MetricPair, batch: torch.Size, dtype: torch.dtype, tolerance: float | None):
        self.pair, self.batch, self.flat, self.dtype = f, batch, f.flat(batch, dtype), dtype
        self.root = f.share**0.5
        q, k = self.flat.q, self.flat.k
        nq, nk = ((t * t).sum(-1, keepdim=True) for t in (q, k))
        one_q, one_k = torch.ones_like(nq), torch.ones_like(nk)
        self.a, self.b = torch.cat((-2 * q, nq, one_q), -1), torch.cat((k, one_k, nk), -1)
        self.x, self.y = (torch.cat(t, -1).mul_(self.root) for t in ((q, one_q), (k, one_k)))
        self.query, self.key = self._side(self.flat.metric_q, q), self._side(self.flat.metric_k, k)
        self._scales = []  # of the ends that have metrics, spread over the matrix
        if self.query is not None:
            self._scales.append(self.query.scales.unsqueeze(-1).expand(-1, -1, k.shape[1]))
        if self.key is not None:
            self._scales.append(self.key.scales.unsqueeze(-2).expand(-1, q.shape[1], -1))
        self.tolerance = tolerance
        self._wide: MetricTiles | None = None  # the same in float64, for tiles full of near pairs
        self._summed = False  # whether there are gradients
        self._direct: list[Tensor] | None = None  # those of pairs worked from differences, of the pair's tensors
        self.norms = nq.squeeze(-1), nk.squeeze(-1)
        if tolerance is not None:
            self._bounds(*self.norms, tolerance)

    def _side(self, metric: Metric | None, points: Tensor) -> Side | None:
        if metric is None:
            return None
        scale, factor = metric
        entries, rows, dim, rank = factor.shape
        columns = prefer_large(factor.new_empty(rank, entries, rows, dim + 1))
        columns[..., :dim] = factor.permute(3, 0, 1, 2)
        columns[..., dim] = -torch.einsum("bndr,bnd->rbn", factor, points)
        return Side(columns, self.pair.share * scale * scale)

    def _bounds(self, nq: Tensor, nk: Tensor, tolerance: float) -> None:
        self.limits = limits(self.flat, self.dtype, tolerance)
        self._largest = (_most(nq) + _most(nk)) * (_most(self.limits[0]) + _most(self.limits[1]))

    def extent(self) -> float:
        """A bound of d^2: the largest difference times the largest eigenvalues."""
        metrics = (self.flat.metric_q, self.flat.metric_k)
        largest = [_most(metric.scale**2 + _square(metric.factor)) for metric in metrics if metric is not None]
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
            buffers = z.new_empty(2, z.numel(), dtype=torch.float64)
            exact = self._in_float64().tile(e, i, j, None if eps is None else eps.to(torch.float64), *buffers)
            return Tile(z.copy_(exact.z), None, exact)
        for some in near.split(PAIRS):
            d2 = by_differences(self._pairs(some, e, i, j))
            z[tuple(some.T)] = (
                d2 if eps is None else (d2 + eps[some[:, 0], 0, 0]).clamp(min=_numerics.SMALLEST_CHORD2)
            ).to(z.dtype)
        return Tile(z, near, None)

    def _in_float64(self) -> MetricTiles:
        if self._wide is None:
            self._wide = MetricTiles(self.pair, self.batch, torch.float64, self.tolerance)
        return self._wide

    def _columns(self, e: slice, i: slice, j: slice, scratch: Tensor) -> Iterator[Tensor]:
        """The tile of every U_r^T delta, one after the other in the same buffer."""
        if self.query is not None:
            for columns in self.query.columns.unbind():
                yield tile_product(columns[e, i], self.y[e, j], scratch)
        if self.key is not None:
            for columns in self.key.columns.unbind():
                yield tile_product(self.x[e, i], columns[e, j], scratch)

    def _times_scales(self, t: Tensor, e: slice, i: slice, j: slice, scratch: Tensor, plus: Tensor | None) -> None:
        """t times what |delta|^2 is multiplied with, plus (E, 1, 1), in place."""
        scales, *others = (s[e, i, j] for s in self._scales)
        if others:
            scales = torch.add(scales, others[0], out=scratch[: t.numel()].view(t.shape))
        if plus is None:
            t.mul_(scales)
        else:
            torch.addcmul(plus, t, scales, out=t)

    def _pairs(self, at: Tensor, e: slice, i: slice, j: slice) -> MetricPair:
        entry, row, column = self._places(at, e, i, j)
        return self.flat.pairs((entry, row), (entry, column))

    def _places(self, at: Tensor, e: slice, i: slice, j: slice) -> tuple[Tensor, Tensor, Tensor]:
        entry, row, column = at.unbind(-1)
        return entry + e.start, row + i.start, column + j.start

    # gradients

    def prepare_gradients(self) -> None:
        """Zeros for the gradients of everything augmented."""
        self._da, self._db, self._dx, self._dy = (torch.zeros_like(t) for t in (self.a, self.b, self.x, self.y))
        if self.query is not None:
            self._dquery = _zeros(self.query)
        if self.key is not None:
            self._dkey = _zeros(self.key)
        self._summed = True

    def add_gradient(
        self, g: Tensor, tile: Tile | None, e: slice, i: slice, j: slice, one: Tensor, two: Tensor
    ) -> None:
        """Add what a tile gives, g = dL/d(d^2), which is overwritten; the buffers are as large as the tile."""
        if tile is not None and tile.exact is not None:
            wide = self._in_float64()
            if not wide._summed:
                wide.prepare_gradients()
            wide.add_gradient(g.to(torch.float64), tile.exact, e, i, j, *g.new_empty(2, g.numel(), dtype=torch.float64))
            return
        if tile is not None and tile.near is not None:
            self._add_differences(g, tile.near, e, i, j)
        if self.query is not None:
            for columns, into in zip(self.query.columns.unbind(), self._dquery.columns.unbind(), strict=True):
                t = tile_product(columns[e, i], self.y[e, j], one).mul_(g)
                _accumulate(into[e, i], t, self.y[e, j])
                _accumulate(self._dy[e, j], t.mT, columns[e, i])
        if self.key is not None:
            for columns, into in zip(self.key.columns.unbind(), self._dkey.columns.unbind(), strict=True):
                t = tile_product(self.x[e, i], columns[e, j], one).mul_(g)
                _accumulate(into[e, j], t.mT, self.x[e, i])
                _accumulate(self._dx[e, i], t, columns[e, j])
        u = tile_product(self.a[e, i], self.b[e, j], one).mul_(g)
        if self.query is not None:
            self._dquery.scales[e, i] += u.sum(-1)
        if self.key is not None:
            self._dkey.scales[e, j] += u.sum(-2)
        self._times_scales(g, e, i, j, two, None)
        _accumulate(self._da[e, i], g, self.b[e, j])
        _accumulate(self._db[e, j], g.mT, self.a[e, i])

    def _add_differences(self, g: Tensor, near: Tensor, e: slice, i: slice, j: slice) -> None:
        """Pairs worked from differences: their gradients too, and none from the product form."""
        for some in near.split(PAIRS):
            upper = g[tuple(some.T)].to(torch.float64)
            with torch.enable_grad():
                leaves = self._pairs(some, e, i, j).each(
                    lambda t, own, of_keys: t.detach().to(torch.float64).requires_grad_()
                )
                found = torch.autograd.grad(by_differences(leaves), leaves.tensors(), upper)
            if self._direct is None:
                self._direct = [torch.zeros_like(t, dtype=torch.float64) for t in self.flat.tensors()]
            entry, row, column = self._places(some, e, i, j)
            queries = () if self.query is None else (row, row)
            keys = () if self.key is None else (column, column)
            for into, place, gradient in zip(self._direct, (row, column, *queries, *keys), found, strict=True):
                into.index_put_((entry, place), gradient, accumulate=True)
        g[tuple(near.T)] = 0.0

    def take_gradients(self, keys: bool, features: Tensor, side: Side | None, points: Tensor) -> None:
        """Gradients that others have summed: of one side's a or b, columns and scales, and x or y."""
        if keys:
            self._db, self._dy = features, points
        else:
            self._da, self._dx = features, points
        if side is not None and keys:
            self._dkey = side
        elif side is not None:
            self._dquery = side
        self._summed = True

    def gradients(self, scale: Tensor | None = None) -> list[Tensor]:
        """dL/d of every tensor of the pair, in their shapes and types; ``scale`` (B,) multiplies all."""
        found = self._flat_gradients()
        if self._wide is not None and self._wide._summed:
            found = [g + h for g, h in zip(found, self._wide._flat_gradients(), strict=True)]
        out = []
        for g, like in zip(found, self.pair.tensors(), strict=True):
            g = g if scale is None else g * scale.view(-1, *[1] * (g.dim() - 1))
            out.append(g.reshape(*self.batch, *g.shape[1:]).sum_to_size(like.shape).to(like.dtype))
        return out

    def _flat_gradients(self) -> list[Tensor]:
        f, d = self.flat, self.flat.q.shape[-1]
        da, db, dx, dy = self._da, self._db, self._dx, self._dy
        dq = 2 * (f.q * da[..., d : d + 1] - da[..., :d]) + 2 * self.root * dx[..., :d]
        dk = 2 * f.k * db[..., d + 1 :] + db[..., :d] + 2 * self.root * dy[..., :d]
        metrics: list[Tensor] = []
        if self.query is not None and f.scale_q is not None:
            taken, *metric = self._end_gradients(self.query, self._dquery, f.scale_q, f.q)
            dq = dq - taken
            metrics += metric
        if self.key is not None and f.scale_k is not None:
            taken, *metric = self._end_gradients(self.key, self._dkey, f.scale_k, f.k)
            dk = dk - taken
            metrics += metric
        found = [dq, dk, *metrics]
        return found if self._direct is None else [g + h for g, h in zip(found, self._direct, strict=True)]

    def _end_gradients(self, side: Side, sums: Side, scale: Tensor, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the last feature of an end's columns takes from its points, and dL/d of its scale and factor."""
        d = points.shape[-1]
        columns = 2 * sums.columns
        last = columns[..., d:]
        taken = torch.einsum("rbnd,rbn->bnd", side.columns[..., :d], last.squeeze(-1))
        factor = columns[..., :d].sub_(points * last).permute(1, 2, 3, 0)
        return taken, 2 * self.pair.share * scale * sums.scales, factor


def _zeros(side: Side) -> Side:
    return Side(*(prefer_large(torch.empty_like(t)).zero_() for t in side))


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

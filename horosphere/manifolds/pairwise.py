"""Distance matrices and nearest neighbours on any manifold."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from horosphere import _numerics
from horosphere._points import as_points
from horosphere.kernels import dispatch, operators
from horosphere.kernels.geometry import ChordPairs
from horosphere.kernels.tiled.tiles import mirror_
from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import Chord, chords, resolve
from horosphere.manifolds.curvature import check_kappa_shape
from horosphere.manifolds.pairs import pair_dist2

PRECISIONS = ("auto", "exact", "fast")
# Numbers in one block of rows: 2^20 float64 are 8 MiB, several of which are alive at a time.
BLOCK_NUMBERS = 2**20
# Pairs worked from differences at a time: 2^16 pairs in 10 dimensions take about 50 MiB on the way.
BLOCK_PAIRS = 2**16
# Rows that are tried first, to see whether products in float32 settle the neighbours of a set.
PROBE = 16
# Features or weights beyond which that is done: cosh(5), of points about 5 from the origin.
DEEP = 64
# Candidates for the k nearest beyond k (and an eighth of it): so that rounding rarely leaves a row undecided.
SPARE = 4


class Neighbors(NamedTuple):
    """Nearest neighbours: ``distances`` (..., N, k), ascending, and ``indices`` (..., N, k) into the second set."""

    distances: Tensor
    indices: Tensor


def cdist(
    x: Tensor,
    y: Tensor,
    manifold: geoopt.Manifold,
    *,
    squared: bool = False,
    precision: str = "auto",
    impl: str = "auto",
) -> Tensor:
    r"""Geodesic distances of all pairs, :math:`D_{ij} = d(x_i, y_j)`.

    Args:
        x: points (..., N, D).
        y: points (..., M, D); batch dimensions broadcast.
        manifold: any geoopt.Manifold. With a chord (all of ours; geoopt's Euclidean, Sphere, PoincareBall,
            Stereographic, Lorentz, ProductManifold and Scaled) one matrix product serves all pairs; ``dist`` alone is
            called on blocks of rows.
        squared: return squared distances.
        precision: "auto" computes pairs that the product form does not resolve (near coincidence, near antipodes) from
            differences, and keeps the relative error within 1e-5 (float32 points) or 1e-12 (float64); "exact" works
            every pair so, in float64; "fast" is the product form alone: absolute error of the squared chord u up
            to ``4 2^-24 (sqrt(F) w_i w_j (|f_i|^2 + |f_j|^2) + u)``, F features, 2^-53 for float64.
            Inside torch.compile "auto" is "fast".
        impl: "auto" chooses by device, type and shape; "reference" is the plain formula, "numba" are loops compiled for
            large float32 matrices on a CPU, "tiled" works in
            cache-sized tiles on any device, "triton" is a GPU kernel. One asked for by name is used or refused.

    Returns:
        (..., N, M) in the points' type; half precision is worked in float32, and autocast changes nothing. Identical
        points are at distance 0 (not in "fast"), and ``cdist(x, x)`` is exactly symmetric. Gradients flow to x, y and
        a learnable curvature, twice if wanted; the backward pass recomputes the matrix in tiles or blocks, so memory
        stays that of the matrix.

    Raises:
        ValueError: shapes that do not fit, an unknown precision or impl, or an impl that cannot serve the call.
        TypeError: no floating point tensors, or no manifold.

    Source: the chord form is derived in docs/chord.md.
    """
    same = x is y
    x, y = _checked(x, y, precision)
    dispatch.check_name(impl)
    with _numerics.without_autocast(x.device):
        return _matrix(x, x if same else y, manifold, squared, precision, impl).to(x.dtype)


def knn(
    x: Tensor,
    y: Tensor,
    manifold: geoopt.Manifold,
    k: int,
    *,
    precision: str = "auto",
    impl: str = "auto",
) -> Neighbors:
    """The k points of y nearest to each point of x, without ever holding the whole distance matrix.

    Args:
        x: points (..., N, D).
        y: points (..., M, D).
        manifold: as in :func:`cdist`.
        k: how many, 1 <= k <= M. Ties go to the smaller index.
        precision: "auto" and "exact" give the neighbours by exact distance: "auto" gets candidates from the product
        form and goes through a whole row only where its error bound cannot exclude the others; "fast" takes the
        candidates as they are. The distances returned are exact. impl: as in :func:`cdist`.

    Returns:
        Neighbors(distances, indices), both (..., N, k). Distances are differentiable.

    Raises:
        ValueError: k is out of range, or shapes do not fit, or an impl that cannot serve the call.
    """
    same = x is y
    x, y = _checked(x, y, precision)
    y = x if same else y
    dispatch.check_name(impl)
    if not 1 <= k <= y.shape[-2]:
        raise ValueError(f"k must lie between 1 and the number of points in y, {y.shape[-2]}; got {k}")
    with _numerics.without_autocast(x.device):
        with torch.no_grad():
            indices = _nearest(x, y, manifold, k, precision, impl)
        d2 = _distances_to(x, y, indices, manifold)
        order = torch.argsort(d2.detach(), dim=-1, stable=True)
        distances = _numerics.safe_sqrt(torch.gather(d2, -1, order)).to(x.dtype)
        return Neighbors(distances, torch.gather(indices, -1, order))


def _nearest(x: Tensor, y: Tensor, manifold: geoopt.Manifold, k: int, precision: str, impl: str) -> Tensor:
    """Indices (..., N, k) of the nearest, in ascending order of index where distances are equal."""
    n, m = x.shape[-2], y.shape[-2]
    parts_x = chords(manifold, x) if precision != "exact" else None
    if parts_x is None or dispatch.tracing() == "torch.func":
        _choose_pairs("nearest", x, y, precision, impl)
        rows = max(1, BLOCK_NUMBERS // max(1, m * x.shape[:-2].numel() * x.shape[-1]))
        blocks = (x[..., i : i + rows, :] for i in range(0, max(n, 1), rows))
        return torch.cat([_smallest(_every_pair(b, y, manifold), k) for b in blocks], -2)
    candidates = k if precision == "fast" or _without_data(x) else min(m, k + SPARE + k // 8)
    if candidates == k:
        return _candidates(x, y, parts_x, manifold, k, impl)[1]
    # float64 products decide rows of a deep float32 set, most of which float32 leaves open
    wider = x.dtype == torch.float32 and x.dim() == 2 and not has_batched_curvature(resolve(manifold)[0])
    if wider and n > 4 * PROBE and candidates < m and _deep(parts_x):
        some = x[:: n // PROBE]
        _, certain = _settled(some, y, chords(manifold, some), manifold, k, candidates, impl)
        if not bool(certain.any()):
            return _nearest(x.double(), y.double(), manifold, k, precision, "auto")
    found, certain = _settled(x, y, parts_x, manifold, k, candidates, impl)
    at = (~certain).nonzero(as_tuple=True)
    if at[0].numel():
        found[at] = (
            _nearest(x[at].double(), y.double(), manifold, k, precision, "auto")
            if wider
            else _nearest_of_rows(at, x, y, manifold, k)
        )
    return found


def _deep(parts: Sequence[Chord]) -> bool:
    """Whether points lie so far out that float32 products may leave all neighbours open."""
    return any(float(t.abs().amax()) > DEEP for part in parts for t in (part.features, part.weight) if t is not None)


def _candidates(
    x: Tensor, y: Tensor, parts_x: Sequence[Chord] | None, manifold: geoopt.Manifold, count: int, impl: str
) -> tuple[Tensor, Tensor]:
    """Bounds and indices of the points of smallest bound, see :func:`horosphere.kernels.operators.nearest`."""
    parts_y = parts_x if y is x else chords(manifold, y)
    assert parts_x is not None and parts_y is not None  # what a manifold offers does not depend on the points
    return operators.nearest(ChordPairs(parts_x, parts_y), count, impl=impl)


def _settled(
    x: Tensor,
    y: Tensor,
    parts_x: Sequence[Chord] | None,
    manifold: geoopt.Manifold,
    k: int,
    count: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """The k nearest (..., N, k) of ``count`` candidates, and (..., N) in which rows no other point may be as near."""
    bounds, indices = _candidates(x, y, parts_x, manifold, count, impl)
    indices = indices.sort(dim=-1).values
    d2 = _distances_to(x, y, indices, manifold)
    order = torch.argsort(d2, dim=-1, stable=True)[..., :k]
    last = torch.gather(d2, -1, order[..., -1:]).squeeze(-1)
    certain = last < bounds[..., -1].to(last.dtype) * (1 - 64 * _numerics.unit_roundoff(bounds.dtype))
    return torch.gather(indices, -1, order), certain | (count == y.shape[-2])


def _nearest_of_rows(at: tuple[Tensor, ...], x: Tensor, y: Tensor, manifold: geoopt.Manifold, k: int) -> Tensor:
    """Indices (R, k) for the rows at ``at`` of the batch and row dimensions, from all exact distances."""
    m = y.shape[-2]
    rows = torch.arange(x.shape[:-1].numel(), device=x.device).view(x.shape[:-1])[at]
    columns = torch.arange(m, device=x.device)
    found = []
    for some in rows.split(max(1, BLOCK_PAIRS // m)):
        flat = (some.unsqueeze(-1) * m + columns).flatten()
        found.append(_smallest(_pairs_at(flat, x, y, manifold).view(-1, m), k))
    return torch.cat(found)


def _distances_to(x: Tensor, y: Tensor, indices: Tensor, manifold: geoopt.Manifold) -> Tensor:
    """Exact squared distances (..., N, K) of every x to the y at indices (..., N, K)."""
    if _numerics.transformed() or torch.compiler.is_compiling():
        return pairs_of_rows(x, _rows_of(y, indices), manifold)
    rows = torch.arange(x.shape[:-1].numel(), device=x.device).view(*x.shape[:-1], 1)
    return _picked_pairs((rows * y.shape[-2] + indices).flatten(), x, y, manifold).view(indices.shape)


class _Mirror(torch.autograd.Function):
    """The upper triangle copied onto the lower one, in place; the gradient of each pair goes to the upper one."""

    @staticmethod
    def forward(ctx, matrix: Tensor) -> Tensor:
        ctx.mark_dirty(matrix)
        return mirror_(matrix)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.triu() + grad.tril(-1).mT


def _symmetric(matrix: Tensor) -> Tensor:
    """The exact distances of one set with itself, the two roundings of each pair made one."""
    if _numerics.transformed() or torch.compiler.is_compiling():
        return (matrix + matrix.mT) / 2  # of two equal numbers to a rounding
    return _Mirror.apply(matrix)


def _checked(x, y, precision: str) -> tuple[Tensor, Tensor]:
    x, y = as_points(x, "x"), as_points(y, "y")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    for name, t in (("x", x), ("y", y)):
        if t.dim() < 2:
            raise ValueError(f"{name} must hold points as rows, shape (..., N, D); got shape {tuple(t.shape)}")
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"x and y must have points of one size, got shapes {tuple(x.shape)} and {tuple(y.shape)}")
    if not x.shape[-1]:
        raise ValueError(f"x and y must hold points of at least one number, got shape {tuple(x.shape)}")
    if x.device != y.device:
        raise ValueError(f"x is on {x.device} and y on {y.device}; move them to one device")
    try:
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except RuntimeError as error:
        raise ValueError(f"batch dimensions of x {tuple(x.shape)} and y {tuple(y.shape)} do not broadcast") from error
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype).expand(*batch, *x.shape[-2:]), y.to(dtype).expand(*batch, *y.shape[-2:])


def _matrix(x: Tensor, y: Tensor, manifold: geoopt.Manifold, squared: bool, precision: str, impl: str) -> Tensor:
    parts_x = chords(manifold, x) if precision != "exact" else None
    # which pairs are near depends on the data, and vmap forbids to ask
    if parts_x is None or (dispatch.tracing() == "torch.func" and precision == "auto"):
        _choose_pairs("sqdist", x, y, precision, impl)
        out = _exact_matrix(x, y, manifold, squared)
        return _symmetric(out) if y is x else out
    parts_y = parts_x if y is x else chords(manifold, y)
    assert parts_y is not None  # as x: what a manifold offers does not depend on the points
    resolved = precision == "auto" and not torch.compiler.is_compiling() and not _without_data(x)
    pairs = ChordPairs(parts_x, parts_y, same=y is x)
    out, picked = operators.sqdist(pairs, squared=squared, resolve=resolved, impl=impl)
    if not resolved or picked is None or not picked.numel():
        return out
    m = y.shape[-2]
    if y is x:  # of two pairs that mirror each other one is worked
        picked = picked[picked // m % m <= picked % m]
    if not _needs_grad(x, y, manifold):  # identical points are 0 apart, but d^2 has second derivatives there
        same = _identical(picked, x, y) & _proper(parts_x).flatten()[picked // m]
        _put(out, picked[same], out.new_zeros(()), y is x)
        picked = picked[~same]
    exact = _picked_pairs(picked, x, y, manifold)
    if not squared:
        exact = _numerics.safe_sqrt(exact)
    _put(out, picked, exact.to(out.dtype), y is x)
    return out


def _put(matrix: Tensor, picked: Tensor, values: Tensor, mirrored: bool) -> None:
    """Values into the matrix at flat indices (P,), and at their mirror images."""
    flat, m = matrix.view(-1), matrix.shape[-1]
    flat.index_put_((picked,), values)
    if mirrored:
        row, column = picked // m, picked % m
        flat.index_put_(((row // m * m + column) * m + row % m,), values)


def _identical(picked: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(P,) whether the pairs at flat indices of the matrix are two copies of one point."""
    n, m, d = x.shape[-2], y.shape[-2], x.shape[-1]
    row = picked // m
    other = row // n * m + picked % m
    return (x.reshape(-1, d).index_select(0, row) == y.reshape(-1, d).index_select(0, other)).all(-1)


def _proper(parts) -> Tensor:
    """(..., N) whether the chord knows the point: outside of a ball and at infinity there are no distances."""
    found = []
    for part in parts:
        here = part.features.isfinite().all(-1)
        if part.weight is not None:
            here = here & (part.weight > 0) & part.weight.isfinite()
        found.append(here)
    return functools.reduce(torch.logical_and, found)


def _without_data(x: Tensor) -> bool:
    """Meta and fake tensors have no near pairs to find."""
    return x.device.type == "meta" or isinstance(x, FakeTensor)


def _picked_pairs(picked: Tensor, x: Tensor, y: Tensor, manifold: geoopt.Manifold) -> Tensor:
    """Exact squared distances of the pairs at flat indices (P,) of the matrix, in chunks."""
    if picked.numel() <= BLOCK_PAIRS:
        return _pairs_at(picked, x, y, manifold)
    chunks = picked.split(BLOCK_PAIRS)
    if _needs_grad(x, y, manifold):
        return torch.cat([checkpoint(_pairs_at, c, x, y, manifold, use_reentrant=False) for c in chunks])
    return torch.cat([_pairs_at(c, x, y, manifold) for c in chunks])


def _pairs_at(picked: Tensor, x: Tensor, y: Tensor, manifold: geoopt.Manifold) -> Tensor:
    n, m, d = x.shape[-2], y.shape[-2], x.shape[-1]
    row, j = picked // m, picked % m
    batch = row // n
    one = resolve(manifold)[0]
    if has_batched_curvature(one):
        one = one.take_batch(x.shape[:-2], batch)
    a, b = x.reshape(-1, d)[row], y.reshape(-1, d)[batch * m + j]
    return pair_dist2(one, a.unsqueeze(-2), b.unsqueeze(-2)).squeeze(-1)


def _choose_pairs(operation: str, x: Tensor, y: Tensor, precision: str, impl: str) -> None:
    """ValueError where a form was asked for that takes no pairs one by one."""
    tracing = dispatch.tracing()
    why = "precision='exact'" if precision == "exact" else "a manifold with dist alone"
    if precision != "exact" and tracing == "torch.func":
        why = "a torch.func transform"
    entries = x.shape[:-1].numel() * y.shape[-2]
    dispatch.choose(dispatch.Call(operation, x.device, x.dtype, entries, tracing=tracing, pairwise=why), impl)


def _exact_matrix(x: Tensor, y: Tensor, manifold: geoopt.Manifold, squared: bool) -> Tensor:
    """Exact distances (..., N, M), or squares, in blocks of rows, which the backward pass recomputes."""

    def finished(block: Tensor) -> Tensor:
        d2 = _every_pair(block, y, manifold)
        # the root before the rounding: the square of a float32 distance may be no float32 number
        return (d2 if squared else _numerics.safe_sqrt(d2)).to(x.dtype)

    n, m = x.shape[-2], y.shape[-2]
    rows = max(1, BLOCK_NUMBERS // max(1, m * x.shape[:-2].numel() * x.shape[-1]))
    if torch.compiler.is_compiling() or n <= rows:
        return finished(x)
    blocks = [x[..., i : i + rows, :] for i in range(0, n, rows)]
    if not _needs_grad(x, y, manifold):
        out = x.new_empty(*x.shape[:-1], m)
        for i, block in zip(range(0, n, rows), blocks, strict=True):
            out[..., i : i + rows, :] = finished(block)
        return out
    if _numerics.transformed():  # they do not go through checkpoint's hooks
        return torch.cat([finished(b) for b in blocks], -2)
    return torch.cat([checkpoint(finished, b, use_reentrant=False) for b in blocks], -2)


def _needs_grad(x: Tensor, y: Tensor, manifold: geoopt.Manifold) -> bool:
    if not torch.is_grad_enabled():
        return False
    tensors = (x, y, *manifold.parameters(), *manifold.buffers())
    return any(t.requires_grad for t in tensors) or _numerics.transformed()


def _every_pair(x: Tensor, y: Tensor, manifold: geoopt.Manifold) -> Tensor:
    """Exact squared distances (..., N, M)."""
    one = resolve(manifold)[0]
    if not has_batched_curvature(one):
        return pair_dist2(manifold, x.unsqueeze(-2), y.unsqueeze(-3))
    for kappa in (*one.parameters(), *one.buffers()):  # before the reshape: the message shows the shape that was given
        if kappa.dim():
            check_kappa_shape(kappa, x)
    return pairs_of_rows(x, y.unsqueeze(-3).expand(*x.shape[:-1], *y.shape[-2:]), manifold)


def pairs_of_rows(x: Tensor, chosen: Tensor, manifold: geoopt.Manifold) -> Tensor:
    """Exact squared distances (..., N, K) of x (..., N, D) to its own row of points (..., N, K, D)."""
    if not has_batched_curvature(resolve(manifold)[0]):
        return pair_dist2(manifold, x.unsqueeze(-2), chosen)
    n, k, d = chosen.shape[-3:]
    repeated = x.unsqueeze(-2).expand(chosen.shape).reshape(*x.shape[:-2], n * k, d)
    flat = pair_dist2(manifold, repeated, chosen.reshape(*x.shape[:-2], n * k, d))
    return flat.reshape(*x.shape[:-2], n, k)


def _rows_of(y: Tensor, indices: Tensor) -> Tensor:
    """y (..., M, D) at indices (..., N, k) -> (..., N, k, D)."""
    flat = indices.flatten(-2).unsqueeze(-1).expand(*indices.shape[:-2], -1, y.shape[-1])
    return torch.gather(y, -2, flat).unflatten(-2, indices.shape[-2:])


def has_batched_curvature(manifold: geoopt.Manifold) -> bool:
    if hooks.own(manifold, "take_batch") is None:
        return False
    return any(t.dim() for t in (*manifold.parameters(), *manifold.buffers()))


def _smallest(d2: Tensor, k: int) -> Tensor:
    """Indices (..., N, k) of the k smallest, equal values by index."""
    values, indices = torch.topk(d2, k, dim=-1, largest=False, sorted=True)
    indices = indices.sort(dim=-1).values
    order = torch.gather(d2, -1, indices).argsort(dim=-1, stable=True)
    indices = torch.gather(indices, -1, order)
    # topk picks any of the values equal to the k-th: rows where that choice exists are sorted in full
    crowded = (d2 <= values[..., -1:]).sum(-1) > k
    if bool(crowded.any()):
        indices[crowded] = d2[crowded].argsort(dim=-1, stable=True)[..., :k]
    return indices

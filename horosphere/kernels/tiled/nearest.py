"""Nearest neighbours without the matrix: blocks of rows, and columns in groups of which few are looked at.

The k smallest numbers of a row lie in the k groups with the smallest minima, so one reduction of the block replaces a
sort of it. A single part is ranked by its chord, of which the distance is a monotone function: no transcendental
function on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.kernels.chord import arcs
from horosphere.kernels.chord.augment import Augmented, augment, tile_product, without_far
from horosphere.kernels.chord.pair import ChordPair, batch_of, dtype_of
from horosphere.kernels.tiled.sqdist import may_overflow, runs

# Columns of a group: the minima of 64 are a hundredth of the work that follows.
GROUP = 64
# Entries of a block of rows on a CPU, 4 MiB in float32; on other devices.
CPU_BLOCK = 2**20
OTHER_BLOCK = 2**26
LEAST_ROWS = 8


def nearest(parts: Sequence[ChordPair], k: int) -> tuple[Tensor, Tensor]:
    """As horosphere.kernels.reference.sqdist.nearest; which of equal bounds at the k-th place are returned is open."""
    batch, dtype, device = batch_of(parts), dtype_of(parts), parts[0].x.device
    n, m = parts[0].x.shape[-2], parts[0].y.shape[-2]
    values = torch.empty(*batch, n, k, dtype=dtype, device=device)
    indices = torch.empty(*batch, n, k, dtype=torch.int64, device=device)
    if not values.numel():
        return values, indices
    made = [with_bound_taken_off(augment(p, batch, dtype)) for p in parts]
    proper = all(_bounded(a) for a in made)
    wide = [may_overflow(a) for a in made]
    padded = m + -m % GROUP
    block = CPU_BLOCK if device.type == "cpu" else OTHER_BLOCK
    rows = min(n, max(LEAST_ROWS, block // padded))
    buffers = torch.empty(1 if len(made) == 1 else 4, rows * padded, dtype=dtype, device=device)
    flat_values, flat_indices = values.view(-1, n, k), indices.view(-1, n, k)
    for entry in range(flat_values.shape[0]):
        for start in range(0, n, rows):
            i = slice(start, min(start + rows, n))
            keys = buffers[0, : (i.stop - start) * padded].view(-1, padded)
            _fill(made, wide, entry, i, keys[:, :m], buffers)
            keys[:, m:] = torch.inf
            if not proper:
                largest = torch.finfo(dtype).max  # before the columns that are there to fill the last group
                keys[:, :m].nan_to_num_(nan=largest, posinf=largest)
            _smallest(keys, k, flat_values[entry, i], flat_indices[entry, i])
    if len(made) == 1:
        keys_to_d2(made[0], flat_values, wide[0])
    return values, indices


def _bounded(a: Augmented) -> bool:
    """Whether all products are finite numbers."""
    return float(a.a.abs().amax()) * float(a.b.abs().amax()) * a.a.shape[-1] < torch.finfo(a.a.dtype).max


def with_bound_taken_off(a: Augmented) -> Augmented:
    """a such that <a_i, b_j> is t less its error bound, which is 2 tol times the bound that makes a pair unresolved.

    Of points that are too far for the type it is 0.
    """
    tolerance = 2 * _numerics.promised_tolerance(a.a.dtype)
    less = a.a.clone()
    less[..., -2] -= tolerance * a.p
    less[..., -1] -= tolerance * a.q
    return without_far(a._replace(a=less))


def _fill(made: Sequence[Augmented], wide: Sequence[bool], entry: int, i: slice, keys: Tensor, buffers: Tensor) -> None:
    """The rows' lower bounds: of t for a single part, of d^2 for several."""
    if len(made) == 1:
        torch.mm(made[0].a[entry, i], made[0].b[entry].mT, out=keys)
        return
    total = buffers[3, : keys.numel()].view(keys.shape)
    for k, (a, w) in enumerate(zip(made, wide, strict=True)):
        t = tile_product(a.a[entry : entry + 1, i], a.b[entry : entry + 1], buffers[1])[0]
        sign = a.signs[entry]
        scratch = buffers[2, : t.numel()].view(t.shape)
        d = arcs.arc_(arcs.clamp_(t, sign), sign, scratch, w).mul_(a.factor[entry, 0])
        if k:
            total.addcmul_(d, d)
        else:
            torch.mul(d, d, out=total)
    keys.copy_(total)


def _smallest(keys: Tensor, k: int, values: Tensor, indices: Tensor) -> None:
    """The k smallest of every row of keys (R, a multiple of GROUP), ascending."""
    groups = keys.view(keys.shape[0], -1, GROUP)
    chosen = groups_of_smallest(groups.amin(-1), min(k, groups.shape[1]))
    first = torch.arange(keys.shape[0], device=keys.device).unsqueeze(-1) * groups.shape[1]
    inside = groups.reshape(-1, GROUP).index_select(0, (chosen + first).flatten()).view(keys.shape[0], -1)
    found, at = smallest_of_groups(inside, chosen, k)
    values.copy_(found)
    indices.copy_(at)


def groups_of_smallest(minima: Tensor, few: int) -> Tensor:
    """Which groups (..., few) of a row hold its smallest numbers, by the smallest of every group (..., G)."""
    return minima.topk(few, dim=-1, largest=False, sorted=False).indices


def smallest_of_groups(inside: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest numbers of the chosen groups (..., few), ascending, and their columns; inside (..., few GROUP)."""
    values, at = inside.topk(k, dim=-1, largest=False, sorted=True)
    return values, torch.add(at % GROUP, chosen.gather(-1, at // GROUP), alpha=GROUP)


def keys_to_d2(a: Augmented, values: Tensor, wide: bool) -> None:
    """Lower bounds of t (B, N, k) replaced by those of d^2."""
    for e in runs([a]):
        sign = a.signs[e.start]
        t = arcs.clamp_(values[e], sign)
        arcs.arc_(t, sign, torch.empty_like(t), wide)
        t.mul_(a.factor[e]).mul_(t.clone())

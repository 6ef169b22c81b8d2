"""Nearest neighbours without the matrix: lower bounds of the smallest of every group of columns, then the members of
the groups that were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from horosphere.kernels.chord.augment import augment
from horosphere.kernels.chord.pair import ChordPair, batch_of, dtype_of
from horosphere.kernels.tiled import nearest as tiled
from horosphere.kernels.tiled.sqdist import all_alike, may_overflow
from horosphere.kernels.tiled.tiles import tiles
from horosphere.kernels.triton.arcs import square
from horosphere.kernels.triton.sqdist import chord_options
from horosphere.kernels.triton.tiles import inner, program, terms_of

# Numbers that the rows worked at a time may take beside the result.
BLOCK = tiled.OTHER_BLOCK
# Chosen groups that a program goes through: with more of them, whose addresses differ, registers spill.
SLOTS = 16


class Ranked(NamedTuple):
    """Augmented features of all parts, one below the other, and the rows that are worked."""

    own: Tensor  # (B, K, N)
    other: Tensor  # (B, K, M)
    unit: Tensor  # (B, P), 1/|kappa|
    length: int  # N
    others: int  # M
    first: int
    last: int


class RankedShape(NamedTuple):
    """What is compiled into a kernel."""

    features: tuple[int, ...]  # augmented, of every part
    signs: tuple[int, ...]  # of the parts' curvatures
    all: int  # K
    largest: float  # number of the type
    terms: int  # of series


@triton.jit
def bounds(space, entry, rows, columns, SHAPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """What pairs of rows [R] and columns [R or 1, C] of a batch entry are ranked by [R, C]: t of one part, d^2 of
    several; columns beyond the last come after points without distance.
    """
    n, m = space.length, space.others
    a = space.own + entry * SHAPE.all * n
    b = space.other + entry * SHAPE.all * m
    if len(SHAPE.signs) == 1:
        keys = inner(a, b, rows, columns, n, m, SHAPE.features[0], R, C)
    else:
        keys = tl.zeros((R, C), a.dtype.element_ty)
        for p in tl.static_range(len(SHAPE.signs)):
            unit = tl.load(space.unit + entry * len(SHAPE.signs) + p)
            t = inner(a, b, rows, columns, n, m, SHAPE.features[p], R, C)
            _, d2 = square(t, unit, SHAPE.signs[p], SHAPE.terms)
            keys += d2
            a += SHAPE.features[p] * n
            b += SHAPE.features[p] * m
    keys = tl.where(keys < SHAPE.largest, keys, SHAPE.largest)  # NaN too
    return tl.where(columns < m, keys, float("inf"))


@triton.jit
def minima(
    space,
    out,  # (B, last - first, groups)
    SHAPE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """The smallest of every group of C columns."""
    groups, height = tl.cdiv(space.others, C), space.last - space.first
    entry, row, group = program(height, groups, R)
    i = row + tl.arange(0, R)
    columns = (group * C + tl.arange(0, C))[None, :]
    keys = bounds(space, entry, space.first + i, columns, SHAPE, R, C)
    tl.store(out + (entry * height + i) * groups + group, tl.min(keys, 1), mask=i < height)


@triton.jit
def members(
    space,
    place,  # (B, last - first, few), the groups chosen
    out,  # (B, last - first, few, C)
    few,
    SHAPE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """All of every chosen group."""
    count = tl.cast(space.last - space.first, tl.int64) * few
    entry, slot, _ = program(count, 1, R)
    slots = slot + tl.arange(0, R)
    at = entry * count + slots
    group = tl.load(place + at, mask=slots < count, other=0).to(tl.int32)  # a column fits into 32 bits
    columns = group[:, None] * C + tl.arange(0, C)[None, :]
    keys = bounds(space, entry, space.first + slots // few, columns, SHAPE, R, C)
    tl.store(out + at[:, None] * C + tl.arange(0, C)[None, :], keys, mask=(slots < count)[:, None])


def minima_options(dtype: torch.dtype) -> dict[str, int | bool]:
    """Tiles as wide as a group, of as many pairs as those of distance matrices."""
    options = chord_options(dtype)
    return options | {"R": options["R"] * options["C"] // tiled.GROUP, "C": tiled.GROUP}


def members_options(dtype: torch.dtype) -> dict[str, int | bool]:
    """A chosen group is a row."""
    return chord_options(dtype) | {"R": SLOTS, "C": tiled.GROUP}


def nearest(parts: Sequence[ChordPair], k: int) -> tuple[Tensor, Tensor]:
    """As horosphere.kernels.tiled.nearest.nearest: the smallest of every group of columns, then the chosen groups."""
    batch, dtype, device = batch_of(parts), dtype_of(parts), parts[0].x.device
    n, m = parts[0].x.shape[-2], parts[0].y.shape[-2]
    values = torch.empty(*batch, n, k, dtype=dtype, device=device)
    indices = torch.empty(*batch, n, k, dtype=torch.int64, device=device)
    if not values.numel():
        return values, indices
    flat_values, flat_indices = values.view(-1, n, k), indices.view(-1, n, k)
    made = [tiled.with_bound_taken_off(augment(p, batch, dtype)) for p in parts]
    left, right = (torch.cat(sides, -1).mT.contiguous() for sides in zip(*((a.a, a.b) for a in made), strict=True))
    unit = torch.cat([a.factor.view(-1, 1) ** 2 for a in made], 1)
    features = tuple(a.a.shape[-1] for a in made)
    tile, gathered = minima_options(dtype), members_options(dtype)
    groups = triton.cdiv(m, tiled.GROUP)
    few = min(k, groups)
    numbers = groups + few * (tiled.GROUP + 2)  # of a row
    for e, i, _ in tiles(len(left), n, numbers, BLOCK, numbers, len(made) == 1 or all_alike(made)):
        entries, height = e.stop - e.start, i.stop - i.start
        space = Ranked(left[e], right[e], unit[e], n, m, i.start, i.stop)
        # one part is ranked by its chord, whatever its curvature
        signs = tuple(a.signs[e.start] for a in made) if len(made) > 1 else (0,)
        shape = RankedShape(features, signs, sum(features), torch.finfo(dtype).max, terms_of(dtype))
        smallest = torch.empty(entries, height, groups, dtype=dtype, device=device)
        minima[(entries * triton.cdiv(height, tile["R"]) * groups,)](space, smallest, shape, **tile)
        chosen = tiled.groups_of_smallest(smallest, few)
        inside = torch.empty(entries, height, few * tiled.GROUP, dtype=dtype, device=device)
        grid = (entries * triton.cdiv(height * few, gathered["R"]),)
        members[grid](space, chosen, inside, few, shape, **gathered)
        flat_values[e, i], flat_indices[e, i] = tiled.smallest_of_groups(inside, chosen, k)
    if len(made) == 1:
        tiled.keys_to_d2(made[0], flat_values, may_overflow(made[0]))
    return values, indices

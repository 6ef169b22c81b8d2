"""Launcher of the Triton kernels of nearest neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from horosphere.kernels.chord.augment import augment
from horosphere.kernels.chord.parts import Part, batch_of, dtype_of
from horosphere.kernels.tiled import nearest as tiled
from horosphere.kernels.tiled.sqdist import all_alike, may_overflow
from horosphere.kernels.tiled.tiles import tiles
from horosphere.kernels.triton import nearest_kernels as kernels
from horosphere.kernels.triton.sqdist import options_for as options_of_distances

# Numbers that the rows worked at a time may take beside the result.
BLOCK = tiled.OTHER_BLOCK
# Chosen groups that a program goes through: with more of them, whose addresses differ, registers spill.
SLOTS = 16


def options_for(kernel: triton.JITFunction, dtype: torch.dtype) -> dict:
    """Those of distance matrices, with tiles as wide as a group."""
    options = options_of_distances(dtype)
    rows = SLOTS if kernel is kernels.members else options["R"] * options["C"] // tiled.GROUP
    return options | {"R": rows, "C": tiled.GROUP, "LARGEST": torch.finfo(dtype).max}


def nearest(parts: Sequence[Part], k: int) -> tuple[Tensor, Tensor]:
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
    constants = {"PARTS": len(made), "ALL": left.shape[1], "FEATURES": tuple(a.a.shape[-1] for a in made)}
    by_kernel = [options_for(kernel, dtype) for kernel in (kernels.minima, kernels.members)]
    groups = triton.cdiv(m, tiled.GROUP)
    few = min(k, groups)
    numbers = groups + few * (tiled.GROUP + 2)  # of a row
    for e, i, _ in tiles(len(left), n, numbers, BLOCK, numbers, len(made) == 1 or all_alike(made)):
        entries, height = e.stop - e.start, i.stop - i.start
        points = left[e], right[e], unit[e]
        sizes = n, m, i.start, i.stop
        # one part is ranked by its chord, whatever its curvature
        constants["SIGNS"] = tuple(a.signs[e.start] for a in made) if len(made) > 1 else (0,)
        tile, gathered = (constants | options for options in by_kernel)
        smallest = torch.empty(entries, height, groups, dtype=dtype, device=device)
        grid = (entries * triton.cdiv(height, tile["R"]) * groups,)
        kernels.minima[grid](*points, smallest, *sizes, **tile)
        chosen = tiled.groups_of_smallest(smallest, few)
        inside = torch.empty(entries, height, few * tiled.GROUP, dtype=dtype, device=device)
        grid = (entries * triton.cdiv(height * few, gathered["R"]),)
        kernels.members[grid](*points, chosen, inside, *sizes, few, **gathered)
        flat_values[e, i], flat_indices[e, i] = tiled.smallest_of_groups(inside, chosen, k)
    if len(made) == 1:
        tiled.keys_to_d2(made[0], flat_values, may_overflow(made[0]))
    return values, indices

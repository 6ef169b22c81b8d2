"""How a batch of matrices is cut into tiles that stay in cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Entries of a tile on a CPU: two float32 buffers of 1 MiB fit a second-level cache of 2 MiB.
CPU_TILE = 2**18
# On an accelerator launches are dear and caches are not tiled by hand.
OTHER_TILE = 2**24
# Columns of a group, whose smallest entry decides whether its pairs are looked at one by one.
GROUP = 128
# Rows mirrored at a time.
SIDE = 256
# Columns of a tile: fewer make it visit more pages of the result, more leave too few rows for the matrix product.
COLUMNS = 4096
# Of a tile whose mirror image is written too: that has as many rows as the tile has columns.
SQUARE = 1024


def tile_size(device: torch.device, parts: int = 1) -> int:
    return (CPU_TILE if device.type == "cpu" else OTHER_TILE) // parts


def group_width(columns: int) -> int:
    """Width of the equal groups into which columns are cut; the last may reach beyond by less than their number."""
    groups = max(1, -(-columns // GROUP))
    return max(1, -(-columns // groups))


def tiles(
    batch: int, rows: int, columns: int, size: int, width: int, alike: bool, upper: bool = False
) -> Iterator[tuple[slice, slice, slice]]:
    """(batch, row, column) slices of about ``size`` entries, columns in multiples of ``width``.

    Several batch entries share a tile where they are small and ``alike``. ``upper``: only what is on the diagonal and
    above, and the rest of the groups of columns that it cuts.
    """
    if not batch * rows * columns:
        return
    c = min(columns, width * max(1, min(size, SQUARE if upper else COLUMNS) // width))
    r = min(rows, max(1, size // c))
    each = max(1, size // (r * c)) if alike and r == rows and c == columns else 1
    for e in range(0, batch, each):
        for i in range(0, rows, r):
            for j in range(i // width * width if upper else 0, columns, c):
                yield slice(e, min(e + each, batch)), slice(i, min(i + r, rows)), slice(j, min(j + c, columns))


def mirror_(matrix: Tensor, rows: slice | None = None) -> Tensor:
    """The upper triangle of (..., N, N) copied onto the lower one; ``rows``: what they have above, and what these have
    below where :func:`tiles` has written there.
    """
    if rows is None:
        for first in range(0, matrix.shape[-1], SIDE):
            mirror_(matrix, slice(first, min(first + SIDE, matrix.shape[-1])))
        return matrix
    matrix[..., rows.stop :, rows] = matrix[..., rows, rows.stop :].mT
    before = slice(max(0, rows.start - GROUP), rows.start)
    matrix[..., rows, before] = matrix[..., before, rows].mT
    corner = matrix[..., rows, rows]
    corner.copy_(corner.triu() + corner.triu(1).mT)
    return matrix

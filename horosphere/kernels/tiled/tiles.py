"""How a batch of matrices is cut into tiles that stay in cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Entries of a tile on a CPU: two float32 buffers of 1 MiB fit a second-level cache of 2 MiB.
CPU_TILE = 2**18
# On an accelerator launches are dear and caches are not tiled by hand.
OTHER_TILE = 2**24
# Columns of a group, whose smallest entry decides whether its pairs are looked at one by one.
GROUP = 128
# Columns of a tile: fewer make it visit more pages of the result, more leave too few rows for the matrix product.
COLUMNS = 4096


def tile_size(device: torch.device, parts: int = 1) -> int:
    return (CPU_TILE if device.type == "cpu" else OTHER_TILE) // parts


def group_width(columns: int) -> int:
    """Width of the equal groups into which columns are cut; the last may reach beyond by less than their number."""
    groups = max(1, -(-columns // GROUP))
    return max(1, -(-columns // groups))


def tiles(
    batch: int, rows: int, columns: int, size: int, width: int, alike: bool
) -> Iterator[tuple[slice, slice, slice]]:
    """(batch, row, column) slices of about ``size`` entries, columns in multiples of ``width``.

    Several batch entries share a tile where they are small and ``alike``.
    """
    if not batch * rows * columns:
        return
    c = min(columns, width * max(1, min(size, COLUMNS) // width))
    r = min(rows, max(1, size // c))
    each = max(1, size // (r * c)) if alike and r == rows and c == columns else 1
    for e in range(0, batch, each):
        for i in range(0, rows, r):
            for j in range(0, columns, c):
                yield slice(e, min(e + each, batch)), slice(i, min(i + r, rows)), slice(j, min(j + c, columns))

"""How a batch of matrices is cut into tiles that stay in cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Entries of a tile on a CPU: three float32 buffers of 512 KiB fit a second-level cache of 2 MiB.
CPU_TILE = 2**17
# On an accelerator launches are dear and caches are not tiled by hand.
OTHER_TILE = 2**22
COLUMNS = 512


def tile_size(device: torch.device) -> int:
    return CPU_TILE if device.type == "cpu" else OTHER_TILE


def tiles(batch: int, rows: int, columns: int, size: int, alike: bool) -> Iterator[tuple[slice, slice, slice]]:
    """(batch, row, column) slices of at most ``size`` entries; several batch entries share a tile where they are alike."""
    if not batch * rows * columns:
        return
    c = min(columns, max(COLUMNS, size // max(rows, COLUMNS)))
    r = min(rows, max(1, size // c))
    each = max(1, size // (r * c)) if alike and r == rows and c == columns else 1
    for e in range(0, batch, each):
        for i in range(0, rows, r):
            for j in range(0, columns, c):
                yield slice(e, min(e + each, batch)), slice(i, min(i + r, rows)), slice(j, min(j + c, columns))

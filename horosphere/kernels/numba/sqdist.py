"""From the product of a tile to its distances in one pass over it, compiled by numba: large float32 matrices on CPUs.

torch takes ten passes, most of them in a function (log1p, atan) that costs more than the rest together. Here log and
asin are short polynomials that the compiler vectorises, and the look for unresolved pairs is a comparison on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from horosphere.kernels.chord.augment import Augmented, augment
from horosphere.kernels.chord.pair import ChordPair, batch_of
from horosphere.kernels.dispatch import left_to_tiles
from horosphere.kernels.tiled.sqdist import all_alike, may_overflow
from horosphere.kernels.tiled.sqdist import sqdist as tiled_sqdist
from horosphere.kernels.tiled.tiles import tile_size, tiles
from horosphere.kernels.tiled.workspace import prefer_large

OUT_OF_RANGE = "curvatures have several signs, or squares leave the range of float32"


def sqdist(parts: Sequence[ChordPair], squared: bool, resolve: bool, strict: bool, same: bool) -> tuple[Tensor, Tensor]:
    """As horosphere.kernels.tiled.sqdist.sqdist, for one part in float32 on a CPU.

    Curvatures of several signs, or squares that leave the range of float32, are worked in tiles, or a ValueError where
    ``strict``.
    """
    batch = batch_of(parts)
    (one,) = (augment(p, batch, torch.float32) for p in parts)
    if not all_alike([one]) or may_overflow(one):
        if strict:
            raise ValueError(f"impl='numba' cannot serve this call: {OUT_OF_RANGE}; use impl='auto'")
        left_to_tiles("sqdist", OUT_OF_RANGE)
        return tiled_sqdist(parts, squared, resolve, same)
    n, m = parts[0].x.shape[-2], parts[0].y.shape[-2]
    result = prefer_large(torch.empty(*batch, n, m, dtype=torch.float32, device=one.a.device))
    return result, _fill(one, result.view(batch.numel(), n, m), squared, resolve, same)


def _fill(a: Augmented, out: Tensor, squared: bool, resolve: bool, same: bool) -> Tensor:
    """Distances, or their squares, into out (B, N, M); flat indices (P,) of the unresolved pairs where ``resolve``.

    By the rule of the reference, pair by pair. No product of a and b may overflow, nor its square.
    """
    from horosphere.kernels.numba.sqdist_loops import mirror, tile

    entries, n, m = out.shape
    weights = torch.ones_like(a.n) if a.wy is None else a.wy
    arrays = [t.contiguous().numpy() for t in (a.a, a.b.mT, a.p, a.q, a.n, weights, a.factor.view(-1))]
    result, size = out.numpy(), tile_size(out.device)
    parts = list(tiles(entries, n, m, size, 1, alike=True, upper=same))

    def work(some: Sequence[tuple[slice, slice, slice]]) -> list[Tensor]:
        found, picked = torch.empty(size if resolve else 0, dtype=torch.int64, device="cpu"), []
        for cut in some:
            corner, end = tuple(s.start for s in cut), tuple(s.stop for s in cut)
            count = tile(*arrays, a.signs[0], corner, end, squared, resolve, result, found.numpy())
            picked.append(found[:count].clone())
            if same:
                mirror(corner, end, result)
        return picked

    threads = min(torch.get_num_threads(), len(parts))
    if threads == 1:
        return torch.cat(work(parts))
    # as many as torch has, but not torch's: after every product those keep their cores busy with waiting
    share = -(-len(parts) // threads)
    with ThreadPoolExecutor(threads) as pool:
        shares = list(pool.map(work, (parts[k : k + share] for k in range(0, len(parts), share))))
    return torch.cat([found for some in shares for found in some])

"""Room in a full pool: which slots are given away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from horosphere.attention.patterns import move_centroids
from horosphere.manifolds import hooks
from horosphere.manifolds.pairwise import knn

if TYPE_CHECKING:
    from horosphere.memory.genesis import DynamicMemory

__all__ = ["POLICIES", "make_room"]

POLICIES = ("lru", "least hit", "merge")


def make_room(pool: DynamicMemory, wanted: int) -> Tensor:
    """``wanted`` different slots (wanted,) for new prototypes; they count as in use from here on.

    Free slots come first, then those that the pool's policy gives away; for "merge" the two nearest become one, as
    often as needed.
    """
    size = len(pool)
    free = torch.arange(size, min(size + wanted, pool.capacity), device=pool.counts.device)
    pool.size += len(free)
    missing = wanted - len(free)
    if not missing:
        return free
    rule = _merged if pool.policy == "merge" else _stalest
    return torch.cat((free, rule(pool, missing, size)))


def _merged(pool: DynamicMemory, wanted: int, size: int) -> Tensor:
    """Slots emptied by joining the two of the first ``size`` that are nearest to each other, ``wanted`` times."""
    active = torch.arange(size, device=pool.counts.device)
    emptied: list[Tensor] = []
    for _ in range(wanted):
        if len(active) == 1:
            return torch.cat((*emptied, active))
        points = pool.centroids[active]
        near = knn(points, points, pool.manifold, 2)
        itself = near.indices[:, 0] == torch.arange(len(active), device=active.device)
        distance = torch.where(itself, near.distances[:, 1], near.distances[:, 0])
        first = distance.argmin()
        second = torch.where(itself, near.indices[:, 1], near.indices[:, 0])[first]
        keep, gone = active[torch.minimum(first, second)], active[torch.maximum(first, second)]
        total = pool.counts[keep] + pool.counts[gone]
        log = hooks.log(
            pool.manifold, pool.centroids[keep], pool.centroids[gone], 'the policy "merge" of DynamicMemory'
        )
        pull = log * pool.counts[gone]
        pool.centroids[keep] = move_centroids(pool.centroids[keep], pull, total, pool.manifold)
        pool.sums[keep] += pool.sums[gone]
        pool.counts[keep] = total
        pool.hits[keep] += pool.hits[gone]
        pool.birth[keep] = torch.minimum(pool.birth[keep], pool.birth[gone])
        pool.last[keep] = torch.maximum(pool.last[keep], pool.last[gone])
        active = active[active != gone]
        emptied.append(gone.unsqueeze(0))
    return torch.cat(emptied)


def _stalest(pool: DynamicMemory, wanted: int, size: int) -> Tensor:
    last, hits = pool.last[:size], pool.hits[:size]
    order = last.argsort(stable=True)
    if pool.policy == "least hit":
        order = order[hits[order].argsort(stable=True)]
    return order[:wanted]

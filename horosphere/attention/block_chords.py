"""Chords of long sequences, block by block: a manifold forms them in float64, which for all points at once would take
several times the memory of the attention itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import Chord, chords

# Numbers of points from which on blocks are made, and of a block.
LARGE, BLOCK = 2**22, 2**20


def block_chords(manifold: geoopt.Manifold, x: Tensor) -> tuple[Chord, ...] | None:
    """The chord parts of points x (..., N, D), as :func:`horosphere.manifolds.chord.chords`, in bounded extra memory;
    the backward pass makes a block's again.
    """
    plain = x.numel() <= LARGE or x.dtype == torch.float64 or torch.compiler.is_compiling()
    if plain or torch._C._are_functorch_transforms_active():
        return chords(manifold, x)
    with torch.no_grad():
        form = chords(manifold, x[..., :1, :])
    if form is None:
        return None
    if all(part.weight is None and part.features.dtype == x.dtype for part in form) and _same(form, x):
        return chords(manifold, x)  # nothing is computed
    kappas = [part.kappa for part in chords(manifold, x[..., :0, :])]
    # features that are the points themselves are not copied
    own = len(form) == 1 and _same(form, x)

    def made(block: Tensor) -> tuple[Tensor, ...]:
        tensors = []
        for part in chords(manifold, block):
            tensors += ([] if own else [part.features]) + ([] if part.weight is None else [part.weight])
        return tuple(tensors)

    rows = max(1, BLOCK * x.shape[-2] // x.numel())
    keep = torch.is_grad_enabled()
    blocks = [checkpoint(made, b, use_reentrant=False) if keep else made(b) for b in x.split(rows, -2)]
    columns = [list(column) for column in zip(*blocks, strict=True)]
    del blocks
    parts = []
    for part, kappa in zip(form, kappas, strict=True):
        features = x if own else torch.cat(columns.pop(0), -2)
        weight = None if part.weight is None else torch.cat(columns.pop(0), -1)
        parts.append(Chord(features, weight, part.time_dims, kappa))
    return tuple(parts)


def _same(form: tuple[Chord, ...], x: Tensor) -> bool:
    """Whether the features of one part are the points as they are stored."""
    first = form[0].features
    return first.data_ptr() == x.data_ptr() and first.shape[-1] == x.shape[-1]

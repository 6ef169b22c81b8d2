"""Chords of long sequences, block by block: a manifold forms them in float64, which for all points at once would take
several times the memory of the attention itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import Chord, chords

# Numbers of points from which on blocks are made, and of a block.
LARGE, BLOCK = 2**22, 2**18


def block_chords(manifold: geoopt.Manifold, x: Tensor) -> tuple[Chord, ...] | None:
    """The chord parts of points x (..., N, D), as :func:`horosphere.manifolds.chord.chords`, in bounded extra memory;
    the backward pass makes a block's again.
    """
    plain = x.numel() <= LARGE or x.dtype == torch.float64 or torch.compiler.is_compiling()
    if plain or _numerics.transformed():
        return chords(manifold, x)
    with torch.no_grad():
        form = chords(manifold, x[..., :1, :])
    empty = chords(manifold, x[..., :0, :])
    if form is None or empty is None:
        return None
    own = len(form) == 1 and _same(form, x)
    if own and form[0].weight is None:
        return chords(manifold, x)  # nothing is computed
    # which of the tensors that are made are weights
    weights = [w for part in form for w in ([] if own else [False]) + ([] if part.weight is None else [True])]
    tensors = list(_BlockChords.apply(manifold, own, weights, x, *_learned(manifold)))
    parts = []
    for part, whole in zip(form, empty, strict=True):
        features = x if own else tensors.pop(0)
        weight = None if part.weight is None else tensors.pop(0)
        parts.append(Chord(features, weight, part.time_dims, whole.kappa))
    return tuple(parts)


def _same(form: tuple[Chord, ...], x: Tensor) -> bool:
    """Whether the features of one part are the points as they are stored, which need no copy."""
    first = form[0].features
    return first.data_ptr() == x.data_ptr() and first.shape[-1] == x.shape[-1]


def _made(manifold: geoopt.Manifold, own: bool, x: Tensor) -> list[Tensor]:
    """Features, unless they are the points themselves, and weights (..., N, 1), part by part."""
    found: list[Tensor] = []
    for part in chords(manifold, x) or ():
        found += [] if own else [part.features]
        found += [] if part.weight is None else [part.weight.unsqueeze(-1)]
    return found


class _BlockChords(torch.autograd.Function):
    """Features and weights of x; the backward pass holds one block of float64 numbers at a time."""

    @staticmethod
    def forward(ctx, manifold: geoopt.Manifold, own: bool, weights: list[bool], x: Tensor, *parameters: Tensor):
        ctx.manifold, ctx.own, ctx.weights = manifold, own, weights
        ctx.save_for_backward(x)
        made: list[Tensor] = []
        for rows in _blocks(x):
            block = _made(manifold, own, x[..., rows, :])
            made = made or [t.new_empty(*x.shape[:-1], t.shape[-1]) for t in block]
            for whole, t in zip(made, block, strict=True):
                whole[..., rows, :] = t
        return tuple(t.squeeze(-1) if w else t for t, w in zip(made, weights, strict=True))

    @staticmethod
    def backward(ctx, *upper: Tensor):
        (x,) = ctx.saved_tensors
        grads = [g.unsqueeze(-1) if w else g for g, w in zip(upper, ctx.weights, strict=True)]
        if torch.is_grad_enabled():  # a second derivative is wanted
            return None, None, None, *_pulled(ctx, x, grads, create_graph=True)
        dx = torch.zeros_like(x)
        sums = [torch.zeros_like(p) for p in _learned(ctx.manifold)]
        for rows in _blocks(x):
            block = x[..., rows, :].detach().requires_grad_()
            with torch.enable_grad():
                found = _pulled(ctx, block, [g[..., rows, :] for g in grads])
            if found[0] is not None:
                dx[..., rows, :] = found[0]
            for total, part in zip(sums, found[1:], strict=True):
                if part is not None:
                    total += part
        return None, None, None, dx, *sums


def _pulled(ctx, x: Tensor, grads: Sequence[Tensor], create_graph: bool = False) -> list[Tensor | None]:
    """Gradients of x and of what the manifold learns."""
    inputs = [x, *_learned(ctx.manifold)]
    wanted = [t for t in inputs if t.requires_grad]
    made = _made(ctx.manifold, ctx.own, x)
    found = iter(torch.autograd.grad(made, wanted, grads, create_graph=create_graph, allow_unused=True))
    return [next(found) if t.requires_grad else None for t in inputs]


def _learned(manifold: geoopt.Manifold) -> list[Tensor]:
    return [p for p in manifold.parameters() if p.requires_grad]


def _blocks(x: Tensor) -> list[slice]:
    rows = max(1, BLOCK * x.shape[-2] // x.numel())
    return [slice(i, i + rows) for i in range(0, x.shape[-2], rows)]

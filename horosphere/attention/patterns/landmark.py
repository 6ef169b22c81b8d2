r"""Attention through a few anchors: linear time (L-HIDA), and the Nystrom form, which converges to dense attention.

Every key spreads its value over the anchors a_k by normalised inverse distance, every query reads the anchors:

.. math::
    \bar v_k = \sum_j W_{jk} v_j,\quad \mu_k = \sum_j W_{jk},\quad
    W_{jk} = \frac{(d(k_j, a_k)^2 + \epsilon)^{-p}}{\sum_l (d(k_j, a_l)^2 + \epsilon)^{-p}},\qquad
    o_i = \frac{\sum_k w_{ik} \bar v_k}{\sum_k w_{ik} \mu_k},\quad w_{ik} = (d(q_i, a_k)^2 + \epsilon)^{-p}

The mass mu makes the weights of a query sum to 1; the source leaves it out.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from horosphere import _numerics
from horosphere._points import as_points
from horosphere.attention.inverse import (
    check_same_length,
    checked_key_mask,
    checked_tokens,
    safe_divide,
    weights_to,
    with_ones,
)
from horosphere.attention.nystrom import choose_landmarks
from horosphere.attention.patterns.base import Heads, Pattern, register_pattern
from horosphere.attention.stream_cache import StreamCache
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.hooks import random_points
from horosphere.manifolds.parameter import ManifoldParameter

# Tokens worked together; pieces of PIECE of them see each other through a matrix, and earlier tokens through sums.
BLOCK = 1024
PIECE = 64
# Weights of keys and queries to anchors above which the backward pass works them again: 2^22 float32 are 16 MiB.
KEPT_WEIGHTS = 2**22


class LandmarkState(NamedTuple):
    """What m anchors hold after some tokens: sums of weighted values (..., m, Dv), and of the weights (..., m)."""

    values: Tensor
    mass: Tensor


def landmark_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    anchors: Tensor,
    manifold: geoopt.Manifold,
    *,
    is_causal: bool = False,
    eps: float | Tensor = 1e-3,
    power: float | Tensor = 1.0,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention through m anchors in O((N + M) m) time, by the formulas above.

    It does not converge to dense attention as m grows: values are blurred on the way in and again on the way out.
    :func:`nystrom_attention` converges.

    Args:
        query: points (..., H, N, D). key: points (..., H, M, D). value: (..., H, M, Dv).
        anchors: points (m, D), (H, m, D) or with all batch dimensions, such as :class:`Landmarks` holds. Anchors chosen
            from the keys of a sequence know its future: not with ``is_causal``.
        manifold: any geoopt.Manifold.
        is_causal: query i sees the keys j <= i only; N = M. By prefix sums.
        eps, power: positive, () or (H,).
        key_mask: bool, broadcasts to (..., H, M), True = takes part.

    Returns:
        (..., H, N, Dv) in the type of the values, 0 where no key takes part. Gradients flow to all tensors and a
        learnable curvature.

    Raises:
        ValueError: shapes that do not fit, eps or power <= 0, is_causal with N != M.
        TypeError: no floating point tensors, no manifold, a mask that is not bool.

    Source: Ge, Riemann GeoResolver, L-HIDA.
    """
    query, key, value = checked_tokens(query, key, value, eps, power)
    anchors = _checked_anchors(anchors, query)
    mask = checked_key_mask(key_mask, key)
    state = empty_landmarks(value, anchors)
    if is_causal:
        check_same_length(query, key, "causal attention through landmarks")
        return _stream(state, query, key, value, anchors, mask, manifold, eps, power)[0]
    again = _work_again(query, anchors)
    held = _joined(state)
    for some in _blocks(mask, key, value):
        given = (*some, anchors, manifold, eps, power)
        held = held + (checkpoint(_poured, *given, use_reentrant=False) if again else _poured(*given))
    outs = []
    for some, _ in _blocks(None, query):
        given = (some, held, anchors, manifold, eps, power)
        outs.append(checkpoint(_read, *given, use_reentrant=False) if again else _read(*given))
    return torch.cat(outs, -2).to(value.dtype)


def empty_landmarks(value: Tensor, anchors: Tensor) -> LandmarkState:
    """The state before the first token, for values (..., H, M, Dv) like these and anchors (..., m, D)."""
    zeros = value.new_zeros(
        *value.shape[:-2], anchors.shape[-2], value.shape[-1] + 1, dtype=_numerics.fast_dtype(value.dtype)
    )
    return LandmarkState(zeros[..., :-1], zeros[..., -1])


def landmark_step(
    state: LandmarkState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    anchors: Tensor,
    manifold: geoopt.Manifold,
    *,
    eps: float | Tensor = 1e-3,
    power: float | Tensor = 1.0,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, LandmarkState]:
    """The next tokens of a stream, any number of them: (out, new state); each query sees its own key and earlier ones.

    However the stream is cut, the outputs are those of ``landmark_attention(..., is_causal=True)``, whose arguments and
    errors these are. ``state`` is from :func:`empty_landmarks` or the last call, and is not changed.
    """
    query, key, value = checked_tokens(query, key, value, eps, power)
    anchors = _checked_anchors(anchors, query)
    check_same_length(query, key, "a stream through landmarks")
    wanted = (*value.shape[:-2], anchors.shape[-2], value.shape[-1])
    if state.values.shape != wanted:
        raise ValueError(f"the state holds values {tuple(state.values.shape)}, the tokens and anchors need {wanted}")
    return _stream(state, query, key, value, anchors, checked_key_mask(key_mask, key), manifold, eps, power)


class Landmarks(nn.Module):
    """Anchors that are learned: points of the manifold, trained by the Riemannian optimizers.

    Args:
        manifold: any geoopt.Manifold with ``random``.
        count: m >= 1 anchors.
        size: D, numbers of a point.
        heads: H, for anchors (H, m, D) of every head; None: (m, D), shared.
        dtype, device: of the anchors.

    The anchors start as random points of the manifold; :meth:`choose_` takes them from points instead.
    """

    def __init__(
        self,
        manifold: geoopt.Manifold,
        count: int,
        size: int,
        *,
        heads: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        shape = (count, size) if heads is None else (heads, count, size)
        start = random_points(manifold, *shape, dtype=dtype, device=device)
        self.anchors = ManifoldParameter(start.as_subclass(Tensor), manifold)

    @torch.no_grad()
    def choose_(self, points: Tensor, method: str = "k-means++", generator: torch.Generator | None = None) -> None:
        """Take the anchors from points (M, D), for anchors of every head (H, M, D), by :func:`choose_landmarks`."""
        points = as_points(points, "points")
        wanted = (*self.anchors.shape[:-2], points.shape[-2] if points.dim() > 1 else 0, self.anchors.shape[-1])
        if points.shape != wanted:
            raise ValueError(
                f"anchors {tuple(self.anchors.shape)} are chosen among points {(*wanted[:-2], 'M', wanted[-1])}, "
                f"got {tuple(points.shape)}"
            )
        found = choose_landmarks(points, self.anchors.shape[-2], self.anchors.manifold, method, generator=generator)
        self.anchors.copy_(found)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
        """:func:`landmark_attention` through the anchors, on their manifold."""
        return landmark_attention(query, key, value, self.anchors, self.anchors.manifold, **options)


def _checked_anchors(anchors: Tensor, query: Tensor) -> Tensor:
    anchors = as_points(anchors, "anchors")
    batch = query.shape[:-2]
    try:
        fits = anchors.dim() >= 2 and torch.broadcast_shapes(anchors.shape[:-2], batch) == batch
    except RuntimeError:
        fits = False
    if not fits or anchors.shape[-1] != query.shape[-1] or not anchors.shape[-2]:
        raise ValueError(
            f"anchors must be points (m, D), m >= 1, whose batch dimensions broadcast to those of query "
            f"{tuple(query.shape)}; got shape {tuple(anchors.shape)}"
        )
    return anchors.to(query.dtype).expand(*batch, *anchors.shape[-2:])


def _blocks(mask: Tensor | None, *tokens: Tensor):
    """Pieces of BLOCK rows of each, and of the mask; one of none where there are no rows.

    By one split, whose gradient is put together once: that of a slice is as long as the sequence.
    """
    pieces = [t.split(BLOCK, -2) for t in tokens]
    return zip(*pieces, [None] * len(pieces[0]) if mask is None else mask.split(BLOCK, -1), strict=True)


def _work_again(query: Tensor, anchors: Tensor) -> bool:
    # the transforms of torch.func do not go through checkpoint's hooks
    if not torch.is_grad_enabled() or _numerics.transformed():
        return False
    return query.shape[:-1].numel() * anchors.shape[-2] > KEPT_WEIGHTS


def _joined(state: LandmarkState) -> Tensor:
    return torch.cat((state.values, state.mass.unsqueeze(-1)), -1)


def _spread(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    anchors: Tensor,
    manifold: geoopt.Manifold,
    eps: float | Tensor,
    power: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Weights (..., L, m) of keys over the anchors, rows that sum to 1, and [v, 1]."""
    if mask is not None:  # what takes no part may be anything, also no point
        key = torch.where(mask.unsqueeze(-1), key, anchors[..., :1, :].detach())
        value = torch.where(mask.unsqueeze(-1), value, 0.0)
    w = weights_to(key, anchors, manifold, eps, power)
    w = w / w.sum(-1, keepdim=True)
    return w if mask is None else w * mask.unsqueeze(-1), with_ones(value.to(w.dtype))


def _poured(key, value, mask, anchors, manifold, eps, power) -> Tensor:
    """[sums of weighted values, mass], (..., m, Dv + 1)."""
    w, rows = _spread(key, value, mask, anchors, manifold, eps, power)
    return w.mT @ rows


def _read(query, held, anchors, manifold, eps, power) -> Tensor:
    w = weights_to(query, anchors, manifold, eps, power)
    both = w @ held.to(w.dtype)
    return safe_divide(both[..., :-1], both[..., -1:])


def _stream(
    state: LandmarkState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    anchors: Tensor,
    mask: Tensor | None,
    manifold: geoopt.Manifold,
    eps: float | Tensor,
    power: float | Tensor,
) -> tuple[Tensor, LandmarkState]:
    held, outs = _joined(state), []
    again = _work_again(query, anchors)
    for some in _blocks(mask, query, key, value):
        given = (held, *some, anchors, manifold, eps, power)
        out, held = checkpoint(_causal_block, *given, use_reentrant=False) if again else _causal_block(*given)
        outs.append(out)
    return torch.cat(outs, -2).to(value.dtype), LandmarkState(held[..., :-1], held[..., -1])


def _causal_block(held, query, key, value, mask, anchors, manifold, eps, power) -> tuple[Tensor, Tensor]:
    """Out (..., L, Dv) of L tokens after what the anchors hold, and what they hold then."""
    by, rows = _spread(key, value, mask, anchors, manifold, eps, power)
    w = weights_to(query, anchors, manifold, eps, power).to(rows.dtype)
    n = w.shape[-2]
    short = -n % PIECE if n > PIECE else 0
    w, by, rows = (
        nn.functional.pad(t, (0, 0, 0, short)).unflatten(-2, (-1, PIECE) if n > PIECE else (1, n))
        for t in (w, by, rows)
    )
    sums = torch.cat((held.to(rows.dtype).unsqueeze(-3), by.mT @ rows), -3).cumsum(-3)
    both = (w @ by.mT).tril() @ rows + w @ sums[..., :-1, :, :]
    out = safe_divide(both[..., :-1], both[..., -1:]).flatten(-3, -2)
    return out[..., :n, :], sums[..., -1, :, :]


@register_pattern
class LandmarkPattern(Pattern):
    """:func:`landmark_attention` through learned anchors (H, m, D)."""

    name = "landmark"
    sizes: ClassVar[dict[str, int | None]] = {"landmarks": 64}

    def __init__(self, heads: Heads, landmarks: int):
        super().__init__(heads)
        self.landmarks = Landmarks(
            heads.manifold, landmarks, heads.size, heads=heads.count, device=heads.device, dtype=heads.dtype
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, manifold: geoopt.Manifold, **options) -> Tensor:
        return self.landmarks(query, key, value, **options)

    def new_cache(self) -> LandmarkCache:
        return LandmarkCache(self.landmarks.anchors)


class LandmarkCache(StreamCache):
    """Decoding through anchors: each holds a sum of weighted values and its mass.

    Args:
        anchors: points (m, D) or (H, m, D) of a layer; shared with it, no part of the cache's own state.
    """

    names = ("values", "mass")
    values: Tensor
    mass: Tensor
    patterns = ("landmark",)

    def __init__(self, anchors: Tensor):
        super().__init__()
        self._anchors = [anchors]  # in a list: a module would take a parameter for its own

    def _start(self, key, value, manifold):
        anchors = self._anchors[0]
        return empty_landmarks(value, anchors.expand(*key.shape[:-2], *anchors.shape[-2:]))

    def _state(self):
        return LandmarkState(self.values, self.mass)

    def _step(self, state, query, key, value, manifold, **options):
        return landmark_step(state, query, key, value, self._anchors[0], manifold, **options)

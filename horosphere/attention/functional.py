"""Attention by geodesic distance on any manifold, with the arguments of torch's scaled_dot_product_attention."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from horosphere import _numerics
from horosphere._numerics import without_autocast
from horosphere.attention import row_blocks
from horosphere.attention.aggregate import averaged
from horosphere.attention.arguments import Arguments, Options, checked
from horosphere.attention.block_chords import block_chords
from horosphere.attention.masks import with_causal
from horosphere.kernels import dispatch, operators
from horosphere.kernels.geometry import ChordPairs
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve
from horosphere.manifolds.pairwise import cdist, has_batched_curvature


@overload
def geodesic_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    manifold: geoopt.Manifold,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def geodesic_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    manifold: geoopt.Manifold,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


def geodesic_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    manifold: geoopt.Manifold,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    eps: float | Tensor = 1e-3,
    power: float | Tensor = 1.0,
    weight: str = "inverse",
    value_manifold: geoopt.Manifold | None = None,
    return_lse: bool = False,
    precision: str = "auto",
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Each query takes the mean of the values, weighted by how near their keys are on the manifold.

    .. math::
        o_i = \sum_j W_{ij} v_j,\qquad W_{ij} = \frac{(d(q_i, k_j)^2 + \varepsilon)^{-p}}
        {\sum_m (d(q_i, k_m)^2 + \varepsilon)^{-p}}

    The matrix of weights is never held: memory grows like N + M, forward and backward.

    Args:
        query: points (..., H, N, D).
        key: points (..., H, M, D); batch dimensions broadcast.
        value: (..., H, M, Dv).
        manifold: any geoopt.Manifold, as in :func:`horosphere.cdist`; ``dist`` alone is enough, and slow.
        attn_mask: broadcastable to (..., H, N, M): bool, True takes part; or floating, added to log W. Also
            ``torch.nn.attention.bias.causal_lower_right(N, M)`` and ``causal_upper_left``. A row in which no key takes
            part gives 0, and passes no gradient on.
        dropout_p: probability with which a normalised weight is dropped; the others are divided by ``1 - dropout_p``.
            Applied whenever it is > 0, as in torch: pass 0 in evaluation.
        is_causal: query i sees the keys j <= i (top left, as in torch; lower right: see attn_mask), of those that
            attn_mask leaves; torch takes only one of the two.
        enable_gqa: key and value have fewer heads, each shared by the same number of consecutive query heads.
        eps: > 0, in units of squared distance: a number or a tensor of shape () or (H,), which may be learned (tensors
            are not checked). Keys nearer than sqrt(eps) weigh alike. Not used by the other weights.
        power: p > 0, shaped as eps; for the other weights their inverse temperature beta.
        weight: "inverse" as above; "softmax" ``exp(-beta d)``; "gaussian" ``exp(-beta d^2)``, which is the limit of
            "inverse" for p to infinity with eps = p/beta; "dot": torch's scaled_dot_product_attention of the
            coordinates, with its scale 1/sqrt(D), which leaves manifold, eps and power unused.
        value_manifold: the values are points of this manifold and are averaged by the weighted ambient midpoint
            (:func:`horosphere.midpoint`) instead of linearly; a row without keys gives its origin. A manifold of your
            own without ``lift`` and ``settle`` is averaged in its tangent space at the origin.
        return_lse: also return lse (..., H, N), the logarithm of the denominator; :func:`merge` combines shards of the
            keys with it.
        precision: "auto" works pairs whose ``d^2 + eps`` the matrix product may miss by more than 5e-4 of itself
            (float64 points: 1e-11) from differences, so that a query finds the key it equals however small eps is;
            "fast" leaves them; "exact" takes the distances of ``cdist(precision="exact")``, row block by row block.
        impl: "auto", "reference", "tiled", "numba" or "triton", as in :func:`horosphere.cdist`.

    Returns:
        (..., H, N, Dv) in the type of the value; with return_lse also lse in float32 or float64. Half precision is
        worked in float32 and autocast changes nothing. Gradients flow to query, key, value, eps, power, a floating
        attn_mask and learned curvatures, twice if wanted (through the plain form, whose memory is N M).

    Raises:
        ValueError: shapes, probabilities or names that do not fit; an impl that cannot serve the call.
        TypeError: no floating point tensors, or no manifold.

    Source: the operator and its limits are derived in docs/attention.md; streaming after Rabe and Staats (2021),
    Self-attention does not need O(n^2) memory.
    """
    args = checked(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        eps=eps,
        power=power,
        weight=weight,
        precision=precision,
        batched_curvature=weight != "dot" and has_batched_curvature(resolve(manifold)[0]),
    )
    dispatch.check_name(impl)
    if weight == "dot":
        if value_manifold is not None or return_lse:
            raise ValueError('weight="dot" is torch\'s operator: it has no value_manifold and returns no lse')
        if is_causal and attn_mask is not None:
            attn_mask, is_causal = with_causal(attn_mask, query.shape[-2], key.shape[-2], query.device), False
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa
        )

    def attend(values: Tensor) -> tuple[Tensor, Tensor]:
        return _attend(args, values, manifold, dropout_p, weight, precision, impl)

    return averaged(args, value_manifold, return_lse, attend)


def attention_weights(
    query: Tensor,
    key: Tensor,
    manifold: geoopt.Manifold,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    eps: float | Tensor = 1e-3,
    power: float | Tensor = 1.0,
    weight: str = "inverse",
    precision: str = "auto",
    impl: str = "auto",
) -> Tensor:
    """The matrix W (..., H, N, M) that :func:`geodesic_attention` averages with, for looking at and for small sizes.

    Arguments as there; the distances are those of :func:`horosphere.cdist` with its own, stricter, precision. Rows sum
    to 1; a row in which no key takes part is 0.

    Raises ValueError and TypeError as geodesic_attention; "dot" is torch's and has no weights to give here.
    """
    args = checked(
        query,
        key,
        key,  # there are no values
        attn_mask=attn_mask,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        eps=eps,
        power=power,
        weight=weight,
        precision=precision,
        batched_curvature=has_batched_curvature(resolve(manifold)[0]),
    )
    if weight == "dot":
        raise ValueError('weight="dot" is torch\'s scaled_dot_product_attention, which forms no weights')
    with without_autocast(args.query.device):
        everything = slice(0, args.query.shape[-2])
        d2 = _distances(args, everything, manifold, precision, impl)
        w, _ = row_blocks.weights_of_rows(args, everything, d2, weight)
    return args.joined(w, 2).to(args.query.dtype)


def _attend(
    args: Arguments, value: Tensor, manifold: geoopt.Manifold, dropout_p: float, weight: str, precision: str, impl: str
) -> tuple[Tensor, Tensor]:
    seed = torch.randint(2**62, (), device=value.device) if dropout_p else None
    parts_x = block_chords(manifold, args.query) if precision != "exact" else None
    if parts_x is None:
        why = "precision='exact'" if precision == "exact" else "a manifold with dist alone"
        row_blocks.check_form("attention", args.query, args.key, why, impl)
        return row_blocks.attend(
            args,
            lambda rows: _distances(args, rows, manifold, precision),
            lambda w, rows: w @ value.to(w.dtype),
            dropout_p=dropout_p,
            seed=seed,
            weight=weight,
            numbers=args.query.shape[-1],
        )
    parts_y = parts_x if args.key is args.query else block_chords(manifold, args.key)
    assert parts_y is not None  # as the queries: what a manifold offers does not depend on the points
    return operators.attention(
        ChordPairs(parts_x, parts_y),
        value,
        eps=args.eps,
        power=args.power,
        bias=args.bias,
        causal=args.causal,
        weight=weight,
        dropout_p=dropout_p,
        seed=seed,
        resolve=precision == "auto",
        impl=impl,
    )


def _distances(args: Arguments, rows: slice, manifold: geoopt.Manifold, precision: str, impl: str = "auto") -> Tensor:
    """Squared distances of the queries in a slice to all keys, by cdist."""
    query, key = (t.to(_numerics.fast_dtype(t.dtype)) for t in (args.query, args.key))
    return cdist(query[..., rows, :], key, manifold, squared=True, precision=precision, impl=impl)

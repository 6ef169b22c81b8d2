"""Attention in which every token measures distances by a metric of its own."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from horosphere.attention import row_blocks
from horosphere.attention.aggregate import averaged
from horosphere.attention.arguments import Arguments, Options, checked
from horosphere.attention.connection import Turn
from horosphere.kernels import dispatch, operators
from horosphere.kernels.geometry import MetricPairs
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.metric_distance import metric_pair, metric_sqdist
from horosphere.manifolds.token_metric import TokenMetric


@overload
def metric_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g_q: TokenMetric | None,
    g_k: TokenMetric | None,
    *,
    end: str = "mean",
    turn: Turn | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def metric_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g_q: TokenMetric | None,
    g_k: TokenMetric | None,
    *,
    end: str = "mean",
    turn: Turn | None = None,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


def metric_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g_q: TokenMetric | None,
    g_k: TokenMetric | None,
    *,
    end: str = "mean",
    turn: Turn | None = None,
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
    r"""Each query takes the mean of the values, weighted by how near their keys are under the tokens' metrics.

    .. math::
        o_i = \sum_j W_{ij} v_j,\qquad W_{ij} = \frac{(d_{ij}^2 + \varepsilon)^{-p}}
        {\sum_m (d_{im}^2 + \varepsilon)^{-p}}

    with the d of :func:`horosphere.metric_sqdist`. Memory grows like N + M, forward and backward. Without columns and
    with s = 1 it is :func:`geodesic_attention` on flat space, with one metric for all tokens that of its chord.

    Args:
        query: points (..., H, N, D).
        key: points (..., H, M, D); batch dimensions broadcast.
        value: (..., H, M, Dv).
        g_q, g_k: metrics of shape (..., H, N) and (..., H, M) in dimension D, leading dimensions broadcast. A metric of
            the whole model's dimension is restricted to heads by :meth:`TokenMetric.heads`.
        end: whose metric measures: "query", "key" or the "mean" of both; the other may be None.
        turn: the pair rotations of a connection (:meth:`PairRotation.between`): :math:`R_{ij} v_j` is averaged instead
            of v_j, by two further sums a plane, with weights W cos(theta) and W sin(theta).
        attn_mask, dropout_p, is_causal, enable_gqa, eps, power, weight, value_manifold, return_lse: as in
            :func:`geodesic_attention`; there is no weight "dot".
        precision: "auto" works pairs whose ``d^2 + eps`` the matrix products may miss by more than 5e-4 of itself
            (float64 points: 1e-11) from differences; "fast" leaves them; "exact" works all distances in float64, row
            block by row block.
        impl: "auto", "reference", "tiled", "numba" or "triton", as in :func:`horosphere.cdist`.

    Returns:
        (..., H, N, Dv) in the type of the value; with return_lse also lse. Gradients flow to query, key, value, both
        parts of the metrics, eps, power, a floating attn_mask and the turn.

    Raises:
        ValueError: shapes, probabilities or names that do not fit; an impl that cannot serve the call.
        TypeError: no floating point tensors, or no TokenMetric.
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
    )
    if weight == "dot":
        raise ValueError('weight="dot" knows no metric: call torch\'s scaled_dot_product_attention')
    dispatch.check_name(impl)
    in_rows = precision == "exact" or turn is not None
    if in_rows:
        why = "precision='exact'" if precision == "exact" else "a turn"
        row_blocks.check_form("metric_attention", args.query, args.key, why, impl)
    g_q, g_k = _grouped(args, g_q, g_k, end)
    f, _ = metric_pair(args.query, args.key, g_q, g_k, end, ("query", "key"))
    if turn is not None:
        _check_turn(args, turn, value_manifold)

    def attend(values: Tensor) -> tuple[Tensor, Tensor]:
        seed = torch.randint(2**62, (), device=values.device) if dropout_p else None
        options: dict[str, Any] = {"dropout_p": dropout_p, "seed": seed, "weight": weight}
        if in_rows:
            return _in_row_blocks(args, values, g_q, g_k, end, turn, precision, options)
        options |= {"eps": args.eps, "power": args.power, "bias": args.bias, "causal": args.causal}
        return operators.attention(MetricPairs(f), values, resolve=precision == "auto", impl=impl, **options)

    return averaged(args, value_manifold, return_lse, attend)


def _grouped(
    args: Arguments, g_q: TokenMetric | None, g_k: TokenMetric | None, end: str
) -> tuple[TokenMetric | None, TokenMetric | None]:
    """Metrics with the two head dimensions of grouped queries."""
    if args.heads is None:
        return g_q, g_k

    def split(g: TokenMetric | None, query: bool) -> TokenMetric | None:
        if not isinstance(g, TokenMetric) or len(g.shape) < 2:
            return g
        if query and g.shape[-2] > 1:
            return TokenMetric(g.scale.unflatten(-2, args.heads), g.factor.unflatten(-4, args.heads))
        return TokenMetric(g.scale.unsqueeze(-2), g.factor.unsqueeze(-4))

    return split(g_q, True), split(g_k, False)


def _check_turn(args: Arguments, turn: Turn, value_manifold: geoopt.Manifold | None) -> None:
    if value_manifold is not None:
        raise ValueError("a turn rotates vectors; values that are points of a value_manifold have no such rotation")
    if args.heads is not None:
        raise ValueError("a turn goes with one key head for each query head: enable_gqa=False")
    planes, n, m = turn.left.shape[-3], args.query.shape[-2], args.key.shape[-2]
    if turn.frame.shape != (args.value.shape[-1], 2 * planes) or turn.left.shape[-2] != n or turn.right.shape[-2] != m:
        raise ValueError(
            f"turn has a frame {tuple(turn.frame.shape)}, left {tuple(turn.left.shape)} and right "
            f"{tuple(turn.right.shape)}; expected ({args.value.shape[-1]}, 2m), (..., m, {n}, p) and (..., {m}, p)"
        )


def _in_row_blocks(
    args: Arguments,
    value: Tensor,
    g_q: TokenMetric | None,
    g_k: TokenMetric | None,
    end: str,
    turn: Turn | None,
    precision: str,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    query = args.query

    def distances(rows: slice) -> Tensor:
        some = None if g_q is None or end == "key" else g_q if g_q.shape[-1] == 1 else g_q[..., rows]
        return metric_sqdist(query[..., rows, :], args.key, some, g_k, end=end, precision=precision)

    def average(w: Tensor, rows: slice) -> Tensor:
        v = value.to(w.dtype)
        return w @ v if turn is None else turned_average(w, v, turn, rows)

    return row_blocks.attend(args, distances, average, **options)


def turned_average(w: Tensor, value: Tensor, turn: Turn, rows: slice) -> Tensor:
    r""":math:`\sum_j W_{ij} R_{ij} v_j` for the weights w (..., R, M) of some rows, plane by plane."""
    frame = turn.frame.to(w.dtype)
    along = (value @ frame).unflatten(-1, (-1, 2))  # (..., M, m, 2)
    changes = []
    for plane in range(turn.left.shape[-3]):
        angle = turn.left[..., plane, rows, :].to(w.dtype) @ turn.right.to(w.dtype).mT
        less, sine = -2 * torch.sin(angle / 2) ** 2 * w, torch.sin(angle) * w
        one, two = (along[..., plane, k : k + 1] for k in (0, 1))
        changes += [less @ one - sine @ two, sine @ one + less @ two]
    return w @ value + torch.cat(changes, -1) @ frame.mT

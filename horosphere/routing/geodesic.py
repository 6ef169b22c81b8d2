"""Routing by geodesic distance to prototypes, with a certificate of what the prototypes left out would have added."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from horosphere._points import as_points
from horosphere.attention.functional import attention_weights
from horosphere.manifolds import ManifoldParameter, Sphere
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.bounded import BoundedParameter
from horosphere.manifolds.hooks import random_points
from horosphere.routing.certificate import Spread, certificate, enough_prototypes, rounding_slack

__all__ = ["GeodesicRouter", "Routing", "route"]

RULES = ("scan", "cheap")


class Routing(NamedTuple):
    """Where queries went.

    Attributes:
        output: (..., N, Dv), None without values.
        weights: (..., N, K), falling, of sum 1; 0 beyond ``counts``.
        indices: (..., N, K) of the prototypes.
        certificate: (..., N), a bound on the distance to the output of all prototypes; None where no lengths of values
            are known.
        counts: (..., N) prototypes used.
        probabilities: (..., N, E), the weights of all prototypes.
    """

    output: Tensor | None
    weights: Tensor
    indices: Tensor
    certificate: Tensor | None
    counts: Tensor
    probabilities: Tensor

    @property
    def answer(self) -> tuple[Tensor, Tensor]:
        """Output and certificate; ValueError where there were no values."""
        if self.output is None or self.certificate is None:
            raise ValueError("queries that were routed without values have no answer")
        return self.output, self.certificate


def route(
    x: Tensor,
    prototypes: Tensor,
    manifold: geoopt.Manifold,
    values: Tensor | None = None,
    *,
    top_k: int | None = None,
    eps: float | Tensor = 1e-3,
    power: float | Tensor = 1.0,
    tolerance: float | None = None,
    rule: str = "scan",
    value_bound: float | None = None,
    prototype_mask: Tensor | None = None,
    precision: str = "auto",
) -> Routing:
    r"""Send each query to the prototypes nearest to it, weighted by :math:`(d^2 + \varepsilon)^{-p}`.

    Args:
        x: points (..., N, D).
        prototypes: points (E, D).
        manifold: any geoopt.Manifold, as in :func:`horosphere.cdist`.
        values: (E, Dv), what each prototype answers.
        top_k: K, hard routing: the K nearest, weights renormalised. None, soft routing: all E.
        eps, power: positive, as in :func:`horosphere.attention.geodesic_attention`.
        tolerance: adaptive routing, in place of top_k: for each query as few prototypes as keep its certificate within
            this many units of the values; all E where none does (a tolerance below rounding).
        rule: of adaptive routing: "scan" looks at the certificate of K = 1, 2, ...; "cheap" at 2 tail max|v|.
        value_bound: without values, an upper bound on their lengths, for a certificate.
        prototype_mask: (E,) bool, True takes part. With none that does, outputs are 0.
        precision: of the distances, as in :func:`horosphere.cdist`; "fast" will do where its error is far below eps.

    Returns:
        Routing. Gradients flow to x, prototypes, values, eps, power and a learned curvature; the certificate has none.

    Raises:
        ValueError: shapes that do not fit, K outside 1..E, a tolerance that is not positive or comes without values or
            with top_k.
        TypeError: no floating point tensors, or no manifold.

    Source: geodesic sparse routing of the GeoResolver paper (M10) with another certificate, docs/routing.md.
    """
    prototypes = as_points(prototypes, "prototypes")
    if prototypes.dim() != 2:
        raise ValueError(f"prototypes must have shape (E, D); got {tuple(prototypes.shape)}")
    count = prototypes.shape[0]
    top_k = _checked(count, values, top_k, tolerance, rule, prototype_mask)
    probabilities = attention_weights(
        x, prototypes, manifold, attn_mask=prototype_mask, eps=eps, power=power, precision=precision
    )
    answers = None if values is None else (values, Spread.of(values, probabilities.dtype))
    if tolerance is not None and answers is not None:  # a tolerance without values was refused
        counts = enough_prototypes(probabilities.detach(), *answers, tolerance, rule)
        top_k = int(counts.max()) if counts.numel() else 1
        # sorted as the scan did: among equal weights the same prototypes come first
        chosen, indices = (t[..., :top_k] for t in probabilities.sort(dim=-1, descending=True, stable=True))
        chosen = torch.where(torch.arange(top_k, device=chosen.device) < counts.unsqueeze(-1), chosen, 0.0)
    else:
        chosen, indices = probabilities.topk(top_k, dim=-1)
        counts = torch.full(chosen.shape[:-1], top_k, device=chosen.device)
    total = chosen.sum(-1, keepdim=True)
    weights = torch.where(total > 0, chosen / torch.where(total > 0, total, 1.0), 0.0)
    if answers is None:
        bound = None if value_bound is None else _tail_bound(probabilities, indices, value_bound)
        return Routing(None, weights, indices, bound, counts, probabilities)
    values, spread = answers
    # summed in float64: the rounding of hundreds of equal weights is beyond what is certified
    wide = weights.to(torch.float64).unsqueeze(-2) @ values[indices].to(torch.float64)
    output = wide.squeeze(-2).to(weights.dtype)
    # where a query uses fewer than K, the places beyond hold the weight 0 and their prototypes are outside
    used = torch.where(weights > 0, indices, indices[..., :1])
    bound = certificate(probabilities, used, spread, output)
    return Routing(output, weights, indices, bound, counts, probabilities)


def _checked(count, values, top_k, tolerance, rule, prototype_mask) -> int:
    if count == 0:
        raise ValueError("prototypes must hold at least one point; got none")
    if values is not None and (values.dim() != 2 or values.shape[0] != count):
        raise ValueError(f"values must have shape ({count}, Dv), one for each prototype; got {tuple(values.shape)}")
    if prototype_mask is not None and (prototype_mask.dtype != torch.bool or prototype_mask.shape != (count,)):
        raise ValueError(
            f"prototype_mask must be bool of shape ({count},), True takes part; got {prototype_mask.dtype} "
            f"{tuple(prototype_mask.shape)}"
        )
    if tolerance is not None:
        if top_k is not None:
            raise ValueError("give top_k or tolerance, not both: a tolerance chooses K for each query")
        if values is None:
            raise ValueError("tolerance needs values, whose lengths bound what is left out")
        if not tolerance > 0:
            raise ValueError(f"tolerance must be positive; got {tolerance}")
        if rule not in RULES:
            raise ValueError(f"rule must be one of {RULES}; got {rule!r}")
        return count
    top_k = count if top_k is None else top_k
    if not 1 <= top_k <= count:
        raise ValueError(f"top_k must lie between 1 and the number of prototypes, {count}; got {top_k}")
    return top_k


@torch.no_grad()
def _tail_bound(probabilities: Tensor, indices: Tensor, value_bound: float) -> Tensor:
    tail = probabilities.scatter(-1, indices, 0.0).sum(-1)
    return (2 * tail + rounding_slack(probabilities.shape[-1], tail.dtype)) * value_bound


class GeodesicRouter(nn.Module):
    """Prototypes on a manifold, learned, to which queries are routed: :func:`route` as a module.

    Args:
        dim: D, numbers that store a point.
        prototypes: E.
        top_k: K of hard routing; None for soft.
        manifold: where prototypes and queries live; the sphere unless given.
        eps: > 0; learned as log eps with ``learn_eps``.
        power: p > 0.
        tolerance, rule: adaptive routing instead of top_k.

    Raises:
        ValueError: no prototypes, or K outside 1..E.
    """

    def __init__(
        self,
        dim: int,
        prototypes: int,
        top_k: int | None = None,
        manifold: geoopt.Manifold | None = None,
        *,
        eps: float = 1e-3,
        learn_eps: bool = False,
        power: float = 1.0,
        tolerance: float | None = None,
        rule: str = "scan",
    ):
        super().__init__()
        if prototypes < 1 or dim < 1:
            raise ValueError(f"dim and prototypes must be positive; got {dim} and {prototypes}")
        if not eps > 0:
            raise ValueError(f"eps must be positive; got {eps}")
        _checked(prototypes, torch.empty(prototypes, 1), top_k, tolerance, rule, None)
        self.manifold = manifold = Sphere() if manifold is None else manifold
        self.prototypes = ManifoldParameter(random_points(manifold, prototypes, dim), manifold)
        log_eps = torch.tensor(float(eps)).log()
        if learn_eps:
            self.log_eps = BoundedParameter(log_eps)
        else:
            self.register_buffer("log_eps", log_eps)
        self.top_k, self.power, self.tolerance, self.rule = top_k, power, tolerance, rule

    @property
    def eps(self) -> Tensor:
        """In units of squared distance."""
        return self.log_eps.exp()

    def forward(self, x: Tensor, values: Tensor | None = None, *, value_bound: float | None = None) -> Routing:
        """Route points x (..., N, D); ``values`` (E, Dv) give an output and a certificate, see :func:`route`."""
        return route(
            x,
            self.prototypes,
            self.manifold,
            values,
            top_k=self.top_k,
            eps=self.eps,
            power=self.power,
            tolerance=self.tolerance,
            rule=self.rule,
            value_bound=value_bound,
        )

    def extra_repr(self) -> str:
        rule = f"top_k={self.top_k}" if self.tolerance is None else f"tolerance={self.tolerance}, rule={self.rule!r}"
        return f"{len(self.prototypes)} prototypes, {rule}"

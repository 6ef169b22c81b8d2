"""A mixture of experts whose router is a set of points: each token goes to the experts nearest to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from horosphere.attention.points import into_manifold, stored_size
from horosphere.manifolds._geoopt import geoopt
from horosphere.routing.balance import balance_loss, load
from horosphere.routing.geodesic import GeodesicRouter, Routing

__all__ = ["ExpertLayer", "ExpertOutput"]


class ExpertOutput(NamedTuple):
    """What a layer of experts answers, and how the work was shared.

    Attributes:
        output: (..., d): of the tokens' experts, weighted; 0 where every choice of a token was dropped.
        balance_loss: scalar, 1 at perfect balance; add a small multiple of it to the loss.
        load: (E,) share of the choices that fell on each expert, before dropping.
        dropped: (..., K) bool, choices that found their expert full.
        capacity: tokens that an expert takes; None without a limit.
        routing: weights, indices and full distribution, with its certificate where a bound of the outputs is declared.
    """

    output: Tensor
    balance_loss: Tensor
    load: Tensor
    dropped: Tensor
    capacity: int | None
    routing: Routing

    @property
    def lost(self) -> Tensor:
        """(...) bool, tokens all of whose choices were dropped."""
        return self.dropped.all(-1)


class ExpertLayer(nn.Module):
    r"""Experts at points of a manifold; a token, mapped to its own point, goes to the K nearest.

    .. math:: y = \sum_{e \in \text{top } K} w_e\, f_e(x),\qquad w_e \propto (d(\phi(x), c_e)^2 + \varepsilon)^{-p}

    An expert takes at most ``ceil(capacity_factor * tokens * K / E)`` tokens; a choice beyond is dropped, its weight
    goes to nobody, and it is reported. Earlier tokens come first, so a token never loses its place to a later one; but
    the limit itself depends on how many there are: without a limit outputs do not depend on the rest of the batch.

    Args:
        dim: size of a token.
        experts: modules (n, dim) -> (n, d) that take an empty batch too.
        top_k: K.
        manifold: the sphere unless given; tokens are mapped by :func:`horosphere.attention.points.into_manifold`.
        capacity_factor: > 0, or None for no limit.
        eps, learn_eps, power: as in :class:`GeodesicRouter`.
        output_bound: a declared upper bound on the length of every expert's outputs, for a certificate.

    Raises:
        ValueError: no experts, K above their number, a capacity that is not positive.

    Sources: Shazeer et al. (2017); Lepikhin et al. (2021), GShard, for capacities.
    """

    def __init__(
        self,
        dim: int,
        experts: Iterable[nn.Module],
        top_k: int = 2,
        manifold: geoopt.Manifold | None = None,
        *,
        capacity_factor: float | None = 1.25,
        eps: float = 1e-3,
        learn_eps: bool = False,
        power: float = 1.0,
        output_bound: float | None = None,
    ):
        super().__init__()
        self.experts = nn.ModuleList(experts)
        if not self.experts:
            raise ValueError("experts must hold at least one module; got none")
        _check_top_k(top_k, len(self.experts))
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"capacity_factor must be positive, or None for no limit; got {capacity_factor}")
        self.dim, self.capacity_factor, self.output_bound = dim, capacity_factor, output_bound
        self.router = GeodesicRouter(
            dim if manifold is None else stored_size(manifold, dim),
            len(self.experts),
            top_k,
            manifold,
            eps=eps,
            learn_eps=learn_eps,
            power=power,
        )

    def forward(self, x: Tensor) -> ExpertOutput:
        """Tokens (..., dim), at least one. Experts that no token goes to have gradient 0 or none.

        Raises:
            ValueError: another size of token, no token, or an expert whose output does not fit the others'.
        """
        if x.shape[-1:] != (self.dim,) or x.numel() == 0:
            raise ValueError(f"x must hold tokens of size {self.dim}, shape (..., {self.dim}); got {tuple(x.shape)}")
        tokens = x.reshape(-1, self.dim)
        routing: Routing = self.router(into_manifold(tokens, self.router.manifold), value_bound=self.output_bound)
        capacity = self._capacity(*routing.indices.shape)
        output, dropped = self._mixed(tokens, routing, capacity)
        shape = x.shape[:-1]
        return ExpertOutput(
            output.reshape(*shape, -1),
            balance_loss(routing.probabilities, routing.indices),
            load(routing.indices, len(self.experts)),
            dropped.reshape(*shape, -1),
            capacity,
            Routing._make(None if t is None else t.reshape(*shape, *t.shape[1:]) for t in routing),
        )

    def _capacity(self, tokens: int, choices: int) -> int | None:
        if self.capacity_factor is None:
            return None
        return math.ceil(self.capacity_factor * tokens * choices / len(self.experts))

    def _mixed(self, tokens: Tensor, routing: Routing, capacity: int | None) -> tuple[Tensor, Tensor]:
        """Outputs (T, d) and which choices (T, K) were dropped."""
        dropped = torch.zeros_like(routing.indices.flatten(), dtype=torch.bool)
        answers = self._answers(tokens, routing, capacity, dropped)
        source, first = next(answers)
        output = first.new_zeros(len(tokens), first.shape[1]).index_add(0, source, first)
        for source, answer in answers:
            output = output.index_add(0, source, answer)
        return output, dropped

    def _answers(
        self, tokens: Tensor, routing: Routing, capacity: int | None, dropped: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What each expert answers, weighted (n, d), and to which tokens (n,); marks the choices (T K,) it drops."""
        chosen, weights = routing.indices.flatten(), routing.weights.flatten()
        order = chosen.argsort(stable=True)  # by expert, within it by token
        counts = torch.bincount(chosen, minlength=len(self.experts)).tolist()
        start, size = 0, None
        for expert, count in zip(self.experts, counts, strict=True):
            mine = order[start : start + count]
            start += count
            kept = mine if capacity is None else mine[:capacity]
            dropped[mine[len(kept) :]] = True
            source = kept // routing.indices.shape[-1]
            answer = expert(tokens[source])
            if answer.dim() != 2 or len(answer) != len(kept) or size not in (None, answer.shape[1]):
                raise ValueError(
                    f"an expert must answer (n, d), the same d as the others; one answered {tuple(answer.shape)} "
                    f"to {tuple(tokens[source].shape)}"
                )
            size = answer.shape[1]
            yield source, answer * weights[kept].unsqueeze(-1).to(answer.dtype)

    def extra_repr(self) -> str:
        return f"capacity_factor={self.capacity_factor}"


def _check_top_k(top_k: int | None, experts: int) -> None:
    if top_k is None or not 1 <= top_k <= experts:
        raise ValueError(f"top_k must lie between 1 and the number of experts, {experts}; got {top_k}")

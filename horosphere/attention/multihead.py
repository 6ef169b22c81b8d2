"""GeodesicAttention: multi-head attention by distance on a manifold, with the contract of nn.MultiheadAttention."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from horosphere.attention import points
from horosphere.attention.arguments import Rule
from horosphere.attention.caches import AttentionCache, DenseCache
from horosphere.attention.calibration import squared_distance_sums
from horosphere.attention.functional import attention_weights, geodesic_attention
from horosphere.attention.masks import blocked_to_allowed, dot_weights, with_causal
from horosphere.attention.patterns import Heads, Pattern, make_pattern
from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.bounded import BoundedParameter
from horosphere.manifolds.chord import resolve
from horosphere.manifolds.pairwise import has_batched_curvature


class GeodesicAttention(nn.Module):
    r"""Multi-head attention whose weights fall with the distance between query and key on a manifold.

    .. math:: o_i = \sum_j W_{ij} v_j,\quad W_{ij} \propto (d(q_i, k_j)^2 + \varepsilon)^{-p}

    A drop-in for ``nn.MultiheadAttention(..., batch_first=True)``: constructor, forward, masks (**True blocks**),
    returns and the names and shapes of the weights are its own, so its ``state_dict`` loads with ``strict=False``.
    Different are: a query whose keys are all masked gets 0 (there NaN); ``is_causal`` works without a mask;
    returned weights are those before dropout.

    Projected heads become points by :func:`horosphere.attention.into_manifold`: exp at the origin within
    ``max_radius``, the sphere by direction, a manifold of your own by its ``projx``. Under autocast the projections
    run in half, the geometry in float32.

    Args:
        embed_dim: size of the tokens, a multiple of num_heads; a head has n = embed_dim / num_heads numbers.
        num_heads: H.
        dropout: probability of dropping a weight after normalisation, in training.
        bias: biases in the projections.
        manifold: any geoopt.Manifold whose points are vectors. A curvature of its own for every head, learned:
            ``PoincareBall(kappa=torch.full((H,), -1.0), learnable=True)``.
        kdim, vdim: sizes of key and value tokens, embed_dim unless given.
        batch_first: only True.
        num_kv_heads: fewer key and value heads, a divisor of H (grouped queries).
        eps: > 0, in units of squared distance; one number or H. :meth:`calibrate_eps_` fits it to data.
        learn_eps: log eps is a Parameter (H,).
        power, weight, precision: as in :func:`horosphere.attention.geodesic_attention`; with ``weight="dot"`` there are
            no points, and the layer is nn.MultiheadAttention.
        max_radius: sqrt|kappa| times the largest distance of a point from the origin.
        rotary: base of rotary positions (10000.0 in the source), None for none; applied before the map.
        pattern: which keys a query sees, and how: "dense", all; "fixed", O(log N) of them
            (:func:`horosphere.attention.fixed_pattern_attention`); "landmark", all through learned anchors of every
            head (:func:`landmark_attention`); "summary", all through running summaries, causal only
            (:func:`summary_attention`); or one of your own (:func:`register_pattern`). Other patterns than "dense" take
            no attn_mask, no dropout and no other weight, and repeat the keys and values of grouped queries.
        sizes: of the pattern. n_max: of "fixed", the longest sequence there will be; must be given. landmarks: how
            many, 64 unless given. slots, chunk: of "summary", 64 unless given.

    Shapes: tokens (B, N, E) or unbatched (N, E).

    Raises:
        ValueError: sizes that do not divide, an unknown pattern, a size that it does not have, a product whose sizes do
            not fit a head.

    Sources: Vaswani et al. (2017), Attention is all you need; Su et al. (2021), RoFormer; Ainslie et al. (2023), GQA.
    """

    batch_first = True
    # nn.TransformerEncoderLayer reads this: False keeps it off its fused path, which would compute a softmax
    _qkv_same_embed_dim = False

    log_eps: Tensor
    in_proj_weight: Tensor | None
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    in_proj_bias: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        manifold: geoopt.Manifold,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        num_kv_heads: int | None = None,
        eps: float | Tensor = 1e-3,
        learn_eps: bool = True,
        power: float = 1.0,
        weight: str = "inverse",
        precision: str = "auto",
        max_radius: float = points.MAX_RADIUS,
        rotary: float | None = None,
        pattern: str = "dense",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: int | None,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if num_kv_heads <= 0 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        if not batch_first:
            raise ValueError("GeodesicAttention takes (batch, tokens, size) only: leave out batch_first=False")
        if pattern != "dense" and (dropout or weight != "inverse"):
            raise ValueError(
                f"pattern={pattern!r} has no dropout and no weight but 'inverse', got {dropout}, {weight!r}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
        if not max_radius > 0:
            raise ValueError(f"max_radius must be positive, got {max_radius}")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout, self.power, self.weight, self.precision = dropout, power, weight, precision
        self.max_radius, self.rotary, self.pattern = max_radius, rotary, pattern
        self.manifold = manifold
        size = points.stored_size(manifold, self.head_dim)
        self._slices = hooks.rotary_slices(manifold, self.head_dim)
        if rotary is not None and any((s.stop - s.start) % 2 for s in self._slices):
            lengths = [s.stop - s.start for s in self._slices]
            raise ValueError(f"rotary positions turn pairs of coordinates: the factors of a head have sizes {lengths}")

        self.scheme = make_pattern(pattern, Heads(manifold, size, num_heads, device, dtype), **sizes)
        kv_dim = num_kv_heads * self.head_dim
        packed = kv_dim == self.kdim == self.vdim == embed_dim
        shapes = {
            "in_proj_weight": (3 * embed_dim, embed_dim) if packed else None,
            "q_proj_weight": None if packed else (embed_dim, embed_dim),
            "k_proj_weight": None if packed else (kv_dim, self.kdim),
            "v_proj_weight": None if packed else (kv_dim, self.vdim),
            "in_proj_bias": (embed_dim + 2 * kv_dim,) if bias else None,
        }
        for name, shape in shapes.items():
            self.register_parameter(
                name, None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            )
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        log_eps = (
            torch.as_tensor(eps, device=eps.device if isinstance(eps, Tensor) else "cpu")
            .detach()
            .to(dtype or torch.get_default_dtype())
        )
        if log_eps.shape not in ((), (num_heads,)) or not bool((log_eps > 0).all()):
            raise ValueError(f"eps must be positive, one number or one for each of the {num_heads} heads, got {eps}")
        log_eps = log_eps.log().expand(num_heads).clone().to(self.out_proj.weight.device)
        if learn_eps and weight != "dot":  # a parameter that gets no gradient would stall data parallelism
            self.log_eps = BoundedParameter(log_eps)
        else:
            self.register_buffer("log_eps", log_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Projections as nn.MultiheadAttention draws them; eps, curvature and landmarks stay."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("proj_weight"):
                nn.init.xavier_uniform_(parameter)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    @property
    def eps(self) -> Tensor:
        """(H,), in units of squared distance."""
        return self.log_eps.exp()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: AttentionCache | None = None,
        max_radius: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; the arguments of nn.MultiheadAttention, a cache and a bound for every token.

        Args:
            query: (B, N, E) or (N, E). key: (B, M, kdim). value: (B, M, vdim).
            key_padding_mask: (B, M) or (M,), bool, **True = this key is ignored**; or float, added to the logarithm of
                the weights.
            need_weights: also return the weights, an N x M matrix for every head: ask for it on small inputs only.
            attn_mask: (N, M) or (B H, N, M), bool, **True = blocked**; or float, as above.
            average_attn_weights: return their mean over the heads.
            is_causal: key j is seen by query i for j <= i, on top of any mask.
            cache: of this layer (:meth:`new_cache`). query, key and value are then the same new tokens; they see
                those in the cache and, causally, each other. attn_mask must be None, key_padding_mask bool and that of
                the new tokens.
            max_radius: (B, N) or (N,) positive, in place of the layer's own, for queries and keys of the same tokens.

        Returns:
            (B, N, E) or (N, E), and the weights: (B, N, M), or (B, H, N, M) without averaging; None where they were not
            asked for or do not exist (other patterns, a cache).

        Raises:
            ValueError: shapes or masks that do not fit.
        """
        unbatched = query.dim() == 2
        self._check(query, key, value)
        q, k, v = self._heads(query, key, value, cache, max_radius)
        weights = None
        if cache is not None:
            self._check_cache(cache)
            key_mask = self._key_mask("a cache", attn_mask, key_padding_mask, k, unbatched)
            grouped = q.shape[1] != k.shape[1]
            out = cache.attend(
                q, k, v, self.manifold, key_mask=key_mask, enable_gqa=grouped, owner=self, **self._rule()
            )
        elif self.scheme is not None:
            key_mask = self._key_mask(f"pattern={self.pattern!r}", attn_mask, key_padding_mask, k, unbatched)
            out = self._through(self.scheme, q, k, v, key_mask, is_causal)
        else:
            mask = blocked_to_allowed(attn_mask, key_padding_mask, q.shape[:3], k.shape[-2], unbatched)
            out = self._attend(q, k, v, mask, is_causal)
            if need_weights:
                weights = self._weights(q, k, mask, is_causal)
                weights = weights.mean(1) if average_attn_weights else weights
        out = self.out_proj(out.transpose(1, 2).flatten(-2))
        if unbatched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out, weights

    def new_cache(self) -> AttentionCache:
        """An empty cache of the kind that this layer's pattern decodes with."""
        return DenseCache() if self.scheme is None else self.scheme.new_cache()

    @torch.no_grad()
    def calibrate_eps_(
        self,
        query: Tensor,
        key: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        fraction: float = 0.01,
        all_reduce: Callable[[Tensor], object] | None = None,
    ) -> GeodesicAttention:
        """Set eps of every head to ``fraction`` times the mean squared distance of its unmasked pairs.

        Args:
            query: tokens (B, N, E) that the layer will see; key: (B, M, kdim), those of query unless given.
            key_padding_mask, attn_mask, is_causal: as in :meth:`forward`; a float mask blocks where it is -inf.
            fraction: of the mean; 0.01 is what the inverse-distance source recommends.
            all_reduce: sums a tensor over the replicas in place; torch.distributed.all_reduce where a process
                group is initialised, unless given. All replicas call and get the same eps.

        Raises:
            ValueError: every pair of some head is masked, or all distances are 0; the layer has weight="dot".
        """
        if self.weight == "dot":
            raise ValueError('weight="dot" has no eps to calibrate')
        key = query if key is None else key
        unbatched = query.dim() == 2
        nothing = key.new_zeros(*key.shape[:-1], self.vdim)
        q, k, _ = self._heads(query, key, nothing, None)
        mask = blocked_to_allowed(attn_mask, key_padding_mask, q.shape[:3], k.shape[-2], unbatched)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask > -math.inf
        sums = squared_distance_sums(q, self._for_every_head(k), self.manifold, mask, is_causal)
        if all_reduce is not None:
            all_reduce(sums)
        elif torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        if not bool((sums > 0).all()):
            raise ValueError("calibrate_eps_ found no unmasked pair at a positive distance for some head")
        self.log_eps.copy_((fraction * sums[0] / sums[1]).log())
        return self

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        sizes = (self.embed_dim, self.kdim, self.vdim)
        shapes = [tuple(t.shape) for t in (query, key, value)]
        fits = query.dim() in (2, 3) and query.dim() == key.dim() == value.dim()
        if not fits or key.shape[:-1] != value.shape[:-1] or query.shape[:-2] != key.shape[:-2]:
            raise ValueError(
                "query, key and value must be (B, N, E), (B, M, kdim), (B, M, vdim), or all without the batch; "
                f"got shapes {shapes[0]}, {shapes[1]}, {shapes[2]}"
            )
        if any(shape[-1] != size for shape, size in zip(shapes, sizes, strict=True)):
            raise ValueError(
                f"the layer takes tokens of sizes E, kdim, vdim = {sizes}, got {tuple(s[-1] for s in shapes)}"
            )

    def _check_cache(self, cache: AttentionCache) -> None:
        served = getattr(cache, "patterns", (self.pattern,))
        if self.pattern not in served:
            raise ValueError(
                f"{type(cache).__name__} decodes layers with pattern {' or '.join(map(repr, served))}, this one has "
                f"{self.pattern!r}: take layer.new_cache()"
            )

    def _heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: AttentionCache | None,
        max_radius: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projected, split into heads and mapped: q (B, H, N, D), k (B, H', M, D), v (B, H', M, n)."""
        kv_dim = self.num_kv_heads * self.head_dim
        sizes = (self.embed_dim, kv_dim, kv_dim)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        else:
            weights = self.in_proj_weight.split(sizes)
        if query is key and key is value and self.in_proj_weight is not None:
            made = F.linear(query, self.in_proj_weight, self.in_proj_bias).split(sizes, -1)
        else:
            tokens = zip((query, key, value), weights, biases, strict=True)
            made = tuple(F.linear(x, w, b) for x, w, b in tokens)
        autocast = torch.is_autocast_enabled(query.device.type)
        q, k, v = (self._split(x.float() if autocast and x.dtype != torch.float64 else x) for x in made)
        if self.weight == "dot":
            return self._turned(q, cache), self._turned(k, cache), v
        if has_batched_curvature(resolve(self.manifold)[0]):  # which points of fewer key heads would not fit
            k, v = self._for_every_head(k), self._for_every_head(v)
        bound: float | Tensor = self.max_radius
        if max_radius is not None:
            if max_radius.shape != query.shape[:-1] or query.shape[:-1] != key.shape[:-1]:
                raise ValueError(
                    "max_radius is one number a token of query and key, which must be the same tokens; got "
                    f"{tuple(max_radius.shape)} for {tuple(query.shape)} and {tuple(key.shape)}"
                )
            bound = (max_radius if max_radius.dim() == 2 else max_radius.unsqueeze(0))[:, None, :, None]
        if q.shape != k.shape:
            q, k = (points.into_manifold(self._turned(x, cache), self.manifold, max_radius=bound) for x in (q, k))
            return q, k, v
        # one map of both: for short sequences it is mostly overhead
        bound = torch.cat((bound, bound)) if isinstance(bound, Tensor) else bound
        both = points.into_manifold(self._turned(torch.cat((q, k)), cache), self.manifold, max_radius=bound)
        q, k = both.chunk(2)
        return q, k, v

    def _split(self, x: Tensor) -> Tensor:
        """(B, N, heads n) or (N, heads n) -> (B, heads, N, n)."""
        x = x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
        return x.unsqueeze(0) if x.dim() == 3 else x

    def _turned(self, x: Tensor, cache: AttentionCache | None) -> Tensor:
        if self.rotary is None:
            return x
        return points.rotate(x, 0 if cache is None else cache.seen, self._slices, self.rotary)

    def _for_every_head(self, x: Tensor) -> Tensor:
        """Key or value heads (B, H', M, D), each repeated for the queries of its group."""
        group = self.num_heads // x.shape[1]
        return x if group == 1 else x.repeat_interleave(group, 1)

    def _rule(self) -> Rule:
        """The arguments of geodesic_attention that the layer decides."""
        return {"eps": self.eps, "power": self.power, "weight": self.weight, "precision": self.precision}

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """(B, H, N, n), of all keys."""
        return geodesic_attention(
            q,
            k,
            v,
            self.manifold,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            enable_gqa=q.shape[1] != k.shape[1],
            **self._rule(),
        )

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        if self.weight == "dot":
            mask = with_causal(mask, q.shape[-2], k.shape[-2], q.device) if is_causal else mask
            return dot_weights(q, self._for_every_head(k), mask)
        grouped = q.shape[1] != k.shape[1]
        return attention_weights(
            q, k, self.manifold, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped, **self._rule()
        )

    def _through(
        self, scheme: Pattern, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """(B, H, N, n) by the layer's pattern."""
        k, v = self._for_every_head(k), self._for_every_head(v)
        key_mask = None if key_mask is None else key_mask[:, None, :]
        given = {"key_mask": key_mask, "is_causal": is_causal, "eps": self.eps, "power": self.power}
        return scheme(q, k, v, self.manifold, **given)

    @staticmethod
    def _key_mask(
        what: str, attn_mask: Tensor | None, padding: Tensor | None, k: Tensor, unbatched: bool
    ) -> Tensor | None:
        """(B, M), True = takes part, where no other mask is possible."""
        if attn_mask is not None:
            raise ValueError(f"{what} takes no attn_mask, only key_padding_mask and causality")
        if padding is None:
            return None
        if padding.dtype != torch.bool:
            raise ValueError(f"with {what} key_padding_mask must be bool, True = ignored; got {padding.dtype}")
        allowed = blocked_to_allowed(None, padding, (k.shape[0], 1, 1), k.shape[-2], unbatched)
        return None if allowed is None else allowed[:, 0, 0]

    def extra_repr(self) -> str:
        grouped = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"{self.embed_dim}, {self.num_heads}{grouped}, pattern={self.pattern!r}, weight={self.weight!r}"

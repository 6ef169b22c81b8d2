"""A transformer block around an attention layer."""

from __future__ import annotations

from torch import Tensor, nn

from horosphere.attention.caches import AttentionCache
from horosphere.attention.multihead import GeodesicAttention


class TransformerBlock(nn.Module):
    """Pre-norm block: ``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``.

    Args:
        attention: the layer; the block takes its embed_dim.
        dim_feedforward: hidden size of the feed-forward part, 4 embed_dim unless given.
        dropout: probability, on both branches and inside the feed-forward part, in training.

    Source: Xiong et al. (2020), On layer normalization in the transformer architecture.
    """

    def __init__(self, attention: GeodesicAttention, dim_feedforward: int | None = None, dropout: float = 0.0):
        super().__init__()
        size = attention.embed_dim
        hidden = 4 * size if dim_feedforward is None else dim_feedforward
        device, dtype = attention.out_proj.weight.device, attention.out_proj.weight.dtype
        self.attention = attention
        self.attention_norm = nn.LayerNorm(size, device=device, dtype=dtype)
        self.feed_forward_norm = nn.LayerNorm(size, device=device, dtype=dtype)
        self.feed_forward = nn.Sequential(
            nn.Linear(size, hidden, device=device, dtype=dtype),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, size, device=device, dtype=dtype),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """x (B, N, E) or (N, E) -> the same shape; masks and cache as in :class:`GeodesicAttention`."""
        normed = self.attention_norm(x)
        attended, _ = self.attention(
            normed, normed, normed, key_padding_mask, False, attn_mask, is_causal=is_causal, cache=cache
        )
        x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))

    def new_cache(self) -> AttentionCache:
        """An empty cache for the block's attention."""
        return self.attention.new_cache()

"""Attention by geodesic distance: weights (d^2 + eps)^-p, on any manifold, in memory that grows like the sequence."""

from horosphere.attention.block import TransformerBlock
from horosphere.attention.cache import AttentionCache, DenseCache
from horosphere.attention.functional import attention_weights, geodesic_attention
from horosphere.attention.merge import merge
from horosphere.attention.multihead import GeodesicAttention
from horosphere.attention.points import into_manifold

__all__ = [
    "AttentionCache",
    "DenseCache",
    "GeodesicAttention",
    "TransformerBlock",
    "attention_weights",
    "geodesic_attention",
    "into_manifold",
    "merge",
]

"""Attention by geodesic distance: weights (d^2 + eps)^-p, on any manifold, in memory that grows like the sequence."""

from horosphere.attention.block import TransformerBlock
from horosphere.attention.caches import AttentionCache, DenseCache, TokenCache
from horosphere.attention.connection import PairRotation, curvature, torsion, transport
from horosphere.attention.flex import FlexInputs, flex_inputs
from horosphere.attention.functional import attention_weights, geodesic_attention
from horosphere.attention.merge import merge
from horosphere.attention.metric_attention import metric_attention
from horosphere.attention.multihead import GeodesicAttention
from horosphere.attention.nystrom import NystromAttention, choose_landmarks, nystrom_attention
from horosphere.attention.patterns import (
    Heads,
    Landmarks,
    LandmarkState,
    Pattern,
    Summaries,
    SummaryState,
    empty_landmarks,
    empty_summaries,
    fixed_pattern_attention,
    fixed_pattern_mask,
    landmark_attention,
    landmark_step,
    move_centroids,
    register_pattern,
    summary_attention,
    summary_step,
)
from horosphere.attention.points import into_manifold

__all__ = [
    "AttentionCache",
    "DenseCache",
    "FlexInputs",
    "GeodesicAttention",
    "Heads",
    "LandmarkState",
    "Landmarks",
    "NystromAttention",
    "PairRotation",
    "Pattern",
    "Summaries",
    "SummaryState",
    "TokenCache",
    "TransformerBlock",
    "attention_weights",
    "choose_landmarks",
    "curvature",
    "empty_landmarks",
    "empty_summaries",
    "fixed_pattern_attention",
    "fixed_pattern_mask",
    "flex_inputs",
    "geodesic_attention",
    "into_manifold",
    "landmark_attention",
    "landmark_step",
    "merge",
    "metric_attention",
    "move_centroids",
    "nystrom_attention",
    "register_pattern",
    "summary_attention",
    "summary_step",
    "torsion",
    "transport",
]

"""Patterns of attention: which keys a query sees. Each file has the function, the module for layers, and the cache."""

from horosphere.attention.patterns.base import Heads, Pattern, make_pattern, pattern_names, register_pattern, sizes_of
from horosphere.attention.patterns.fixed import fixed_pattern_attention, fixed_pattern_mask
from horosphere.attention.patterns.landmark import (
    Landmarks,
    LandmarkState,
    empty_landmarks,
    landmark_attention,
    landmark_step,
)
from horosphere.attention.patterns.summary import (
    Summaries,
    SummaryCache,
    SummaryState,
    empty_summaries,
    move_centroids,
    summary_attention,
    summary_step,
)

__all__ = [
    "Heads",
    "LandmarkState",
    "Landmarks",
    "Pattern",
    "Summaries",
    "SummaryCache",
    "SummaryState",
    "empty_landmarks",
    "empty_summaries",
    "fixed_pattern_attention",
    "fixed_pattern_mask",
    "landmark_attention",
    "landmark_step",
    "make_pattern",
    "move_centroids",
    "pattern_names",
    "register_pattern",
    "sizes_of",
    "summary_attention",
    "summary_step",
]

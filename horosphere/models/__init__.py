"""Whole models: blocks, language-model heads, and their files."""

from horosphere.models.fiber_bundle import FiberBundleBlock, FiberBundleConfig, FiberBundleLM, FiberBundleOutput
from horosphere.models.georesolver import GeoResolverConfig, GeoResolverLM, GeoResolverOutput
from horosphere.models.georesolver_block import GeoResolverBlock
from horosphere.models.hypergate import HyperGate

__all__ = [
    "FiberBundleBlock",
    "FiberBundleConfig",
    "FiberBundleLM",
    "FiberBundleOutput",
    "GeoResolverBlock",
    "GeoResolverConfig",
    "GeoResolverLM",
    "GeoResolverOutput",
    "HyperGate",
]

"""Whole models: blocks, language-model heads, and their files."""

from horosphere.models.georesolver import GeoResolverConfig, GeoResolverLM, GeoResolverOutput
from horosphere.models.georesolver_block import GeoResolverBlock
from horosphere.models.hypergate import HyperGate

__all__ = ["GeoResolverBlock", "GeoResolverConfig", "GeoResolverLM", "GeoResolverOutput", "HyperGate"]

"""What a model remembers: compressed key and value caches, and a pool of prototypes that grows with surprise."""

from horosphere.attention.patterns import SummaryCache
from horosphere.memory.caches import CompressedCache
from horosphere.memory.compression import HyperbolicCompressor
from horosphere.memory.genesis import DynamicMemory, Written
from horosphere.memory.packed import Packed

__all__ = ["CompressedCache", "DynamicMemory", "HyperbolicCompressor", "Packed", "SummaryCache", "Written"]

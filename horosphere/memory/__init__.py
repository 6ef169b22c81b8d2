"""What a model remembers: compressed key and value caches, and a pool of prototypes that grows with surprise."""

from horosphere.memory.compression import HyperbolicCompressor
from horosphere.memory.genesis import DynamicMemory, Written
from horosphere.memory.packed import Packed

__all__ = ["DynamicMemory", "HyperbolicCompressor", "Packed", "Written"]

"""What GeodesicAttention asks of a pattern, and the patterns that it knows by name.

A pattern of your own is one class in one file, and one call of :func:`register_pattern`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from horosphere.attention.caches import AttentionCache
from horosphere.manifolds._geoopt import geoopt


@dataclass(frozen=True)
class Heads:
    """What a pattern may know of the layer it is made for.

    Attributes:
        manifold: of the points of queries and keys.
        size: numbers of a point.
        count: heads of the queries.
        device, dtype: of the layer's parameters.
    """

    manifold: geoopt.Manifold
    size: int
    count: int
    device: torch.device | str | None
    dtype: torch.dtype | None


class Pattern(nn.Module, ABC):
    """Which keys a query of :class:`GeodesicAttention` sees, how, and the cache that decodes it.

    A subclass has

    - ``name``: what ``GeodesicAttention(pattern=...)`` calls it;
    - ``sizes``: the further arguments of the layer that it takes, with their defaults, None for one that must be given;
    - a constructor that takes :class:`Heads` and these sizes by name, and refuses what it cannot use;
    - :meth:`forward` and :meth:`new_cache`.
    """

    name: ClassVar[str]
    sizes: ClassVar[dict[str, int | None]] = {}

    def __init__(self, heads: Heads, **sizes: int):
        super().__init__()

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        manifold: geoopt.Manifold,
        *,
        key_mask: Tensor | None,
        is_causal: bool,
        eps: Tensor,
        power: float,
    ) -> Tensor:
        """Attend: (B, H, N, Dv).

        Args:
            query: points (B, H, N, D). key: points (B, H, M, D). value: (B, H, M, Dv); grouped heads are repeated.
            manifold: the layer's.
            key_mask: bool, broadcasts to (B, H, M), True = takes part.
            is_causal: query i sees keys j <= i only.
            eps, power: of the weights; eps (H,).
        """

    @abstractmethod
    def new_cache(self) -> AttentionCache:
        """An empty cache whose steps add up to the causal forward; see :class:`TokenCache`."""


Registered = TypeVar("Registered", bound=type[Pattern])
PATTERNS: dict[str, type[Pattern]] = {}


def register_pattern(pattern: Registered) -> Registered:
    """Make ``GeodesicAttention(pattern=pattern.name)`` know a pattern; also a decorator.

    Raises:
        TypeError: no subclass of :class:`Pattern`, or one that leaves an abstract method, ``name`` or a size that its
            constructor does not take.
        ValueError: another pattern has the name.
    """
    given: object = pattern
    if not (isinstance(given, type) and issubclass(given, Pattern)):
        raise TypeError(f"register_pattern takes a subclass of Pattern, got {pattern!r}")
    missing = sorted(pattern.__abstractmethods__)
    if not hasattr(pattern, "name"):
        missing.append("name")
    if missing:
        raise TypeError(f"{pattern.__name__} lacks {', '.join(missing)}")
    taken = inspect.signature(pattern.__init__).parameters
    unknown = [size for size in pattern.sizes if size not in taken]
    if unknown:
        raise TypeError(f"{pattern.__name__}.sizes has {unknown[0]!r}, which its constructor does not take")
    if pattern.name == "dense" or PATTERNS.setdefault(pattern.name, pattern) is not pattern:
        raise ValueError(f"there is a pattern {pattern.name!r} already: give {pattern.__name__} another name")
    return pattern


def pattern_names() -> tuple[str, ...]:
    """All that GeodesicAttention knows; "dense" is the layer's own: no pattern, every key."""
    return ("dense", *PATTERNS)


def sizes_of(name: str) -> dict[str, int | None]:
    """The sizes of a pattern and their defaults; ValueError where it is unknown."""
    if name not in pattern_names():
        raise ValueError(f"pattern must be one of {pattern_names()}, got {name!r}")
    return {} if name == "dense" else dict(PATTERNS[name].sizes)


def make_pattern(name: str, heads: Heads, **given: Any) -> Pattern | None:
    """The module of a pattern, None for "dense"; ``given``: the sizes that a caller chose, None for its default.

    Raises ValueError for an unknown pattern, a size that the pattern does not have, or one that is missing.
    """
    sizes = sizes_of(name)
    for size, number in given.items():
        if number is None:
            continue
        if size not in sizes:
            raise ValueError(f"{size}={number} means nothing with pattern={name!r}, whose sizes are {tuple(sizes)}")
        sizes[size] = number
    if name == "dense":
        return None
    chosen = {size: number for size, number in sizes.items() if number is not None}
    if len(chosen) < len(sizes):
        missing = next(size for size in sizes if size not in chosen)
        raise ValueError(f"pattern={name!r} needs {missing}, which has no default")
    return PATTERNS[name](heads, **chosen)

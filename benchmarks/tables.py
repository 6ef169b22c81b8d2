"""What a benchmark is made of: contenders that are timed in turn, and bars between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Bar", "Contender", "Table"]


class Contender(NamedTuple):
    """Something to time: called once a round, in every round or in the first ``rounds``."""

    name: str
    call: Callable[[], object]
    rounds: int | None = None


class Bar(NamedTuple):
    """The time of ``name`` is at most ``limit`` times that of ``baseline``."""

    name: str
    baseline: str
    limit: float


class Table(NamedTuple):
    """One side-by-side measurement.

    ``pairs`` is how many pairs a call trains on, 0 where it trains on none; ``notes`` are lines printed below the
    times, ``details`` goes into the JSON as it is, and ``held`` says whether the bars that are not of time hold.
    """

    title: str
    contenders: list[Contender]
    bars: list[Bar]
    pairs: int = 0
    notes: tuple[str, ...] = ()
    details: tuple[dict, ...] = ()
    held: bool = True

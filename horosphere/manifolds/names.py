"""Names that spell a space: the words and patterns that :func:`.registry.manifold_by_name` reads."""

from __future__ import annotations

import re

__all__ = ["WORDS", "factors_of_name", "normal", "what_it_spells"]

WORDS = ("euclidean", "poincare", "lorentz", "sphere", "stereographic")

_FACTOR = re.compile(r"(?:([EHS])([1-9]\d*)|\(([EHS])([1-9]\d*)\)\^([1-9]\d*))")


def normal(name: object) -> str:
    """A name in lower case without blanks, and nothing in the place of one of another type."""
    return "".join(name.split()).lower() if isinstance(name, str) else ""


def factors_of_name(name: object) -> list[tuple[str, int]]:
    """("H", 2), ("H", 2), ("E", 3) for "(H2)^2xE3"; ValueError with what was read, if anything, for anything else."""
    found: list[tuple[str, int]] = []
    for piece in re.split(r"[x×*]", normal(name)):
        match = _FACTOR.fullmatch(piece.upper())
        if match is None:
            read = "x".join(letter + str(size) for letter, size in found)
            raise ValueError(f"read {read}, then stopped at {piece.upper()!r}" if found else "")
        letter, size, inner, inner_size, power = match.groups()
        found += [(letter or inner, int(size or inner_size))] * int(power or 1)
    return found


def what_it_spells(name: str) -> str | None:
    """What a name means to the library itself, in words; None for one that is free."""
    if normal(name) in WORDS:
        return f"the space {normal(name)}"
    try:
        factors = factors_of_name(name)
    except ValueError:
        return None
    return "the space " + " x ".join(letter + str(dimension) for letter, dimension in factors)

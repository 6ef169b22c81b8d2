"""WordNet's mammals, shipped under Princeton's licence (WORDNET-LICENSE.txt), and a reader of the whole of WordNet."""

from pathlib import Path

from horosphere.data.wordnet import wordnet_hypernyms

__all__ = ["mammals", "mammals_closure", "path", "wordnet_hypernyms"]

_FILES = ("mammals.tsv", "mammals_closure_1180.tsv", "WORDNET-LICENSE.txt")


def path(name: str) -> Path:
    """Path of a shipped file.

    Args:
        name: ``"mammals.tsv"`` (1,182 direct hypernym pairs), ``"mammals_closure_1180.tsv"`` (the 6,540 pairs of
            the transitive closure used in the literature) or ``"WORDNET-LICENSE.txt"``.

    Raises:
        ValueError: for any other name.
    """
    if name not in _FILES:
        raise ValueError(f"name must be one of {', '.join(_FILES)}, got {name!r}")
    return Path(__file__).with_name(name)


def mammals() -> list[tuple[str, str]]:
    """The 1,182 direct (child, parent) pairs of the mammals in WordNet 3.0: a tree with one edge more.

    Source: G. A. Miller, WordNet: a lexical database for English, 1995; see WORDNET-LICENSE.txt.
    """
    return _pairs("mammals.tsv")


def mammals_closure() -> list[tuple[str, str]]:
    """The 6,540 (descendant, ancestor) pairs over 1,180 mammals on which published embeddings are scored.

    It is the transitive closure of `mammals` without two pairs that the original filter dropped.
    Source: M. Nickel and D. Kiela, Poincare embeddings for learning hierarchical representations, 2017.
    """
    return _pairs("mammals_closure_1180.tsv")


def _pairs(name: str) -> list[tuple[str, str]]:
    lines = path(name).read_text(encoding="utf-8").splitlines()
    return [(child, parent) for child, parent in (line.split("\t") for line in lines)]

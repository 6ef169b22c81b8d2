"""A reader of WordNet's database files: the hypernym graph of its nouns or verbs."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["wordnet_hypernyms"]

_LETTER = {"noun": "n", "verb": "v"}


def wordnet_hypernyms(
    folder: str | os.PathLike, part_of_speech: str = "noun", *, closure: bool = False, instances: bool = True
) -> list[tuple[str, str]]:
    """The (synset, hypernym) pairs of a WordNet database: an edge says "is a kind of" or "is an instance of".

    A synset is named by its first word, part of speech and the number of that word's sense, as by NLTK: ``dog.n.01``.
    WordNet 3.0 has 82,115 nouns, 84,427 direct pairs and 743,241 in the transitive closure.

    Args:
        folder: where ``data.noun`` and ``index.noun`` (``data.verb`` ...) lie: the folder ``dict`` of Princeton's
            archive, or /usr/share/wordnet once Debian's package ``wordnet-base`` is installed.
        part_of_speech: "noun" or "verb", the two that have hypernyms.
        closure: every (synset, ancestor), nearest ancestors first, instead of the direct pairs.
        instances: follow ``@i`` (Paris is an instance of a national capital) beside ``@``.

    Returns:
        Pairs in the order of the file, each once; a synset is not its own ancestor, even on a cycle.

    Raises:
        ValueError: for another part of speech; for a line that is not of the format, naming it.
        FileNotFoundError: naming the missing file.

    Source: the format is wndb(5WN) of G. A. Miller, WordNet: a lexical database for English, 1995.
    """
    if part_of_speech not in _LETTER:
        raise ValueError(f'part_of_speech must be "noun" or "verb" (others have no hypernyms), got {part_of_speech!r}')
    senses = _senses(_lines(folder, f"index.{part_of_speech}"), _LETTER[part_of_speech])
    symbols = ("@", "@i") if instances else ("@",)
    names: dict[str, str] = {}
    above: dict[str, list[str]] = {}
    for where, line in _lines(folder, f"data.{part_of_speech}"):
        try:
            fields = line.split(" | ", 1)[0].split()
            offset, word = fields[0], fields[4].lower()
            first = 4 + 2 * int(fields[3], 16)  # pairs of a word and its identifier
            count = int(fields[first])
            pointers = fields[first + 1 : first + 1 + 4 * count]
            if len(pointers) != 4 * count:
                raise ValueError
            names[offset] = f"{word}.{_LETTER[part_of_speech]}.{senses[word, offset]:02d}"
        except (ValueError, IndexError):
            raise ValueError(f"{where}: not a line of a WordNet 3.0 data file") from None
        except KeyError:
            raise ValueError(f"{where}: {word!r} has no sense {offset} in index.{part_of_speech}") from None
        above[offset] = list(
            dict.fromkeys(pointers[i + 1] for i in range(0, len(pointers), 4) if pointers[i] in symbols)
        )
    for offset, parents in above.items():
        for parent in parents:
            if parent not in names:
                raise ValueError(f"{names[offset]} points to {parent}, which data.{part_of_speech} does not hold")
    reach = _ancestors if closure else dict.__getitem__
    return [(names[offset], names[parent]) for offset in above for parent in reach(above, offset)]


def _ancestors(above: dict[str, list[str]], start: str) -> list[str]:
    found = dict.fromkeys(above[start])
    queue = list(found)
    for synset in queue:
        for parent in above[synset]:
            if parent not in found:
                found[parent] = None
                queue.append(parent)
    found.pop(start, None)
    return list(found)


def _senses(lines: Iterable[tuple[str, str]], letter: str) -> dict[tuple[str, str], int]:
    """(word, offset of a synset) -> number of the word's sense."""
    senses = {}
    for where, line in lines:
        fields = line.split()
        try:
            if fields[1] != letter:
                raise ValueError
            offsets = fields[-int(fields[2]) :]
        except (ValueError, IndexError):
            raise ValueError(f"{where}: not a line of a WordNet 3.0 index file") from None
        for number, offset in enumerate(offsets, start=1):
            senses[fields[0], offset] = number
    return senses


def _lines(folder: str | os.PathLike, name: str) -> Iterator[tuple[str, str]]:
    """(place, line) of a file; lines of the licence at its head start with blanks."""
    path = Path(folder) / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: folder must hold WordNet's database files (Debian: apt install wordnet-base, "
            "folder /usr/share/wordnet)"
        )
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.startswith("  ") and line.strip():
                yield f"{path}, line {number}", line

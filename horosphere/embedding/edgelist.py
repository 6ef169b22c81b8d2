"""A strict reader of edge-list files: a line that is not understood is an error that names it."""

import csv
import gzip
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

__all__ = ["PossibleHeader", "read_edge_list"]

_GZIP = b"\x1f\x8b"

_HEADER_NAMES = (
    {"source", "target"},
    {"src", "dst"},
    {"from", "to"},
    {"child", "parent"},
    {"hyponym", "hypernym"},
    {"head", "tail"},
    {"id1", "id2"},
    {"node1", "node2"},
    {"u", "v"},
)


class PossibleHeader(ValueError):
    """Line 1 may name the columns: the reader has to be told.

    Attributes:
        found: what was found, without what to do about it.
    """

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(f"{found}; {advice}")
        self.found = found


def read_edge_list(path: str | os.PathLike, *, header: bool | None = None) -> list[tuple]:
    """Read the pairs (source, target) or triples (source, target, weight) of a text file.

    Columns are separated by tabs, commas or white space, whichever fits the *content* best (the file's name plays no
    part). Labels are the strings between the separators without surrounding blanks: "NA", "null", "nan" and "None"
    are labels like any other. Double quotes protect a separator as in CSV. A line that starts with ``#`` is a
    comment; empty lines are skipped; nothing else is.

    Args:
        path: a UTF-8 text file, as it is or compressed by gzip (told by its first bytes).
        header: True: line 1 names the columns and is left out; False: line 1 is an edge; None (default): an error if
            line 1 may name the columns: usual names such as child and parent, names where all other labels are
            numbers, one usual name twice, or two labels that stand alone where every other line shares one with
            another.

    Returns:
        The edges in the order of the file, as tuples of 2 (str, str) or 3 (str, str, float).

    Raises:
        ValueError: naming the file, the line and its content: an empty file, a number of columns other than 2 or 3
            or different from line to line, an empty label, a weight that is not a finite positive number, text that
            is not UTF-8, a damaged gzip file. `PossibleHeader`, a ValueError, where ``header`` has to be said.
        OSError: if the file cannot be read; FileNotFoundError: if there is none.
    """
    path = Path(path)
    lines = _lines(path)
    if header:
        lines = lines[1:]
    if not lines:
        raise ValueError(
            f"{path}: no edges in this file; expected lines 'source<TAB>target' or with a third column, the weight"
        )
    parse = _parser(lines)
    rows = []
    for number, line in lines:
        columns = parse(line)
        if isinstance(columns, str):
            raise ValueError(_message(path, number, line, columns))
        rows.append(columns)
    if header is None and (reason := _header(rows)):
        raise PossibleHeader(
            _message(path, *lines[0], f"looks like a header ({reason}{_named_twice(rows[0])})"),
            "in place of the path give horosphere.embedding.read_edge_list(path, header=True) to leave it out, or "
            "header=False to keep it as an edge",
        )
    width = len(rows[0])
    edges: list[tuple] = []
    for (number, line), columns in zip(lines, rows, strict=True):
        problem = _problem(columns, width)
        if problem:
            raise ValueError(_message(path, number, line, problem))
        edges.append((columns[0], columns[1]) if width == 2 else (columns[0], columns[1], float(columns[2])))
    return edges


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines that carry edges, with their numbers (from 1)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: {error.strerror}") from None
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is a damaged gzip file: {error}") from None
    data = data.removeprefix(b"\xef\xbb\xbf")
    lines = []
    # Only line ends: str.splitlines would also cut at form feeds and at separators inside labels.
    for number, raw in enumerate(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: {raw[:80]!r} is not UTF-8 text ({error.reason})") from None
        if "\0" in line:
            raise ValueError(f"{path}, line {number}: holds a NUL character; this is not a text file")
        if line.strip() and not line.startswith("#"):
            lines.append((number, line))
    return lines


Columns = list[str] | str


def _separated(separator: str) -> Callable[[str], Columns]:
    def parse(line: str) -> Columns:
        if '"' not in line:
            return [column.strip() for column in line.split(separator)]
        try:
            return [
                column.strip()
                for column in next(csv.reader([line], delimiter=separator, skipinitialspace=True, strict=True))
            ]
        except csv.Error as error:
            return f"cannot be read as quoted columns ({error})"

    return parse


def _blank_separated(line: str) -> Columns:
    if '"' not in line:
        return line.split()
    columns = _separated(" ")(line.replace("\t", " ").strip())
    return columns if isinstance(columns, str) else [column for column in columns if column]


def _parser(lines: list[tuple[int, str]]) -> Callable[[str], Columns]:
    """The separator that makes two or three columns of the most lines; tabs before commas before blanks."""
    parsers = (_separated("\t"), _separated(","), _blank_separated)

    def fitting(parse: Callable[[str], Columns]) -> tuple[int, int]:
        widths = [len(columns) if isinstance(columns := parse(line), list) else 0 for _, line in lines]
        # The second number only chooses what to call the columns of a file that none fits.
        return max(widths.count(2), widths.count(3)), len(widths) - widths.count(1)

    return max(parsers, key=fitting)


def _header(rows: list[list[str]]) -> str | None:
    """Why the first row seems to hold names of columns, or None."""
    first, rest = rows[0], rows[1:]
    if len(first) == 3 and not _is_number(first[2]) and rest and len(rest[0]) == 3 and _is_number(rest[0][2]):
        return f"{first[2]!r} is not a weight"
    if len(first) in (2, 3):
        names = {first[0].lower(), first[1].lower()}
        others = {label for row in rest for label in row[:2]}
        usual = names in _HEADER_NAMES or (len(names) == 1 and any(names <= pair for pair in _HEADER_NAMES))
        if usual and others.isdisjoint(first[:2]):
            return "these are usual names of columns, and no other line has these labels"
        # One other line of numbers proves nothing: labels may be names here and numbers there.
        if len(rest) > 1 and not any(map(_is_number, first[:2])) and all(map(_is_number, others)):
            return "all other labels are numbers"
    if len(first) == 2 and len(rest) > 1 and _stands_alone(first, rest):
        return "every other line shares a label with another line, this one does not"
    return None


def _named_twice(names: list[str]) -> str:
    twice = next((name for name in names if names.count(name) > 1), None)
    return "" if twice is None else f", and two columns are called {twice!r}"


def _stands_alone(first: list[str], rest: list[list[str]]) -> bool:
    lines = Counter(label for row in rest for label in set(row[:2]))
    return lines.keys().isdisjoint(first) and all(any(lines[label] > 1 for label in row[:2]) for row in rest)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _problem(columns: list[str], width: int) -> str | None:
    if len(columns) not in (2, 3):
        found = "1 column" if len(columns) == 1 else f"{len(columns)} columns"
        return f"has {found}; expected 2 (source, target) or 3 (source, target, weight), by tabs, commas or blanks"
    if len(columns) != width:
        return f"has {len(columns)} columns where the first edge has {width}"
    if not columns[0] or not columns[1]:
        return "has an empty label"
    if width == 3:
        if not _is_number(columns[2]):
            return f"has {columns[2]!r} in its third column, which must be a weight (a finite positive number)"
        weight = float(columns[2])
        if not (math.isfinite(weight) and weight > 0):
            return f"has the weight {columns[2]}; a weight must be finite and positive"
    return None


def _message(path: Path, number: int, line: str, problem: str) -> str:
    return f"{path}, line {number}: {line[:120]!r} {problem}"

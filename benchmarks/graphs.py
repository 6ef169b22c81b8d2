"""The graphs that are not shipped: listed in graphs.toml, looked for by name, told by their checksums."""

import hashlib
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["LISTED", "WrongChecksum", "address", "find_graphs"]

LISTED = tomllib.loads(Path(__file__).with_name("graphs.toml").read_text(encoding="utf-8"))


class WrongChecksum(ValueError):
    """A file has the name of a listed graph and other bytes."""


def find_graphs(folders: Iterable[Path]) -> dict[str, Path]:
    """The listed graphs that lie in one of the folders, or below.

    Raises:
        NotADirectoryError: for a folder that is none.
        WrongChecksum: where a graph has its name, and no file of that name its checksum.
    """
    found: dict[str, list[Path]] = {}
    for top in folders:
        if not top.is_dir():
            raise NotADirectoryError(f"{top} is not a folder")
        for folder, _, names in os.walk(top):
            for name in LISTED.keys() & names:
                found.setdefault(name, []).append(Path(folder) / name)
    return {name: _right_one(name, found[name]) for name in LISTED if name in found}


def address(name: str) -> str:
    """Where a listed graph is to be had, what its source says of its licence, and what was done to the file."""
    entry = LISTED[name]
    made = f", made from it: {entry['made']}" if "made" in entry else ""
    return f"{entry['source']}{made} (licence: {entry['licence']})"


def _right_one(name: str, paths: list[Path]) -> Path:
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    if LISTED[name]["sha256"] not in sums:
        raise WrongChecksum(
            f"{paths[0]} has the SHA-256 {sums[0]}, and {name} of graphs.toml has {LISTED[name]['sha256']}; the right "
            f"one: {address(name)}"
        )
    return paths[sums.index(LISTED[name]["sha256"])]

"""Every figure of quality, against its bar where there is one: ``make evidence``.

    python benchmarks/quality.py [PART ...] [--graphs DIR ...]

Parts: mammals, cones and mds need nothing; nouns (WordNet's database files), trees, distortion and links need graphs
that are not shipped. Those of graphs.toml are looked for in the folders and below them; one that is absent is skipped
with its address, one that has another checksum ends the run. Without PART all run: an hour and a half on one thread.
Progress on stderr, tables on stdout; the same tables and all numbers in benchmarks/results/. Exits with 1 where a bar
is missed.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import cones
import distortion
import links
import mammals
import mds
import nouns
import torch
import trees
from graphs import WrongChecksum, address, find_graphs
from report import verdict

__all__ = ["PARTS", "command", "main"]

PARTS = {
    "mds": mds,
    "trees": trees,
    "mammals": mammals,
    "cones": cones,
    "links": links,
    "nouns": nouns,
    "distortion": distortion,
}
# Parts that make sense on some of their graphs.
PARTIAL = ("distortion", "links")


def main(names: Iterable[str], folders: Iterable[Path], resume: bool = False) -> int:
    found, outcomes = find_graphs(folders), []
    for name in names:
        part = PARTS[name]
        wanted = {graph: found[graph] for graph in part.GRAPHS if graph in found}
        absent = [graph for graph in part.GRAPHS if graph not in found]
        for graph in absent:
            print(f"{name}: skipped {graph}, which is in none of the folders of --graphs; it is at {address(graph)}")
        if absent and (name not in PARTIAL or not wanted):
            outcomes.append((name, None))
            continue
        run: Callable[[dict[str, Path]], bool] = part.main
        if name == "distortion":
            run = partial(run, resume=resume)
        outcomes.append((name, run(wanted)))
    print("\n".join(f"{name}: {'skipped' if passed is None else verdict(passed)}" for name, passed in outcomes))
    return int(any(passed is False for _, passed in outcomes))


def command(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--graphs", type=Path, action="append", default=[], help="a folder of graphs; can be repeated")
    parser.add_argument("--resume", action="store_true", help="distortion: keep the runs of an interrupted table")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    try:
        return main(options.parts or PARTS, options.graphs, options.resume)
    except (NotADirectoryError, WrongChecksum) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(command())

"""The combinatorial construction on a phylogenetic tree, with many digits and with float64's.

    python benchmarks/trees.py --graphs FOLDER

The folder holds phylo_tree.edges (344 nodes, "u v" a line). Its licence is not stated, so it is not shipped; it lies in
https://github.com/HazyResearch/hyperbolics under data/edges. Bars: in two dimensions and 1,600 bits MAP 1.0 and an
average distortion of at most 0.01, no factor taken out, in less than 10 s of building and scoring. The numbers go to
benchmarks/results/trees.json.
"""

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from horosphere.embedding import as_graph, distortion, embed_tree, read_edge_list

RESULTS = Path(__file__).parent / "results" / "trees.json"
FILE, ADDRESS = "phylo_tree.edges", "https://github.com/HazyResearch/hyperbolics/tree/master/data/edges"
BITS = 1600
FLOAT64_TAUS = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.4)
# MAP at least, average distortion at most, seconds at most.
BARS = (1.0, 0.01, 10.0)


def main(folder: Path) -> int:
    if not (folder / FILE).exists():
        print(f"skipped: {folder / FILE} is not there; get it from {ADDRESS}")
        return 0
    graph = as_graph(read_edge_list(folder / FILE))
    begun = time.perf_counter()
    tree = embed_tree(graph, precision=BITS)
    built = time.perf_counter()
    scores = tree.scores()
    scored = time.perf_counter()
    rows = [
        {
            "coordinates": f"{BITS} bits",
            "tau": tree.tau,
            "map": scores.map,
            "average_distortion": scores.average_distortion,
            "worst_distortion": scores.worst_distortion,
            "build_seconds": built - begun,
            "score_seconds": scored - built,
        }
    ]
    for tau in FLOAT64_TAUS:
        short = embed_tree(graph, tau=tau)
        rounded = distortion(short.graph, torch.from_numpy(short.to_float64()), short.manifold)
        rows.append(
            {
                "coordinates": "float64",
                "tau": tau,
                "map": rounded.map,
                "average_distortion": rounded.average_distortion,
                # infinite where two nodes round onto one point
                "worst_distortion": rounded.worst_distortion if math.isfinite(rounded.worst_distortion) else None,
            }
        )
    least, most, longest = BARS
    passed = scores.map >= least and scores.average_distortion <= most and scored - begun < longest
    table = Table(title=f"{FILE}: {scores.n_nodes} nodes, {scores.n_pairs:,} pairs, hyperbolic plane, all pairs scored")
    for column in ("coordinates", "tau", "MAP", "average distortion", "worst distortion", "build s", "score s"):
        table.add_column(column)
    for row in rows:
        seconds = [f"{row[key]:.2f}" if key in row else "" for key in ("build_seconds", "score_seconds")]
        table.add_row(
            row["coordinates"],
            f"{row['tau']:.4g}",
            f"{row['map']:.4f}",
            f"{row['average_distortion']:.4f}",
            "inf" if row["worst_distortion"] is None else f"{row['worst_distortion']:.3f}",
            *seconds,
        )
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{'pass' if passed else 'MISS'}: MAP {least}, average distortion {most}, {longest:.0f} s to build and score"
    )
    RESULTS.parent.mkdir(exist_ok=True)
    about = {"python": platform.python_version(), "torch": torch.__version__, "graph": FILE, "address": ADDRESS}
    RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, required=True, help="the folder of the edge lists")
    sys.exit(main(parser.parse_args().graphs))

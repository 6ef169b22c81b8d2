"""The combinatorial construction on a phylogenetic tree of 344 nodes, with many digits and with float64's."""

import math
import time
from pathlib import Path

import torch
from report import report, verdict
from rich.table import Table

from horosphere.embedding import as_graph, distortion, embed_tree

__all__ = ["GRAPHS", "main"]

FILE = "phylo_tree.edges"
GRAPHS = (FILE,)
BITS = 1600
FLOAT64_TAUS = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.4)
# In two dimensions and 1,600 bits: MAP at least, average distortion at most, no factor taken out, seconds of building
# and scoring at most.
BARS = (1.0, 0.01, 10.0)


def main(graphs: dict[str, Path]) -> bool:
    graph = as_graph(graphs[FILE])
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
    bars = f"{verdict(passed)}: MAP {least}, average distortion {most}, {longest:.0f} s to build and score"
    report("trees", table, bars, rows=rows)
    return passed

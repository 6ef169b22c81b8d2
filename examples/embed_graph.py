"""Embed a hierarchy, look at its nearest neighbours, draw it, save it and add a node.

Run ``python examples/embed_graph.py``; with ``--quick`` only a few epochs.
"""

import argparse
from pathlib import Path

import horosphere as hs


def main(quick: bool, folder: Path) -> None:
    pairs = hs.data.mammals()  # (child, parent); any networkx graph, matrix or edge-list file will do
    if quick:
        pairs = [(child, parent) for child, parent in pairs if "dog" in child or "dog" in parent]

    model = hs.embedding.GraphEmbedding(
        manifold=hs.PoincareBall(kappa=-1.0),
        n_components=2,
        closure=True,
        n_epochs=20 if quick else 300,
        random_state=0,
        verbose=True,
    ).fit(pairs)

    scores = model.evaluate(pairs)
    print(f"mean rank {scores.mean_rank:.2f}, MAP {scores.map:.3f} over {scores.n_edges} pairs")
    for label, distance in zip(*model.kneighbors("dog.n.01", k=5), strict=True):
        print(f"{distance:8.3f}  {label}")

    model.plot(folder / "mammals.png")
    model.save(folder / "mammals.safetensors")

    again = hs.embedding.GraphEmbedding.load(folder / "mammals.safetensors")
    again.partial_fit([("dogmatix.n.01", "dog.n.01")])  # the other points stay where they are
    print("dogmatix is nearest to", again.kneighbors("dogmatix.n.01", k=1).labels[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few epochs on a small part")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the files go")
    arguments = parser.parse_args()
    main(arguments.quick, arguments.folder)

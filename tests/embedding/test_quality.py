"""A short form of `make evidence` with a bound of its own, and the examples."""

import runpy
import sys
from pathlib import Path

import horosphere as hs

ROOT = Path(__file__).parents[2]


def test_a_short_run_on_carnivores_reaches_its_bound():
    pairs = hs.data.mammals_closure()
    below = {child for child, parent in pairs if parent == "carnivore.n.01"}
    pairs = [(child, parent) for child, parent in pairs if child in below and parent in below]
    scores = {}
    for manifold in ("poincare", "lorentz", "euclidean"):
        model = hs.embedding.GraphEmbedding(manifold, 5, n_epochs=40, learning_rate=0.3, random_state=0).fit(pairs)
        scores[manifold] = model.score(pairs)
    assert scores["poincare"] > 0.85 and scores["lorentz"] > 0.85
    assert scores["euclidean"] < scores["poincare"]


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["embed_graph.py", "--quick", "--folder", str(tmp_path)])
    runpy.run_path(str(ROOT / "examples" / "embed_graph.py"), run_name="__main__")
    assert "dogmatix is nearest to" in capsys.readouterr().out
    assert (tmp_path / "mammals.png").exists() and (tmp_path / "mammals.safetensors").exists()

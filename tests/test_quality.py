"""benchmarks/quality.py: graphs found by name and checksum, and each part in short, with a bound of its own."""

import hashlib
import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from horosphere.data import mammals, mammals_closure
from horosphere.embedding import as_graph

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def part(monkeypatch, tmp_path):
    """A module of benchmarks/ that writes its results elsewhere."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import report

    (tmp_path / "results").mkdir()
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    return __import__


@pytest.fixture
def listed(part, monkeypatch):
    """graphs.toml with one graph, "a.edges", of the content "0 1"."""
    graphs = part("graphs")
    entry = {
        "sha256": hashlib.sha256(b"0 1\n").hexdigest(),
        "licence": "none stated",
        "source": "https://example.org/a",
    }
    monkeypatch.setattr(graphs, "LISTED", {"a.edges": entry})
    return graphs


def below_carnivore(pairs):
    below = {child for child, parent in mammals_closure() if parent == "carnivore.n.01"}
    return [(child, parent) for child, parent in pairs if child in below and parent in below | {"carnivore.n.01"}]


def test_every_graph_of_a_part_is_listed_whole(part):
    listed = part("graphs").LISTED
    used = [name for module in part("quality").PARTS.values() for name in module.GRAPHS]
    assert sorted(used) == sorted(listed)
    for name, entry in listed.items():
        assert len(bytes.fromhex(entry["sha256"])) == 32, name
        assert entry["licence"] and "https://" in entry["source"], name


def test_a_graph_is_told_by_its_checksum_wherever_it_lies(listed, tmp_path):
    assert listed.find_graphs([tmp_path]) == {} == listed.find_graphs([])
    wrong, right = (tmp_path / "data" / name / "a.edges" for name in ("1", "2"))
    for path, text in ((wrong, "0 2\n"), (right, "0 1\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert listed.find_graphs([tmp_path]) == {"a.edges": right}
    right.unlink()
    with pytest.raises(listed.WrongChecksum, match=r"1.a\.edges has the SHA-256 .* none stated"):
        listed.find_graphs([tmp_path])
    with pytest.raises(NotADirectoryError, match="no_such"):
        listed.find_graphs([tmp_path / "no_such"])


def test_absent_graphs_are_skipped_with_their_address(part, capsys, monkeypatch):
    quality, links = part("quality"), part("links")
    assert quality.main(["trees", "links"], []) == 0
    out = capsys.readouterr().out
    for name in ("phylo_tree", "disease_lp", "airport", "cora"):
        assert f"skipped {name}" in out
    assert out.count("https://github.com/HazyResearch") == 4 and "trees: skipped\nlinks: skipped" in out
    # a part of several graphs takes those that are there, and a missed bar is exit code 1
    given = []
    monkeypatch.setattr(links, "main", lambda graphs: given.append(graphs) or False)
    monkeypatch.setattr(quality, "find_graphs", lambda _: {"cora.edges.tsv": Path("there")})
    assert quality.main(["links"], []) == 1
    assert given == [{"cora.edges.tsv": Path("there")}] and "links: MISS" in capsys.readouterr().out


def test_the_command_names_what_it_does_not_know(part, tmp_path, capsys):
    (tmp_path / "cora.edges.tsv").write_text("0 1\n")
    for arguments, message in ((["cats"], "no part is called 'cats'"), (["mds", "--graphs", str(tmp_path)], "SHA-256")):
        with pytest.raises(SystemExit) as ended:
            part("quality").command(arguments)
        assert ended.value.code == 2 and message in capsys.readouterr().err


def test_mammals_in_short(part, capsys):
    part("mammals").one({"manifold": "poincare", "n_components": 5, "n_epochs": 30, "random_state": 0})
    assert json.loads(capsys.readouterr().out)["map"] > 0.5


def test_nouns_in_short(part, tmp_path):
    nouns, graph = part("nouns"), as_graph(below_carnivore(mammals_closure()))
    points, curve = nouns.train(graph, nouns.Recipe(n_epochs=40, few_until=20), every=20)
    exact = nouns.scored(graph, points, np.unique(graph.edges[:, 0]))
    assert [point["epoch"] for point in curve] == [20, 40] and exact["map"] > 0.8 and exact["mean_rank"] < 3
    nouns.draw(curve, exact, tmp_path / "nouns.png")
    assert (tmp_path / "nouns.png").stat().st_size > 10_000


def test_trees_in_short(part, tmp_path):
    path = tmp_path / "phylo_tree.edges"
    nx.write_edgelist(nx.random_labeled_tree(60, seed=0), path, data=False)
    assert part("trees").main({path.name: path})
    rows = json.loads((tmp_path / "results" / "trees.json").read_text())["rows"]
    assert rows[0]["map"] == 1.0 and all(rows[0]["average_distortion"] < row["average_distortion"] for row in rows[1:])


def test_mds_in_short(part):
    mds = part("mds")
    assert max(mds.worst_error(dimension, 9, points=60) for dimension in mds.DIMENSIONS) < mds.BAR


def test_distortion_in_short_and_resumed(part, tmp_path, monkeypatch):
    distortion, path = part("distortion"), tmp_path / "ca-CSphd.edges"
    nx.write_edgelist(nx.random_labeled_tree(80, seed=0), path, data=False)
    for name, value in (("SPACES", ("E10", "(H5)^2")), ("STARTS", (10.0, 100.0)), ("SHORT", 10), ("LONG", 40)):
        monkeypatch.setattr(distortion, name, value)
    assert distortion.main({path.name: path})
    file = tmp_path / "results" / "distortion.json"
    runs = json.loads(file.read_text())["runs"]
    best: dict[str, float] = {}
    for run in runs:
        best[run["space"]] = min(run["average_distortion"], best.get(run["space"], 1.0))
    assert len(runs) == 6 and best["(H5)^2"] < 0.03 < 0.04 < best["E10"]
    file.write_text(json.dumps({"runs": runs[:5]}))
    distortion.main({path.name: path}, resume=True)
    again = json.loads(file.read_text())["runs"]
    assert again[:5] == runs[:5] and again[5]["average_distortion"] == runs[5]["average_distortion"]


def test_links_in_short(part, tmp_path, monkeypatch):
    links, path = part("links"), tmp_path / "cora.edges.tsv"
    nx.write_edgelist(nx.connected_caveman_graph(12, 8), path, data=False)
    monkeypatch.setattr(links, "RATES", (0.1, 0.3))
    assert links.main({path.name: path})
    for space in json.loads((tmp_path / "results" / "links.json").read_text())["graphs"][path.name]:
        assert min(run["test"] for run in space["runs"]) > 0.85


def test_cones_in_short(part):
    cones, direct = part("cones"), as_graph(below_carnivore(mammals()))
    train, parts = cones.split(direct, 0.5, np.random.default_rng(0))
    closure = {tuple(pair) for pair in direct.expanded(closure=True, undirected=False).edges.tolist()}
    seen = {tuple(pair) for pair in train.edges.tolist()}
    for pairs, truth in parts.values():
        assert [tuple(pair) in closure - seen for pair in pairs.tolist()] == truth.tolist() and 5 < (
            ~truth
        ).sum() / truth.sum()
    assert cones.held_out("cones", direct, 0.5, 0, {"n_epochs": 60, "n_negatives": 10}) > 0.6

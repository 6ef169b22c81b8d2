"""Files are whole or not there, the same bytes for the same content, and nothing else is taken for one."""

import enum
import errno
import hashlib
import json
import os
import resource
import subprocess
import sys
import warnings
from decimal import Decimal
from pathlib import Path, PurePosixPath

import networkx as nx
import numpy as np
import pytest
from safetensors.numpy import save_file

from horosphere.embedding import GraphEmbedding, io

EDGES = [("dog", "mammal"), ("cat", "mammal"), ("mammal", "animal"), ("fish", "animal"), ("NA", "fish")]


@pytest.fixture(scope="module")
def model():
    return GraphEmbedding(n_epochs=5, closure=True, random_state=0).fit(EDGES)


def test_round_trip(model, tmp_path):
    model.save(tmp_path / "m.safetensors")
    again = GraphEmbedding.load(tmp_path / "m.safetensors")
    assert np.array_equal(again.embedding_, model.embedding_) and again.embedding_.dtype == np.float64
    assert again.nodes_ == model.nodes_
    assert again.loss_curve_ == model.loss_curve_
    assert again.manifold_.config() == model.manifold_.config()
    mine, theirs = again.get_params(), model.get_params()
    assert {k: v for k, v in mine.items() if k != "manifold"} == {k: v for k, v in theirs.items() if k != "manifold"}
    assert again.evaluate(EDGES) == model.evaluate(EDGES)
    again.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["poincare", "lorentz", "euclidean", "sphere", "stereographic"])
def test_every_named_manifold_comes_back(name, tmp_path):
    model = GraphEmbedding(name, 3, n_epochs=2, random_state=0).fit(EDGES)
    model.save(tmp_path / "m")
    again = GraphEmbedding.load(tmp_path / "m")
    assert type(again.manifold_) is type(model.manifold_)
    assert again.kneighbors("dog", 3).labels == model.kneighbors("dog", 3).labels


def test_bytes_do_not_depend_on_the_process(model, tmp_path):
    model.save(tmp_path / "here")
    code = (
        "import sys; from horosphere.embedding import GraphEmbedding as G\n"
        f"G(n_epochs=5, closure=True, random_state=0).fit({EDGES!r}).save(sys.argv[1])"
    )
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    # nor on whether compiled code is made or read from the cache: this process makes it anew
    environment = {**os.environ, "PYTHONHASHSEED": other, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, tmp_path / "there"], check=True, env=environment)
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()


def test_labels_keep_their_type(tmp_path):
    labels = [0, 1, 2.5, True and "True", "naïve", "日本", "🙂", "NA", "null", "None", "nan", 7]
    model = GraphEmbedding(n_epochs=1, random_state=0).fit([(label, "root") for label in labels])
    model.save(tmp_path / "m")
    found = GraphEmbedding.load(tmp_path / "m").nodes_
    assert found == model.nodes_ and [type(x) for x in found] == [type(x) for x in model.nodes_]


def test_numpy_labels_are_saved_as_numbers(tmp_path):
    model = GraphEmbedding(n_epochs=1, random_state=0).fit([(np.int64(3), np.int64(4)), (np.int64(5), np.int64(4))])
    model.save(tmp_path / "m")
    assert GraphEmbedding.load(tmp_path / "m").nodes_ == [3, 4, 5]


def test_numpy_arguments_are_saved_as_numbers(tmp_path):
    model = GraphEmbedding(n_components=np.int64(3), n_epochs=np.int32(2), learning_rate=np.float32(0.1))
    model.set_params(random_state=np.int64(4), checkpoint=tmp_path / "c").fit(EDGES).save(tmp_path / "m")
    again = GraphEmbedding.load(tmp_path / "m")
    assert (again.n_components, again.n_epochs, again.random_state) == (3, 2, 4)


def test_tuples_and_paths_come_back(tmp_path):
    labels = [
        ("a", 1),
        (),
        (("b", 2.5), (True, Path("x"))),
        Path("x/y"),
        PurePosixPath("z"),
        "x/y",
        "\udc80",
        "('a', 1)",
    ]
    model = GraphEmbedding(n_epochs=1, random_state=0).fit([(label, "root") for label in labels])
    model.save(tmp_path / "m")
    again = GraphEmbedding.load(tmp_path / "m")
    assert again.nodes_ == model.nodes_ and again.kneighbors(("a", 1), 1) is not None
    grid = GraphEmbedding(n_epochs=1, random_state=0).fit(nx.grid_2d_graph(3, 2))
    grid.save(tmp_path / "m")
    assert GraphEmbedding.load(tmp_path / "m").nodes_ == grid.nodes_


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "label",
    [frozenset("a"), (1, frozenset("a")), b"a", Decimal(1), Colour.RED, float("inf"), np.datetime64("2020-01-01")],
)
def test_a_label_that_cannot_be_saved_is_named_before_training(tmp_path, label):
    seen = []
    model = GraphEmbedding(n_epochs=1, random_state=0, callbacks=[lambda _: seen.append(len(caught))])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit([(label, "b"), ("c", "b")])
    assert seen == [1] and "cannot be saved: use strings" in str(caught[0].message)
    with pytest.raises(TypeError, match="cannot be saved"):
        model.save(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def damage_foreign(path, good):
    save_file({"x": np.zeros(3)}, path)


def damage_truncated(path, good):
    path.write_bytes(good[:-5])


def damage_short(path, good):
    path.write_bytes(good[:20])


def damage_empty(path, good):
    path.write_bytes(b"")


def damage_text(path, good):
    path.write_text("dog\tmammal\n" * 10)


def damage_metadata(path, good):
    save_file({"embedding": np.zeros((3, 2))}, path, metadata={"horosphere": "{"})


def damage_kind(path, good):
    save_file({"x": np.zeros(3)}, path, metadata={"horosphere": json.dumps({"kind": "checkpoint", "version": 1})})


def damage_version(path, good):
    about = {"kind": "GraphEmbedding", "version": 99}
    save_file({"x": np.zeros(3)}, path, metadata={"horosphere": json.dumps(about)})


def damage_list(path, good):
    save_file({"x": np.zeros(3)}, path, metadata={"horosphere": "[]"})


def damage_nested(path, good):
    save_file({"x": np.zeros(3)}, path, metadata={"horosphere": "[" * 100_000})


def damage_version_text(path, good):
    about = {"kind": "GraphEmbedding", "version": "1"}
    save_file({"x": np.zeros(3)}, path, metadata={"horosphere": json.dumps(about)})


def damage_no_sum(path, good):
    about = {"kind": "GraphEmbedding", "version": 1, "sha256": ""}
    save_file({"x": np.zeros(3)}, path, metadata={"horosphere": json.dumps(about)})


def damage_missing(path, good):
    about = {"kind": "GraphEmbedding", "version": 1}
    save_file({"x": np.zeros(3)}, path, metadata={"horosphere": json.dumps(about)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_foreign, "not one written by horosphere"),
        (damage_truncated, "not a whole safetensors file"),
        (damage_short, "not a whole safetensors file"),
        (damage_empty, "not a whole safetensors file"),
        (damage_text, "not a whole safetensors file"),
        (damage_metadata, "damaged description"),
        (damage_kind, "holds a checkpoint, not a GraphEmbedding"),
        (damage_version, "version 99"),
        (damage_version_text, "version 1;"),
        (damage_list, "damaged description: it is a list"),
        (damage_nested, "damaged description"),
        (damage_no_sum, "no checksum"),
        (damage_missing, "not a whole saved GraphEmbedding"),
    ],
)
def test_what_is_no_saved_embedding_is_a_value_error(model, tmp_path, damage, message):
    path = tmp_path / "m.safetensors"
    model.save(path)
    damage(path, path.read_bytes())
    with pytest.raises(ValueError, match=message) as caught:
        GraphEmbedding.load(path)
    assert "m.safetensors" in str(caught.value)


def test_rows_that_are_not_there_are_found(model, tmp_path):
    model.save(tmp_path / "m")
    tensors, about = io.load_tensors(tmp_path / "m", "GraphEmbedding")
    for name, array in (
        ("embedding", tensors["embedding"][:-1]),
        ("embedding", tensors["embedding"].astype(np.int64)),
        ("embedding", tensors["embedding"][0]),
        ("edges", tensors["edges"] + 5),
        ("edges", tensors["edges"].astype(np.float64)),
        ("edges", tensors["edges"][:, :1]),
        ("weights", tensors["weights"][:-1]),
        ("loss", tensors["loss"].reshape(1, -1)),
    ):
        io.save_tensors(tmp_path / "bad", "GraphEmbedding", {**tensors, name: array}, about)
        with pytest.raises(ValueError, match="not a whole saved GraphEmbedding"):
            GraphEmbedding.load(tmp_path / "bad")


@pytest.mark.parametrize("name", ["embedding", "edges", "weights", "loss"])
def test_an_array_that_is_missing_is_named(model, tmp_path, name):
    model.save(tmp_path / "m")
    tensors, about = io.load_tensors(tmp_path / "m", "GraphEmbedding")
    io.save_tensors(tmp_path / "bad", "GraphEmbedding", {k: v for k, v in tensors.items() if k != name}, about)
    with pytest.raises(ValueError, match=f"bad is not a whole saved GraphEmbedding: {name!r} is missing"):
        GraphEmbedding.load(tmp_path / "bad")


@pytest.mark.parametrize("name", ["embedding", "loss", "digest"])
def test_a_checkpoint_without_a_part_is_refused(tmp_path, name):
    settings = {"n_epochs": 2, "random_state": 0, "checkpoint": tmp_path / "c"}
    GraphEmbedding(**settings).fit(EDGES)
    tensors, about = io.load_tensors(tmp_path / "c", "checkpoint")
    tensors.pop(name, None), about.pop(name, None)
    io.save_tensors(tmp_path / "c", "checkpoint", tensors, about)
    with pytest.raises(ValueError, match="missing" if name != "digest" else "belongs to another graph"):
        GraphEmbedding(**settings).fit(EDGES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parameters", None),
        ("parameters", []),
        ("parameters", {"loss": 5}),
        ("parameters", {"unknown": 5}),
        ("parameters", {"n_epochs": -1}),
        ("dimension", "INFINITE"),
        ("dimension", None),
        ("self_loops", None),
        ("nodes", None),
        ("nodes", 5),
        ("nodes", [None] * 6),
        ("nodes", [[1]] * 6),
        ("nodes", [{"tuple": 3}] * 6),
        ("manifold", None),
        ("manifold", []),
        ("manifold", {"name": []}),
        ("manifold", {"name": "PoincareBall", "kappa": None}),
    ],
)
def test_a_description_of_something_else_is_a_value_error(model, tmp_path, name, value):
    model.save(tmp_path / "m")
    tensors, about = io.load_tensors(tmp_path / "m", "GraphEmbedding")
    path = tmp_path / "bad"
    io.save_tensors(path, "GraphEmbedding", tensors, {**about, name: value})
    if value == "INFINITE":  # 1e999 is JSON, and infinite as a float
        resum(path, b'\\"INFINITE\\"', b"1e999     ")
    with pytest.raises(ValueError, match="bad is not a whole saved GraphEmbedding"):
        GraphEmbedding.load(path)


def resum(path, old, new):
    """Change bytes of a file, one for one, and make its checksum again."""
    data = path.read_bytes()
    assert data.count(old) == 1
    data = data.replace(old, new + b" " * (len(old) - len(new)))
    at = data.index(b'sha256\\": \\"') + len(b'sha256\\": \\"')
    blank = data[:at] + b"0" * 64 + data[at + 64 :]
    path.write_bytes(data[:at] + hashlib.sha256(blank).hexdigest().encode() + data[at + 64 :])


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        GraphEmbedding.load(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        GraphEmbedding.load(tmp_path)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_whole(model, tmp_path, monkeypatch, call):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(io.os, call, full)
    with pytest.raises(OSError, match="No space left"):
        model.save(path)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"] and path.read_bytes() == b"old"


def test_a_real_size_limit_leaves_the_old_file_whole(model, tmp_path):
    model.save(tmp_path / "source")
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"old")
    code = (
        "import signal, sys; from horosphere.embedding import GraphEmbedding as G\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "G.load(sys.argv[1]).save(sys.argv[2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "source", path],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256)),
    )
    assert done.returncode == 1 and "File too large" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.safetensors", "source"]
    assert path.read_bytes() == b"old"


def test_a_link_stays_a_link_and_permissions_follow_the_umask(model, tmp_path):
    (tmp_path / "real").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    model.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and GraphEmbedding.load(tmp_path / "real").nodes_ == model.nodes_
    (tmp_path / "plain").write_bytes(b"")
    model.save(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode

"""The command line as a new user meets it: results, one-line errors, and a run that survives kill -9."""

import gzip
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import horosphere
from horosphere.cli import app

FIVE = "dog\tmammal\ncat\tmammal\nmammal\tanimal\nfish\tanimal\nNA\tfish\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("five.tsv").write_text(FIVE)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def embed(*arguments, edges="five.tsv"):
    return run("embed", edges, "--out", "five.safetensors", "--epochs", 30, *arguments)


def test_the_whole_way(here):
    done = embed("--dim", 2, "--closure", "--plot", "five.png")
    assert done.exit_code == 0, done.output
    assert re.search(r"MAP\W+\d\.\d{4}", done.stdout) and "transitive closure" in done.stdout
    assert "30/30" in done.stderr
    assert Path("five.png").read_bytes().startswith(b"\x89PNG")
    done = run("evaluate", "five.safetensors", "five.tsv", "--closure")
    assert done.exit_code == 0 and "8 (transitive closure)" in done.stdout
    assert "5 (pairs as given)" in run("evaluate", "five.safetensors", "five.tsv", "--no-closure").stdout
    done = run("nearest", "five.safetensors", "NA", "-k", 3)
    assert done.exit_code == 0 and len(re.findall(r"\d\.\d{3,}", done.stdout)) == 3
    assert run("plot", "five.safetensors", "again.svg").exit_code == 0 and Path("again.svg").exists()
    assert run("plot", "five.safetensors", "centred.svg", "--centre", "NA").exit_code == 0
    assert Path("centred.svg").read_bytes() != Path("again.svg").read_bytes()
    assert "'dg' is not in the embedding" in run("plot", "five.safetensors", "c.svg", "--centre", "dg").stderr


def test_the_commands_of_the_readme_run(here):
    text = (Path(__file__).parents[1] / "README.md").read_text().split("## Embed a graph")[1].split("```")[0]
    blocks = [
        re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    ]
    edges, commands = blocks
    Path("edges.tsv").write_text(edges)
    for command in commands.splitlines():
        program, *arguments = command.split()
        done = run(*arguments)
        assert program == "horosphere" and done.exit_code == 0, done.output
    assert len(edges.splitlines()) == 6 and "mammal" in done.stdout and Path("animals.png").exists()


def test_seeds_decide_the_bytes(here):
    contents = []
    for seed in (0, 0, 1):
        assert embed("--seed", seed, "--quiet").exit_code == 0
        contents.append(Path("five.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("options", [("--manifold", "lorentz"), ("--kappa", "-0.5"), ("--manifold", "euclidean")])
def test_manifolds(here, options):
    assert embed("--undirected", *options).exit_code == 0
    assert run("nearest", "five.safetensors", "dog").exit_code == 0


def test_a_picture_alone(here):
    assert run("embed", "five.tsv", "--plot", "p.png", "--dim", 2, "--epochs", 2).exit_code == 0
    assert sorted(path.name for path in here.iterdir()) == ["five.tsv", "p.png"]


def test_repeated_lines_are_counted(here):
    assert "repeated" not in embed().stdout
    Path("five.tsv").write_text(FIVE + "dog\tmammal\n" * 2 + "mammal\tdog\n" + "dog\tdog\n" * 2)
    assert re.search(r"repeated lines\W+2: the weights of each pair were added up", embed().stdout)
    done = embed("--loss", "distortion")
    assert re.search(r"repeated lines\W+2: of each pair the shortest length was kept", done.stdout)


def test_quiet_prints_nothing(here):
    done = embed("--quiet")
    assert done.exit_code == 0 and not done.output


def test_weights_and_numbers_and_header(here):
    Path("w.csv").write_text("source,target,weight\n1,2,0.5\n3,2,2\n4,3,1\n")
    assert "looks like a header" in embed(edges="w.csv").stderr
    assert embed("--header", edges="w.csv").exit_code == 0
    assert run("nearest", "five.safetensors", "3").exit_code == 0


def test_a_warning_is_one_line(here):
    Path("five.tsv").write_text(FIVE + "dog\tdog\n")
    done = embed()
    assert done.exit_code == 0 and "warning: left out 1 self-loop: " in done.stderr
    assert "UserWarning" not in done.stderr


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", (), "five.tsv: no edges in this file"),
        ("child\tparent\na\tb\n", (), "five.tsv, line 1: 'child\\tparent' looks like a header"),
        ("child,child\na,b\n", (), "looks like a header (these are usual names"),
        ("child,child\na,b\n", (), "and two columns are called 'child'"),
        ("a\tb\nc\n", (), "five.tsv, line 2: 'c' has 1 column"),
        ("a,b,c\n", (), "must be a weight"),
        ("a,b,1\nc,d,nan\n", (), "line 2: 'c,d,nan' has the weight nan"),
        ("a a\n", (), "no edges between different nodes (only 1 self-loops)"),
        (FIVE, ("--manifold", "torus"), "torus"),
        (FIVE, ("--loss", "distortion", "--manifold", "S2", "--init", "mds"), "init='mds' needs hyperbolic space"),
        (FIVE, ("--manifold", "euclidean", "--init", "tree"), "init='tree' needs hyperbolic space"),
        (FIVE, ("--kappa", "1"), "kappa"),
        (FIVE, ("--manifold", "euclidean", "--kappa", "-1"), "no curvature"),
        (FIVE, ("--plot", "p.abc"), "p.abc: the ending must name a picture format"),
        (FIVE, ("--plot", "nowhere/p.png"), "the folder of nowhere/p.png does not exist"),
        (FIVE, ("--checkpoint", "nowhere/c"), "the folder of nowhere/c does not exist"),
        (FIVE, ("--checkpoint", "five.safetensors"), "five.safetensors is both --out and --checkpoint: name two files"),
        (FIVE, ("--checkpoint", "./sub/../five.safetensors"), "is both --out and --checkpoint"),
        (FIVE, ("--checkpoint", "five.tsv"), "five.tsv is both the edge list and --checkpoint"),
        (FIVE, ("--plot", "five.tsv"), "five.tsv is both the edge list and --plot"),
        (FIVE, ("--plot", "p.png", "--checkpoint", "p.png"), "p.png is both --plot and --checkpoint"),
        (FIVE, ("--plot", "pipe.png"), "pipe.png is a device, a pipe or a socket"),
        (FIVE, ("--checkpoint", "pipe.png"), "pipe.png is a device, a pipe or a socket"),
        (FIVE, ("--checkpoint", "."), ". is a folder"),
        (
            "employee,manager\nann,bob\ncarl,bob\n",
            (),
            "leave it out with --header, or keep it as an edge with --no-header",
        ),
    ],
)
def test_a_mistake_is_one_clear_line(here, content, options, message):
    Path("five.tsv").write_text(content)
    os.mkfifo("pipe.png")
    done = embed("--quiet", *options)
    assert done.exit_code == 1
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]
    assert not Path("five.safetensors").exists()


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("five.tsv", "is both the edge list and --out"),
        ("p.png", "is both --out and --plot"),
        ("pipe", "is a device, a pipe or a socket"),
        ("sub", "is a folder"),
        ("x.csv", "must end in .safetensors, .st or nothing"),
    ],
)
def test_nothing_is_written_over_what_is_not_meant(here, name, message, link):
    Path("sub").mkdir()
    os.mkfifo("pipe")  # Not a device: code that fails this test would replace it.
    Path("p.png").write_bytes(b"old")
    out = "link.png" if link else name
    if link:
        Path("link.png").symlink_to(name)
    before = sorted(here.iterdir())
    done = run("embed", "five.tsv", "--out", out, "--plot", "p.png", "--epochs", 1, "--quiet")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert message in done.stderr or (link and name == "x.csv" and "must end in" in done.stderr)
    assert sorted(here.iterdir()) == before and Path("p.png").read_bytes() == b"old"
    assert Path("five.tsv").read_text() == FIVE and Path("pipe").is_fifo()


def test_a_picture_does_not_replace_its_embedding(here):
    assert run("embed", "five.tsv", "--out", "five", "--epochs", 2, "--quiet").exit_code == 0
    Path("five.png").symlink_to("five")
    done = run("plot", "five", "five.png")
    assert done.exit_code == 1 and "five.png is both the embedding and the picture" in done.stderr
    assert run("nearest", "five", "dog").exit_code == 0


@pytest.mark.parametrize("name", ["five", "five.st", "five.SafeTensors", "sub.d/five"])
def test_names_of_embeddings(here, name):
    Path("sub.d").mkdir()
    assert run("embed", "five.tsv", "--out", name, "--epochs", 1, "--quiet").exit_code == 0 and Path(name).is_file()


def test_a_compressed_edge_list(here):
    Path("five.tsv.gz").write_bytes(gzip.compress(FIVE.encode()))
    assert embed("--quiet", edges="five.tsv.gz").exit_code == 0
    compressed = Path("five.safetensors").read_bytes()
    assert embed("--quiet").exit_code == 0 and Path("five.safetensors").read_bytes() == compressed


def test_a_damaged_embedding_is_one_clear_line(here):
    assert embed("--quiet").exit_code == 0
    good = Path("five.safetensors").read_bytes()
    Path("five.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    Path("loop.safetensors").symlink_to("loop.safetensors")
    for name, message in (("five", "is damaged"), ("loop", "Too many levels of symbolic links")):
        done = run("nearest", f"{name}.safetensors", "dog")
        assert done.exit_code == 1 and done.stderr.startswith("error: ") and message in done.stderr
        assert done.stderr.count("\n") == 1


def test_mistakes_with_files_and_nodes(here):
    assert embed("--quiet").exit_code == 0
    Path("text.safetensors").write_text("no model")
    for arguments, message in [
        (("embed", "five.tsv"), "error: nothing to write"),
        (("embed", "none.tsv", "--out", "x"), "error: none.tsv: No such file or directory"),
        (("nearest", "five.safetensors", "dg"), "error: the node 'dg' is not in the embedding; similar: dog"),
        (
            ("nearest", "five.safetensors", "whale"),
            "error: the node 'whale' is not in the embedding; nodes_ lists its 6 labels: 'dog', 'mammal', 'cat', ...",
        ),
        (("nearest", "five.safetensors", "MAM"), "error: the node 'MAM' is not in the embedding; similar: mammal"),
        (("nearest", "five.safetensors", "dog", "-k", "0"), "error: k must be at least 1"),
        (("nearest", "five.safetensors", "dog", "-k", "6"), "error: k must be at most 5"),
        (("nearest", "text.safetensors", "dog"), "error: text.safetensors is not a whole safetensors file"),
        (("nearest", "none.safetensors", "dog"), "error: none.safetensors does not exist"),
        (("plot", "five.safetensors", "p.abc"), "error: p.abc: the ending"),
    ]:
        done = run(*arguments)
        assert done.exit_code == 1 and done.stderr.startswith(message) and done.stderr.count("\n") == 1
    Path("other.tsv").write_text("cow\tmammal\n")
    assert "1 of 2 nodes are not in the embedding: 'cow'" in run("evaluate", "five.safetensors", "other.tsv").stderr


def test_usage_errors_have_exit_code_two(here):
    assert run("embed").exit_code == 2
    assert run("embed", "five.tsv", "--out", "x", "--dim", "two").exit_code == 2
    for option in ("--dim", "--epochs", "--negatives", "--batch-size"):
        done = run("embed", "five.tsv", "--out", "x", option, "0")
        assert done.exit_code == 2 and option in done.stderr and not Path("x").exists()


def test_the_package_is_the_command():
    done = subprocess.run([sys.executable, "-m", "horosphere", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"horosphere {horosphere.__version__}\n"


def test_version_and_help():
    assert run("--version").stdout == f"horosphere {horosphere.__version__}\n"
    assert "embed" in run("--help").stdout


def test_kill_9_in_the_middle_then_again_gives_the_bytes_of_an_undisturbed_run(here):
    Path("tree.tsv").write_text("".join(f"n{i}\tn{(i - 1) // 2}\n" for i in range(1, 150)))
    arguments = ["embed", "tree.tsv", "--closure", "--dim", "3", "--epochs", "100", "--checkpoint-every", "1"]
    assert run(*arguments, "--out", "undisturbed", "--quiet").exit_code == 0

    kept = [sys.executable, "-m", "horosphere.cli", *arguments, "--out", "resumed", "--checkpoint", "state"]
    running = subprocess.Popen(kept, stderr=subprocess.PIPE, env={**os.environ, "TQDM_MININTERVAL": "0"})
    shown = b""
    while not re.search(rb" [1-6]\d/100", shown):  # the bar stands in the middle: epochs 10 to 69
        piece = running.stderr.read1(4096)
        assert piece, f"the run ended before it could be killed: {shown!r}"
        shown += piece
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    running.stderr.close()
    assert Path("state").exists() and not Path("resumed").exists()

    done = subprocess.run(kept, capture_output=True, text=True, check=True)
    assert "100/100" in done.stderr and " 1/100" not in done.stderr
    assert Path("resumed").read_bytes() == Path("undisturbed").read_bytes()
    assert not Path("state").exists()


def test_a_checkpoint_of_other_settings_is_refused(here):
    from horosphere.embedding import GraphEmbedding

    GraphEmbedding(n_epochs=2, checkpoint="state", random_state=0).fit("five.tsv")
    done = embed("--checkpoint", "state", "--quiet")
    assert done.exit_code == 1 and "belongs to another graph or to other settings" in done.stderr
    assert Path("state").exists()


def test_distances_in_a_product_with_learned_curvatures(here):
    Path("far.tsv").write_text("a b 1\nb c 2\nc d 1.5\nd a 1\n")
    done = embed("--loss", "distortion", "--manifold", "H2xS2", "--learn-curvature", edges="far.tsv")
    assert done.exit_code == 0, done.output
    assert re.search(r"average distortion\W+0\.\d{4}", done.stdout) and re.search(r"dimensions\W+4\b", done.stdout)
    again = run("evaluate", "five.safetensors", "far.tsv")
    assert again.exit_code == 0 and again.stdout == done.stdout
    done = embed("--loss", "distortion", "--metric", "precomputed", "--manifold", "E2", edges="far.tsv")
    assert done.exit_code == 0 and re.search(r"pairs\W+4\b", done.stdout) and "MAP" not in done.stdout
    assert embed("--loss", "distortion", "--manifold", "H2", "--init", "mds", edges="far.tsv").exit_code == 0
    assert "unknown manifold 'H2xQ3'" in embed("--manifold", "H2xQ3").stderr
    assert 'loss must be "cones", "distortion" or "ranking"' in embed("--loss", "stress").stderr

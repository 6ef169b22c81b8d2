"""The command line: ``horosphere embed | evaluate | nearest | plot``."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Embed graphs and hierarchies in hyperbolic and other curved spaces, and look at the result.",
)

Edges = Annotated[
    Path,
    typer.Argument(
        help="Edge list: two columns (child, parent), or three with a weight; tabs, commas or blanks; gzip."
    ),
]
Model = Annotated[Path, typer.Argument(help="A file written by 'horosphere embed'.")]
# Of a safetensors file.
_ENDINGS = (".safetensors", ".st", "")
Header = Annotated[
    bool | None, typer.Option("--header/--no-header", help="Line 1 of the edge list names the columns / is an edge.")
]


@app.command()
def embed(
    edges: Edges,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the embedding: name.safetensors.", show_default=False)
    ] = None,
    manifold: Annotated[
        str,
        typer.Option(
            help="poincare, lorentz, euclidean, sphere, stereographic, or factors: H10, H5xS5, (H2)^5. "
            "Manifolds of your own are for Python."
        ),
    ] = "poincare",
    kappa: Annotated[
        float | None, typer.Option(help="Signed sectional curvature; default: the manifold's own.", show_default=False)
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(min=1, help="Dimension of the space; default: what --manifold says, else 5.", show_default=False),
    ] = None,
    loss: Annotated[
        str,
        typer.Option(help="ranking (neighbours before all others), distortion (path lengths) or cones (entailment)."),
    ] = "ranking",
    metric: Annotated[
        str, typer.Option(help="Of the distortion loss: shortest_path, or precomputed where edges are distances.")
    ] = "shortest_path",
    learn_curvature: Annotated[
        bool, typer.Option("--learn-curvature", help="Let the curvatures move with the points.")
    ] = False,
    closure: Annotated[bool, typer.Option("--closure", help="Add the transitive closure of the pairs.")] = False,
    undirected: Annotated[bool, typer.Option("--undirected", help="Let each pair count in both directions.")] = False,
    init: Annotated[
        str, typer.Option(help="Where the points start: random, mds or tree (hyperbolic spaces).")
    ] = "random",
    plot: Annotated[
        Path | None, typer.Option(help="Also draw a picture here (png, svg or pdf).", show_default=False)
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the pairs; default: 300, distortion 60.", show_default=False)
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Falls linearly to 0; default: 0.1 or 30 / epochs per pair, distortion 0.01 of the squared mean.",
            show_default=False,
        ),
    ] = None,
    negatives: Annotated[int, typer.Option(min=1, help="Nodes drawn against each pair.")] = 50,
    batch_size: Annotated[int, typer.Option(min=1, help="Pairs a step of the torch engine.")] = 200,
    jobs: Annotated[
        int, typer.Option(help="Threads; with more than 1 no two runs are equal to the last bit. -1: all cores.")
    ] = 1,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Keep the state of the run here: the same command goes on where it was interrupted, to the same "
            "bytes. Removed once the results are written.",
            show_default=False,
        ),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Epochs between two writes of the checkpoint.")] = 10,
    seed: Annotated[int, typer.Option(help="Fixes every random draw.")] = 0,
    header: Header = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar and no tables.")] = False,
) -> None:
    """Embed the graph of an edge list and print how well distances give it back."""
    with _clear_errors():
        from horosphere.embedding import GraphEmbedding, as_graph, as_lengths
        from horosphere.embedding.losses import loss_by_name
        from horosphere.embedding.plot import check_ending
        from horosphere.manifolds import dimension_of_name

        if out is None and plot is None:
            raise ValueError("nothing to write: name a file with --out, a picture with --plot, or both")
        # What would fail after the training is looked at before it.
        _check_targets({"--out": out, "--plot": plot, "--checkpoint": checkpoint}, {"the edge list": edges})
        if out is not None and out.suffix.lower() not in _ENDINGS:
            raise ValueError(f"--out {out}: the file is safetensors; its name must end in .safetensors, .st or nothing")
        if plot is not None:
            check_ending(plot)
        pairs = _read(edges, header)
        of_lengths = loss_by_name(loss).of_lengths
        graph = as_lengths(pairs, metric) if of_lengths else as_graph(pairs)
        model = GraphEmbedding(
            manifold if kappa is None else _manifold(manifold, kappa),
            dim or dimension_of_name(manifold) or 5,
            loss=loss,
            metric=metric,
            learn_curvature=learn_curvature,
            closure=closure,
            undirected=undirected,
            init=init,
            n_epochs=epochs,
            learning_rate=learning_rate,
            n_negatives=negatives,
            batch_size=batch_size,
            n_jobs=jobs,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            verbose=not quiet,
            random_state=seed,
        ).fit(graph)
        if out is not None:
            model.save(out)
        if plot is not None:
            model.plot(plot)
        if not quiet:
            _print_scores(model, model.evaluate(graph), _repeated(pairs, of_lengths))
        if checkpoint is not None:
            checkpoint.unlink(missing_ok=True)


@app.command()
def evaluate(
    file: Model,
    edges: Edges,
    closure: Annotated[
        bool | None,
        typer.Option("--closure/--no-closure", help="Score the transitive closure; default: as it was trained."),
    ] = None,
    undirected: Annotated[
        bool | None,
        typer.Option("--undirected/--directed", help="Let each pair count both ways; default: as it was trained."),
    ] = None,
    header: Header = None,
) -> None:
    """Score an embedding against an edge list: mean rank and MAP, or distortion, as it was trained."""
    with _clear_errors():
        from horosphere.embedding import GraphEmbedding

        model = GraphEmbedding.load(file)
        if closure is not None:
            model.set_params(closure=closure)
        if undirected is not None:
            model.set_params(undirected=undirected)
        _print_scores(model, model.evaluate(_read(edges, header)))


@app.command()
def nearest(
    file: Model,
    label: Annotated[str, typer.Argument(help="A node of the graph.")],
    k: Annotated[
        int | None,
        typer.Option("-k", help="How many neighbours; default: 10, or all other nodes.", show_default=False),
    ] = None,
) -> None:
    """List the nodes nearest to a node by geodesic distance."""
    with _clear_errors():
        from horosphere.embedding import GraphEmbedding

        model = GraphEmbedding.load(file)
        found = model.kneighbors(_as_in(model.nodes_, label), k)
        rows = [(str(name), f"{distance:.6g}") for name, distance in zip(*found, strict=True)]
        _print_table(f"nearest to {label}", ("node", "distance"), rows)


@app.command()
def plot(
    file: Model,
    out: Annotated[Path, typer.Argument(help="The picture (png, svg or pdf).")],
    centre: Annotated[
        str | None, typer.Option(help="The node in the middle; default: as the points lie.", show_default=False)
    ] = None,
) -> None:
    """Draw an embedding: the Poincare disk with geodesic edges, the plane, or a sphere."""
    with _clear_errors():
        from horosphere.embedding import GraphEmbedding

        _check_targets({"the picture": out}, {"the embedding": file})
        model = GraphEmbedding.load(file)
        model.plot(out, centre=None if centre is None else _as_in(model.nodes_, centre))


def _version(asked: bool) -> None:
    if asked:
        from horosphere import __version__

        print(f"horosphere {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@contextmanager
def _clear_errors() -> Iterator[None]:
    """A user's mistake is one line on stderr and exit code 1; warnings are lines without the place in our code."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        try:
            yield
        except (ValueError, TypeError, OSError) as error:
            message = str(error)
            if isinstance(error, OSError) and error.strerror:
                message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
            print(f"error: {message}", file=sys.stderr)
            raise typer.Exit(1) from None


def _check_targets(written: dict[str, Path | None], read: dict[str, Path]) -> None:
    """Each file that is written has a folder, is a regular file or new, and is no other file of this command."""
    from horosphere._files import checked_target

    taken = {path.resolve(): what for what, path in read.items()}
    for what, path in written.items():
        if path is None:
            continue
        target = checked_target(path)
        if not target.parent.is_dir():
            raise FileNotFoundError(f"the folder of {path} does not exist")
        if target in taken:
            raise ValueError(f"{path} is both {taken[target]} and {what}: name two files")
        taken[target] = what


def _read(edges: Path, header: bool | None) -> list[tuple]:
    from horosphere.embedding import read_edge_list
    from horosphere.embedding.edgelist import PossibleHeader

    try:
        return read_edge_list(edges, header=header)
    except PossibleHeader as error:
        raise ValueError(f"{error.found}; leave it out with --header, or keep it as an edge with --no-header") from None


def _manifold(name: str, kappa: float | None) -> Any:
    from horosphere.manifolds import manifold_by_name

    manifold = manifold_by_name(name)
    if kappa is None:
        return manifold
    if "kappa" not in signature(type(manifold)).parameters:
        raise ValueError(f"--kappa {kappa}: {name} space has no curvature to choose")
    return type(manifold)(kappa=kappa)


def _as_in(nodes: list, label: str) -> Any:
    """The node written so: the string itself, else the number it spells."""
    return next((node for node in nodes if node == label), next((node for node in nodes if str(node) == label), label))


def _repeated(pairs: list[tuple], of_lengths: bool) -> list[tuple[str, str]]:
    """A row that says how many lines give a pair again, and what became of them; nothing where none does."""
    ends = [(source, target) for source, target, *_ in pairs if source != target]
    count = len(ends) - len(set(ends))
    kept = "of each pair the shortest length was kept" if of_lengths else "the weights of each pair were added up"
    return [("repeated lines", f"{count:,}: {kept}")] if count else []


def _print_scores(model: Any, scores: Any, more: Iterable[tuple[str, str]] = ()) -> None:
    from horosphere.embedding import DistortionScores

    if isinstance(scores, DistortionScores):
        rows = [
            ("manifold", str(model.manifold_)),
            ("dimensions", f"{model.n_components_}"),
            ("nodes", f"{scores.n_nodes:,}"),
            ("pairs", f"{scores.n_pairs:,}"),
            ("average distortion", f"{scores.average_distortion:.4f}"),
            ("worst distortion", f"{scores.worst_distortion:.4g}"),
            *([] if scores.map is None else [("MAP", f"{scores.map:.4f}")]),
            *more,
        ]
        _print_table(None, ("distances", ""), rows)
        return
    pairs = "transitive closure" if model.closure else "pairs as given"
    rows = [
        ("manifold", f"{model.manifold_}, {model.n_components_} dimensions"),
        ("nodes", f"{scores.n_nodes:,}"),
        ("edges", f"{scores.n_edges:,} ({pairs}{', both directions' if model.undirected else ''})"),
        ("mean rank", f"{scores.mean_rank:.4f}"),
        ("MAP", f"{scores.map:.4f}"),
        ("candidates", f"{scores.n_candidates:,} a node, its other true neighbours left out"),
        *more,
    ]
    _print_table(None, ("reconstruction", ""), rows)


def _print_table(title: str | None, columns: tuple[str, str], rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # Text: a label such as "[red]" is a label, not markup.
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


if __name__ == "__main__":
    app()

"""GraphEmbedding: the scikit-learn estimator over the trainer."""

import copy
import difflib
import math
import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from joblib import effective_n_jobs
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from sklearn.utils import check_random_state

from horosphere.embedding.graph import Graph, as_graph
from horosphere.embedding.initialise import beside_neighbours, near_origin
from horosphere.embedding.io import check_labels, load_tensors, save_tensors
from horosphere.embedding.schedule import Schedule
from horosphere.embedding.scores import Scores, distances_to_all, reconstruction
from horosphere.embedding.trainer import EpochInfo, train
from horosphere.manifolds import manifold_by_name, manifold_from_config

__all__ = ["GraphEmbedding", "NearestNodes"]

_KIND = "GraphEmbedding"


class NearestNodes(NamedTuple):
    """The nearest nodes of a node, nearest first."""

    labels: list[Hashable]
    distances: np.ndarray


class GraphEmbedding(BaseEstimator):
    """Points on a manifold whose geodesic distances order each node's true neighbours before all other nodes.

    Minimises sum -log( exp(-d(u, v)) / (exp(-d(u, v)) + sum_k exp(-d(u, n_k))) ) over the pairs (u, v) of a graph by
    Riemannian SGD, with negatives n_k that are never neighbours of u. Works on every manifold of horosphere. On the
    CPU a seed fixes the result bit for bit (one version of torch, one kind of processor).

    Args:
        manifold: a manifold object, copied by `fit`, or one of the names of `horosphere.manifolds.manifold_by_name`.
        n_components: intrinsic dimension of the points.
        closure: train and score on the transitive closure of the pairs (child, parent).
        undirected: let each pair count in both directions.
        n_epochs: passes over the pairs.
        learning_rate: rate per pair (batch losses are summed), see `trainer.Schedule`.
        n_negatives: nodes drawn against each pair.
        batch_size: pairs a step of the torch engine.
        burn_in: first epochs, at a tenth of the rate; at most a tenth of `n_epochs` is used.
        engine: "numba" trains a pair at a time, in compiled code, on products of flat, hyperbolic and spherical spaces;
            "torch" trains batches on any manifold; "auto" takes numba where it can.
        n_jobs: threads of the numba engine (None: 1, -1: all cores). They share the points without locks: faster, but
            only one thread gives the same bits every time.
        callbacks: callables, each given an `EpochInfo` after every epoch.
        checkpoint: a file kept up to date during `fit`, from which an interrupted `fit` with the same arguments goes on
            to the same numbers; the finished file stays, and a `fit` that finds it returns its result.
        checkpoint_every: epochs between two writes of it.
        verbose: show a progress bar on stderr.
        random_state: int, numpy RandomState or None (a different result on each call).

    Attributes:
        embedding_: (n_nodes, stored numbers) float64; row i is the node ``nodes_[i]``.
        nodes_: the labels as they were given.
        manifold_: the manifold of the points.
        graph_: the given pairs, before closure and doubling.
        loss_curve_: mean loss per pair of each epoch.

    Source: M. Nickel and D. Kiela, Poincare embeddings for learning hierarchical representations, 2017.

    Example:
        >>> import horosphere as hs
        >>> pairs = [("dog", "mammal"), ("cat", "mammal"), ("cow", "mammal"), ("mammal", "animal"), ("fish", "animal")]
        >>> model = hs.embedding.GraphEmbedding(closure=True, n_epochs=20, random_state=0).fit(pairs)
        >>> model.embedding_.shape
        (6, 2)
    """

    def __init__(
        self,
        manifold: Any = "poincare",
        n_components: int = 2,
        *,
        closure: bool = False,
        undirected: bool = False,
        n_epochs: int = 300,
        learning_rate: float = 0.1,
        n_negatives: int = 50,
        batch_size: int = 200,
        burn_in: int = 10,
        engine: str = "auto",
        n_jobs: int | None = None,
        callbacks: Sequence[Callable[[EpochInfo], None]] | None = None,
        checkpoint: str | os.PathLike | None = None,
        checkpoint_every: int = 10,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self.manifold = manifold
        self.n_components = n_components
        self.closure = closure
        self.undirected = undirected
        self.n_epochs = n_epochs
        self.learning_rate = learning_rate
        self.n_negatives = n_negatives
        self.batch_size = batch_size
        self.burn_in = burn_in
        self.engine = engine
        self.n_jobs = n_jobs
        self.callbacks = callbacks
        self.checkpoint = checkpoint
        self.checkpoint_every = checkpoint_every
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, graph: Any, y: None = None) -> Self:
        """Embed a graph.

        Args:
            graph: anything `as_graph` reads.
            y: ignored, for scikit-learn.

        Raises:
            ValueError: for a graph without edges between different nodes, arguments out of range, an unknown manifold
                name, a manifold with a learnable curvature, a checkpoint of another run.
            TypeError: for a graph of an unknown kind.
        """
        manifold = self._validated()
        given = _with_edges(as_graph(graph))
        seed = self._seed()
        rng = np.random.default_rng([seed])
        start = near_origin(manifold, len(given.nodes), self.n_components, rng)
        points, losses = self._train(start, given, manifold, seed, self.checkpoint)
        self._set(points, given, manifold, losses)
        return self

    def partial_fit(self, graph: Any, y: None = None) -> Self:
        """Add the nodes and edges of another graph; the points that are there do not move.

        New nodes start beside their placed neighbours and are trained with all old rows fixed. Edges between old nodes
        are kept for scores, closure and negatives. Without an earlier `fit` this is `fit`.

        Raises:
            ValueError, TypeError: as `fit`.
        """
        if not hasattr(self, "embedding_"):
            return self.fit(graph)
        self._validated()
        manifold = self.manifold_
        added = _with_edges(as_graph(graph))
        joined = self.graph_.joined(added)
        n_old, n_new = len(self.nodes_), len(joined.nodes) - len(self.nodes_)
        losses: list[float] = []
        points = self.embedding_
        if n_new:
            seed = self._seed()
            # The number of old nodes sets the draws of one addition apart from those of the next.
            rng = np.random.default_rng([seed, n_old])
            fresh = near_origin(manifold, n_new, self.n_components, rng)
            start = torch.cat([torch.from_numpy(points.copy()), fresh])
            start = beside_neighbours(manifold, start, n_old, joined.edges, rng)
            points, losses = self._train(start, joined, manifold, seed, None, n_fixed=n_old)
        self._set(points, joined, manifold, losses)
        return self

    def fit_transform(self, graph: Any, y: None = None) -> np.ndarray:
        """`fit`, then the points, (n_nodes, stored numbers)."""
        return self.fit(graph).embedding_

    def evaluate(self, graph: Any) -> Scores:
        """Mean rank and mean average precision of a graph's pairs, exact over all nodes of the embedding.

        Args:
            graph: as in `fit`, with the same `closure` and `undirected`; its nodes must be in the embedding.

        Raises:
            ValueError: naming nodes that the embedding does not hold; for a graph without edges.
        """
        self._check_fitted()
        asked = _with_edges(as_graph(graph, closure=self.closure, undirected=self.undirected))
        unknown = [label for label in asked.nodes if label not in self._index]
        if unknown:
            shown = ", ".join(repr(label) for label in unknown[:5])
            raise ValueError(
                f"{len(unknown)} of {len(asked.nodes)} nodes are not in the embedding: {shown}"
                f"{', ...' if len(unknown) > 5 else ''}{self._similar(unknown[0])}"
            )
        where = np.asarray([self._index[label] for label in asked.nodes])
        graph = Graph(self.nodes_, where[asked.edges], asked.weights)
        return reconstruction(graph, torch.from_numpy(self.embedding_), self.manifold_)

    def score(self, graph: Any, y: None = None) -> float:
        """Mean average precision of a graph's pairs in [0, 1]; 1 is perfect. See `evaluate`."""
        return self.evaluate(graph).map

    def kneighbors(self, label: Hashable, k: int = 10) -> NearestNodes:
        """The `k` nodes nearest to a node by geodesic distance, itself left out; ties in the order of `nodes_`.

        Raises:
            ValueError: for a label that the embedding does not hold, or k < 1.
        """
        self._check_fitted()
        if label not in self._index:
            raise ValueError(f"the node {label!r} is not in the embedding{self._similar(label)}")
        _check_integer("k", k, 1)
        row = self._index[label]
        (distances,) = distances_to_all(self.manifold_, torch.from_numpy(self.embedding_), np.asarray([row]))
        distances[row] = np.inf
        order = np.argsort(distances, kind="stable")[: min(k, len(self.nodes_) - 1)]
        return NearestNodes([self.nodes_[i] for i in order], distances[order])

    def plot(self, path: str | os.PathLike | None = None, *, labels: bool = True):
        """A picture of the embedding: see `horosphere.embedding.plot.disk_figure`.

        Args:
            path: where to write it (the ending picks the format: png, svg, pdf); None: nowhere.
            labels: write the names of nodes where they fit.

        Returns:
            A `matplotlib.figure.Figure`.
        """
        self._check_fitted()
        from horosphere.embedding.plot import figure_of, write_figure

        figure = figure_of(self.embedding_, self.manifold_, self.graph_, labels=labels)
        if path is not None:
            write_figure(figure, path)
        return figure

    def save(self, path: str | os.PathLike) -> None:
        """Write the fitted model as one safetensors file, atomically; equal models give equal bytes.

        Raises:
            TypeError: for a label that is not a string, number or boolean, naming it.
            OSError: if the file cannot be written; an older file of that name is then still whole.
        """
        self._check_fitted()
        about = {
            "manifold": self.manifold_.config(),
            "nodes": check_labels(self.nodes_),
            "parameters": {name: _plain(getattr(self, name)) for name in _SAVED},
            "self_loops": self.graph_.self_loops,
        }
        tensors = {
            "embedding": self.embedding_,
            "edges": self.graph_.edges.astype(np.int32),
            "weights": self.graph_.weights,
            "loss": np.asarray(self.loss_curve_, dtype=np.float64),
        }
        save_tensors(path, _KIND, tensors, about)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read a model written by `save`.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is damaged or not a saved GraphEmbedding.
        """
        tensors, about = load_tensors(path, _KIND)
        try:
            manifold = manifold_from_config(about["manifold"])
            model = cls(manifold=manifold, **about["parameters"])
            edges = tensors["edges"].astype(np.int64)
            graph = Graph(about["nodes"], edges, tensors["weights"], about["self_loops"])
            embedding = tensors["embedding"]
            n = len(graph.nodes)
            if embedding.ndim != 2 or len(embedding) != n or len(graph.index) != n:
                raise ValueError(f"{n} labels for points of shape {embedding.shape}")
            if (edges.size and not (0 <= edges.min() and edges.max() < n)) or len(graph.weights) != len(edges):
                raise ValueError("edges name rows that are not there")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{Path(path)} is not a whole saved GraphEmbedding: {error}") from None
        model._set(embedding, graph, copy.deepcopy(manifold), tensors["loss"].tolist())
        return model

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "embedding_")

    def _train(self, start, given: Graph, manifold, seed: int, checkpoint, n_fixed: int = 0):
        pairs = given.expanded(closure=self.closure, undirected=self.undirected)
        # New nodes have a neighbourhood to start in: nothing to sort out first.
        burn_in = 0 if n_fixed else min(self.burn_in, self.n_epochs // 10)
        schedule = Schedule(
            int(self.n_epochs),
            float(self.learning_rate),
            int(self.n_negatives),
            int(self.batch_size),
            int(burn_in),
            seed,
        )
        callbacks = list(self.callbacks or ())
        bar = None
        if self.verbose:
            from tqdm import tqdm

            bar = tqdm(total=self.n_epochs, desc="embedding", unit="epoch")

            def show(info: EpochInfo) -> None:
                bar.update(info.epoch - bar.n)
                bar.set_postfix(loss=f"{info.loss:.4f}", refresh=False)

            callbacks.append(show)
        try:
            return train(
                start.numpy(),
                pairs,
                manifold,
                schedule,
                engine=self.engine,
                n_threads=effective_n_jobs(self.n_jobs),
                n_fixed=n_fixed,
                callbacks=callbacks,
                checkpoint_path=checkpoint,
                checkpoint_every=self.checkpoint_every,
            )
        finally:
            if bar is not None:
                bar.close()

    def _set(self, points: np.ndarray, given: Graph, manifold, losses: list[float]) -> None:
        self.embedding_ = points
        self.nodes_ = given.nodes
        self.graph_ = given
        self.manifold_ = manifold
        self.loss_curve_ = losses

    @property
    def _index(self) -> dict[Hashable, int]:
        return self.graph_.index

    def _seed(self) -> int:
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _check_fitted(self) -> None:
        if not hasattr(self, "embedding_"):
            raise NotFittedError("this GraphEmbedding is not fitted yet: call fit(graph) or GraphEmbedding.load(path)")

    def _similar(self, label: Hashable) -> str:
        names = {str(node): None for node in self.nodes_}
        close = difflib.get_close_matches(str(label), names, n=3, cutoff=0.6)
        return f"; similar: {', '.join(close)}" if close else ""

    def _validated(self):
        """Check the constructor's arguments; a copy of the manifold."""
        for name, least in (("n_components", 1), ("n_epochs", 1), ("n_negatives", 1), ("batch_size", 1)):
            _check_integer(name, getattr(self, name), least)
        _check_integer("burn_in", self.burn_in, 0)
        _check_integer("checkpoint_every", self.checkpoint_every, 1)
        if self.engine not in ("auto", "numba", "torch"):
            raise ValueError(f'engine must be "auto", "numba" or "torch", got {self.engine!r}')
        rate = self.learning_rate
        if not isinstance(rate, Real) or isinstance(rate, bool) or not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"learning_rate must be a finite number > 0, got {rate!r}")
        if isinstance(self.random_state, Integral) and self.random_state < 0:
            raise ValueError(f"random_state must be >= 0, got {self.random_state}")
        if self.checkpoint is not None and not isinstance(self.random_state, Integral):
            raise ValueError("checkpoint needs random_state to be an integer: otherwise each run draws other numbers")
        for callback in self.callbacks or ():
            if not callable(callback):
                raise TypeError(f"callbacks must be callables taking an EpochInfo, got {callback!r}")
        manifold = manifold_by_name(self.manifold) if isinstance(self.manifold, str) else copy.deepcopy(self.manifold)
        if not callable(getattr(manifold, "dist", None)) or not callable(getattr(manifold, "expmap", None)):
            raise TypeError(
                "manifold must be a manifold object such as horosphere.PoincareBall(kappa=-1.0) or a name, "
                f"got {manifold!r}"
            )
        if any(parameter.requires_grad for parameter in manifold.parameters()):
            raise ValueError(
                f"GraphEmbedding keeps the curvature fixed, and {manifold} has a learnable one: construct it with "
                "learnable=False"
            )
        return manifold


_SAVED = (
    "n_components",
    "closure",
    "undirected",
    "n_epochs",
    "learning_rate",
    "n_negatives",
    "batch_size",
    "burn_in",
    "engine",
    "n_jobs",
    "checkpoint_every",
    "random_state",
)


def _plain(value: Any) -> bool | int | float | str | None:
    """A constructor argument as JSON keeps it; a RandomState cannot be kept and becomes None."""
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, bool | int | float | str) else None


def _check_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _with_edges(graph: Graph) -> Graph:
    if graph.self_loops:
        warnings.warn(
            f"left out {graph.self_loops} self-loop{'s' * (graph.self_loops > 1)}: a node is at distance 0 from itself "
            "wherever it lies",
            UserWarning,
            stacklevel=3,
        )
    if not len(graph.edges):
        raise ValueError(
            "the graph has no edges between different nodes"
            + (f" (only {graph.self_loops} self-loops)" if graph.self_loops else "")
            + ": there is nothing to embed"
        )
    return graph

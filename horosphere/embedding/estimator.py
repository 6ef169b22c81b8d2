"""GraphEmbedding: the scikit-learn estimator over the trainer."""

import copy
import difflib
import inspect
import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError

from horosphere.embedding.curvature import fixed, learnable
from horosphere.embedding.fitting import first_points, fit_distances, fit_ranking, wanted_lengths
from horosphere.embedding.graph import Graph, as_graph
from horosphere.embedding.initialise import beside_neighbours, near_origin
from horosphere.embedding.io import from_json, load_tensors, save_tensors, to_json
from horosphere.embedding.lengths import as_lengths
from horosphere.embedding.losses import PairLoss, loss_by_name
from horosphere.embedding.scores import DistortionScores, Scores, distances_to_all, distortion, reconstruction
from horosphere.embedding.trainer import EpochInfo
from horosphere.embedding.validation import (
    check_arguments,
    check_integer,
    dimension_of,
    fitting_curvature,
    plain,
    seed_of,
    space_of,
    warn_if_too_small,
    with_edges,
)
from horosphere.manifolds import manifold_config, manifold_from_config

__all__ = ["GraphEmbedding", "NearestNodes"]

_KIND = "GraphEmbedding"
# What the arguments of other libraries are here.
_MEANT = {
    "kappa": "a curvature belongs to the manifold, as in manifold=horosphere.PoincareBall(kappa=-0.5)",
    "c": "a curvature belongs to the manifold, as in manifold=horosphere.PoincareBall(kappa=-c)",
    "curvature": "a curvature belongs to the manifold, as in manifold=horosphere.PoincareBall(kappa=-0.5)",
    "dim": "did you mean n_components?",
    "size": "did you mean n_components?",
    "epochs": "did you mean n_epochs?",
    "negative": "did you mean n_negatives?",
    "lr": "did you mean learning_rate?",
    "alpha": "did you mean learning_rate?",
    "seed": "did you mean random_state?",
    "workers": "did you mean n_jobs?",
}


class NearestNodes(NamedTuple):
    """The nearest nodes of a node, nearest first."""

    labels: list[Hashable]
    distances: np.ndarray


class GraphEmbedding(BaseEstimator):
    """Points on a manifold whose geodesic distances order each node's neighbours before all others, or equal lengths.

    Riemannian SGD on a loss. ``"ranking"``: sum -log( exp(-d(u, v)) / (exp(-d(u, v)) + sum_k exp(-d(u, n_k))) ) over
    the pairs (u, v) of a graph, with negatives n_k that are never neighbours of u; weights are multiplicities.
    ``"distortion"``: sum |d(u, v) / g(u, v) - 1| over all pairs of nodes, g the length of the shortest path between
    them or a given distance; weights are lengths, directions do not count. ``"cones"``, on the ball: a child lies in
    the entailment cone of its parent and outside those of strangers, see `cones`; the first half of the epochs ranks,
    unless ``init`` is an array.
    On the CPU a seed fixes the result bit for bit (one version of torch, one kind of processor).

    Args:
        manifold: a manifold object, copied by `fit`, or one of the names of `horosphere.manifolds.manifold_by_name`:
            "poincare", "lorentz", "H10", "H5xS5", "(H2)^5" and so on.
        n_components: intrinsic dimension of the points; None: what the name or the product says, else 2.
        loss: "ranking", "distortion", or "cones" for pairs (child, parent).
        metric: of the distortion loss: "shortest_path", or "precomputed" (as in scikit-learn) where `fit` is given the
            distances themselves: an (n, n) array, a sparse matrix or edges of the distances that are known.
        learn_curvature: let each curved part's kappa move with the points, see `curvature.CurvatureSteps` (distortion)
            or, for the ranking loss, the torch engine's optimizer. A manifold with learnable=True asks for it too. A
            manifold by name starts from a curvature that fits the longest length.
        closure: train and score on the transitive closure of the pairs (child, parent).
        undirected: let each pair count in both directions.
        init: where the points start: "random" (near the origin; distances: the wanted mean apart),
            "mds" (`hyperbolic_mds_start`), "tree" (`tree_start`), or an array (n_nodes, stored numbers).
        n_epochs: passes over the pairs; None: 300 of the ranking loss, 60 of the distortion loss.
        learning_rate: of the ranking loss: rate per pair (batch losses are summed), see `schedule.Schedule`; of the
            distortion loss: in units of the squared mean length, see `schedule.DistortionSchedule`. None: 0.01 of the
            distortion loss, else 0.1; shorter rankings by numba from a random start take 30 / n_epochs, at most 2.
        n_negatives: nodes drawn against each pair.
        batch_size: pairs a step of the torch engine.
        burn_in: first epochs, at a tenth of the rate; at most three tenths of `n_epochs` are used.
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
        manifold_: the manifold of the points; a learned curvature is a plain number there.
        n_components_: intrinsic dimension.
        graph_: the given pairs, before closure and doubling.
        loss_curve_: mean loss per pair of each epoch.

    Source: M. Nickel and D. Kiela, Poincare embeddings for learning hierarchical representations, 2017; A. Gu et al.,
    Learning mixed-curvature representations in product spaces, 2019.

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
        n_components: int | None = None,
        *,
        loss: str = "ranking",
        metric: str = "shortest_path",
        learn_curvature: bool = False,
        closure: bool = False,
        undirected: bool = False,
        init: Any = "random",
        n_epochs: int | None = None,
        learning_rate: float | None = None,
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
        self.loss = loss
        self.metric = metric
        self.learn_curvature = learn_curvature
        self.closure = closure
        self.undirected = undirected
        self.init = init
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

    def __new__(cls, *args: Any, **named: Any) -> Self:
        """TypeError for a name that there is none of, with the one that was meant."""
        known = inspect.signature(cls.__init__).parameters
        for name in named:
            if name not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
                hint = _MEANT.get(name) or (f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}")
                raise TypeError(f"{cls.__name__} has no argument {name!r}: {hint}")
        return super().__new__(cls)

    def fit(self, graph: Any, y: None = None) -> Self:
        """Embed a graph.

        Args:
            graph: anything `as_graph` reads; with ``metric="precomputed"`` anything `as_lengths` reads.
            y: ignored, for scikit-learn.

        Raises:
            ValueError: for a graph without edges between different nodes, arguments out of range, an unknown manifold
                name, a curvature to be learned where there is none, a checkpoint of another run.
            TypeError: for a graph of an unknown kind.
            DivergenceError: (a ValueError) at a rate that leads to numbers that are not finite; it holds the last good.
        """
        check_arguments(self)
        given, seed = self._read(graph), seed_of(self.random_state)
        dimension = dimension_of(self.manifold, self.n_components)
        rng = np.random.default_rng([seed])
        manifold, learn = space_of(self.manifold, self.learn_curvature)
        if loss_by_name(self.loss).of_lengths:
            lengths = wanted_lengths(given, self.metric)
            _, longest, mean = lengths.extent
            if learn:
                manifold = fixed(manifold)
                manifold = fitting_curvature(manifold, longest) if isinstance(self.manifold, str) else manifold
            else:
                warn_if_too_small(manifold, longest)
            start = first_points(self.init, given, manifold, dimension, rng, self.metric, mean)
            points, losses, manifold = fit_distances(
                self, start, given, lengths, manifold, seed, self.checkpoint, learn=learn
            )
        else:
            manifold = learnable(manifold) if self.learn_curvature else manifold
            start = first_points(self.init, given, manifold, dimension, rng, self.metric).detach()
            points, losses, manifold = fit_ranking(self, start, given, manifold, seed, self.checkpoint)
        self._set(points, given, manifold, losses, dimension)
        return self

    def partial_fit(self, graph: Any, y: None = None) -> Self:
        """Add the nodes and edges of another graph; the points that are there do not move.

        New nodes start beside their placed neighbours and are trained with all old rows, and the curvature, fixed.
        Edges between old nodes are kept for scores, closure, negatives and lengths. Without an earlier `fit` this is
        `fit`.

        Raises:
            ValueError, TypeError: as `fit`.
        """
        if not hasattr(self, "embedding_"):
            return self.fit(graph)
        check_arguments(self)
        manifold = self.manifold_
        added = self._read(graph)
        joined = self.graph_.joined(added, lengths=loss_by_name(self.loss).of_lengths)
        n_old, n_new = len(self.nodes_), len(joined.nodes) - len(self.nodes_)
        losses: list[float] = []
        points = self.embedding_
        if n_new:
            seed = seed_of(self.random_state)
            # The number of old nodes sets the draws of one addition apart from those of the next.
            rng = np.random.default_rng([seed, n_old])
            fresh = near_origin(manifold, n_new, self.n_components_, rng)
            start = torch.cat([torch.from_numpy(points.copy()), fresh])
            start = beside_neighbours(manifold, start, n_old, joined.edges, rng)
            if loss_by_name(self.loss).of_lengths:
                lengths = wanted_lengths(joined, self.metric, n_old)
                points, losses, _ = fit_distances(self, start, joined, lengths, manifold, seed, None, n_old)
            else:
                points, losses, _ = fit_ranking(self, start, joined, manifold, seed, None, n_fixed=n_old)
        self._set(points, joined, manifold, losses, self.n_components_)
        return self

    def fit_transform(self, graph: Any, y: None = None) -> np.ndarray:
        """`fit`, then the points, (n_nodes, stored numbers)."""
        return self.fit(graph).embedding_

    def evaluate(self, graph: Any) -> Scores | DistortionScores:
        """How well distances give a graph back, exact over all pairs.

        Mean rank and mean average precision of the graph's pairs among all nodes of the embedding, by distance or, of
        cones, by how far a node lies outside the others' cones; of a distortion model, average and worst distortion of
        the graph's lengths over the nodes of this graph.

        Args:
            graph: as in `fit`, with the same `closure`, `undirected` and `metric`; its nodes must be in the embedding.

        Raises:
            ValueError: naming nodes that the embedding does not hold; for a graph without edges.
        """
        self._check_fitted()
        asked = self._read(graph)
        unknown = [label for label in asked.nodes if label not in self.graph_.index]
        if unknown:
            shown = ", ".join(repr(label) for label in unknown[:5])
            raise ValueError(
                f"{len(unknown)} of {len(asked.nodes)} nodes are not in the embedding: {shown}"
                f"{', ...' if len(unknown) > 5 else ''}{self._similar(unknown[0])}"
            )
        where = np.asarray([self.graph_.index[label] for label in asked.nodes])
        points = torch.from_numpy(self.embedding_)
        loss = loss_by_name(self.loss)
        if not isinstance(loss, PairLoss):
            return distortion(asked, points[torch.from_numpy(where)], self.manifold_, metric=self.metric)
        asked = asked.expanded(closure=self.closure, undirected=self.undirected)
        known = Graph(self.nodes_, where[asked.edges], asked.weights)
        return reconstruction(known, points, self.manifold_, loss.to_all)

    def score(self, graph: Any, y: None = None) -> float:
        """The higher the better: mean average precision in [0, 1], or minus the average distortion. See `evaluate`.

        Pairs with a node that the embedding does not hold, as in a held-out part of a graph, count as not found: the
        precision of the others is multiplied by their share, with a warning. A distortion of such pairs there is not.

        Raises:
            ValueError, TypeError: as `evaluate`; of a distortion model where a node is not in the embedding.
        """
        self._check_fitted()
        asked, share = self._read(graph), 1.0
        if not loss_by_name(self.loss).of_lengths:
            known = np.asarray([label in self.graph_.index for label in asked.nodes])
            held = known[asked.edges].all(axis=1)
            share = float(held.mean())
            if share < 1:
                warnings.warn(
                    f"{len(held) - held.sum()} of {len(held)} pairs have a node that is not in the embedding: they "
                    "count as not found",
                    UserWarning,
                    stacklevel=2,
                )
            if share == 0:
                return 0.0
            graph = [(asked.nodes[u], asked.nodes[v]) for u, v in asked.edges[held].tolist()] if share < 1 else graph
        found = self.evaluate(graph)
        return found.map * share if isinstance(found, Scores) else -found.average_distortion

    def kneighbors(self, label: Hashable, k: int | None = None) -> NearestNodes:
        """The `k` nodes nearest to a node by geodesic distance, itself left out; ties in the order of `nodes_`.

        Args:
            label: one of `nodes_`.
            k: from 1 to n - 1, n the number of nodes; None: 10, or n - 1 where that is less.

        Raises:
            ValueError: for a label that the embedding does not hold; for k < 1 or, as in scikit-learn, k > n - 1.
        """
        self._check_fitted()
        if label not in self.graph_.index:
            raise ValueError(f"the node {label!r} is not in the embedding{self._similar(label)}")
        others = len(self.nodes_) - 1
        k = min(10, others) if k is None else k
        check_integer("k", k, 1)
        if k > others:
            raise ValueError(f"k must be at most {others}, the number of other nodes in the embedding, got {k}")
        row = self.graph_.index[label]
        (distances,) = distances_to_all(self.manifold_, torch.from_numpy(self.embedding_), np.asarray([row]))
        distances[row] = np.inf
        order = np.argsort(distances, kind="stable")[:k]
        return NearestNodes([self.nodes_[i] for i in order], distances[order])

    def plot(self, path: str | os.PathLike | None = None, *, labels: bool = True, centre: Hashable | None = None):
        """A picture of the embedding, a `matplotlib.figure.Figure`: see `horosphere.embedding.plot.figure_of`.

        Args:
            path: where to write it (the ending picks the format: png, svg, pdf); None: nowhere.
            labels: write the names of nodes where they fit.
            centre: the node that an isometry takes to the middle of the picture; None: as the points lie.

        Raises:
            ValueError: for a node that is not in the embedding; for a manifold without a picture.
        """
        self._check_fitted()
        if centre is not None and centre not in self.graph_.index:
            raise ValueError(f"the node {centre!r} is not in the embedding{self._similar(centre)}")
        from horosphere.embedding.plot import figure_of, write_figure

        figure = figure_of(
            self.embedding_,
            self.manifold_,
            self.graph_,
            labels=labels,
            centre=None if centre is None else self.graph_.index[centre],
        )
        if path is not None:
            write_figure(figure, path)
        return figure

    def save(self, path: str | os.PathLike) -> None:
        """Write the fitted model as one safetensors file, atomically; equal models give equal bytes.

        Raises:
            TypeError: for a label that is not a string, number, path or tuple of these, of which `fit` warns.
            ValueError: for the path of a device.
            OSError: if the file cannot be written; an older file of that name is then still whole.
        """
        self._check_fitted()
        about = {
            "manifold": manifold_config(self.manifold_),
            "nodes": to_json(self.nodes_),
            "parameters": {name: plain(getattr(self, name)) for name in _SAVED},
            "self_loops": self.graph_.self_loops,
            "dimension": self.n_components_,
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
        tensors, about = load_tensors(path, _KIND, {"embedding": 2, "edges": 2, "weights": 1, "loss": 1})
        try:
            manifold = manifold_from_config(about["manifold"])
            # A start that was an array is not kept.
            kept = {name: value for name, value in about["parameters"].items() if name != "init" or value is not None}
            model = cls(manifold=manifold, **kept)
            check_arguments(model)
            edges = tensors["edges"].astype(np.int64)
            graph = Graph(from_json(about["nodes"]), edges, tensors["weights"], int(about["self_loops"]))
            embedding, dimension = tensors["embedding"], int(about["dimension"])
            n = len(graph.nodes)
            if len(embedding) != n or len(graph.index) != n:
                raise ValueError(f"{n} labels for points of shape {embedding.shape}")
            if edges.shape != (len(graph.weights), 2) or (edges.size and not (0 <= edges.min() and edges.max() < n)):
                raise ValueError(
                    f"edges of shape {edges.shape} and {len(graph.weights)} weights, or rows that are not there"
                )
        except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{Path(path)} is not a whole saved GraphEmbedding: {error}") from None
        model._set(embedding, graph, copy.deepcopy(manifold), tensors["loss"].tolist(), dimension)
        return model

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "embedding_")

    def _read(self, graph: Any) -> Graph:
        return with_edges(as_lengths(graph, self.metric) if loss_by_name(self.loss).of_lengths else as_graph(graph))

    def _set(self, points: np.ndarray, given: Graph, manifold, losses: list[float], dimension: int) -> None:
        self.embedding_ = points
        self.nodes_ = given.nodes
        self.graph_ = given
        self.manifold_ = manifold
        self.n_components_ = dimension
        self.loss_curve_ = losses

    def _check_fitted(self) -> None:
        if not hasattr(self, "embedding_"):
            raise NotFittedError("this GraphEmbedding is not fitted yet: call fit(graph) or GraphEmbedding.load(path)")

    def _similar(self, label: Hashable) -> str:
        """What to do about a label that is not there: the end of an error's sentence."""
        names = {str(node): node for node in self.nodes_}
        if str(label) in names:  # written alike, of another type
            other = names[str(label)]
            return f", which holds the {type(other).__name__} {other!r}, not the {type(label).__name__}"
        wanted = str(label).lower()
        # "dog" is meant for "dog.n.01", however long the rest of the name is.
        close = [name for name in names if wanted and name.lower().startswith(wanted)][:3]
        close = close or difflib.get_close_matches(str(label), names, n=3, cutoff=0.6)
        if close:
            return f"; similar: {', '.join(close)}"
        shown = ", ".join(repr(node) for node in self.nodes_[:3])
        return f"; nodes_ lists its {len(self.nodes_):,} labels: {shown}{', ...' if len(self.nodes_) > 3 else ''}"


# What signatures and completions show is the constructor, not the check of its names.
GraphEmbedding.__signature__ = inspect.Signature(
    list(inspect.signature(GraphEmbedding.__init__).parameters.values())[1:]
)

_SAVED = (
    "n_components",
    "loss",
    "metric",
    "learn_curvature",
    "closure",
    "undirected",
    "init",
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

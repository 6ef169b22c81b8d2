"""From the arguments of an estimator to a run of the trainer."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from joblib import effective_n_jobs
from torch import Tensor

from horosphere.embedding.graph import Graph
from horosphere.embedding.initialise import ambient_dim, near_origin
from horosphere.embedding.lengths import Lengths, start_at_mean
from horosphere.embedding.losses import Loss, loss_by_name
from horosphere.embedding.mds import hyperbolic_curvature, hyperbolic_mds_start
from horosphere.embedding.schedule import DistortionSchedule, Schedule
from horosphere.embedding.trainer import EpochInfo, Run, engine_name, train
from horosphere.embedding.trees import tree_start

__all__ = ["first_points", "fit_distances", "fit_ranking", "wanted_lengths"]

# A point has about as far to go however many epochs there are for it: pairs taken one at a time bear a rate of
# 30 / n_epochs, up to this. Batches, whose steps are summed, do not.
LARGEST_RATE = 2.0
# The longest burn-in, of all epochs: what it sorts after that is worth less than what the rest would refine.
LONGEST_BURN_IN = 0.3


def first_points(
    init: Any, graph: Graph, manifold, dimension: int, rng: np.random.Generator, metric: str, mean: float | None = None
) -> Tensor:
    """Where the points start, (n_nodes, stored numbers) float64; ``mean``: the wanted mean distance, if there is one.

    Raises:
        ValueError: an array of another shape; "mds" or "tree" on a manifold that is not hyperbolic; "mds" where a pair
            has no distance.
    """
    if isinstance(init, str):
        if init == "tree":
            return tree_start(graph, manifold, dimension, rng)
        if init == "mds":
            hyperbolic_curvature(manifold, "mds")  # before the distances of all pairs are found
            distances = Lengths(graph, metric).rows(np.arange(len(graph.nodes)))
            if not np.isfinite(distances).all():
                raise ValueError('init="mds" needs a distance of every pair: some have none; take "random" or "tree"')
            return hyperbolic_mds_start(distances, manifold, dimension, rng)
        if mean is None:
            return near_origin(manifold, len(graph.nodes), dimension, rng)
        return start_at_mean(manifold, len(graph.nodes), dimension, mean, rng)
    points = torch.as_tensor(np.asarray(init, dtype=np.float64), device="cpu")
    shape = (len(graph.nodes), ambient_dim(manifold, dimension))
    if tuple(points.shape) != shape:
        raise ValueError(f"init must have the shape (n_nodes, stored numbers) = {shape}, got {tuple(points.shape)}")
    return manifold.projx(points)


def fit_ranking(
    model: Any, start: Tensor, given: Graph, manifold, seed: int, checkpoint, n_fixed: int = 0
) -> tuple[np.ndarray, list[float], Any]:
    """(points, losses, manifold) of a loss of pairs, see `trainer.train`."""
    loss = loss_by_name(model.loss)
    pairs = given.expanded(closure=model.closure, undirected=model.undirected)
    n_epochs, rate = _defaults(model, loss)
    # New nodes have a neighbourhood to start in: nothing to sort out first.
    burn_in = 0 if n_fixed else min(model.burn_in, LONGEST_BURN_IN * n_epochs)
    from_nothing = not n_fixed and isinstance(model.init, str) and model.init == "random"
    by_pairs = engine_name(model.engine, manifold, loss) == "numba"
    if model.learning_rate is None and from_nothing and by_pairs:
        rate = max(rate, min(rate * loss.n_epochs / n_epochs, LARGEST_RATE))
    # Of cones: points that were given are not ranked, nor drawn in, first.
    settled = bool(n_fixed) or not isinstance(model.init, str)
    schedule = Schedule(
        n_epochs, rate, int(model.n_negatives), int(model.batch_size), burn_in, seed, model.loss, settled
    )
    with _run(model, n_epochs, checkpoint, n_fixed) as run:
        return train(start.numpy(), pairs, manifold, schedule, run)


def fit_distances(
    model: Any,
    start: Tensor,
    given: Graph,
    lengths: Lengths,
    manifold,
    seed: int,
    checkpoint,
    n_fixed: int = 0,
    *,
    learn: bool = False,
) -> tuple[np.ndarray, list[float], Any]:
    """(points, losses, manifold) of the distortion loss, see `trainer.train`."""
    n_epochs, rate = _defaults(model, loss_by_name(model.loss))
    # A start that was chosen would be lost in the first throws of the stress.
    settled = (not isinstance(model.init, str) or model.init != "random",)
    schedule = DistortionSchedule(
        n_epochs, rate, int(model.batch_size), seed, model.metric, learn, *lengths.extent, *settled
    )
    with _run(model, n_epochs, checkpoint, n_fixed) as run:
        return train(start.numpy(), given, manifold, schedule, run, lengths=lengths)


def wanted_lengths(graph: Graph, metric: str, n_fixed: int = 0) -> Lengths:
    """`Lengths`, with a warning where a graph falls apart."""
    lengths = Lengths(graph, metric, n_fixed)
    if lengths.components > 1:
        warnings.warn(
            f"the graph falls into {lengths.components} components: pairs in different ones have no distance, are not "
            "trained on and not scored",
            UserWarning,
            stacklevel=3,
        )
    return lengths


def _defaults(model: Any, loss: Loss) -> tuple[int, float]:
    n_epochs, rate = model.n_epochs, model.learning_rate
    return int(loss.n_epochs if n_epochs is None else n_epochs), float(loss.learning_rate if rate is None else rate)


@contextmanager
def _run(model: Any, n_epochs: int, checkpoint, n_fixed: int) -> Iterator[Run]:
    """What the trainer is told whatever the loss; a progress bar while it runs."""
    callbacks = list(model.callbacks or ())
    bar = None
    if model.verbose:
        from tqdm import tqdm

        bar = tqdm(total=n_epochs, desc="embedding", unit="epoch")

        def show(info: EpochInfo) -> None:
            bar.update(info.epoch - bar.n)
            bar.set_postfix(loss=f"{info.loss:.4f}", refresh=False)

        callbacks.append(show)
    try:
        yield Run(
            engine=model.engine,
            n_threads=effective_n_jobs(model.n_jobs),
            n_fixed=n_fixed,
            callbacks=callbacks,
            checkpoint_path=checkpoint,
            checkpoint_every=model.checkpoint_every,
        )
    finally:
        if bar is not None:
            bar.close()

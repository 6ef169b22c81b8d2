"""Our training beside gensim's and geoopt's: pairs per second, and the mean average precision after equal passes.

The same on all sides: start, pairs, loss, number of negatives, drawn alike from all nodes but the source and its true
neighbours, and a rate that falls linearly to nothing. Each has the best of `RATES` for itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from peers import Gensim, Geoopt, PeerMissing
from tables import Bar, Contender, Table

import horosphere as hs
from horosphere.embedding.compiled_engine import CompiledEngine
from horosphere.embedding.graph import Graph, as_graph
from horosphere.embedding.initialise import near_origin
from horosphere.embedding.sampling import NegativeSampler, epoch_rng
from horosphere.embedding.schedule import Schedule
from horosphere.embedding.scores import reconstruction
from horosphere.embedding.torch_engine import TorchEngine

__all__ = ["training_tables"]

DIMENSIONS, BATCH = 10, 1000
OURS, OURS_TORCH = "ours, numba", "ours, torch, batch 1000"
GENSIM_BATCHES = (10, 100, 1000)
PRECISE = ("gensim, batch 10", "gensim, batch 100")
OPTIMIZERS = ("RiemannianAdam", "RiemannianSGD", "SparseRiemannianAdam", "SparseRiemannianSGD")
RATES = {"Adam": (0.03, 0.1, 0.3), "other": (0.1, 0.3, 1.0, 3.0)}
# The bar of speed at so many negatives: our time is at most this share of the contender's.
BARS = {10: ("gensim", 1 / 5), 50: ("RiemannianAdam", 1 / 3)}
SCORED = 2_000  # sources whose neighbours are ranked among all nodes


class Method(NamedTuple):
    """A way to train: ``begin(graph, start, negatives)`` gives ``epoch(pairs, schedule, epoch)`` and ``points()``."""

    name: str
    begin: Callable[[Graph, np.ndarray, int], tuple[Callable, Callable]]

    @property
    def rates(self) -> tuple[float, ...]:
        return RATES["Adam" if "Adam" in self.name else "other"]


def training_tables(options: argparse.Namespace) -> Iterator[Table]:
    """Nouns where the folder of WordNet is given, mammals otherwise."""
    if options.wordnet is None:
        print("training: --wordnet FOLDER is not given, the mammals take the place of the nouns", file=sys.stderr)
        graph, name = as_graph(hs.data.mammals_closure()), "mammals"
        sample, whole = graph, ()
    else:
        graph, name = as_graph(hs.data.wordnet_hypernyms(options.wordnet, closure=True)), "WordNet nouns"
        sample, whole = _sampled(graph, options.synsets), (graph,) if options.whole_passes else ()
    found = {}
    for negatives, (rival, limit) in BARS.items():
        yield _speed(graph, name, negatives, rival, limit, bars=options.wordnet is not None)
        title = name if sample is graph else f"{name}, {options.synsets} synsets and all above them"
        table, best = _precision(sample, title, negatives, options.passes, _methods(negatives), {}, rival, 3)
        found[negatives] = best
        yield table
    for all_pairs in whole:
        for negatives, (rival, _) in BARS.items():
            best = found[negatives]
            rates = {m: (best[m]["rate"],) for m in (OURS, _best_of(best, rival)) if m}
            kept = [m for m in _methods(negatives) if m.name in rates]
            title = f"{name}, all pairs, rates as found above"
            yield _precision(all_pairs, title, negatives, options.whole_passes, kept, rates, rival, 1)[0]


def _is(rival: str, name: str) -> bool:
    """Whether the bar is about this method."""
    return rival in name and "Sparse" not in name and "as it comes" not in name


def _best_of(best: dict[str, dict], rival: str) -> str | None:
    return max((name for name in best if _is(rival, name)), key=lambda name: best[name]["map"], default=None)


def _speed(graph: Graph, name: str, negatives: int, rival: str, limit: float, *, bars: bool) -> Table:
    """The same 5,000 pairs at the start of a training, where no negative is far enough to be passed over."""
    rng = np.random.default_rng(0)
    pairs = graph.edges[rng.permutation(len(graph.edges))[: 5 * BATCH]]
    start = _start(graph)
    schedule = Schedule(10**9, 0.01, negatives, BATCH, 0, 0)
    contenders, rivals = [], []
    for method in _methods(negatives):
        epoch, _ = method.begin(graph, start, negatives)
        contenders.append(
            Contender(method.name, partial(epoch(pairs), schedule, 0), None if method.name == OURS else 8)
        )
        if _is(rival, method.name):
            rivals.append(method.name)
    trained = _trained(graph, start, negatives)
    late = CompiledEngine(trained, _subset(graph, pairs), graph, hs.PoincareBall(-1.0), schedule)
    contenders.insert(1, Contender(f"{OURS}, after 5 passes", lambda: late.run(0)))
    return Table(
        f"training, {name}: {len(graph.nodes)} nodes, {len(graph.edges)} pairs, d = {DIMENSIONS}, "
        f"{negatives} negatives, float64",
        contenders,
        [Bar(ours, other, limit) for ours in (OURS, OURS_TORCH) for other in rivals] if bars else [],
        len(pairs),
    )


def _precision(
    graph: Graph,
    name: str,
    negatives: int,
    passes: int,
    methods: list[Method],
    rates: dict[str, tuple],
    rival: str,
    seeds: int,
) -> tuple[Table, dict[str, dict]]:
    """Precision and pairs per second of whole trainings; no contenders to alternate."""
    details, best = [], {}
    _train(methods[0], graph, negatives, 1, 0.1, 0)  # loads what is compiled
    for method in methods:
        # The slower ways of gensim would take most of the time.
        if method.name.startswith("gensim") and (negatives > 10 or method.name not in PRECISE):
            continue
        for rate in rates.get(method.name, method.rates):
            details.append(_train(method, graph, negatives, passes, rate, 0))
            if method.name not in best or details[-1]["map"] > best[method.name]["map"]:
                best[method.name] = details[-1]
    lines = [f"  {'':42s} MAP    mean rank  rate   pairs/s"]
    for method, d in best.items():
        lines.append(
            f"  {method:42s} {d['map']:.4f}{d['mean_rank']:10.1f}  {d['rate']:5.2g}{d['pairs_per_second']:10.0f}"
        )
    held, theirs = True, _best_of(best, rival)
    if theirs:
        medians = []
        for method in (m for asked in (OURS, theirs) for m in methods if m.name == asked):
            rate = best[method.name]["rate"]
            more = [_train(method, graph, negatives, passes, rate, seed) for seed in range(1, seeds)]
            details += more
            medians.append(statistics.median([best[method.name]["map"], *(d["map"] for d in more)]))
        held = medians[0] >= medians[1]
        lines.append(
            f"  bar: MAP of {OURS} at least that of {theirs}, median of {seeds} seeds: {medians[0]:.4f}, "
            f"{medians[1]:.4f}, {'holds' if held else 'MISSED'}"
        )
    title = f"precision after {passes} passes, {name}: {len(graph.nodes)} nodes, {len(graph.edges)} pairs, "
    title += f"d = {DIMENSIONS}, {negatives} negatives"
    return Table(title, [], [], notes=tuple(lines), details=tuple(details), held=held), best


def _train(method: Method, graph: Graph, negatives: int, passes: int, rate: float, seed: int) -> dict:
    schedule = Schedule(passes, rate, negatives, BATCH, 0, seed)
    epoch, points = method.begin(graph, _start(graph, seed), negatives)
    run = epoch(graph.edges)
    began = time.perf_counter()
    for number in range(passes):
        run(schedule, number)
    speed = passes * len(graph.edges) / (time.perf_counter() - began)
    scores = _scores(graph, points())
    about = {"method": method.name, "rate": rate, "seed": seed, "map": scores.map, "mean_rank": scores.mean_rank}
    return {**about, "pairs_per_second": speed}


def _methods(negatives: int) -> list[Method]:
    """What is installed."""
    begins: dict[str, Callable] = {
        OURS: _ours(CompiledEngine),
        OURS_TORCH: _ours(TorchEngine),
    }
    try:
        tiny = Gensim(np.asarray([[0, 1], [2, 1]]), np.zeros((3, 2)), 1, 1)
        print(f"gensim with 2 workers: {tiny.refusal(2) or 'works'}", file=sys.stderr)
        # Its bar is at 10; with 50 it is measured only where it is fastest at 10.
        for batch in GENSIM_BATCHES if negatives == 10 else (100,):
            begins[f"gensim, batch {batch}"] = _gensim(batch)
        if negatives == 10:
            begins["gensim, batch 100, as it comes"] = _gensim(100, uniform=False, regularization=1.0)
    except PeerMissing as missing:
        print(missing, file=sys.stderr)
    for optimizer in OPTIMIZERS:
        begins[f"geoopt {optimizer}"] = _geoopt(optimizer)
    if negatives == 50:
        begins["geoopt RiemannianAdam, float32"] = _geoopt("RiemannianAdam", torch.float32)
    return [Method(name, begin) for name, begin in begins.items()]


def _ours(engine: type) -> Callable:
    def begin(graph: Graph, start: np.ndarray, negatives: int):
        made = []

        def epoch(pairs: np.ndarray):
            subset = _subset(graph, pairs)

            def run(schedule: Schedule, number: int) -> None:
                if not made:
                    made.append(engine(start, subset, graph, hs.PoincareBall(-1.0), schedule))
                made[0].run(number)

            return run

        return epoch, lambda: made[0].points()

    return begin


def _gensim(batch: int, **settings) -> Callable:
    def begin(graph: Graph, start: np.ndarray, negatives: int):
        model = Gensim(graph.edges, start, negatives, batch, **settings)

        def epoch(edges: np.ndarray):
            pairs = model.pairs(edges)

            def run(schedule: Schedule, number: int) -> None:
                if number == 0:
                    model.seed(schedule.seed)
                model.train(pairs, schedule.rate(number))

            return run

        return epoch, model.points

    return begin


def _geoopt(optimizer: str, dtype: torch.dtype = torch.float64) -> Callable:
    def begin(graph: Graph, start: np.ndarray, negatives: int):
        model = Geoopt(optimizer, start, dtype)
        sampler = NegativeSampler(graph.edges, len(graph.nodes))

        def epoch(edges: np.ndarray):
            def run(schedule: Schedule, number: int) -> None:
                rng = epoch_rng(schedule.seed, number)
                order = edges[rng.permutation(len(edges))]
                for first in range(0, len(order), BATCH):
                    part = order[first : first + BATCH]
                    batch = np.concatenate([part, sampler.draw(part[:, 0], negatives, rng)], axis=1)
                    model.step(batch, schedule.rate(number))

            return run

        return epoch, model.points

    return begin


def _start(graph: Graph, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return near_origin(hs.PoincareBall(-1.0), len(graph.nodes), DIMENSIONS, rng).numpy()


def _trained(graph: Graph, start: np.ndarray, negatives: int) -> np.ndarray:
    engine = CompiledEngine(start, graph, graph, hs.PoincareBall(-1.0), Schedule(5, 1.0, negatives, BATCH, 0, 0))
    for number in range(5):
        engine.run(number)
    return engine.points()


def _subset(graph: Graph, pairs: np.ndarray) -> Graph:
    return Graph(graph.nodes, pairs, np.ones(len(pairs)))


def _sampled(graph: Graph, count: int) -> Graph:
    """The closure among so many nodes, drawn once, and all their ancestors."""
    drawn = np.random.default_rng(0).permutation(len(graph.nodes))[:count]
    kept = np.zeros(len(graph.nodes), dtype=bool)
    kept[drawn] = True
    kept[graph.edges[np.isin(graph.edges[:, 0], drawn), 1]] = True
    edges = graph.edges[kept[graph.edges[:, 0]]]
    number = np.cumsum(kept) - 1
    nodes = [node for node, here in zip(graph.nodes, kept, strict=True) if here]
    return Graph(nodes, number[edges], np.ones(len(edges)))


def _scores(graph: Graph, points: np.ndarray):
    sources = np.unique(graph.edges[:, 0])
    if len(sources) > SCORED:
        sources = np.random.default_rng(0).permutation(sources)[:SCORED]
    asked = graph.edges[np.isin(graph.edges[:, 0], sources)]
    return reconstruction(_subset(graph, asked), torch.from_numpy(points), hs.PoincareBall(-1.0))

"""Our training beside gensim's and geoopt's: pairs per second, and mean average precision after equal passes.

The same on all sides: start, pairs, loss, number of negatives, and a rate that is a tenth in the passes of a burn-in,
then falls linearly to nothing. Negatives are drawn alike from all nodes but the source and its true neighbours; in our
burn-in, and in geoopt's, which has no sampling of its own, by how often a node is a target. gensim is measured with
negatives alike throughout, with its own (by how often a node occurs at all), and with ours of each pass. Each side has
the best of `BURN_INS` and of the ladder `RATES` for itself, climbed until both neighbours of the best are worse.
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

__all__ = ["precision_tables", "training_tables"]

DIMENSIONS, BATCH = 10, 1000
OURS, OURS_TORCH = "ours, numba", "ours, torch, batch 1000"
GENSIM_BATCHES = (10, 100, 1000)
OWN, POPULAR = "gensim, batch 10, its own negatives", "gensim, batch 10, our negatives"
PRECISE = ("gensim, batch 10", OWN, POPULAR)  # the smallest of the batches: larger ones learn less in a pass
OPTIMIZERS = ("RiemannianAdam", "RiemannianSGD", "SparseRiemannianAdam", "SparseRiemannianSGD")
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
FIRST = {"Adam": 0.3, "other": 1.0}  # where the climb begins
BURN_INS = (0.3, 0.5, 0.1)  # shares of the passes
# The bar of speed at so many negatives: our time is at most this share of the contender's.
BARS = {10: ("gensim", 1 / 5), 50: ("RiemannianAdam", 1 / 3)}
SEEDS = (0, 1, 2)
SCORED = 2_000  # sources whose neighbours are ranked among all nodes


class Method(NamedTuple):
    """A way to train: ``begin(graph, start, negatives)`` gives ``epoch(pairs, schedule, epoch)`` and ``points()``."""

    name: str
    begin: Callable[[Graph, np.ndarray, int], tuple[Callable, Callable]]

    @property
    def first(self) -> float:
        """The rate that is tried first."""
        return FIRST["Adam" if "Adam" in self.name else "other"]


def training_tables(options: argparse.Namespace) -> Iterator[Table]:
    """Pairs per second; nouns where the folder of WordNet is given, mammals otherwise."""
    graph, name = _graph(options)
    for negatives, (rival, limit) in BARS.items():
        yield _speed(graph, name, negatives, rival, limit, bars=options.wordnet is not None)


def precision_tables(options: argparse.Namespace, negatives: int = 10) -> Iterator[Table]:
    """MAP after equal passes over a sample of the nouns, or over the mammals; and, beside gensim, over all nouns."""
    graph, name = _graph(options)
    sample, title = graph, name
    if options.wordnet is not None:
        sample, title = _sampled(graph, options.synsets), f"{name}, {options.synsets} synsets and all above them"
    rival, _ = BARS[negatives]
    methods = _precise(negatives, rival)
    table, best = _precision(sample, title, negatives, options.passes, methods, rival)
    yield table
    if sample is not graph and options.whole_passes:
        # Its rejection of true neighbours, ten draws at a time, does not end where they are most of the mass.
        kept = [m for m in methods if m.name not in (OWN, POPULAR)]
        known = {m.name: best[m.name] for m in kept}
        kept = [m for m in kept if m.name in (OURS, _best_of(known, rival))]
        yield _precision(graph, f"{name}, all pairs", negatives, options.whole_passes, kept, rival, known)[0]


def _graph(options: argparse.Namespace) -> tuple[Graph, str]:
    if options.wordnet is None:
        print("training: --wordnet FOLDER is not given, the mammals take the place of the nouns", file=sys.stderr)
        return as_graph(hs.data.mammals_closure()), "mammals"
    return as_graph(hs.data.wordnet_hypernyms(options.wordnet, closure=True)), "WordNet nouns"


def _precise(negatives: int, rival: str) -> list[Method]:
    """The ways to train whose precision is compared: ours, and those of the bar's rival."""
    if negatives == 10:
        return [m for m in _methods(negatives) if m.name in (OURS, *PRECISE)]
    return [m for m in _methods(negatives) if m.name in (OURS, f"geoopt {rival}", "geoopt RiemannianSGD")]


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
        if method.name in (OWN, POPULAR):
            continue
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
    rival: str,
    known: dict[str, dict] | None = None,
) -> tuple[Table, dict[str, dict]]:
    """Precision and pairs per second of whole trainings; with ``known`` no search, but the settings found elsewhere."""
    _train(methods[0], graph, negatives, 1, 0.1, 0.0, 0)  # loads what is compiled
    details, best = [], {}
    for method in methods:
        if known is None:
            tried = []
            for burn_in in BURN_INS:
                begin = max(tried, key=lambda d: d["map"])["rate"] if tried else method.first
                tried += _climb(method, graph, negatives, passes, begin, burn_in)
        else:
            settings = known[method.name]
            tried = [_train(method, graph, negatives, passes, settings["rate"], settings["burn_in"], 0)]
        details += tried
        best[method.name] = max(tried, key=lambda d: d["map"])
        print(best[method.name], file=sys.stderr, flush=True)
    lines = [f"  {'':42s} MAP    mean rank  rate  burn-in   pairs/s"]
    for method, d in best.items():
        figures = f"{d['map']:.4f}{d['mean_rank']:10.1f}  {d['rate']:5.2g}  {d['burn_in']:5.0%}"
        lines.append(f"  {method:42s} {figures}{d['pairs_per_second']:12.0f}")
    held, theirs = True, _best_of(best, rival)
    if theirs:
        medians = []
        seeds = SEEDS if known is None else SEEDS[:1]
        for method in (m for asked in (OURS, theirs) for m in methods if m.name == asked):
            one = best[method.name]
            more = [_train(method, graph, negatives, passes, one["rate"], one["burn_in"], seed) for seed in seeds[1:]]
            details += more
            medians.append(statistics.median([one["map"], *(d["map"] for d in more)]))
        held = medians[0] >= medians[1]
        lines.append(
            f"  bar: MAP of {OURS} at least that of {theirs}, median of {len(seeds)} seeds: {medians[0]:.4f}, "
            f"{medians[1]:.4f}, {'holds' if held else 'MISSED'}"
        )
    title = f"precision after {passes} passes, {name}: {len(graph.nodes)} nodes, {len(graph.edges)} pairs, "
    title += f"d = {DIMENSIONS}, {negatives} negatives"
    return Table(title, [], [], notes=tuple(lines), details=tuple(details), held=held), best


def _climb(method: Method, graph: Graph, negatives: int, passes: int, first: float, burn_in: float) -> list[dict]:
    """Trainings at neighbouring rates, the best of them with worse ones on both sides (or at the ladder's end)."""
    done: dict[int, dict] = {}
    top = RATES.index(first)
    while True:
        for rung in (top, top + 1, top - 1):
            if 0 <= rung < len(RATES) and rung not in done:
                done[rung] = _train(method, graph, negatives, passes, RATES[rung], burn_in, 0)
        before, top = top, max(done, key=lambda rung: done[rung]["map"])
        if top == before:
            return list(done.values())


def _train(method: Method, graph: Graph, negatives: int, passes: int, rate: float, burn_in: float, seed: int) -> dict:
    schedule = Schedule(passes, rate, negatives, BATCH, burn_in * passes, seed)
    epoch, points = method.begin(graph, _start(graph, seed), negatives)
    run = epoch(graph.edges)
    began = time.perf_counter()
    for number in range(passes):
        run(schedule, number)
    speed = passes * len(graph.edges) / (time.perf_counter() - began)
    scores = _scores(graph, points())
    settings = {"method": method.name, "rate": rate, "burn_in": burn_in, "seed": seed}
    return {**settings, "map": scores.map, "mean_rank": scores.mean_rank, "pairs_per_second": speed}


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
            begins[OWN] = _gensim(10, uniform=False)
            begins[POPULAR] = _gensim(10, popular=True)
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


def _gensim(batch: int, popular: bool = False, **settings) -> Callable:
    def begin(graph: Graph, start: np.ndarray, negatives: int):
        model = Gensim(graph.edges, start, negatives, batch, **settings)

        def epoch(edges: np.ndarray):
            pairs = model.pairs(edges)

            def run(schedule: Schedule, number: int) -> None:
                if number == 0:
                    model.seed(schedule.seed)
                if popular:
                    model.draw_by_targets(schedule.burning_in(number))
                model.train(pairs, schedule.rate(number))

            return run

        return epoch, model.points

    return begin


def _geoopt(optimizer: str, dtype: torch.dtype = torch.float64) -> Callable:
    def begin(graph: Graph, start: np.ndarray, negatives: int):
        model = Geoopt(optimizer, start, dtype)
        n = len(graph.nodes)
        alike = NegativeSampler(graph.edges, n)
        # One more each: no source is without a stranger to draw.
        popular = NegativeSampler(graph.edges, n, np.bincount(graph.edges[:, 1], minlength=n) * 100 + 1)

        def epoch(edges: np.ndarray):
            def run(schedule: Schedule, number: int) -> None:
                rng = epoch_rng(schedule.seed, number)
                sampler = popular if schedule.burning_in(number) else alike
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

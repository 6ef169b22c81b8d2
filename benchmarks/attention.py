"""Attention by distance beside torch's scaled_dot_product_attention: time, and memory at 16,384 tokens.

Run by run.py:

    python benchmarks/run.py attention --threads 2 --rounds 10
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from peak import peak_mib
from tables import Bar, Contender, Table
from torch.nn.functional import scaled_dot_product_attention

import horosphere as hs
from horosphere.attention import geodesic_attention

__all__ = ["attention_tables"]

HEADS, SIZE = 8, 64
FORWARD = {"flat": 1.4, "ball": 2.6, "sphere": 2.8}
BOTH = {"flat": 1.4, "ball": 2.2, "sphere": 2.4}
CAUSAL = 1.7
LONG, MOST_MIB = 16_384, 128


def spaces(n: int, *wanted: str) -> dict[str, tuple]:
    """Manifold, queries and keys of each space; flat ones are standard normal, those of the ball as in "distance"."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, HEADS, n, SIZE, generator=generator) for _ in range(2))
    ball, sphere = hs.PoincareBall(-1.0), hs.Sphere(1.0)
    makers = {
        "flat": (hs.Euclidean(), lambda p: p),
        "ball": (ball, lambda p: ball.expmap0(p * (0.75 / SIZE**0.5))),
        "sphere": (sphere, sphere.projx),
    }
    return {name: (makers[name][0], *(makers[name][1](p) for p in (q, k))) for name in wanted or FORWARD}


def attention_tables(options: argparse.Namespace) -> Iterator[Table]:
    """Forward, and forward with backward, in float32 without a mask; causal on flat space; peak memory."""
    for n in (1024, 4096):
        generator = torch.Generator().manual_seed(1)
        value, upper = (torch.randn(1, HEADS, n, SIZE, generator=generator) for _ in range(2))
        found = spaces(n)
        calls: dict[str, tuple[tuple[torch.Tensor, ...], Callable]] = {
            "torch": ((*found["flat"][1:], value), scaled_dot_product_attention),
            "torch, causal": (
                (*found["flat"][1:], value),
                lambda *t: scaled_dot_product_attention(*t, is_causal=True),
            ),
            "flat, causal": (
                (*found["flat"][1:], value),
                lambda *t: geodesic_attention(*t, hs.Euclidean(), is_causal=True),
            ),
        }
        for name, (manifold, q, k) in found.items():
            calls[name] = (q, k, value), lambda *t, m=manifold: geodesic_attention(*t, m)
        for backward, limits in ((False, FORWARD), (True, BOTH)):
            contenders = [Contender(name, _step(*call, upper if backward else None)) for name, call in calls.items()]
            bars = [Bar(name, "torch", limit) for name, limit in limits.items()]
            bars.append(Bar("flat, causal", "torch, causal", CAUSAL))
            what = "forward and backward" if backward else "forward"
            yield Table(f"attention, {what}, float32, {HEADS} heads, D = {SIZE}, N = {n}", contenders, bars)
    yield memory_table()


def _step(tensors: tuple[torch.Tensor, ...], call: Callable, upper: torch.Tensor | None) -> Callable[[], object]:
    if upper is None:

        def forward():
            with torch.no_grad():
                return call(*tensors)

        return forward
    leaves = [t.clone().requires_grad_() for t in tensors]
    return lambda: torch.autograd.grad(call(*leaves), leaves, upper)


# Result and gradients are four tensors like the queries.
SETUP = """
import torch
from attention import spaces
from horosphere.attention import geodesic_attention

torch.set_num_threads({threads})
manifold, q, k = spaces({n}, "{space}")["{space}"]
leaves = [t.requires_grad_() for t in (q, k, torch.randn_like(q))]
upper = torch.randn_like(q)
few = [t[:, :, :600] for t in leaves]
torch.autograd.grad(geodesic_attention(*few, manifold).sum(), few)
"""
CALL = "torch.autograd.grad(geodesic_attention(*leaves, manifold), leaves, upper)"


def memory_table() -> Table:
    """Peak memory above inputs, result and gradients; one process a space."""
    notes, held = [], True
    for space in FORWARD:
        setup = SETUP.format(threads=torch.get_num_threads(), n=LONG, space=space)
        mib = peak_mib(setup, CALL) - 4 * HEADS * LONG * SIZE * 4 / 2**20
        held = held and mib <= MOST_MIB
        word = "holds" if mib <= MOST_MIB else "MISSED"
        notes.append(f"  bar: {space} at most {MOST_MIB} MiB: {max(mib, 0.0):.0f} MiB, {word}")
    title = f"peak memory of forward and backward above inputs, result and gradients, N = {LONG}"
    return Table(title, [], [], notes=tuple(notes), held=held)

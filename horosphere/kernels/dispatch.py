"""Which form of a kernel serves a call: one table of forms, what each serves, and why not.

The choice looks at the arguments, device, types and shapes of a call, never at a global flag. A form asked for by name
is used or refused with the reason, never swapped; "auto" takes the first that serves, in the order of the table.
The logger ``horosphere.kernels`` tells each choice at DEBUG, and :func:`horosphere.kernels.explain` returns them.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from horosphere import _numerics
from horosphere._libtorch import libtorch

FORMS = ("reference", "tiled", "numba", "triton")
IMPLS = ("auto", *FORMS)
# Entries of the matrix below which the plain form is at least as fast on a CPU as tiles are.
SMALL = 2**15
# Entries from which on the first call's import of numba and compilation, some seconds, may be worth it.
COMPILED = 2**20
TRITON_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_log = logging.getLogger("horosphere.kernels")
_choices: ContextVar[list[Choice] | None] = ContextVar("horosphere_choices", default=None)


@dataclass(frozen=True)
class Call:
    """What the choice of a form looks at.

    Attributes:
        operation: "sqdist", "nearest", "attention", "metric_sqdist", "metric_attention", and "..._backward" of them.
        device, dtype: of the points; the type is that of products.
        entries: of all matrices of the batch together.
        parts: chord parts, 0 for per-token metrics; time: whether one has time coordinates; features: of the first.
        width: numbers of a value.
        weight, power: how attention weighs; power None where it is not looked at.
        biased, dropout: whether attention has a mask or bias, and dropout.
        learned: which of "curvature" and "power" the backward pass is asked for.
        tracing: inside torch.compile or a torch.func transform, where numbers are not looked at.
        pairwise: why there is no product form at all, None where there is.
    """

    operation: str
    device: torch.device
    dtype: torch.dtype
    entries: int
    parts: int = 1
    time: bool = False
    features: int = 1
    width: int = 1
    weight: str = "inverse"
    power: float | None = 1.0
    biased: bool = False
    dropout: bool = False
    learned: tuple[str, ...] = ()
    tracing: str | None = None
    pairwise: str | None = None


@dataclass(frozen=True)
class Choice:
    """A form that was chosen for an operation, and why the others were not."""

    operation: str
    form: str
    refused: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        others = "; ".join(f"not {form}: {why}" for form, why in self.refused.items())
        return f"{self.operation}: {self.form} ({others})"


def check_name(impl: str) -> None:
    """ValueError where ``impl`` is unknown."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")


def tracing() -> str | None:
    """ "torch.compile" or "torch.func" inside of one, where numbers of tensors may not be looked at."""
    if _numerics.transformed():
        return "torch.func"
    return "torch.compile" if torch.compiler.is_compiling() else None


def choose(call: Call, impl: str = "auto", *, told: bool = True) -> str:
    """The form that serves a call; ``told``: to the log and to :func:`horosphere.kernels.explain`.

    Raises ValueError where ``impl`` is unknown, or was asked for by name and cannot serve.
    """
    check_name(impl)
    table = TABLE[call.operation.removesuffix("_backward")]
    if impl != "auto":
        reason = table[impl].refuses(call) if impl in table else f"{call.operation} has no such form"
        if reason:
            raise ValueError(f"impl={impl!r} cannot serve this call: {reason}; use impl='auto'")
        return _taken(call, impl, {other: f"{impl} was asked for" for other in FORMS if other != impl}, told)
    refused: dict[str, str] = {}
    for form, entry in table.items():
        reason = entry.worse(call) or entry.refuses(call)
        if reason is None:
            refused |= {f: f"{form} comes first" for f in FORMS if f != form and f not in refused}
            return _taken(call, form, refused, told)
        refused[form] = reason
    raise AssertionError(f"no form serves {call}")  # the last of each table serves everything


def of_gradient(call: Call, form: str) -> str:
    """The form of a backward pass: that of the forward pass where it serves, else "tiled"."""
    reason = TABLE[call.operation.removesuffix("_backward")][form].refuses(call)
    if reason is None:
        return _taken(call, form, {other: f"the forward pass was {form}" for other in FORMS if other != form}, True)
    return _taken(call, "tiled", {form: reason}, True)


def left_to_tiles(operation: str, reason: str) -> None:
    """Tell that numba's loops, chosen by "auto", leave some of a call to tiles because of its numbers."""
    _told(Choice(operation, "tiled", {"numba": reason}))


def recording(choices: list[Choice] | None):
    """Make :func:`choose` add what it chooses to a list; returns what :func:`stop_recording` takes."""
    return _choices.set(choices)


def stop_recording(token) -> None:
    _choices.reset(token)


def _taken(call: Call, form: str, refused: dict[str, str], told: bool) -> str:
    if not told or torch.compiler.is_compiling():
        return form
    _told(Choice(call.operation, form, refused))
    return form


def _told(choice: Choice) -> None:
    recorded = _choices.get()
    if recorded is not None:
        recorded.append(choice)
    _log.debug("%s", choice)


# why a form does not serve a call, None where it does


def _tiled(call: Call) -> str | None:
    return _no_products(call)


def _no_products(call: Call) -> str | None:
    if call.pairwise:
        return f"it takes chords in product form, and {call.pairwise} works pair by pair"
    if call.tracing == "torch.func":
        return "it does not run under torch.func transforms"
    return None


def _triton(call: Call) -> str | None:
    if reason := _no_products(call):
        return reason
    if call.dtype not in TRITON_TYPES:
        return f"it takes {', '.join(str(t) for t in TRITON_TYPES)}, not {call.dtype}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if call.device.type == "cuda" or _interpreting():
        return None
    return f"it runs on GPUs, and the points are on {call.device}"


def _interpreting() -> bool:
    """Whether Triton was loaded in its interpreter, which takes tensors on the CPU."""
    triton = sys.modules.get("triton")
    return triton is not None and triton.knobs.runtime.interpret


def _loops(call: Call) -> str | None:
    if reason := _no_products(call):
        return reason
    if call.device.type != "cpu":
        return f"its loops run on CPUs, and the points are on {call.device}"
    return None if call.dtype == torch.float32 else f"its loops are compiled for float32, not {call.dtype}"


def _numba_sqdist(call: Call) -> str | None:
    if call.operation.endswith("_backward"):
        return "gradients of distances have no loop"
    return _loops(call) or (None if call.parts == 1 else f"its loop takes one chord part, not {call.parts}")


def _numba_attention(call: Call) -> str | None:
    reasons = (
        (call.parts > 1, f"its loops take one chord part, not {call.parts}"),
        (call.time, "its loops have no time coordinates (of a hyperboloid)"),
        (not call.features or not call.width, "its loops take points and values of at least one number"),
        (call.weight != "inverse", f"its loops have the weight 'inverse', not {call.weight!r}"),
        (call.power not in (1.0, None), f"its loops have the power 1, not {call.power}"),
        (call.biased, "its loops have no mask but the causal one, and no bias"),
        (call.dropout, "its loops have no dropout"),
        ("curvature" in call.learned, "its loops have no gradient of a curvature"),
        ("power" in call.learned, "its loops have no gradient of the power"),
        (libtorch() is None, "this build of torch does not offer its threads and its matrix product"),
    )
    return _loops(call) or next((why for true, why in reasons if true), None)


def _numba_metric_attention(call: Call) -> str | None:
    if call.operation.endswith("_backward"):
        return "gradients under per-token metrics have no loop"
    return _numba_attention(call)


# why a form that serves a call is not the best one


def _small(call: Call) -> str | None:
    if call.tracing == "torch.func":
        return None
    if call.tracing:
        return "an operator is one node of a compiled graph"
    if call.device.type != "cpu":
        return "the points are on an accelerator"
    return None if call.entries < SMALL else f"the matrix has {call.entries} entries, {SMALL} or more"


def _few(call: Call) -> str | None:
    if call.entries >= COMPILED:
        return None
    return f"the matrix has {call.entries} entries, fewer than {COMPILED}, which would not pay for compilation"


def _never(call: Call) -> str | None:
    return None


@dataclass(frozen=True)
class Entry:
    """A form of an operation: why it does not serve a call, and why it would be a bad choice."""

    refuses: Callable[[Call], str | None]
    worse: Callable[[Call], str | None] = _never


_ALWAYS = Entry(lambda call: None)
_TRITON = Entry(_triton, lambda call: "the points are on a CPU" if call.device.type == "cpu" else None)
_TILED = Entry(_tiled)

# What every operation has, in the order in which "auto" looks at it. A backward pass has the forms of its operation.
TABLE: dict[str, dict[str, Entry]] = {
    "sqdist": {
        "triton": _TRITON,
        "numba": Entry(_numba_sqdist, _few),
        # the caller's own compilation fuses the plain form
        "reference": Entry(lambda call: None, lambda call: None if call.tracing or call.pairwise else _small(call)),
        "tiled": _TILED,
    },
    "nearest": {
        "triton": _TRITON,
        "reference": Entry(lambda call: None, lambda call: None if call.pairwise else _small(call)),
        "tiled": _TILED,
    },
    "attention": {
        "triton": _TRITON,
        "numba": Entry(_numba_attention, _few),
        "reference": Entry(lambda call: None, lambda call: None if call.pairwise else _small(call)),
        "tiled": _TILED,
    },
    "metric_sqdist": {"triton": _TRITON, "tiled": _TILED, "reference": _ALWAYS},
    "metric_attention": {
        "triton": _TRITON,
        "numba": Entry(_numba_metric_attention, _few),
        "tiled": _TILED,
        "reference": _ALWAYS,
    },
}

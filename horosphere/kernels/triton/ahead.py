"""Ahead-of-time compilation of the kernels for GPUs that are not at hand, and what the machine code uses.

Launchers are called with a few points on the CPU; what they launch is written down and compiled, not run.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from horosphere.kernels.chord.pair import ChordPair
from horosphere.kernels.inputs import Inputs, Results
from horosphere.kernels.low_rank.pair import MetricPair
from horosphere.kernels.triton.attention import Geometry, attention, attention_backward
from horosphere.kernels.triton.chord import ChordShape, Points
from horosphere.kernels.triton.metric import MetricShape, Tokens
from horosphere.kernels.triton.nearest import nearest
from horosphere.kernels.triton.sqdist import metric_sqdist, metric_sqdist_backward, sqdist, sqdist_backward
from horosphere.kernels.triton.tiles import precision_of
from horosphere.kernels.triton.weights import Kind

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {torch.float32: "fp32", torch.float64: "fp64"}
POINTERS = {**TYPES, torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8"}
SETTINGS = ("num_warps", "enable_fp_fusion")  # of the compiler; other options are the kernel's
FEATURES = 64


class Launch(NamedTuple):
    """A kernel and what a launcher gives it by name."""

    kernel: triton.JITFunction
    given: dict[str, object]

    def has(self, **wanted: object) -> bool:
        """Whether these fields of what is compiled, in SHAPE and KIND, have these values."""
        compiled = [self.given.get(name) for name in ("SHAPE", "KIND")]
        return all(any(getattr(c, name, None) == value for c in compiled) for name, value in wanted.items())


class Variant(NamedTuple):
    """A launch, by the name under which it is reported."""

    name: str
    dtype: torch.dtype
    launch: Launch


class Usage(NamedTuple):
    """What one thread or block of the machine code takes; spills in bytes of stack (CUDA) or registers (AMD)."""

    registers: int
    spills: int
    shared: int


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """What is launched within is written down and not run."""
    launches: list[Launch] = []

    def run(kernel: triton.JITFunction, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        launches.append(Launch(kernel, dict(zip(kernel.arg_names, arguments, strict=False)) | options))

    with patch.object(triton.JITFunction, "run", run):
        yield launches


def part(dtype: torch.dtype, dim: int, sign: int, n: int = 3, m: int = 100, time_dims: int = 0) -> ChordPair:
    """Chords of two batch entries, with weights where there is no time."""
    x, y = torch.ones(2, n, dim, dtype=dtype, device="cpu"), torch.ones(2, m, dim, dtype=dtype, device="cpu")
    wx, wy = (None if time_dims else t[..., 0] for t in (x, y))
    return ChordPair(x, y, torch.tensor(float(sign), dtype=torch.float64, device="cpu"), wx, wy, time_dims)


def metric_pair(dtype: torch.dtype, own: bool, other: bool, n: int = 3, m: int = 100, rank: int = 2) -> MetricPair:
    """Points of two batch entries, and whose metrics measure."""
    q, k = torch.ones(2, n, FEATURES, dtype=dtype, device="cpu"), torch.ones(2, m, FEATURES, dtype=dtype, device="cpu")
    one, two = ((t[..., 0], t[..., None].expand(-1, -1, -1, rank)) for t in (q, k))
    return MetricPair(q, k, *(one if own else (None, None)), *(two if other else (None, None)))


def attend(points: Geometry, weight: str, bias: Tensor | None, causal: int | None, dropout_p: float) -> list[Launch]:
    """The launches of a forward and a backward pass, which wants the gradient of an added bias."""
    value, rate = (
        torch.ones(2, points.m, FEATURES, dtype=points.dtype, device="cpu"),
        torch.ones(2, dtype=torch.float64, device="cpu"),
    )
    inputs = Inputs(value, rate, rate, bias, causal, weight, dropout_p, torch.tensor(0, device="cpu"))
    with recorded() as launches:
        out, lse = attention(points, inputs)
        wanted = True, True, bias is not None and bias.is_floating_point()
        attention_backward(points, inputs, Results(out, lse, out, lse), wanted)
    return launches


def every_variant() -> Iterator[Variant]:
    """All that are compiled."""
    return itertools.chain(variants(), nearest_variants(), attention_variants(), metric_variants())


def variants() -> Iterator[Variant]:
    """Distances of chords: every sign of curvature, type and use."""
    for dtype, sign in itertools.product(TYPES, (-1, 0, 1)):
        one, upper = part(dtype, 10, sign), torch.ones(2, 3, 100, dtype=dtype, device="cpu")
        with recorded() as launches:
            sqdist([one], squared=False, resolve=True)
            sqdist([one], squared=True, resolve=True)
            sqdist([one, one], squared=True, resolve=True)
            sqdist_backward(upper, [one], squared=False, curvature=False)
            sqdist_backward(upper, [one], squared=True, curvature=True)
        names = "forward plain", "forward squared", "forward added", None, "backward plain", None
        for name, launch in zip((*names, "backward squared, curvature", None), launches, strict=True):
            if name:
                yield Variant(f"{name} {sign:+d} {TYPES[dtype]}", dtype, launch)


def nearest_variants() -> Iterator[Variant]:
    """Nearest neighbours of 10 features, of one part, whose curvature is no matter, and of a product."""
    for dtype, (name, signs) in itertools.product(TYPES, {"of one part": (0,), "of a product": (-1, 1, 0)}.items()):
        with recorded() as launches:
            nearest([part(dtype, 10, sign) for sign in signs], 3)
        for launch in launches:
            yield Variant(f"{launch.kernel.__name__} {name} {TYPES[dtype]}", dtype, launch)


def attention_variants() -> Iterator[Variant]:
    """Attention of 64 features and values: every sign of curvature, weight and kind of mask, and a product."""
    added, boolean = torch.zeros(2, 3, 100, device="cpu"), torch.zeros(2, 3, 100, dtype=torch.bool, device="cpu")
    for dtype in TYPES:
        spaces = {f"{sign:+d}" if sign else "+0": [part(dtype, FEATURES, sign)] for sign in (-1, 0, 1)}
        spaces |= {"time": [part(dtype, FEATURES + 1, -1, time_dims=1)]}
        spaces |= {"product": [part(dtype, 32, -1), part(dtype, 16, 1)]}
        uses: list[tuple[str, str, Tensor | None, int | None, float]] = [
            *((space, "inverse", None, None, 0.0) for space in spaces),
            ("-1", "softmax", added, 0, 0.1),
            ("-1", "gaussian", boolean, 0, 0.0),
        ]
        for space, weight, bias, causal, dropout_p in uses if dtype == torch.float32 else uses[:1]:
            parts = spaces[space]
            points = Points(parts, torch.Size((2,)), dtype, resolve=True, curvature=True)
            for launch in attend(points, weight, bias, causal, dropout_p):
                side = "keys" if launch.has(swapped=True) else "queries"
                name = f"{side} {space} {weight} {TYPES[dtype]}"
                if launch.has(part=-1):
                    yield Variant(f"attention {name}", dtype, launch)
                elif launch.has(part=len(parts) - 1):
                    yield Variant(f"gradient of {name}", dtype, launch)


def metric_variants() -> Iterator[Variant]:
    """Distances and attention under per-token metrics of 64 features: whose metric measures, and both sides of the
    gradient.
    """
    for dtype, (own, other) in itertools.product(TYPES, ((True, True), (True, False), (False, True))):
        f = metric_pair(dtype, own, other)
        with recorded() as launches:
            metric_sqdist(f, dtype, None)
            metric_sqdist_backward(torch.ones(2, 3, 100, dtype=dtype, device="cpu"), f, dtype)
        launches += attend(Tokens(f, torch.Size((2,)), dtype, resolve=True), "inverse", None, 0, 0.0)
        names = "forward", "backward", None, "attention", "gradient of metric queries", "gradient of metric keys"
        for name, launch in zip(names, launches, strict=True):
            if name:
                which = "both" if own and other else "own" if launch.has(own=True) else "other"
                of = name if name.startswith("gradient") else f"metric {name}"
                yield Variant(f"{of}, {which} {TYPES[dtype]}", dtype, launch)


def build(variant: Variant, target: str, *, ones: bool = False) -> Usage:
    """Compile one variant for ``target``, a key of TARGETS.

    Args:
        ones: whether a whole number that is 1 is compiled, as where a kernel is launched.
    """
    kernel, given = variant.launch
    constants: dict[str | tuple[int, ...], object] = {}

    def typed(value: object, *path: int) -> object:
        """The type of an argument, in which tuples are tuples of the same fields."""
        if isinstance(value, Tensor):
            return f"*{POINTERS[value.dtype]}"
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(typed(v, *path, i) for i, v in enumerate(value))
        if ones and value == 1:
            constants[path] = 1
            return "constexpr"
        return "i32"

    signature = {}
    for i, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            if isinstance(value, ChordShape | MetricShape | Kind):
                value = value._replace(precision=precision_of(variant.dtype, TARGETS[target].backend))
            constants[parameter.name] = value
        signature[parameter.name] = "constexpr" if parameter.is_constexpr else typed(value, i)
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=TARGETS[target], options={name: given[name] for name in SETTINGS})
    if "cubin" in compiled.asm:
        return _of_cubin(compiled.asm["cubin"], compiled.metadata.shared)
    text = compiled.asm["amdgcn"]
    registers, spills = (_number(rf"\.{key}:\s*(\d+)", text) for key in ("vgpr_count", "vgpr_spill_count"))
    return Usage(registers, spills, compiled.metadata.shared)


def _of_cubin(cubin: bytes, shared: int) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Usage(_number(r"REG:(\d+)", said), _number(r"STACK:(\d+)", said), shared)


def _number(pattern: str, text: str) -> int:
    """The first number that the compiler gives under a name."""
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's output has nothing like {pattern}")
    return int(found.group(1))

"""Ahead-of-time compilation of the kernels for GPUs that are not at hand, and what the machine code uses."""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from horosphere.kernels.triton import attention, chord, metric, nearest, sqdist, weights
from horosphere.kernels.triton.tiles import columns_of, options_for, precision_of, terms_of

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {torch.float32: "fp32", torch.float64: "fp64"}
POINTERS = {name: f"*{kind}" for name, kind in TYPES.items()}
POINTERS |= {torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8"}
SETTINGS = ("num_warps", "enable_fp_fusion")  # of the compiler; other options are the kernel's
FEATURES = 64
SIZE = 2  # any that is not 1


class Variant(NamedTuple):
    """A kernel as a launcher calls it: arguments of a launch, of which types are read, and what is compiled into it."""

    name: str
    kernel: triton.JITFunction
    dtype: torch.dtype
    arguments: tuple[object, ...]
    constants: dict[str, object]


class Usage(NamedTuple):
    """What one thread or block of the machine code takes; spills in bytes of stack (CUDA) or registers (AMD)."""

    registers: int
    spills: int
    shared: int


def every_variant(on: str = "cuda") -> Iterator[Variant]:
    """All that are compiled for a backend."""
    return itertools.chain(variants(), nearest_variants(), attention_variants(on), metric_variants(on))


def numbers(dtype: torch.dtype, count: int) -> list[Tensor]:
    """Stand for tensors of a launch."""
    return [torch.empty(0, dtype=dtype)] * count


def variants() -> Iterator[Variant]:
    """Distances of chords: every sign of curvature, type and use."""
    for dtype, sign in itertools.product(TYPES, (-1, 0, 1)):
        options, (tensor,) = sqdist.chord_options(dtype), numbers(dtype, 1)
        space = sqdist.Products(*numbers(dtype, 3), SIZE, SIZE, SIZE)
        bounded = sqdist.Bounded(space, *numbers(dtype, 5))
        for squared, add in ((False, False), (True, False), (True, True)):
            shape = sqdist.ProductShape(sign, terms_of(dtype), squared, weighted=True, resolve=True, added=add)
            hooks = {"OF_ENTRY": sqdist.bounded_of_entry, "MATRIX": sqdist.matrix, "SHAPE": shape}
            name = f"forward {'added' if add else 'squared' if squared else 'plain'} {sign:+d} {TYPES[dtype]}"
            yield Variant(name, sqdist.forward, dtype, (bounded, tensor, SIZE, SIZE), hooks | options)
        for squared, curvature in ((False, False), (True, True)):
            shape = sqdist.ProductShape(sign, terms_of(dtype), squared, curvature=curvature)
            hooks = {"OF_ENTRY": sqdist.products_of_entry, "START": sqdist.start, "ADD": sqdist.add}
            hooks |= {"STORE": sqdist.store, "SHAPE": shape, "F": 0}
            name = f"backward {'squared, curvature' if squared else 'plain'} {sign:+d} {TYPES[dtype]}"
            arguments = space, tensor, SIZE, SIZE, sqdist.ProductSums(*numbers(dtype, 2))
            yield Variant(name, sqdist.backward, dtype, arguments, hooks | options)


def nearest_variants() -> Iterator[Variant]:
    """Nearest neighbours of 10 features, of one part, whose curvature is no matter, and of a product."""
    for dtype, (name, signs) in itertools.product(TYPES, {"of one part": (0,), "of a product": (-1, 1, 0)}.items()):
        largest, count = torch.finfo(dtype).max, len(signs)
        shape = {"SHAPE": nearest.RankedShape((12,) * count, signs, 12 * count, largest, terms_of(dtype))}
        space = nearest.Ranked(*numbers(dtype, 3), SIZE, SIZE, SIZE, SIZE)
        place, out = numbers(torch.int64, 1) + numbers(dtype, 1)
        for kernel, arguments, options in (
            (nearest.minima, (space, out), nearest.minima_options(dtype)),
            (nearest.members, (space, place, out, SIZE), nearest.members_options(dtype)),
        ):
            yield Variant(f"{kernel.__name__} {name} {TYPES[dtype]}", kernel, dtype, arguments, shape | options)


def attention_variants(on: str) -> Iterator[Variant]:
    """Attention of 64 features and values: every sign of curvature, weight and kind of mask, and a product."""
    spaces = {
        "-1": ((FEATURES,), (-1,), (0,)),
        "+0": ((FEATURES,), (0,), (0,)),
        "+1": ((FEATURES,), (1,), (0,)),
        "time": ((FEATURES + 1,), (-1,), (1,)),
    }
    product = {"product": ((32, 16), (-1, 1), (0, 0))}
    for dtype, (space, (features, signs, times)) in itertools.product(TYPES, {**spaces, **product}.items()):
        side, precision = chord.ChordSide(*numbers(dtype, 4)), precision_of(dtype, on)
        points = chord.Chords(side, side, *numbers(dtype, 1), SIZE, SIZE)
        sums = chord.ChordSums(*numbers(dtype, 3))
        shape = chord.ChordShape(features, signs, times, sum(features), terms_of(dtype), True, precision=precision)
        part, F = len(features) - 1, columns_of(features[-1], dtype)
        slabs = triton.cdiv(features[-1], F)
        for weight, bias, causal, dropout in ((0, 0, False, False), (1, 1, True, True), (2, 2, True, False)):
            if (weight or dtype == torch.float64) and (space != "-1" or (weight and dtype == torch.float64)):
                continue
            kind = weights.Kind(weight, bias, causal, dropout, precision)
            for swapped in (False, True):
                of_part = shape._replace(part=part, before=sum(features[:-1]), slabs=slabs, curvature=not swapped)
                kind = kind._replace(swapped=swapped, rates=not swapped, bias_gradient=int(bias == 1 and not swapped))
                name = f"{'keys' if swapped else 'queries'} {space} {('inverse', 'softmax', 'gaussian')[weight]}"
                yield _average(f"attention {name} {TYPES[dtype]}", dtype, points, chord.Points, shape, kind)
                name = f"gradient of {name} {TYPES[dtype]}"
                yield _gradient(name, dtype, points, chord.Points, of_part, kind, sums, F)


def metric_variants(on: str) -> Iterator[Variant]:
    """Distances and attention under per-token metrics of 64 features: whose metric measures, and both sides of the
    gradient.
    """
    for dtype, (own, other) in itertools.product(TYPES, ((True, True), (True, False), (False, True))):
        which = f"{'both' if own and other else 'own' if own else 'other'} {TYPES[dtype]}"
        precision, F, (tensor,) = precision_of(dtype, on), metric.columns_of(FEATURES), numbers(dtype, 1)
        shape = metric.MetricShape(own, other, 0.5 if own and other else 1.0, False, False, precision)
        side = metric.MetricSide(*numbers(dtype, 6), SIZE, SIZE)
        points, sums = metric.Metrics(side, side, SIZE, SIZE, SIZE), metric.MetricSums(*numbers(dtype, 4))
        options = sqdist.metric_options(dtype)
        hooks = {"OF_ENTRY": metric.of_entry, "MATRIX": metric.matrix, "SHAPE": shape}
        arguments: tuple[object, ...] = points, tensor, SIZE, SIZE
        yield Variant(f"metric forward, {which}", sqdist.forward, dtype, arguments, hooks | options)
        hooks = {"OF_ENTRY": metric.of_entry, "START": metric.start, "ADD": metric.add_matrix, "STORE": metric.store}
        arguments = points, tensor, SIZE, SIZE, sums
        hooks |= {"SHAPE": shape, "F": F}
        yield Variant(f"metric backward, {which}", sqdist.backward, dtype, arguments, hooks | options)
        shape, kind = shape._replace(resolve=True), weights.Kind(0, 0, True, False, precision)
        yield _average(f"metric attention, {which}", dtype, points, metric.Tokens, shape, kind)
        for swapped in (False, True):
            shape = shape._replace(swapped=swapped)
            kind = kind._replace(swapped=swapped, rates=not swapped, sums_values=swapped)
            name = f"gradient of metric {'keys' if swapped else 'queries'}, {which}"
            yield _gradient(name, dtype, points, metric.Tokens, shape, kind, sums, F)


def _mask(dtype: torch.dtype, kind: weights.Kind) -> weights.Mask:
    (bias,) = numbers(torch.uint8 if kind.bias == 2 else dtype, 1)
    return weights.Mask(bias, *numbers(torch.int64, 1), *numbers(torch.int32, 1), SIZE, SIZE, SIZE, SIZE)


def _average(
    name: str, dtype: torch.dtype, points: tuple[object, ...], of: type, shape: tuple[object, ...], kind: weights.Kind
) -> Variant:
    hooks = {"OF_ENTRY": of.of_entry, "SCORE": of.score, "SHAPE": shape, "KIND": kind}
    hooks |= {"V": columns_of(FEATURES, dtype), **options_for(attention.TILE, attention.WARPS)}
    given = attention.Given(*numbers(dtype, 3), SIZE)
    rates = weights.Rates(*numbers(dtype, 2))
    return Variant(name, attention.average, dtype, (points, rates, _mask(dtype, kind), given), hooks)


def _gradient(
    name: str,
    dtype: torch.dtype,
    points: tuple[object, ...],
    of: type,
    shape: tuple[object, ...],
    kind: weights.Kind,
    sums: tuple[object, ...],
    F: int,
) -> Variant:
    hooks = {"OF_ENTRY": of.of_entry, "SCORE": of.score, "START": of.start, "ADD": of.add, "STORE": of.store}
    hooks |= {"SHAPE": shape, "KIND": kind, "F": F, **options_for(attention.TILE, attention.WARPS)}
    upper, into = attention.Upper(*numbers(dtype, 4), SIZE), weights.Into(*numbers(dtype, 4))
    rates = weights.Rates(*numbers(dtype, 2))
    return Variant(name, attention.gradient, dtype, (points, rates, _mask(dtype, kind), upper, into, sums), hooks)


def _mapped(argument: object, leaf: Callable[[tuple[int, ...], object], object], path: tuple[int, ...]) -> object:
    """An argument of a launch with every tensor and number replaced by what ``leaf`` says of it and its place."""
    if isinstance(argument, tuple):
        mapped = [_mapped(a, leaf, (*path, i)) for i, a in enumerate(argument)]
        return type(argument)(*mapped)
    return leaf(path, argument)


def build(variant: Variant, target: str, *, ones: bool = False) -> Usage:
    """Compile one variant for ``target``, a key of TARGETS.

    Args:
        ones: whether every whole number of the launch is 1, which reaches a kernel as a constant.
    """
    constants: dict[str | tuple[int, ...], object] = {}

    def leaf(path: tuple[int, ...], value: object) -> str:
        if isinstance(value, Tensor):
            return POINTERS[value.dtype]
        if ones:
            constants[path] = 1
        return "constexpr" if ones else "i32"

    options = {name: value for name, value in variant.constants.items() if name in SETTINGS}
    constants |= {name: value for name, value in variant.constants.items() if name not in SETTINGS}
    names = variant.kernel.arg_names[: len(variant.arguments)]
    signature = {name: _mapped(a, leaf, (i,)) for i, (name, a) in enumerate(zip(names, variant.arguments, strict=True))}
    signature |= dict.fromkeys((name for name in variant.kernel.arg_names if name in constants), "constexpr")
    source = ASTSource(variant.kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    if "cubin" in compiled.asm:
        return _of_cubin(compiled.asm["cubin"], compiled.metadata.shared)
    counts = {key: _number(rf"\.{key}:\s*(\d+)", compiled.asm["amdgcn"]) for key in ("vgpr_count", "vgpr_spill_count")}
    return Usage(counts["vgpr_count"], counts["vgpr_spill_count"], compiled.metadata.shared)


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

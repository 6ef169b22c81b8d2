"""Ahead-of-time compilation of the kernels for GPUs that are not at hand, and what the machine code uses."""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from horosphere.kernels.triton import (
    attention,
    attention_backward_kernels,
    attention_kernels,
    metric,
    metric_attention,
    metric_attention_backward_kernels,
    metric_attention_kernels,
    metric_kernels,
    nearest,
    nearest_kernels,
    sqdist_kernels,
)
from horosphere.kernels.triton.sqdist import options_for

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {torch.float32: "fp32", torch.float64: "fp64"}
# What is not a pointer to the kernel's floating point numbers.
ARGUMENTS = {
    **dict.fromkeys(("n", "m", "K", "row_stride", "column_stride"), "i32"),
    **dict.fromkeys(("length", "others", "width", "i_stride", "j_stride", "causal", "threshold"), "i32"),
    **dict.fromkeys(("first", "last", "few"), "i32"),
    **dict.fromkeys(("entries", "own_rank", "other_rank"), "i32"),
    "place": "*i64",
    "keys": "*i32",
}


class Variant(NamedTuple):
    """A kernel with its compile-time arguments and the type of its matrices."""

    name: str
    kernel: triton.JITFunction
    dtype: torch.dtype
    constants: dict
    settings: dict


class Usage(NamedTuple):
    """What one thread or block of the machine code takes; spills in bytes of stack (CUDA) or registers (AMD)."""

    registers: int
    spills: int
    shared: int


def every_variant() -> Iterator[Variant]:
    """All that are compiled."""
    return itertools.chain(variants(), nearest_variants(), attention_variants(), metric_variants())


def variants() -> Iterator[Variant]:
    """The kernels as the launcher calls them: every sign of curvature, type and use."""
    for dtype, sign in itertools.product(TYPES, (-1, 0, 1)):
        options = options_for(dtype)
        settings = {key: options.pop(key) for key in ("num_warps", "enable_fp_fusion")}
        for squared, add in ((False, False), (True, False), (True, True)):
            constants = {"SIGN": sign, "SQUARED": squared, "WEIGHTED": True, "RESOLVE": True, "ADD": add, **options}
            name = f"forward {'added' if add else 'squared' if squared else 'plain'} {sign:+d} {TYPES[dtype]}"
            yield Variant(name, sqdist_kernels.forward, dtype, constants, settings)
        for squared, curvature in ((False, False), (True, True)):
            constants = {"SIGN": sign, "SQUARED": squared, "CURVATURE": curvature, **options}
            name = f"backward {'squared, curvature' if squared else 'plain'} {sign:+d} {TYPES[dtype]}"
            yield Variant(name, sqdist_kernels.backward, dtype, constants, settings)


def nearest_variants() -> Iterator[Variant]:
    """Nearest neighbours of 10 features, of one part, whose curvature is no matter, and of a product."""
    for dtype, (name, signs) in itertools.product(TYPES, {"of one part": (0,), "of a product": (-1, 1, 0)}.items()):
        constants = {"PARTS": len(signs), "ALL": 12 * len(signs), "FEATURES": (12,) * len(signs), "SIGNS": signs}
        for kernel in (nearest_kernels.minima, nearest_kernels.members):
            options = nearest.options_for(kernel, dtype)
            settings = {key: options.pop(key) for key in ("num_warps", "enable_fp_fusion")}
            of = f"{kernel.__name__} {name} {TYPES[dtype]}"
            yield Variant(of, kernel, dtype, {**constants, **options}, settings)


def attention_variants() -> Iterator[Variant]:
    """Attention of 64 features and values: every sign of curvature, weight and kind of mask, and a product."""
    spaces = {
        "-1": ((64,), (-1,), (0,)),
        "+0": ((64,), (0,), (0,)),
        "+1": ((64,), (1,), (0,)),
        "time": ((65,), (-1,), (1,)),
    }
    product = {"product": ((32, 16), (-1, 1), (0, 0))}
    for dtype, (space, (features, signs, times)) in itertools.product(TYPES, {**spaces, **product}.items()):
        for weight, bias, causal, dropout in ((0, 0, False, False), (1, 1, True, True), (2, 2, True, False)):
            if (weight or dtype == torch.float64) and (space != "-1" or (weight and dtype == torch.float64)):
                continue
            shapes = {
                "PARTS": len(features),
                "ALL": sum(features),
                "FEATURES": features,
                "SIGNS": signs,
                "TIMES": times,
            }
            shapes |= {"WEIGHT": weight, "BIAS": bias, "CAUSAL": causal, "DROPOUT": dropout, "RESOLVE": True}
            name = f"{space} {('inverse', 'softmax', 'gaussian')[weight]} {TYPES[dtype]}"
            for swapped in (False, True):
                options = attention.options_for(dtype, "cuda")
                settings = {key: options.pop(key) for key in ("num_warps", "enable_fp_fusion")}
                own = {"V": attention.columns_of(64, dtype), "SWAPPED": swapped}
                which = "keys" if swapped else "queries"
                yield Variant(
                    f"attention {which} {name}",
                    attention_kernels.average,
                    dtype,
                    {**shapes, **options, **own},
                    settings,
                )
                own = {"F": attention.columns_of(features[-1], dtype), "SWAPPED": swapped, "PART": len(features) - 1}
                own |= {"BEFORE": sum(features[:-1]), "CURVATURE": not swapped, "RATES": not swapped}
                own |= {"BIAS_GRADIENT": int(bias == 1 and not swapped)}
                yield Variant(
                    f"gradient of {which} {name}",
                    attention_backward_kernels.points,
                    dtype,
                    {**shapes, **options, **own},
                    settings,
                )


def metric_variants() -> Iterator[Variant]:
    """Distances and attention under per-token metrics of 64 features: whose metric measures, and both sides of the
    gradient.
    """
    for dtype, (own, other) in itertools.product(TYPES, ((True, True), (True, False), (False, True))):
        which = f"{'both' if own and other else 'own' if own else 'other'} {TYPES[dtype]}"
        whose, sums = {"OWN": own, "OTHER": other}, metric.sums_for(64, dtype, "cuda")
        options = metric.options_for(dtype)
        settings = {key: options.pop(key) for key in ("num_warps", "enable_fp_fusion")}
        yield Variant(f"metric forward, {which}", metric_kernels.forward, dtype, whose | options, settings)
        yield Variant(f"metric backward, {which}", metric_kernels.backward, dtype, whose | sums | options, settings)
        options = metric_attention.options_for(dtype, "cuda")
        settings = {key: options.pop(key) for key in ("num_warps", "enable_fp_fusion")}
        common = {"SHARE": 0.5 if own and other else 1.0, "WEIGHT": 0, "RESOLVE": True, "BIAS": 0, "CAUSAL": True}
        common |= {"DROPOUT": False, **whose, **options}
        average = common | {"V": attention.columns_of(64, dtype)}
        yield Variant(f"metric attention, {which}", metric_attention_kernels.average, dtype, average, settings)
        for swapped in (False, True):
            kinds = {"SWAPPED": swapped, "RATES": not swapped, "BIAS_GRADIENT": 0}
            name = f"gradient of metric {'keys' if swapped else 'queries'}, {which}"
            kernel = metric_attention_backward_kernels.fibres
            yield Variant(name, kernel, dtype, common | sums | kinds, settings)


def build(variant: Variant, target: str) -> Usage:
    """Compile one variant for ``target``, a key of TARGETS."""
    floats = f"*{TYPES[variant.dtype]}"
    signature = {
        name: "constexpr" if name in variant.constants else ARGUMENTS.get(name, floats)
        for name in variant.kernel.arg_names
    }
    if variant.constants.get("BIAS") == 2:
        signature["bias"] = "*u8"
    constants = dict(variant.constants)
    if "PRECISION" in constants and TARGETS[target].backend == "hip":
        constants["PRECISION"] = "ieee"
    source = ASTSource(variant.kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=TARGETS[target], options=variant.settings)
    if "cubin" in compiled.asm:
        return _of_cubin(compiled.asm["cubin"], compiled.metadata.shared)
    text = compiled.asm["amdgcn"]
    counts = {key: int(re.search(rf"\.{key}:\s*(\d+)", text).group(1)) for key in ("vgpr_count", "vgpr_spill_count")}
    return Usage(counts["vgpr_count"], counts["vgpr_spill_count"], compiled.metadata.shared)


def _of_cubin(cubin: bytes, shared: int) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", said).group(1)) for key in ("REG", "STACK"))
    return Usage(registers, stack, shared)

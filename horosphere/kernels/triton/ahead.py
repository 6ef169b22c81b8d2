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

from horosphere.kernels.triton import sqdist_kernels
from horosphere.kernels.triton.sqdist import options_for

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {torch.float32: "fp32", torch.float64: "fp64"}
COUNTS = ("n", "m", "K", "row_stride", "column_stride")


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


def build(variant: Variant, target: str) -> Usage:
    """Compile one variant for ``target``, a key of TARGETS."""
    signature = {
        name: "constexpr" if name in variant.constants else "i32" if name in COUNTS else f"*{TYPES[variant.dtype]}"
        for name in variant.kernel.arg_names
    }
    source = ASTSource(variant.kernel, signature, constexprs=dict(variant.constants))
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

"""Which form of a kernel serves a call: decided by argument, device, type and shape alone."""

from __future__ import annotations

import importlib.util
import sys

import torch

IMPLS = ("auto", "reference", "tiled", "triton")
# Entries of the matrix below which the plain form is at least as fast on a CPU as blocks are.
SMALL = 2**15
TRITON_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_name(impl: str) -> None:
    """ValueError where ``impl`` is unknown."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")


def choose(impl: str, device: torch.device, dtype: torch.dtype, entries: int) -> str:
    """ "reference", "tiled" or "triton": every kernel has the three forms.

    Raises ValueError where ``impl`` is unknown, or was asked for by name and cannot serve: it is never swapped.
    """
    check_name(impl)
    if impl == "triton":
        reason = _no_triton(device, dtype)
        if reason:
            raise ValueError(f"impl='triton' cannot serve this call: {reason}")
    if impl != "auto":
        return impl
    if device.type == "cpu":
        return "reference" if entries < SMALL else "tiled"
    return "tiled" if _no_triton(device, dtype) else "triton"


def _no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton cannot serve, None where it can."""
    if dtype not in TRITON_TYPES:
        return f"it takes {', '.join(str(t) for t in TRITON_TYPES)}, not {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda" or _interpreting():
        return None
    return f"it runs on GPUs, and the points are on {device}"


def _interpreting() -> bool:
    """Whether Triton was loaded in its interpreter, which takes tensors on the CPU."""
    triton = sys.modules.get("triton")
    return triton is not None and triton.knobs.runtime.interpret

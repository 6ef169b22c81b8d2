"""numba's decorators as the package uses them: machine code is kept on disk, for as long as its sources are the same.

numba's own cache looks at the file of a function alone, and would go on using the code of a function after a change to
what it calls in another file. Here the code is good for the sources of the function's folder, of ``_numerics`` and of
this file. Where no folder can be written code is made anew in every process, and a cut file on disk is made again.

Importing this imports numba.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numba
from numba.core import sigutils
from numba.core.caching import FunctionCache, NullCache
from numba.core.ccallback import CFunc

__all__ = ["PARALLEL", "cfunc", "inline", "njit"]

_log = logging.getLogger("horosphere")
# Sums as they are written, but a product and a sum may be one instruction, and the sign of 0 is open.
FAST = frozenset({"contract", "nsz"})
# Sums in any order, which vectorise.
ANY_ORDER = FAST | {"reassoc"}


@functools.cache
def _digest(folder: Path) -> str:
    """Of the sources that compiled functions of a folder are made of."""
    package = Path(__file__).parent
    total = hashlib.sha256(numba.__version__.encode())
    for file in [*sorted(folder.glob("*.py")), package / "_numerics.py", package / "_compiled.py"]:
        total.update(file.name.encode() + file.read_bytes())
    return total.hexdigest()


@functools.cache
def _tell(where: str) -> None:
    _log.info("numba compiles loops of horosphere, which takes some seconds, once: %s", where)


class _SourceCache(FunctionCache):
    """numba's cache of one function, with the digest of all its sources in place of the stamp of one file."""

    def __init__(self, function: Callable):
        super().__init__(function)
        self._cache_file._source_stamp = _digest(Path(function.__code__.co_filename).parent)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:  # whatever a cut or foreign file makes pickle raise
            _log.warning("a file of compiled loops in %s is made again: %s", self.cache_path, error)
            self.flush()
            found = None
        if found is None:
            _tell(f"the result is kept in {self.cache_path}")
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:  # a full disk, say: the code works without
            _log.warning("compiled loops are not kept in %s: %s", self.cache_path, error)


# Held while a parallel loop runs: numba's workqueue layer ends the process where two threads start one at a time.
PARALLEL = threading.Lock()


def _cache_of(function: Callable) -> Any:
    try:
        return _SourceCache(function)
    except RuntimeError as error:  # no folder that can be written
        _tell(f"the result is not kept, {error}")
        return NullCache()


def njit(
    *, fastmath: Iterable[str] = FAST, bare: bool = False, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: compile at the first call of each signature.

    Args:
        fastmath: what LLVM may change in sums.
        bare: called by compiled code alone: without the wrappers that Python needs, which take most of the time.
        options: of numba.njit.
    """
    if bare:
        options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        dispatcher = numba.njit(fastmath=set(fastmath), error_model="numpy", **options)(function)
        dispatcher._cache = _cache_of(function)
        return dispatcher

    return decorate


def inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the body becomes part of each caller, with the caller's options."""
    return numba.njit(fastmath=set(FAST), error_model="numpy", inline="always")(function)


def cfunc(signature: Any) -> Callable[[Callable[..., Any]], CFunc]:
    """Decorator: compile now, as a function with the address ``address`` that C can call."""

    def decorate(function: Callable[..., Any]) -> CFunc:
        options = {"error_model": "numpy", "fastmath": set(FAST)}
        made = CFunc(function, sigutils.normalize_signature(signature), locals={}, options=options)
        made._cache = _cache_of(function)  # type: ignore[attr-defined]  # numba's stub leaves it out
        made.compile()
        return made

    return decorate

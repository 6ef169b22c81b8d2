"""Distance kernels: tensors in, tensors out. They know no manifold; a manifold's chords are all they are given.

:func:`explain` tells which form of a kernel serves a call; the logger ``horosphere.kernels`` does at DEBUG.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horosphere.kernels import dispatch
from horosphere.kernels.dispatch import Choice

__all__ = ["Choice", "explain"]


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[Choice, ...]:
    """Call a function, and return which form every kernel in it took, and why not another.

    Gradients are explained where the function asks for them. For example
    ``hs.kernels.explain(hs.cdist, x, y, hs.Sphere())`` or
    ``hs.kernels.explain(lambda: model(ids, labels=ids).loss.backward())``.

    Args:
        function: what is called, once, with ``args`` and ``kwargs``; its result is dropped, its errors are raised.

    Returns:
        :class:`Choice` (operation, form, refused: other form -> reason), in the order of the calls.
    """
    choices: list[Choice] = []
    token = dispatch.recording(choices)
    try:
        function(*args, **kwargs)
    finally:
        dispatch.stop_recording(token)
    return tuple(choices)

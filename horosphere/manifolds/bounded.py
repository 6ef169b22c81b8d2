"""A learned number that keeps to an interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from horosphere import _numerics

__all__ = ["BoundedParameter"]


def _rebuild(cls: type[BoundedParameter], data: Tensor, low: float, high: float, requires_grad: bool):
    parameter = torch.Tensor._make_subclass(cls, data, requires_grad)
    parameter.low, parameter.high = low, high
    return parameter


class BoundedParameter(torch.nn.Parameter):
    """A parameter whose numbers an optimizer keeps in [low, high]: a curvature that must keep its sign, a scale.

    The optimizers of :mod:`horosphere.optim` clamp it after every step in which it has a gradient, wherever it sits:
    in a layer that has no points, among the parameters of a model, in a manifold of points. After a step of another
    optimizer, :func:`horosphere.optim.project_` does. Copies and files (``deepcopy``, ``pickle``, ``torch.save``) keep
    the interval; a ``state_dict`` holds the numbers alone. Nothing is clamped where it is made or loaded.

    Args:
        data: the numbers; the parameter keeps its own copy.
        low, high: the interval, in units of the numbers; infinite for none.
        requires_grad: whether gradients are recorded.

    Raises:
        ValueError: the interval is empty.
    """

    low: float
    high: float
    _asked: int

    def __new__(
        cls, data: Tensor, low: float = -math.inf, high: float = math.inf, requires_grad: bool = True
    ) -> BoundedParameter:
        if not low <= high:
            raise ValueError(f"low must be at most high; got {low} and {high}")
        return _rebuild(cls, data.detach().clone(), float(low), float(high), requires_grad)

    @torch.no_grad()
    def constrain_(self) -> None:
        """Clamp the numbers to the interval."""
        self.clamp_(self.low, self.high)

    def moved(self) -> bool:
        """Whether the numbers may have changed since this was last asked, and can be read here.

        Not while torch.compile traces, under torch.func, in a CUDA graph's capture or without data: a check of the
        numbers, which waits for the device, is made once a step and nowhere else.
        """
        if torch.compiler.is_compiling() or _numerics.transformed() or self.is_meta or self.is_inference():
            return False
        if self.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        version = self._version
        if isinstance(self, FakeTensor) or getattr(self, "_asked", None) == version:
            return False
        self._asked = version
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundedParameter:
        if id(self) not in memo:
            data = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = _rebuild(type(self), data, self.low, self.high, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.data, self.low, self.high, self.requires_grad)


def keeps_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn`` of ``Module._apply``, such as a cast, with its result in float32 at least, rounded from what came in."""

    def apply(value: Tensor) -> Tensor:
        out = fn(value)
        if not out.is_floating_point() or out.dtype.itemsize >= torch.float32.itemsize:
            return out
        return value.to(device=out.device, dtype=torch.float32)

    return apply


torch.serialization.add_safe_globals([_rebuild, BoundedParameter])

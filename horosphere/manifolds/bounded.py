"""A learned number that keeps to an interval."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

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

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundedParameter:
        if id(self) not in memo:
            data = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = _rebuild(type(self), data, self.low, self.high, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.data, self.low, self.high, self.requires_grad)


torch.serialization.add_safe_globals([_rebuild, BoundedParameter])

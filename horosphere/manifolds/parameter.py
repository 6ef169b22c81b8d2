"""A parameter whose rows are points of a manifold, safe to copy, pickle, save and load."""

from __future__ import annotations

import copy
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import Tensor

from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import check_manifold

__all__ = ["ManifoldParameter", "allow_loading"]


_Class = TypeVar("_Class", bound=type)


def allow_loading(cls: _Class) -> _Class:
    """Class decorator: let ``torch.load`` rebuild instances under its safe default, ``weights_only=True``.

    A :class:`ManifoldParameter` is saved together with its manifold, so a manifold class of your own needs
    this once, at import, before ``torch.load`` accepts a file that holds it. Every manifold of this
    package has it.
    """
    torch.serialization.add_safe_globals([cls])
    return cls


def _rebuild(cls: type[ManifoldParameter], data: Tensor, manifold: Any, requires_grad: bool) -> ManifoldParameter:
    """Put stored numbers back without touching them: a copy is equal bit for bit, never projected again."""
    parameter = torch.Tensor._make_subclass(cls, data, requires_grad)
    parameter.manifold = manifold
    return parameter


def _as_data(data: Any) -> Tensor:
    if isinstance(data, Tensor):
        tensor = data.detach()
    else:
        try:
            tensor = torch.as_tensor(data, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"data must be a tensor, a NumPy array or nested lists of numbers; got {type(data).__name__}: {error}"
            ) from None
    if tensor.is_complex():
        raise TypeError(f"data must be real; got {tensor.dtype}")
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


class ManifoldParameter(geoopt.ManifoldParameter):
    """A trainable point, or batch of points, of a manifold: ``projx(data)``, so it starts on the manifold.

    A subclass of ``geoopt.ManifoldParameter`` and of ``torch.nn.Parameter``: modules register it, every
    optimizer accepts it, and tensor functions return plain tensors. Copies (``copy``, ``deepcopy``,
    ``pickle``, ``torch.save``) keep the class, the manifold and every bit of the numbers; a learnable
    curvature shared by several parameters of one module stays shared inside the copy and is not shared
    with the original. ``torch.load`` accepts it under its safe default.

    A module moved by ``.to(dtype)``, ``.double()`` or ``.to("cuda")`` keeps the class. Moving a module to the
    ``meta`` device, or ``load_state_dict(..., assign=True)``, replaces every parameter by a plain
    ``torch.nn.Parameter``: that is torch's own doing, so build such a module anew instead.

    Args:
        data: (..., point) raw numbers: a tensor, NumPy array or nested lists; integers become the default
            dtype. The trailing ``manifold.ndim`` dimensions are one point. The parameter keeps its own copy.
        manifold: any ``geoopt.Manifold``; may be left out where ``data`` already carries one.
        requires_grad: whether gradients are recorded.

    Raises:
        TypeError: ``data`` is not numeric, or ``manifold`` is not a manifold.
        ValueError: the shape of ``data`` does not fit the manifold, or ``data`` carries another manifold.
    """

    def __new__(cls, data: Any, manifold: Any = None, requires_grad: bool = True) -> ManifoldParameter:
        if isinstance(data, geoopt.ManifoldTensor):
            if manifold is not None and manifold is not data.manifold:
                raise ValueError(
                    f"manifold is {manifold!r}, but data is already on {data.manifold!r}; "
                    "pass data.detach() to project its numbers on the other manifold"
                )
            manifold = data.manifold
        check_manifold(manifold)
        tensor = _as_data(data)
        if tensor.dim() < manifold.ndim:
            raise ValueError(
                f"data of shape {tuple(tensor.shape)} holds no point of {manifold!r}: "
                f"a point takes the last {manifold.ndim} dimension(s)"
            )
        with torch.no_grad():
            manifold.assert_check_point(tensor)
            # Some projections return their input or a view of it.
            point = manifold.projx(tensor).clone(memory_format=torch.contiguous_format)
        return _rebuild(cls, point, manifold, requires_grad)

    def __repr__(self) -> str:
        return f"ManifoldParameter on {self.manifold!r} containing:\n{self.data!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> ManifoldParameter:
        if id(self) not in memo:
            data = self.data.clone(memory_format=torch.preserve_format)
            manifold = copy.deepcopy(self.manifold, memo)
            memo[id(self)] = _rebuild(type(self), data, manifold, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.data, self.manifold, self.requires_grad)


# ModuleList and slice: how a product manifold holds its parts and remembers the place of each.
torch.serialization.add_safe_globals([_rebuild, ManifoldParameter, torch.nn.ModuleList, slice])
for _name in (
    "Euclidean",
    "Lorentz",
    "PoincareBall",
    "ProductManifold",
    "Sphere",
    "SphereProjection",
    "Stereographic",
):
    allow_loading(getattr(geoopt, _name))

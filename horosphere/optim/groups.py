"""Sorting parameters into groups, and projecting points after someone else moved their curvature."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from horosphere.manifolds.bounded import BoundedParameter
from horosphere.optim._step import manifold_of

__all__ = ["param_groups", "project_"]


def param_groups(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Sort the parameters of a module into points and flat numbers, as groups for an optimizer.

    Returns up to two dicts with the keys "name" ("manifold" or "flat") and "params"; an empty one is left
    out. Every parameter comes once. Learned curvatures of the points' manifolds are among the flat ones, also
    where the manifold is no submodule of ``module``. For a rate per group::

        groups = hs.optim.param_groups(model)
        for group in groups:
            group["lr"] = {"manifold": 1e-2, "flat": 1e-3}[group["name"]]
        optimizer = hs.optim.RiemannianAdam(groups)

    Raises:
        TypeError: ``module`` is not a ``torch.nn.Module``.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module; got {type(module).__name__}")
    parameters = list(module.parameters())
    points = [p for p in parameters if manifold_of(p) is not None]
    flat = [p for p in parameters if manifold_of(p) is None]
    seen = {id(p) for p in flat}
    for p in points:
        for kappa in curvatures_of(p):
            if kappa.requires_grad and id(kappa) not in seen:
                seen.add(id(kappa))
                flat.append(kappa)
    groups = [{"name": "manifold", "params": points}, {"name": "flat", "params": flat}]
    return [group for group in groups if group["params"]]


def curvatures_of(p: Tensor) -> list[torch.nn.Parameter]:
    """The parameters of a point's manifold."""
    manifold = manifold_of(p)
    return [] if manifold is None else list(manifold.parameters())


@torch.no_grad()
def project_(module_or_parameters: torch.nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Bring curvatures into range and points back on their manifolds (``projx``), in place.

    Call it after something other than an optimizer of this package moved a learned curvature, of points or of
    a layer: another optimizer, a loaded value. Every :class:`~horosphere.manifolds.BoundedParameter` comes into
    its interval first. (The optimizers of this package do both by themselves when they hold the curvature.) It
    does not know an optimizer's moments: ``optimizer.stabilize()`` projects those too.

    Args:
        module_or_parameters: a module, a parameter, or parameters; plain parameters are left alone.

    Raises:
        TypeError: something else was passed.
    """
    parameters: list[Tensor]
    if isinstance(module_or_parameters, torch.nn.Module):
        parameters = list(module_or_parameters.parameters())
    elif isinstance(module_or_parameters, Tensor):
        parameters = [module_or_parameters]
    else:
        parameters = list(module_or_parameters)
    for p in parameters:
        if not isinstance(p, Tensor):
            raise TypeError(
                f"module_or_parameters must be a module, a parameter or parameters; it holds a {type(p).__name__}"
            )
    for number in [*parameters, *(kappa for p in parameters for kappa in curvatures_of(p))]:
        if isinstance(number, BoundedParameter):
            number.constrain_()
    for p in parameters:
        manifold = manifold_of(p)
        if manifold is not None:
            p.copy_(manifold.projx(p.detach()))

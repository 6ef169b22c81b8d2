"""What the two optimizers share: the order of a step, skipped points, and following a learned curvature."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.bounded import BoundedParameter
from horosphere.optim._rows import finite_points, gradient_of, over_points

if TYPE_CHECKING:
    from torch.optim import Optimizer as _Optimizer
else:
    _Optimizer = object

FLAT = geoopt.Euclidean(ndim=1)
# Settings of a group that are finite numbers >= 0.
NUMBERS = ("lr", "eps", "weight_decay", "momentum")


def manifold_of(parameter: Tensor) -> geoopt.Manifold | None:
    """The manifold a parameter carries; None for a plain (flat) one."""
    return parameter.manifold if isinstance(parameter, geoopt.ManifoldTensor) else None


class RiemannianStep(_Optimizer):
    """Mixin before geoopt's optimizer classes.

    Points move first, on the curvature their gradients were taken at; then flat parameters, learned
    curvatures among them, which keep to their intervals; then the points follow the curvatures that moved.
    """

    _default_manifold: geoopt.Manifold  # geoopt's
    _tangent_state: str
    _own_defaults: dict[str, Any]  # what a group has beyond geoopt's
    _warned = False
    skipped_rows = 0

    if TYPE_CHECKING:  # of geoopt's optimizers, which have no types

        def __init__(self, params: Any, **settings: Any) -> None: ...

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for name, value in self._own_defaults.items():
            param_group.setdefault(name, value)
        for name in NUMBERS:
            value = param_group.get(name, self.defaults.get(name, 0.0))
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be a finite number >= 0; got {value}")
        super().add_param_group(param_group)
        self.__dict__.pop("_curved", None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. Groups saved by geoopt's or torch's optimizer of the same kind are taken too: what they lack has
        the value that this optimizer was made with.
        """
        known = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, known, strict=True):
            for name, value in own.items():
                group.setdefault(name, value)

    def __getstate__(self) -> dict[str, Any]:
        own = ("skipped_rows", "_warned", "_own_defaults", "_stabilize")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure``, if given, recomputes and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        curvatures = self._learned_curvatures()
        before = [[k._version for k in kappas] for _, kappas in curvatures]
        flat: list[list[Tensor]] = []
        for group in self.param_groups:
            plain = []
            for p in group["params"]:
                if p.grad is None:
                    continue
                manifold = manifold_of(p)
                if manifold is None and p.grad.is_sparse and not self._flat_takes_sparse:
                    manifold = FLAT if p.dim() > 1 else self._default_manifold
                if manifold is None:
                    plain.append(p)
                else:
                    self._move(group, p, manifold)
            flat.append(plain)
        flat = self._without_bad_curvatures(flat, curvatures)
        for group, plain in zip(self.param_groups, flat, strict=True):
            held = [p for p in plain if self._holds_its_value(p)] if group["weight_decay"] else []
            free = [p for p in plain if not any(p is q for q in held)] if held else plain
            if free:
                self._move_flat(group, free, group["weight_decay"])
            if held:
                self._move_flat(group, held, 0.0)
            for p in plain:
                if isinstance(p, BoundedParameter):
                    p.constrain_()
        moved = [m for (m, kappas), old in zip(curvatures, before, strict=True) if [k._version for k in kappas] != old]
        if moved:
            self._follow(moved)
        for group in self.param_groups:
            if group["stabilize"] is not None and any(p.grad is not None for p in group["params"]):
                group["step"] = group.get("step", 0) + 1
                if group["step"] % group["stabilize"] == 0:
                    self.stabilize_group(group)
        return loss

    @torch.no_grad()
    def stabilize_group(self, group: dict[str, Any]) -> None:
        """Project the points of a group on their manifolds and their moments on the tangent spaces."""
        for p in group["params"]:
            self._reproject(p)

    def state_dict(self) -> dict[str, Any]:
        """As torch's; a parameter swapped in a group after a step is named instead of a bare KeyError."""
        known = {id(p) for group in self.param_groups for p in group["params"]}
        keys: Iterable[Any] = self.state  # whatever a loaded state has
        for p in keys:
            if isinstance(p, Tensor) and id(p) not in known:
                raise RuntimeError(
                    f"the optimizer holds state for a {type(p).__name__} of shape {tuple(p.shape)} that is "
                    "in no parameter group any more: the parameter object was replaced after a step "
                    "(deepcopy, a new wrapper). Put the original object back, or build a new optimizer on "
                    "the new parameters"
                )
        return super().state_dict()

    def _move(self, group: dict[str, Any], p: Tensor, manifold: geoopt.Manifold) -> None:
        raise NotImplementedError

    def _move_flat(self, group: dict[str, Any], params: list[Tensor], weight_decay: float) -> None:
        raise NotImplementedError

    _flat_takes_sparse = False

    def _holds_its_value(self, p: Tensor) -> bool:
        """Whether weight decay leaves a flat parameter alone: a curvature, an eps, a power."""
        return isinstance(p, BoundedParameter) or any(
            p is k for _, kappas in self._learned_curvatures() for k in kappas
        )

    def _decayed(self, group: dict[str, Any], grad: Tensor, point: Tensor, manifold: geoopt.Manifold | None) -> Tensor:
        """The gradient with weight decay; ``manifold`` None: the rows are of a flat parameter."""
        if group["weight_decay"] and (manifold is None or group["decay_points"]):
            return grad.add(point, alpha=group["weight_decay"])
        return grad

    def _usable(self, p: Tensor, ndim: int, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The points whose gradient is finite (None: all), and the gradient, 0 at the others; (None, None) if
        there is nothing to do."""
        good = finite_points(ndim, grad)
        if good is None:
            return None, grad if grad.numel() else None
        if not bool(good.any()):
            self._count_skipped(p, good.numel())
            return None, None
        return good, torch.where(over_points(good, grad), grad, 0.0)

    def _landed(self, p: Tensor, ndim: int, good: Tensor | None, *updated: Tensor) -> Tensor | None:
        """The mask of points to write: finite gradient and finite update; the others are counted."""
        finite = finite_points(ndim, *updated)
        if finite is not None:
            good = finite if good is None else good & finite
        if good is not None:
            self._count_skipped(p, int((~good).sum()))
        return good

    def _count_skipped(self, p: Tensor, count: int) -> None:
        self.skipped_rows += count
        if not self._warned:
            self._warned = True
            rate = next(group["lr"] for group in self.param_groups if any(q is p for q in group["params"]))
            warnings.warn(
                f"{type(self).__name__}: {count} point(s) of a parameter of shape {tuple(p.shape)} had a "
                "gradient or an update that is not finite and stayed where they were; the others moved. If that goes "
                f"on, take a smaller lr than {float(rate):g}. Further cases are only counted, in "
                "optimizer.skipped_rows",
                RuntimeWarning,
                stacklevel=2,
            )

    def _learned_curvatures(self) -> list[tuple[geoopt.Manifold, list[Tensor]]]:
        """The manifolds of this optimizer's points that have parameters, found once per set of groups."""
        if "_curved" not in self.__dict__:
            found = {}
            for group in self.param_groups:
                for p in group["params"]:
                    manifold = manifold_of(p)
                    if manifold is not None and id(manifold) not in found:
                        found[id(manifold)] = (manifold, list(manifold.parameters()))
            self._curved = [pair for pair in found.values() if pair[1]]
        return self._curved

    def _without_bad_curvatures(
        self, flat: list[list[Tensor]], curvatures: Iterable[tuple[geoopt.Manifold, list[Tensor]]]
    ) -> list[list[Tensor]]:
        """A curvature that became NaN would take every point, or a layer, with it: its bad gradients are skipped
        too."""
        kappas = {id(k) for _, ks in curvatures for k in ks}
        kept = []
        for params in flat:
            good = []
            for p in params:
                learned = isinstance(p, BoundedParameter) or id(p) in kappas
                if learned and finite_points(0, gradient_of(p)) is not None:
                    self._count_skipped(p, 1)
                else:
                    good.append(p)
            kept.append(good)
        return kept

    def _follow(self, moved: list[geoopt.Manifold]) -> None:
        ids = {id(m) for m in moved}
        for group in self.param_groups:
            for p in group["params"]:
                if id(manifold_of(p)) in ids:
                    self._reproject(p)

    def _reproject(self, p: Tensor) -> None:
        manifold = manifold_of(p)
        if manifold is None:
            return
        p.copy_(manifold.projx(p.detach()))
        moment = self.state[p].get(self._tangent_state) if p in self.state else None
        if moment is not None:
            moment.copy_(manifold.proju(p.detach(), moment))

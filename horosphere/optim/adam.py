"""Riemannian Adam."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.optim import _fused
from horosphere.optim._rows import at_rows, gradient_of, read, touched, write, zeros_for
from horosphere.optim._step import RiemannianStep, manifold_of

__all__ = ["RiemannianAdam"]


class RiemannianAdam(RiemannianStep, geoopt.optim.RiemannianAdam):
    """Adam on manifolds: moments live in tangent spaces and travel with the points.

    With g the Riemannian gradient at x (``egrad2rgrad``), <.,.> the metric there and t the number of steps::

        m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) <g, g>
        u  = -lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        x <- exp_x(u)                   m <- transported along u

    v is one number a point (one a part for products, one a coordinate on flat space), so ``lr`` is about the
    geodesic distance a point moves in a step. (Becigneul & Ganea 2019, as in geoopt; update by the
    exponential map.)

    - *Plain parameters* get torch.optim.Adam's own update, bit for bit, whatever their gradient.
    - *Sparse gradients* are accepted beside dense ones. Duplicate rows are summed; only touched rows are
      read or written, so the cost does not depend on the number of rows. Moments are lazy, as in
      torch.optim.SparseAdam: those of untouched rows do not decay, and t is the parameter's step count,
      not the row's. A plain parameter with a sparse gradient takes the same path on flat space.
    - *A point whose gradient or update is not finite* stays where it is, moments included; the others go on.
      ``optimizer.skipped_rows`` counts them, and the first is warned about. A learned curvature is treated
      the same.
    - *Learned curvatures* may sit in any group, and need no points: those of a layer will do. They keep to
      their interval (:class:`~horosphere.manifolds.BoundedParameter`): the ball's stays below 0. After a step
      in which one moved, all points are projected on their manifold and first moments on the tangent spaces.
      If another optimizer moves the curvature, call :func:`horosphere.optim.project_` after its step.
    - ``p.grad`` is never changed.

    Args:
        params: parameters or group dicts; :func:`horosphere.optim.param_groups` sorts a module's.
        lr: step length, >= 0.
        betas: decay rates (b1, b2) of the moments, in [0, 1).
        eps: added to the root of v.
        weight_decay: adds ``weight_decay * x`` (stored numbers; touched rows only) to the gradients of flat parameters.
            Learned curvatures and every other :class:`~horosphere.manifolds.BoundedParameter` are left out.
        amsgrad: use the largest v so far.
        retraction: move by ``retr`` instead of the exponential map: cheaper on some manifolds, equal up to
            terms of second order in ``lr``. Can be set per group.
        decay_points: let ``weight_decay`` act on points too, before their gradient becomes Riemannian, as geoopt does;
            it pulls the stored numbers towards 0. Can be set per group.
        stabilize: also project everything every so many steps, as in geoopt. Not needed with manifolds of
            this package.

    Raises:
        ValueError: an argument is out of range or not finite.
        RuntimeError: from ``state_dict()``, when a parameter object was replaced in a group after a step.
    """

    _tangent_state = "exp_avg"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        retraction: bool = False,
        decay_points: bool = False,
        stabilize: int | None = None,
    ) -> None:
        self._own_defaults = {"retraction": retraction, "decay_points": decay_points}
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            stabilize=stabilize,
        )

    def _move(self, group: dict[str, Any], p: Tensor, manifold: geoopt.Manifold) -> None:
        ndim = manifold.ndim
        rows, grad = touched(p, gradient_of(p), ndim)
        manifold = at_rows(manifold, rows)
        if _fused.refuses(p, rows, grad, manifold, group, self.state.get(p)) is None:
            self._move_compiled(group, p, rows, grad, manifold)
            return
        good, usable = self._usable(p, ndim, grad)
        if usable is None:
            return
        state = self.state[p]
        point = read(p, rows)
        grad = self._decayed(group, usable, point, manifold_of(p))
        grad = manifold.egrad2rgrad(point, grad)
        # A squared length; rounding on an indefinite ambient form may leave it just below 0.
        square = manifold.component_inner(point, grad).clamp(min=0)
        if not state:
            state.update(_nothing_yet(p, zeros_for(p, rows, square)))
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])

        beta1, beta2 = group["betas"]
        count = state["step"].item() + 1
        first = read(state["exp_avg"], rows).lerp(grad, 1 - beta1)
        second = read(state["exp_avg_sq"], rows).mul(beta2).add_(square, alpha=1 - beta2)
        largest = torch.maximum(read(state["max_exp_avg_sq"], rows), second) if group["amsgrad"] else second
        scale = (largest / (1 - beta2**count)).sqrt_().add_(group["eps"])
        direction = (first / scale).mul_(-group["lr"] / (1 - beta1**count))
        point, first = hooks.travel(manifold, point, direction, first, retract=group["retraction"])

        good = self._landed(p, ndim, good, point, first, second)
        state["step"] += 1
        write(p, rows, point, good)
        write(state["exp_avg"], rows, first, good)
        write(state["exp_avg_sq"], rows, second, good)
        if group["amsgrad"]:
            write(state["max_exp_avg_sq"], rows, largest, good)

    def _move_compiled(
        self, group: dict[str, Any], p: Tensor, rows: Tensor | None, grad: Tensor, manifold: geoopt.Manifold
    ) -> None:
        """The same by :mod:`horosphere.optim._fused`."""
        state = self.state.get(p) or _nothing_yet(p, torch.zeros_like(p.detach()[..., :1]))
        count, unusable, stayed = _fused.step(p, rows, grad, manifold, group, state)
        if unusable < count:  # else there was nothing to do
            state["step"] += 1
            self.state[p] = state
        if stayed:
            self._count_skipped(p, stayed)

    def _move_flat(self, group: dict[str, Any], params: list[Tensor], weight_decay: float) -> None:
        names = (
            ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
            if group["amsgrad"]
            else ("step", "exp_avg", "exp_avg_sq")
        )
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                for name in names[1:]:
                    state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        columns = {name: [self.state[p][name] for p in params] for name in names}
        adam(
            # detached: fast paths on an accelerator take plain tensors only, a BoundedParameter is not one
            [p.detach() for p in params],
            [gradient_of(p) for p in params],
            columns["exp_avg"],
            columns["exp_avg_sq"],
            columns.get("max_exp_avg_sq", []),
            columns["step"],
            has_complex=any(p.is_complex() for p in params),
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=weight_decay,
            eps=group["eps"],
            maximize=False,
        )


def _nothing_yet(p: Tensor, second: Tensor) -> dict[str, Tensor]:
    """The state of points before their first step."""
    step = torch.tensor(0.0, dtype=torch.float32, device="cpu")
    return {"step": step, "exp_avg": torch.zeros_like(p.detach()), "exp_avg_sq": second}

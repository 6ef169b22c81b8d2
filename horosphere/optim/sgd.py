"""Riemannian stochastic gradient descent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.optim._rows import at_rows, gradient_of, read, touched, write
from horosphere.optim._step import RiemannianStep, manifold_of

__all__ = ["RiemannianSGD"]


class RiemannianSGD(RiemannianStep, geoopt.optim.RiemannianSGD):
    """Gradient descent along geodesics: ``x <- exp_x(-lr g)``, g the Riemannian gradient.

    With momentum mu, dampening d and buffer b (a tangent vector, 0 at first, transported along with the
    point)::

        b <- mu b + (1 - d) g           x <- exp_x(-lr b)           nesterov: exp_x(-lr (g + mu b))

    (Bonnabel 2013; momentum as in geoopt, whose buffer however starts with the Euclidean gradient.)
    Sparse gradients, non-finite points, learned curvatures and ``p.grad`` are handled as in
    :class:`~horosphere.optim.RiemannianAdam`: with a sparse gradient only touched rows are read or
    written and the momentum of untouched rows does not decay. Plain parameters get torch.optim.SGD's own
    update, bit for bit, sparse gradients included (so momentum there is torch's).

    Args:
        params: parameters or group dicts; :func:`horosphere.optim.param_groups` sorts a module's.
        lr: step length, in units of distance per unit of gradient, >= 0.
        momentum: mu, >= 0.
        dampening: d.
        weight_decay: adds ``weight_decay * x`` (stored numbers; touched rows only) to the gradients of flat parameters.
            Learned curvatures and every other :class:`~horosphere.manifolds.BoundedParameter` are left out.
        nesterov: look ahead along the momentum; needs momentum > 0 and dampening = 0.
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

    _tangent_state = "momentum_buffer"
    _flat_takes_sparse = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        retraction: bool = False,
        decay_points: bool = False,
        stabilize: int | None = None,
    ) -> None:
        self._own_defaults = {"retraction": retraction, "decay_points": decay_points}
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            stabilize=stabilize,
        )

    def _move(self, group: dict[str, Any], p: Tensor, manifold: geoopt.Manifold) -> None:
        ndim = manifold.ndim
        rows, grad = touched(p, gradient_of(p), ndim)
        manifold = at_rows(manifold, rows)
        good, usable = self._usable(p, ndim, grad)
        if usable is None:
            return
        point = read(p, rows)
        grad = self._decayed(group, usable, point, manifold_of(p))
        grad = manifold.egrad2rgrad(point, grad)
        lr, momentum = group["lr"], group["momentum"]
        if not momentum:
            point = (manifold.retr if group["retraction"] else manifold.expmap)(point, grad * -lr)
            write(p, rows, point, self._landed(p, ndim, good, point))
            return

        state = self.state[p]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(p.detach())
        buffer = read(state["momentum_buffer"], rows).mul(momentum).add_(grad, alpha=1 - group["dampening"])
        direction = grad.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        point, buffer = hooks.travel(manifold, point, direction * -lr, buffer, retract=group["retraction"])
        good = self._landed(p, ndim, good, point, buffer)
        write(p, rows, point, good)
        write(state["momentum_buffer"], rows, buffer, good)

    def _move_flat(self, group: dict[str, Any], params: list[Tensor], weight_decay: float) -> None:
        momentum = group["momentum"]
        buffers = [self.state[p].get("momentum_buffer") if momentum else None for p in params]
        grads = [gradient_of(p) for p in params]
        sgd(
            # detached: fast paths on an accelerator take plain tensors only, a BoundedParameter is not one
            [p.detach() for p in params],
            grads,
            buffers if momentum else [],
            has_sparse_grad=any(g.is_sparse for g in grads),
            weight_decay=weight_decay,
            momentum=momentum,
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
        )
        if momentum:
            for p, buffer in zip(params, buffers, strict=True):
                self.state[p]["momentum_buffer"] = buffer

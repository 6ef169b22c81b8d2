"""Means of points on a manifold: the Frechet mean, found by iteration, and the midpoint, which has a closed form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._numerics import safe_sqrt, sin_cos
from horosphere._points import as_points
from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve
from horosphere.manifolds.curvature import ConstantCurvature


class FrechetMean(NamedTuple):
    """What :func:`frechet_mean` found.

    Attributes:
        mean: (..., D), in the type of the points.
        converged: bool (...), whether ``residual`` came down to the tolerance.
        iterations: int64 (...), steps taken.
        residual: float64 (...), length of the mean tangent ``sum_i w_i log_m(x_i)``, 0 at the exact mean.
    """

    mean: Tensor
    converged: Tensor
    iterations: Tensor
    residual: Tensor


def frechet_mean(
    x: Tensor,
    manifold: geoopt.Manifold,
    weights: Tensor | None = None,
    *,
    tol: float | None = None,
    max_iter: int = 100,
) -> FrechetMean:
    r"""The point with the smallest weighted sum of squared distances, :math:`\arg\min_m \sum_i w_i d(m, x_i)^2`.

    It is not the :func:`midpoint`: of (.9, 0), (0, .1), (-.2, 0) in the unit ball the Frechet mean is (0.397982,
    0.015433) and the midpoint, which minimises another sum, (0.478637, 0.010676).

    Karcher flow :math:`m \leftarrow \exp_m(t\, H^{-1} \sum_i w_i \log_m x_i)` in float64, from the midpoint (where
    there is none, from the heaviest point). H is the Hessian of half the objective where the curvature is a known
    constant <= 0, and the identity elsewhere; t is 1 and halved until the objective falls enough (Armijo). Products are
    solved part by part. On positive curvature the mean is unique when the points lie in an open half-sphere;
    otherwise a local one is found.

    Args:
        x: points (..., N, D), N >= 1.
        manifold: any geoopt.Manifold with ``expmap``, ``logmap`` and ``inner``.
        weights: (..., N), nonnegative, not all zero; divided by their sum. None weighs all points alike. A row of
            weight 0 takes no part, whatever it holds (NaN, a point outside of the ball).
        tol: bound of the residual, relative to the root mean square distance of the points from the mean; a mean
            tangent below the rounding of the mean's own coordinates is enough too. None: 1e-6, 1e-10 for float64
            points.
        max_iter: largest number of steps.

    Returns:
        :class:`FrechetMean`. On manifolds of constant curvature the mean carries first and second derivatives in x,
        weights and a learnable kappa by the implicit function theorem (two Newton steps from the fixed point are in the
        graph, not the iteration); elsewhere the iteration itself is in the graph. An entry that did not converge has
        the derivative of one plain step.

    Raises:
        ValueError: no points, weights that are negative, not finite, all zero or of another shape, tol or max_iter < 0.
        TypeError: x is no floating point tensor, or manifold no manifold.

    Sources: Karcher (1977), Riemannian center of mass and mollifier smoothing; Afsari (2011), Riemannian L^p center of
    mass: existence, uniqueness and convexity.
    """
    x = as_points(x, "x")
    resolved, _ = resolve(manifold)
    x, w = _without_weightless(x, resolved, _checked_weights(x, resolved, weights))
    if tol is None:
        tol = _numerics.mean_tolerance(x.dtype)
    if not tol >= 0 or max_iter < 0:
        raise ValueError(f"tol and max_iter must not be negative, got tol={tol}, max_iter={max_iter}")
    found = _solve(x.to(_numerics.compute_dtype(x.dtype)), resolved, w, tol, max_iter)
    return found._replace(mean=found.mean.to(x.dtype))


def midpoint(x: Tensor, manifold: geoopt.Manifold, weights: Tensor | None = None) -> Tensor:
    r"""The weighted ambient centroid, put back on the manifold: a closed form, the same through every isometry.

    It is not the :func:`frechet_mean`: of (.9, 0), (0, .1), (-.2, 0) in the unit ball the midpoint is (0.478637,
    0.010676) and the Frechet mean, which minimises the sum of squared distances, (0.397982, 0.015433).

    Euclidean: :math:`\sum w_i x_i`. Sphere and Lorentz: the same sum scaled back onto the manifold. Stereographic, with
    :math:`\lambda = 2/(1 + \kappa|x|^2)`: the gyro-midpoint :math:`S/(n + h)`, :math:`S = \sum w_i \lambda_i x_i`,
    :math:`h = \sum w_i (\lambda_i - 1)`, :math:`n^2 = h^2 + \kappa |S|^2`, which is the sphere's or hyperboloid's
    midpoint through the projection. It minimises :math:`\sum w_i u_i` over m, u the squared chord of m and x_i, where
    the Frechet mean minimises :math:`\sum w_i\,\mathrm{arc2}(u_i)`: far points weigh more on negative curvature, less
    on positive. For kappa > 0 the centroid may be 0 (opposite points); then the result is some point of the sphere.

    The centroid cancels far from the origin, so it only chooses a base point p; there the same midpoint is
    :math:`\exp_p` of the mean in the gnomonic chart, which does not cancel.

    Args:
        x: points (..., N, D), N >= 1.
        manifold: Euclidean, Sphere, Lorentz, Stereographic, PoincareBall, a Product or Scaled of these, geoopt's own,
            or a manifold with ``lift`` and ``settle`` (docs, Add a manifold); else the Frechet mean is returned.
        weights: (..., N), nonnegative, not all zero; divided by their sum. None weighs all points alike. A row of
            weight 0 takes no part, whatever it holds (NaN, a point outside of the ball).

    Returns:
        (..., D) in the type of the points, worked in float64; differentiable in x, weights and a learnable kappa.

    Raises:
        ValueError: no points, or weights that are negative, not finite, all zero or of another shape.
        TypeError: x holds no real numbers, or manifold is no manifold.

    Source: Ungar (2008), Analytic hyperbolic geometry, chapter 6; Law et al. (2019), Lorentzian distance learning.
    """
    x = as_points(x, "x")
    resolved, _ = resolve(manifold)
    x, w = _without_weightless(x, resolved, _checked_weights(x, resolved, weights))
    out = _middle(x.to(_numerics.compute_dtype(x.dtype)), resolved, w)
    return out.to(x.dtype)


def _checked_weights(x: Tensor, manifold: geoopt.Manifold, weights) -> Tensor:
    """Weights (..., N) in float64, after the checks of shape and sign; not yet divided by their sum."""
    ndim = manifold.ndim
    if x.dim() < ndim + 1:
        raise ValueError(f"x must hold points as rows, shape (..., N, D); got shape {tuple(x.shape)}")
    shape = x.shape[: x.dim() - ndim]
    if shape[-1] == 0:
        raise ValueError(f"a mean needs at least one point, got x of shape {tuple(x.shape)}")
    if weights is None:
        return x.new_ones(shape, dtype=torch.float64)
    w = as_points(weights, "weights").to(device=x.device, dtype=torch.float64)
    try:
        fits = w.dim() > 0 and w.shape[-1] == shape[-1] and torch.broadcast_shapes(w.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"weights of shape {tuple(w.shape)} do not fit points of shape {tuple(x.shape)}: give (..., N)"
        )
    if not bool((w.isfinite() & (w >= 0)).all()):
        raise ValueError("weights must be finite and not negative")
    w = w.expand(shape)
    if not bool((w > 0).any(-1).all()):
        raise ValueError("weights must not all be zero")
    return w


def _without_weightless(x: Tensor, manifold: geoopt.Manifold, w: Tensor) -> tuple[Tensor, Tensor]:
    """The points and their weights, divided by their sum; rows of weight 0 that are no points take no part.

    Such a row (NaN, outside of a ball: its distance from the heaviest point is not finite) is replaced by the heaviest
    point and its weight by the constant 0. A row of weight 0 that is a point stays: the mean has a derivative in its
    weight.
    """
    nothing = w == 0
    if bool(nothing.any()):
        with torch.no_grad():
            heaviest = _heaviest(x, manifold, w)
            nothing = nothing & ~manifold.dist(heaviest.expand_as(x), x).isfinite()
        x = torch.where(_spread(nothing, manifold.ndim), heaviest, x)
        w = torch.where(nothing, 0.0, w)
    return x, w / w.sum(-1, keepdim=True)


def _heaviest(x: Tensor, manifold: geoopt.Manifold, w: Tensor) -> Tensor:
    """The point of the largest weight, kept as a row (..., 1, D)."""
    index = _spread(w.argmax(-1, keepdim=True), manifold.ndim)
    index = index.expand(*index.shape[: index.dim() - manifold.ndim], *x.shape[x.dim() - manifold.ndim :])
    return torch.gather(x, -1 - manifold.ndim, index)


def _spread(scalars: Tensor, ndim: int) -> Tensor:
    """(...) -> (..., 1, .., 1): per-point scalars against points of ndim dimensions."""
    return scalars.reshape(*scalars.shape, *[1] * ndim)


def _average(values: Tensor, w: Tensor, ndim: int) -> Tensor:
    """Weighted sum over the points, kept as a row: (..., N, D) -> (..., 1, D)."""
    return (_spread(w, ndim) * values).sum(-1 - ndim, keepdim=True)


def _middle(x: Tensor, manifold: geoopt.Manifold, w: Tensor) -> Tensor:
    """The midpoint (..., D) of float64 points, part by part; the Frechet mean where there is no closed form."""
    parts = hooks.factors(manifold)
    if parts is not None:
        return torch.cat([_middle(hooks.of_factor(f, x), f.manifold, w) for f in parts], -1)
    closed = _midpoint(x, manifold, w)
    return frechet_mean(x, manifold, w).mean if closed is None else closed


def _space_form(manifold: geoopt.Manifold) -> ConstantCurvature | None:
    """The manifold if its midpoint and Hessian are known in closed form."""
    known = resolve(manifold)[0]
    return known if hooks.own(known, "to_frame") is not None and isinstance(known, ConstantCurvature) else None


def _midpoint(x: Tensor, manifold: geoopt.Manifold, w: Tensor) -> Tensor | None:
    """The midpoint (..., D) of float64 points, None where there is no closed form."""
    parts = hooks.factors(manifold)
    if parts is not None:
        found = [_midpoint(hooks.of_factor(f, x), f.manifold, w) for f in parts]
        pieces = [f for f in found if f is not None]
        return torch.cat(pieces, -1) if len(pieces) == len(found) else None
    form = _space_form(manifold)
    if form is None:
        if hooks.own_mean(manifold) is None:
            return None
        mean = _average(hooks.lift(manifold, x), w, manifold.ndim).squeeze(-1 - manifold.ndim)
        return hooks.settle(manifold, mean, x.shape[-1])
    x = form.as_stored(x)
    with torch.no_grad():
        base = form.settle(_average(form.lift(x), w, 1), convex=True)
        # float64 points reach a radius of 35, where the centroid misses by up to 12: one step leaves 1e-6, two nothing
        for _ in range(2):
            base = form.expmap(base, _arc(base, *_gnomonic(base, x, form, w), form))
    # the value does not depend on the base point, so it is a constant; near it the arc is its own tangent
    toward, height = _gnomonic(base, x, form, w)
    return form.expmap(base, toward / torch.where(height == 0, 1.0, height)).squeeze(-2)


def _gnomonic(base: Tensor, x: Tensor, manifold: ConstantCurvature, w: Tensor) -> tuple[Tensor, Tensor]:
    """The centroid seen from base: its tangent part (..., 1, D) and height along base / R (..., 1, 1)."""
    logs = manifold.logmap(base, x)
    sine, cosine = sin_cos(manifold._kappa_at(x) * manifold.inner(base, logs, keepdim=True))
    return _average(sine * logs, w, 1), _average(cosine, w, 1)


def _arc(base: Tensor, toward: Tensor, height: Tensor, manifold: ConstantCurvature) -> Tensor:
    """The tangent vector from base to the centroid's projection: its length is the atan (atanh) of the slope."""
    kappa = torch.as_tensor(manifold._kappa_at(base), dtype=base.dtype, device=base.device)
    norm = manifold.norm(base, toward, keepdim=True)
    root = kappa.abs().sqrt()
    slope = root * norm / torch.where(height == 0, 1.0, height)
    limit = 1 - torch.finfo(base.dtype).eps
    length = torch.where(kappa > 0, torch.atan2(root * norm, height), torch.atanh(slope.clamp(max=limit)))
    moving = (norm > 0) & (root > 0)
    factor = torch.where(
        moving, length / torch.where(moving, root * norm, 1.0), 1 / torch.where(height == 0, 1.0, height)
    )
    return toward * factor


def _solve(x: Tensor, manifold: geoopt.Manifold, w: Tensor, tol: float, max_iter: int) -> FrechetMean:
    factors = hooks.factors(manifold)
    if factors is not None:
        parts = [_solve(hooks.of_factor(f, x), resolve(f.manifold)[0], w, tol, max_iter) for f in factors]
        scales = [torch.as_tensor(f.scale, device=x.device).detach() for f in factors]
        return FrechetMean(
            torch.cat([p.mean for p in parts], -1),
            torch.stack([p.converged for p in parts]).all(0),
            torch.stack([p.iterations for p in parts]).amax(0),
            torch.stack([scale * p.residual for scale, p in zip(scales, parts, strict=True)]).norm(dim=0),
        )
    form = _space_form(manifold)
    if form is not None:
        x = form.as_stored(x)
        with torch.no_grad():
            middle = _midpoint(x, form, w)
            assert middle is not None
            found = _flow(middle.unsqueeze(-2), x, form, w, tol, max_iter)
        mean = found.mean
        for _ in range(2):  # Newton from a constant: one step carries the first derivatives, two the second as well
            logs, tangent, _, _ = _pull(mean, x, form, w)
            step = _newton(mean, logs, tangent, form, w, found.converged)
            mean = form.expmap(mean, step)
    else:
        found = _flow(_start(x, manifold, w), x, manifold, w, tol, max_iter)
        mean = found.mean
    with torch.no_grad():
        residual = _pull(mean, x, manifold, w)[3]
    return found._replace(mean=mean.squeeze(-1 - manifold.ndim), residual=residual)


def _start(x: Tensor, manifold: geoopt.Manifold, w: Tensor) -> Tensor:
    closed = _midpoint(x, manifold, w)
    if closed is not None:
        return closed.unsqueeze(-1 - manifold.ndim)
    return _heaviest(x, manifold, w)


def _pull(point: Tensor, x: Tensor, manifold: geoopt.Manifold, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logs (..., N, D) of x at point, their mean (..., 1, D), the objective and the mean's length (both ...)."""
    logs = hooks.log(manifold, point.expand_as(x), x, "a Frechet mean (hs.frechet_mean, and hs.midpoint without lift)")
    squares = manifold.inner(point.expand_as(x), logs)
    tangent = _average(logs, w, manifold.ndim)
    length2 = manifold.inner(point, tangent).squeeze(-1)
    return logs, tangent, (w * squares).sum(-1), safe_sqrt(length2.clamp(min=0.0))


def _flow(point: Tensor, x: Tensor, manifold: geoopt.Manifold, w: Tensor, tol: float, max_iter: int) -> FrechetMean:
    """Steps from point (..., 1, D) until every batch entry has converged; an entry that has stays where it is."""
    form = _space_form(manifold)
    logs, tangent, objective, residual = _pull(point, x, manifold, w)
    step = torch.ones_like(objective)
    iterations = torch.zeros_like(objective, dtype=torch.int64)

    def converged():
        # or the mean tangent is below the rounding of the point itself: coincident points, points far out
        moved, size = (t.abs().flatten(-1 - manifold.ndim).amax(-1) for t in (tangent, point))
        at_rest = moved <= 4 * torch.finfo(point.dtype).eps * size
        return (residual <= tol * objective.clamp(min=0.0).sqrt()) | at_rest

    def along(scalars):
        return _spread(scalars.unsqueeze(-1), manifold.ndim)

    for _ in range(max_iter):
        active = ~converged()
        if not bool(active.any()):
            break
        direction = tangent if form is None else _newton(point, logs, tangent, form, w, None)
        trial = manifold.expmap(point, along(step) * direction)
        new = _pull(trial, x, manifold, w)
        # Armijo: a quarter of the fall that the slope promises; below rounding the mean tangent itself has to shrink
        slope = manifold.inner(point, tangent, direction).squeeze(-1)
        rise = new[2] - objective
        resolved = slope > _numerics.OBJECTIVE_NOISE * objective
        better = active & torch.where(resolved, rise <= -0.5 * step * slope, new[3] < residual)
        point = torch.where(along(better), trial, point)
        logs, tangent = torch.where(along(better), new[0], logs), torch.where(along(better), new[1], tangent)
        objective, residual = torch.where(better, new[2], objective), torch.where(better, new[3], residual)
        step = torch.where(better, (1.25 * step).clamp(max=1.0), step / 2)
        iterations = iterations + active
    return FrechetMean(point, converged(), iterations, residual)


def _newton(
    point: Tensor, logs: Tensor, tangent: Tensor, manifold: ConstantCurvature, w: Tensor, exact: Tensor | None
) -> Tensor:
    """``H^-1 tangent`` for H = sum w (P + a (1 - P)), P the projection on log, a = r cot(r) in units of R.

    H = A + F^T B F with A = sum w a, B = diag(w (1 - a) / r^2) and the logs as rows of F (N, D). The smaller of the two
    systems is solved, H itself or, by the Woodbury identity, the N x N system A + B F F^T: memory O(N D).

    a < 1 on positive curvature may make H indefinite, so on the way (exact None) a is kept >= 1: the plain flow there.
    At the end the batch entries marked ``exact`` take H as it is, the others the identity.
    """
    with torch.no_grad():
        frame = manifold.to_frame(point, logs)
        r2 = (frame * frame).sum(-1, keepdim=True)
        sine, cosine = sin_cos(manifold._kappa_at(frame) * r2)
        across = cosine / sine
        if exact is None:
            across = across.clamp(min=1.0)
        else:
            across = torch.where(exact[..., None, None], across, 1.0)
        n, dim = frame.shape[-2:]
        eye = torch.eye(min(n, dim), dtype=frame.dtype, device=frame.device)
        rest = w.unsqueeze(-1) * (1 - across) / torch.where(r2 > 0, r2, 1.0)
        mean_across = _average(across, w, 1)
        wide = n < dim
        system = mean_across * eye + (rest * (frame @ frame.mT) if wide else (rest * frame).mT @ frame)
    inside = manifold.to_frame(point, tangent)
    if wide:
        inner = torch.linalg.solve_ex(system, rest * (frame @ inside.mT)).result
        solved = (inside - inner.mT @ frame) / mean_across
    else:
        solved = torch.linalg.solve_ex(system, inside.mT).result.mT
    return manifold.from_frame(point, solved)

"""A step of RiemannianAdam on some rows, one a lane: what :mod:`horosphere.optim._fused_loops` does between its reading
and its writing.

A point is a column of an array (D, lanes), so that every operation is the same for all lanes, sums run over coordinates
in their order, and a row's numbers do not depend on its neighbours. Arithmetic is float64, as written: no operation is
contracted or reordered. Formulas are those of :mod:`horosphere.manifolds`; a sum over coordinates that several of them
need is taken once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from horosphere import _compiled, _numerics

__all__ = ["Lanes", "ball", "hyperboloid", "sphere"]

_jit = _compiled.njit(fastmath=(), bare=True)

_SIN, _COS = np.array(_numerics.SIN_SERIES), np.array(_numerics.COS_SERIES)
_BOUND, _RIM_GAP, _SPLITTER = _numerics.TRIG_SERIES_BOUND, _numerics.RIM_GAP, _numerics.SPLITTER
_MARGIN = _numerics.ball_margin(torch.float64)
_FLOOR = _numerics.antipode_floor(torch.float64)
_FARTHEST = _numerics.hyperboloid_max_radius(torch.float64)


class Lanes(NamedTuple):
    """Points, gradients, first moments and new points (D, lanes) of some rows, second moments (1, lanes), and ``s``:
    numbers (14, lanes) by the way. Gradients are not theirs any more afterwards.
    """

    x: np.ndarray
    g: np.ndarray
    m: np.ndarray
    y: np.ndarray
    v: np.ndarray
    s: np.ndarray


# steps that all manifolds share


@_jit
def _dot(a, b, out):
    out[:] = 0.0
    for i in range(a.shape[0]):
        for k in range(out.shape[0]):
            out[k] += a[i, k] * b[i, k]


@_jit
def _lerp(a, b, w):
    """As torch.lerp."""
    return a + w * (b - a) if w < 0.5 else b - (b - a) * (1.0 - w)


@_jit
def _second(o, square, w, factor):
    """v <- b2 v + (1 - b2) square, and the factor of m in the direction, -lr / (1 - b1^t) / (sqrt(v / ..) + eps)."""
    for k in range(factor.shape[0]):
        q = 0.0 if square[k] < 0.0 else square[k]
        v = w.v[0, k] * o.beta2
        if o.wide:
            v = v + q * (1.0 - o.beta2)
        else:  # what float32 cannot hold is no update
            v = np.float64(np.float32(v + np.float64(np.float32(q)) * (1.0 - o.beta2)))
        w.v[0, k] = v
        factor[k] = o.rate / (math.sqrt(v / o.bias) + o.eps)


@_jit
def _series(s, sine, cosine):
    """sin(r)/r and cos(r) of s = r^2, of s = 0 where |s| is large."""
    sine[:] = _SIN[-1]
    cosine[:] = _COS[-1]
    for n in range(len(_SIN) - 2, -1, -1):
        for k in range(s.shape[0]):
            z = s[k] if abs(s[k]) <= _BOUND else 0.0
            sine[k] = sine[k] * z + _SIN[n]
            cosine[k] = cosine[k] * z + _COS[n]


@_jit
def _sin_cos(s, sine, cosine):
    """As _numerics.sin_cos."""
    _series(s, sine, cosine)
    for k in range(s.shape[0]):
        if not abs(s[k]) <= _BOUND:
            r = math.sqrt(abs(s[k]))
            if s[k] > 0.0:
                sine[k], cosine[k] = math.sin(r) / r, math.cos(r)
            else:
                sine[k], cosine[k] = math.sinh(r) / r, math.cosh(r)


@_jit
def _tanh_ratio(s, out, spare):
    """As _numerics.tanh_ratio."""
    _series(s, out, spare)
    for k in range(s.shape[0]):
        out[k] /= spare[k]
    for k in range(s.shape[0]):
        if not abs(s[k]) <= _BOUND:
            r = math.sqrt(-s[k])
            out[k] = math.tanh(r) / r


@_jit
def _combine(o, a, b, w, y2):
    """y = a x + b m, rounded to the type of the points, and |y|^2 of what is stored."""
    y2[:] = 0.0
    for i in range(w.x.shape[0]):
        for k in range(y2.shape[0]):
            t = a[k] * w.x[i, k] + b[k] * w.m[i, k]
            if not o.wide:
                t = np.float64(np.float32(t))
            w.y[i, k] = t
            y2[k] += t * t


@_jit
def _rescale(o, c, y, y2):
    """y <- c y, rounded to the type of the points, and |y|^2 of what is stored."""
    y2[:] = 0.0
    for i in range(y.shape[0]):
        for k in range(y2.shape[0]):
            t = y[i, k] * c[k]
            if not o.wide:
                t = np.float64(np.float32(t))
            y[i, k] = t
            y2[k] += t * t


# the ball


@_jit
def _gap(kappa, x, x2, out, high, low):
    """1 + kappa |x|^2, as _numerics.one_plus_kappa_norm2: near the rim in twice the digits."""
    near = False
    for k in range(out.shape[0]):
        out[k] = 1.0 + kappa * x2[k]
        near = near or out[k] < _RIM_GAP
    if not near:
        return
    high[:] = 0.0
    low[:] = 0.0
    for i in range(x.shape[0]):
        for k in range(out.shape[0]):
            a = x[i, k]
            square = a * a
            head = _SPLITTER * a
            head = head - (head - a)
            tail = a - head
            lost = ((head * head - square) + 2.0 * head * tail) + tail * tail
            total = high[k] + square
            rest = total - high[k]
            low[k] += lost + ((high[k] - (total - rest)) + (square - rest))
            high[k] = total
    kappa_head = _SPLITTER * kappa
    kappa_head = kappa_head - (kappa_head - kappa)
    kappa_tail = kappa - kappa_head
    for k in range(out.shape[0]):
        if out[k] < _RIM_GAP:
            scaled = kappa * high[k]
            head = _SPLITTER * high[k]
            head = head - (head - high[k])
            tail = high[k] - head
            lost = ((kappa_head * head - scaled) + kappa_head * tail + kappa_tail * head) + kappa_tail * tail
            total = 1.0 + scaled
            rest = total - 1.0
            out[k] = total + (((1.0 - (total - rest)) + (scaled - rest)) + lost + kappa * low[k])


@_jit
def ball(o, w):
    """Points of a ball; :class:`.stereographic.Stereographic` has the formulas."""
    x, g, m, y = w.x, w.g, w.m, w.y
    x2, gx, y2, gy, a, b, c = w.s[0], w.s[1], w.s[2], w.s[3], w.s[4], w.s[5], w.s[6]
    square, m2, xm, e, ratio = w.s[7], w.s[8], w.s[9], w.s[10], w.s[11]
    kappa, lanes, dim = o.kappa, w.x.shape[1], w.x.shape[0]
    _dot(x, x, x2)
    _gap(kappa, x, x2, gx, a, b)
    for k in range(lanes):
        c[k] = max(gx[k], _MARGIN)
        a[k] = (0.5 * c[k]) ** 2
    square[:] = 0.0
    m2[:] = 0.0
    xm[:] = 0.0
    for i in range(dim):
        for k in range(lanes):
            u = g[i, k] * a[k]
            square[k] += u * u
            t = _lerp(m[i, k], u, 1.0 - o.beta1)
            m[i, k] = t
            m2[k] += t * t
            xm[k] += x[i, k] * t
    for k in range(lanes):
        square[k] *= (2.0 / gx[k]) ** 2
    _second(o, square, w, e)
    # the step is e m over the gap: exp_x of it is a x + b m
    for k in range(lanes):
        e[k] /= c[k]
        m2[k] *= e[k] * e[k]
        square[k] = kappa * m2[k]
    _tanh_ratio(square, ratio, b)
    for k in range(lanes):
        t, v2 = ratio[k], m2[k]
        cross = 1.0 - 2.0 * kappa * t * (e[k] * xm[k])
        below = cross + kappa * kappa * x2[k] * t * t * v2
        a[k] = (cross - kappa * t * t * v2) / below
        b[k] = c[k] * t * e[k] / below
    _combine(o, a, b, w, y2)
    beyond = False
    for k in range(lanes):
        norm = math.sqrt(y2[k])
        far = norm > o.limit
        beyond = beyond or far
        c[k] = o.limit / norm if far else 1.0
    if beyond:
        _rescale(o, c, y, y2)
    _gap(kappa, y, y2, gy, a, b)
    # transport: m turned in the plane of x and delta = y - x, times gy / gx
    delta2, dx, dm = square, m2, e
    delta2[:] = 0.0
    dx[:] = 0.0
    dm[:] = 0.0
    for i in range(dim):
        for k in range(lanes):
            delta = y[i, k] - x[i, k]
            delta2[k] += delta * delta
            dx[k] += delta * x[i, k]
            dm[k] += delta * m[i, k]
    for k in range(lanes):
        real = gx[k] + kappa * dx[k]
        turn = 2.0 * kappa / (gx[k] * gy[k] - kappa * delta2[k])
        a[k] = turn * (real * xm[k] + kappa * (dx[k] * xm[k] - x2[k] * dm[k]))
        b[k] = turn * (kappa * (dx[k] * dm[k] - delta2[k] * xm[k]) - real * dm[k])
        c[k] = gy[k] / gx[k]
    for i in range(dim):
        for k in range(lanes):
            m[i, k] = (m[i, k] + (a[k] * (y[i, k] - x[i, k]) + b[k] * x[i, k])) * c[k]


# the sphere


@_jit
def sphere(o, w):
    """Points of a sphere; :class:`.sphere.Sphere` has the formulas."""
    x, g, m, y = w.x, w.g, w.m, w.y
    x2, y2, a, b, c, e = w.s[0], w.s[1], w.s[2], w.s[3], w.s[4], w.s[5]
    square, m2 = w.s[6], w.s[7]
    kappa, lanes, dim = o.kappa, w.x.shape[1], w.x.shape[0]
    _dot(x, x, x2)
    _dot(x, g, c)
    for k in range(lanes):
        c[k] /= x2[k]
    square[:] = 0.0
    m2[:] = 0.0
    for i in range(dim):
        for k in range(lanes):
            u = g[i, k] - x[i, k] * c[k]
            square[k] += u * u
            t = _lerp(m[i, k], u, 1.0 - o.beta1)
            m[i, k] = t
            m2[k] += t * t
    _second(o, square, w, e)
    for k in range(lanes):
        square[k] = kappa * (e[k] * e[k] * m2[k])
    _sin_cos(square, b, a)
    y2[:] = 0.0
    for i in range(dim):
        for k in range(lanes):
            y[i, k] = a[k] * x[i, k] + b[k] * (e[k] * m[i, k])
            y2[k] += y[i, k] * y[i, k]
    for k in range(lanes):
        if y2[k] == 0.0:  # the origin
            y[0, k] = y2[k] = 1.0
        c[k] = o.limit / math.sqrt(y2[k])
    _rescale(o, c, y, y2)
    # transport: m - <y, m> (x + y) / (R^2 + <x, y>), below in terms of the half angle
    total2, dm = a, b
    total2[:] = 0.0
    dm[:] = 0.0
    for k in range(lanes):
        c[k] = math.sqrt(y2[k] / x2[k])
    for i in range(dim):
        for k in range(lanes):
            total = x[i, k] * c[k] + y[i, k]
            total2[k] += total * total
            dm[k] += (y[i, k] - x[i, k]) * m[i, k]
    for k in range(lanes):
        cosine = total2[k] / (4.0 * y2[k])
        c[k] = 0.0 if cosine <= _FLOOR else kappa * dm[k] / (2.0 * cosine)
    for i in range(dim):
        for k in range(lanes):
            m[i, k] -= c[k] * (x[i, k] + y[i, k])


# the hyperboloid, spatial parts; row 0 of x and g is time


@_jit
def _across(xs, u, along, safe, out):
    """Square of what is left of u without its part along x."""
    for k in range(out.shape[0]):
        along[k] /= safe[k]
    out[:] = 0.0
    for i in range(xs.shape[0]):
        for k in range(out.shape[0]):
            t = u[i, k] - xs[i, k] * along[k]
            out[k] += t * t
    for k in range(out.shape[0]):
        along[k] *= safe[k]


@_jit
def hyperboloid(o, w):
    """Points of a hyperboloid; :class:`.lorentz.Lorentz` has the formulas."""
    xs, gs, ms, ys = w.x[1:], w.g[1:], w.m[1:], w.y[1:]
    x2, tx, y2, ty, a, b, c = w.s[0], w.s[1], w.s[2], w.s[3], w.s[4], w.s[5], w.s[6]
    square, um, e, safe, xm, d, f = w.s[7], w.s[8], w.s[9], w.s[10], w.s[11], w.s[12], w.s[13]
    lanes, dim = w.x.shape[1], w.x.shape[0] - 1
    r2 = -1.0 / o.kappa
    r = math.sqrt(r2)
    _dot(xs, xs, x2)
    _dot(xs, gs, c)
    for k in range(lanes):
        tx[k] = math.sqrt(r2 + x2[k])
        safe[k] = x2[k] if x2[k] > 0.0 else 1.0
        c[k] = (tx[k] * w.g[0, k] + c[k]) / r2
    um[:] = 0.0
    xm[:] = 0.0
    for i in range(dim):
        for k in range(lanes):
            u = gs[i, k] + c[k] * xs[i, k]
            gs[i, k] = u
            um[k] += u * xs[i, k]
            t = _lerp(ms[i, k], u, 1.0 - o.beta1)
            ms[i, k] = t
            xm[k] += t * xs[i, k]
    _across(xs, gs, um, safe, square)
    _across(xs, ms, xm, safe, a)
    for k in range(lanes):
        square[k] += um[k] * um[k] * (r2 / (safe[k] * tx[k] * tx[k]))
        a[k] += xm[k] * xm[k] * (r2 / (safe[k] * tx[k] * tx[k]))
    _second(o, square, w, e)
    for k in range(lanes):
        step2 = e[k] * e[k] * a[k] / r2
        if step2 > _FARTHEST * _FARTHEST:  # ends beyond the cap in any direction: shortened, it does not overflow
            reach = _FARTHEST + math.asinh(math.sqrt(max(tx[k] * tx[k] / r2 - 1.0, 0.0)))
            if step2 > reach * reach:
                shrink = reach / math.sqrt(step2)
                e[k] *= shrink
                step2 = step2 * shrink * shrink
        square[k] = -step2
    _sin_cos(square, b, a)
    y2[:] = 0.0
    for i in range(dim):
        for k in range(lanes):
            t = a[k] * xs[i, k] + b[k] * (e[k] * ms[i, k])
            ys[i, k] = t
            y2[k] += t * t
    for k in range(lanes):
        norm = math.sqrt(y2[k])
        far = norm > o.limit
        c[k] = o.limit / norm if far else 1.0
        # time of what is not rounded yet
        t = math.sqrt(r2 + c[k] * c[k] * y2[k])
        w.y[0, k] = t if o.wide else np.float64(np.float32(t))
    _rescale(o, c, ys, y2)
    # transport: the boost at x undone, the gyration in the plane of x and delta, the boost at y; y becomes the part of
    # delta = y - x across x
    step, rest, cross2, cm = a, b, square, um
    step[:] = 0.0
    for k in range(lanes):
        ty[k] = math.sqrt(r2 + y2[k])
        d[k] = math.sqrt(x2[k])
        f[k] = 1.0 / d[k] if d[k] > 0.0 else 0.0
    for i in range(dim):
        for k in range(lanes):
            step[k] += (ys[i, k] - xs[i, k]) * (xs[i, k] * f[k])
    rest[:] = 0.0
    for i in range(dim):
        for k in range(lanes):
            t = (ys[i, k] - xs[i, k]) - (xs[i, k] * f[k]) * step[k]
            gs[i, k] = t
            rest[k] += t * (xs[i, k] * f[k])
    cross2[:] = 0.0
    cm[:] = 0.0
    for i in range(dim):
        for k in range(lanes):
            t = gs[i, k] - (xs[i, k] * f[k]) * rest[k]
            gs[i, k] = t
            cross2[k] += t * t
            cm[k] += t * ms[i, k]
    for k in range(lanes):
        nx, em = d[k], xm[k] * f[k]
        far = nx + step[k]
        if far > 0.0 and nx > 0.0:
            out = (r2 * step[k] * (far + nx) - nx * nx * cross2[k]) / (far * tx[k] + nx * ty[k])
        else:
            out = far * tx[k] - nx * ty[k]
        both = (r + tx[k]) * (r + ty[k])
        along, beta = (r * step[k] + out) / both, nx / (r + tx[k])
        shrink = 1.0 / (r + ty[k])
        across2, across_m = cross2[k] * shrink * shrink, cm[k] * shrink
        turn = 2.0 * beta / (4.0 * r2 / both + along * along + across2)
        first, frame = 2.0 * r / (r + tx[k]) - along * beta, em * (r / tx[k])
        # m <- m + (multiple of x) + (multiple of across)
        a[k] = f[k] * (em * (r / tx[k] - 1.0) + turn * (first * across_m - beta * across2 * frame))
        b[k] = -turn * (first * frame + beta * across_m) * shrink
    ym = cm
    ym[:] = 0.0
    for i in range(dim):
        for k in range(lanes):
            t = ms[i, k] + (a[k] * xs[i, k] + b[k] * gs[i, k])
            ms[i, k] = t
            ym[k] += ys[i, k] * t
    for k in range(lanes):
        c[k] = ym[k] / y2[k] * (ty[k] / r - 1.0) if y2[k] > 0.0 else 0.0
        w.m[0, k] = ym[k] / r
    for i in range(dim):
        for k in range(lanes):
            ms[i, k] += c[k] * ys[i, k]

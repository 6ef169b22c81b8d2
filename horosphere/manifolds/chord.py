"""What a manifold tells the rest of the library about its points: how they turn into straight chords.

The geodesic distance of every space here is a function of the straight chord between features alone,

    s_ij = <f_i, f_i>_J + <f_j, f_j>_J - 2 <f_i, f_j>_J,    u_ij = w_i w_j s_ij,    d_ij^2 = arc2(u_ij, kappa),

so distance matrices, attention, memory and routing are written once, over :class:`Chord`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from horosphere.manifolds._geoopt import geoopt


class Chord(NamedTuple):
    r"""A batch of points as features whose straight chords give the distance.

    .. math:: u(x, y) = w_x w_y\,|f_x - f_y|^2, \qquad d(x, y)^2 = \mathrm{arc2}(u, \kappa)

    that is, with d the geodesic distance,

    .. math::
        u = \frac{4}{\kappa} \sin^2\Big(\frac{\sqrt{\kappa}\,d}{2}\Big)\ (\kappa > 0), \qquad
        u = d^2\ (\kappa = 0), \qquad
        u = \frac{4}{|\kappa|} \sinh^2\Big(\frac{\sqrt{|\kappa|}\,d}{2}\Big)\ (\kappa < 0).

    Only differences of features count: they need not lie on a sphere of radius :math:`1/\sqrt{\kappa}` around 0. For
    kappa > 0, u must not exceed :math:`4/\kappa`. Rounding grows with :math:`|f|^2`: features near 0 are best.
    docs/chord.md derives the formula.

    Attributes:
        features: (..., N, F).
        weight: (..., N) conformal factor w, or None for 1.
        time_dims: number of leading features that count with a minus sign (0, or 1 on the hyperboloid, where
            <f, f>_J is the constant 1/kappa and is never summed).
        kappa: signed curvature; a tensor where it is learned, broadcasting against the batch dims of the features.
    """

    features: Tensor
    weight: Tensor | None
    time_dims: int
    kappa: float | Tensor


# geoopt's own classes -> the manifold of ours with the same points, distance and (live) curvature
_EQUIVALENTS: dict[type, Callable[[geoopt.Manifold], geoopt.Manifold]] = {}


def register_equivalent(cls: type, convert: Callable[[geoopt.Manifold], geoopt.Manifold]) -> None:
    """Say that instances of ``cls``, a class of another library, have the distance of ``convert(instance)``.

    ``convert`` may return None for an instance that has no equivalent; it is then served through its ``dist``.

    Raises:
        TypeError: where such an instance is used, if ``convert`` returns something without a chord.
    """
    _EQUIVALENTS[cls] = convert


def check_manifold(manifold: object, name: str = "manifold", otherwise: str = "") -> None:
    """TypeError, with what to do, for anything but an instance of geoopt.Manifold.

    Args:
        name: of the argument.
        otherwise: what else the argument may be.
    """
    if isinstance(manifold, geoopt.Manifold):
        return
    if isinstance(manifold, type):
        kind = manifold.__name__
        raise TypeError(f"{name} must be an instance of a manifold, got the class {kind}; make an instance: {kind}()")
    raise TypeError(
        f"{name} must be a geoopt.Manifold such as PoincareBall(kappa=-1.0){otherwise}, got {type(manifold).__name__}"
    )


def resolve(manifold: geoopt.Manifold) -> tuple[geoopt.Manifold, bool]:
    """The manifold that knows the distances of ``manifold``, and whether it has a chord (level 1) or dist (level 0).

    Walks the class's method resolution order; the first class that defines, or is registered with, a chord or that
    defines ``dist`` decides. So a subclass that overrides ``dist`` does not inherit its parent's chord, and attributes
    that an object merely forwards (geoopt.Scaled) are not mistaken for its own.
    """
    check_manifold(manifold)
    for cls in type(manifold).__mro__:
        if "chord" in cls.__dict__:
            return manifold, True
        if cls in _EQUIVALENTS:
            equivalent = _EQUIVALENTS[cls](manifold)
            if equivalent is not None and not _defines_chord(equivalent):
                raise TypeError(
                    f"the function given to register_equivalent for {cls.__name__} must return a manifold of this "
                    f"library, which has a chord, or None; got {type(equivalent).__name__}"
                )
            return (manifold, False) if equivalent is None else (equivalent, True)
        if "dist" in cls.__dict__:
            return manifold, False
    raise TypeError(f"{type(manifold).__name__} defines neither chord nor dist")


def _defines_chord(manifold: object) -> bool:
    """Whether the first class that decides, as in :func:`resolve`, has a chord of its own."""
    for cls in type(manifold).__mro__ if isinstance(manifold, geoopt.Manifold) else ():
        if "chord" in cls.__dict__:
            return True
        if cls in _EQUIVALENTS or "dist" in cls.__dict__:
            return False
    return False


def chords(manifold: geoopt.Manifold, x: Tensor) -> tuple[Chord, ...] | None:
    """The chord parts of points x (..., N, D) of a resolved manifold, None at level 0."""
    resolved, has_chord = resolve(manifold)
    if not has_chord:
        return None
    parts = resolved.chord(x)
    if parts is None:  # a product or a scale of a manifold that has only dist
        return None
    found = (parts,) if isinstance(parts, Chord | Tensor) else tuple(parts)
    for part in found:
        if not isinstance(part, Chord):
            raise TypeError(
                f"{type(resolved).__name__}.chord(x) must return a horosphere.Chord(features, weight, time_dims, "
                f"kappa), a tuple of them, or None; got {type(part).__name__}"
            )
    return found


def chord_of(manifold: geoopt.Manifold, x: Tensor) -> Chord | tuple[Chord, ...] | None:
    """The chord form of points ``x`` (..., N, D): a :class:`Chord`, a tuple of them for products, None at level 0.

    Raises TypeError where ``manifold`` is no geoopt.Manifold.
    """
    parts = chords(manifold, x)
    return parts[0] if parts is not None and len(parts) == 1 else parts

"""What the library asks of a manifold beyond geoopt's methods: every optional method, its default and who uses it.

A manifold needs geoopt's ``dist``, ``expmap``, ``inner``, ``projx``, ``proju``, ``egrad2rgrad`` and ``retr``.
Everything below is optional, and each function of this file is the one place that reads the method of its name and
knows the default. ``logmap`` has none: :func:`log` says what needs it where a manifold lacks it.

=============================  ======================================  =============================================
method                         default                                 used by
=============================  ======================================  =============================================
``chord(x)``                   none: level 0, rows of ``dist``         distances, nearest neighbours, attention, routing
``pair_dist2(x, y)`` *         differences of chord features           exact distances of single pairs
``origin(*size)``              ``projx`` of 0, else of e_1             start of an embedding, ``lift``, polar form
``random(*size)``              exp at the origin of normal vectors     routers
``transp(x, y, v)``            ``proju(y, v)``                         optimizers with moments
``factors()`` *                ``[Factor(self, all numbers, 1)]``      means, sizes, free vectors, rotary positions
``lift(x)`` *                  log at the origin                       ``value_manifold`` of attention, midpoint
``settle(mean)`` *             exp at the origin                       ``value_manifold`` of attention, midpoint
``lifted_size(stored)`` *      ``stored``                              ``value_manifold`` of attention
``ambient_dim(n)``             ``n``                                   ``n_components`` of embeddings
``config()``, ``from_config``  the registered name                     files of embeddings, ``learn_curvature``
``size_from_vectors(n)``       ``n``                                   layers that map tokens to points
``from_vectors(x, radius)``    ``projx(x / sqrt(n))``, 0: the origin   layers that map tokens to points
``rotary_slices(n)``           ``[slice(0, n)]``                       ``rotary`` of attention layers
``to_polar(x)`` *              log at the origin: vector and length    compressed memory
``from_polar(unit, radius)`` * exp at the origin                       compressed memory
``direction_dim(stored)`` *    ``stored``                              compressed memory
``picture()`` *                ``"tangent"``                           pictures of embeddings
``take_batch(shape, index)``   the manifold itself                     distances under one curvature a batch entry
``at_rows(rows)``              the manifold itself                     sparse optimizer steps
``row_maps()`` **              none: tensor operations                 compiled steps of ``RiemannianAdam``
=============================  ======================================  =============================================

Lookup walks the classes of the manifold from the most derived on, so attributes that an object merely forwards
(geoopt.Scaled) are not its own. A method with a star follows the distance: a class that defines ``dist`` or ``chord``
anew does not inherit it. One with two stars follows the maps: neither does a class that defines one of those anew.
geoopt's own classes answer through their equivalents (:func:`.chord.resolve`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import check_manifold, resolve

_FOLLOW_THE_DISTANCE = frozenset(
    (
        "pair_dist2",
        "factors",
        "lift",
        "settle",
        "lifted_size",
        "to_polar",
        "from_polar",
        "direction_dim",
        "to_frame",
        "to_canonical",
        "picture",
    )
)

# What a step of an optimizer calls.
_MAPS = frozenset(
    ("egrad2rgrad", "inner", "component_inner", "expmap", "transp", "expmap_transp", "projx", "proju", "at_rows")
)


PICTURES = ("flat", "ball", "hyperboloid", "sphere", "tangent", "none")
_WHERE = "see docs/add_a_manifold.md"
_BOTH = (
    "define lift(x) and settle(mean) both, no farther up among its classes than the one that defines dist or chord "
    f"({_WHERE})"
)


class Factor(NamedTuple):
    """A factor of a product: the squared distance is the sum of scale^2 times the squares of the factors' distances.

    Attributes:
        manifold: of the factor's own points.
        slice: where among the stored numbers of a point they lie; None for all of them.
        scale: of the distance; a tensor where it is learned.
    """

    manifold: geoopt.Manifold
    slice: slice | None
    scale: float | Tensor


def own(manifold: geoopt.Manifold, name: str) -> Callable[..., Any] | None:
    """The optional method ``name`` of a manifold, None where it leaves the matter to the default."""
    manifold = resolve(manifold)[0]
    for cls in type(manifold).__mro__:
        if name in cls.__dict__:
            return getattr(manifold, name)
        if name in _FOLLOW_THE_DISTANCE and not {"dist", "chord"}.isdisjoint(cls.__dict__):
            return None
    return None


# maps that geoopt leaves optional


def log(manifold: geoopt.Manifold, x: Tensor, y: Tensor, user: str, instead: str = "") -> Tensor:
    """``logmap(x, y)``, for what ``user`` says.

    Raises NotImplementedError where the manifold, or a part of it, has none; ``instead``: other methods that would do.
    """
    try:
        return manifold.logmap(x, y)
    except NotImplementedError as error:
        lacking = _lacking(manifold, "logmap")
        if lacking is None and str(error):  # of a logarithm that is there
            raise
        name = (lacking or type(manifold)).__name__
        raise NotImplementedError(
            f"{name} has no logmap(x, y), which {user} needs: define it{instead and f', or {instead}'} ({_WHERE})"
        ) from error


def _lacking(manifold: geoopt.Manifold, name: str) -> type | None:
    """The class, of the manifold or of its parts, that leaves an optional method of geoopt as it was."""
    known = resolve(manifold)[0]
    if isinstance(known, geoopt.Scaled):
        parts = [known.base]
    elif isinstance(known, geoopt.ProductManifold):
        parts = list(known.manifolds)
    else:
        parts = [f.manifold for f in factors(known) or ()]
    if not parts and getattr(type(known), name) is getattr(geoopt.Manifold, name):
        return type(known)
    return next((found for part in parts if (found := _lacking(part, name)) is not None), None)


def transp(manifold: geoopt.Manifold, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """v, tangent at x, moved to y: by default projected on the tangent space there, a transport of first order."""
    try:
        return manifold.transp(x, y, v)
    except NotImplementedError:
        return manifold.proju(y, v)


def travel(
    manifold: geoopt.Manifold, x: Tensor, u: Tensor, v: Tensor, *, retract: bool = False
) -> tuple[Tensor, Tensor]:
    """Where u leads from x, by exp or the retraction, and v moved along; without ``transp`` as in :func:`transp`."""
    try:
        return (manifold.retr_transp if retract else manifold.expmap_transp)(x, u, v)
    except NotImplementedError:
        y = (manifold.retr if retract else manifold.expmap)(x, u)
        return y, transp(manifold, x, y, v)


# structure and size


def factors(manifold: geoopt.Manifold) -> list[Factor] | None:
    """The factors of a product or of a scaled manifold, one level deep; None for a manifold that is neither."""
    method = own(manifold, "factors")
    return None if method is None else method()


def ambient_dim(manifold: geoopt.Manifold, n: int) -> int:
    """How many numbers store a point of n dimensions."""
    method = own(manifold, "ambient_dim")
    return n if method is None else method(n)


def intrinsic_dim(manifold: geoopt.Manifold, stored: int) -> int:
    """Dimensions of the points that ``stored`` numbers store: what :func:`ambient_dim` adds is the same for all."""
    parts = factors(manifold)
    if parts is None:
        return stored - ambient_dim(manifold, 0)
    return sum(intrinsic_dim(f.manifold, _width(f, stored)) for f in parts)


def _width(factor: Factor, stored: int) -> int:
    return stored if factor.slice is None else factor.slice.stop - factor.slice.start


def of_factor(factor: Factor, x: Tensor) -> Tensor:
    """The factor's own numbers of points (..., D)."""
    return x if factor.slice is None else x[..., factor.slice]


def take_batch(manifold: geoopt.Manifold, batch_shape: tuple[int, ...], index: Tensor) -> geoopt.Manifold:
    """The manifold of the entries ``index`` of the flattened ``batch_shape``: one curvature for each."""
    method = own(manifold, "take_batch")
    return manifold if method is None else method(batch_shape, index)


def at_rows(manifold: geoopt.Manifold, rows: Tensor) -> geoopt.Manifold:
    """The manifold of the rows (P,) of a parameter: another one only where each row has a metric of its own."""
    method = own(manifold, "at_rows")
    return manifold if method is None else method(rows)


def row_maps(manifold: geoopt.Manifold) -> tuple[str, float] | None:
    """Which maps of single rows, "ball", "sphere" or "hyperboloid", under which one kappa, are a manifold's own.

    None where it has others, or a curvature for each of several batch entries. geoopt's own classes have others.
    """
    for cls in type(manifold).__mro__:
        if "row_maps" in cls.__dict__:
            return manifold.row_maps()
        if not _MAPS.isdisjoint(cls.__dict__):
            return None
    return None


# points to begin with


def origin(manifold: geoopt.Manifold, *size: int, dtype: torch.dtype | None = None, device=None) -> Tensor:
    """The origin (size), by default the projection of 0, or of the first unit vector where 0 has none."""
    check_manifold(manifold)
    own = type(manifold).origin is not geoopt.Manifold.origin  # which draws another point for every row
    if own or manifold.ndim != 1:
        return manifold.origin(*size, dtype=dtype, device=device).as_subclass(Tensor)
    zero = torch.zeros(*size, dtype=dtype, device=device)
    projected = manifold.projx(zero)
    if bool(projected.isfinite().all()) and manifold.check_point_on_manifold(projected):
        return projected
    axis = zero.clone()
    axis[..., 0] = 1.0
    return manifold.projx(axis)


def random_points(manifold: geoopt.Manifold, *size: int, dtype: torch.dtype | None = None, device=None) -> Tensor:
    """Random points (size), by default exp at the origin of projected normal vectors."""
    check_manifold(manifold)
    try:
        return manifold.random(*size, dtype=dtype, device=device).as_subclass(Tensor)
    except NotImplementedError:
        start = origin(manifold, *size, dtype=dtype, device=device)
        return manifold.projx(manifold.expmap(start, manifold.proju(start, torch.randn_like(start))))


def _origin_like(manifold: geoopt.Manifold, x: Tensor) -> Tensor:
    return origin(manifold, *x.shape, dtype=x.dtype, device=x.device)


# means as linear sums


def lift(manifold: geoopt.Manifold, value: Tensor) -> Tensor:
    """Points (..., M, D) as vectors (..., M, E) whose weighted mean determines their mean on the manifold.

    The default is the tangent space at the origin, ``log_o(x)``: right for points around it, not the same through every
    isometry.
    """
    parts = factors(manifold)
    if parts is not None:
        return torch.cat([lift(f.manifold, of_factor(f, value)) for f in parts], -1)
    method = own_mean(manifold)
    if method is not None:
        lifted = method(value)
        if lifted.shape[-1] != (size := lifted_size(manifold, value.shape[-1])):
            raise TypeError(
                f"{_name(manifold)}.lift gives vectors of {lifted.shape[-1]} numbers for points of {value.shape[-1]}, "
                f"and lifted_size({value.shape[-1]}) is {size}: define lifted_size(stored) to fit ({_WHERE})"
            )
        return lifted
    known = resolve(manifold)[0]
    return log(known, _origin_like(known, value), value, "a mean of values on it", "lift(x) and settle(mean)")


def own_mean(manifold: geoopt.Manifold) -> Callable[[Tensor], Tensor] | None:
    """A manifold's own ``lift``, None where it leaves the mean to the default.

    Raises TypeError where it has ``lift``, ``settle`` and ``lifted_size`` in part: each would go with a default that
    means something else.
    """
    method = own(manifold, "lift")
    if (method is None) != (own(manifold, "settle") is None):
        there, missing = ("settle", "lift") if method is None else ("lift", "settle")
        raise TypeError(f"{_name(manifold)} has {there} and no {missing}: {_BOTH}")
    if method is None and own(manifold, "lifted_size") is not None:
        raise TypeError(f"{_name(manifold)} has lifted_size and neither lift nor settle: {_BOTH}")
    return method


def _name(manifold: geoopt.Manifold) -> str:
    return type(resolve(manifold)[0]).__name__


def settle(manifold: geoopt.Manifold, mean: Tensor, stored: int) -> Tensor:
    """The point (..., N, D), D = ``stored``, that the weighted mean (..., N, E) of lifted points determines."""
    parts = factors(manifold)
    if parts is not None:
        widths = [_width(f, stored) for f in parts]
        pieces = mean.split([lifted_size(f.manifold, w) for f, w in zip(parts, widths, strict=True)], -1)
        settled = [settle(f.manifold, m, w) for f, m, w in zip(parts, pieces, widths, strict=True)]
        return torch.cat(settled, -1)
    method = own(manifold, "settle") if own_mean(manifold) is not None else None
    if method is not None:
        return method(mean)
    known = resolve(manifold)[0]
    start = _origin_like(known, mean)
    return known.expmap(start, known.proju(start, mean))


def lifted_size(manifold: geoopt.Manifold, stored: int) -> int:
    """E, how many numbers a lifted point has."""
    parts = factors(manifold)
    if parts is not None:
        return sum(lifted_size(f.manifold, _width(f, stored)) for f in parts)
    method = own(manifold, "lifted_size")
    return stored if method is None else method(stored)


# points from free vectors


def size_from_vectors(manifold: geoopt.Manifold, n: int) -> int:
    """How many numbers store the point that n free numbers become.

    Raises ValueError where the parts of a product take another count than n.
    """
    parts = factors(manifold)
    if parts is None:
        method = own(manifold, "size_from_vectors")
        return n if method is None else method(n)
    if parts[0].slice is None:
        return size_from_vectors(parts[0].manifold, n)
    stored = [_width(f, 0) for f in parts]
    free = sum(free_size(f.manifold, width) for f, width in zip(parts, stored, strict=True))
    if free != n:
        raise ValueError(
            f"{resolve(manifold)[0]} takes {free} free numbers a point (its stored sizes, less 1 for each "
            f"hyperboloid's time), and got {n}: choose other sizes of the parts, or {free} numbers (of a layer with "
            f"heads embed_dim = {free} * num_heads)"
        )
    return sum(stored)


def free_size(manifold: geoopt.Manifold, stored: int) -> int:
    """How many free numbers become a point of ``stored`` numbers, the inverse of :func:`size_from_vectors`."""
    parts = factors(manifold)
    if parts is None:
        return stored - size_from_vectors(manifold, 0)
    return sum(free_size(f.manifold, _width(f, stored)) for f in parts)


def from_vectors(manifold: geoopt.Manifold, x: Tensor, max_radius: float | Tensor) -> Tensor:
    """Points (..., N, D) from free numbers (..., N, n)."""
    parts = factors(manifold)
    if parts is not None:
        n = x.shape[-1]
        size_from_vectors(manifold, n)  # an error where n does not fit
        sizes = [n if f.slice is None else free_size(f.manifold, _width(f, n)) for f in parts]
        pieces = zip(parts, x.split(sizes, -1), strict=True)
        return torch.cat([from_vectors(f.manifold, piece, max_radius) for f, piece in pieces], -1)
    method = own(manifold, "from_vectors")
    if method is not None:
        return method(x, max_radius)
    known = resolve(manifold)[0]
    start = origin(known, *x.shape[:-2], 1, x.shape[-1], dtype=x.dtype, device=x.device)
    nothing = (x == 0).all(-1, keepdim=True)  # what has no direction has no projection on a sphere
    return known.projx(torch.where(nothing, start, x.shape[-1] ** -0.5 * x))


def rotary_slices(manifold: geoopt.Manifold, n: int) -> list[slice]:
    """Runs of the n free numbers inside of which a rotation moves the points by an isometry."""
    parts = factors(manifold)
    if parts is None:
        method = own(manifold, "rotary_slices")
        return [slice(0, n)] if method is None else method(n)
    found, start = [], 0
    for f in parts:
        size = n if f.slice is None else free_size(f.manifold, _width(f, n))
        found += [slice(start + s.start, start + s.stop) for s in rotary_slices(f.manifold, size)]
        start += size
    return found


# direction and radius


def to_polar(manifold: geoopt.Manifold, x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors (..., n) whose directions are those of the points (..., D), and geodesic radii (..., 1) in float64."""
    method = own(manifold, "to_polar")
    if method is not None:
        return method(x)
    known = resolve(manifold)[0]
    wide = x.to(_numerics.compute_dtype(x.dtype))
    start = _origin_like(known, wide)
    vector = log(known, start, wide, "the direction and radius of a point", "to_polar(x) and from_polar(unit, radius)")
    return vector.to(x.dtype), known.norm(start, vector, keepdim=True).to(torch.float64)


def from_polar(manifold: geoopt.Manifold, direction: Tensor, radius: Tensor) -> Tensor:
    """The point at ``radius`` (..., 1), float64, in the given direction (..., n), in the direction's type."""
    method = own(manifold, "from_polar")
    if method is not None:
        return method(direction, radius)
    known = resolve(manifold)[0]
    wide = direction.to(_numerics.compute_dtype(direction.dtype))
    start = _origin_like(known, wide)
    vector = known.proju(start, wide)
    length = known.norm(start, vector, keepdim=True)
    vector = vector * (radius / torch.where(length > 0, length, 1.0))
    return known.expmap(start, vector).to(direction.dtype)


def direction_dim(manifold: geoopt.Manifold, stored: int) -> int:
    """Numbers in a direction, for points of ``stored`` numbers."""
    method = own(manifold, "direction_dim")
    return stored if method is None else method(stored)


def picture(manifold: geoopt.Manifold) -> str:
    """How points are drawn: "flat" (by principal axes), "ball", "hyperboloid", "sphere", "none" (not at all) or, the
    default, "tangent": by the principal axes of their logarithms at the origin, or at the point in the middle.

    Raises ValueError for another word, TypeError for "ball" or "hyperboloid" of a manifold without ``kappa``.
    """
    method = own(manifold, "picture")
    kind = "tangent" if method is None else method()
    if kind not in PICTURES:
        raise ValueError(
            f"{_name(manifold)}.picture() must return one of {', '.join(map(repr, PICTURES))}, got {kind!r} ({_WHERE})"
        )
    if kind in ("ball", "hyperboloid") and not hasattr(resolve(manifold)[0], "kappa"):
        raise TypeError(
            f"{_name(manifold)}.picture() is {kind!r}, which is drawn to the scale of the curvature, and the class has "
            f"no kappa: give it the attribute kappa, a number < 0, or another picture ({_WHERE})"
        )
    return kind

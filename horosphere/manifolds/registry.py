"""Manifolds by name and by configuration, and geoopt's classes as equivalents of ours."""

from __future__ import annotations

import difflib

import torch

from horosphere.manifolds import curvature
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import register_equivalent, resolve
from horosphere.manifolds.config import made_without_arguments, register_ours, registered, registered_names
from horosphere.manifolds.euclidean import Euclidean
from horosphere.manifolds.lorentz import Lorentz
from horosphere.manifolds.low_rank_metric import LowRankMetric
from horosphere.manifolds.names import WORDS, factors_of_name, normal
from horosphere.manifolds.poincare import PoincareBall
from horosphere.manifolds.product import Product, Scaled
from horosphere.manifolds.sphere import Sphere
from horosphere.manifolds.stereographic import Stereographic

NAMES = dict(zip(WORDS, (Euclidean, PoincareBall, Lorentz, Sphere, Stereographic), strict=True))
_LETTERS = {"E": Euclidean, "H": Lorentz, "S": Sphere}


def _ours(name: object) -> type | None:
    """The class of one of the library's words, or of the name of that class."""
    text = normal(name)
    return NAMES.get(text) or next((cls for cls in NAMES.values() if cls.__name__.lower() == text), None)


def _yours(name: object) -> type[geoopt.Manifold] | None:
    """The class that :func:`.register_manifold` was given under the name, as it is written or else in any case."""
    names = registered_names()
    found = name if name in names else next((n for n in names if normal(n) == normal(name)), None)
    return registered(found)


def manifold_by_name(name: str, kappa: float | None = None, *, learnable: bool = False) -> geoopt.Manifold:
    """The manifold called euclidean, poincare, lorentz, sphere or stereographic, of the given or default curvature,
    or the product that a name such as "H5xS5" or "(H2)^2xE2x(S2)^2" spells, or of a class of your own by its name
    (:func:`.register_manifold`).

    In the name of a product E is flat space, H the hyperboloid (kappa = -1) and S the sphere (kappa = 1), each followed
    by its dimension; (H2)^5 is five times H2, and x joins factors. The dimension of the whole then follows from the
    name: `dimension_of_name`. A single factor such as "H10" is that space itself, no product.

    Args:
        name: upper or lower case; blanks do not count. Of your own names one written just so comes first.
        kappa: signed curvature of a single space.
        learnable: let an optimizer change the curvature (of flat space: nothing to change).

    Raises:
        ValueError: for any other name, with what was read of it; for a curvature given to flat space or a product; for
            kappa or learnable given to a class of your own, or one whose constructor needs arguments.
    """
    cls = _ours(name)
    own = _yours(name) if cls is None else None
    if own is not None:
        if kappa is not None:
            raise ValueError(f"{name} takes no kappa here, got {kappa}: give the manifold itself")
        if learnable:
            raise ValueError(f"{name} takes no learnable here, got {learnable}: give the manifold itself")
        return made_without_arguments(own, name)
    if cls is None:
        return _by_factors(_read(name), kappa, learnable)
    if cls is Euclidean:
        if kappa:
            raise ValueError(f"euclidean space has kappa = 0, got {kappa}")
        return cls()
    return cls(learnable=learnable) if kappa is None else cls(kappa, learnable=learnable)


def dimension_of_name(name: str) -> int | None:
    """Intrinsic dimension of the space that a name spells, 15 for "H5x(S2)^5"; None where the name leaves it open.

    Raises ValueError as `manifold_by_name`.
    """
    if _ours(name) is not None or _yours(name) is not None:
        return None
    return sum(dimension for _, dimension in _read(name))


def _read(name: str) -> list[tuple[str, int]]:
    """The factors that a name spells; ValueError with what was read, and what there is, for any other name."""
    try:
        return factors_of_name(name)
    except ValueError as error:
        read = str(error)
    known = [*NAMES, *registered_names()]
    close = difflib.get_close_matches(normal(name), {normal(n): n for n in known}, n=1, cutoff=0.6)
    meant = next((f", did you mean {n!r}?" for n in known if [normal(n)] == close), "")
    raise ValueError(
        f"unknown manifold {name!r}{meant or ';'} known: {', '.join(known)}, and factors E, H or S with a dimension, "
        'joined by x, such as "H10", "H5xS5" or "(H2)^2xE2x(S2)^2"'
        + (f"; {read}" if read else "")
        + "; a class of your own gets a name by horosphere.register_manifold(name, class)"
    )


def _by_factors(factors: list[tuple[str, int]], kappa: float | None, learnable: bool) -> geoopt.Manifold:
    if kappa is not None and len(factors) > 1:
        raise ValueError(f"one kappa = {kappa} says nothing of a product: build Product(...) from parts of your choice")
    parts = []
    for letter, dimension in factors:
        cls = _LETTERS[letter]
        if cls is Euclidean and kappa:
            raise ValueError(f"flat space has kappa = 0, got {kappa}")
        given = {} if kappa is None else {"kappa": kappa}
        part = cls() if cls is Euclidean else cls(**given, learnable=learnable)
        parts.append((part, part.ambient_dim(dimension)))
    return parts[0][0] if len(parts) == 1 else Product(*parts)


for _cls in (*NAMES.values(), Product, Scaled, LowRankMetric):
    register_ours(_cls)


def _product(m):
    if any(len(shape) != 1 for shape in m.shapes):
        return None
    parts = [resolve(part) for part in m.manifolds]
    return (
        Product(*((p, shape[0]) for (p, _), shape in zip(parts, m.shapes, strict=True)))
        if all(h for _, h in parts)
        else None
    )


def _scaled(m):
    base, has_chord = resolve(m.base)
    return Scaled(base, m.scale) if has_chord else None


def _live(k: torch.Tensor) -> float | torch.Tensor:
    """A curvature that gradients may ask for stays the tensor; any other is the number, whose sign is then known."""
    return k if k.requires_grad or k.dim() else float(k)


register_equivalent(geoopt.Euclidean, lambda m: Euclidean(m.ndim))
register_equivalent(geoopt.Sphere, lambda m: Sphere())
register_equivalent(geoopt.Stereographic, lambda m: Stereographic(_live(m.k)))
register_equivalent(geoopt.PoincareBall, lambda m: PoincareBall(curvature.kappa_from_c(_live(m.c))))
register_equivalent(geoopt.SphereProjection, lambda m: Stereographic(_live(m.k)))
register_equivalent(geoopt.Lorentz, lambda m: Lorentz(curvature.kappa_from_lorentz_k(_live(m.k))))
register_equivalent(geoopt.ProductManifold, _product)
register_equivalent(geoopt.Scaled, _scaled)


def _float64(numbers: list) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")

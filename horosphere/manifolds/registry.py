"""Manifolds by name and by configuration, and geoopt's classes as equivalents of ours."""

from __future__ import annotations

import re

import torch

from horosphere.manifolds import curvature
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import register_equivalent, resolve
from horosphere.manifolds.config import register_manifold, registered
from horosphere.manifolds.euclidean import Euclidean
from horosphere.manifolds.lorentz import Lorentz
from horosphere.manifolds.low_rank_metric import LowRankMetric
from horosphere.manifolds.poincare import PoincareBall
from horosphere.manifolds.product import Product, Scaled
from horosphere.manifolds.sphere import Sphere
from horosphere.manifolds.stereographic import Stereographic

NAMES = {
    "euclidean": Euclidean,
    "poincare": PoincareBall,
    "lorentz": Lorentz,
    "sphere": Sphere,
    "stereographic": Stereographic,
}


_LETTERS = {"E": Euclidean, "H": Lorentz, "S": Sphere}
_FACTOR = re.compile(r"(?:([EHS])([1-9]\d*)|\(([EHS])([1-9]\d*)\)\^([1-9]\d*))")


def manifold_by_name(name: str, kappa: float | None = None, *, learnable: bool = False) -> geoopt.Manifold:
    """The manifold called euclidean, poincare, lorentz, sphere or stereographic, of the given or default curvature,
    or the product that a name such as "H5xS5" or "(H2)^2xE2x(S2)^2" spells, or of a class of your own by its name
    (:func:`.register_manifold`).

    In the name of a product E is flat space, H the hyperboloid (kappa = -1) and S the sphere (kappa = 1), each followed
    by its dimension; (H2)^5 is five times H2, and x joins factors. The dimension of the whole then follows from the
    name: `dimension_of_name`. A single factor such as "H10" is that space itself, no product.

    Args:
        name: upper or lower case; blanks do not count.
        kappa: signed curvature of a single space.
        learnable: let an optimizer change the curvature (of flat space: nothing to change).

    Raises:
        ValueError: for any other name, with what was read of it; for a curvature given to flat space or a product.
    """
    cls = NAMES.get(name.lower()) if isinstance(name, str) else None
    known = registered(name) if cls is None else None
    if known is not None:
        if kappa is not None:
            raise ValueError(f"{name} takes no kappa here, got {kappa}: give the manifold itself")
        return known()
    if cls is None:
        return _by_factors(factors_of_name(name), kappa, learnable)
    if cls is Euclidean:
        if kappa:
            raise ValueError(f"euclidean space has kappa = 0, got {kappa}")
        return cls()
    return cls(learnable=learnable) if kappa is None else cls(kappa, learnable=learnable)


def dimension_of_name(name: str) -> int | None:
    """Intrinsic dimension of the space that a name spells, 15 for "H5x(S2)^5"; None where the name leaves it open.

    Raises ValueError as `manifold_by_name`.
    """
    if isinstance(name, str) and (name.lower() in NAMES or registered(name) is not None):
        return None
    return sum(dimension for _, dimension in factors_of_name(name))


def factors_of_name(name: str) -> list[tuple[str, int]]:
    """("H", 2), ("H", 2), ("E", 3) for "(H2)^2xE3"; ValueError with what was read for anything else."""
    found: list[tuple[str, int]] = []
    if isinstance(name, str) and name.strip():
        for piece in re.split(r"[xX×*]", name.replace(" ", "")):
            match = _FACTOR.fullmatch(piece.upper())
            if match is None:
                break
            letter, size, inner, inner_size, power = match.groups()
            found += [(letter or inner, int(size or inner_size))] * int(power or 1)
        else:
            return found
    read = "x".join(letter + str(size) for letter, size in found)
    raise ValueError(
        f"unknown manifold {name!r}; known: {', '.join(NAMES)}, and factors E, H or S with a dimension, joined by x, "
        f'such as "H10", "H5xS5" or "(H2)^2xE2x(S2)^2"' + (f"; read {read}, then stopped at {piece!r}" if found else "")
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
    register_manifold(_cls.__name__, _cls)


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

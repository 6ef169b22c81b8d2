"""Manifolds by name and by configuration, and geoopt's classes as equivalents of ours."""

from __future__ import annotations

import torch

from horosphere.manifolds import curvature
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import register_equivalent, resolve
from horosphere.manifolds.euclidean import Euclidean
from horosphere.manifolds.lorentz import Lorentz
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


def manifold_by_name(name: str, kappa: float | None = None) -> geoopt.Manifold:
    """The manifold called euclidean, poincare, lorentz, sphere or stereographic, of the given or default curvature.

    Raises ValueError, with the names, for any other, and for a curvature given to flat space.
    """
    cls = NAMES.get(name.lower()) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"unknown manifold {name!r}; known: {', '.join(NAMES)}")
    if kappa is None:
        return cls()
    if cls is Euclidean:
        if kappa != 0:
            raise ValueError(f"euclidean space has kappa = 0, got {kappa}")
        return cls()
    return cls(kappa)


def manifold_from_config(config: dict) -> geoopt.Manifold:
    """The manifold that ``manifold.config()`` described.

    Raises ValueError where the dictionary is none of ours.
    """
    kinds = {cls.__name__: cls for cls in NAMES.values()}
    kind = config.get("type") if isinstance(config, dict) else None
    if kind == "Product":
        return Product(*((manifold_from_config(part), int(size)) for part, size in config["parts"]))
    if kind == "Scaled":
        return Scaled(manifold_from_config(config["base"]), config["scale"], config["learnable"])
    if kind == "Euclidean":
        return Euclidean(config.get("ndim", 1))
    if kind not in kinds:
        raise ValueError(
            f"not the configuration of a manifold: {config!r}; known types: {', '.join([*kinds, 'Product', 'Scaled'])}"
        )
    kappa = config["kappa"]
    return kinds[kind](
        torch.tensor(kappa, dtype=torch.float64) if isinstance(kappa, list) else kappa, config["learnable"]
    )


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

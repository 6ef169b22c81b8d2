"""Geometry: the manifolds, their chords, distance matrices and nearest neighbours."""

from horosphere.manifolds.chord import Chord, chord_of, register_equivalent
from horosphere.manifolds.euclidean import Euclidean
from horosphere.manifolds.lorentz import Lorentz
from horosphere.manifolds.pairwise import Neighbors, cdist, knn
from horosphere.manifolds.parameter import ManifoldParameter, allow_loading
from horosphere.manifolds.poincare import PoincareBall
from horosphere.manifolds.product import Product, Scaled
from horosphere.manifolds.registry import manifold_by_name, manifold_from_config
from horosphere.manifolds.sphere import Sphere
from horosphere.manifolds.stereographic import Stereographic

__all__ = [
    "Chord",
    "Euclidean",
    "Lorentz",
    "ManifoldParameter",
    "Neighbors",
    "PoincareBall",
    "Product",
    "Scaled",
    "Sphere",
    "Stereographic",
    "allow_loading",
    "cdist",
    "chord_of",
    "knn",
    "manifold_by_name",
    "manifold_from_config",
    "register_equivalent",
]

for _manifold in (Euclidean, Lorentz, PoincareBall, Product, Scaled, Sphere, Stereographic):
    allow_loading(_manifold)

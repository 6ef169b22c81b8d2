"""Geometry: the manifolds, their chords, distance matrices, nearest neighbours, means and conversions."""

from horosphere.manifolds.bounded import BoundedParameter
from horosphere.manifolds.chord import Chord, chord_of, register_equivalent
from horosphere.manifolds.config import manifold_config, manifold_from_config, register_manifold
from horosphere.manifolds.convert import (
    ball_to_hyperboloid,
    ball_to_klein,
    convert,
    hyperboloid_to_ball,
    hyperboloid_to_klein,
    klein_to_ball,
    klein_to_hyperboloid,
)
from horosphere.manifolds.euclidean import Euclidean
from horosphere.manifolds.lorentz import Lorentz
from horosphere.manifolds.low_rank_metric import LowRankMetric
from horosphere.manifolds.mean import FrechetMean, frechet_mean, midpoint
from horosphere.manifolds.metric_distance import metric_sqdist
from horosphere.manifolds.pairwise import Neighbors, cdist, knn
from horosphere.manifolds.parameter import ManifoldParameter, allow_loading
from horosphere.manifolds.poincare import PoincareBall
from horosphere.manifolds.product import Product, Scaled
from horosphere.manifolds.registry import dimension_of_name, manifold_by_name
from horosphere.manifolds.sphere import Sphere
from horosphere.manifolds.sphere_maps import DirectionMap, HemisphereMap, LearnedMap
from horosphere.manifolds.stereographic import Stereographic
from horosphere.manifolds.token_metric import TokenMetric
from horosphere.manifolds.validate import validate_points

__all__ = [
    "BoundedParameter",
    "Chord",
    "DirectionMap",
    "Euclidean",
    "FrechetMean",
    "HemisphereMap",
    "LearnedMap",
    "Lorentz",
    "LowRankMetric",
    "ManifoldParameter",
    "Neighbors",
    "PoincareBall",
    "Product",
    "Scaled",
    "Sphere",
    "Stereographic",
    "TokenMetric",
    "allow_loading",
    "ball_to_hyperboloid",
    "ball_to_klein",
    "cdist",
    "chord_of",
    "convert",
    "dimension_of_name",
    "frechet_mean",
    "hyperboloid_to_ball",
    "hyperboloid_to_klein",
    "klein_to_ball",
    "klein_to_hyperboloid",
    "knn",
    "manifold_by_name",
    "manifold_config",
    "manifold_from_config",
    "metric_sqdist",
    "midpoint",
    "register_equivalent",
    "register_manifold",
    "validate_points",
]

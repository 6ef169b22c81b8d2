"""Routing by distance: few prototypes or experts for each token, and what that costs in accuracy."""

from horosphere.routing.balance import balance_loss, load
from horosphere.routing.certificate import Spread, certificate
from horosphere.routing.experts import ExpertLayer, ExpertOutput
from horosphere.routing.geodesic import GeodesicRouter, Routing, route

__all__ = [
    "ExpertLayer",
    "ExpertOutput",
    "GeodesicRouter",
    "Routing",
    "Spread",
    "balance_loss",
    "certificate",
    "load",
    "route",
]

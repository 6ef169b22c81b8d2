"""What training minimises: one file a loss, and the table of their names."""

from horosphere.embedding.losses.base import Loss, PairLoss, loss_by_name, loss_names, register_loss
from horosphere.embedding.losses.cones import Cones, cone_excess, cone_loss
from horosphere.embedding.losses.distortion import Distortion
from horosphere.embedding.losses.pairs import pair_distances
from horosphere.embedding.losses.ranking import Ranking, ranking_loss

__all__ = [
    "Cones",
    "Distortion",
    "Loss",
    "PairLoss",
    "Ranking",
    "cone_excess",
    "cone_loss",
    "loss_by_name",
    "loss_names",
    "pair_distances",
    "ranking_loss",
    "register_loss",
]

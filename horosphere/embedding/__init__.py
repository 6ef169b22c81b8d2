"""Embedding graphs and hierarchies: readers, losses, scores and the scikit-learn estimator."""

from horosphere.embedding.edgelist import read_edge_list
from horosphere.embedding.estimator import GraphEmbedding, NearestNodes
from horosphere.embedding.graph import Graph, as_graph
from horosphere.embedding.losses import ranking_loss
from horosphere.embedding.scores import Scores, reconstruction
from horosphere.embedding.trainer import EpochInfo

__all__ = [
    "EpochInfo",
    "Graph",
    "GraphEmbedding",
    "NearestNodes",
    "Scores",
    "as_graph",
    "ranking_loss",
    "read_edge_list",
    "reconstruction",
]

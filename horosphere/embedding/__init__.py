"""Embedding graphs and hierarchies: readers, losses, scores and the scikit-learn estimator."""

from horosphere.embedding.edgelist import read_edge_list
from horosphere.embedding.estimator import GraphEmbedding, NearestNodes
from horosphere.embedding.graph import Graph, as_graph
from horosphere.embedding.lengths import as_lengths
from horosphere.embedding.links import EdgeSplit, link_auc, split_edges
from horosphere.embedding.losses import PairLoss, cone_excess, cone_loss, ranking_loss, register_loss
from horosphere.embedding.mds import hyperbolic_mds, hyperbolic_mds_spectrum, hyperbolic_mds_start
from horosphere.embedding.scores import DistortionScores, Scores, distortion, reconstruction
from horosphere.embedding.trainer import DivergenceError, EpochInfo
from horosphere.embedding.trees import TreeEmbedding, embed_tree, tree_start

__all__ = [
    "DistortionScores",
    "DivergenceError",
    "EdgeSplit",
    "EpochInfo",
    "Graph",
    "GraphEmbedding",
    "NearestNodes",
    "PairLoss",
    "Scores",
    "TreeEmbedding",
    "as_graph",
    "as_lengths",
    "cone_excess",
    "cone_loss",
    "distortion",
    "embed_tree",
    "hyperbolic_mds",
    "hyperbolic_mds_spectrum",
    "hyperbolic_mds_start",
    "link_auc",
    "ranking_loss",
    "read_edge_list",
    "reconstruction",
    "register_loss",
    "split_edges",
    "tree_start",
]

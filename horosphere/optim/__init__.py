"""Riemannian optimizers: geoopt's, with sparse rows, learned curvature and non-finite gradients handled."""

from horosphere.optim.adam import RiemannianAdam
from horosphere.optim.clip import clip_grad_norm_
from horosphere.optim.groups import param_groups, project_
from horosphere.optim.sgd import RiemannianSGD

__all__ = ["RiemannianAdam", "RiemannianSGD", "clip_grad_norm_", "param_groups", "project_"]

"""Learning the curvature of each part of a space along with the points, one step an epoch."""

import math

import numpy as np
import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.manifolds import Lorentz, PoincareBall, Product, Sphere, manifold_config, manifold_from_config
from horosphere.manifolds.hooks import own

__all__ = ["CurvatureSteps", "curvatures", "fixed", "learnable", "with_curvatures"]

CURVED = (PoincareBall, Lorentz, Sphere)
# Pairs on which the slope is taken: its sign is all that is used.
SAMPLE = 2**14
# Steps in log |kappa|: the first, the longest, and what they grow and shrink by (Riedmiller and Braun's factors).
FIRST, LONGEST, GROW, SHRINK = 0.05, 0.2, 1.2, 0.5
NUDGE = 1e-3


class CurvatureSteps:
    r"""Moves :math:`\log|\kappa_p|` of every curved part against the slope of the loss.

    The points keep their normal coordinates v_p = log_o(x_p) at the origin of each part while kappa_p changes, so
    distances from the origin stay and only the spreading of geodesics does not. At points that have settled the slope
    is that of the best loss reachable with kappa (the envelope theorem), but they follow every step, so the second
    derivative at fixed points says nothing of how far to go: only the sign is used, with a step that grows by 1.2 while
    it lasts and is halved where it turns.

    Args:
        manifold: PoincareBall, Lorentz, Sphere of one curvature each, or a product that has some.

    Raises:
        ValueError: the manifold has no curvature of these.

    Source: Riedmiller and Braun, A direct adaptive method for faster backpropagation learning: the RPROP algorithm,
    1993.
    """

    def __init__(self, manifold) -> None:
        self._curved = [i for i, part in enumerate(_parts(manifold)) if type(part) in CURVED]
        if not self._curved:
            raise ValueError(
                f"{manifold} has no curvature to learn: take PoincareBall, Lorentz, Sphere or a product of them"
            )
        # Row 0: lengths of the steps; row 1: signs of the last slopes.
        self.state = np.stack([np.full(len(self._curved), FIRST), np.zeros(len(self._curved))])

    def step(self, manifold, points: Tensor, pairs: np.ndarray, lengths: np.ndarray, stress: bool):
        """(manifold, points) with the curvatures moved; the sum of (d / g - 1)^2 (``stress``) or |d / g - 1| falls."""
        chosen = pairs[:SAMPLE]
        wanted = torch.from_numpy(lengths[:SAMPLE])
        kappas = curvatures(manifold)

        def loss(space, at: Tensor) -> float:
            ends = at[torch.from_numpy(chosen.astype(np.int64))]
            error = space.dist(ends[:, 0], ends[:, 1]) / wanted - 1
            return float((error**2 if stress else error.abs()).mean())

        here = loss(manifold, points)
        for k, i in enumerate(self._curved):
            nudged = kappas.copy()
            nudged[i] *= math.exp(NUDGE)
            sign = np.sign(loss(*with_curvatures(manifold, points, nudged)) - here)
            if self.state[1, k]:
                agree = sign == self.state[1, k]
                self.state[0, k] = min(LONGEST, self.state[0, k] * (GROW if agree else SHRINK))
            self.state[1, k] = sign
        moved = kappas.copy()
        moved[self._curved] *= np.exp(-self.state[0] * self.state[1])
        least = np.minimum(np.abs(kappas), _numerics.FLATTEST / float(wanted.max()) ** 2)
        moved = np.sign(kappas) * np.maximum(np.abs(moved), least)
        return with_curvatures(manifold, points, moved)


def curvatures(manifold) -> np.ndarray:
    """kappa of each part (of a single manifold: its own)."""
    return np.asarray([float(part.kappa) for part in _parts(manifold)])


def with_curvatures(manifold, points: Tensor | None, kappas: np.ndarray):
    """(manifold, points) with the parts' curvatures set, the points' normal coordinates at the origins kept."""
    if type(manifold) is not Product:
        return _bent(manifold, points, float(kappas[0]))
    bent = [
        _bent(part, None if points is None else points[:, where], float(kappa))
        for part, where, kappa in zip(manifold.manifolds, manifold.slices, kappas, strict=True)
    ]
    space = Product(*((part, size) for (part, _), size in zip(bent, manifold.sizes, strict=True)))
    return space, None if points is None else torch.cat([part for _, part in bent], dim=1)


def fixed(manifold):
    """The manifold with the curvatures and scales it has now, as numbers; itself where none can move."""
    if not any(parameter.requires_grad for parameter in manifold.parameters()) or own(manifold, "config") is None:
        return manifold
    return manifold_from_config(_learning(manifold_config(manifold), False))


def learnable(manifold):
    """The manifold with every curvature a parameter.

    Raises ValueError where there is none.
    """
    known = own(manifold, "config") is not None
    moving = manifold_from_config(_learning(manifold_config(manifold), True)) if known else manifold
    if not any(parameter.requires_grad for parameter in moving.parameters()):
        raise ValueError(f"{manifold} has no curvature to learn")
    return moving


def _learning(config: dict, learn: bool) -> dict:
    """The configuration in which curvatures are learned, or in which nothing is."""
    changed = dict(config)
    if "parts" in config:
        changed["parts"] = [[_learning(part, learn), size] for part, size in config["parts"]]
    if "base" in config:
        changed["base"] = _learning(config["base"], learn)
    if "kappa" in config or ("learnable" in config and not learn):
        changed["learnable"] = learn
    return changed


def _parts(manifold) -> list:
    return list(manifold.manifolds) if type(manifold) is Product else [manifold]


def _bent(part, points: Tensor | None, kappa: float):
    if type(part) not in CURVED or kappa == part.kappa:
        return part, points
    other = type(part)(kappa)
    if points is None:
        return other, None
    tangent = part.logmap(part.origin(*points.shape, dtype=points.dtype, device=points.device), points)
    return other, other.projx(
        other.expmap(other.origin(*points.shape, dtype=points.dtype, device=points.device), tangent)
    )

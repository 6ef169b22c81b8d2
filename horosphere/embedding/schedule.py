"""How long a training runs and at which rate."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from horosphere.embedding.losses.base import PairLoss, loss_by_name

__all__ = ["DistortionSchedule", "Schedule"]

STAGES = 10  # A training of fewer passes than this is cut into as many stages, each at its own rate.


@dataclass(frozen=True)
class Schedule:
    """Settings of a training run.

    The rate is per pair, in units of the manifold's tangent vectors: a tenth of it during the burn-in (in which
    negatives are drawn in proportion to how often a node is a target), then falling linearly from it to 0. It changes
    from stage to stage: an epoch is one, or several where the whole training has fewer than `STAGES` epochs.
    ``burn_in`` is in epochs and need not be whole.
    """

    n_epochs: int
    learning_rate: float
    n_negatives: int
    batch_size: int
    burn_in: float
    seed: int
    loss: str = "ranking"
    settled: bool = False

    def stages(self, pairs: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
        """The pairs of an epoch cut into its stages, each with the share of the epoch that is done by then."""
        count = -(-STAGES // self.n_epochs)
        return ((part / count, some) for part, some in enumerate(np.array_split(pairs, count)))

    def burning_in(self, epoch: float) -> bool:
        return epoch < self.burn_in

    @property
    def ranks_first(self) -> bool:
        """Whether the ranking loss comes before the loss itself: see :class:`PairLoss`."""
        loss = loss_by_name(self.loss)
        return isinstance(loss, PairLoss) and loss.ranks_first

    @property
    def first_own(self) -> int:
        """The epoch from which on a run works on its own loss.

        Where that loss ``ranks_first`` the first half ranks, to sort the nodes out; points that are ``settled`` go
        without.
        """
        return self.n_epochs // 2 if self.ranks_first and not self.settled else 0

    def own(self, epoch: float) -> bool:
        """Whether the loss is worked on itself, and not the ranking that comes before."""
        return epoch >= self.first_own

    def rate(self, epoch: float) -> float:
        """When so many epochs are done."""
        if self.burning_in(epoch):
            return self.learning_rate / 10
        if self.ranks_first and self.own(epoch):
            return self.learning_rate * (self.n_epochs - epoch) / (self.n_epochs - self.first_own)
        return self.learning_rate * (self.n_epochs - epoch) / (self.n_epochs - self.burn_in)


@dataclass(frozen=True)
class DistortionSchedule:
    """Settings of a training on distances.

    The first epochs (20, or half of all) step on the stress (d / g - 1)^2 and leave the start behind: eta falls
    geometrically from longest^2, where every step closes its gap, to shortest^2 / 10 (Zheng, Pawar and Goodman, 2019).
    A start worth keeping (``settled``) goes without them. The others step on |d / g - 1|, eta falling linearly to 0
    from ``learning_rate`` mean^2.
    """

    n_epochs: int
    learning_rate: float
    batch_size: int
    seed: int
    metric: str
    learn_curvature: bool
    shortest: float
    longest: float
    mean: float
    settled: bool = False

    @property
    def stress_epochs(self) -> int:
        return 0 if self.settled else min(20, self.n_epochs // 2)

    def rate(self, epoch: int) -> float:
        """eta of `compiled.distortion_pairs`, in units of length squared."""
        if epoch < self.stress_epochs:
            done = epoch / max(1, self.stress_epochs - 1)
            return self.longest**2 * (self.shortest**2 / (10 * self.longest**2)) ** done
        return self.learning_rate * self.mean**2 * (self.n_epochs - epoch) / (self.n_epochs - self.stress_epochs)

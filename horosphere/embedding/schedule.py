"""How long a training runs and at which rate."""

from dataclasses import dataclass

__all__ = ["DistortionSchedule", "Schedule"]


@dataclass(frozen=True)
class Schedule:
    """Settings of a training run.

    The rate is per pair, in units of the manifold's tangent vectors: a tenth of it during the burn-in epochs (in which
    negatives are drawn in proportion to how often a node is a target), then falling linearly from it to 0.
    """

    n_epochs: int
    learning_rate: float
    n_negatives: int
    batch_size: int
    burn_in: int
    seed: int
    loss: str = "ranking"

    def cones(self, epoch: int) -> bool:
        """Whether the epoch works on cones; the first half of such a run ranks, to sort the nodes out."""
        return self.loss == "cones" and epoch >= self.n_epochs // 2

    def rate(self, epoch: int) -> float:
        if epoch < self.burn_in:
            return self.learning_rate / 10
        rate = self.learning_rate * (self.n_epochs - epoch) / max(1, self.n_epochs - self.burn_in)
        # Angles at an apex turn fast: at the rate of distances the cones do not settle.
        return rate / 10 if self.cones(epoch) else rate


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

"""How long a training runs and at which rate."""

from dataclasses import dataclass

__all__ = ["Schedule"]


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

    def rate(self, epoch: int) -> float:
        if epoch < self.burn_in:
            return self.learning_rate / 10
        return self.learning_rate * (self.n_epochs - epoch) / max(1, self.n_epochs - self.burn_in)

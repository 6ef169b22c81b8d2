"""What attention takes besides the points, carried whole from the operator to every form."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

WEIGHTS = ("inverse", "softmax", "gaussian")


class Inputs(NamedTuple):
    """Values and how they are weighed; as in :func:`horosphere.kernels.operators.attention`.

    eps and power are () or batch-shaped where the graph is made, and (B,) in float64 inside of an operator.
    """

    value: Tensor
    eps: Tensor
    power: Tensor
    bias: Tensor | None
    causal: int | None
    weight: str
    dropout_p: float
    seed: Tensor | None


class Results(NamedTuple):
    """What a forward pass gave, and the gradients of it."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor

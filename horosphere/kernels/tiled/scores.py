r"""What the streaming loops of :mod:`horosphere.kernels.tiled.attention` ask of a geometry: the tile
:math:`z_{ij} = d_{ij}^2 + \varepsilon`, and to take dL/dz of that tile. Another geometry joins as another
:class:`Scores`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from horosphere.kernels.tiled.products import Buffers
from horosphere.kernels.tiled.workspace import Workspace


class Scores(ABC):
    """The matrices of a batch.

    Attributes:
        batch, n, m, dtype, device: of the matrices, and the type tiles are worked in.
        signs: of length B: batch entries share a tile where these are equal.
        tensors: how many buffers of a tile's size a group asks for.
        workspace: memory for the call, given back by the forward loop and by :meth:`gradients`.
    """

    batch: torch.Size
    n: int
    m: int
    dtype: torch.dtype
    device: torch.device
    signs: Sequence[object]
    tensors: int
    workspace: Workspace

    @abstractmethod
    def group(self, e: slice, shift: Tensor) -> Group:
        """Batch entries e, shift (E,) what is added to d^2 ("eps")."""

    @abstractmethod
    def prepare_gradients(self) -> None:
        """Before the first backward."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Of its tensors."""


class Group(ABC):
    """Some batch entries."""

    @abstractmethod
    def extent(self) -> float:
        """A bound of d^2, which decides whether plain sums of weights are safe."""

    @abstractmethod
    def tile(self, i: slice, j: slice, buffers: Buffers, keep: bool) -> Tensor:
        """z (E, R, C) >= 0 in buffers[0]; with ``keep`` the others stay as they are until backward."""

    @abstractmethod
    def backward(self, i: slice, j: slice, g: Tensor) -> None:
        """Take dL/dz / scale of that tile; g may be overwritten."""

    @abstractmethod
    def rows_done(self, i: slice, scale: Tensor) -> None:
        """No more tiles of rows i: add up their gradients times scale (E,)."""

    @abstractmethod
    def finish(self, scale: Tensor) -> None:
        """No more tiles at all."""

"""The one sign of curvature: ``kappa`` is the signed sectional curvature, for every manifold, everywhere.

geoopt and the literature use three other letters; this is the only place where they are turned into kappa:

=====================  ==============================  =================
their object           what its number means           kappa
=====================  ==============================  =================
``PoincareBall(c)``    minus the curvature             ``-c``
``Stereographic(k)``   the curvature                   ``k``
``Lorentz(k)``         ``<x, x>_J = -k``, radius^2     ``-1 / k``
=====================  ==============================  =================
"""

from __future__ import annotations

import math
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere.manifolds._float64 import in_float64
from horosphere.manifolds.bounded import BoundedParameter, keeps_float32
from horosphere.manifolds.origin import AtOrigin


def kappa_from_c(c):
    """kappa of a space whose *negative* curvature is called c (Ganea et al. 2018; geoopt's PoincareBall)."""
    return -c


def kappa_from_lorentz_k(k):
    """kappa of geoopt's Lorentz(k), whose points satisfy ``<x, x>_J = -k``."""
    return -1 / k


class SpaceForm(Protocol):
    """A model of a space of constant curvature and its isometries with the canonical model of that space.

    The canonical model is the hyperboloid for kappa < 0, the sphere for kappa > 0, both with the origin on the first
    axis, and flat space for kappa = 0: ``sign`` says which of them is meant.
    """

    model: str
    _sign: int | None  # None where kappa may have any

    @property
    def kappa(self) -> float | Tensor: ...
    def _kappa_at(self, x: Tensor) -> float | Tensor: ...

    def to_canonical(self, x: Tensor, sign: int) -> Tensor:
        """Points as points of the canonical model, in float64."""

    def from_canonical(self, x: Tensor, kappa: float | Tensor, sign: int) -> Tensor:
        """Points of the canonical model of curvature kappa as points of this one, in float64."""

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Points in ``dtype``, rounded once and within the cap of this model in that type."""


class ConstantCurvature(AtOrigin):
    """A space form in some model: holds the curvature, and what follows from it alone.

    Args:
        kappa: signed sectional curvature, a number or a tensor. A tensor of shape (H,) broadcasts against the batch
            dimensions of points (..., H, N, D).
        learnable: keep kappa as a :class:`~horosphere.manifolds.BoundedParameter`, which keeps its sign (a number
            becomes a float64 scalar, so it is read back unchanged). ``.to(torch.bfloat16)`` and ``.half()`` of a module
            leave a curvature in float32. ZeroRedundancyOptimizer and fully_shard take parameters of one type and of at
            least one dimension: there give a tensor of the layer's type, ``kappa=torch.tensor([-1.0])``.

    Raises:
        ValueError: kappa is not finite, or of a sign that the model does not allow.
        TypeError: the curvature came as ``c=`` or ``k=``.
    """

    ndim = 1
    reversible = False
    _sign: int | None = None  # the sign the model demands; None where kappa may have any

    def __init__(self, kappa: float | Tensor, learnable: bool = False, **other):
        super().__init__()
        if other:
            name = next(iter(other))
            raise TypeError(
                f"{type(self).__name__} got {name}={other[name]!r}: say the signed curvature instead, kappa=-c "
                "(a ball with c = 1 has kappa = -1); horosphere.manifolds.curvature converts other conventions"
            )
        self._check_kappa(kappa)
        self.register_buffer("_fixed_kappa", None)
        self.register_parameter("_learnable_kappa", None)
        self._number = math.nan  # where kappa is a tensor
        if learnable:
            value = kappa if isinstance(kappa, Tensor) else torch.tensor(kappa, dtype=torch.float64)
            limit = _numerics.MIN_ABS_KAPPA
            low, high = {None: (-math.inf, math.inf), -1: (-math.inf, -limit), 1: (limit, math.inf)}[self._sign]
            self._learnable_kappa = BoundedParameter(value, low, high)
        elif isinstance(kappa, Tensor):
            self._fixed_kappa = kappa
        else:
            self._number = float(kappa)

    def _check_kappa(self, kappa: float | Tensor) -> None:
        if isinstance(kappa, Tensor) and kappa.is_meta:  # a module built on meta gets its numbers later
            return
        if isinstance(kappa, Tensor):
            finite = bool((kappa.detach().abs() <= _numerics.MAX_ABS_KAPPA).all())
            allowed = self._sign is None or bool((kappa.detach() * self._sign > 0).all())
        else:  # numbers are checked without tensors, so that torch.compile can trace a constructor
            finite = abs(kappa) <= _numerics.MAX_ABS_KAPPA
            allowed = self._sign is None or kappa * self._sign > 0
        if not finite:
            raise ValueError(
                f"{type(self).__name__}: kappa must be finite, at most {_numerics.MAX_ABS_KAPPA:g} in size, got {kappa}"
            )
        if not allowed:
            word, hint = ("negative", "-1.0") if self._sign == -1 else ("positive", "1.0")
            raise ValueError(
                f"{type(self).__name__} needs a {word} sectional curvature (signed, as kappa={hint}), got {kappa}; "
                "for kappa = 0 or a curvature that may change sign use Stereographic"
            )

    @property
    def kappa(self) -> float | Tensor:
        """Signed sectional curvature: the number given, or the tensor or Parameter."""
        for value in (self._learnable_kappa, self._fixed_kappa):
            if value is not None:
                return value
        return self._number

    @property
    def learnable(self) -> bool:
        return self._learnable_kappa is not None

    @property
    def c(self) -> float | Tensor:
        """Minus the curvature, the letter of Ganea et al. (2018)."""
        return -self.kappa

    @property
    def k(self) -> float | Tensor:
        """The number that geoopt calls k in this model."""
        return self.kappa

    @property
    def radius(self) -> float | Tensor:
        """``1 / sqrt|kappa|``, infinite for flat space."""
        if isinstance(self.kappa, Tensor):
            return self.kappa.abs().rsqrt()
        return math.inf if self.kappa == 0 else abs(self.kappa) ** -0.5

    @property
    def name(self) -> str:
        return type(self).__name__

    @in_float64
    def dist2(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Squared distance of x and y (broadcast over batch dimensions), by the model's exact ``pair_dist2``."""
        out = self.pair_dist2(x, y)
        return out.unsqueeze(-1) if keepdim else out

    @in_float64
    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Geodesic distance; its gradient at x = y, and at the antipode of a sphere, is 0.

        So is the Hessian of ``dist(x, y) ** 2`` at x = y, where that of the squared distance is not: take
        :meth:`dist2` for squares.
        """
        out = _numerics.safe_sqrt(self.pair_dist2(x, y))
        return out.unsqueeze(-1) if keepdim else out

    def ambient_dim(self, n: int) -> int:
        """How many numbers store a point of an n-dimensional space of this kind."""
        return n

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        kappa = config["kappa"]
        kappa = torch.tensor(kappa, dtype=torch.float64, device="cpu") if isinstance(kappa, list) else kappa
        return cls(kappa, config["learnable"])

    def config(self) -> dict[str, Any]:
        """The manifold as a JSON-able dictionary; ``manifold_from_config`` is the inverse."""
        kappa = self.kappa.tolist() if isinstance(self.kappa, Tensor) else self.kappa
        return {"type": type(self).__name__, "kappa": kappa, "learnable": self.learnable}

    def take_batch(self, batch_shape: tuple[int, ...], index: Tensor) -> ConstantCurvature:
        """This manifold for the entries ``index`` of the flattened ``batch_shape``: points (P, 1, D) go with it."""
        kappa = self.kappa
        if not isinstance(kappa, Tensor) or kappa.dim() == 0:
            return self
        return type(self)(kappa.expand(batch_shape).reshape(-1)[index])

    def as_stored(self, x: Tensor) -> Tensor:
        """The points with the norm (sphere) or the time (hyperboloid) that their stored numbers mean."""
        return self.projx(x)

    def to_frame(self, point: Tensor, u: Tensor) -> Tensor:
        """Components of tangent vectors u (..., N, D) at point (..., 1, D) in which the metric is the identity."""
        return u

    def from_frame(self, point: Tensor, e: Tensor) -> Tensor:
        """The tangent vectors with these components, the inverse of :meth:`to_frame`."""
        return e

    def _root_of_curvature(self, x: Tensor) -> Tensor:
        kappa = self._kappa_at(x)
        return torch.as_tensor(kappa, dtype=torch.float64, device=x.device).detach().abs().sqrt()

    def _bounded_length(self, x: Tensor, max_radius: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x in a fast type, its norm and the length of the tangent vector at the origin that it becomes, in float64."""
        # a point is x times a number: only lengths go through the maps of the manifold and float64
        wide = x.to(_numerics.fast_dtype(x.dtype))
        norm = _numerics.safe_sqrt((wide * wide).sum(-1, keepdim=True)).to(torch.float64)
        kappa = torch.as_tensor(self._kappa_at(x), dtype=torch.float64, device=x.device)
        length = x.shape[-1] ** -0.5 * norm
        return wide, norm, length * _numerics.tanh_ratio(kappa.clamp(max=0.0) * length * length / max_radius**2)

    def _one_kappa(self) -> float | None:
        """kappa as a number, None where there are several."""
        kappa = self.kappa
        if not isinstance(kappa, Tensor):
            return kappa
        if kappa.dim():
            return None
        bounded = self._kappa_at(kappa)
        return bounded.item() if isinstance(bounded, Tensor) else bounded

    def extra_repr(self) -> str:
        kappa = self.kappa
        if isinstance(kappa, Tensor):
            said = f"{kappa.item():.6g}" if kappa.numel() == 1 else f"tensor of shape {tuple(kappa.shape)}"
        else:
            said = str(kappa)
        return f"kappa={said}" + (", learnable" if self.learnable else "")

    def _kappa_at(self, x: Tensor, dtype: torch.dtype = torch.float64) -> float | Tensor:
        """kappa shaped to broadcast against per-point scalars (..., N, 1) of points (..., N, D)."""
        kappa = self.kappa
        if not isinstance(kappa, Tensor):
            return kappa
        if self._sign is not None and isinstance(kappa, BoundedParameter) and kappa.moved():
            self._check_moved(kappa, self._sign)
        kappa = kappa.to(dtype)
        if kappa.dim() == 0:
            return kappa
        check_kappa_shape(kappa, x)
        return kappa[..., None, None]

    def _check_moved(self, kappa: BoundedParameter, sign: int) -> None:
        if bool((kappa.detach() * sign <= 0).any()):
            del kappa._asked  # the next use says it again
            raise ValueError(
                f"the learned kappa of a {self.name} is {kappa.tolist()}, a sign that this space does not have: "
                "something other than an optimizer of horosphere.optim moved it; call horosphere.optim.project_ "
                "after its steps"
            )

    def _apply(self, fn, recurse: bool = True):
        # a curvature rounded to 8 bits moves every distance: casts to half precision leave it in float32
        return super()._apply(keeps_float32(fn), recurse)

    def _check_shape(self, shape, name):
        if len(shape) < 1:
            return False, f"'{name}' on the {self} requires at least 1 dimension, got shape {tuple(shape)}"
        return True, None


def check_kappa_shape(kappa: Tensor, x: Tensor) -> None:
    """kappa (H,) goes with points (..., H, N, D): anything else is an error that shows both shapes."""
    batch = x.shape[:-2]
    fits = x.dim() >= 2 and len(kappa.shape) <= len(batch)
    fits = fits and all(k in (1, b) for k, b in zip(reversed(kappa.shape), reversed(batch), strict=False))
    if not fits:
        raise ValueError(
            f"kappa of shape {tuple(kappa.shape)} does not fit points of shape {tuple(x.shape)}: kappa broadcasts "
            f"against the batch dimensions {tuple(batch)} of points (..., N, D)"
        )

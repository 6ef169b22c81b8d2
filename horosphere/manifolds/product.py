"""Products of manifolds and manifolds with rescaled distances (mixed curvature spaces)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._points import as_points
from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.bounded import BoundedParameter, keeps_float32
from horosphere.manifolds.chord import Chord, check_manifold, chords
from horosphere.manifolds.config import manifold_config, manifold_from_config
from horosphere.manifolds.origin import AtOrigin
from horosphere.manifolds.pairs import pair_dist2


def _is_pair(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], int)


class Product(AtOrigin, geoopt.ProductManifold):
    r"""Cartesian product: points are the parts' stored numbers side by side.

    .. math:: d(x, y)^2 = \sum_p d_p(x_p, y_p)^2

    Args:
        manifolds_with_size: pairs (manifold, stored size of its points), e.g.
            ``Product((PoincareBall(-1.0), 5), (Sphere(1.0), 6))`` for H^5 x S^5.

    Source: Gu, Sala, Gunel and Re (2019), Learning mixed-curvature representations in product spaces.
    """

    def __init__(self, *manifolds_with_size: tuple[geoopt.Manifold, int]):
        for pair in manifolds_with_size:
            if not _is_pair(pair):
                raise TypeError(f"Product takes pairs (manifold, size) with an integer size, got {pair!r}")
            check_manifold(pair[0], "the manifold of a part")
        super().__init__(*manifolds_with_size)

    def factors(self) -> list[hooks.Factor]:
        """The parts, each with its own numbers of a point."""
        return [hooks.Factor(m, part, 1.0) for m, part in zip(self.manifolds, self.slices, strict=True)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Stored size of each part."""
        return tuple(part.stop - part.start for part in self.slices)

    def ambient_dim(self, n: int) -> int:
        """The stored size; ValueError where the parts' dimensions do not add up to n."""
        dims = [hooks.intrinsic_dim(m, size) for m, size in zip(self.manifolds, self.sizes, strict=True)]
        if sum(dims) != n:
            raise ValueError(f"the parts of {self} have {' + '.join(map(str, dims))} = {sum(dims)} dimensions, not {n}")
        return self.n_elements

    def config(self) -> dict[str, Any]:
        return {
            "type": "Product",
            "parts": [[manifold_config(m), size] for m, size in zip(self.manifolds, self.sizes, strict=True)],
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Product:
        return cls(*((manifold_from_config(part), int(size)) for part, size in config["parts"]))

    def take_batch(self, batch_shape: tuple[int, ...], index: Tensor) -> Product:
        return Product(
            *(
                (hooks.take_batch(m, batch_shape, index), size)
                for m, size in zip(self.manifolds, self.sizes, strict=True)
            )
        )

    def _parts(self, x: Tensor) -> list[Tensor]:
        """The parts' own numbers of points or vectors x."""
        x = as_points(x, "point")
        if x.dim() < 1 or x.shape[-1] != self.n_elements:
            raise ValueError(f"{self} stores {self.n_elements} numbers a point, got shape {tuple(x.shape)}")
        return [x[..., part] for part in self.slices]

    def _each(self, method: str, *points: Tensor) -> list[Tensor]:
        """``method`` of every part on its slices of the points."""
        slices = zip(*(self._parts(p) for p in points), strict=True)
        return [getattr(m, method)(*parts) for m, parts in zip(self.manifolds, slices, strict=True)]

    def chord(self, x: Tensor) -> tuple[Chord, ...] | None:
        """The parts' chords; None where a part has only ``dist``."""
        found: list[Chord] = []
        for m, part in zip(self.manifolds, self._parts(x), strict=True):
            parts = chords(m, part)
            if parts is None:
                return None
            found.extend(parts)
        return tuple(found)

    def pair_dist2(self, x: Tensor, y: Tensor) -> Tensor:
        """Squared distance of broadcast pairs (..., D), in float64."""
        pairs = zip(self.manifolds, self._parts(x), self._parts(y), strict=True)
        terms = [pair_dist2(m, a, b) for m, a, b in pairs]
        return torch.stack(torch.broadcast_tensors(*terms)).sum(0)

    def dist2(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Squared distance: the sum over the parts."""
        out = self.pair_dist2(as_points(x, "x"), as_points(y, "y")).to(torch.promote_types(x.dtype, y.dtype))
        return out.unsqueeze(-1) if keepdim else out

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Geodesic distance; its gradient at x = y is 0. For squares take :meth:`dist2`."""
        out = _numerics.safe_sqrt(self.pair_dist2(as_points(x, "x"), as_points(y, "y")))
        out = out.to(torch.promote_types(x.dtype, y.dtype))
        return out.unsqueeze(-1) if keepdim else out

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Sum of the parts' inner products."""
        parts = zip(self.manifolds, self.slices, strict=True)
        out = sum(m.inner(x[..., s], u[..., s], None if v is None else v[..., s], keepdim=True) for m, s in parts)
        return out if keepdim else out.squeeze(-1)

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Length of a tangent vector; its gradient at u = 0 is 0."""
        return _numerics.safe_sqrt(self.inner(x, u, keepdim=keepdim))

    def component_inner(self, x: Tensor, u: Tensor, v: Tensor | None = None) -> Tensor:
        """The parts' inner products, each repeated over its part's numbers."""
        found = []
        for m, s in zip(self.manifolds, self.slices, strict=True):
            term = m.component_inner(x[..., s], u[..., s], None if v is None else v[..., s])
            found.append(term.expand(torch.broadcast_shapes(x[..., s].shape, u[..., s].shape)))
        return torch.cat(found, -1)

    def projx(self, x: Tensor) -> Tensor:
        return torch.cat(self._each("projx", x), -1)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.cat(self._each("proju", x, u), -1)

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.cat(self._each("egrad2rgrad", x, u), -1)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.cat(self._each("expmap", x, u), -1)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.cat(self._each("retr", x, u), -1)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        pairs = zip(self.manifolds, self._parts(x), self._parts(y), strict=True)
        return torch.cat([hooks.log(m, a, b, "Product.logmap") for m, a, b in pairs], -1)

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        parts = zip(self.manifolds, self._parts(x), self._parts(y), self._parts(v), strict=True)
        return torch.cat([hooks.transp(m, *part) for m, *part in parts], -1)

    # geoopt's own versions of these go through part methods that reshape; the base class's compose the ones above
    expmap_transp = geoopt.Manifold.expmap_transp
    retr_transp = geoopt.Manifold.retr_transp
    transp_follow_expmap = geoopt.Manifold.transp_follow_expmap
    transp_follow_retr = geoopt.Manifold.transp_follow_retr

    def random(self, *size, dtype=None, device=None) -> Tensor:
        """Independent random points of the parts; shape ``size``, whose last number is the sum of the sizes."""
        return self._assemble(hooks.random_points, size, dtype, device)

    def origin(self, *size, dtype=None, device=None, seed=None) -> Tensor:
        """The parts' origins."""
        return self._assemble(hooks.origin, size, dtype, device)

    def _assemble(self, make: Callable[..., Tensor], size, dtype, device) -> Tensor:
        shape = geoopt.utils.size2shape(*size)
        self._assert_check_shape(shape, "x")
        parts = [
            make(m, *shape[:-1], n, dtype=dtype, device=device) for m, n in zip(self.manifolds, self.sizes, strict=True)
        ]
        return torch.cat(parts, -1)

    def __repr__(self) -> str:
        inside = ", ".join(f"({m}, {size})" for m, size in zip(self.manifolds, self.sizes, strict=True))
        return f"Product({inside})"


class Scaled(AtOrigin):
    r"""A manifold with its metric multiplied by ``scale**2``: :math:`d(x, y) = \text{scale}\; d_{\text{base}}(x, y)`.

    Geodesics, exp, log and transport are those of the base (vectors are velocities in the base's coordinates); inner
    products carry ``scale**2``, Riemannian gradients its inverse, sectional curvature ``kappa / scale**2``.
    (geoopt's Scaled expresses vectors in rescaled coordinates and leaves ``inner`` and ``egrad2rgrad`` as they were.)

    Args:
        manifold: the base.
        scale: > 0.
        learnable: keep the scale as a :class:`~horosphere.manifolds.BoundedParameter`, which stays above 0.

    Raises:
        ValueError: scale is not positive and finite.
    """

    def __init__(self, manifold: geoopt.Manifold, scale: float | Tensor = 1.0, learnable: bool = False):
        super().__init__()
        check_manifold(manifold)
        value = (
            scale.detach() if isinstance(scale, Tensor) else torch.as_tensor(scale, dtype=torch.float64, device="cpu")
        )
        if value.dim() or not (value > 0 and value.isfinite()):
            raise ValueError(f"scale must be one positive finite number, got {scale}")
        self.base = manifold
        low = _numerics.MIN_ABS_KAPPA**0.5
        self.register_parameter("_learnable_scale", BoundedParameter(value, low) if learnable else None)
        self.register_buffer("_fixed_scale", scale if isinstance(scale, Tensor) and not learnable else None)
        self._number = math.nan if isinstance(scale, Tensor) or learnable else float(scale)

    @property
    def scale(self) -> float | Tensor:
        for value in (self._learnable_scale, self._fixed_scale):
            if value is not None:
                return value
        return self._number

    def _apply(self, fn, recurse: bool = True):
        return super()._apply(keeps_float32(fn), recurse)

    def _wide_scale(self) -> float | Tensor:
        scale = self._learnable_scale
        if isinstance(scale, BoundedParameter) and scale.moved() and not bool(scale.detach() > 0):
            del scale._asked
            raise ValueError(
                f"the learned scale of {type(self).__name__} is {scale.item():g}, and must be > 0: something other "
                "than an optimizer of horosphere.optim moved it; call horosphere.optim.project_ after its steps"
            )
        # in float64: the square of a float32 scale would be rounded to float32
        return self.scale.to(torch.float64) if isinstance(self.scale, Tensor) else self.scale

    def _scale_number(self) -> float:
        # float() of a Parameter warns
        return self.scale.item() if isinstance(self.scale, Tensor) else self.scale

    def factors(self) -> list[hooks.Factor]:
        """The base, scaled."""
        return [hooks.Factor(self.base, None, self.scale)]

    name = "Scaled"
    ndim = property(lambda self: self.base.ndim)
    reversible = property(lambda self: self.base.reversible)

    def ambient_dim(self, n: int) -> int:
        return hooks.ambient_dim(self.base, n)

    def config(self) -> dict[str, Any]:
        return {
            "type": "Scaled",
            "base": manifold_config(self.base),
            "scale": self._scale_number(),
            "learnable": self._learnable_scale is not None,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Scaled:
        return cls(manifold_from_config(config["base"]), config["scale"], config["learnable"])

    def take_batch(self, batch_shape: tuple[int, ...], index: Tensor) -> Scaled:
        return Scaled(hooks.take_batch(self.base, batch_shape, index), self.scale)

    def chord(self, x: Tensor) -> Chord | tuple[Chord, ...] | None:
        """The base's chords with features times scale and curvature divided by its square."""
        parts = chords(self.base, x)
        if parts is None:
            return None
        scale = self._wide_scale()
        found = tuple(
            p._replace(features=(p.features * scale).to(p.features.dtype), kappa=p.kappa / scale**2) for p in parts
        )
        return found[0] if len(found) == 1 else found

    def pair_dist2(self, x: Tensor, y: Tensor) -> Tensor:
        """Squared distance of broadcast pairs (..., D), in float64."""
        return self._wide_scale() ** 2 * pair_dist2(self.base, x, y)

    def dist2(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Squared distance: ``scale**2`` times the base's."""
        base = self.base.dist2(x, y, keepdim=keepdim)
        return (self._wide_scale() ** 2 * base).to(base.dtype)

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Distance: ``scale`` times the base's."""
        base = self.base.dist(x, y, keepdim=keepdim)
        return (self._wide_scale() * base).to(base.dtype)

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        base = self.base.inner(x, u, v, keepdim=keepdim)
        return (self._wide_scale() ** 2 * base).to(base.dtype)

    def component_inner(self, x: Tensor, u: Tensor, v: Tensor | None = None) -> Tensor:
        base = self.base.component_inner(x, u, v)
        return (self._wide_scale() ** 2 * base).to(base.dtype)

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        base = self.base.norm(x, u, keepdim=keepdim)
        return (self._wide_scale() * base).to(base.dtype)

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        base = self.base.egrad2rgrad(x, u)
        return (base / self._wide_scale() ** 2).to(base.dtype)

    def projx(self, x: Tensor) -> Tensor:
        return self.base.projx(x)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return self.base.proju(x, u)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return self.base.expmap(x, u)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        return self.base.retr(x, u)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        return hooks.log(self.base, x, y, "Scaled.logmap")

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return hooks.transp(self.base, x, y, v)

    def random(self, *size, dtype=None, device=None, **kwargs) -> Tensor:
        return self.base.random(*size, dtype=dtype, device=device, **kwargs)

    def origin(self, *size, dtype=None, device=None, seed=None) -> Tensor:
        return self.base.origin(*size, dtype=dtype, device=device, seed=seed)

    def _check_shape(self, shape, name):
        return self.base._check_shape(shape, name)

    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5):
        return self.base._check_point_on_manifold(x, atol=atol, rtol=rtol)

    def _check_vector_on_tangent(self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5):
        return self.base._check_vector_on_tangent(x, u, atol=atol, rtol=rtol)

    def __repr__(self) -> str:
        return f"Scaled({self.base}, scale={self._scale_number():g}" + (
            ", learnable)" if self._learnable_scale is not None else ")"
        )

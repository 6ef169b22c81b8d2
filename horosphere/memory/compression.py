"""Hyperbolic curvature compression: keys as a quantised direction and a quantised radius."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horosphere import _numerics
from horosphere._points import as_points
from horosphere.manifolds import PoincareBall
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.hooks import direction_dim, from_polar, to_polar
from horosphere.memory.codebook import check_bits, normal_codebook
from horosphere.memory.packed import Packed
from horosphere.memory.packing import BitLayout
from horosphere.memory.polar import is_ball, polar_space
from horosphere.memory.rotation import SignedHadamard

__all__ = ["HyperbolicCompressor"]

SCHEMES = ("rotated", "paper")
# The range of radii measured on a first block is widened by this share of itself on each side: of N(0, 1) radii 64 span
# about 4.7 standard deviations and 100,000 about 8.7.
RANGE_MARGIN = 0.25
# Length of a value, as bfloat16: relative error 2^-9, far below that of a direction in 8 bits a coordinate.
LENGTH_BITS = 16


class HyperbolicCompressor:
    r"""A code for points k = (radius, direction): b bits a coordinate of the direction, b_r bits for the radius.

    "rotated": the unit direction u in R^D goes through a random-sign Hadamard rotation, each coordinate of
    :math:`\sqrt D\,u` to the nearest level of the Lloyd-Max quantiser of N(0, 1), and the decoded direction back to
    length 1. The *geodesic* radius is coded in 2^b_r equal steps over a range: that of :meth:`calibrate_`, or for each
    head that of the first block, widened by a quarter of itself on both sides. Radii beyond are clamped.

    "paper": coordinates of u in 2^b equal steps of [-1, 1], r = |k| sqrt|kappa| to the nearest multiple of 2^-b_r,
    which are 2^b_r + 1 numbers and take a bit more; the decoded point is clamped into the ball.
    :math:`|k - \hat k| \le r q + (1 + q) 2^{-(b_r + 1)}`, :math:`q = \sqrt D/(2^b - 1)`, in units of the ball's radius.

    Args:
        bits: b, bits a coordinate, 1 to 8.
        radius_bits: b_r, 1 to 15.
        scheme: "rotated" or "paper" (balls only).
        manifold: where keys live: a ball, hyperboloid, sphere, flat space or one of your own, no product. Curvatures
            may differ by head.
        seed: of the rotation's signs; codes of different seeds do not understand each other.

    Raises:
        ValueError: a number out of range, an unknown scheme, a manifold whose points have no such radius.
        TypeError: no manifold.

    Source: hyperbolic curvature compression of the GeoResolver paper (M5), whose bound
    :math:`4(2^{-b} + 2^{-b_r})` does not hold; docs/compression.md.
    """

    def __init__(
        self,
        bits: int = 4,
        radius_bits: int = 6,
        scheme: str = "rotated",
        manifold: geoopt.Manifold | None = None,
        seed: int = 0,
    ):
        if scheme not in SCHEMES:
            raise ValueError(f"scheme must be one of {SCHEMES}; got {scheme!r}")
        check_bits("radius_bits", radius_bits, 15)
        self._levels = torch.from_numpy(normal_codebook(bits).copy())
        self.bits, self.radius_bits, self.scheme, self.seed = bits, radius_bits, scheme, seed
        self.manifold = PoincareBall(-1.0) if manifold is None else manifold
        self._space = polar_space(self.manifold)
        if scheme == "paper" and not is_ball(self._space):
            raise ValueError(f"scheme 'paper' codes points of a ball; got {self.manifold!r}: use scheme='rotated'")
        self._range: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        return f"HyperbolicCompressor(bits={self.bits}, radius_bits={self.radius_bits}, scheme={self.scheme!r})"

    def calibrate_(self, keys: Tensor) -> HyperbolicCompressor:
        """Fix the range of radii to that of these keys (..., N, D), one range for each leading index.

        Every later :meth:`encode` uses it, whose keys' leading dimensions must broadcast with it. Returns the code.
        """
        self._range = _span(to_polar(self._space, self._checked(keys, "keys"))[1], margin=0.0)
        return self

    def encode(self, keys: Tensor, *, like: Packed | None = None) -> Packed:
        """Code points (..., N, D); ``like``, an earlier result, gives the range of radii.

        Raises:
            ValueError: shape without rows, numbers that are not finite, or ``like`` from another code.
        """
        keys = self._checked(keys, "keys")
        vector, radius = to_polar(self._space, keys)
        if self.scheme == "paper":
            unit = _unit(vector)
            direction = ((unit + 1) / 2 * (2**self.bits - 1)).round()
            root = torch.tanh(radius * self._root(keys) / 2)  # |k| in units of the ball's radius
            codes = torch.cat(((root * 2**self.radius_bits).round().to(direction.dtype), direction), -1)
            return self._packed("keys", codes, keys, None, None)
        if like is not None:
            self._check_own(like, ("keys",))
            low, high = like.radii
        else:
            radii = self._range if self._range is not None else _span(radius, margin=RANGE_MARGIN)
            low, high = (t.expand(*keys.shape[:-2], 1, 1) for t in radii)
        step = (high - low).double() / (2**self.radius_bits - 1)
        steps = (radius - low) / torch.where(step > 0, step, 1.0)
        codes = torch.cat((steps.round().clamp(0, 2**self.radius_bits - 1).int(), self._direction(vector)), -1)
        return self._packed("keys", codes, keys, low, high)

    def encode_values(self, values: Tensor) -> Packed:
        """Code vectors (..., N, D): the direction as in "rotated", the length as bfloat16."""
        values = self._checked(values, "values")
        wide = torch.promote_types(values.dtype, torch.float32)
        length = torch.linalg.vector_norm(values, dim=-1, keepdim=True, dtype=wide)
        codes = torch.cat((length.bfloat16().view(torch.int16).int() & 0xFFFF, self._direction(values)), -1)
        return self._packed("values", codes, values, None, None)

    def append_(self, packed: Packed, more: Tensor) -> Packed:
        """Code more rows (..., M, D) with the range of ``packed`` and put them behind its own, in place.

        Raises:
            ValueError: other leading dimensions or size, or rows of another code; ``packed`` is as it was.
        """
        self._check_own(packed)
        shape = _shape(more)
        if shape is None or len(shape) < 2 or (*shape[:-2], shape[-1]) != (*packed.shape[:-2], packed.shape[-1]):
            raise ValueError(f"more must have the shape of packed, {packed.shape}, but for its rows; got {shape}")
        coded = self.encode(more, like=packed) if packed.kind == "keys" else self.encode_values(more)
        packed.extend_(coded.data)
        return packed

    def decode(self, packed: Packed, start: int = 0, stop: int | None = None) -> Tensor:
        """The points or values of rows ``start`` to ``stop``, in the type they came in; keys lie on the manifold."""
        self._check_own(packed)
        codes = self._layout(packed.kind, packed.shape[-1]).unpack(packed.data[..., start:stop, :])
        first, direction = codes[..., :1], codes[..., 1:]
        wide = torch.promote_types(packed.dtype, torch.float32)
        if packed.kind == "keys" and self.scheme == "paper":
            decoded = direction.to(wide) * (2 / (2**self.bits - 1)) - 1
            decoded = decoded * (first.to(wide) / 2**self.radius_bits)
            norm = torch.linalg.vector_norm(decoded, dim=-1, keepdim=True)
            limit = 1 - _numerics.ball_margin(packed.dtype)
            decoded = decoded * (limit / norm).clamp(max=1.0) / self._root(decoded).to(wide)
            return self._space.projx(decoded.to(packed.dtype))
        vector = self._levels.to(packed.device, wide)[direction]
        vector = vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        unit = SignedHadamard(vector.shape[-1], self.seed).inverse(vector)
        if packed.kind == "values":
            return (unit * first.to(torch.int16).view(torch.bfloat16).to(wide)).to(packed.dtype)
        low, high = packed.radii
        step = (high - low).double() / (2**self.radius_bits - 1)
        return self._space.projx(from_polar(self._space, unit, low + step * first).to(packed.dtype))

    def _direction(self, vector: Tensor) -> Tensor:
        """Indices (..., n) of the codebook's levels nearest to the rotated direction."""
        n = vector.shape[-1]
        rotated = SignedHadamard(n, self.seed)(_unit(vector)) * math.sqrt(n)
        borders = ((self._levels[:-1] + self._levels[1:]) / 2).to(rotated)
        return torch.bucketize(rotated, borders, out_int32=True)

    def _packed(self, kind: str, codes: Tensor, source: Tensor, low: Tensor | None, high: Tensor | None) -> Packed:
        data = self._layout(kind, source.shape[-1]).pack(codes)
        return Packed(data, kind, source.shape[-1], source.dtype, self.signature, low, high)

    def _layout(self, kind: str, dim: int) -> BitLayout:
        if kind == "values":
            return BitLayout([LENGTH_BITS] + [self.bits] * dim)
        first = self.radius_bits + (self.scheme == "paper")
        return BitLayout([first] + [self.bits] * direction_dim(self._space, dim))

    def _root(self, x: Tensor) -> Tensor:
        kappa = self._space._kappa_at(x)
        return torch.as_tensor(kappa, dtype=torch.float64, device=x.device).detach().abs().sqrt()

    @property
    def signature(self) -> tuple:
        """Settings that a reader of the code must share."""
        return (self.bits, self.radius_bits, self.scheme, self.seed, type(self._space).__name__)

    def _check_own(self, packed: Packed, kinds: tuple[str, ...] = ("keys", "values")) -> None:
        if not isinstance(packed, Packed):
            raise TypeError(f"packed must be what encode returned; got {type(packed).__name__}")
        if packed.signature != self.signature or packed.kind not in kinds:
            raise ValueError(
                f"packed holds {packed.kind} of the code {packed.signature}; "
                f"this one reads {' or '.join(kinds)} of {self.signature}"
            )

    def _checked(self, x: Tensor, name: str) -> Tensor:
        x = as_points(x, name).detach()
        least = 1 + (name == "keys" and direction_dim(self._space, 1) == 0)
        if x.dim() < 2 or x.shape[-1] < least:
            raise ValueError(f"{name} must have shape (..., N, D) with D >= {least}; got {tuple(x.shape)}")
        if not bool(x.isfinite().all()):
            raise ValueError(f"{name} must be finite; {int((~x.isfinite()).sum())} of its numbers are not")
        return x


def _shape(value: object) -> tuple[int, ...] | None:
    """Of a tensor; None of anything else."""
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _unit(vector: Tensor) -> Tensor:
    """Vectors of length 1 in at least float32; 0 stays 0."""
    wide = vector.to(torch.promote_types(vector.dtype, torch.float32))
    # divided by the largest entry first, so that the squares of small numbers do not vanish
    wide = wide / wide.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)
    return wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)


def _span(radius: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Range (..., 1, 1) of radii (..., N, 1), float32; none is below 0."""
    if radius.shape[-2] == 0:
        raise ValueError("the first block of keys fixes the range of radii: it must have a row; got none")
    low, high = radius.amin(-2, keepdim=True), radius.amax(-2, keepdim=True)
    widened = margin * (high - low)
    return (low - widened).clamp(min=0).float(), (high + widened).float()

"""What the laws of a contract ask of results, each with a message, and when a law is skipped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from horosphere.manifolds.chord import resolve


def required(method, *args, **kwargs):
    """What the method returns; a skip that names it where the manifold does not have it."""
    try:
        return method(*args, **kwargs)
    except NotImplementedError as error:
        owner = getattr(method, "__self__", args[0] if args else None)
        pytest.skip(f"{type(owner).__name__} has no {method.__name__}: {str(error) or 'not implemented'}")


def require_vectors(manifold):
    if manifold.ndim != 1:
        pytest.skip(f"points of {type(manifold).__name__} are no vectors")


def require_chord(manifold):
    resolved, has_chord = resolve(manifold)
    if not has_chord:
        pytest.skip(f"{type(resolved).__name__} has no chord (level 0)")


def assert_on(manifold, x: Tensor):
    good, reason = manifold.check_point_on_manifold(x, explain=True)
    assert good, f"no point of {manifold}: {reason}"


def assert_type(what: str, found: Tensor, dtype: torch.dtype):
    assert found.dtype == dtype, f"{what} must be of type {dtype}, as what went in, got {found.dtype}"


def assert_shape(what: str, found: Tensor, shape: tuple[int, ...]):
    assert found.shape == shape, f"{what} must have shape {tuple(shape)}, got {tuple(found.shape)}"


def assert_finite(what: str, grad: Tensor):
    bad = int((~grad.isfinite()).sum())
    assert bad == 0, f"{what} is not finite in {bad} of {grad.numel()} numbers"

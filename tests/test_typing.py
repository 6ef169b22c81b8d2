"""The script of a user of a type checker runs; `make lint` holds it to ``mypy --strict``."""

import math

import torch

import horosphere as hs
from tests import typed_user


def test_the_typed_script_runs():
    torch.manual_seed(0)
    assert math.isfinite(typed_user.train(2))
    assert typed_user.nearest()
    out, lse = typed_user.attend(hs.Sphere())
    assert out.shape == (2, 5, 4) and lse.shape == (2, 5)

"""What is particular to the sphere: a point is the direction of its stored vector."""

import pytest
import torch

import horosphere as hs


@pytest.mark.parametrize("kappa", [1.0, 0.3])
def test_log_depends_on_directions_only(kappa):
    sphere = hs.Sphere(kappa)
    torch.manual_seed(0)
    x = sphere.random(20, 4, dtype=torch.float64)
    y = torch.cat((sphere.random(10, 4, dtype=torch.float64), sphere.projx(x[10:] + 1e-6 * torch.randn(10, 4))))
    want = sphere.logmap(x, y)
    torch.testing.assert_close(sphere.norm(x, want), sphere.dist(x, y), rtol=1e-9, atol=0)
    for scaled in (sphere.logmap(x, 3 * y), sphere.logmap(x / 7, y)):
        error = (scaled - want).norm(dim=-1) / want.norm(dim=-1)
        assert error.max() < 1e-9  # 3 y and x / 7 are rounded: 1e-16 of a vector is 1e-10 of a step of 1e-6

"""The three maps from the ball to the sphere."""

import copy

import pytest
import torch
from torch.autograd import gradcheck

import horosphere as hs
from horosphere.manifolds.sphere_maps import DirectionMap, HemisphereMap, LearnedMap

f64 = torch.float64


def ball_points(kappa=-1.0, shape=(7, 3)):
    torch.manual_seed(0)
    return hs.PoincareBall(kappa).random(*shape, dtype=f64)


def test_direction_is_the_unit_vector():
    c = ball_points()
    assert torch.allclose(DirectionMap()(c), c / c.norm(dim=-1, keepdim=True), atol=1e-15)


def test_direction_of_the_origin_is_the_first_axis_with_no_gradient():
    c = torch.zeros(2, 3, dtype=f64, requires_grad=True)
    out = DirectionMap()(c)
    out.sum().backward()
    assert out.tolist() == [[1.0, 0.0, 0.0]] * 2 and c.grad.abs().max() == 0


@pytest.mark.parametrize("kappa", [-0.3, -1.0, -2.0])
def test_hemisphere_is_conformal_onto_the_open_upper_half(kappa):
    c = ball_points(kappa)
    phi = HemisphereMap(hs.PoincareBall(kappa))
    s = phi(c)
    assert torch.allclose(s.norm(dim=-1), torch.ones(7, dtype=f64), atol=1e-15) and bool((s[:, -1] > 0).all())
    for one in c:
        jacobian = torch.autograd.functional.jacobian(phi, one)
        factor = -kappa * (2 / (1 - kappa * one @ one)) ** 2
        assert torch.allclose(jacobian.mT @ jacobian, factor * torch.eye(3, dtype=f64), atol=1e-12)


def test_hemisphere_of_known_points():
    phi = HemisphereMap(hs.PoincareBall(-4.0))
    c = torch.tensor([[0.0, 0.0], [0.25, 0.0], [0.0, 0.5]], dtype=f64)  # the last lies on the rim of radius 1/2
    assert torch.allclose(phi(c), torch.tensor([[0, 0, 1], [0.8, 0, 0.6], [0, 1, 0]], dtype=f64), atol=1e-15)


@pytest.mark.parametrize("dtype, tolerance", [(f64, 1e-14), (torch.float32, 1e-6)])
def test_inverse_brings_points_back(dtype, tolerance):
    c = ball_points(-0.5).to(dtype)
    phi = HemisphereMap(hs.PoincareBall(-0.5))
    back = phi.inverse(phi(c))
    assert back.dtype == dtype and torch.allclose(back, c, atol=tolerance)


def test_a_curvature_for_each_head():
    kappa = torch.tensor([-0.5, -2.0], dtype=f64)
    c = ball_points(-2.0, (4, 2, 5, 3))
    together = HemisphereMap(hs.PoincareBall(kappa))(c)
    for h in range(2):
        assert torch.allclose(together[:, h], HemisphereMap(hs.PoincareBall(kappa[h].item()))(c[:, h]))


def test_gradients_reach_points_and_curvature():
    ball = hs.PoincareBall(torch.tensor([-0.7, -1.2], dtype=f64), learnable=True)
    phi = HemisphereMap(ball)
    c = ball_points(-1.2, (2, 3, 2)).requires_grad_()

    def mapped(c, kappa):
        return torch.func.functional_call(phi, {"ball._learnable_kappa": kappa}, (c,))

    assert gradcheck(mapped, (c, ball.kappa))
    assert gradcheck(lambda s: phi.inverse(s), (phi(c).detach().requires_grad_(),))


def test_learned_map_ends_on_the_sphere_and_trains():
    torch.manual_seed(0)
    phi = LearnedMap(3, 5).double()
    s = phi(ball_points())
    assert s.shape == (7, 5) and torch.allclose(s.norm(dim=-1), torch.ones(7, dtype=f64))
    s[:, 0].sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in phi.parameters())
    again = copy.deepcopy(phi)
    again.load_state_dict(phi.state_dict())
    assert torch.equal(again(ball_points()), phi(ball_points()))


def test_learned_map_of_nothing_is_the_first_axis():
    phi = LearnedMap(2, 3)
    with torch.no_grad():
        for p in phi.parameters():
            p.zero_()
    assert phi(torch.ones(1, 2)).tolist() == [[1.0, 0.0, 0.0]]


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="ball must be a PoincareBall"):
        HemisphereMap(hs.Sphere())
    with pytest.raises(ValueError, match="out_features >= 2"):
        LearnedMap(3, 1)
    with pytest.raises(TypeError, match="real numbers"):
        DirectionMap()(torch.ones(2, 3, dtype=torch.bool))

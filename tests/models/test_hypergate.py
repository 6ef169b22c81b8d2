"""The gate's three levels, and the gradient it lets through."""

import copy
import math

import pytest
import torch

import horosphere as hs
from horosphere.attention import GeodesicAttention
from horosphere.attention.points import into_manifold
from horosphere.models.hypergate import HyperGate

f64 = torch.float64


def gate(dim=8, heads=2, scale=1.0, seed=0, **other):
    torch.manual_seed(seed)
    made = HyperGate(dim, heads, **other).double()
    with torch.no_grad():
        for p in (made.gate.weight, made.gate.bias, made.boundary.weight):
            p.copy_(scale * torch.randn_like(p))
    return made


def jacobians(made, x):
    """dh/dx (n, dim, dim) by forward differences of autograd's own reverse mode."""
    return torch.func.vmap(torch.func.jacrev(lambda t: made(t.unsqueeze(0)).hidden[0]))(x)


@pytest.mark.parametrize("capped", [False, True])
def test_gradient_floor_is_never_violated(capped):
    """10,000 random cases: every singular value of dh/dx, so every gradient, is above the floor."""
    smallest, positive = math.inf, 0
    for seed in range(50):
        g = torch.Generator().manual_seed(seed)
        dim = [1, 2, 5, 8, 13][seed % 5]
        scale = 10.0 ** (-3 + 4 * torch.rand((), generator=g).item())
        length = 10.0 ** (-2 + 3 * torch.rand(200, 1, generator=g, dtype=f64))
        x = torch.randn(200, dim, generator=g, dtype=f64) * length / math.sqrt(dim)
        made = gate(dim, scale=scale, seed=seed, max_norm=float(x.norm(dim=-1).max()) if capped else None)
        floor = made.gradient_floor(x)
        least = torch.linalg.svdvals(jacobians(made, x))[:, -1]
        assert (least >= floor - 1e-12).all()
        cotangent = torch.randn(200, dim, generator=g, dtype=f64)
        reached = x.clone().requires_grad_()
        made(reached).hidden.backward(cotangent)
        assert (reached.grad.norm(dim=-1) >= (floor - 1e-12) * cotangent.norm(dim=-1)).all()
        smallest, positive = min(smallest, floor.min().item()), positive + int((floor > 0).sum())
    if capped:
        assert smallest >= 0.0189
    else:
        assert smallest < 0 and positive > 1000  # no guarantee for all of them


def test_cap_scales_the_weights_and_has_their_gradient():
    made = gate(5, max_norm=2.0, scale=3.0)
    assert torch.linalg.matrix_norm(made.weight, 2).item() == pytest.approx(0.5)
    small = gate(5, max_norm=2.0, scale=1e-3)
    assert torch.equal(small.weight, small.gate.weight)
    x = torch.randn(3, 5, dtype=f64, requires_grad=True)

    def hidden(x, weight):
        return torch.func.functional_call(made, {"gate.weight": weight}, (x,)).hidden

    assert torch.autograd.gradcheck(hidden, (x, made.gate.weight.detach().requires_grad_()))


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_boundary_keeps_points_of_every_token_inside(scale):
    made = gate(8, heads=2)
    with torch.no_grad():
        made.ball.kappa.copy_(torch.tensor([-1.0, -0.2], dtype=f64))
    x = torch.randn(3, 6, 8, dtype=f64)
    out = made(x)
    points = into_manifold(
        scale * torch.randn(3, 2, 6, 4, dtype=f64), made.ball, max_radius=out.max_radius[:, None, :, None]
    )
    share = points.norm(dim=-1) * torch.tensor([1.0, 0.2], dtype=f64).sqrt()[:, None]
    assert (share <= out.boundary[:, None] * (1 + 1e-12)).all()
    assert torch.allclose(out.max_radius, 2 * torch.atanh(out.boundary), rtol=1e-9)
    if scale > 1:
        assert torch.allclose(share, out.boundary[:, None].expand_as(share), rtol=1e-3)


def test_a_layer_takes_the_bound_of_every_token():
    torch.manual_seed(0)
    made = HyperGate(8, 2)
    layer = GeodesicAttention(8, 2, manifold=made.ball)
    x = torch.randn(3, 6, 8)
    h = made(x)
    free = layer(h.hidden, h.hidden, h.hidden, is_causal=True)[0]
    assert torch.allclose(h.max_radius, torch.full((3, 6), 4.0))
    same = layer(h.hidden, h.hidden, h.hidden, is_causal=True, max_radius=h.max_radius)[0]
    bound = layer(h.hidden, h.hidden, h.hidden, is_causal=True, max_radius=h.max_radius / 10)[0]
    assert torch.allclose(free, same, atol=1e-5) and not torch.allclose(free, bound, atol=1e-3)
    one = layer(h.hidden[0], h.hidden[0], h.hidden[0], is_causal=True, max_radius=h.max_radius[0] / 10)[0]
    assert torch.allclose(one, bound[0], atol=1e-5)
    with pytest.raises(ValueError, match="max_radius"):
        layer(x, x, x, max_radius=h.max_radius[:, :3])
    bound.sum().backward()
    assert made.boundary.bias.grad is None or made.boundary.bias.grad.isfinite().all()


def test_mix():
    main, memory = torch.ones(2, 3), torch.zeros(2, 3)
    g = torch.tensor([[0.0, 0.5, 1.0]]).expand(2, 3)
    assert torch.equal(HyperGate.mix(g, main, memory), g)


def test_curvatures_train_and_points_stay_inside():
    torch.manual_seed(0)
    made = HyperGate(6, 2)
    anchors = hs.ManifoldParameter(
        made.ball.projx(0.9 * torch.nn.functional.normalize(torch.randn(2, 4, 3), dim=-1)), made.ball
    )
    module = torch.nn.ModuleList([made])
    module.register_parameter("anchors", anchors)
    optimizer = hs.optim.RiemannianAdam(hs.optim.param_groups(module), lr=0.1)
    x = torch.randn(20, 6)
    for _ in range(15):
        optimizer.zero_grad()
        out = made(x)
        points = into_manifold(
            out.hidden.view(20, 2, 3).transpose(0, 1), made.ball, max_radius=out.max_radius[None, :, None]
        )
        # the second term wants more curvature, a smaller ball: the points must follow
        loss = hs.cdist(points, anchors, made.ball, squared=True).mean() + 100 * made.ball.kappa.sum()
        loss.backward()
        optimizer.step()
        made.ball.assert_check_point_on_manifold(anchors)
    assert (made.ball.kappa < -1.05).all()
    assert (made.boundary.bias - math.log(math.expm1(4.0) / 2)).abs().item() > 1e-3


def test_a_curvature_that_an_optimizer_moved_past_zero_comes_back():
    torch.manual_seed(0)
    made = HyperGate(8, 2)
    layer = GeodesicAttention(8, 2, manifold=made.ball)
    optimizer = hs.optim.RiemannianAdam(hs.optim.param_groups(torch.nn.ModuleList([made, layer])), lr=0.3)
    for _ in range(12):
        optimizer.zero_grad()
        h = made(torch.randn(3, 6, 8))
        out = layer(h.hidden, h.hidden, h.hidden, is_causal=True, max_radius=h.max_radius)[0]
        assert out.isfinite().all() and (made.ball.kappa < 0).all()
        (out.square().mean() - made.ball.kappa.sum()).backward()
        optimizer.step()


def test_copies_and_state():
    made, other = gate(scale=1.0), gate(seed=1)
    other.load_state_dict(made.state_dict())
    x = torch.randn(4, 8, dtype=f64)
    for same in (copy.deepcopy(made), other):
        assert torch.equal(same(x).hidden, made(x).hidden)


def test_bad_input_is_named():
    for wrong in ({"dim": 0}, {"heads": 0}, {"kappa": 0.5}, {"max_norm": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            HyperGate(**({"dim": 4, "heads": 2} | wrong))
    with pytest.raises(ValueError, match="x must have"):
        HyperGate(4, 2)(torch.zeros(3, 5))

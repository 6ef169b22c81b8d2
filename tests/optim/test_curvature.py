"""Points follow a learned curvature."""

import copy
import io
import math
import pickle

import pytest
import torch

from horosphere import ManifoldParameter, PoincareBall, Sphere
from horosphere.attention import GeodesicAttention
from horosphere.manifolds import BoundedParameter
from horosphere.manifolds._geoopt import geoopt
from horosphere.optim import RiemannianAdam, RiemannianSGD, param_groups, project_
from tests.optim.spaces import LEARNED, on_manifold, points

ORDERS = {
    "points first": lambda p, curvatures: [{"params": [p]}, {"params": curvatures}],
    "curvature first": lambda p, curvatures: [{"params": curvatures}, {"params": [p]}],
    "one group": lambda p, curvatures: [*curvatures, p],
}


def optimizers():
    return [lambda g: RiemannianAdam(g, lr=0.05), lambda g: RiemannianSGD(g, lr=0.02, momentum=0.9)]


@pytest.mark.parametrize("space", LEARNED)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make", optimizers())
def test_points_and_moments_stay_on_the_manifold(space, order, make):
    manifold = LEARNED[space]()
    p = points(manifold)
    target = 1.3 * torch.rand(6, 6, dtype=torch.float64)
    curvatures = list(manifold.parameters())
    optimizer = make(ORDERS[order](p, curvatures))
    start = [k.item() for k in curvatures]
    for _ in range(30):
        optimizer.zero_grad()
        ((manifold.dist(p[:, None], p[None]) - target) ** 2).mean().backward()
        optimizer.step()
        assert on_manifold(p)
        moment = optimizer.state[p][optimizer._tangent_state]
        torch.testing.assert_close(manifold.proju(p.detach(), moment), moment, rtol=1e-9, atol=1e-9)
    assert all(abs(k.item() - old) > 1e-3 for k, old in zip(curvatures, start, strict=True))


@pytest.mark.parametrize("make", optimizers())
def test_the_result_does_not_depend_on_the_order_of_groups(make):
    results = []
    for order in ORDERS.values():
        manifold = PoincareBall(-1.0, learnable=True)
        p = points(manifold)
        optimizer = make(order(p, [manifold.kappa]))
        for _ in range(5):
            optimizer.zero_grad()
            (manifold.dist0(p).sum() + manifold.kappa).backward()
            optimizer.step()
        results.append((p.detach(), manifold.kappa.item()))
    for p, kappa in results[1:]:
        assert torch.equal(p, results[0][0]) and kappa == results[0][1]


def test_curvature_is_constrained_before_points_are_projected():
    manifold = PoincareBall(-1.0, learnable=True)
    p = points(manifold)
    optimizer = RiemannianSGD([p, manifold.kappa], lr=10.0)
    manifold.kappa.grad = torch.tensor(-1.0, dtype=torch.float64)  # one step to kappa = +9
    optimizer.step()
    assert manifold.kappa.item() < 0
    assert on_manifold(p, 1e-5)


def test_a_still_curvature_moves_no_point():
    """Without a step of kappa there is no projection: numbers off the manifold stay as they are."""
    manifold = PoincareBall(-1.0, learnable=True)
    p = points(manifold)
    with torch.no_grad():
        p.fill_(0.6)
    optimizer = RiemannianAdam([p, manifold.kappa])
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((6, 4), 0.6, dtype=p.dtype))


def test_a_curvature_gradient_that_is_not_finite_is_skipped():
    manifold = PoincareBall(-1.0, learnable=True)
    p = points(manifold)
    before = p.detach().clone()
    optimizer = RiemannianAdam([p, manifold.kappa], lr=0.1)
    p.grad = torch.ones(6, 4, dtype=torch.float64)
    p.grad[0] = float("inf")
    manifold.kappa.grad = torch.tensor(float("nan"), dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match=r"\(6, 4\)"):
        optimizer.step()
    assert manifold.kappa.item() == -1.0 and optimizer.skipped_rows == 2
    assert torch.equal(p.detach()[0], before[0]) and not torch.equal(p.detach()[1], before[1])


def test_parts_of_geoopts_product_are_constrained_too():
    ball = PoincareBall(-1.0, learnable=True)
    manifold = geoopt.ProductManifold((ball, 2), (geoopt.Sphere(), 3))
    p = ManifoldParameter(torch.full((4, 5), 0.6), manifold)
    optimizer = RiemannianSGD([p, ball.kappa], lr=10.0)
    ball.kappa.grad = torch.tensor(-1.0, dtype=torch.float64)
    optimizer.step()
    assert ball.kappa.item() < 0
    assert on_manifold(p, 1e-5)


def test_stabilize_every_so_many_steps():
    """All points of a group that took a step, also one without a gradient."""
    p, other = (ManifoldParameter(torch.ones(3, 4), geoopt.Sphere()) for _ in range(2))
    with torch.no_grad():
        p.mul_(1.01)
    optimizer = RiemannianSGD([p, other], lr=0.1, stabilize=2)
    for projected in (False, True):
        other.grad = torch.ones(3, 4)
        optimizer.step()
        assert on_manifold(p, 1e-5) == projected


def test_project_after_another_optimizer_moved_the_curvature():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.p = ManifoldParameter([[0.9, 0.0]], manifold)
            self.plain = torch.nn.Parameter(torch.full((1, 2), 5.0))

    for select in (lambda m: m, lambda m: m.p, lambda m: m.parameters()):
        manifold = PoincareBall(-1.0, learnable=True)
        model = Model()
        with torch.no_grad():
            manifold.kappa.fill_(-4.0)
        project_(select(model))
        assert model.p.detach().norm().item() == pytest.approx(0.5, rel=1e-5)
        assert on_manifold(model.p, 1e-5)
        assert torch.equal(model.plain.detach(), torch.full((1, 2), 5.0))
    with pytest.raises(TypeError, match="module_or_parameters"):
        project_([1.0])


def test_stabilize_projects_points_and_moments_of_another_optimizers_curvature():
    manifold = LEARNED["lorentz"]()
    p = points(manifold)
    optimizer = RiemannianAdam([p], lr=0.1)
    manifold.dist0(p).sum().backward()
    optimizer.step()
    with torch.no_grad():
        manifold.kappa.mul_(1.5)
    assert not on_manifold(p)
    optimizer.stabilize()
    assert on_manifold(p)
    moment = optimizer.state[p]["exp_avg"]
    torch.testing.assert_close(manifold.proju(p.detach(), moment), moment, rtol=1e-9, atol=1e-9)


HEADS = {
    **LEARNED,
    "each head": lambda: PoincareBall(torch.tensor([-1.0, -0.3], dtype=torch.float64), learnable=True),
    "each head's sphere": lambda: Sphere(torch.tensor([1.0, 0.3]), learnable=True),
}
del HEADS["stereographic"]  # may change its sign


@pytest.mark.parametrize("space", HEADS)
@pytest.mark.parametrize(
    "make",
    [lambda g: RiemannianAdam(g, lr=0.7), lambda g: RiemannianSGD(g, lr=3.0), lambda g: torch.optim.SGD(g, lr=3.0)],
)
def test_curvatures_of_a_layer_without_points_keep_their_sign(space, make):
    torch.manual_seed(0)
    layer = GeodesicAttention(8, 2, manifold=HEADS[space]())
    learned = [p for p in layer.manifold.parameters() if isinstance(p, BoundedParameter)]
    signs = [p.detach().sign() for p in learned]
    (group,) = param_groups(layer)
    assert {id(p) for p in learned} <= {id(p) for p in group["params"]}
    optimizer = make([group])
    x = torch.randn(2, 5, 8)
    at_bound = [False] * len(learned)
    for _ in range(4):
        optimizer.zero_grad()
        out = layer(x, x, x)[0]
        assert out.isfinite().all()
        towards_0 = sum((p * sign).sum() for p, sign in zip(learned, signs, strict=True))
        (1e-3 * out.square().mean() + towards_0).backward()
        optimizer.step()
        if not hasattr(optimizer, "skipped_rows"):
            project_(layer)
        for i, (p, sign) in enumerate(zip(learned, signs, strict=True)):
            assert (p.detach().sign() == sign).all()
            at_bound[i] |= bool((p.detach().abs() <= 1e-4).all())
    assert all(at_bound)


@pytest.mark.parametrize("optimizer_class", [RiemannianAdam, RiemannianSGD])
def test_a_bad_gradient_of_a_curvature_without_points_is_skipped(optimizer_class):
    ball = PoincareBall(torch.tensor([-1.0, -0.3]), learnable=True)
    optimizer = optimizer_class([ball.kappa], lr=0.1)
    ball.kappa.grad = torch.tensor([float("nan"), 1.0])
    with pytest.warns(RuntimeWarning, match=r"\(2,\)"):
        optimizer.step()
    assert torch.equal(ball.kappa.detach(), torch.tensor([-1.0, -0.3])) and optimizer.skipped_rows == 1


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "file": lambda p: saved_and_loaded(p),
}


def saved_and_loaded(p):
    buffer = io.BytesIO()
    torch.save(p, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("how", COPIES)
def test_copies_keep_the_interval(how):
    for space, make in HEADS.items():
        manifold = make()
        found = COPIES[how](manifold)
        for old, new in zip(manifold.parameters(), found.parameters(), strict=True):
            assert isinstance(new, BoundedParameter) and new.requires_grad and torch.equal(old, new), space
            assert (new.low, new.high) == (old.low, old.high) and -math.inf < max(new.low, -new.high)
            assert how == "copy" or new.data_ptr() != old.data_ptr()
    one = BoundedParameter(torch.tensor([0.5]), 0.0, 2.0, requires_grad=False)
    for found in (COPIES[how](one), COPIES[how]([one, one])[1]):
        assert (found.low, found.high, found.requires_grad, found.item()) == (0.0, 2.0, False, 0.5)


def test_a_state_holds_the_numbers_and_a_module_keeps_the_interval():
    ball = PoincareBall(torch.tensor([-1.0, -0.3]), learnable=True)
    state = {name: value.clone() for name, value in ball.state_dict().items()}
    assert [type(value) for value in state.values()] == [torch.Tensor]
    other = PoincareBall(torch.tensor([-2.0, -2.0]), learnable=True)
    other.load_state_dict(state)
    other.double()
    assert isinstance(other.kappa, BoundedParameter) and other.kappa.dtype == torch.float64
    with torch.no_grad():
        other.kappa.neg_()
    project_(other)
    assert (other.kappa.detach() == -1e-8).all() and torch.equal(ball.kappa.detach(), torch.tensor([-1.0, -0.3]))


def test_an_empty_interval_is_refused():
    with pytest.raises(ValueError, match="low"):
        BoundedParameter(torch.zeros(2), 1.0, -1.0)
    assert BoundedParameter(torch.zeros(2)).high == math.inf


class Mixed(torch.nn.Module):
    def __init__(self, register):
        super().__init__()
        manifold = PoincareBall(-1.0, learnable=True)
        if register:
            self.manifold = manifold
        self.linear = torch.nn.Linear(3, 2)
        self.p = ManifoldParameter(torch.zeros(4, 2), manifold)
        self.q = ManifoldParameter(torch.zeros(2), manifold)
        self.tied = self.p
        self.kappa = [manifold.kappa]


@pytest.mark.parametrize("register", [True, False])
def test_param_groups_sort_everything_once(register):
    model = Mixed(register)
    groups = param_groups(model)
    assert [g["name"] for g in groups] == ["manifold", "flat"]
    assert [id(p) for p in groups[0]["params"]] == [id(model.p), id(model.q)]
    flat = {id(model.linear.weight), id(model.linear.bias), id(model.kappa[0])}
    assert len(groups[1]["params"]) == 3 and {id(p) for p in groups[1]["params"]} == flat
    groups[0]["lr"] = 0.5
    optimizer = RiemannianAdam(groups, lr=0.1)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.1]


def test_param_groups_leave_out_what_is_empty_and_fixed():
    assert [g["name"] for g in param_groups(torch.nn.Linear(2, 2))] == ["flat"]
    only = torch.nn.Module()
    only.p = ManifoldParameter([0.1, 0.2], geoopt.PoincareBall(c=1.0))
    assert [g["name"] for g in param_groups(only)] == ["manifold"]
    assert param_groups(torch.nn.Module()) == []
    with pytest.raises(TypeError, match="module"):
        param_groups([only.p])

"""A learned curvature (or scale) that another optimizer drives out of its range, and casts to half precision."""

import copy

import pytest
import torch

import horosphere as hs

SPACES = {
    "ball": (lambda: hs.PoincareBall(-0.7, learnable=True), 3),
    "lorentz": (lambda: hs.Lorentz(-0.7, learnable=True), 4),
    "sphere": (lambda: hs.Sphere(0.7, learnable=True), 3),
    "scaled": (lambda: hs.Scaled(hs.Euclidean(), 0.7, learnable=True), 3),
}


def driven_out(name):
    """A manifold whose learned number torch's AdamW has pushed through 0, and points from before."""
    make, size = SPACES[name]
    torch.manual_seed(0)
    manifold = make()
    x = manifold.random(6, size, dtype=torch.float64)
    (number,) = manifold.parameters()
    number.grad = number.detach().sign().clone()
    torch.optim.AdamW([number], lr=4.0).step()
    assert number.item() * number.grad.item() < 0
    return manifold, x, number


@pytest.mark.parametrize("use", ["dist", "cdist", "expmap", "attention"])
@pytest.mark.parametrize("name", SPACES)
def test_a_number_out_of_range_is_an_error_at_the_next_use(name, use):
    manifold, x, number = driven_out(name)
    calls = {
        "dist": lambda: manifold.dist(x, x.flip(0)),
        "cdist": lambda: hs.cdist(x, x.flip(0), manifold),
        "expmap": lambda: manifold.norm(x, x),
        "attention": lambda: hs.attention.geodesic_attention(x, x.flip(0), x, manifold),
    }
    if name == "sphere" and use == "expmap":
        calls["expmap"] = lambda: manifold.expmap(x, manifold.proju(x, x.flip(0)))
    for _ in range(2):  # the second use as well
        with pytest.raises(ValueError, match="project_"):
            calls[use]()
    assert str(manifold) and manifold.state_dict()  # looking at it is no use
    hs.optim.project_([number])
    assert calls[use]().isfinite().all()


def test_the_check_reads_the_number_once_a_step(monkeypatch):
    manifold = hs.PoincareBall(-1.0, learnable=True)
    looks = []
    check = type(manifold)._check_moved
    monkeypatch.setattr(type(manifold), "_check_moved", lambda self, kappa: looks.append(1) or check(self, kappa))
    x = manifold.random(4, 3)
    for steps in (1, 2):
        for _ in range(3):
            manifold.dist(x, x)
        assert len(looks) == steps
        with torch.no_grad():
            manifold.kappa.mul_(1.1)
    twin = copy.deepcopy(manifold)
    assert twin.dist(x, x).isfinite().all()


def test_compiled_and_meta_uses_have_no_check():
    manifold = hs.PoincareBall(-1.0, learnable=True)
    x = torch.rand(4, 3) / 4
    compiled = torch.compile(lambda a: manifold.dist(a, a.flip(0)), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), manifold.dist(x, x.flip(0)))
    with torch.device("meta"):
        assert hs.PoincareBall(-1.0, learnable=True).dist(x.to("meta"), x.to("meta")).is_meta


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half()], ids=["bfloat16", "half"])
@pytest.mark.parametrize("name", SPACES)
def test_casts_to_half_precision_leave_it_in_float32(name, cast):
    make, _ = SPACES[name]
    layer = torch.nn.ModuleDict({"linear": torch.nn.Linear(2, 2), "space": make()})
    (before,) = (p.detach().clone() for p in layer["space"].parameters())
    cast(layer)
    (number,) = layer["space"].parameters()
    assert layer["linear"].weight.dtype.itemsize == 2 and number.dtype == torch.float32
    assert type(number) is hs.manifolds.BoundedParameter and number.item() == before.float().item()
    assert layer.double()["space"] and next(layer["space"].parameters()).dtype == torch.float64


def test_a_fixed_curvature_of_each_head_stays_in_float32_too():
    ball = hs.PoincareBall(torch.tensor([-0.7, -1.3])).to(torch.bfloat16)
    assert torch.equal(ball.kappa, torch.tensor([-0.7, -1.3]))

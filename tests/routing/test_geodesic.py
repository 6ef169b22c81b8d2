"""Routing: weights by hand, certificates that hold, adaptive K, gradients, every manifold."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horosphere as hs
from horosphere.routing import GeodesicRouter, route
from horosphere.routing.certificate import singular_value_bound
from tests.attention.spaces import SPACES

f64 = torch.float64
ONE_CURVATURE = [name for name in SPACES if name != "heads"]


def case(manifold, queries=7, prototypes=12, size=4, values=5, seed=0, dtype=f64):
    torch.manual_seed(seed)
    x, c = (manifold.random(n, size, dtype=f64).to(dtype) for n in (queries, prototypes))
    return x, c, torch.randn(prototypes, values, dtype=f64).to(dtype)


@pytest.mark.parametrize("name", ONE_CURVATURE)
def test_weights_by_hand(name):
    manifold = SPACES[name]()
    x, c, v = case(manifold)
    out = route(x, c, manifold, v, top_k=3, eps=0.01, power=2.0)
    for i in range(len(x)):
        w = torch.stack([(manifold.dist(x[i], p) ** 2 + 0.01) ** -2 for p in c])
        best = w.argsort(descending=True)[:3]
        assert out.indices[i].tolist() == best.tolist()
        assert torch.allclose(out.weights[i], w[best] / w[best].sum(), atol=1e-9)
        assert torch.allclose(out.output[i], (w[best] / w[best].sum()) @ v[best], atol=1e-8)
        assert torch.allclose(out.probabilities[i], w / w.sum(), atol=1e-9)
    assert (out.counts == 3).all()
    soft = route(x, c, manifold, v, eps=0.01, power=2.0)
    assert torch.allclose(soft.output, out.probabilities @ v, atol=1e-12)
    assert ((out.output - soft.output).norm(dim=-1) <= out.certificate).all()


VALUES = {
    "equal lengths": lambda v, g: v / v.norm(dim=-1, keepdim=True),
    "same way": lambda v, g: v.abs(),
    "wild": lambda v, g: v * torch.exp(3 * torch.randn(len(v), 1, generator=g, dtype=f64)),
    "far from 0": lambda v, g: 1e-3 * v + 1.0,
    "all the same": lambda v, g: v[:1].expand_as(v),
    "one direction": lambda v, g: v[:1] * v[:, :1],
    "zero": lambda v, g: v * 0,
}


@st.composite
def steep_cases(draw):
    return dict(
        prototypes=draw(st.sampled_from([1, 2, 3, 5, 8, 17, 64])),
        choice=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, "scan", "cheap"])),
        eps=10.0 ** draw(st.integers(-12, 3)),
        power=draw(st.sampled_from([0.25, 1.0, 2.0, 8.0, 40.0])),
        spread=10.0 ** draw(st.integers(-3, 2)),
        values=draw(st.sampled_from(list(VALUES))),
        unit=10.0 ** draw(st.sampled_from([-30, -3, 0, 3, 30])),
        tolerance=10.0 ** draw(st.integers(-5, 0)),
        seed=draw(st.integers(0, 2**31)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@given(drawn=steep_cases())
@settings(max_examples=5000, deadline=None, derandomize=True, database=None)
def test_certificate_is_never_violated(dtype, drawn):
    """10,000 cases of 3 queries: flat weights to steep ones, K = 1 to E and adaptive, values of all kinds and sizes."""
    g = torch.Generator().manual_seed(drawn["seed"])
    count, manifold = drawn["prototypes"], hs.Euclidean()
    x = torch.randn(3, 2, generator=g, dtype=f64) * drawn["spread"]
    c = torch.randn(count, 2, generator=g, dtype=f64) * drawn["spread"]
    c[: count // 2] = x[torch.arange(count // 2) % 3]  # queries on a prototype, and prototypes twice
    v = VALUES[drawn["values"]](torch.randn(count, 4, generator=g, dtype=f64), g) * drawn["unit"]
    x, c, v = (t.to(dtype) for t in (x, c, v))
    if isinstance(drawn["choice"], str):
        delta = drawn["tolerance"] * max(1e-37, float(lengths(v.double()).max()))
        choice = {"rule": drawn["choice"], "tolerance": delta}
    else:
        choice = {"top_k": max(1, round(drawn["choice"] * count))}
    out = route(x, c, manifold, v, eps=drawn["eps"], power=drawn["power"], **choice)
    wide = out.probabilities.double()
    exact = (wide @ v.double()) / wide.sum(-1, keepdim=True)
    assert (lengths(out.output.double() - exact) <= out.certificate.double()).all()
    if "tolerance" in choice:
        assert ((out.certificate <= choice["tolerance"] * (1 + 1e-4)) | (out.counts == count)).all()


def lengths(vectors):
    return torch.linalg.vector_norm(vectors, dim=-1)


MANIFOLDS = {"sphere": hs.Sphere, "ball": hs.PoincareBall, "flat": hs.Euclidean}


@pytest.mark.parametrize("name", MANIFOLDS)
def test_median_of_certificate_over_error(name):
    """At most 6 for every K, on values in random directions; printed by K."""
    g = torch.Generator().manual_seed(0)
    manifold = MANIFOLDS[name]()
    x, c = (manifold.projx(torch.randn(n, 16, generator=g) / 6) for n in (200, 256))
    v = torch.randn(256, 32, generator=g)
    full = route(x.double(), c.double(), manifold, v.double(), eps=0.01).output
    for k in (*range(1, 33), 64, 128, 255):
        out = route(x, c, manifold, v, top_k=k, eps=0.01)
        ratios = out.certificate / lengths(out.output - full)
        print(f"{name} K={k}: median certificate / error {ratios.median():.2f}")
        assert ratios.min() >= 1 and ratios.median() <= 6, k


@pytest.mark.parametrize("count, size", [(1, 5), (7, 7), (4, 30), (30, 4), (300, 40)])
@pytest.mark.parametrize("rank", [1, 3, 40])
def test_singular_values_are_bounded(count, size, rank):
    """From above, and by rank^(1/32) at most too much: where there is one, to rounding."""
    torch.manual_seed(rank)
    rank = min(rank, count, size)
    rows = torch.randn(count, rank, dtype=f64) @ torch.randn(rank, size, dtype=f64)
    ratio = singular_value_bound(rows) / torch.linalg.svdvals(rows)[0]
    assert 1 - 1e-14 <= ratio <= rank ** (1 / 32) * (1 + 1e-10)
    alike = singular_value_bound(torch.eye(rank, size, dtype=f64))
    assert alike == pytest.approx(rank ** (1 / 32), rel=1e-10)
    assert singular_value_bound(torch.zeros(count, size, dtype=f64)) == 0


def test_the_source_bound_fails():
    """2 |V|_F tail/(1 - tail) max over the chosen: values that the chosen do not have are missed."""
    x, c = torch.zeros(1, 2, dtype=f64), torch.tensor([[0.1, 0.0], [1.0, 0.0]], dtype=f64)
    v = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=f64)
    out = route(x, c, hs.Euclidean(), v, top_k=1)
    full = route(x, c, hs.Euclidean(), v).output
    tail = out.probabilities[0, 1]
    source = 2 * v.norm() * tail / (1 - tail) * v[out.indices[0]].norm(dim=-1).max()
    error = (out.output - full).norm()
    assert source < error <= out.certificate[0]


def test_adaptive_k_is_the_first_that_holds():
    x, c, v = case(hs.Sphere(), queries=40, prototypes=30)
    found = route(x, c, hs.Sphere(), v, tolerance=0.3, eps=0.05)
    assert found.counts.min() < found.counts.max()
    certificates = torch.stack([route(x, c, hs.Sphere(), v, top_k=k, eps=0.05).certificate for k in range(1, 31)], -1)
    first = (certificates <= 0.3).int().argmax(-1) + 1
    assert torch.equal(found.counts, first)
    for i in range(40):
        one = route(x[i : i + 1], c, hs.Sphere(), v, top_k=int(first[i]), eps=0.05)
        assert torch.allclose(found.output[i], one.output[0]) and (found.weights[i, first[i] :] == 0).all()
    cheap = route(x, c, hs.Sphere(), v, tolerance=0.3, eps=0.05, rule="cheap")
    assert (cheap.counts >= found.counts).all() and (cheap.certificate <= 0.3).all()


def test_a_tolerance_below_rounding_uses_all():
    x, c, v = case(hs.Sphere())
    assert (route(x, c, hs.Sphere(), v, tolerance=1e-300).counts == 12).all()


@pytest.mark.parametrize("name", ["ball", "sphere", "lorentz", "product", "only dist"])
def test_gradients(name):
    manifold = SPACES[name]()
    x, c, v = case(manifold, queries=3, prototypes=5)
    eps, power = (torch.tensor(n, dtype=f64) for n in (0.1, 1.5))
    inputs = [t.requires_grad_() for t in (x, c, v, eps, power)]

    def output(x, c, v, eps, power):
        return route(manifold.projx(x), manifold.projx(c), manifold, v, top_k=3, eps=eps, power=power).output

    assert torch.autograd.gradcheck(output, inputs, atol=1e-6)
    certificate = route(*inputs[:2], manifold, v, top_k=2).certificate
    assert not certificate.requires_grad


def test_masked_prototypes():
    x, c, v = case(hs.PoincareBall())
    mask = torch.arange(12) < 2
    out = route(x, c, hs.PoincareBall(), v, top_k=4, prototype_mask=mask)
    assert (out.weights[:, 2:] == 0).all() and (out.probabilities[:, 2:] == 0).all()
    assert torch.allclose(out.output, route(x, c[:2], hs.PoincareBall(), v[:2]).output)
    nothing = route(x, c, hs.PoincareBall(), v, top_k=4, prototype_mask=torch.zeros(12, dtype=torch.bool))
    assert (nothing.output == 0).all() and (nothing.weights == 0).all() and nothing.certificate.isfinite().all()


def test_declared_bound_or_none():
    x, c, v = case(hs.Sphere())
    v = v / v.norm(dim=-1, keepdim=True)
    assert route(x, c, hs.Sphere(), top_k=2).certificate is None
    declared = route(x, c, hs.Sphere(), top_k=2, value_bound=1.0)
    right = route(x, c, hs.Sphere(), v, top_k=2)
    assert declared.output is None and (declared.certificate >= right.certificate - 1e-12).all()


def test_router_trains_its_prototypes_on_the_manifold():
    torch.manual_seed(0)
    ball = hs.PoincareBall(-1.0, learnable=True)
    router = GeodesicRouter(4, 6, 2, ball, learn_eps=True)
    optimizer = hs.optim.RiemannianAdam(hs.optim.param_groups(router), lr=0.05)
    tangent, v, target = torch.randn(50, 4) / 2, torch.randn(6, 3), torch.randn(50, 3)
    before, losses = router.prototypes.detach().clone(), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = ((router(ball.expmap0(tangent), v).output - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and not torch.equal(before, router.prototypes)
    ball.assert_check_point_on_manifold(router.prototypes)
    assert ball.kappa.item() != -1.0 and router.eps.item() != pytest.approx(1e-3)


def test_router_copies_and_loads():
    router = GeodesicRouter(5, 8, 3)
    x, v = hs.Sphere().random(4, 5), torch.randn(8, 2)
    other = GeodesicRouter(5, 8, 3)
    other.load_state_dict(router.state_dict())
    for same in (copy.deepcopy(router), other):
        assert torch.equal(same(x, v).output, router(x, v).output)
    assert router.double()(x.double(), v.double()).output.dtype == f64


def test_batches_and_none():
    x, c, v = case(hs.Sphere(), queries=24)
    flat = route(x, c, hs.Sphere(), v, top_k=2)
    deep = route(x.view(2, 3, 4, 4), c, hs.Sphere(), v, top_k=2)
    assert torch.allclose(deep.output.view(24, 5), flat.output) and deep.certificate.shape == (2, 3, 4)
    empty = route(x[:0], c, hs.Sphere(), v, top_k=2)
    assert empty.output.shape == (0, 5) and empty.certificate.shape == (0,)


def test_values_that_are_not_finite():
    """One that is left out may be anywhere: so may the output of all."""
    x, c, v = case(hs.Sphere())
    for bad, says in ((math.inf, torch.isposinf), (-math.inf, torch.isposinf), (math.nan, torch.isnan)):
        spoiled = v.clone()
        spoiled[route(x, c, hs.Sphere(), top_k=12).indices[0, -1], 1] = bad
        out = route(x[:1], c, hs.Sphere(), spoiled, top_k=2)
        assert out.output.isfinite().all() and says(out.certificate).all()


def test_values_in_a_batch_of_their_own():
    x, c, v = case(hs.Sphere())
    many = torch.stack([v, -2 * v])
    found = torch.func.vmap(lambda some: route(x, c, hs.Sphere(), some, top_k=3)[::3])(many)
    for i, some in enumerate(many):
        right = route(x, c, hs.Sphere(), some, top_k=3)
        assert torch.allclose(found[0][i], right.output) and torch.allclose(found[1][i], right.certificate)


def test_bad_input_is_named():
    x, c, v = case(hs.Sphere())
    sphere = hs.Sphere()
    for wrong in (0, 13, -1):
        with pytest.raises(ValueError, match="top_k"):
            route(x, c, sphere, v, top_k=wrong)
    with pytest.raises(ValueError, match="values"):
        route(x, c, sphere, v[:3], top_k=2)
    with pytest.raises(ValueError, match="prototypes"):
        route(x, c[:0], sphere, top_k=1)
    with pytest.raises(ValueError, match="prototypes"):
        route(x, c[0], sphere, top_k=1)
    with pytest.raises(ValueError, match="size"):
        route(x[:, :3], c, sphere, v, top_k=1)
    with pytest.raises(ValueError, match="tolerance"):
        route(x, c, sphere, v, top_k=1, tolerance=0.1)
    with pytest.raises(ValueError, match="tolerance"):
        route(x, c, sphere, v, tolerance=-0.1)
    with pytest.raises(ValueError, match="values"):
        route(x, c, sphere, tolerance=0.1)
    with pytest.raises(ValueError, match="rule"):
        route(x, c, sphere, v, tolerance=0.1, rule="best")
    with pytest.raises(ValueError, match="prototype_mask"):
        route(x, c, sphere, v, prototype_mask=torch.ones(12))
    with pytest.raises(TypeError, match="manifold"):
        route(x, c, "sphere", v)
    with pytest.raises(ValueError, match="top_k"):
        GeodesicRouter(4, 3, 5)
    with pytest.raises(ValueError, match="prototypes"):
        GeodesicRouter(4, 0)
    with pytest.raises(ValueError, match="eps"):
        GeodesicRouter(4, 3, 1, eps=math.nan)

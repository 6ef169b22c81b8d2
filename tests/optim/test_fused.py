"""The compiled step against the tensor operations, its reference."""

import copy
import math
import warnings

import mpmath
import pytest
import torch
from torch.testing import assert_close

from horosphere import Lorentz, ManifoldParameter, PoincareBall, Product, Sphere, Stereographic, _numerics
from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.optim import RiemannianAdam, _fused
from tests.optim.spaces import LEARNED, on_manifold, sparse

SPACES = {
    "ball": lambda: PoincareBall(-1.5),
    "stereographic": lambda: Stereographic(-0.3),
    "tensor": lambda: PoincareBall(torch.tensor(-0.8)),
    "sphere": lambda: Sphere(2.0),
    "hyperboloid": lambda: Lorentz(-0.5),
}
HYPERBOLIC = [name for name in SPACES if name != "sphere"]
TYPES = [torch.float32, torch.float64]
ROWS = 70  # more than a block of lanes, and no multiple of it


@pytest.fixture
def by(monkeypatch):
    """by("loop", optimizer) and by("tensors", optimizer): a step taken that way."""
    taken, step = [], _fused.step
    monkeypatch.setattr(_fused, "step", lambda *given: (taken.append(given), step(*given))[1])

    def take(way, optimizer):
        monkeypatch.setattr(_fused, "COMPILED", 0 if way == "loop" else 2**62)
        before = len(taken)
        optimizer.step()
        assert (len(taken) > before) == (way == "loop")

    return take


def drawn(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@torch.no_grad()
def start(manifold, dtype, radius=1.0, rows=ROWS, dim=5):
    """Points up to a radius, in units of the curvature's, the first of them the origin."""
    if isinstance(manifold, Sphere):
        return manifold.projx(torch.cat((manifold.origin(1, dim), drawn(7, rows - 1, dim))).to(dtype))
    origin = manifold.origin(rows, dim, dtype=torch.float64)
    tangent = drawn(7, rows, dim)
    tangent[:, 0] *= not isinstance(manifold, Lorentz)
    lengths = radius * radius_of(manifold) * torch.linspace(0, 1, rows, dtype=torch.float64)[:, None]
    tangent *= lengths / manifold.norm(origin, tangent, keepdim=True)
    return manifold.expmap(origin, tangent).to(dtype)


def pair(make, dtype, radius=1.0, dim=5, rows=ROWS, **settings):
    """Two optimizers of equal points, for the reference and for the loop."""
    found = []
    for _ in range(2):
        manifold = make()
        p = ManifoldParameter(start(manifold, dtype, radius, rows, dim), manifold)
        found.append(RiemannianAdam([p], **{"lr": 0.05, **settings}))
    return found


def radius_of(manifold):
    return torch.as_tensor(manifold.radius).item()


def point(optimizer):
    return optimizer.param_groups[0]["params"][0]


def take_both(by, optimizers, gradient):
    for way, optimizer in zip(("tensors", "loop"), optimizers, strict=True):
        point(optimizer).grad = gradient.clone()
        by(way, optimizer)


def assert_same(reference, loop, tolerance):
    """Points by distance, moments in units of the row's largest number."""
    p, q = point(reference), point(loop)
    distance = p.manifold.dist(p.detach().double(), q.detach().double())
    assert distance.max() <= tolerance * radius_of(p.manifold)
    assert on_manifold(q, 1e-5 if q.dtype == torch.float32 else 1e-12)
    assert loop.skipped_rows == reference.skipped_rows
    assert loop.state[q].keys() == reference.state[p].keys()
    for name, expected in reference.state[p].items():
        found = loop.state[q][name]
        assert found.shape == expected.shape and found.dtype == expected.dtype
        if name == "step":
            assert torch.equal(found, expected)
        else:
            scale = expected.abs().amax(-1, keepdim=True)
            assert ((found - expected).abs() <= tolerance * scale).all()


def roundings(dtype, radius=0.0, dim=5):
    """What some roundings come to at a radius: 1 + kappa |x|^2 = 1 / cosh^2(r / 2) is known to a share (D + 2) of
    u cosh^2 in the reference, whose maps take it by subtraction, and in float32 so is the point itself.
    """
    return 16 * (dim + 2) * torch.finfo(dtype).eps / 2 * math.cosh(radius / 2) ** 2


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr": "long"},
        {"betas": (0.7, 0.95), "eps": 1e-3},
        {"betas": (0.2, 0.9)},
        {"weight_decay": 0.3, "decay_points": True},
        {"weight_decay": 0.3},
    ],
    ids=str,
)
def test_four_steps(by, space, dtype, settings):
    long = settings.get("lr") == "long"
    if long:  # past the series of sine and tangent, but not near an antipode
        settings = {"lr": 1.8 if space == "sphere" else 4.0}
    optimizers = pair(SPACES[space], dtype, **settings)
    for seed in range(1 if long else 4):
        take_both(by, optimizers, drawn(seed, ROWS, 5, dtype=dtype))
    assert_same(*optimizers, roundings(dtype, 1.5 + 4.0 * long * 1.5**0.5))


@pytest.mark.parametrize("space", HYPERBOLIC)
@pytest.mark.parametrize("radius", [6.0, 8.5, 11.0])
def test_float64_near_the_rim(by, space, radius):
    optimizers = pair(SPACES[space], torch.float64, radius)
    for seed in range(3):
        take_both(by, optimizers, drawn(seed, ROWS, 5))
    assert_same(*optimizers, roundings(torch.float64, radius))


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("radius", [1.0, 6.0, 11.0])
def test_float32_points_are_rounded_once(by, space, radius):
    """From one state, against the reference in float64: off by what the rounding of the coordinates alone may be."""
    reference, loop = pair(SPACES[space], torch.float32, radius)
    point(reference).grad = drawn(0, ROWS, 5, dtype=torch.float32)
    by("tensors", reference)
    p = ManifoldParameter(point(reference).detach().double(), point(reference).manifold)
    q = point(loop)
    with torch.no_grad():
        q.copy_(p)
    wide = RiemannianAdam([p], lr=0.05)
    for optimizer in (wide, loop):
        optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    q.grad = drawn(1, ROWS, 5, dtype=torch.float32)
    p.grad = q.grad.double()
    by("tensors", wide)
    by("loop", loop)
    unit, manifold, y = 2.0**-24, p.manifold, p.detach()
    if space == "sphere":
        size = torch.full((ROWS,), radius_of(manifold), dtype=torch.float64)
    else:
        size = y[:, 1:].norm(dim=-1) if space == "hyperboloid" else y.norm(dim=-1) * manifold.lambda_x(y)
    off = manifold.dist(y, q.detach().double())
    # the second moments are rounded too, which the step shows as half a rounding of its length
    assert (off <= 1.01 * unit * size + 2 * unit * 0.05).all()
    if radius == 1.0:
        for name, parts in (("exp_avg", roundings(torch.float32, 1.0)), ("exp_avg_sq", 2 * unit)):
            wanted = wide.state[p][name]
            assert ((loop.state[q][name].double() - wanted).abs() <= parts * wanted.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("radius", [11.0, 30.0])
def test_the_gap_to_the_rim_keeps_its_digits(by, radius):
    """v = (1 - b2) ((1 + kappa |x|^2) / 2)^2 |grad|^2, by mpmath: subtraction leaves three digits at radius 30."""
    _, loop = pair(SPACES["ball"], torch.float64, radius)
    p = point(loop)
    p.grad = drawn(0, ROWS, 5)
    with mpmath.workdps(50):
        wanted = []
        for row, grad in zip(p.tolist(), p.grad.tolist(), strict=True):
            gap = 1 - mpmath.mpf(1.5) * sum(mpmath.mpf(a) ** 2 for a in row)
            wanted.append(float(mpmath.mpf(1 - 0.999) * (gap / 2) ** 2 * sum(mpmath.mpf(a) ** 2 for a in grad)))
    before = p.detach().clone()
    by("loop", loop)
    second = loop.state[p]["exp_avg_sq"].squeeze(-1)
    known = 2 * (5 + 2) * 2.0**-53 / _numerics.RIM_GAP  # what subtraction loses where it serves
    assert_close(second, torch.tensor(wanted, dtype=torch.float64), rtol=known, atol=0)
    # transport keeps lengths: |m| is a tenth of the gradient's
    length = p.manifold.norm(p.detach(), loop.state[p]["exp_avg"])
    assert_close(length, (1e-2 * second / (1 - 0.999)).sqrt(), rtol=1e-12, atol=0)
    assert not torch.equal(p.detach(), before)


@pytest.mark.parametrize("space", ["ball", "hyperboloid"])
@pytest.mark.parametrize("dtype", TYPES)
def test_points_that_run_into_the_cap(by, space, dtype):
    optimizers = pair(SPACES[space], dtype, lr=1e3)
    with torch.no_grad():
        for optimizer in optimizers:  # the origin has no outwards
            point(optimizer)[0] = point(optimizer)[1]
    for step in range(3):
        p = point(optimizers[0])
        (outwards,) = torch.autograd.grad(-p.manifold.dist0(p).sum(), p)
        take_both(by, optimizers, outwards)
        if step == 0:
            assert_close(point(optimizers[1]), point(optimizers[0]), rtol=64 * torch.finfo(dtype).eps, atol=0)
    limit = _fused.limit(space, float(SPACES[space]().kappa), dtype)
    q = point(optimizers[1]).detach()[:, int(space == "hyperboloid") :].double()
    assert_close(
        q.norm(dim=-1), torch.full((ROWS,), limit, dtype=torch.float64), rtol=2 * torch.finfo(dtype).eps, atol=0
    )
    assert optimizers[1].skipped_rows == optimizers[0].skipped_rows == 0 and on_manifold(point(optimizers[1]), 1e-5)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("dtype", TYPES)
def test_sparse_rows(by, space, dtype):
    optimizers = pair(SPACES[space], dtype)
    take_both(by, optimizers, drawn(9, ROWS, 5, dtype=dtype))
    for seed in range(3):
        rows = torch.randint(ROWS - 5, (2 * ROWS,), generator=torch.Generator().manual_seed(seed)).tolist()
        p = point(optimizers[1])
        before = p.detach().clone(), optimizers[1].state[p]["exp_avg"].clone()
        take_both(by, optimizers, sparse(rows, drawn(seed, 2 * ROWS, 5, dtype=dtype), (ROWS, 5)))
        untouched = sorted(set(range(ROWS)) - set(rows))
        after = p.detach(), optimizers[1].state[p]["exp_avg"]
        assert len(untouched) >= 5
        assert all(torch.equal(a[untouched], b[untouched]) for a, b in zip(before, after, strict=True))
    assert_same(*optimizers, roundings(dtype, 1.5))


def test_a_row_that_is_not_there_is_an_error_as_ever(by):
    _, loop = pair(SPACES["ball"], torch.float64)
    p = point(loop)
    rows, values = torch.tensor([[0, ROWS]]), torch.ones(2, 5, dtype=torch.float64)
    p.grad = torch.sparse_coo_tensor(rows, values, (ROWS, 5), check_invariants=False, is_coalesced=True)
    before = p.detach().clone()
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        by("loop", loop)
    assert torch.equal(p.detach(), before)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_rows_that_are_not_finite_stay(by, space, dtype, is_sparse):
    optimizers = pair(SPACES[space], dtype)
    take_both(by, optimizers, drawn(0, ROWS, 5, dtype=dtype))
    loop = optimizers[1]
    before = [t.clone() for t in (point(loop).detach(), *list(loop.state[point(loop)].values())[1:])]
    gradient = drawn(1, ROWS, 5, dtype=dtype)
    gradient[3, 1], gradient[64, 4], gradient[69, 0] = math.nan, math.inf, -math.inf
    gradient[20] = 1e25 if dtype == torch.float32 else 1e180  # finite, but not its square
    with pytest.warns(RuntimeWarning, match=r"point\(s\) of a parameter of shape \(70, 5\)"):
        take_both(by, optimizers, gradient.to_sparse(1) if is_sparse else gradient)
    after = point(loop).detach(), *list(loop.state[point(loop)].values())[1:]
    bad = [3, 20, 64, 69]
    for old, new in zip(before, after, strict=True):
        assert (old == new).all(-1).nonzero().flatten().tolist() == bad
    assert loop.skipped_rows == 4
    assert_same(*optimizers, roundings(dtype, 1.5))


@pytest.mark.parametrize("first", [True, False])
def test_all_rows_bad_is_no_step(by, first):
    optimizers = pair(SPACES["ball"], torch.float64)
    if not first:
        take_both(by, optimizers, drawn(0, ROWS, 5))
    with pytest.warns(RuntimeWarning):
        take_both(by, optimizers, torch.full((ROWS, 5), math.nan, dtype=torch.float64))
    assert optimizers[1].skipped_rows == ROWS
    assert (point(optimizers[1]) in optimizers[1].state) == (not first)
    if not first:
        assert_same(*optimizers, roundings(torch.float64, 1.5))


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_gradient_of_zero(by, space, dtype):
    """First nothing moves; with moments points go on, and the moments decay."""
    optimizers = pair(SPACES[space], dtype)
    loop = optimizers[1]
    before = point(loop).detach().clone()
    nothing = torch.zeros(ROWS, 5, dtype=dtype)
    take_both(by, optimizers, nothing)
    assert_close(point(loop).detach(), before, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert not loop.state[point(loop)]["exp_avg"].any() and not loop.state[point(loop)]["exp_avg_sq"].any()
    take_both(by, optimizers, drawn(0, ROWS, 5, dtype=dtype))
    take_both(by, optimizers, nothing)
    assert_same(*optimizers, roundings(dtype, 1.5))
    # 0 / 0 where nothing keeps the root of v from 0: not finite, so the points stay
    optimizers = pair(SPACES[space], dtype, eps=0.0)
    with pytest.warns(RuntimeWarning):
        take_both(by, optimizers, nothing)
    assert optimizers[0].skipped_rows == optimizers[1].skipped_rows == ROWS
    assert torch.equal(point(optimizers[1]).detach(), before)


@pytest.mark.parametrize("space", [name for name in LEARNED if name not in ("product", "scaled")])
def test_a_learned_curvature(by, space):
    optimizers = []
    for _ in range(2):
        manifold = LEARNED[space]()
        p = ManifoldParameter(start(manifold, torch.float64), manifold)
        optimizers.append(RiemannianAdam([p, manifold.kappa], lr=0.05))
    for seed in range(5):
        for way, optimizer in zip(("tensors", "loop"), optimizers, strict=True):
            p = point(optimizer)
            p.grad = drawn(seed, ROWS, 5)
            p.manifold.kappa.grad = torch.tensor(1.0 + seed, dtype=torch.float64)
            by(way, optimizer)
    reference, loop = (point(o).manifold.kappa for o in optimizers)
    assert torch.equal(reference, loop) and abs(loop.item() - LEARNED[space]().kappa.item()) > 0.2
    assert_same(*optimizers, roundings(torch.float64, 2.0))


@pytest.mark.parametrize("ways", [("tensors", "loop"), ("loop", "tensors")])
@pytest.mark.parametrize("space", SPACES)
def test_a_state_goes_from_one_way_to_the_other(by, space, ways):
    optimizers = pair(SPACES[space], torch.float64)
    for seed in range(2):
        for way, optimizer in zip(ways, optimizers, strict=True):
            point(optimizer).grad = drawn(seed, ROWS, 5)
            by(way, optimizer)
    crossed = []
    for optimizer in optimizers:
        p = ManifoldParameter(point(optimizer).detach(), point(optimizer).manifold)
        crossed.append(RiemannianAdam([p], lr=0.05))
        crossed[-1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (2, 3):
        for way, optimizer in zip(reversed(ways), crossed, strict=True):
            point(optimizer).grad = drawn(seed, ROWS, 5)
            by(way, optimizer)
    assert_same(*crossed, roundings(torch.float64, 1.5))
    assert crossed[1].state[point(crossed[1])]["step"] == 4


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("shape", [(3, 1), (9, 2), (5, 300), (2, 40, 3)], ids=str)
def test_other_sizes(by, space, shape):
    if shape[-1] == 1 and space in ("sphere", "hyperboloid"):
        pytest.skip("no point has one number")
    optimizers = []
    for _ in range(2):
        manifold = SPACES[space]()
        x = start(manifold, torch.float64, rows=math.prod(shape[:-1]), dim=shape[-1]).view(shape)
        optimizers.append(RiemannianAdam([ManifoldParameter(x, manifold)], lr=0.05))
    for seed in range(2):
        take_both(by, optimizers, drawn(seed, *shape).abs())  # moments of one number do not cancel
    assert_same(*optimizers, roundings(torch.float64, 1.5, shape[-1]))


@pytest.mark.parametrize("space", SPACES)
def test_bits_do_not_depend_on_threads_and_blocks(by, space, monkeypatch):
    threads = torch.get_num_threads()
    results = []
    for count, lanes in ((1, 64), (2, 64), (3, 64), (1, 8), (2, 11)):
        monkeypatch.setattr(_fused, "MOST_LANES", lanes)
        _, loop = pair(SPACES[space], torch.float32, radius=9.0)
        torch.set_num_threads(count)
        try:
            for seed in range(2):
                point(loop).grad = drawn(seed, ROWS, 5, dtype=torch.float32)
                by("loop", loop)
        finally:
            torch.set_num_threads(threads)
        results.append([point(loop).detach(), *loop.state[point(loop)].values()])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_gradients_of_any_layout_are_left_alone(by):
    for gradient in (drawn(0, 5, ROWS).mT, drawn(0, 1, 5).expand(ROWS, 5)):
        optimizers = pair(SPACES["ball"], torch.float64)
        for way, optimizer in zip(("tensors", "loop"), optimizers, strict=True):
            point(optimizer).grad = gradient
            by(way, optimizer)
            assert point(optimizer).grad is gradient
        assert_same(*optimizers, roundings(torch.float64, 1.5))
    assert torch.equal(gradient, drawn(0, 1, 5).expand(ROWS, 5))


def test_autograd_sees_that_the_points_moved(by):
    _, loop = pair(SPACES["ball"], torch.float64)
    p = point(loop)
    loss = p.square().sum()
    p.grad = drawn(0, ROWS, 5)
    by("loop", loop)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class OwnMap(PoincareBall):
    def expmap(self, x, u):
        return super().expmap(x, u)


def strided(manifold):
    p = ManifoldParameter(start(manifold, torch.float64), manifold)
    p.data = p.data.mT.contiguous().mT
    return p


REFUSED = {
    "amsgrad": (PoincareBall, {"amsgrad": True}, "no amsgrad"),
    "retraction": (PoincareBall, {"retraction": True}, "no retraction"),
    "curved the other way": (lambda: Stereographic(0.3), {}, "does not know the maps"),
    "flat": (lambda: Stereographic(0.0), {}, "does not know the maps"),
    "one curvature a head": (lambda: PoincareBall(-torch.ones(1)), {}, "does not know the maps"),
    "own map": (OwnMap, {}, "does not know the maps"),
    "geoopt's": (geoopt.PoincareBall, {}, "does not know the maps"),
    "product": (lambda: Product((PoincareBall(), 3), (PoincareBall(), 2)), {}, "does not know the maps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_serve(by, case):
    make, settings, reason = REFUSED[case]
    p = ManifoldParameter(start(PoincareBall(), torch.float64).view(1, ROWS, 5), make())
    p.grad = drawn(0, 1, ROWS, 5)
    optimizer = RiemannianAdam([p], **settings)
    before = p.detach().clone()
    assert reason in refusal(optimizer)
    with pytest.raises(AssertionError):  # no loop was taken
        by("loop", optimizer)
    assert not torch.equal(p.detach(), before)


def refusal(optimizer):
    p, state = point(optimizer), optimizer.state.get(point(optimizer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fused, "COMPILED", 0)
        return _fused.refuses(p, None, p.grad, p.manifold, optimizer.param_groups[0], state)


def test_tensors_it_does_not_serve():
    p = strided(PoincareBall())
    p.grad = drawn(0, ROWS, 5)
    optimizer = RiemannianAdam([p], lr=0.05)
    assert "strided" in refusal(optimizer)
    optimizer.step()
    assert on_manifold(p)
    half = ManifoldParameter(start(PoincareBall(), torch.bfloat16), PoincareBall())
    half.grad = drawn(0, ROWS, 5, dtype=torch.bfloat16)
    assert "not torch.bfloat16" in refusal(RiemannianAdam([half]))
    _, loop = pair(PoincareBall, torch.float64)
    point(loop).grad = drawn(0, ROWS, 5)
    loop.step()
    assert refusal(loop) is None
    kept = loop.state[point(loop)]["exp_avg_sq"]
    loop.state[point(loop)]["exp_avg_sq"] = kept.expand(ROWS, 5).contiguous()
    assert "another optimizer's" in refusal(loop)
    loop.state[point(loop)] = {"step": torch.tensor(1.0), "momentum_buffer": kept}
    assert "another optimizer's" in refusal(loop)


def test_small_gradients_compile_nothing(monkeypatch):
    monkeypatch.setattr(_fused, "step", None)
    for rows in (1, _fused.COMPILED // 5):
        p = ManifoldParameter(torch.zeros(rows, 5), PoincareBall())
        p.grad = torch.ones(rows, 5)
        RiemannianAdam([p]).step()
    p = ManifoldParameter(torch.zeros(10 * _fused.COMPILED, 5), PoincareBall())
    p.grad = sparse([3, 5], torch.ones(2, 5), p.shape)
    RiemannianAdam([p]).step()
    assert p.detach()[3].any()


def test_a_large_gradient_takes_the_loop_by_itself(caplog):
    p = ManifoldParameter(torch.zeros(_fused.COMPILED // 4, 4), PoincareBall())
    p.grad = torch.ones_like(p.detach())
    with caplog.at_level("DEBUG", logger="horosphere.optim"), warnings.catch_warnings():
        warnings.simplefilter("error")
        RiemannianAdam([p], lr=0.01).step()
    assert "step of (8192, 4): numba" in caplog.text
    assert_close(p.manifold.dist0(p).detach(), torch.full((len(p),), 0.01), rtol=1e-6, atol=0)


def test_row_maps():
    assert hooks.row_maps(PoincareBall(-2.0)) == ("ball", -2.0) == hooks.row_maps(Stereographic(-2.0))
    assert hooks.row_maps(Sphere(torch.tensor(3.0, dtype=torch.float64))) == ("sphere", 3.0)
    assert hooks.row_maps(Lorentz(-0.25, learnable=True)) == ("hyperboloid", -0.25)
    assert hooks.row_maps(type("Renamed", (Lorentz,), {})()) == ("hyperboloid", -1.0)

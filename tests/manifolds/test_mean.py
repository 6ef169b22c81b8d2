"""Frechet mean and closed-form midpoint: fault 35, laws, oracles, convergence, derivatives, errors."""

import mpmath
import pytest
import torch

import horosphere as hs
from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.convert import ball_to_hyperboloid, convert, hyperboloid_to_ball
from horosphere.manifolds.mean import FrechetMean, frechet_mean, midpoint

# geoopt scripts some of its functions when they are first called, and warns
scripts_late = pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script.*:DeprecationWarning")

FAULT_35 = [[0.9, 0.0], [0.0, 0.1], [-0.2, 0.0]]


def spaces():
    return {
        "euclidean": (hs.Euclidean(), 3),
        "ball": (hs.PoincareBall(-0.7), 3),
        "flat_stereographic": (hs.Stereographic(0.0), 3),
        "round_stereographic": (hs.Stereographic(0.8), 3),
        "lorentz": (hs.Lorentz(-1.4), 4),
        "sphere": (hs.Sphere(0.6), 4),
        "scaled": (hs.Scaled(hs.PoincareBall(-1.0), 2.5), 3),
        "product": (hs.Product((hs.PoincareBall(-1.0), 2), (hs.Sphere(1.0), 3), (hs.Euclidean(), 1)), 6),
    }


NAMES = [
    "euclidean",
    "ball",
    "flat_stereographic",
    "round_stereographic",
    "lorentz",
    "sphere",
    "scaled",
    "product",
]


def cluster(manifold, size, n=12, batch=(), dtype=torch.float64, seed=0, spread=0.5):
    """Points around a common centre, within a quarter turn where there are turns."""
    torch.manual_seed(seed)
    centre = manifold.random(*batch, 1, size, dtype=torch.float64).expand(*batch, n, size)
    step = manifold.proju(centre, torch.randn(*batch, n, size, dtype=torch.float64))
    step = spread * step / manifold.norm(centre, step)[..., None] * torch.rand(*batch, n, 1, dtype=torch.float64)
    return manifold.expmap(centre, step).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fault_35_frechet_mean_is_not_the_midpoint(dtype):
    x = torch.tensor(FAULT_35, dtype=dtype)
    for ball in (hs.PoincareBall(-1.0), geoopt.PoincareBall(c=1.0), hs.Stereographic(-1.0)):
        found = frechet_mean(x, ball)
        assert found.converged and found.mean.dtype == dtype
        torch.testing.assert_close(found.mean, torch.tensor([0.397982, 0.015433], dtype=dtype), rtol=0, atol=6e-7)
        mid = midpoint(x, ball)
        assert mid.dtype == dtype
        torch.testing.assert_close(mid, torch.tensor([0.478637, 0.010676], dtype=dtype), rtol=0, atol=6e-7)


@scripts_late
def test_midpoint_is_geoopts_weighted_midpoint():
    x = cluster(hs.PoincareBall(-1.0), 3, batch=(4,))
    w = torch.rand(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    right = geoopt.PoincareBall(c=1.0).weighted_midpoint(x, w, reducedim=[-2], lincomb=False)
    torch.testing.assert_close(midpoint(x, hs.PoincareBall(-1.0), w), right, rtol=1e-9, atol=1e-10)  # geoopt adds 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_frechet_mean_minimises_the_sum_of_squared_distances(name):
    manifold, size = spaces()[name]
    x = cluster(manifold, size, batch=(2,))
    w = torch.rand(2, 12, dtype=torch.float64) + 0.1
    found = frechet_mean(x, manifold, w)
    assert isinstance(found, FrechetMean) and found.mean.shape == (2, size)
    assert found.converged.shape == (2,) and found.converged.all()
    assert found.iterations.max() < 40 and found.residual.max() < 1e-10

    # judged by distances, without a logarithm: the objective's Riemannian gradient vanishes, and nearby it is larger
    m = found.mean.clone().requires_grad_()
    objective = (w * hs.cdist(m[:, None], x, manifold, squared=True)[:, 0]).sum(-1)
    (gradient,) = torch.autograd.grad(objective.sum(), m)
    assert manifold.norm(m, manifold.egrad2rgrad(m, gradient)).max() < 1e-8
    u = manifold.proju(m, torch.randn(20, 2, size, dtype=torch.float64))
    near = manifold.expmap(m, 0.05 * u / manifold.norm(m, u)[..., None]).detach()
    around = (w * hs.cdist(near[..., None, :], x, manifold, squared=True)[..., 0, :]).sum(-1)
    assert (around > objective.detach()).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "mean", [midpoint, lambda x, m, w=None: frechet_mean(x, m, w).mean], ids=["midpoint", "frechet"]
)
def test_laws(name, mean):
    manifold, size = spaces()[name]
    x = cluster(manifold, size)
    m = mean(x, manifold)
    close = {"rtol": 1e-9, "atol": 1e-10}
    # order, repetition and weights say the same thing; one point, or the only one with weight, is its own mean
    torch.testing.assert_close(mean(x.flip(0), manifold), m, **close)
    torch.testing.assert_close(
        mean(torch.cat((x, x[:4])), manifold), mean(x, manifold, torch.tensor([2.0] * 4 + [1] * 8)), **close
    )
    torch.testing.assert_close(mean(x, manifold, torch.full((12,), 7.0)), m, **close)
    torch.testing.assert_close(mean(x[:1], manifold), x[0], **close)
    torch.testing.assert_close(mean(x[:1].expand(5, size), manifold), x[0], **close)
    torch.testing.assert_close(mean(x, manifold, torch.eye(12)[3]), x[3], **close)
    # of two points both are the geodesic midpoint
    half = manifold.expmap(x[0], 0.5 * manifold.logmap(x[0], x[1]))
    torch.testing.assert_close(mean(x[:2], manifold), half, **close)


@pytest.mark.parametrize("mean", [midpoint, lambda x, m: frechet_mean(x, m).mean], ids=["midpoint", "frechet"])
@pytest.mark.parametrize(("here", "there"), [("PoincareBall", "Lorentz"), ("Stereographic", "Sphere")])
def test_isometric_models_agree(here, there, mean):
    kappa = -1.3 if here == "PoincareBall" else 1.3
    source, target = getattr(hs, here)(kappa), getattr(hs, there)(kappa)
    x = cluster(source, 3)
    torch.testing.assert_close(
        convert(mean(x, source), source, target), mean(convert(x, source, target), target), rtol=1e-10, atol=1e-10
    )


def test_midpoint_of_far_points_is_exact():
    """Hyperbolic radius 12 to 16 in a narrow cone, where the centroid in coordinates is off by 1e-4 and more."""
    torch.manual_seed(2)
    r = 12 + 4 * torch.rand(6, 1, dtype=torch.float64)
    angle = 2e-6 * torch.randn(6, 1, dtype=torch.float64)
    x = torch.tanh(r / 2) * torch.cat((torch.cos(angle), torch.sin(angle)), -1)
    with mpmath.workdps(60):
        rows = [[mpmath.mpf(float(v)) for v in row] for row in x]
        lam = [2 / (1 - a * a - b * b) for a, b in rows]
        total = [mpmath.fsum(la * row[i] for la, row in zip(lam, rows, strict=True)) / 6 for i in range(2)]
        height = mpmath.fsum(la - 1 for la in lam) / 6
        below = mpmath.sqrt(height**2 - total[0] ** 2 - total[1] ** 2) + height
        right = torch.tensor([float(t / below) for t in total], dtype=torch.float64)
    ball = hs.PoincareBall()
    assert ball.dist(midpoint(x, ball), right) < 1e-8  # neighbouring float64 numbers there are 3e-10 apart
    lorentz = midpoint(ball_to_hyperboloid(x, -1.0), hs.Lorentz())
    assert ball.dist(hyperboloid_to_ball(lorentz, -1.0), right) < 1e-8


@pytest.mark.parametrize("radius", [1.0, 5.0, 10.0, 15.0])
@pytest.mark.parametrize("name", ["PoincareBall", "Lorentz"])
def test_widely_spread_hyperbolic_points_converge_fast(name, radius):
    """The plain flow overshoots there: H is as large as the distances."""
    torch.manual_seed(3)
    u = torch.nn.functional.normalize(torch.randn(8, 20, 3, dtype=torch.float64), dim=-1)
    x = hs.PoincareBall().expmap0(u * (radius / 2) * torch.rand(8, 20, 1, dtype=torch.float64))
    if name == "Lorentz":
        x = ball_to_hyperboloid(x, -1.0)
    found = frechet_mean(x, getattr(hs, name)())
    assert found.converged.all() and found.iterations.max() <= 6


class PlainBall(hs.PoincareBall):
    """A ball with a distance of its own: nothing but its maps is known, so the flow goes without the Hessian."""

    def dist(self, x, y, *, keepdim=False):
        return super().dist(x, y, keepdim=keepdim)


def test_steps_are_halved_where_the_plain_flow_overshoots():
    torch.manual_seed(11)
    u = torch.nn.functional.normalize(torch.randn(4, 15, 3, dtype=torch.float64), dim=-1)
    x = hs.PoincareBall().expmap0(3.0 * u)  # distance 6 from the origin: the Hessian reaches 6, steps of 1 overshoot
    found = frechet_mean(x, PlainBall(), max_iter=300)
    assert found.converged.all()
    torch.testing.assert_close(found.mean, frechet_mean(x, hs.PoincareBall()).mean, rtol=1e-9, atol=1e-9)


def test_points_spread_over_half_the_sphere_converge():
    torch.manual_seed(4)
    x = torch.randn(16, 30, 3, dtype=torch.float64)
    x[..., 0] = x[..., 0].abs() + 0.2
    found = frechet_mean(hs.Sphere(2.0).projx(x), hs.Sphere(2.0))
    assert found.converged.all() and found.residual.max() < 1e-10


def test_on_positive_curvature_the_objective_never_rises():
    """Starting at the midpoint of points all over the sphere, where steps of full length may overshoot."""
    sphere = hs.Sphere()
    torch.manual_seed(5)
    x = sphere.random(32, 7, 3, dtype=torch.float64)
    values = []
    for steps in (0, 1, 2, 4, 8, 16):
        m = frechet_mean(x, sphere, tol=0.0, max_iter=steps).mean
        values.append(hs.cdist(m[:, None], x, sphere, squared=True).mean(dim=(-1, -2)))
    values = torch.stack(values)
    assert (values[1:] <= values[:-1] * (1 + 1e-8)).all()
    assert (values[-1] < values[0]).any()


def test_no_convergence_is_told_entry_by_entry():
    sphere = hs.Sphere()
    torch.manual_seed(6)
    spread = sphere.projx(torch.randn(1, 9, 3, dtype=torch.float64) + torch.tensor([0.5, 0, 0]))
    x = torch.cat((spread, spread[:, :1].expand(1, 9, 3)))
    found = frechet_mean(x, sphere, max_iter=2)
    assert found.converged.tolist() == [False, True]
    assert found.iterations.tolist() == [2, 0]
    assert found.residual[0] > 1e-6 > found.residual[1]
    assert not frechet_mean(x[:1], sphere, max_iter=0).converged.any()


@scripts_late
def test_any_geoopt_manifold_and_no_closed_form():
    """Commuting positive definite matrices: the mean of the affine-invariant metric is their geometric mean."""
    spd = geoopt.SymmetricPositiveDefinite()
    torch.manual_seed(7)
    basis = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    logs = torch.randn(2, 5, 3, dtype=torch.float64)
    x = basis @ torch.diag_embed(logs.exp()) @ basis.mT
    found = frechet_mean(x, spd)
    assert found.converged.all() and found.mean.shape == (2, 3, 3)
    torch.testing.assert_close(
        found.mean, basis @ torch.diag_embed(logs.mean(1).exp()) @ basis.mT, rtol=1e-8, atol=1e-8
    )
    torch.testing.assert_close(midpoint(x, spd), found.mean, rtol=1e-12, atol=0)  # no closed form: the same


def test_a_subclass_with_its_own_distance_inherits_no_closed_form():
    class Taxicab(hs.Euclidean):
        def dist(self, x, y, *, keepdim=False):
            return (x - y).abs().sum(-1, keepdim=keepdim)

    assert hooks.own(hs.Euclidean(), "lift") is not None
    assert hooks.own(Taxicab(), "lift") is None
    x = cluster(hs.Euclidean(), 3)
    assert torch.equal(midpoint(x, Taxicab()), frechet_mean(x, Taxicab()).mean)


def test_curvature_of_each_head():
    kappa = torch.tensor([-0.5, -2.0], dtype=torch.float64)
    x = 0.2 * torch.randn(2, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    for mean in (midpoint, lambda x, m: frechet_mean(x, m).mean):
        both = mean(x, hs.PoincareBall(kappa))
        for h in range(2):
            torch.testing.assert_close(both[h], mean(x[h], hs.PoincareBall(float(kappa[h]))), rtol=1e-12, atol=1e-14)


def test_the_norm_of_sphere_points_and_the_time_of_lorentz_points_do_not_count():
    for manifold, stretch in ((hs.Sphere(0.6), torch.tensor([[3.0], [1.0], [0.2]])), (hs.Lorentz(), torch.ones(3, 1))):
        x = cluster(manifold, 4, n=3)
        odd = x * stretch
        if isinstance(manifold, hs.Lorentz):
            odd[:, 0] = 7.0
        torch.testing.assert_close(midpoint(odd, manifold), midpoint(x, manifold), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(
            frechet_mean(odd, manifold).mean, frechet_mean(x, manifold).mean, rtol=1e-9, atol=1e-9
        )


def test_half_precision_is_worked_in_float64_and_rounded_once():
    x = cluster(hs.PoincareBall(), 3, dtype=torch.bfloat16)
    found = frechet_mean(x, hs.PoincareBall())
    assert found.mean.dtype == torch.bfloat16 and found.converged
    assert torch.equal(found.mean, frechet_mean(x.double(), hs.PoincareBall(), tol=1e-6).mean.bfloat16())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "mean", [midpoint, lambda x, m, w: frechet_mean(x, m, w, tol=1e-12).mean], ids=["midpoint", "frechet"]
)
def test_derivatives_in_points_and_weights(name, mean):
    manifold, size = spaces()[name]
    x = cluster(manifold, size, n=3).requires_grad_()
    w = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64, requires_grad=True)

    def of(x, w):
        return mean(manifold.projx(x), manifold, w)

    assert torch.autograd.gradcheck(of, (x, w), fast_mode=True)
    if name in ("ball", "sphere"):
        assert torch.autograd.gradgradcheck(of, (x, w), fast_mode=True)


@pytest.mark.parametrize("value", [-0.8, 0.0, 0.8])
@pytest.mark.parametrize(
    "mean", [midpoint, lambda x, m: frechet_mean(x, m, tol=1e-12).mean], ids=["midpoint", "frechet"]
)
def test_derivative_in_kappa(value, mean):
    x = 0.4 * torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    kappa = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda k: mean(x, hs.Stereographic(k)), (kappa,))


@scripts_late
def test_derivative_of_the_iteration_on_other_manifolds():
    spd = geoopt.SymmetricPositiveDefinite()
    torch.manual_seed(10)
    a = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)

    def of(a):
        return frechet_mean(a @ a.mT + torch.eye(2), spd, tol=1e-9).mean

    assert torch.autograd.gradcheck(of, (a,), atol=1e-5, fast_mode=True)


def test_gradient_at_coincident_points_is_finite():
    for manifold, size in spaces().values():
        x = cluster(manifold, size, n=1).expand(4, size).clone().requires_grad_()
        (frechet_mean(x, manifold).mean.sum() + midpoint(x, manifold).sum()).backward()
        assert x.grad.isfinite().all(), manifold


def test_opposite_points_have_a_finite_midpoint():
    x = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]], dtype=torch.float64)
    mid = midpoint(x, hs.Sphere())
    assert mid.norm().item() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("mean", [midpoint, frechet_mean])
def test_bad_arguments_are_named(mean):
    ball, x = hs.PoincareBall(), torch.zeros(2, 4, 3)
    for weights in (torch.ones(3), torch.ones(5, 4), torch.tensor(1.0), torch.ones(2, 4, 3)):
        with pytest.raises(ValueError, match="weights of shape"):
            mean(x, ball, weights)
    for weights in ([1.0, -1.0, 1, 1], [float("nan"), 1, 1, 1], [float("inf"), 1, 1, 1]):
        with pytest.raises(ValueError, match="finite and not negative"):
            mean(x, ball, torch.tensor(weights))
    with pytest.raises(ValueError, match="all be zero"):
        mean(x, ball, torch.zeros(4))
    with pytest.raises(ValueError, match="at least one point"):
        mean(torch.zeros(0, 3), ball)
    with pytest.raises(ValueError, match="points as rows"):
        mean(torch.zeros(3), ball)
    with pytest.raises(TypeError, match="x must be"):
        mean("points", ball)
    with pytest.raises(TypeError, match=r"geoopt\.Manifold"):
        mean(x, "poincare")


def test_tolerance_must_not_be_negative():
    for keywords in ({"tol": -1.0}, {"max_iter": -1}, {"tol": float("nan")}):
        with pytest.raises(ValueError, match="tol and max_iter"):
            frechet_mean(torch.zeros(2, 3), hs.Euclidean(), **keywords)


def weightless_rows():
    nan, rim, outside = [float("nan")] * 2, [1.0, 0.0], [0.9, 0.9]
    return {
        "nan in the ball": (hs.PoincareBall(), [0.3, 0.4], nan),
        "outside of the ball": (hs.PoincareBall(), [0.3, 0.4], outside),
        "rim of the ball": (hs.PoincareBall(), [0.3, 0.4], rim),
        "nan in flat space": (hs.Euclidean(), [0.3, 0.4], nan),
        "infinite": (hs.Euclidean(), [0.3, 0.4], [float("inf"), 0.0]),
        "nan on the sphere": (hs.Sphere(), [0.6, 0.8], nan),
        "nan on the hyperboloid": (hs.Lorentz(), [2**0.5, 1.0], nan),
        "nan in a scaled ball": (hs.Scaled(hs.PoincareBall(), 2.0), [0.3, 0.4], nan),
        "nan in one part": (hs.Product((hs.PoincareBall(), 1), (hs.Euclidean(), 1)), [0.3, 0.4], [0.1, float("nan")]),
    }


@pytest.mark.parametrize("case", weightless_rows())
@pytest.mark.parametrize("mean", [midpoint, lambda *a: frechet_mean(*a).mean], ids=["midpoint", "frechet"])
def test_a_row_of_weight_0_that_is_no_point_takes_no_part(case, mean):
    manifold, good, bad = weightless_rows()[case]
    other = manifold.expmap(*(torch.tensor([good, [0.05, 0.1]]).double()[:, None]))[0]
    x = torch.stack((torch.tensor(good).double(), torch.tensor(bad).double(), other)).requires_grad_()
    w = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    few, w_few = (t.detach()[[0, 2]].requires_grad_() for t in (x, w))
    found, right = mean(x, manifold, w), mean(few, manifold, w_few)
    torch.testing.assert_close(found, right, rtol=1e-14, atol=1e-15)
    toward = torch.tensor([1.0, -2.0], dtype=torch.float64)
    (dx, dw), expected = (
        torch.autograd.grad((m * toward).sum(), v) for m, v in ((found, (x, w)), (right, (few, w_few)))
    )
    assert (dx[1] == 0).all() and dw[1] == 0
    for got, of_few in zip((dx, dw), expected, strict=True):
        torch.testing.assert_close(got[[0, 2]], of_few, rtol=1e-11, atol=1e-12)


def test_a_point_of_weight_0_keeps_the_derivative_in_its_weight():
    x = torch.tensor([[0.3, 0.4], [-0.2, 0.1]], dtype=torch.float64)
    for mean in (midpoint, lambda *a: frechet_mean(*a).mean):
        w = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
        (found,) = torch.autograd.grad(mean(x, hs.PoincareBall(), w)[0], w)
        up = mean(x, hs.PoincareBall(), torch.tensor([1.0, 1e-6], dtype=torch.float64))[0]
        torch.testing.assert_close(found[1], (up - x[0, 0]) / 1e-6, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["Sphere", "PoincareBall", "Lorentz"])
def test_few_points_of_many_dimensions_are_those_of_few_dimensions(name):
    """The mean lies in the span of the points: padding with zeros changes nothing; N < D takes the N x N system."""
    manifold = getattr(hs, name)()
    few = cluster(manifold, 4, n=6, spread=1.2).requires_grad_()
    many = torch.nn.functional.pad(few, (0, 60))
    small, large = frechet_mean(few, manifold).mean, frechet_mean(many, manifold).mean
    torch.testing.assert_close(large[:4], small, rtol=1e-12, atol=1e-13)
    assert not large[4:].any()
    toward = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    (a,), (b,) = (torch.autograd.grad((m[:4] * toward).sum(), few, create_graph=True) for m in (small, large))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    (a2,), (b2,) = (torch.autograd.grad(g.square().sum(), few) for g in (a, b))
    torch.testing.assert_close(a2, b2, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["Sphere", "PoincareBall", "Lorentz"])
def test_a_mean_in_a_hundred_thousand_dimensions_holds_no_square_matrix(name):
    manifold = getattr(hs, name)()
    torch.manual_seed(6)
    x = manifold.random(3, 100_000, std=0.003)  # a D x D matrix would be 80 GB
    found = frechet_mean(x, manifold)
    assert found.converged and found.residual < 1e-8

"""Gradients of attention where pairs coincide or nearly do, far out and near the origin, against the reference."""

import mpmath
import pytest
import torch

import horosphere as hs
from horosphere.attention import geodesic_attention

# Distance of the points from the origin; how far apart the two copies of a point are, None: all apart.
RADII = (1.0, 6.0, 9.0, 11.0)
OFFSETS = (0.0, 1e-6, None)
# Relative to the largest entry of a gradient. A pair takes part by the product form only where its d^2 + eps is known
# to weight_tolerance (1e-11 and 5e-4); that bounds its share of every gradient, since dL/d(d^2) is at most dL/dlog w
# over d^2 + eps. In float32 twice that is allowed, for the pair's own weight. The gradient of one number for all pairs
# is a sum of rows that cancel, of which the roundings add up like the root of their number.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-3}
POINTS = 300


def directions(points, size, offset):
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(points, size, generator=generator, dtype=torch.float64)
    if offset is not None:
        half = points // 2
        d = torch.nn.functional.normalize(d, dim=-1)
        d[half:] = d[: points - half] + offset * torch.randn(points - half, size, generator=generator).double()
    return torch.nn.functional.normalize(d, dim=-1)


def ball(radius, d):
    return hs.PoincareBall(-1.0, learnable=True), d * torch.tanh(torch.tensor(radius / 2, dtype=torch.float64))


def hyperboloid(radius, d):
    m = hs.Lorentz(-1.0, learnable=True)
    return m, m.projx(torch.cat((d[..., :1], d * torch.sinh(torch.tensor(radius, dtype=torch.float64))), -1)).detach()


def product(radius, d):
    unit = [t / t.norm(dim=-1, keepdim=True) for t in (d[..., :5], d[..., 5:])]
    (first, x), (second, y) = ball(radius, unit[0]), hyperboloid(radius, unit[1])
    return hs.Product((first, 5), (second, 6)), torch.cat((x, y), -1)


SPACES = {
    "ball": ball,
    "hyperboloid": hyperboloid,
    "product": product,
    "bent inwards": lambda r, d: (hs.Stereographic(-1.0, learnable=True), ball(r, d)[1]),
    "bent outwards": lambda r, d: (hs.Stereographic(1.0, learnable=True), d * r),
    "sphere": lambda r, d: (hs.Sphere(1.0, learnable=True), d),
    "flat": lambda r, d: (hs.Euclidean(), d * r),
}


def gradients(manifold, points, dtype, impl, eps=1e-2):
    """Of points, values, eps and curvatures, each in float64."""
    x = points.to(dtype).requires_grad_()
    generator = torch.Generator().manual_seed(1)
    v, upper = (torch.randn(*x.shape[:-1], 5, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    v.requires_grad_()
    rate = torch.tensor(eps, dtype=torch.float64, requires_grad=True)
    out = geodesic_attention(x, x, v, manifold, eps=rate, impl=impl)
    inputs = [x, v, rate, *manifold.parameters()]
    return [out.detach().double(), *(g.double() for g in torch.autograd.grad((out * upper).sum(), inputs))]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("radius", RADII)
def test_tiled_gradients_are_the_references(space, radius):
    for offset in OFFSETS:
        manifold, points = SPACES[space](radius, directions(POINTS, 10, offset))
        for dtype in (torch.float64, torch.float32):
            stored = points.to(dtype)[None]
            right = gradients(manifold, stored.double(), torch.float64, "reference")
            found = gradients(manifold, stored, dtype, "tiled")
            for at, (f, r) in enumerate(zip(found, right, strict=True)):
                error = float((f - r).abs().max() / r.abs().max().clamp(min=1e-6))
                bound = TOLERANCE[dtype] * (POINTS**0.5 if r.dim() == 0 else 1)
                assert error <= bound, (offset, dtype, at, error)


FIXED = {
    "ball": lambda r, d: (hs.PoincareBall(-1.0), ball(r, d)[1]),
    "sphere": lambda r, d: (hs.Sphere(1.0), d),
    "flat": lambda r, d: (hs.Euclidean(), d * r),
}


@pytest.mark.parametrize("space", FIXED)
@pytest.mark.parametrize("radius", RADII)
def test_gradients_of_numbas_loops_are_the_references(space, radius):
    """What the loops serve: float32, curvatures that are fixed."""
    for offset in OFFSETS:
        manifold, points = FIXED[space](radius, directions(POINTS, 10, offset))
        stored = points.float()[None]
        right = gradients(manifold, stored.double(), torch.float64, "reference")
        found = gradients(manifold, stored, torch.float32, "numba")
        for at, (f, r) in enumerate(zip(found, right, strict=True)):
            error = float((f - r).abs().max() / r.abs().max().clamp(min=1e-6))
            bound = TOLERANCE[torch.float32] * (POINTS**0.5 if r.dim() == 0 else 1)
            assert error <= bound, (offset, at, error)


@pytest.mark.parametrize("space", ["ball", "hyperboloid", "product", "sphere", "flat"])
@pytest.mark.parametrize("radius", RADII)
def test_gradients_of_distances_are_those_of_exact_ones(space, radius):
    """The product form of a matrix, whose unresolved pairs are replaced, against differences in float64."""
    for offset in OFFSETS:
        manifold, points = SPACES[space](radius, directions(POINTS, 10, offset))
        upper = torch.rand(POINTS, POINTS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        for dtype in (torch.float64, torch.float32):
            for squared in (False, True):
                found = []
                for x, precision in ((points.to(dtype), "auto"), (points.to(dtype).double(), "exact")):
                    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
                    impl = "tiled" if precision == "auto" else "auto"
                    d = hs.cdist(a, b, manifold, squared=squared, precision=precision, impl=impl)
                    inputs = [a, b, *manifold.parameters()]
                    found.append(torch.autograd.grad((d * upper.to(d.dtype)).sum(), inputs))
                for f, r in zip(*found, strict=True):
                    error = float((f.double() - r.double()).abs().max() / r.double().abs().max())
                    # cdist promises 1e-12 and 1e-5 for d, and its gradients no digits: a hundred times that is asked
                    assert error <= (1e-9 if dtype == torch.float64 else 1e-3), (offset, dtype, squared, error)


@pytest.mark.parametrize("impl", ["reference", "tiled"])
@pytest.mark.parametrize("radius", RADII)
def test_gradients_on_the_ball_are_those_of_mpmath(impl, radius):
    """Six points, two of them equal and two 1e-6 apart, in 60 digits."""
    d = directions(6, 3, None)
    d[1], d[3] = d[0], torch.nn.functional.normalize(d[2] + 1e-6 * d[4], dim=-1)
    _, points = ball(radius, d)
    out, dx, _, deps, dkappa = gradients(hs.PoincareBall(-1.0, learnable=True), points[None], torch.float64, impl)
    generator = torch.Generator().manual_seed(1)
    v, upper = (torch.randn(1, 6, 5, generator=generator, dtype=torch.float64)[0].tolist() for _ in range(2))

    with mpmath.workdps(60):

        def loss(x, eps, kappa):
            total = mpmath.mpf(0)
            gaps = [1 + kappa * sum(c * c for c in p) for p in x]
            for i, p in enumerate(x):
                weights = []
                for j, q in enumerate(x):
                    u = 4 * sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) / (gaps[i] * gaps[j])
                    d2 = 4 / -kappa * mpmath.asinh(mpmath.sqrt(-kappa * u) / 2) ** 2
                    weights.append(1 / (d2 + eps))
                whole = sum(weights)
                for a in range(5):
                    total += upper[i][a] * sum(w * v[j][a] for j, w in enumerate(weights)) / whole
            return total

        base = [[mpmath.mpf(c) for c in p] for p in points.tolist()], mpmath.mpf("0.01"), mpmath.mpf(-1)
        eps0 = mpmath.mpf(torch.tensor(1e-2, dtype=torch.float64).item())
        base = base[0], eps0, base[2]
        h = mpmath.mpf(10) ** -25

        def slope(change):
            up, down = change(h), change(-h)
            return float((loss(*up) - loss(*down)) / (2 * h))

        def moved(i, f):
            def change(by):
                x = [list(p) for p in base[0]]
                x[i][f] += by
                return x, base[1], base[2]

            return change

        right = torch.tensor([[slope(moved(i, f)) for f in range(3)] for i in range(6)], dtype=torch.float64)
        right_eps = slope(lambda by: (base[0], base[1] + by, base[2]))
        right_kappa = slope(lambda by: (base[0], base[1], base[2] + by))
    # mpmath's value of a point is that of the stored numbers; the tensors' gradients are rounded to float64
    assert float((dx[0] - right).abs().max() / right.abs().max()) < 1e-10
    assert abs(float(deps) / right_eps - 1) < 1e-9
    assert abs(float(dkappa) / right_kappa - 1) < 1e-9
    assert out.isfinite().all()


@pytest.mark.parametrize("impl", ["tiled", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_antipodes_leave_the_gradient_of_a_curvature_finite(dtype, impl):
    """There it is defined as 0, and those of all other pairs add up as in the reference."""
    torch.manual_seed(0)
    x = hs.Sphere(1.5).random(300, 3, dtype=torch.float64)
    y = torch.cat((-x, hs.Sphere(1.5).random(300, 3, dtype=torch.float64)))
    value = torch.randn(600, 1, dtype=torch.float64)
    found = []
    for work, how in ((dtype, impl), (torch.float64, "reference")):
        sphere = hs.Sphere(kappa=1.5, learnable=True)
        geodesic_attention(*(t.to(work) for t in (x, y, value)), sphere, impl=how).sum().backward()
        found.append(next(sphere.parameters()).grad)
    # float32 keeps pairs an ulp from the antipode, whose slope is 1 / sqrt(2^-24) times their rounding
    torch.testing.assert_close(*found, rtol=0, atol=5e-3 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("function", ["landmark", "summary"])
def test_antipodes_of_few_points_leave_the_gradient_of_a_curvature_finite(function):
    sphere = hs.Sphere(kappa=1.0, learnable=True)
    x = torch.eye(3, dtype=torch.float64).repeat(2, 1) * torch.tensor([1.0] * 3 + [-1.0] * 3).unsqueeze(-1)
    if function == "landmark":
        out = hs.attention.landmark_attention(x, x, x, x[:3], sphere)
    else:
        out = hs.attention.summary_attention(x, x, x, sphere, slots=3, chunk=2)
    out.sum().backward()
    assert next(sphere.parameters()).grad.isfinite()

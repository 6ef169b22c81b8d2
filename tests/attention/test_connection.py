"""Transport between fibres, its curvature and its torsion."""

import copy
import math

import pytest
import torch

import horosphere as hs
from horosphere.attention import connection
from horosphere.attention.connection import PairRotation, curvature, torsion, transport, triangles


def tokens(n=12, d=6, r=2, p=3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, a = (torch.randn(n, size, generator=generator, dtype=torch.float64).to(dtype) for size in (d, p))
    s = torch.rand(n, generator=generator, dtype=torch.float64).to(dtype) + 0.5
    u = torch.randn(n, d, r, generator=generator, dtype=torch.float64).to(dtype)
    return x, hs.TokenMetric(s, u), a


def rotation(d=6, p=3, planes=2, dtype=torch.float64):
    torch.manual_seed(0)
    made = PairRotation(d, p, planes).to(dtype)
    hs.optim.project_(made)  # orthonormal to float32 only, until projected again
    return made


@pytest.mark.parametrize("dtype, tolerance", ((torch.float32, 1e-6), (torch.float64, 1e-12)))
@pytest.mark.parametrize("turned", (False, True))
def test_transport_keeps_lengths(dtype, tolerance, turned):
    x, g, a = tokens(dtype=dtype)
    to, start = g[torch.arange(11)], g[torch.arange(1, 12)]
    with torch.no_grad():
        r = rotation(dtype=dtype) if turned else None
        angles = r.angles(a[:11], a[1:]) if turned else None
        moved = transport(to, start, x[1:], r, angles)
        torch.testing.assert_close(to.inner(moved).sqrt(), start.inner(x[1:]).sqrt(), rtol=tolerance, atol=0)
        back = transport(start, to, moved, r, -angles if turned else None)
    torch.testing.assert_close(back, x[1:], rtol=0, atol=tolerance * 20)


def test_pair_rotations_are_orthogonal_and_opposite_for_the_opposite_pair():
    _, _, a = tokens()
    r, eye = rotation(), torch.eye(6, dtype=torch.float64)
    theta = r.angles(a[0], a[1])
    there, back = r(eye, theta).T, r(eye, r.angles(a[1], a[0])).T
    torch.testing.assert_close(there.T @ there, eye)
    torch.testing.assert_close(back, there.T)
    torch.testing.assert_close(r(eye, r.angles(a[2], a[2])), eye)
    planes = there.trace().item()
    assert planes == pytest.approx(2 + 2 * torch.cos(theta).sum().item())
    turn = r.between(a[:5], a[5:])
    torch.testing.assert_close(turn.left[1] @ turn.right.T, r.angles(a[:5, None], a[None, 5:])[..., 1])


def test_curvature_is_the_holonomy_of_the_triangle():
    _, _, a = tokens()
    r, eye = rotation(), torch.eye(6, dtype=torch.float64)
    corners = triangles(20, 12, generator=torch.Generator().manual_seed(1))
    found = curvature(r, a, corners)
    for t, (i, j, k) in enumerate(corners.T.tolist()):
        matrices = [r(eye, r.angles(a[m], a[n])).T for m, n in ((i, j), (j, k), (k, i))]
        assert found[t].item() == pytest.approx(
            torch.linalg.matrix_norm(matrices[0] @ matrices[1] @ matrices[2] - eye).item(), rel=1e-9
        )
    assert connection.curvature_proxy(torch.tensor([0.7])).item() == pytest.approx(2 * math.sqrt(2) * math.sin(0.35))
    # a frame of each token's own changes nothing: A_i A_j^T multiplies to I around every triangle
    assert (found > 0.01).all()


def test_rotations_of_single_tokens_are_flat_and_the_identity_exactly_so():
    generator = torch.Generator().manual_seed(2)
    frames = torch.linalg.qr(torch.randn(3, 6, 6, generator=generator, dtype=torch.float64))[0]
    pairs = [frames[i] @ frames[j].T for i, j in ((0, 1), (1, 2), (2, 0))]
    torch.testing.assert_close(pairs[0] @ pairs[1] @ pairs[2], torch.eye(6, dtype=torch.float64))
    _, _, a = tokens()
    r = rotation()
    with torch.no_grad():
        r.omega.zero_()
    assert torch.equal(curvature(r, a, triangles(30, 12)), torch.zeros(30, dtype=torch.float64))


def test_the_gradient_reduces_curvature():
    _, _, a = tokens()
    r, corners = rotation(), triangles(50, 12, generator=torch.Generator().manual_seed(3))
    optimizer = hs.optim.RiemannianAdam(hs.optim.param_groups(r), lr=0.02)
    values = []
    for _ in range(60):
        optimizer.zero_grad()
        penalty = (curvature(r, a, corners) ** 2).mean()
        penalty.backward()
        assert r.omega.grad.abs().max() > 0
        optimizer.step()
        values.append(penalty.item())
    assert values[0] > 0.1 and values[-1] < 0.05 * values[0]


def test_torsion_of_constant_and_of_varying_metrics():
    x, g, _ = tokens()
    corners = triangles(40, 12, generator=torch.Generator().manual_seed(4))
    constant = hs.TokenMetric(g.scale[:1].expand(12), g.factor[:1].expand(12, 6, 2))
    assert torsion(x, constant, corners).max() <= 1e-14
    assert torsion(x, g, corners).min() > 1e-3
    same = torch.stack((corners[0], corners[1], corners[1]))
    assert torch.equal(torsion(x, g, same), torch.zeros(40, dtype=torch.float64))
    met = x.clone()
    met[corners[1][0]] = met[corners[0][0]]
    assert torsion(met, g, corners)[0] == 0 and torsion(met, g, corners).isfinite().all()


def field(x, kind):
    """Metrics at points x (n, 2) from a smooth field: (Hess psi)^2, or one that is no such square."""
    w = torch.tensor([[0.8, 0.6], [-0.3, 1.1]], dtype=torch.float64)
    inside = x @ w
    if kind == "hessian":  # psi = |x|^2/2 + sum_r exp(<w_r, x>)/2: Hess = I + W F W^T, its square I + U U^T
        f = torch.diag_embed(torch.exp(inside) / 2)
        middle = 2 * f + f @ (w.T @ w) @ f
        return hs.TokenMetric(torch.ones(len(x), dtype=torch.float64), w @ torch.linalg.cholesky(middle))
    return hs.TokenMetric(1 + 0.3 * torch.sin(x[:, 0]), torch.stack((x[:, 1], torch.cos(x[:, 0])), -1).unsqueeze(-1))


@pytest.mark.parametrize("kind, without", (("hessian", True), ("other", False)))
def test_torsion_goes_to_0_with_the_triangle_for_squared_hessians_only(kind, without):
    corners = torch.tensor([[0], [1], [2]])
    values = []
    for size in (1e-2, 5e-3):
        x = torch.tensor([[0.3, -0.2], [1.3, 0.4], [-0.1, 0.9]], dtype=torch.float64)
        x = x[:1] + (x - x[:1]) * size
        values.append(torsion(x, field(x, kind), corners).item())
    if without:
        assert values[1] == pytest.approx(values[0] / 2, rel=0.05) and values[0] < 0.05
    else:
        assert values[1] == pytest.approx(values[0], rel=0.05) and values[0] > 0.1


def test_a_transport_without_torsion_closes_the_parallelogram_to_leading_order(monkeypatch):
    """Levi-Civita transport in place of ours, by the symbols of the hyperbolic half-plane G = I/y^2."""

    def christoffel(point, u, v):
        y = point[1]
        return torch.stack((-(u[0] * v[1] + u[1] * v[0]), u[0] * v[0] - u[1] * v[1])) / y

    for size, bound in ((1e-2, 0.1), (1e-3, 0.01)):
        x = torch.tensor([[0.0, 1.0], [1.0, 1.5], [-0.5, 2.0]], dtype=torch.float64)
        x = x[:1] + (x - x[:1]) * size
        g = hs.TokenMetric(1 / x[:, 1], torch.zeros(3, 2, 0, dtype=torch.float64))
        places = {1 / p[1].item(): p for p in x}

        def levi_civita(g_to, g_from, v, rotation, angles, places=places):
            start, stop = places[g_from.scale.item()], places[g_to.scale.item()]
            return v - christoffel(start, stop - start, v[0])

        monkeypatch.setattr(connection, "transport", levi_civita)
        assert torsion(x, g, torch.tensor([[0], [1], [2]])).item() < bound
        monkeypatch.undo()
        assert torsion(x, g, torch.tensor([[0], [1], [2]])).item() > 0.3


def test_torsion_has_gradients_everywhere():
    x, g, a = tokens(n=4)
    r, corners = rotation(), torch.tensor([[0, 1], [1, 2], [2, 2]])

    def penalty(x, s, u, a, omega):
        r.omega.data = omega.detach()
        rotated = copy.copy(r)
        rotated._parameters = {**r._parameters, "omega": omega}
        return torsion(x, hs.TokenMetric(s, u), corners, rotated, a)[:1]

    leaves = [t.clone().requires_grad_() for t in (x, g.scale, g.factor, a, r.omega.detach())]
    assert torch.autograd.gradcheck(penalty, leaves, rtol=1e-5, atol=1e-7)
    gradients = torch.autograd.grad(torsion(x, hs.TokenMetric(*leaves[1:3]), corners).sum(), leaves[1:3])
    assert all(t.isfinite().all() for t in gradients)


def test_triangles_have_three_corners():
    for length in (3, 4, 30):
        corners = triangles(500, length, generator=torch.Generator().manual_seed(5))
        assert corners.min() == 0 and corners.max() == length - 1
        assert (
            (corners[0] != corners[1]).all() and (corners[0] != corners[2]).all() and (corners[1] != corners[2]).all()
        )
    counts = torch.bincount(triangles(6000, 3, generator=torch.Generator().manual_seed(6))[2])
    assert (counts - 2000).abs().max() < 200


@pytest.mark.parametrize("retraction", (False, True))
def test_frames_move_and_stay_orthonormal(retraction):
    torch.manual_seed(0)
    r = PairRotation(16, 4, 3)
    start = r.frame.detach().clone()
    optimizer = hs.optim.RiemannianAdam(hs.optim.param_groups(r), lr=0.02, retraction=retraction)
    target = torch.randn(16, 6)
    for step in range(300):
        optimizer.zero_grad()
        ((r.frame - target * (1 + step % 3)) ** 2).sum().backward()
        optimizer.step()
    assert (r.frame - start).abs().max() > 0.1
    torch.testing.assert_close(r.frame.T @ r.frame, torch.eye(6), rtol=0, atol=1e-5)


def test_copies_files_and_bad_input(tmp_path):
    r = PairRotation(6, 3)
    torch.save(r.state_dict(), tmp_path / "r.pt")
    other = PairRotation(6, 3)
    other.load_state_dict(torch.load(tmp_path / "r.pt"))
    assert torch.equal(other.frame, r.frame) and isinstance(copy.deepcopy(r).frame, hs.ManifoldParameter)
    torch.save(r.frame, tmp_path / "frame.pt")
    assert type(torch.load(tmp_path / "frame.pt").manifold) is connection.Frames
    x, g, _ = tokens()
    for call, word in (
        (lambda: PairRotation(6, 3, 4), "planes"),
        (lambda: PairRotation(6, 1), "features"),
        (lambda: triangles(1, 2), "three tokens"),
        (lambda: transport(g, g, x, rotation()), "angles"),
        (lambda: torsion(x, g, triangles(2, 12), rotation()), "features a"),
    ):
        with pytest.raises(ValueError, match=word):
            call()

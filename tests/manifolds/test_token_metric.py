"""Per-token metrics against mpmath on the stored numbers, their written gradients, and the manifold of a table."""

import json
import warnings

import mpmath
import numpy as np
import pytest
import torch

import horosphere as hs
from horosphere.kernels.low_rank import algebra as low_rank

POWERS = {"solve": -1, "sqrt_matmul": 0.5, "inv_sqrt_matmul": -0.5}
RATIOS = (1e-6, 1e-3, 1.0, 300.0, 1e4, 1e6)


def columns(kind: str, d: int, generator: torch.Generator) -> torch.Tensor:
    """U of size about 1: (d, R)."""
    u = torch.randn(d, 3, generator=generator)
    if kind == "repeated":
        u[:, 2] = u[:, 0]
    elif kind == "zero":
        u[:, 1] = 0
    elif kind == "surplus":
        u = torch.randn(d, d + 2, generator=generator)
    elif kind == "graded":
        u = u * torch.tensor([1.0, 1e-3, 1e-6])
    return u


def vector(kind: str, u: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    v = torch.randn(u.shape[0], generator=generator)
    if kind == "parallel":
        v = u[:, 0] * 0.5
    elif kind == "orthogonal":
        q = torch.linalg.qr(u.double())[0] if u.shape[1] < u.shape[0] else torch.zeros(len(v), 1, dtype=torch.float64)
        v = (v.double() - q @ (q.T @ v.double())).float()
    return v


def eigen(s: torch.Tensor, u: torch.Tensor):
    """Eigenvalues and eigenvectors of G in 60 digits, of the numbers as stored."""
    columns = mpmath.matrix(u.double().tolist())
    g = columns * columns.T + mpmath.mpf(s.item()) ** 2 * mpmath.eye(u.shape[0])
    return mpmath.eigsy(g)


def by_mpmath(values, vectors, v: torch.Tensor, power: float) -> np.ndarray:
    c = vectors.T * mpmath.matrix(v.double().tolist())
    c = mpmath.matrix([c[i] * mpmath.power(values[i], power) for i in range(len(values))])
    return np.array([float(x) for x in vectors * c])


@pytest.mark.parametrize("kind", ("random", "repeated", "zero", "surplus", "graded"))
@pytest.mark.parametrize("ratio", RATIOS)
def test_inverse_roots_and_determinant_against_mpmath(kind, ratio):
    generator = torch.Generator().manual_seed(0)
    d = 5
    u = columns(kind, d, generator)
    s = torch.tensor(0.7)
    u = (u * (s * ratio / torch.linalg.matrix_norm(u.double(), 2))).float()
    with mpmath.workdps(60):
        values, vectors = eigen(s, u)
        g = hs.TokenMetric(s[None], u[None])
        for direction in ("random", "orthogonal", "parallel"):
            v = vector(direction, u, generator)
            for name, power in POWERS.items():
                true = by_mpmath(values, vectors, v, power)
                found = getattr(g, name)(v[None])[0].double().numpy()
                error = np.linalg.norm(found - true) / np.linalg.norm(true)
                assert error <= 1e-6, (direction, name, error)
        terms = 2 * d * abs(np.log(s.item())), float(sum(mpmath.log(x / mpmath.mpf(s.item()) ** 2) for x in values))
        true = float(sum(mpmath.log(x) for x in values))
        assert abs(g.logdet().item() - true) <= 1e-6 * sum(terms)
        condition = float(max(values) / min(values))
        assert g.condition().item() == pytest.approx(condition, rel=1e-6)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("dtype, tolerance", ((torch.float32, 1e-6), (torch.float64, 1e-9)))
def test_many_dimensions_against_mpmath(ratio, dtype, tolerance):
    """The worst vectors: just beside a column by 1e-6 of its length. In 40 dimensions with 30 digits."""
    generator = torch.Generator().manual_seed(1)
    u = torch.randn(40, 2, generator=generator).to(dtype)
    u = u * (ratio / torch.linalg.matrix_norm(u, 2))
    v = u[:, 0] / u[:, 0].norm() + 1e-6 * torch.randn(40, generator=generator).to(dtype)
    with mpmath.workdps(40):
        columns, vec = mpmath.matrix(u.double().tolist()), mpmath.matrix(v.double().tolist())
        small = mpmath.eye(2) + columns.T * columns
        true = vec - columns * mpmath.lu_solve(small, columns.T * vec)
        true = np.array([float(x) for x in true])
    found = hs.TokenMetric(torch.ones(1, dtype=dtype), u[None]).solve(v[None])[0].double().numpy()
    assert np.linalg.norm(found - true) <= tolerance * np.linalg.norm(true)


def test_32_a_column_of_1e4():
    """Fault 32."""
    g = hs.TokenMetric(torch.ones(1), torch.tensor([[[1e4], [0.0]]]))
    v = torch.tensor([[1.0, 0.0]])
    assert g.solve(v)[0, 0].item() == pytest.approx(9.9999999e-9, rel=1e-7)
    torch.testing.assert_close(g.matmul(g.solve(v)), v)
    assert g.inner(v).item() == pytest.approx(1e8 + 1)


def test_31_gradients_at_the_identity_and_at_equal_eigenvalues_are_finite():
    """Fault 31: automatic differentiation of an eigendecomposition is NaN there."""
    for u in (torch.zeros(1, 4, 2), torch.eye(4)[None, :, :2] * 3, torch.eye(4)[None], torch.ones(1, 4, 3) * 1e5):
        s, u, v = torch.ones(1).requires_grad_(), u.clone().requires_grad_(), torch.randn(1, 4).requires_grad_()
        g = hs.TokenMetric(s, u)
        out = g.solve(v).sum() + g.sqrt_matmul(v).sum() + g.inv_sqrt_matmul(v).sum() + g.logdet().sum()
        assert all(t.isfinite().all() for t in torch.autograd.grad(out, (s, u, v)))


@pytest.mark.parametrize("name", (*POWERS, "logdet", "inner", "matmul"))
@pytest.mark.parametrize("kind", ("random", "repeated", "zero", "surplus", "none"))
@pytest.mark.parametrize("peel", (1e3, 0.0), ids=("gram", "ill_conditioned"))
def test_gradients(name, kind, peel, monkeypatch):
    """float64 gradcheck of both ways of working, the second made to serve ordinary ratios."""
    monkeypatch.setattr(low_rank, "PEEL_RATIO", peel)
    generator = torch.Generator().manual_seed(2)
    u = torch.zeros(4, 0) if kind == "none" else columns(kind, 4, generator)
    s = (0.5 + torch.rand(2, generator=generator)).double().requires_grad_()
    u = torch.stack((u, 0.5 * u)).double().requires_grad_()
    v = torch.randn(2, 4, generator=generator).double().requires_grad_()

    def operation(s, u, v):
        method = getattr(hs.TokenMetric(s, u), name)
        return method() if name == "logdet" else method(v)

    assert torch.autograd.gradcheck(operation, (s, u, v), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", POWERS)
def test_gradients_at_a_large_ratio_against_mpmath(name):
    """|U|/s = 1e5, where differences of float64 numbers say nothing: differences in 80 digits instead."""
    generator = torch.Generator().manual_seed(3)
    u = torch.randn(3, 2, generator=generator) * 1e5
    s, v, o = torch.tensor(1.0), vector("parallel", u, generator) / 1e5, torch.randn(3, generator=generator)

    def value(u, s, v):
        g = u * u.T + s * s * mpmath.eye(3)
        values, vectors = mpmath.eigsy(g)
        c, co = vectors.T * v, vectors.T * mpmath.matrix(o.double().tolist())
        return sum(c[i] * co[i] * mpmath.power(values[i], POWERS[name]) for i in range(3))

    leaves = [t.clone().requires_grad_() for t in (u[None], s[None], v[None])]
    found = torch.autograd.grad((getattr(hs.TokenMetric(leaves[1], leaves[0]), name)(leaves[2]) * o).sum(), leaves)
    with mpmath.workdps(80):
        start = [mpmath.matrix(u.double().tolist()), mpmath.mpf(1), mpmath.matrix(v.double().tolist())]
        step = mpmath.mpf(10) ** -25
        for which, ours in zip((0, 2), (found[0][0], found[2][0][:, None]), strict=True):
            true = np.zeros(tuple(ours.shape))
            for i, j in np.ndindex(*true.shape):
                moved = [[m.copy() if hasattr(m, "copy") else m for m in start] for _ in range(2)]
                moved[0][which][i, j] += step
                moved[1][which][i, j] -= step
                true[i, j] = float((value(*moved[0]) - value(*moved[1])) / (2 * step))
            assert np.abs(ours.numpy() - true).max() <= 1e-5 * np.abs(true).max()
        true = float((value(start[0], 1 + step, start[2]) - value(start[0], 1 - step, start[2])) / (2 * step))
        assert found[1].item() == pytest.approx(true, rel=1e-5)


def test_the_inverse_has_second_derivatives_and_the_roots_say_that_they_have_none():
    generator = torch.Generator().manual_seed(4)
    s, u, v = (
        torch.rand(*shape, generator=generator).double().add(0.5).requires_grad_()
        for shape in ((2,), (2, 3, 2), (2, 3))
    )
    assert torch.autograd.gradgradcheck(lambda s, u, v: hs.TokenMetric(s, u).solve(v), (s, u, v))
    for call in (lambda g: g.sqrt_matmul(v).sum(), lambda g: g.logdet().sum()):
        with pytest.raises(NotImplementedError, match="first derivatives"):
            torch.autograd.grad(call(hs.TokenMetric(s, u)), s, create_graph=True)


def test_roots_multiply_to_the_metric():
    generator = torch.Generator().manual_seed(5)
    s, u = torch.rand(7, generator=generator) + 0.5, torch.randn(7, 6, 2, generator=generator)
    v = torch.randn(7, 6, generator=generator)
    g = hs.TokenMetric(s, u)
    dense = g.dense()
    apply = (dense @ v.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(g.sqrt_matmul(g.sqrt_matmul(v)), apply)
    torch.testing.assert_close(g.matmul(v), apply)
    torch.testing.assert_close(g.inv_sqrt_matmul(g.inv_sqrt_matmul(apply)), v)
    torch.testing.assert_close(g.solve(apply), v)
    torch.testing.assert_close(g.inner(v, 2 * v), 2 * (v * apply).sum(-1))


def test_vectors_broadcast_and_heads_are_diagonal_blocks():
    generator = torch.Generator().manual_seed(6)
    s, u = torch.rand(3, 5, generator=generator) + 0.5, torch.randn(3, 5, 6, 2, generator=generator)
    v = torch.randn(4, 3, 5, 6, generator=generator)
    g = hs.TokenMetric(s, u)
    for name in POWERS:
        together = getattr(g, name)(v)
        torch.testing.assert_close(together[2], getattr(g, name)(v[2]))
        torch.testing.assert_close(together[:, 1, 4], getattr(g[1, 4], name)(v[:, 1, 4]))
        torch.testing.assert_close(
            getattr(g[:1], name)(v), getattr(hs.TokenMetric(s[:1].expand(3, 5), u[:1].expand(3, 5, 6, 2)), name)(v)
        )
    blocks = g.heads(3)
    assert blocks.shape == (3, 3, 5) and blocks.dim == 2
    torch.testing.assert_close(blocks.dense()[1, 2, 4], g.dense()[1, 4, 4:, 4:])


@pytest.mark.parametrize(
    "make, error, word",
    (
        (lambda: hs.TokenMetric("x", torch.ones(2, 1)), TypeError, "scale"),
        (lambda: hs.TokenMetric(torch.ones(2), torch.ones(2)), ValueError, r"factor must have shape \(..., D, R\)"),
        (lambda: hs.TokenMetric(torch.ones(3), torch.ones(2, 4, 1)), ValueError, r"\(3,\).*\(2, 4, 1\)"),
        (lambda: hs.TokenMetric(torch.ones(2), torch.ones(2, 4, 1)).solve(torch.ones(2, 3)), ValueError, "length 4"),
        (lambda: hs.TokenMetric(torch.ones(2), torch.ones(2, 4, 1)).solve(torch.ones(3, 4)), ValueError, r"\(3, 4\)"),
        (lambda: hs.TokenMetric(torch.ones(2), torch.ones(2, 4, 1)).heads(3), ValueError, "divide the dimension 4"),
        (lambda: hs.TokenMetric(torch.ones(()), torch.ones(4, 1)).heads(2), ValueError, "token dimension"),
        (
            lambda: hs.LowRankMetric(torch.ones(2), torch.ones(2, 4, 1)).set_(torch.ones(3), torch.ones(3, 4, 1)),
            ValueError,
            "keep the shapes",
        ),
        (
            lambda: hs.ManifoldParameter(torch.ones(3, 4), hs.LowRankMetric(torch.ones(2), torch.ones(2, 4, 1))),
            ValueError,
            r"\(3, 4\)",
        ),
        (
            lambda: hs.cdist(torch.ones(2, 4), torch.ones(2, 4), hs.LowRankMetric(torch.ones(2), torch.ones(2, 4, 1))),
            ValueError,
            "metric_sqdist",
        ),
    ),
)
def test_bad_input_is_named(make, error, word):
    with pytest.raises(error, match=word):
        make()


def test_a_bad_row_stays_alone():
    s, u = torch.tensor([1.0, float("nan"), 1.0]), torch.randn(3, 4, 2)
    u[2, 0, 0] = float("inf")
    for name in POWERS:
        out = getattr(hs.TokenMetric(s, u), name)(torch.ones(3, 4))
        assert out[0].isfinite().all() and not out[1].isfinite().all() and not out[2].isfinite().all()


class TestSharedMetric(hs.testing.ManifoldContract):
    """One metric for all points is a flat space in other coordinates."""

    def make_manifold(self):
        factor = torch.tensor([[0.5, 0.0], [-0.25, 1.0], [0.0, 0.75], [1.5, 0.125]])
        return hs.LowRankMetric(torch.tensor(0.75), factor)


class TestSharedMetricOfFullRank(hs.testing.ManifoldContract):
    size = 3

    def make_manifold(self):
        return hs.LowRankMetric(0.5, torch.eye(3) * 2)


def table(rows=4, dim=3, rank=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    s, u = torch.rand(rows, generator=generator) + 0.5, torch.randn(rows, dim, rank, generator=generator)
    return hs.LowRankMetric(s.to(dtype), u.to(dtype))


def test_a_metric_a_row_is_a_batch_of_flat_fibres():
    manifold = table()
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    u = manifold.logmap(x, y)
    torch.testing.assert_close(manifold.norm(x, u), manifold.dist(x, y))
    torch.testing.assert_close(
        manifold.dist2(x, y), torch.einsum("nd,nde,ne->n", y - x, manifold.metric.dense(), y - x)
    )
    torch.testing.assert_close(manifold.expmap(x, u), y)
    assert torch.equal(manifold.transp(x, y, u), u) and torch.equal(manifold.projx(x), x)
    gradient = manifold.egrad2rgrad(x, y)
    torch.testing.assert_close(manifold.inner(x, gradient, u), (y * u).sum(-1))
    twin = hs.manifolds.manifold_from_config(json.loads(json.dumps(manifold.config())))
    assert torch.equal(twin.dist(x, y), manifold.dist(x, y))


def test_riemannian_adam_trains_a_table_and_its_first_step_is_preconditioned():
    manifold = table()
    p = hs.ManifoldParameter(torch.zeros(4, 3, dtype=torch.float64), manifold)
    target = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    optimizer = hs.optim.RiemannianAdam([p], lr=0.05)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = ((p - target) ** 2).sum()
        loss.backward()
        if not losses:
            natural = manifold.egrad2rgrad(p.detach(), p.grad)
        optimizer.step()
        if not losses:  # Adam's first step has the length lr in the metric of the row
            assert torch.allclose(manifold.norm(p.detach(), p.detach()), torch.full((4,), 0.05).double(), rtol=1e-6)
            cosine = manifold.inner(p.detach(), p.detach(), -natural) / (0.05 * manifold.norm(p.detach(), natural))
            torch.testing.assert_close(cosine, torch.ones(4).double(), rtol=1e-6, atol=0)
        losses.append(loss.item())
    assert losses[-1] < 1e-3 * losses[0]


@pytest.mark.parametrize("optimizer", (hs.optim.RiemannianAdam, hs.optim.RiemannianSGD))
def test_a_sparse_gradient_meets_the_metrics_of_its_rows(optimizer):
    manifold = table(rows=6)
    start = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    after = []
    for sparse in (False, True):
        p = hs.ManifoldParameter(start, manifold)
        steps = optimizer([p], lr=0.1)
        ids = torch.tensor([4, 1, 4])
        for _ in range(2):
            steps.zero_grad()
            (torch.nn.functional.embedding(ids, p, sparse=sparse) ** 2).sum().backward()
            steps.step()
        after.append(p.detach().clone())
    torch.testing.assert_close(after[1], after[0])
    assert not torch.equal(after[1][1], start[1]) and torch.equal(after[1][0], start[0])


def test_copies_and_files_keep_the_metrics(tmp_path):
    p = hs.ManifoldParameter(torch.randn(4, 3), table(dtype=torch.float32))
    torch.save(p, tmp_path / "p.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = torch.load(tmp_path / "p.pt")
    assert torch.equal(p, q) and torch.equal(q.manifold.factor, p.manifold.factor) and q.manifold is not p.manifold


def test_compiles_in_one_graph():
    s, u, v = torch.rand(5) + 0.5, torch.randn(5, 4, 2), torch.randn(5, 4)

    def f(s, u, v):
        g = hs.TokenMetric(s, u)
        return g.solve(v) + g.inv_sqrt_matmul(g.sqrt_matmul(v)) * g.logdet().unsqueeze(-1)

    leaves = [t.clone().requires_grad_() for t in (s, u, v)]
    eager = f(*leaves)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(compiled, eager)
    for a, b in zip(torch.autograd.grad(compiled.sum(), leaves), torch.autograd.grad(eager.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)

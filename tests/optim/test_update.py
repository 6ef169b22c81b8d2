"""What one step does to points: length, direction, retraction, sparse against dense."""

import pytest
import torch
from torch.testing import assert_close

from horosphere import Euclidean, ManifoldParameter, PoincareBall
from horosphere.optim import RiemannianAdam, RiemannianSGD
from tests.optim.spaces import CURVED, SPACES, points, sparse

OPTIMIZERS = {
    "adam": lambda p, **kw: RiemannianAdam(p, lr=0.05, **kw),
    "amsgrad": lambda p, **kw: RiemannianAdam(p, lr=0.05, amsgrad=True, **kw),
    "sgd": lambda p, **kw: RiemannianSGD(p, lr=0.05, **kw),
    "momentum": lambda p, **kw: RiemannianSGD(p, lr=0.05, momentum=0.9, dampening=0.1, **kw),
    "nesterov": lambda p, **kw: RiemannianSGD(p, lr=0.05, momentum=0.9, nesterov=True, **kw),
}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("retraction", [False, True])
def test_gradient_descent_on_the_distance_walks_along_the_geodesic(space, retraction):
    """The gradient of d(., y) has length 1 and points away from y: a step of lr comes closer by exactly lr."""
    manifold = SPACES[space]()
    p, target = points(manifold), points(manifold, seed=1).detach()
    before = manifold.dist(p, target).detach()
    optimizer = RiemannianSGD([p], lr=1e-3, retraction=retraction)
    manifold.dist(p, target).sum().backward()
    optimizer.step()
    after = manifold.dist(p, target).detach()
    # A retraction is off by terms of second order in lr = 1e-3.
    assert_close(after, before - 1e-3, rtol=0, atol=1e-5 if retraction else 1e-9)


@pytest.mark.parametrize("space", CURVED)
def test_first_adam_step_has_length_lr(space):
    manifold = SPACES[space]()
    p = points(manifold)
    before, target = p.detach().clone(), points(manifold, seed=1).detach()
    optimizer = RiemannianAdam([p], lr=0.01)
    (7 * manifold.dist(p, target)).sum().backward()
    optimizer.step()
    length = 0.01 * (2**0.5 if space == "product" else 1)  # each of the two parts moves by lr
    assert_close(manifold.dist(p, before).detach(), torch.full((6,), length, dtype=p.dtype), rtol=1e-6, atol=0)
    assert manifold.check_point_on_manifold(p.detach())


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_descends_and_stays_on_the_manifold(space, kind):
    manifold = SPACES[space]()
    p, target = points(manifold, rows=3), points(manifold, rows=3, seed=1).detach()
    optimizer = OPTIMIZERS[kind]([p])
    start = manifold.dist2(p, target).sum().item()
    for _ in range(300):
        optimizer.zero_grad()
        loss = manifold.dist2(p, target).sum()
        loss.backward()
        optimizer.step()
    assert manifold.check_point_on_manifold(p.detach())
    assert manifold.dist2(p, target).sum().item() < 1e-2 * start


@pytest.mark.parametrize("space", CURVED)
def test_retraction_agrees_with_the_exponential_map_up_to_second_order(space):
    def gap(lr):
        manifold = SPACES[space]()
        moved = []
        for retraction in (False, True):
            p, target = points(manifold), points(manifold, seed=1).detach()
            optimizer = RiemannianSGD([p], lr=lr, retraction=retraction)
            manifold.dist2(p, target).sum().backward()
            optimizer.step()
            moved.append(p.detach())
        return (moved[0] - moved[1]).norm().item()

    coarse, fine = gap(1e-3), gap(1e-4)
    assert coarse > 0
    assert fine < 1.5e-2 * coarse


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_sparse_rows_with_duplicates_equal_the_dense_step(space, kind):
    """Every row touched in every step, so that lazy moments make no difference."""
    manifold = SPACES[space]()
    rows = [0, 1, 1, 2, 3, 4, 5, 5, 5]
    dense, lazy = points(manifold), points(manifold)
    optimizers = [OPTIMIZERS[kind]([p], weight_decay=0.1, decay_points=True) for p in (dense, lazy)]
    for seed in range(5):
        values = torch.randn(len(rows), 4, dtype=dense.dtype, generator=torch.Generator().manual_seed(seed))
        lazy.grad = sparse(rows, values, lazy.shape)
        dense.grad = lazy.grad.to_dense()
        for optimizer in optimizers:
            optimizer.step()
    assert_close(lazy.detach(), dense.detach(), rtol=1e-6, atol=1e-9)
    for name, value in optimizers[0].state[dense].items():
        assert_close(optimizers[1].state[lazy][name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_sparse_step_reads_and_writes_touched_rows_only(kind):
    manifold = PoincareBall(-1.0)
    p = points(manifold)
    optimizer = OPTIMIZERS[kind]([p])
    p.grad = torch.ones_like(p.detach())
    optimizer.step()
    with torch.no_grad():
        p[3] = float("nan")  # reading this row would be noticed
    before = p.detach().clone()
    moments = {k: v.clone() for k, v in optimizer.state[p].items() if v.dim()}
    p.grad = sparse([1, 4, 1], torch.ones(3, 4, dtype=p.dtype), p.shape)
    optimizer.step()
    untouched = [0, 2, 3, 5]
    assert torch.equal(p.detach()[untouched].nan_to_num(9), before[untouched].nan_to_num(9))
    assert not torch.equal(p.detach()[1], before[1])
    assert not torch.equal(p.detach()[4], before[4])
    for name, old in moments.items():
        assert torch.equal(optimizer.state[p][name][untouched], old[untouched])
        assert not torch.equal(optimizer.state[p][name][1], old[1])
    assert optimizer.skipped_rows == 0


def test_dense_and_sparse_gradients_in_one_optimizer():
    manifold = PoincareBall(-1.0)
    a, b, plain = points(manifold), points(manifold, seed=1), torch.nn.Embedding(5, 3, sparse=True)
    for optimizer in (RiemannianAdam([a, b, plain.weight]), RiemannianSGD([a, b, plain.weight], lr=0.1)):
        before = [t.detach().clone() for t in (a, b, plain.weight)]
        optimizer.zero_grad()
        (a.sum() + plain(torch.tensor([1, 1, 3])).sum()).backward()
        b.grad = sparse([2], torch.ones(1, 4, dtype=b.dtype), b.shape)
        optimizer.step()
        assert (a.detach() != before[0]).all()
        assert (b.detach() != before[1]).any(-1).nonzero().flatten().tolist() == [2]
        assert (plain.weight.detach() != before[2]).any(-1).nonzero().flatten().tolist() == [1, 3]


def test_plain_sparse_adam_equals_dense_adam_where_all_rows_are_touched():
    torch.manual_seed(0)
    sparse_plain = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    dense_plain = torch.nn.Parameter(sparse_plain.detach().clone())
    ours, theirs = RiemannianAdam([sparse_plain], lr=0.1), torch.optim.Adam([dense_plain], lr=0.1)
    for _ in range(5):
        values = torch.randn(4, 2, dtype=torch.float64)
        sparse_plain.grad = sparse([0, 1, 2, 2], values, (3, 2))
        dense_plain.grad = sparse_plain.grad.to_dense()
        ours.step()
        theirs.step()
    assert_close(sparse_plain, dense_plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_are_left_alone(kind):
    manifold = PoincareBall(-1.0)
    points_, rows, plain = points(manifold), points(manifold, seed=1), torch.nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[kind]([points_, rows, plain], weight_decay=0.3, decay_points=True)
    for _ in range(2):
        points_.grad = torch.ones(6, 4, dtype=torch.float64)
        points_.grad[2, 0] = 1e-3
        rows.grad = sparse([2, 2], torch.ones(2, 4, dtype=torch.float64), rows.shape)
        plain.grad = torch.full((3,), 2.0)
        kept = [p.grad for p in (points_, rows, plain)]
        copies = [g.clone() for g in kept]
        optimizer.step()
        for p, grad, copy in zip((points_, rows, plain), kept, copies, strict=True):
            assert p.grad is grad
            assert torch.equal(grad.to_dense(), copy.to_dense())
            assert not grad.is_sparse or not grad.is_coalesced()


def test_closure_is_evaluated_with_gradients_and_its_loss_returned():
    manifold = PoincareBall(-1.0)
    p = points(manifold)
    for optimizer in (RiemannianAdam([p]), RiemannianSGD([p], lr=0.1)):

        def closure(optimizer=optimizer):
            optimizer.zero_grad()
            loss = manifold.dist0(p).sum()
            loss.backward()
            return loss

        first = optimizer.step(closure)
        assert optimizer.step(closure).item() < first.item()


def test_a_single_point_and_several_points_a_row():
    """A sparse gradient over rows of several points, or of a lone point, takes the dense path."""
    manifold = PoincareBall(-1.0)
    for shape in [(4,), (3, 2, 4)]:
        torch.manual_seed(0)
        start = 0.2 * torch.rand(shape, dtype=torch.float64)
        results = []
        for is_sparse in (False, True):
            p = points(manifold, rows=1)
            p = type(p)(start, manifold)
            grad = torch.ones(shape, dtype=torch.float64)
            p.grad = grad.to_sparse(1) if is_sparse else grad
            RiemannianAdam([p], lr=0.1).step()
            results.append(p.detach())
        assert torch.equal(*results)


def test_rows_that_hold_points_of_different_curvature():
    manifold = PoincareBall(-torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    results = []
    for is_sparse in (False, True):
        torch.manual_seed(0)
        p = ManifoldParameter(0.3 * torch.rand(3, 5, 2, dtype=torch.float64), manifold)
        p.grad = sparse([0, 2], torch.ones(2, 5, 2, dtype=torch.float64), p.shape)
        p.grad = p.grad if is_sparse else p.grad.to_dense()
        RiemannianAdam([p], lr=0.1).step()
        results.append(p.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (RiemannianAdam, torch.optim.Adam, {"lr": 0.1, "betas": (0.7, 0.9), "eps": 1e-3}),
        (RiemannianAdam, torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.2}),
        (RiemannianSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}),
        (RiemannianSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ],
)
def test_on_flat_space_the_formulas_are_torchs(ours, theirs, settings):
    point = points(Euclidean())
    plain = torch.nn.Parameter(point.detach().clone())
    optimizers = ours([point], decay_points=True, **settings), theirs([plain], **settings)
    for seed in range(8):
        grad = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) / (1 + seed)
        point.grad, plain.grad = grad, grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert_close(point.detach(), plain.detach(), rtol=1e-12, atol=1e-12)


def test_dampened_momentum_by_hand():
    p = ManifoldParameter(torch.zeros(1, 1, dtype=torch.float64), Euclidean())
    optimizer = RiemannianSGD([p], lr=1.0, momentum=0.5, dampening=0.25)
    for expected in (-0.75, -0.75 - 1.125):  # b = 0.75 g, then b = 0.5 b + 0.75 g
        p.grad = torch.ones(1, 1, dtype=torch.float64)
        optimizer.step()
        assert p.item() == pytest.approx(expected)


def test_a_squared_length_just_below_zero_is_rounding():
    """An indefinite ambient form may give -1e-9 for a short vector: no NaN, no skipped point."""

    class Rounding(Euclidean):
        def component_inner(self, x, u, v=None):
            return torch.full_like(x[..., :1], -1e-9)

    p = points(Rounding())
    optimizer = RiemannianAdam([p], lr=1e-9)
    p.grad = torch.ones(6, 4, dtype=torch.float64)
    optimizer.step()
    assert p.isfinite().all() and optimizer.skipped_rows == 0


@pytest.mark.parametrize(
    "build",
    [
        lambda p: RiemannianAdam(p, lr=-1.0),
        lambda p: RiemannianAdam(p, betas=(1.0, 0.9)),
        lambda p: RiemannianSGD(p, lr=-1.0),
        lambda p: RiemannianSGD(p, lr=0.1, nesterov=True),
        lambda p: RiemannianAdam(p, lr=float("inf")),
        lambda p: RiemannianSGD(p, lr=float("inf")),
        lambda p: RiemannianAdam(p, lr=float("nan")),
        lambda p: RiemannianAdam(p, weight_decay=float("inf")),
        lambda p: RiemannianAdam([{"params": p, "lr": float("inf")}]),
        lambda p: RiemannianSGD(p, momentum=float("nan")),
    ],
)
def test_bad_settings_are_refused(build):
    with pytest.raises(ValueError):
        build([points(PoincareBall(-1.0))])

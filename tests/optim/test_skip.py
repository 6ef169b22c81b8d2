"""Points with a gradient or an update that is not finite stay; the others move."""

import copy
import pickle
import warnings

import pytest
import torch

from horosphere import ManifoldParameter, PoincareBall
from horosphere.manifolds._geoopt import geoopt
from tests.optim.spaces import points, sparse
from tests.optim.test_update import OPTIMIZERS


def trained(kind):
    """An optimizer after one step, so that there are moments, and what they were."""
    p = points(PoincareBall(-1.0))
    optimizer = OPTIMIZERS[kind]([p])
    p.grad = torch.ones_like(p.detach())
    optimizer.step()
    return p, optimizer, p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items() if v.dim()}


def assert_only_moved(p, optimizer, before, moments, moved):
    assert (p.detach() != before).any(-1).nonzero().flatten().tolist() == moved
    still = [row for row in range(len(p)) if row not in moved]
    for name, old in moments.items():
        assert torch.equal(optimizer.state[p][name][still], old[still])
        assert (optimizer.state[p][name] != old).any(-1).nonzero().flatten().tolist() == moved


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_dense(kind, bad):
    p, optimizer, before, moments = trained(kind)
    p.grad[1, 2] = p.grad[4, 0] = bad
    with pytest.warns(
        RuntimeWarning, match=r"(?s)2 point\(s\) of a parameter of shape \(6, 4\).*smaller lr than 0\.\d"
    ):
        optimizer.step()
    assert_only_moved(p, optimizer, before, moments, [0, 2, 3, 5])
    assert optimizer.skipped_rows == 2


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_sparse(kind):
    p, optimizer, before, moments = trained(kind)
    values = torch.ones(4, 4, dtype=p.dtype)
    values[0, 0], values[1, 0] = float("inf"), -float("inf")  # one row, summing to NaN
    p.grad = sparse([1, 1, 3, 5], values, p.shape)
    with pytest.warns(RuntimeWarning, match=r"1 point\(s\) of a parameter of shape \(6, 4\)"):
        optimizer.step()
    assert_only_moved(p, optimizer, before, moments, [3, 5])
    assert optimizer.skipped_rows == 1


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_all_points_bad_and_no_rows_at_all(kind):
    p, optimizer, before, moments = trained(kind)
    p.grad = torch.full_like(p.detach(), float("nan"))
    with pytest.warns(RuntimeWarning):
        optimizer.step()
    assert_only_moved(p, optimizer, before, moments, [])
    assert optimizer.skipped_rows == 6
    p.grad = sparse([], torch.ones(0, 4, dtype=p.dtype), p.shape)
    optimizer.step()
    assert_only_moved(p, optimizer, before, moments, [])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_warned_once_counted_always_and_carried_by_copies(kind):
    p, optimizer, *_ = trained(kind)
    p.grad[0] = float("nan")
    with pytest.warns(RuntimeWarning):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        assert optimizer.skipped_rows == 2
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert other.skipped_rows == 2
            other.param_groups[0]["params"][0].grad = p.grad.clone()
            other.step()
            assert (other.skipped_rows, optimizer.skipped_rows) == (3, 2)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_finite_gradient_with_an_update_that_is_not(kind):
    """geoopt's Lorentz overflows on a long step; the point stays, its neighbour moves."""
    manifold = geoopt.Lorentz()
    p = ManifoldParameter(torch.tensor([[1.5, 1.0, 0.5], [1.5, 1.0, 0.5]]), manifold)
    optimizer = OPTIMIZERS[kind]([p])
    before = p.detach().clone()
    p.grad = torch.tensor([[1e30, 3e30, 1e30], [0.1, 0.2, 0.1]])
    with pytest.warns(RuntimeWarning):
        optimizer.step()
    assert torch.equal(p.detach()[0], before[0]) and not torch.equal(p.detach()[1], before[1])
    assert p.isfinite().all() and optimizer.skipped_rows == 1


def test_large_finite_gradients_are_no_fault():
    """Their sum overflows, which must not be taken for a bad row."""
    p = points(PoincareBall(-1.0), dtype=torch.float32)
    optimizer = OPTIMIZERS["sgd"]([p])
    before = p.detach().clone()
    p.grad = torch.full((6, 4), 3e38)
    optimizer.step()
    assert optimizer.skipped_rows == 0 and (p.detach() != before).all()


def test_points_of_a_batch_with_one_curvature_a_head():
    manifold = PoincareBall(-torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    torch.manual_seed(0)
    p = ManifoldParameter(0.3 * torch.rand(3, 5, 2, dtype=torch.float64), manifold)
    optimizer = OPTIMIZERS["adam"]([p])
    before = p.detach().clone()
    p.grad = torch.ones(3, 5, 2, dtype=torch.float64)
    p.grad[2, 1, 0] = float("nan")
    with pytest.warns(RuntimeWarning):
        optimizer.step()
    assert (p.detach() == before).all(-1).nonzero().tolist() == [[2, 1]]

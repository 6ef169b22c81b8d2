"""ManifoldParameter: construction, copies, files, and behaving like a tensor."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

from horosphere import Euclidean, ManifoldParameter, PoincareBall, Sphere
from horosphere.manifolds import allow_loading
from horosphere.manifolds._geoopt import geoopt
from tests.optim.spaces import LEARNED, SPACES

ALL = {**SPACES, **{f"learned {name}": make for name, make in LEARNED.items()}}


def through_torch_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch file": through_torch_file,
}


class Model(torch.nn.Module):
    """Two parameters that share one learned curvature; the manifold is a submodule or not."""

    def __init__(self, register=True):
        super().__init__()
        manifold = PoincareBall(-1.0, learnable=True)
        if register:
            self.manifold = manifold
        self.a = ManifoldParameter(0.1 * torch.arange(6.0).reshape(3, 2), manifold)
        self.b = ManifoldParameter(torch.zeros(2), manifold)


def test_raw_numbers_are_projected_on_the_manifold():
    p = ManifoldParameter([3.0, 4.0], Sphere())
    assert torch.allclose(p.detach(), torch.tensor([0.6, 0.8]), atol=1e-7)
    assert isinstance(p, geoopt.ManifoldParameter) and isinstance(p, torch.nn.Parameter)
    assert p.requires_grad and p.is_leaf
    assert not ManifoldParameter([3.0, 4.0], Sphere(), requires_grad=False).requires_grad


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        ([[3, 4]], torch.float32),
        (np.array([[3.0, 4.0]]), torch.float64),
        (np.array([[3, 4]], dtype=np.int32), torch.float32),
        (torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16), torch.bfloat16),
        (torch.nn.Parameter(torch.tensor([[3.0, 4.0]])), torch.float32),
    ],
)
def test_what_becomes_a_parameter(data, dtype):
    p = ManifoldParameter(data, PoincareBall(-1.0))
    assert type(p) is ManifoldParameter and p.dtype == dtype and p.shape == (1, 2)
    assert p.detach().double().norm() < 1


def test_the_parameter_owns_its_numbers():
    for manifold in (PoincareBall(-1.0), Euclidean()):  # whose projections may return their input
        data = torch.tensor([[0.1, 0.2]])
        p = ManifoldParameter(data, manifold)
        data.fill_(5.0)
        assert p.detach().norm() < 1
        assert ManifoldParameter(torch.zeros(2).expand(3, 2), manifold).is_contiguous()


@pytest.mark.parametrize(
    ("data", "manifold", "error", "word"),
    [
        ("abc", Sphere(), TypeError, "data"),
        (None, Sphere(), TypeError, "data"),
        ([["a", 1.0]], Sphere(), TypeError, "data"),
        (torch.zeros(2, dtype=torch.complex64), Sphere(), TypeError, "data"),
        ([1.0], "sphere", TypeError, "manifold"),
        ([1.0], None, TypeError, "manifold"),
        (1.0, PoincareBall(-1.0), ValueError, "data of shape"),
        (torch.zeros(3, 2), geoopt.ProductManifold((geoopt.Sphere(), 3)), ValueError, "3"),
        (ManifoldParameter([0.1, 0.2], PoincareBall(-1.0)), Sphere(), ValueError, "already on"),
    ],
)
def test_bad_input_is_named_in_one_line(data, manifold, error, word):
    with pytest.raises(error, match=word):
        ManifoldParameter(data, manifold)


def test_manifold_may_come_with_the_data():
    p = ManifoldParameter([0.1, 0.2], PoincareBall(-1.0))
    assert ManifoldParameter(p).manifold is p.manifold
    assert ManifoldParameter(geoopt.ManifoldTensor(p.detach(), manifold=p.manifold)).manifold is p.manifold


def described(manifold):
    return [(type(m), str(getattr(m, "kappa", None)), str(getattr(m, "scale", None))) for m in manifold.modules()]


@pytest.mark.parametrize("space", ALL)
@pytest.mark.parametrize("how", COPIES)
def test_copies_keep_class_manifold_and_every_bit(space, how):
    manifold = ALL[space]()
    p = ManifoldParameter(manifold.random(3, 4), manifold, requires_grad=False)
    with torch.no_grad():
        p.mul_(7.0)  # off the manifold: projecting again would show
    q = COPIES[how](p)
    assert type(q) is ManifoldParameter and type(q.manifold) is type(manifold)
    assert torch.equal(p, q) and q.dtype == p.dtype and not q.requires_grad
    assert described(q.manifold) == described(manifold)
    assert (q.manifold is manifold) == (how == "copy")


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("register", [True, False])
def test_module_copies_share_their_own_curvature(how, register):
    model = Model(register)
    other = COPIES[how](model)
    kappa = other.a.manifold.kappa
    assert type(other.a) is ManifoldParameter and torch.equal(other.a, model.a)
    assert other.b.manifold is other.a.manifold and other.a.manifold is not model.a.manifold
    if register:
        assert other.manifold is other.a.manifold
    with torch.no_grad():
        kappa.fill_(-3.0)
    assert model.a.manifold.kappa.item() == -1.0 and other.b.manifold.kappa.item() == -3.0


def test_parameters_in_one_file_share_their_curvature():
    model = Model()
    loaded = through_torch_file({"a": model.a, "b": model.b})
    assert loaded["a"].manifold is loaded["b"].manifold
    assert isinstance(loaded["a"].manifold.kappa, torch.nn.Parameter)
    assert loaded["a"].manifold.kappa.item() == -1.0


def test_a_manifold_class_of_the_user_loads_once_allowed():
    p = ManifoldParameter([0.1, 0.2], OwnBall(-1.0))
    with pytest.raises(pickle.UnpicklingError, match="OwnBall"):
        through_torch_file(p)
    assert allow_loading(OwnBall) is OwnBall
    assert type(through_torch_file(p).manifold) is OwnBall


class OwnBall(PoincareBall):
    pass


def test_state_dict_round_trip():
    model, other = Model(), Model()
    with torch.no_grad():
        model.a.add_(0.01)
        model.manifold.kappa.fill_(-0.5)
    other.load_state_dict(through_torch_file(model.state_dict()))
    assert torch.equal(other.a, model.a) and type(other.a) is ManifoldParameter
    assert other.a.manifold.kappa.item() == -0.5
    assert all(type(v) is torch.Tensor for v in model.state_dict().values())


def test_module_dtype_follows():
    model = Model()
    for move, dtype in [(model.double, torch.float64), (model.float, torch.float32)]:
        move()
        assert type(model.a) is ManifoldParameter and model.a.dtype == dtype
        assert model.manifold.kappa.dtype == dtype and model.a.manifold is model.manifold
    model.to(torch.float64)
    assert model.a.dtype == torch.float64 and type(model.a) is ManifoldParameter


def test_works_like_a_tensor():
    p = ManifoldParameter([[0.1, 0.2], [0.3, 0.4]], PoincareBall(-1.0))
    for value in (p + p, torch.stack([p, p]), p.double(), p.clone(), p.mean(), p[0], p.detach(), p.data):
        assert type(value) is torch.Tensor
    assert torch.equal((p + p).detach(), 2 * p.detach())
    assert p.float() is p
    assert len({p, p, ManifoldParameter(p)}) == 2
    assert "PoincareBall" in repr(p)
    p.sum().backward()
    assert torch.equal(p.grad, torch.ones(2, 2))
    before = p.detach().clone()
    torch.optim.Adam([p], lr=0.1).step()
    assert torch.allclose(p.detach(), before - 0.1, atol=1e-6)


def test_geoopts_own_optimizers_accept_it():
    p = ManifoldParameter([[3.0, 4.0]], geoopt.Sphere())
    optimizer = geoopt.optim.RiemannianSGD([p], lr=0.1)
    p[0, 0].backward()
    optimizer.step()
    assert p.detach().norm().item() == pytest.approx(1, abs=1e-6)
    assert p[0, 0].item() < 0.6

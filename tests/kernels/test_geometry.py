"""A kind of distance is one class: city-block distances, registered, go through the operators by tiles and plainly."""

import pytest
import torch
from torch import Tensor

from horosphere.kernels import dispatch, geometry, operators
from horosphere.kernels.reference.attention import averaged
from horosphere.kernels.tiled.scores import Group, Scores
from horosphere.kernels.tiled.workspace import Workspace


class CityBlock(geometry.Geometry):
    r""":math:`d(x, y) = \sum_k |x_k - y_k|` of points (B, N, D) and (B, M, D)."""

    family, picks = "city_", False

    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = x, y
        self.batch, self.dtype, self.device = x.shape[:-2], x.dtype, x.device
        self.n, self.m, self.looks = x.shape[-2], y.shape[-2], {"features": x.shape[-1]}

    @classmethod
    def of(cls, tensors, layout):
        return cls(*tensors)

    def packed(self):
        return geometry.Packed([self.x, self.y], "city", "")

    def plain_sqdist(self, squared, resolve):
        d = (self.x.unsqueeze(-2) - self.y.unsqueeze(-3)).abs().sum(-1)
        return d**2 if squared else d, None

    def plain_attention(self, inputs, resolve):
        return averaged(self.plain_sqdist(True, resolve)[0], inputs)

    def sqdist(self, form, squared, resolve):
        out = torch.cdist(self.x, self.y, p=1)
        return out**2 if squared else out, out.new_empty(0, dtype=torch.int64)

    def sqdist_backward(self, form, grad, squared, resolve, curvature):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (self.x, self.y)]
            return list(torch.autograd.grad(CityBlock(*leaves).plain_sqdist(squared, resolve)[0], leaves, grad))

    def scores(self, batch, dtype, resolve, curvature):
        return CityScores(self, dtype)

    def pointers(self, batch, dtype, resolve, curvature):
        raise NotImplementedError


class CityScores(Scores):
    tensors = 1

    def __init__(self, points: CityBlock, dtype: torch.dtype):
        self.points, self.dtype, self.device = points, dtype, points.device
        self.batch, self.n, self.m = points.batch, points.n, points.m
        self.workspace, self.signs = Workspace(dtype, self.device), [0] * points.batch.numel()

    def group(self, e, shift):
        return CityGroup(self, e, shift)

    def prepare_gradients(self):
        self.dx, self.dy = torch.zeros_like(self.points.x), torch.zeros_like(self.points.y)

    def gradients(self):
        self.workspace.back()
        return [self.dx, self.dy]


class CityGroup(Group):
    def __init__(self, scores: CityScores, e: slice, shift: Tensor):
        self.scores, self.e, self.shift = scores, e, shift.to(scores.dtype)[:, None, None]
        self.dx, self.dy = (torch.zeros_like(t[e]) for t in (scores.points.x, scores.points.y))

    def extent(self):
        return float((self.scores.points.x.abs().sum(-1).amax() + self.scores.points.y.abs().sum(-1).amax()) ** 2)

    def _differences(self, i, j):
        return self.scores.points.x[self.e, i].unsqueeze(-2) - self.scores.points.y[self.e, j].unsqueeze(-3)

    def tile(self, i, j, buffers, keep):
        d = self._differences(i, j).abs().sum(-1)
        return buffers.tile(0, *d.shape)[0].copy_(d**2 + self.shift)

    def backward(self, i, j, g):
        difference = self._differences(i, j)
        each = (2 * g * difference.abs().sum(-1)).unsqueeze(-1) * difference.sign()
        self.dx[:, i] += each.sum(-2)
        self.dy[:, j] -= each.sum(-3)

    def rows_done(self, i, scale):
        pass

    def finish(self, scale):
        scale = scale.to(self.dx.dtype)[:, None, None]
        self.scores.dx[self.e] += self.dx * scale
        self.scores.dy[self.e] += self.dy * scale


@pytest.fixture
def city(monkeypatch):
    monkeypatch.setitem(geometry.KINDS, "city", CityBlock)
    forms = {"tiled": dispatch.Entry(lambda call: None), "reference": dispatch.Entry(lambda call: None)}
    for operation in ("city_sqdist", "city_attention"):
        monkeypatch.setitem(dispatch.TABLE, operation, forms)


@pytest.mark.parametrize("squared", [False, True])
def test_distances_of_a_kind_of_ones_own(city, squared):
    torch.manual_seed(0)
    leaves = [torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 7)]
    found = []
    for impl in ("tiled", "reference"):
        out, picked = operators.sqdist(CityBlock(*leaves), squared=squared, resolve=True, impl=impl)
        assert picked is None
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    torch.testing.assert_close(*found)


def test_attention_by_a_distance_of_ones_own(city):
    torch.manual_seed(0)
    points = [torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True) for n in (300, 400)]
    value = torch.randn(2, 400, 4, dtype=torch.float64, requires_grad=True)
    eps, power = (torch.tensor([a, b], dtype=torch.float64, requires_grad=True) for a, b in ((0.1, 0.3), (1.0, 2.0)))
    leaves = [*points, value, eps, power]
    found = []
    for impl in ("tiled", "reference"):
        out, lse = operators.attention(CityBlock(*points), value, eps=eps, power=power, causal=100, impl=impl)
        found.append([out, lse, *torch.autograd.grad((out * out.detach().cos()).sum() + lse.sum(), leaves)])
    torch.testing.assert_close(*found)


def test_a_half_made_kind_is_refused():
    class Half(geometry.Geometry):
        def packed(self):
            return geometry.Packed([], "half", "")

    with pytest.raises(TypeError, match="abstract"):
        Half()

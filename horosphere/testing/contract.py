"""ManifoldContract: what a manifold must satisfy, whatever it is, as pytest tests derived from one method."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from torch import Tensor

from horosphere.attention.functional import geodesic_attention
from horosphere.manifolds import hooks
from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve
from horosphere.manifolds.config import manifold_config, manifold_from_config
from horosphere.manifolds.pairwise import cdist, knn
from horosphere.testing._checks import (
    assert_finite,
    assert_on,
    assert_shape,
    assert_type,
    require_chord,
    require_vectors,
    required,
)

_each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
_POINTS = 12


def _normal(shape: torch.Size, seed: int) -> Tensor:
    """The same float64 normal numbers for one seed, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


class ManifoldContract:
    """Inherit, say how the manifold is made, and pytest runs every law on it in float32 and float64.

    .. code-block:: python

        class TestMyManifold(hs.testing.ManifoldContract):
            size = 3                                  # numbers that store one point

            def make_manifold(self):
                return MyManifold()

    Only :meth:`make_manifold` must be given. A law about an optional method (logmap, transp, random, a chord) that the
    manifold does not have is skipped with that reason. Errors are measured in the manifold's own distance and
    norm, as a share of 1 + the size of what is compared.

    Attributes:
        size: stored numbers of a point; for a product its ``n_elements``, else 4.
        tolerances: law -> (float32, float64); override entries with ``{**ManifoldContract.tolerances, "exp": (...,
        ...)}``.
    """

    size: int | None = None
    tolerances = {  # noqa: RUF012 - read only; a subclass replaces it
        "diagonal": (0.0, 0.0),
        "symmetry": (2e-6, 1e-13),
        "triangle": (1e-5, 1e-12),
        "exp": (1e-5, 1e-12),
        "log": (1e-4, 1e-11),
        "project": (1e-6, 1e-14),
        "transport": (1e-4, 1e-11),
        "gradient": (1e-5, 1e-12),
        "fast": (1e-3, 1e-11),
        "pairwise": (2e-5, 2e-12),
        "cast": (2e-6, 2e-6),
        # the height of a lifted point is a difference: e^(2 r) roundings at radius r, 3e3 of them at r = 4
        "lift": (2e-4, 1e-12),
        "polar": (1e-4, 1e-11),
    }

    def make_manifold(self) -> geoopt.Manifold:
        raise NotImplementedError("a ManifoldContract says in make_manifold() which manifold it tests")

    def sample(self, n: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """n points (n, size) to test at, by default ``manifold.random``; take all randomness from ``generator``."""
        manifold = self.make_manifold()
        seed = int(torch.randint(2**31, (), generator=generator, device="cpu"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return required(manifold.random, n, self._size(manifold), dtype=dtype).as_subclass(Tensor)

    # what the laws are made of

    def _size(self, manifold) -> int:
        return self.size or getattr(manifold, "n_elements", None) or 4

    def _points(self, dtype: torch.dtype, count: int = 2, n: int = _POINTS) -> tuple:
        """The manifold and ``count`` batches of points."""
        generator = torch.Generator().manual_seed(7)
        return self.make_manifold(), *(self.sample(n, dtype, generator) for _ in range(count))

    def _tangent(self, manifold, x: Tensor, seed: int = 0, length: float | None = None) -> Tensor:
        """A random tangent vector at each x, of the given Riemannian length."""
        noise = torch.randn(
            x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu"
        ).to(x.dtype)
        with torch.no_grad():
            u = manifold.proju(x, noise)
            return u if length is None else manifold.proju(x, u * (length / manifold.norm(x, u, keepdim=True)))

    def _tolerance(self, law: str, dtype: torch.dtype) -> float:
        return self.tolerances[law][0 if dtype == torch.float32 else 1]

    def _assert_small(self, law: str, error: Tensor, size: Tensor | float = 0.0):
        share = (error / (1 + torch.as_tensor(size, device=error.device).abs())).detach()
        limit = self._tolerance(law, error.dtype)
        assert bool(share.isfinite().all()) and float(share.max()) <= limit, (
            f"error {float(share.max()):.3g} at point {int(share.argmax())}, tolerance {limit:.1g} ({law})"
        )

    def _assert_same_point(self, law: str, manifold, a: Tensor, b: Tensor, size: Tensor | float = 0.0):
        assert_type(f"a point ({law})", a, b.dtype)
        self._assert_small(law, manifold.dist(a, b), size)

    def _assert_same_vector(self, law: str, manifold, x: Tensor, a: Tensor, b: Tensor):
        assert_type(f"a vector ({law})", a, b.dtype)
        self._assert_small(law, manifold.norm(x, manifold.proju(x, a - b)), manifold.norm(x, b))

    # distance

    @_each_dtype
    def test_distance_is_zero_on_the_diagonal(self, dtype):
        manifold, x = self._points(dtype, 1)
        self._assert_small("diagonal", manifold.dist(x, x.clone()))
        self._assert_small("diagonal", manifold.dist2(x, x.clone()))

    @_each_dtype
    def test_distance_is_positive_and_symmetric(self, dtype):
        manifold, x, y = self._points(dtype)
        there, back = manifold.dist(x, y), manifold.dist(y, x)
        assert_type("dist", there, dtype)
        assert_shape("dist(x, y)", there, x.shape[:-1])
        assert (there > 0).all(), f"the distance of different points is > 0, got {float(there.min()):.3g}"
        self._assert_small("symmetry", (there - back).abs(), there)
        kept = manifold.dist(x, y, keepdim=True)
        assert_shape("dist(x, y, keepdim=True)", kept, there.unsqueeze(-1).shape)
        assert torch.equal(kept, there.unsqueeze(-1)), "dist(x, y, keepdim=True) has other values than dist(x, y)"
        torch.testing.assert_close(manifold.dist2(x, y), there**2)
        assert_shape("dist(x[:, None], y), which broadcasts,", manifold.dist(x[:, None], y), (len(x), len(y)))

    @_each_dtype
    def test_triangle_inequality(self, dtype):
        manifold, x, y, z = self._points(dtype, 3)
        direct = manifold.dist(x[:, None], z)[:, None]
        detour = manifold.dist(x[:, None], y)[:, :, None] + manifold.dist(y[:, None], z)
        self._assert_small("triangle", (direct - detour).clamp(min=0.0), direct)

    @_each_dtype
    def test_gradient_of_the_distance_is_finite_at_coincident_points(self, dtype):
        manifold, x = self._points(dtype, 1)
        for distance in (manifold.dist, manifold.dist2):
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            for grad in torch.autograd.grad(distance(a, b).sum(), (a, b)):
                assert_finite("the gradient of the distance of a point from itself", grad)
                assert grad.abs().max() <= 1e-3, "the gradient of a distance at its minimum is 0"

    # exponential and logarithm

    @_each_dtype
    def test_exp_undoes_log(self, dtype):
        manifold, x, y = self._points(dtype)
        u = required(manifold.logmap, x, y)
        self._assert_same_point("exp", manifold, manifold.expmap(x, u), y, manifold.dist(x, y))

    @_each_dtype
    @pytest.mark.parametrize("length", [1e-3, 0.5])
    def test_log_undoes_exp(self, dtype, length):
        manifold, x = self._points(dtype, 1)
        u = self._tangent(manifold, x, length=length)
        self._assert_same_vector("log", manifold, x, required(manifold.logmap, x, manifold.expmap(x, u)), u)

    @_each_dtype
    def test_length_of_log_is_the_distance(self, dtype):
        manifold, x, y = self._points(dtype)
        d = manifold.dist(x, y)
        self._assert_small("log", (manifold.norm(x, required(manifold.logmap, x, y)) - d).abs(), d)

    @_each_dtype
    def test_exp_travels_the_length_of_the_vector(self, dtype):
        manifold, x = self._points(dtype, 1)
        for t in (1e-3, 0.1, 0.5):
            u = self._tangent(manifold, x, length=t)
            self._assert_small("exp", (manifold.dist(manifold.expmap(x, u), x) - t).abs())

    @_each_dtype
    def test_exp_and_log_at_zero(self, dtype):
        manifold, x = self._points(dtype, 1)
        a, u = x.clone().requires_grad_(), torch.zeros_like(x).requires_grad_()
        out = manifold.expmap(a, u)
        self._assert_same_point("project", manifold, out, x)
        for grad in torch.autograd.grad(out.sum(), (a, u)):
            assert grad.isfinite().all(), "the gradient of exp at the zero vector is not finite"
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        out = required(manifold.logmap, a, b)
        longest = float(out.detach().abs().max())
        assert longest <= self._tolerance("project", dtype), f"the log of a point at itself is 0, got {longest:.3g}"
        for grad in torch.autograd.grad(out.sum(), (a, b)):
            assert grad.isfinite().all(), "the gradient of log at the point itself is not finite"

    def test_retraction_agrees_with_exp_to_second_order(self):
        manifold, x = self._points(torch.float64, 1)
        gaps = []
        for t in (2e-3, 1e-3):
            u = self._tangent(manifold, x, length=t)
            gaps.append(manifold.dist(manifold.retr(x, u), manifold.expmap(x, u)))
        assert gaps[0].max() <= 1e-4, "a retraction moves along its vector"
        assert (gaps[1] <= gaps[0] / 3 + 1e-10).all(), "halving the step must quarter the difference"

    # projections, transport, gradient

    @_each_dtype
    def test_projection_of_points(self, dtype):
        manifold, x = self._points(dtype, 1)
        noise = 3 * torch.randn(
            x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64, device="cpu"
        ).to(dtype)
        once = manifold.projx(noise)
        assert_type("projx", once, dtype)
        assert_on(manifold, once)
        torch.testing.assert_close(manifold.projx(once), once, rtol=self._tolerance("project", dtype), atol=0.0)
        torch.testing.assert_close(manifold.projx(x), x, rtol=self._tolerance("project", dtype), atol=1e-30)

    @_each_dtype
    def test_projection_of_vectors(self, dtype):
        manifold, x = self._points(dtype, 1)
        u = self._tangent(manifold, x)
        good, reason = manifold.check_vector_on_tangent(x, u, explain=True)
        assert good, f"a vector that proju made is none of the tangent space: {reason}"
        self._assert_same_vector("project", manifold, x, manifold.proju(x, u), u)

    @_each_dtype
    def test_transport_is_an_isometry(self, dtype):
        manifold, x, y = self._points(dtype)
        u, v = self._tangent(manifold, x, 1), self._tangent(manifold, x, 2)
        moved_u, moved_v = (required(manifold.transp, x, y, w) for w in (u, v))
        size = manifold.norm(x, u) * manifold.norm(x, v)
        self._assert_small("transport", (manifold.inner(y, moved_u, moved_v) - manifold.inner(x, u, v)).abs(), size)
        self._assert_small("transport", (manifold.norm(y, moved_u) - manifold.norm(x, u)).abs(), manifold.norm(x, u))

    @_each_dtype
    def test_transport_turns_the_geodesic_round(self, dtype):
        manifold, x, y = self._points(dtype)
        there, back = required(manifold.logmap, x, y), manifold.logmap(y, x)
        self._assert_same_vector("transport", manifold, y, required(manifold.transp, x, y, there), -back)

    @_each_dtype
    def test_transport_to_the_same_point_changes_nothing(self, dtype):
        manifold, x = self._points(dtype, 1)
        v = self._tangent(manifold, x)
        self._assert_same_vector("project", manifold, x, required(manifold.transp, x, x.clone(), v), v)

    @_each_dtype
    def test_riemannian_gradient_represents_the_differential(self, dtype):
        manifold, x = self._points(dtype, 1)
        egrad = _normal(x.shape, 3).to(dtype)
        v = self._tangent(manifold, x, 4)
        gradient = manifold.egrad2rgrad(x, egrad)
        size = manifold.norm(x, gradient) * manifold.norm(x, v)
        self._assert_small("gradient", (manifold.inner(x, gradient, v) - (egrad * v).sum(-1)).abs(), size)

    # points and copies

    @_each_dtype
    def test_random_and_origin_are_on_the_manifold(self, dtype):
        manifold, x = self._points(dtype, 1)
        size = self._size(manifold)
        drawn = required(manifold.random, 2, 5, size, dtype=dtype)
        origin = required(manifold.origin, 3, size, dtype=dtype)
        for name, made, shape in (("random", drawn, (2, 5, size)), ("origin", origin, (3, size))):
            assert_type(f"{name}(*size, dtype={dtype})", made, dtype)
            assert_shape(f"{name}{shape}", made, shape)
        for points in (x, drawn, origin):
            assert_on(manifold, points)
        assert manifold.dist(drawn[0], drawn[1]).min() > 0, "random gave the same point twice"

    def test_copies_keep_the_distance(self):
        manifold, x, y = self._points(torch.float64)
        d = manifold.dist(x, y)
        for twin in (copy.deepcopy(manifold), pickle.loads(pickle.dumps(manifold))):
            assert type(twin) is type(manifold), f"a copy is a {type(twin).__name__}"
            assert torch.equal(twin.dist(x, y), d), "a copy has other distances"
            theirs = {p.data_ptr() for p in twin.parameters()}
            assert theirs.isdisjoint(p.data_ptr() for p in manifold.parameters()), "a copy shares its parameters"

    def test_config_round_trip(self):
        manifold, x, y = self._points(torch.float64)
        try:
            config = manifold_config(manifold)
        except TypeError as error:
            pytest.skip(str(error))
        twin = manifold_from_config(json.loads(json.dumps(config)))
        assert type(twin) is type(manifold), f"from_config made a {type(twin).__name__}"
        assert manifold_config(twin) == config, f"the config is {config}, and after from_config {manifold_config(twin)}"
        counts = [len(list(m.parameters())) for m in (manifold, twin)]
        assert counts[0] == counts[1], f"of {counts[0]} parameters from_config kept {counts[1]}"
        assert torch.equal(twin.dist(x, y), manifold.dist(x, y)), "from_config made other distances"

    @_each_dtype
    def test_cast(self, dtype):
        manifold, x, y = self._points(dtype)
        d = manifold.dist(x, y).detach()
        for target in (torch.float64, torch.float32):
            manifold = manifold.to(target)
            for parameter in manifold.parameters():
                assert_type(f"a parameter after .to({target})", parameter, target)
            found = manifold.dist(x, y)
            assert_type("the distance of points of another type than the manifold's parameters", found, dtype)
            self._assert_small("cast", (found - d).abs(), d)

    # derivatives

    @pytest.mark.parametrize("function", ["dist", "dist2", "expmap", "logmap"])
    def test_derivatives(self, function):
        manifold, x, y = self._points(torch.float64, n=2)
        second = self._tangent(manifold, x, length=0.3) if function == "expmap" else y
        self._gradcheck(lambda a, b: required(getattr(manifold, function), a, b), manifold, x, second)

    def test_derivatives_of_cdist(self):
        manifold, x, y = self._points(torch.float64, n=2)
        require_chord(manifold)
        for precision in ("auto", "exact"):
            self._gradcheck(lambda a, b, p=precision: cdist(a, b, manifold, precision=p), manifold, x, y)

    def _gradcheck(self, function, manifold, x: Tensor, y: Tensor):
        candidates = (x.clone().requires_grad_(), y.clone().requires_grad_(), *manifold.parameters())
        inputs = [t for t in candidates if t.dtype == torch.float64]
        # raises where a derivative is wrong, and says which
        torch.autograd.gradcheck(lambda a, b, *_: function(a, b), inputs, rtol=1e-5, atol=1e-6)

    # optional methods (horosphere.manifolds.hooks), the defaults included

    @_each_dtype
    def test_sizes_fit_the_points(self, dtype):
        manifold, x = self._points(dtype, 1)
        require_vectors(manifold)
        size = x.shape[-1]
        dimension = hooks.intrinsic_dim(manifold, size)
        assert dimension > 0, f"ambient_dim leaves points of {size} numbers {dimension} dimensions"
        stored = hooks.ambient_dim(manifold, dimension)
        assert stored == size, f"ambient_dim({dimension}) is {stored} for points of {size} numbers"
        lifted = required(hooks.lift, manifold, x)
        assert_shape("lift(x), whose size lifted_size says,", lifted, (len(x), hooks.lifted_size(manifold, size)))
        free = hooks.free_size(manifold, size)
        stored = hooks.size_from_vectors(manifold, free)
        assert stored == size, f"size_from_vectors({free}) is {stored} for points of {size} numbers"

    @_each_dtype
    def test_lifted_points_settle_where_they_were(self, dtype):
        manifold, x = self._points(dtype, 1)
        require_vectors(manifold)
        lifted = required(hooks.lift, manifold, x)
        settled = hooks.settle(manifold, lifted, x.shape[-1])
        assert_type("settle", settled, dtype)
        self._assert_same_point("lift", manifold, settled, x)

    @_each_dtype
    def test_settled_means_are_points(self, dtype):
        manifold, x = self._points(dtype, 1)
        require_vectors(manifold)
        lifted = required(hooks.lift, manifold, x)
        assert_on(manifold, hooks.settle(manifold, lifted.mean(0), x.shape[-1]))

    @_each_dtype
    @pytest.mark.parametrize("count", [1, _POINTS], ids=["one", "equal"])
    def test_gradient_of_a_settled_mean_is_finite_at_coincident_points(self, dtype, count):
        manifold, x = self._points(dtype, 1)
        require_vectors(manifold)
        points = x.unsqueeze(-2).repeat(1, count, 1).requires_grad_()
        weights = torch.full((len(x), 1, count), 1 / count, dtype=dtype, device=x.device, requires_grad=True)
        settled = hooks.settle(manifold, weights @ required(hooks.lift, manifold, points), x.shape[-1])
        numbers = _normal(settled.shape, 6).to(settled)
        for what, grad in zip(
            ("weights", "points"), torch.autograd.grad((numbers * settled).sum(), (weights, points)), strict=True
        ):
            assert_finite(f"the gradient of settle(mean of lift) in the {what} of {count} equal points", grad)

    @_each_dtype
    def test_points_from_free_vectors(self, dtype):
        manifold, x = self._points(dtype, 1)
        require_vectors(manifold)
        n = hooks.free_size(manifold, x.shape[-1])
        generator = torch.Generator().manual_seed(5)
        free = torch.randn(7, n, generator=generator, dtype=torch.float64, device="cpu").to(dtype)
        free[0] = 0.0
        free.requires_grad_()
        points = hooks.from_vectors(manifold, free, 4.0)
        assert_type("from_vectors", points, dtype)
        assert_shape(f"from_vectors of {n} free numbers", points, (7, x.shape[-1]))
        assert_on(manifold, points.detach())
        (grad,) = torch.autograd.grad(points.sum(), free)
        assert_finite("the gradient of from_vectors", grad[1:])

    def test_rotary_slices_cover_the_free_numbers(self):
        manifold, x = self._points(torch.float64, 1)
        require_vectors(manifold)
        n = hooks.free_size(manifold, x.shape[-1])
        slices = hooks.rotary_slices(manifold, n)
        covered = [i for s in slices for i in range(s.start, s.stop)]
        assert covered == list(range(n)), f"rotary_slices({n}) must cover 0 to {n - 1} once, in order: got {slices}"

    @_each_dtype
    def test_direction_and_radius_say_the_point(self, dtype):
        manifold, x = self._points(dtype, 1)
        require_vectors(manifold)
        vector, radius = required(hooks.to_polar, manifold, x)
        assert_type("the radius of to_polar", radius, torch.float64)
        assert_shape("the radius of to_polar", radius, (len(x), 1))
        wanted = (len(x), hooks.direction_dim(manifold, x.shape[-1]))
        assert_shape("the vector of to_polar, whose size direction_dim says,", vector, wanted)
        unit = vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        again = hooks.from_polar(manifold, unit, radius)
        assert_type("from_polar", again, dtype)
        self._assert_same_point("polar", manifold, again, x, radius[:, 0])

    def test_picture_is_one_that_can_be_drawn(self):
        manifold, x = self._points(torch.float64, 1)
        kind = hooks.picture(manifold)  # an error that says why where it is another word, or kappa is missing
        if kind in ("ball", "hyperboloid"):
            kappa = torch.as_tensor(resolve(manifold)[0].kappa, device=x.device).detach()
            assert bool((kappa < 0).all()), f"the picture {kind!r} is of kappa < 0, got kappa = {kappa.tolist()}"
        elif kind == "tangent":
            start = hooks.origin(manifold, *x.shape, dtype=x.dtype, device=x.device)
            required(hooks.log, manifold, start, x, "a picture by logarithms")

    # the pairwise engine

    @_each_dtype
    def test_chord_is_consistent_with_distance(self, dtype):
        manifold, x, y = self._points(dtype)
        require_chord(manifold)
        true = manifold.dist2(x[:, None], y)
        self._assert_small("fast", (cdist(x, y, manifold, squared=True, precision="fast") - true).abs(), true)

    @_each_dtype
    @pytest.mark.parametrize("precision", ["auto", "exact"])
    def test_cdist_and_knn_are_consistent_with_distance(self, dtype, precision):
        manifold, x, y = self._points(dtype)
        near = manifold.expmap(x, self._tangent(manifold, x, length=1e-3))
        y = torch.cat((y, near, x))
        true = manifold.dist(x[:, None], y)
        found = cdist(x, y, manifold, precision=precision)
        assert_type("cdist", found, dtype)
        self._assert_small("pairwise", (found - true).abs(), true)
        ours = knn(x, y, manifold, 5, precision=precision)
        nearest = true.sort(dim=-1).values[:, :5]
        self._assert_small("pairwise", (ours.distances - nearest).abs(), nearest)
        chosen = torch.gather(true, -1, ours.indices)
        self._assert_small("pairwise", (ours.distances - chosen).abs(), chosen)

    @_each_dtype
    def test_gradient_of_learned_numbers_through_attention_is_finite(self, dtype):
        manifold, x = self._points(dtype, 1, n=40)
        require_vectors(manifold)
        learned = {name: p for name, p in manifold.named_parameters() if p.requires_grad}
        if not learned:
            pytest.skip(f"{type(manifold).__name__} learns no number")
        x = x.clone().requires_grad_()
        out = geodesic_attention(x, x, x, manifold)  # with every point at distance 0 from itself
        numbers = list(learned.values())
        grads = torch.autograd.grad((_normal(out.shape, 8).to(out) * out).sum(), numbers, allow_unused=True)
        for name, grad in zip(learned, grads, strict=True):
            assert grad is not None, f"attention has no gradient in the learned {name}: dist does not read it live"
            assert_finite(f"the gradient of attention over {len(x)} points in the learned {name}", grad)

"""Row 82: torch.compile(fullgraph=True) of the maps and distances, forward and backward, in one graph each."""

import pytest
import torch

import horosphere as hs

F64 = torch.float64


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Model(torch.nn.Module):
    """A manifold parameter and a learnable curvature."""

    def __init__(self):
        super().__init__()
        self.manifold = hs.PoincareBall(-0.8, learnable=True)
        points = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=F64) * 0.2
        self.points = hs.manifolds.ManifoldParameter(points, manifold=self.manifold)

    def forward(self, u):
        return hs.cdist(self.manifold.expmap0(u), self.points, self.manifold, precision="exact")


@pytest.mark.parametrize("name", ("ball", "sphere", "hyperboloid"))
def test_82_maps_and_distances_trace_to_one_graph(name):
    """Traced only: the module below goes through code generation and derivatives."""
    manifold = {"ball": lambda: hs.PoincareBall(-0.7), "sphere": hs.Sphere, "hyperboloid": hs.Lorentz}[name]()
    generator = torch.Generator().manual_seed(0)
    x, y = (manifold.projx(torch.randn(4, 3, generator=generator, dtype=F64) * 0.3).detach() for _ in range(2))
    y[0] = x[0]

    def everything(a, b):
        return (
            manifold.dist(a, b),
            manifold.expmap(a, manifold.logmap(a, b)),
            hs.cdist(a, b, manifold, precision="fast"),
        )

    found = torch.compile(everything, fullgraph=True, backend="eager")(x, y)
    for a, b in zip(found, everything(x, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method.*:DeprecationWarning"
)  # of the code generator's own import
def test_82_compiled_code():
    """Over 20 s on a busy machine, all of it code generation: one module that has every kind of operation."""
    model = Model()
    compiled = torch.compile(model, fullgraph=True)
    u = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=F64, requires_grad=True)
    inputs = (u, *model.parameters())
    assert len(inputs) == 3
    out, expected = compiled(u), model(u)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    found = torch.autograd.grad(out.sum(), inputs)
    for a, b in zip(found, torch.autograd.grad(expected.sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)

"""The table of docs/add_a_manifold.md: each feature runs with the methods named there, and not without one of them."""

import re
from pathlib import Path

import pytest
import torch

import horosphere as hs
from horosphere.embedding import GraphEmbedding
from horosphere.manifolds._geoopt import geoopt

PAGE = (Path(__file__).parents[1] / "docs" / "add_a_manifold.md").read_text()
EIGHT = ("inner", "projx", "proju", "egrad2rgrad", "expmap", "retr")
EIGHT += ("_check_point_on_manifold", "_check_vector_on_tangent")
RING = [(i, (i + 1) % 6) for i in range(6)]


def torus(*more):
    """A torus with geoopt's eight methods and those that are named."""
    found: dict = {}
    exec(next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class Torus(" in block), found)
    methods = {name: vars(found["Torus"])[name] for name in (*EIGHT, *more)}
    return type("Bare", (geoopt.Manifold,), {"name": "Bare", "ndim": 1, "reversible": False, **methods})()


def points(*size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)


def layer(m, pattern, **sizes):
    x = points(1, 12, 8)
    attention = hs.attention.GeodesicAttention(8, 2, manifold=m, pattern=pattern, **sizes)
    attention(x, x, x, is_causal=True, need_weights=False)[0].sum().backward()
    with torch.no_grad():
        attention(x, x, x, cache=attention.new_cache(), need_weights=False)


def optimize(m, optimizer, **settings):
    p = hs.ManifoldParameter(points(5, 2), m)
    run = optimizer([p], lr=0.01, **settings)
    p.square().sum().backward()
    run.step()


def compress(m):
    code = hs.memory.HyperbolicCompressor(bits=4, radius_bits=6, manifold=m)
    code.decode(code.encode(points(1, 1, 20, 4)))


def fitted(m, **settings):
    return GraphEmbedding(m, 2, n_epochs=2, random_state=0, **settings).fit(RING)


def attend(m, **named):
    hs.attention.geodesic_attention(points(1, 9, 4), points(1, 9, 4), points(1, 9, 4), m, eps=0.01, **named)


def write(m):
    pool = hs.memory.DynamicMemory(2, 1, 4, m, window=3)
    pool.write(points(20, 2), points(20, 1), points(20, 1)[:, 0])
    return pool


def read(m):
    pool = write(torus("dist", "logmap"))
    pool.manifold = m
    pool.read(points(5, 2))


def experts(m):
    hs.routing.ExpertLayer(dim=4, experts=[torch.nn.Linear(4, 4)] * 2, top_k=1, manifold=m)(points(1, 5, 4))


FEATURES = {
    "cdist": (("dist",), lambda m: hs.cdist(points(5, 2), points(4, 2), m)),
    "knn": (("dist",), lambda m: hs.knn(points(5, 2), points(4, 2), m, k=2)),
    "geodesic_attention": (("dist",), attend),
    "dense": (("dist",), lambda m: layer(m, "dense")),
    "fixed": (("dist",), lambda m: layer(m, "fixed", n_max=32)),
    "landmark": (("dist",), lambda m: layer(m, "landmark", landmarks=4)),
    "GeodesicRouter": (("dist",), lambda m: hs.routing.GeodesicRouter(2, 4, top_k=1, manifold=m)(points(5, 2))),
    "ExpertLayer": (("dist",), experts),
    "ranking": (("dist",), lambda m: fitted(m).score(RING)),
    "distortion": (("dist",), lambda m: fitted(m, loss="distortion").kneighbors(0, 2)),
    "partial_fit": (("dist", "logmap"), lambda m: fitted(m).partial_fit([(9, 0)])),
    "plot": (("dist", "logmap"), lambda m: fitted(m).plot()),
    "frechet_mean": (("logmap",), lambda m: hs.frechet_mean(points(5, 2), m)),
    "weight is 0": (("dist", "logmap"), lambda m: hs.frechet_mean(points(3, 2), m, torch.tensor([0.0, 1.0, 2.0]))),
    "midpoint": (("logmap",), lambda m: hs.midpoint(points(5, 2), m)),
    "value_manifold": (("dist", "logmap"), lambda m: attend(m, value_manifold=m)),
    "summary": (("dist", "logmap"), lambda m: layer(m, "summary", slots=4)),
    "read": (("dist",), read),
    "write": (("dist", "logmap"), write),
    "HyperbolicCompressor": (("logmap",), compress),
    "RiemannianSGD": ((), lambda m: optimize(m, hs.optim.RiemannianSGD)),
    "momentum": ((), lambda m: optimize(m, hs.optim.RiemannianSGD, momentum=0.9)),
    "RiemannianAdam": ((), lambda m: optimize(m, hs.optim.RiemannianAdam)),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features_need_what_the_table_says(feature):
    assert feature in PAGE
    needed, use = FEATURES[feature]
    torch.manual_seed(0)
    use(torus(*needed))
    for missing in needed:
        with pytest.raises(NotImplementedError):
            use(torus(*(name for name in needed if name != missing)))

"""What geodesic_attention computes and what its arguments mean, beside torch's own operator and mpmath."""

from __future__ import annotations

import mpmath
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

import horosphere as hs
from horosphere.attention import attention_weights, geodesic_attention, merge
from tests.manifolds import oracle

SPACES = {
    "flat": lambda **kw: hs.Euclidean(),
    "ball": lambda **kw: hs.PoincareBall(-1.0, **kw),
    "sphere": lambda **kw: hs.Sphere(0.5, **kw),
    "hyperboloid": lambda **kw: hs.Lorentz(-2.0, **kw),
    "stereographic": lambda **kw: hs.Stereographic(0.3, **kw),
    "product": lambda **kw: hs.Product((hs.PoincareBall(-1.0, **kw), 2), (hs.Sphere(1.0, **kw), 3)),
    "scaled": lambda **kw: hs.Scaled(hs.PoincareBall(-1.0, **kw), 2.0),
}
SIZE = 5


def points(manifold, *shape, seed=0, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        x = manifold.random(*shape, SIZE, dtype=torch.float64).detach().as_subclass(torch.Tensor)
        x = x * 0.7 if isinstance(manifold, hs.Stereographic) else x
        return x.to(dtype)


def values(*shape, seed=9, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("weight, power", (("inverse", 1.0), ("inverse", 2.5), ("softmax", 1.5), ("gaussian", 0.7)))
def test_values_are_those_of_mpmath(name, weight, power):
    manifold = SPACES[name]()
    q, k, v = points(manifold, 3), points(manifold, 4, seed=1), values(4, 2)
    k[1] = q[0]
    d = oracle.matrix(manifold, q, k)
    found = geodesic_attention(q, k, v, manifold, eps=0.01, power=power, weight=weight)
    with mpmath.workdps(40):
        for i in range(3):
            w = [
                (x * x + mpmath.mpf(0.01)) ** -power
                if weight == "inverse"
                else mpmath.exp(-power * (x if weight == "softmax" else x * x))
                for x in d[i]
            ]
            for c in range(2):
                true = sum(a * mpmath.mpf(b) for a, b in zip(w, v[:, c].tolist(), strict=True)) / sum(w)
                assert abs(found[i, c].item() - float(true)) < 1e-10


@pytest.mark.parametrize("name", SPACES)
def test_out_is_the_weights_times_the_values(name):
    manifold = SPACES[name]()
    q, k, v = points(manifold, 2, 3, 6), points(manifold, 2, 3, 8, seed=1), values(2, 3, 8, 4)
    for arguments in ({}, {"is_causal": True}, {"power": 3.0}, {"weight": "softmax"}, {"precision": "fast"}):
        w = attention_weights(q, k, manifold, **arguments)
        assert w.shape == (2, 3, 6, 8)
        torch.testing.assert_close(w.sum(-1), torch.ones(2, 3, 6, dtype=torch.float64))
        torch.testing.assert_close(geodesic_attention(q, k, v, manifold, **arguments), w @ v, rtol=1e-9, atol=1e-10)


def test_masks_mean_what_they_mean_in_torch():
    """Weights of torch's operator are made ours: its scores are -|q - k|^2 up to a row's constant."""
    q, k, v = values(2, 3, 6, 4), values(2, 3, 8, 4, seed=1), values(2, 3, 8, 5, seed=2)
    norms = (k * k).sum(-1).unsqueeze(-2)
    generator = torch.Generator().manual_seed(3)
    some = torch.rand(6, 8, generator=generator) < 0.7
    heads = torch.rand(3, 1, 8, generator=generator) < 0.7
    added = torch.randn(2, 1, 6, 8, generator=generator, dtype=torch.float64)
    lower, upper = causal_lower_right(6, 8), causal_upper_left(6, 8)
    triangle = torch.ones(6, 8, dtype=torch.bool).tril()
    for mask, causal, plain in (
        (None, False, None),
        (some, False, some),
        (heads, False, heads),
        (added, False, added),
        (None, True, triangle),
        (upper, False, triangle),
        (lower, False, torch.ones(6, 8, dtype=torch.bool).tril(2)),
    ):
        bias = torch.zeros(6, 8, dtype=torch.float64)
        if plain is not None:
            bias = torch.where(plain, bias, -torch.inf) if plain.dtype == torch.bool else plain
        true = scaled_dot_product_attention(2 * q, k, v, bias - norms, scale=1.0)
        found = geodesic_attention(
            q, k, v, hs.Euclidean(), attn_mask=mask, is_causal=causal, weight="gaussian", power=1.0
        )
        torch.testing.assert_close(found, true)


def test_lower_right_with_more_queries_than_keys_leaves_the_first_rows_empty():
    q, k, v = values(5, 3), values(2, 3, seed=1), values(2, 4, seed=2)
    with pytest.warns(UserWarning, match="Lower right causal bias"):
        mask = causal_lower_right(5, 2)
    out, lse = geodesic_attention(q, k, v, hs.Euclidean(), attn_mask=mask, return_lse=True)
    assert (out[:3] == 0).all() and (lse[:3] == -torch.inf).all()
    torch.testing.assert_close(out[3], v[0])


def test_grouped_heads_are_repeated_heads():
    for manifold in (hs.PoincareBall(-1.0), hs.PoincareBall(-torch.linspace(0.5, 1.0, 6, dtype=torch.float64))):
        q, k, v = (0.3 * torch.tanh(values(2, h, n, 4, seed=h)) for h, n in ((6, 5), (2, 7), (2, 7)))
        eps = torch.linspace(0.1, 1.0, 6, dtype=torch.float64)
        mask = values(6, 1, 7, seed=3) > 0
        arguments = {"eps": eps, "attn_mask": mask, "return_lse": True}
        found = geodesic_attention(q, k, v, manifold, enable_gqa=True, **arguments)
        true = geodesic_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), manifold, **arguments)
        torch.testing.assert_close(found, true)
        w = attention_weights(q, k, manifold, enable_gqa=True, eps=eps, attn_mask=mask)
        torch.testing.assert_close(w @ v.repeat_interleave(3, 1), true[0])


def test_eps_and_power_of_every_head():
    q, k, v = values(2, 3, 5, 4), values(2, 3, 7, 4, seed=1), values(2, 3, 7, 2, seed=2)
    eps, power = torch.tensor([0.1, 1.0, 10.0]), torch.tensor([0.5, 1.0, 3.0])
    found = geodesic_attention(q, k, v, hs.Euclidean(), eps=eps, power=power)
    for h in range(3):
        alone = geodesic_attention(q[:, h], k[:, h], v[:, h], hs.Euclidean(), eps=eps[h].item(), power=power[h].item())
        torch.testing.assert_close(found[:, h], alone)


def test_dot_is_torchs_own():
    q, k, v = values(2, 4, 5, 4), values(2, 2, 7, 4, seed=1), values(2, 2, 7, 3, seed=2)
    found = geodesic_attention(q, k, v, hs.Euclidean(), weight="dot", is_causal=True, enable_gqa=True)
    assert torch.equal(found, scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    with pytest.raises(ValueError, match="returns no lse"):
        geodesic_attention(q, k, v, hs.Euclidean(), weight="dot", enable_gqa=True, return_lse=True)
    with pytest.raises(ValueError, match="forms no weights"):
        attention_weights(q, q, hs.Euclidean(), weight="dot")


@pytest.mark.parametrize("name", SPACES)
def test_values_on_a_manifold_are_averaged_on_it(name):
    manifold = SPACES[name]()
    q, k, v = points(manifold, 2, 4), points(manifold, 2, 6, seed=1), points(manifold, 2, 6, seed=2)
    found = geodesic_attention(q, k, v, manifold, value_manifold=manifold)
    w = attention_weights(q, k, manifold)
    for b in range(2):
        for i in range(4):
            true = hs.midpoint(v[b], manifold, w[b, i])
            torch.testing.assert_close(found[b, i], true, rtol=1e-7, atol=1e-8)
    nobody = torch.zeros(4, 6, dtype=torch.bool)
    alone = geodesic_attention(q, k, v, manifold, value_manifold=manifold, attn_mask=nobody)
    torch.testing.assert_close(alone[0, 0], manifold.origin(SIZE, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("weight, power", (("inverse", 1.0), ("inverse", 6.0), ("softmax", 1.0), ("gaussian", 2.0)))
def test_shards_of_the_keys_merge_to_the_whole(weight, power):
    ball = hs.PoincareBall(-1.0)
    q, k, v = points(ball, 3, 5), points(ball, 3, 12, seed=1), values(3, 12, 4)
    mask = values(5, 12, seed=4) > 0
    mask[0, :7] = False  # nothing in the first two shards
    mask[1] = False  # nothing at all
    arguments = {"eps": 0.01, "power": power, "weight": weight, "return_lse": True}
    whole = geodesic_attention(q, k, v, ball, attn_mask=mask, **arguments)
    shards = [
        geodesic_attention(q, k[:, s], v[:, s], ball, attn_mask=mask[:, s], **arguments)
        for s in (slice(0, 3), slice(3, 7), slice(7, 12))
    ]
    torch.testing.assert_close(merge(*zip(*shards, strict=True)), whole)
    torch.testing.assert_close(merge(*zip(*reversed(shards), strict=True)), whole)


class OnlyDist(hs.Euclidean):
    """A manifold of level 0."""

    def dist(self, x, y, *, keepdim=False):
        return super().dist(x, y, keepdim=keepdim)


@pytest.mark.parametrize("rows", (2, 100))
def test_a_manifold_with_dist_alone_is_served_in_row_blocks(rows, monkeypatch):
    from horosphere.attention import row_blocks

    monkeypatch.setattr(row_blocks, "BLOCK_NUMBERS", rows * 9 * 2 * 3)
    q, k, v = (values(2, n, 3, seed=n).requires_grad_() for n in (7, 9, 9))
    mask = values(7, 9, seed=4)
    for arguments in ({"attn_mask": mask}, {"is_causal": True}):
        found, true = (geodesic_attention(q, k, v, m, **arguments) for m in (OnlyDist(), hs.Euclidean()))
        torch.testing.assert_close(found, true)
        ours, theirs = (torch.autograd.grad((o * o).sum(), (q, k, v)) for o in (found, true))
        torch.testing.assert_close(ours, theirs)
    exact = geodesic_attention(q, k, v, hs.Euclidean(), precision="exact")
    torch.testing.assert_close(exact, geodesic_attention(q, k, v, hs.Euclidean()))
    with pytest.raises(ValueError, match="dist alone"):
        geodesic_attention(q, k, v, OnlyDist(), impl="tiled")


@pytest.mark.parametrize(
    "change, error, match",
    (
        ({"query": torch.ones(4)}, ValueError, "query must hold a sequence"),
        ({"query": torch.ones(2, 5, 3, dtype=torch.bool)}, TypeError, "query must hold real numbers"),
        ({"key": torch.ones(2, 6, 4)}, ValueError, "points of one size"),
        ({"value": torch.ones(2, 5, 3)}, ValueError, "every key needs a value"),
        ({"key": torch.ones(3, 6, 3)}, ValueError, "batch dimensions do not broadcast"),
        ({"weight": "linear"}, ValueError, "weight must be one of"),
        ({"precision": "high"}, ValueError, "precision must be one of"),
        ({"impl": "cuda"}, ValueError, "impl must be one of"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be"),
        ({"eps": 0.0}, ValueError, "eps must be a positive finite number"),
        ({"eps": torch.ones(3)}, ValueError, r"eps must be a number or of shape \(\) or \(2,\)"),
        ({"power": -1.0}, ValueError, "power must be a positive finite number"),
        ({"power": torch.ones(2, dtype=torch.int64)}, TypeError, "power must be a number or a floating"),
        ({"attn_mask": torch.ones(5, 7)}, ValueError, r"attn_mask of shape \(5, 7\) does not broadcast to \(2, 5, 6\)"),
        ({"attn_mask": torch.ones(5, 6, dtype=torch.int64)}, TypeError, "attn_mask must be a bool tensor"),
        ({"attn_mask": causal_upper_left(5, 6), "is_causal": True}, ValueError, "leave out is_causal"),
        ({"attn_mask": causal_upper_left(5, 5)}, ValueError, "causal for 5 queries and 5 keys"),
        ({"enable_gqa": True, "key": torch.ones(6, 3)}, ValueError, "enable_gqa needs a head dimension"),
        ({"enable_gqa": True, "key": torch.ones(3, 6, 3)}, ValueError, "multiple of the key and value heads"),
        ({"manifold": "ball"}, TypeError, "manifold must be a geoopt.Manifold"),
    ),
)
def test_bad_arguments_are_refused_by_name(change, error, match):
    arguments = {"query": torch.ones(2, 5, 3), "key": torch.ones(2, 6, 3), "value": torch.ones(2, 6, 4)}
    arguments |= {"manifold": hs.Euclidean()} | change
    with pytest.raises(error, match=match):
        geodesic_attention(**arguments)


@pytest.mark.parametrize("weight", ["inverse", "dot"])
def test_causal_on_top_of_a_mask(weight):
    """A mask of the keys alone need not be made a matrix to be causal as well."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 70, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    padding = torch.arange(70) < torch.tensor([[70], [41]])[:, :, None, None]
    bias = torch.randn(70, 70, generator=generator, dtype=torch.float64)
    for mask, both in (
        (padding, padding.expand(2, 1, 70, 70).tril()),
        (bias, bias + torch.full_like(bias, -torch.inf).triu(1)),
    ):
        found = geodesic_attention(q, k, v, hs.Euclidean(), attn_mask=mask, is_causal=True, weight=weight)
        right = geodesic_attention(q, k, v, hs.Euclidean(), attn_mask=both, weight=weight)
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
        if weight == "inverse":
            weights = attention_weights(q, k, hs.Euclidean(), attn_mask=mask, is_causal=True)
            torch.testing.assert_close(weights @ v, right, rtol=1e-10, atol=1e-10)


def test_merge_refuses_shards_that_do_not_fit():
    out, lse = torch.ones(2, 3, 4), torch.ones(2, 3)
    for outs, lses in (([], []), ([out], []), ([out, out[:1]], [lse, lse[:1]]), ([out], [lse[:1]])):
        with pytest.raises(ValueError, match="merge takes"):
            merge(outs, lses)

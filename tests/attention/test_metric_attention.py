"""Attention under per-token metrics against its definition, the flat operator and the chord form."""

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

import horosphere as hs
from horosphere.attention import PairRotation, geodesic_attention, merge, metric_attention

ENDS = ("query", "key", "mean")


def inputs(batch=(2, 3), n=20, m=26, d=5, r=2, dv=4, dtype=torch.float64, seed=0):
    """q, k, v, s_q, U_q, s_k, U_k."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*batch, *shape, generator=generator, dtype=torch.float64).to(dtype)

    return [draw(n, d), draw(m, d), draw(m, dv), draw(n).abs() + 0.5, draw(n, d, r), draw(m).abs() + 0.5, draw(m, d, r)]


def attend(q, k, v, sq, uq, sk, uk, **options):
    return metric_attention(q, k, v, hs.TokenMetric(sq, uq), hs.TokenMetric(sk, uk), **options)


def by_definition(
    q, k, v, sq, uq, sk, uk, *, end="mean", eps=1e-3, power=1.0, weight="inverse", allowed=None, bias=0.0
):
    delta = q.unsqueeze(-2) - k.unsqueeze(-3)
    dense = [hs.TokenMetric(s, u).dense() for s, u in ((sq, uq), (sk, uk))]
    at_q = torch.einsum("...nmd,...nde,...nme->...nm", delta, dense[0], delta)
    at_k = torch.einsum("...nmd,...mde,...nme->...nm", delta, dense[1], delta)
    d2 = {"query": at_q, "key": at_k, "mean": (at_q + at_k) / 2}[end]
    logits = {"inverse": -power * torch.log(d2 + eps), "softmax": -power * d2.sqrt(), "gaussian": -power * d2}[
        weight
    ] + bias
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    return torch.nan_to_num(torch.softmax(logits, -1)) @ v, torch.logsumexp(logits, -1)


def same(found, true, leaves, tolerance=1e-9, seed=1):
    """Value and the gradient of every leaf."""
    torch.testing.assert_close(found, true, rtol=tolerance, atol=tolerance)
    upper = torch.randn(true.shape, generator=torch.Generator().manual_seed(seed), dtype=true.dtype)
    ours, theirs = (torch.autograd.grad(t, leaves, upper, retain_graph=True, allow_unused=True) for t in (found, true))
    for a, b, leaf in zip(ours, theirs, leaves, strict=True):
        a, b = (torch.zeros_like(leaf) if t is None else t for t in (a, b))
        size = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=tolerance * 100, atol=tolerance * 100 * size)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("impl", ("auto", "reference", "tiled"))
@pytest.mark.parametrize("weight, power", (("inverse", 1.0), ("inverse", 5.0), ("softmax", 2.0), ("gaussian", 0.3)))
def test_value_and_every_gradient(end, impl, weight, power):
    leaves = [t.requires_grad_() for t in inputs()]
    found, lse = attend(*leaves, end=end, weight=weight, power=power, return_lse=True, impl=impl)
    true, lse_true = by_definition(*leaves, end=end, weight=weight, power=power)
    same(found, true, leaves)
    same(lse, lse_true, leaves)


@pytest.mark.parametrize("impl", ("auto", "reference", "tiled"))
@pytest.mark.parametrize("n, m, batch", ((700, 600, ()), (1, 1, (1,)), (130, 17, (5,))))
def test_sizes(n, m, batch, impl):
    leaves = [t.requires_grad_() for t in inputs(batch, n, m, 3, 1)]
    found = attend(*leaves, is_causal=True, impl=impl)
    allowed = torch.ones(n, m, dtype=torch.bool).tril()
    same(found, by_definition(*leaves, allowed=allowed)[0], leaves)


def test_learned_eps_and_power_a_head():
    leaves = [t.requires_grad_() for t in inputs()]
    for power in (1.0, 3.0):
        scalars = [torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64) * x for x in (1.0, power)]
        scalars = [t.requires_grad_() for t in scalars]
        found = attend(*leaves, eps=scalars[0], power=scalars[1])
        true, _ = by_definition(*leaves, eps=scalars[0][:, None, None], power=scalars[1][:, None, None])
        same(found, true, [*leaves, *scalars])


def test_masks():
    leaves = [t.requires_grad_() for t in inputs()]
    allowed = torch.rand(20, 26, generator=torch.Generator().manual_seed(2)) > 0.4
    allowed[3] = False
    found = attend(*leaves, attn_mask=allowed)
    true, _ = by_definition(*leaves, allowed=allowed)
    assert (found[..., 3, :] == 0).all()
    rows = torch.arange(20) != 3  # softmax over nothing is NaN there
    same(found[..., rows, :], true[..., rows, :], leaves[2:3])
    assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), leaves))
    bias = torch.randn(2, 1, 20, 26, dtype=torch.float64).requires_grad_()
    same(attend(*leaves, attn_mask=bias), by_definition(*leaves, bias=bias)[0], [*leaves, bias])
    lower = torch.ones(20, 26, dtype=torch.bool).tril(6)
    same(attend(*leaves, attn_mask=causal_lower_right(20, 26)), by_definition(*leaves, allowed=lower)[0], leaves)


@pytest.mark.parametrize("end", ENDS)
def test_without_columns_it_is_the_flat_operator_and_one_shared_metric_is_its_chord(end):
    q, k, v, *_, uk = inputs(r=3)
    for s, u in ((1.0, uk.new_zeros(5, 0)), (0.7, uk[0, 0, 0])):
        metrics = [hs.TokenMetric(torch.full((n,), s).double(), u.expand(n, *u.shape)) for n in (20, 26)]
        found = metric_attention(q, k, v, *metrics, end=end, is_causal=True)
        manifold = hs.Euclidean() if s == 1 else hs.LowRankMetric(torch.tensor(s).double(), u)
        torch.testing.assert_close(found, geodesic_attention(q, k, v, manifold, is_causal=True), rtol=1e-9, atol=1e-11)


def test_shards_of_the_keys_merge():
    leaves = inputs()
    whole = attend(*leaves)
    outs, lses = zip(
        *(
            attend(
                *(
                    t[..., j, :] if i in (1, 2) else t[..., j] if i == 5 else t[..., j, :, :] if i == 6 else t
                    for i, t in enumerate(leaves)
                ),
                return_lse=True,
            )
            for j in (slice(0, 9), slice(9, 26))
        ),
        strict=True,
    )
    torch.testing.assert_close(merge(outs, lses)[0], whole)


@pytest.mark.parametrize("power", (1.0, 4.0))
def test_grouped_heads(power):
    q, k, v, sq, uq, sk, uk = inputs((2, 6))
    few = [t[:, ::3] for t in (k, v, sk, uk)]
    found = metric_attention(
        q, few[0], few[1], hs.TokenMetric(sq, uq), hs.TokenMetric(*few[2:]), enable_gqa=True, power=power
    )
    many = [t.repeat_interleave(3, 1) for t in few]
    true = metric_attention(q, many[0], many[1], hs.TokenMetric(sq, uq), hs.TokenMetric(*many[2:]), power=power)
    torch.testing.assert_close(found, true)


def test_dropout_drops_whole_weights_and_repeats_in_the_backward_pass():
    leaves = [t.requires_grad_() for t in inputs(n=300, m=200)]
    torch.manual_seed(0)
    out = attend(*leaves, dropout_p=0.3)
    torch.manual_seed(0)
    again = attend(*leaves, dropout_p=0.3)
    assert torch.equal(out, again) and not torch.equal(out, attend(*leaves, dropout_p=0.3))
    upper = torch.randn(out.shape, dtype=out.dtype)
    (dv,) = torch.autograd.grad(out, leaves[2], upper)
    torch.testing.assert_close((dv * leaves[2]).sum(), (out * upper).sum())  # linear in the values
    whole = attend(*leaves)
    torch.testing.assert_close(out.mean(), whole.mean(), rtol=0, atol=0.05)


def test_values_on_a_manifold():
    leaves = inputs()
    ball = hs.PoincareBall(-1.0)
    leaves[2] = ball.expmap0(leaves[2] * 0.3)
    out = attend(*leaves, value_manifold=ball)
    assert ball.check_point_on_manifold(out)
    one = attend(*leaves, value_manifold=ball, attn_mask=torch.eye(20, 26, dtype=torch.bool))
    torch.testing.assert_close(one, leaves[2][..., :20, :])


@pytest.mark.parametrize("precision, tolerance", (("auto", 3e-5), ("exact", 3e-6)))
def test_retrieval_in_float32(precision, tolerance):
    """A query that equals a key finds its value however small eps is, by the bound of the distances themselves."""
    q, k, v, _, _, sk, uk = inputs((2,), 64, 512, 16, 4, dtype=torch.float32)
    q, g = k[:, 100:164].clone(), hs.TokenMetric(sk, uk)
    found = metric_attention(q, k, v, g[:, 100:164], g, eps=1e-6, precision=precision)
    wide = [t.double() for t in (q, k, v, sk[:, 100:164], uk[:, 100:164], sk, uk)]
    true, _ = by_definition(*wide, eps=1e-6)
    assert (true - v[:, 100:164]).abs().max() < 1e-3
    torch.testing.assert_close(found.double(), true, rtol=0, atol=tolerance)


def test_equal_tokens_everywhere():
    """All pairs are near: the answer is the mean, and gradients are finite."""
    leaves = inputs((), 600, 600, 4, 2, dtype=torch.float32)
    same_token = [t[:1].expand(t.shape).clone() for t in leaves]
    same_token[0] = same_token[1].clone()
    same_token[2] = leaves[2]
    same_token = [t.requires_grad_() for t in same_token]
    out = attend(*same_token)
    torch.testing.assert_close(out, leaves[2].mean(0).expand(600, 4), rtol=1e-4, atol=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), same_token))


@pytest.mark.parametrize("causal", (False, True))
def test_turned_values(causal):
    leaves = inputs()
    q, k, v = leaves[:3]
    generator = torch.Generator().manual_seed(3)
    a_q, a_k = (torch.randn(2, 3, n, 3, generator=generator, dtype=torch.float64).requires_grad_() for n in (20, 26))
    torch.manual_seed(0)
    rotation = PairRotation(4, 3, 2).double()
    hs.optim.project_(rotation)
    leaves = [t.requires_grad_() for t in leaves]
    found = attend(*leaves, turn=rotation.between(a_q, a_k), is_causal=causal)
    allowed = torch.ones(20, 26, dtype=torch.bool).tril() if causal else None
    identity = torch.eye(26, dtype=torch.float64)
    weights = by_definition(q, k, identity.expand(2, 3, 26, 26), *leaves[3:], allowed=allowed)[0]
    turned = rotation(v.unsqueeze(-3), rotation.angles(a_q.unsqueeze(-2), a_k.unsqueeze(-3)))
    true = torch.einsum("bhnm,bhnmd->bhnd", weights, turned)
    same(found, true, [*leaves, a_q, a_k, rotation.omega, rotation.frame])


def test_memory_grows_like_the_sequence():
    leaves = [t.requires_grad_() for t in inputs((), 3000, 3000, 8, 4, dtype=torch.float32)]
    with torch.profiler.profile(profile_memory=True) as profile:
        attend(*leaves).sum().backward()
    largest = max(e.self_cpu_memory_usage for e in profile.events())
    assert largest <= 3000 * 3000 * 4 / 4, "no tensor of the size of the matrix"


def test_in_one_graph():
    leaves = [t.requires_grad_() for t in inputs(dtype=torch.float32)]
    compiled = torch.compile(lambda *t: attend(*t, is_causal=True), fullgraph=True, backend="aot_eager")(*leaves)
    same(compiled, attend(*leaves, is_causal=True), leaves, tolerance=1e-5)


def test_second_derivatives():
    leaves = [t.requires_grad_() for t in inputs((), 3, 3, 2, 1, 1)]
    assert torch.autograd.gradgradcheck(lambda *t: attend(*t, eps=0.5), leaves)


@pytest.mark.parametrize(
    "options, error, word",
    (
        ({"weight": "dot"}, ValueError, "dot"),
        ({"impl": "triton"}, ValueError, "triton"),
        ({"end": "both"}, ValueError, "end"),
        ({"eps": -1.0}, ValueError, "eps"),
        ({"attn_mask": torch.ones(3, 3)}, ValueError, "attn_mask"),
        ({"g_q": None}, TypeError, "g_q must be a TokenMetric"),
        ({"g_q": hs.TokenMetric(torch.ones(4), torch.ones(4, 5, 1))}, ValueError, "query of shape"),
        ({"turn": PairRotation(4, 3).between(torch.ones(7, 3), torch.ones(26, 3))}, ValueError, "turn has a frame"),
        (
            {
                "turn": PairRotation(4, 3).between(torch.ones(20, 3), torch.ones(26, 3)),
                "value_manifold": hs.Euclidean(),
            },
            ValueError,
            "value_manifold",
        ),
    ),
)
def test_bad_input_is_named(options, error, word):
    q, k, v, sq, uq, sk, uk = inputs(dtype=torch.float32)
    given = {"g_q": hs.TokenMetric(sq, uq), "g_k": hs.TokenMetric(sk, uk)} | options
    with pytest.raises(error, match=word):
        metric_attention(q, k, v, **given)


@pytest.mark.parametrize("turned", (False, True))
def test_blocks_of_rows_equal_the_whole(turned, monkeypatch):
    """Blocks of two rows: masks, dropout and pair rotations are cut with them, and gradients recomputed."""
    from horosphere.attention import row_blocks

    leaves = [t.requires_grad_() for t in inputs()]
    generator = torch.Generator().manual_seed(4)
    a_q, a_k = (torch.randn(2, 3, n, 3, generator=generator, dtype=torch.float64) for n in (20, 26))
    torch.manual_seed(0)
    turn = PairRotation(4, 3).double().between(a_q, a_k) if turned else None
    options = {"attn_mask": torch.randn(20, 26, generator=generator), "dropout_p": 0.2, "precision": "exact"}

    def call(**changes):
        torch.manual_seed(1)
        return attend(*leaves, turn=turn, **(options | changes))

    whole = call()
    monkeypatch.setattr(row_blocks, "BLOCK_NUMBERS", 2 * 26 * 6)
    same(call(), whole, leaves)
    if not turned:  # the streaming loops drop the same weights
        same(call(precision="auto"), whole, leaves)

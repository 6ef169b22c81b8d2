"""Attention under per-token metrics in the loop compiled by numba for long float32 sequences, on short ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

import horosphere as hs
from horosphere.attention import metric_attention
from horosphere.kernels import dispatch
from horosphere.kernels.numba import metric as compiled_metric
from tests.kernels import metric_attention_cases


@pytest.fixture
def calls(monkeypatch):
    """Every size counts as long, tiles are small; the list gets an entry for every group served."""
    made = []
    method = compiled_metric.CompiledGroup.forward

    def counted(*arguments):
        made.append(arguments)
        return method(*arguments)

    monkeypatch.setattr(dispatch, "COMPILED", 1)
    monkeypatch.setattr(compiled_metric, "HEIGHT", 16)
    monkeypatch.setattr(compiled_metric, "SIDE", 32)
    monkeypatch.setattr(compiled_metric.CompiledGroup, "forward", counted)
    return made


@pytest.fixture(params=(1, 2, 3))
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def metric(*shape, dim, rank, seed):
    return 0.5 + normal(*shape, seed=seed).abs(), 0.3 * normal(*shape, dim, rank, seed=seed + 1)


def by_differences(q, k, v, query, key, end, eps, is_causal=False):
    """out and lse, every distance from its difference."""
    delta = q.unsqueeze(-2) - k.unsqueeze(-3)
    square = (delta * delta).sum(-1)
    at_query = (query[0] ** 2).unsqueeze(-1) * square + ((delta @ query[1]) ** 2).sum(-1)
    at_key = (key[0] ** 2).unsqueeze(-2) * square
    at_key = at_key + (torch.einsum("...nmd,...mdr->...nmr", delta, key[1]) ** 2).sum(-1)
    d2 = {"query": at_query, "key": at_key, "mean": (at_query + at_key) / 2}[end]
    logits = -torch.log(d2 + torch.as_tensor(eps, dtype=torch.float64).unsqueeze(-1).unsqueeze(-1))
    if is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def errors(q, k, v, query, key, end, **arguments):
    """Largest errors of out and lse in float32, relative to the largest entries."""
    *points, query, key = (
        t.float() if torch.is_tensor(t) else tuple(x.float() for x in t) for t in (q, k, v, query, key)
    )
    found = metric_attention(
        *points, hs.TokenMetric(*query), hs.TokenMetric(*key), end=end, impl="numba", return_lse=True, **arguments
    )
    wide = [t.double() for t in points]
    right = by_differences(*wide, *(tuple(x.double() for x in t) for t in (query, key)), end, **arguments)
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, right, strict=True)]


@pytest.mark.parametrize("case", metric_attention_cases.CASES, ids=lambda c: c.name)
def test_the_loop_is_the_reference(case, calls):
    served = case.weight == "inverse" and case.power == 1.0 and not case.bias and not case.dropout_p
    if served and case.points.dtype != torch.float64:
        metric_attention_cases.check(case, "numba")
        assert calls
        return
    with pytest.raises(ValueError, match="impl='numba' cannot serve this call: its loops"):
        metric_attention_cases.check(case, "numba")
    metric_attention_cases.check(case, "auto")
    assert not calls


@pytest.mark.parametrize("end", ("query", "key", "mean"))
@pytest.mark.parametrize("causal", (False, True))
def test_heads_blocks_and_threads(end, causal, calls, threads):
    """Values are shared by the batch, eps is each head's own; rows and columns are no multiples of a tile."""
    for n, m, rank in ((50, 75, 3), (75, 50, 1), (1, 33, 0)):
        q, k, v = normal(2, 3, n, 5), normal(2, 3, m, 5, seed=1), normal(1, 1, m, 4, seed=2)
        query, key = (metric(2, 3, length, dim=5, rank=rank, seed=s) for length, s in ((n, 3), (m, 5)))
        eps = torch.tensor([0.1, 0.02, 0.5])
        assert max(errors(q, k, v, query, key, end, eps=eps, is_causal=causal)) < 2e-5
    assert len(calls) >= 3


@pytest.mark.parametrize("end", ("query", "key", "mean"))
@pytest.mark.parametrize("eps", (1e-6, 1e-12))
def test_equal_and_near_pairs(end, eps, calls):
    """Some far from the origin, where products lose what differences keep."""
    q = normal(2, 60, 6) + 3
    k = torch.cat(
        (q[:, :30].float().double(), q[:, :30] + 1e-4 * normal(2, 30, 6, seed=3), normal(2, 30, 6, seed=1)), 1
    )
    query, key = (metric(2, length, dim=6, rank=2, seed=s) for length, s in ((60, 3), (90, 5)))
    assert max(errors(q, k, normal(2, 90, 4, seed=2), query, key, end, eps=eps)) < 1e-5
    assert calls


def test_without_reworking_no_weight_is_negative(calls):
    """precision="fast": rounded squares of equal points are cut off at 0."""
    q = 100 + normal(1, 40, 6).float()
    g = hs.TokenMetric(torch.ones(1, 40), torch.zeros(1, 40, 6, 1))
    out, lse = metric_attention(q, q, torch.ones(1, 40, 2), g, g, eps=1e-3, precision="fast", return_lse=True)
    assert calls and (lse <= math.log(40 / 1e-3) + 1e-5).all()
    torch.testing.assert_close(out, torch.ones_like(out))


def test_rows_that_see_nothing_are_0(calls):
    q, k, v = normal(20, 5).float(), normal(9, 5, seed=1).float(), normal(9, 4, seed=2).float()
    own, other = (hs.TokenMetric(*(t.float() for t in metric(n, dim=5, rank=2, seed=n))) for n in (20, 9))
    with pytest.warns(UserWarning):
        mask = causal_lower_right(20, 9)
    out, lse = metric_attention(q, k, v, own, other, eps=1e-2, attn_mask=mask, return_lse=True)
    assert calls and (out[:11] == 0).all() and (lse[:11] == -torch.inf).all() and lse[11:].isfinite().all()


def test_points_that_are_no_numbers_spoil_their_rows_alone(calls):
    q, k, v = normal(20, 5).float(), normal(9, 5, seed=1).float(), normal(9, 4, seed=2).float()
    own, other = (hs.TokenMetric(*(t.float() for t in metric(n, dim=5, rank=2, seed=n))) for n in (20, 9))
    q[3] = torch.nan
    with pytest.raises(ValueError, match="leave the range of float32"):
        metric_attention(q, k, v, own, other, eps=1e-2, impl="numba")
    out = metric_attention(q, k, v, own, other, eps=1e-2)
    assert out[3].isnan().all() and out[torch.arange(20) != 3].isfinite().all()

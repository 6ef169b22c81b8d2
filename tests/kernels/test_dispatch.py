"""Which form serves a call, and how that is told."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace

import pytest
import torch

import horosphere as hs
from horosphere.kernels import dispatch
from horosphere.kernels.dispatch import Call, choose

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LARGE, MIDDLE, FEW = dispatch.COMPILED, dispatch.SMALL, dispatch.SMALL - 1
ON_GPU = "triton" if importlib.util.find_spec("triton") else "tiled"


@pytest.mark.parametrize(
    ("call", "form"),
    [
        (Call("sqdist", CPU, torch.float32, LARGE), "numba"),
        (Call("sqdist", CPU, torch.float32, LARGE, parts=2), "tiled"),
        (Call("sqdist", CPU, torch.float64, LARGE), "tiled"),
        (Call("sqdist", CPU, torch.float32, MIDDLE), "tiled"),
        (Call("sqdist", CPU, torch.float32, FEW), "reference"),
        (Call("sqdist", CPU, torch.float32, MIDDLE, tracing="torch.compile"), "reference"),
        (Call("sqdist", CPU, torch.float32, LARGE, tracing="torch.compile"), "numba"),
        (Call("sqdist", CPU, torch.float32, LARGE, tracing="torch.func"), "reference"),
        (Call("sqdist", CPU, torch.float32, LARGE, pairwise="precision='exact'"), "reference"),
        (Call("sqdist", GPU, torch.float32, 1), ON_GPU),
        (Call("sqdist", GPU, torch.complex64, 1), "tiled"),
        (Call("nearest", CPU, torch.float32, LARGE), "tiled"),
        (Call("nearest", CPU, torch.float32, FEW), "reference"),
        (Call("attention", CPU, torch.float32, LARGE), "numba"),
        (Call("attention", CPU, torch.float32, LARGE, power=2.0), "tiled"),
        (Call("attention", CPU, torch.float32, LARGE, biased=True), "tiled"),
        (Call("attention", CPU, torch.float32, FEW), "reference"),
        (Call("attention", CPU, torch.float32, FEW, tracing="torch.compile"), "tiled"),
        (Call("attention", CPU, torch.float32, LARGE, tracing="torch.func"), "reference"),
        (Call("metric_sqdist", CPU, torch.float32, 1, parts=0), "tiled"),
        (Call("metric_attention", CPU, torch.float32, LARGE, parts=0), "numba"),
        (Call("metric_attention", CPU, torch.float32, 1, parts=0), "tiled"),
        (Call("metric_attention", CPU, torch.float32, 1, parts=0, tracing="torch.func"), "reference"),
    ],
)
def test_auto_takes(call, form):
    assert choose(call) == form
    assert choose(call, form) == form  # and by name


@pytest.mark.parametrize("operation", dispatch.TABLE)
@pytest.mark.parametrize("form", dispatch.FORMS)
def test_a_form_asked_for_by_name_is_used_or_refused_with_the_reason(operation, form):
    """Whatever the call: never swapped."""
    base = Call(operation, CPU, torch.float32, LARGE)
    changes = [
        {},
        {"dtype": torch.float64},
        {"entries": 1},
        {"device": GPU},
        {"tracing": "torch.func"},
        {"tracing": "torch.compile"},
        {"pairwise": "precision='exact'"},
        {"weight": "softmax"},
        {"dropout": True},
    ]
    served = 0
    for change in changes:
        try:
            assert choose(replace(base, **change), form) == form
            served += 1
        except ValueError as error:
            assert f"impl={form!r} cannot serve this call: " in str(error) and "use impl='auto'" in str(error)
    if form == "numba" and operation in ("nearest", "metric_sqdist"):
        assert not served
    else:
        assert served >= (1 if form == "triton" and importlib.util.find_spec("triton") else 0)


def test_an_unknown_name_is_refused():
    x = torch.zeros(2, 3)
    for call in (hs.cdist, lambda *a, **k: hs.knn(*a, 1, **k)):
        with pytest.raises(ValueError, match=r"impl must be one of .*'numba'.*, got 'blocked'"):
            call(x, x, hs.Euclidean(), impl="blocked")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x, impl: hs.cdist(x, x, hs.Sphere(), impl=impl, precision="exact"), "works pair by pair"),
        (lambda x, impl: hs.knn(x, x, hs.Sphere(), 1, impl=impl, precision="exact"), "works pair by pair|no such form"),
        (
            lambda x, impl: hs.attention.geodesic_attention(x, x, x, hs.Sphere(), impl=impl, precision="exact"),
            "works pair by pair",
        ),
    ],
)
@pytest.mark.parametrize("impl", ["tiled", "numba", "triton"])
def test_what_has_no_product_form_is_refused(call, reason, impl):
    with pytest.raises(ValueError, match=f"impl='{impl}' cannot serve this call: .*({reason})"):
        call(torch.nn.functional.normalize(torch.ones(5, 3), dim=-1), impl)


def test_triton_says_where_it_runs():
    x = torch.ones(5, 3)
    with pytest.raises(ValueError, match="it runs on GPUs, and the points are on cpu"):
        hs.attention.geodesic_attention(x, x, x, hs.Euclidean(), impl="triton")


def test_explain_tells_form_and_reasons_of_every_kernel_in_a_call():
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    (one,) = hs.kernels.explain(hs.cdist, x, x, hs.Euclidean())
    assert (one.operation, one.form) == ("sqdist", "tiled")
    assert set(one.refused) == {"reference", "numba", "triton"}
    assert "40000 entries" in one.refused["numba"] and "CPU" in one.refused["triton"]
    assert str(one).startswith("sqdist: tiled (not ")

    leaf = x.clone().requires_grad_()
    found = hs.kernels.explain(lambda: hs.attention.geodesic_attention(leaf, x, x, hs.Lorentz()).sum().backward())
    assert [(c.operation, c.form) for c in found] == [("attention", "tiled"), ("attention_backward", "tiled")]
    found = hs.kernels.explain(hs.attention.geodesic_attention, x[:5], x[:5], x[:5], hs.Euclidean(), impl="numba")
    assert [(c.operation, c.form) for c in found] == [("attention", "numba")]


def test_gradients_of_a_numba_call_that_have_no_loop_are_tiled():
    ball = hs.PoincareBall(-1.0, learnable=True)
    x = 0.1 * torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    found = hs.kernels.explain(lambda: hs.attention.geodesic_attention(x, x, x, ball, impl="numba").sum().backward())
    assert [(c.operation, c.form) for c in found] == [("attention", "numba"), ("attention_backward", "tiled")]
    assert found[1].refused == {"numba": "its loops have no gradient of a curvature"}
    leaf = x.clone().requires_grad_()
    found = hs.kernels.explain(lambda: hs.cdist(leaf, x, ball, impl="numba").sum().backward())
    assert [(c.operation, c.form) for c in found][-1] == ("sqdist_backward", "tiled")


def test_the_logger_tells_at_debug(caplog):
    x = torch.ones(4, 3)
    with caplog.at_level(logging.DEBUG, logger="horosphere.kernels"):
        hs.cdist(x, x, hs.Euclidean())
    (record,) = caplog.records
    assert record.getMessage().startswith("sqdist: reference (not triton: ")
    caplog.clear()
    hs.cdist(x, x, hs.Euclidean())
    assert not caplog.records


def test_explain_ends_with_its_call():
    def fails():
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        hs.kernels.explain(fails)
    assert dispatch._choices.get() is None


def test_what_numbas_loops_leave_to_tiles_is_told(monkeypatch):
    """Which points they cannot take is seen when they are looked at."""
    monkeypatch.setattr(dispatch, "COMPILED", 1)
    ball = hs.PoincareBall(-1.0)
    x = 0.1 * torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    outside = x.clone()
    outside[3] = 2.0
    g = hs.TokenMetric(torch.ones(20), torch.zeros(20, 3, 1))
    calls = {
        "sqdist": lambda p: hs.cdist(p, p.clone(), ball, precision="fast"),
        "attention": lambda p: hs.attention.geodesic_attention(p, p, x, ball),
        "metric_attention": lambda p: hs.attention.metric_attention(p * torch.inf if p is outside else p, p, x, g, g),
    }
    for operation, call in calls.items():
        assert [c.form for c in hs.kernels.explain(call, x)] == ["numba"]
        first, second = hs.kernels.explain(call, outside)
        assert (first.form, second.form) == ("numba", "tiled") and first.operation == second.operation == operation
        assert "range of float32" in second.refused["numba"]

"""The Fiber Bundle Transformer: decoding, training, files, compilation, two processes."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import horosphere as hs
import horosphere.models
from horosphere.attention.connection import Frames
from horosphere.models import FiberBundleConfig, FiberBundleLM
from horosphere.models.fiber_bundle import Geometry

SMALL = {"vocab_size": 11, "dim": 16, "depth": 2, "heads": 2, "rank": 2, "max_length": 24}


def made(**changes) -> FiberBundleLM:
    torch.manual_seed(0)
    model = FiberBundleLM(FiberBundleConfig(**(SMALL | changes)))
    with torch.no_grad():  # metrics well away from the identity
        for block in model.blocks:
            if block.metric.factor is not None:
                block.metric.factor.weight.mul_(3)
            block.metric.scale.weight.mul_(5)
    return model


def sequences(batch=3, length=20, seed=1):
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(seed))


KINDS = ({}, {"planes": 2}, {"end": "query"}, {"rank": 0}, {"end": "key", "planes": 1, "power": 1.0})


@pytest.mark.parametrize("changes", KINDS)
def test_decoding_equals_the_whole_pass(changes):
    model, ids = made(**changes).double().eval(), sequences()
    hs.optim.project_(model)
    with torch.no_grad():
        whole = model(ids, use_cache=True)
        single, cache = [], None
        for t in range(20):
            out = model(ids[:, t : t + 1], cache=cache, use_cache=True)
            cache = out.cache
            single.append(out.logits)
        torch.testing.assert_close(torch.cat(single, 1), whole.logits, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(cache[1].value, whole.cache[1].value)
        first = model(ids[:, :7], use_cache=True)
        rest = model(ids[:, 7:], cache=first.cache)
        torch.testing.assert_close(rest.logits, whole.logits[:, 7:], rtol=1e-9, atol=1e-10)


def test_it_is_causal_and_tokens_matter():
    model, ids = made().eval(), sequences()
    other = ids.clone()
    other[:, 9] = (other[:, 9] + 1) % 11
    a, b = model(ids).logits, model(other).logits
    torch.testing.assert_close(a[:, :9], b[:, :9])
    assert ((a - b)[:, 9:].abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("changes", KINDS)
def test_every_parameter_learns(changes):
    model, ids = made(**changes), sequences()
    out = model(ids, labels=ids)
    torch.testing.assert_close(
        out.loss, torch.nn.functional.cross_entropy(out.logits[:, :-1].reshape(-1, 11), ids[:, 1:].reshape(-1))
    )
    out.loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        assert not p.numel() or p.grad.abs().max() > 0, name


def test_gradients_against_differences():
    model, ids = made(planes=1, depth=1).double(), sequences(2, 5)
    hs.optim.project_(model)
    loss = model(ids, labels=ids).loss
    parameters = [p for _, p in model.named_parameters()]
    gradients = torch.autograd.grad(loss, parameters)
    generator = torch.Generator().manual_seed(2)
    for p, g in zip(parameters, gradients, strict=True):
        direction = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                p.add_(direction, alpha=step)
                values.append(model(ids, labels=ids).loss.item())
                p.sub_(direction, alpha=step)
        assert (g * direction).sum().item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=2e-5, abs=1e-8)


def test_gradient_checkpointing_changes_no_gradient():
    model, ids = made(planes=1), sequences()
    found = []
    for flag in (False, True):
        model.gradient_checkpointing = flag
        found.append(torch.autograd.grad(model(ids, labels=ids).loss, tuple(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def train(model, steps=8, optimizer=None, rate=1e-2):
    optimizer = optimizer or hs.optim.RiemannianAdam(hs.optim.param_groups(model), lr=rate)
    ids = sequences(4)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    return losses


def test_training_is_the_same_to_the_last_bit():
    runs = []
    for _ in range(2):
        model = made(planes=1, dropout=0.2)
        losses = train(model)
        runs.append((losses, model.state_dict()))
    assert runs[0][0] == runs[1][0] and runs[0][0][-1] < runs[0][0][0]
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


def test_riemannian_training_moves_frames_on_their_manifold_and_the_table_by_its_metrics():
    model = made(planes=2)
    table, frames = model.table, [block.rotation.frame for block in model.blocks]
    assert type(table.manifold) is hs.LowRankMetric and all(type(f.manifold) is Frames for f in frames)
    groups = hs.optim.param_groups(model)
    assert {id(p) for p in groups[0]["params"]} == {id(table), *map(id, frames)}
    optimizer = hs.optim.RiemannianAdam(groups, lr=1e-2)
    start = [f.detach().clone() for f in frames]
    ids, before = sequences(4), table.detach().clone()
    model(ids, labels=ids).loss.backward()
    g = model.blocks[0].metric(model.blocks[0].attention_norm(before))
    torch.testing.assert_close(model.fibres.factor, g.factor)  # the metrics of the points where the table is
    natural = -g.solve(table.grad)
    optimizer.step()
    moved = table.detach() - before
    rows = table.grad.abs().amax(-1) > 0
    cosine = g.inner(moved, natural) / (g.inner(moved) * g.inner(natural)).sqrt()
    torch.testing.assert_close(cosine[rows], torch.ones(int(rows.sum())), rtol=1e-5, atol=0)
    torch.testing.assert_close(g.inner(moved).sqrt()[rows], torch.full((int(rows.sum()),), 1e-2), rtol=1e-4, atol=0)
    train(model, 40, optimizer)
    for f, s in zip(frames, start, strict=True):
        assert (f - s).abs().max() > 0.01
        torch.testing.assert_close(f.mT @ f, torch.eye(4), rtol=0, atol=1e-5)


def test_plain_adam_trains_too_and_leaves_the_frames():
    model = made(planes=1)
    losses = train(model, 40, torch.optim.Adam(model.parameters(), lr=1e-2))
    assert losses[-1] < 0.5 * losses[0]
    assert max((b.rotation.frame.mT @ b.rotation.frame - torch.eye(2)).abs().max() for b in model.blocks) > 1e-4


def test_geometry_is_measured_and_can_be_a_regulariser():
    model, ids = made(planes=1), sequences()
    out = model(ids, return_geometry=True)
    assert isinstance(out.geometry, Geometry) and out.loss is None and out.cache is None
    assert out.geometry.curvature.shape == out.geometry.torsion.shape == out.geometry.condition.shape == (2,)
    assert out.geometry.residual.shape == out.geometry.rank.shape == (3,)
    assert (out.geometry.curvature > 0).all() and (out.geometry.torsion > 0).all()
    assert (out.geometry.condition > 1).all() and (out.geometry.rank >= 1).all()
    penalty = out.geometry.curvature.sum() + out.geometry.torsion.sum()
    penalty.backward()
    assert model.blocks[0].metric.factor.weight.grad.abs().max() > 0
    assert model.blocks[1].rotation.omega.grad.abs().max() > 0
    flat = made()(ids, return_geometry=True).geometry
    assert (flat.curvature == 0).all() and (flat.torsion > 0).all()
    assert torch.equal(model(ids, return_geometry=True).geometry.torsion, out.geometry.torsion)
    drawn = model(ids, return_geometry=True, generator=torch.Generator().manual_seed(7)).geometry
    assert not torch.equal(drawn.torsion, out.geometry.torsion)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_files(tmp_path, dtype):
    model, ids = made(planes=1, end="query").to(dtype), sequences()
    train(model, 2)
    model.save(tmp_path / "model.safetensors")
    twin = FiberBundleLM.load(tmp_path / "model.safetensors")
    assert twin.config == model.config and type(twin.table) is hs.ManifoldParameter
    assert twin.table.manifold is twin.fibres and twin.table.dtype == dtype
    assert torch.equal(twin.eval()(ids).logits, model.eval()(ids).logits)
    train(twin.train(), 1)
    (tmp_path / "other.safetensors").write_bytes(b"no such file")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        FiberBundleLM.load(tmp_path / "other.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    model.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match="holds a FiberBundleLM"):
        hs.models.GeoResolverLM.load(tmp_path / "model.safetensors")


def test_copies_are_independent():
    model = made(planes=1)
    twin = copy.deepcopy(model)
    train(twin, 1)
    assert twin.table.manifold is twin.fibres and twin.fibres is not model.fibres
    assert not torch.equal(twin.table, model.table)


def test_compiles():
    model, ids = made(planes=1), sequences()
    eager = model(ids, labels=ids)
    gradients = torch.autograd.grad(eager.loss, tuple(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, labels=ids)
    torch.testing.assert_close(compiled.logits, eager.logits, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(compiled.loss, tuple(model.parameters()))
    for a, b in zip(found, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_generation():
    model, ids = made().eval(), sequences(2, 4)
    greedy = model.generate(ids, 6)
    assert greedy.shape == (2, 10) and torch.equal(greedy[:, :4], ids)
    for t in range(4, 10):
        assert torch.equal(greedy[:, t], model(greedy[:, :t]).logits[:, -1].argmax(-1))
    drawn = [model.generate(ids, 6, temperature=1.0, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    "changes, word",
    (
        ({"heads": 3}, "heads must divide dim"),
        ({"planes": 5}, "planes"),
        ({"rank": -1}, "rank"),
        ({"depth": 0}, "depth"),
        ({"end": "both"}, "end"),
        ({"eps": 0.0}, "eps"),
        ({"dropout": 1.0}, "dropout"),
    ),
)
def test_bad_configurations_are_named(changes, word):
    with pytest.raises(ValueError, match=word):
        FiberBundleConfig(**(SMALL | changes))


def test_bad_input_is_named():
    model = made()
    with pytest.raises(ValueError, match="shape"):
        model(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="max_length=24"):
        model(torch.zeros(1, 25, dtype=torch.int64))


def replica(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        model = torch.nn.parallel.DistributedDataParallel(made(planes=1))
        optimizer = hs.optim.RiemannianAdam(hs.optim.param_groups(model), lr=1e-2)
        ids = sequences(4)[2 * rank : 2 * rank + 2]
        for _ in range(3):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        torch.save(model.module.state_dict(), f"{results}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """Replicas stay equal, and equal to one process with the whole batch; slow: two fresh processes import torch."""
    mp.spawn(replica, args=(tmp_path / "store", str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    alone = made(planes=1)
    train(alone, 3)
    for name, value in alone.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, rtol=1e-3, atol=1e-4)

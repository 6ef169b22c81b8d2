"""The GeoResolver: causality, decoding, memory that only the training loop writes, files, and training itself."""

import copy

import pytest
import torch

import horosphere as hs
from horosphere.attention import DenseCache
from horosphere.memory import CompressedCache, HyperbolicCompressor, SummaryCache
from horosphere.models.georesolver import GeoResolverConfig, GeoResolverLM

PATTERNS = ("dense", "fixed", "landmark", "summary")
SMALL = dict(vocab_size=11, dim=16, depth=2, heads=2, max_length=64, landmarks=5, slots=6, chunk=8)
SMALL |= dict(memory_capacity=12, memory_dim=4, memory_top_k=3, memory_window=20, memory_k=1.0)


def small_model(pattern="dense", written=True, **other):
    """A model whose memories hold something, so that every path counts."""
    torch.manual_seed(0)
    model = GeoResolverLM(GeoResolverConfig(**(SMALL | {"pattern": pattern} | other)))
    if written:
        for seed in (1, 2):
            ids = tokens(seed=seed)
            model.update_memory(model(ids, ids).losses)
        assert not model.config.memory_capacity or all(len(block.memory.pool) > 3 for block in model.blocks)
    return model.eval()


def tokens(n=24, batch=3, seed=0):
    return torch.randint(0, 11, (batch, n), generator=torch.Generator().manual_seed(seed))


def compressed(layer):
    return CompressedCache(HyperbolicCompressor(8, 12, manifold=layer.manifold), block=8)


def summarised(layer):
    return SummaryCache(layer.manifold, slots=6, chunk=8)


CACHES = [(pattern, None) for pattern in PATTERNS] + [("dense", lambda layer: DenseCache()), ("dense", compressed)]
CACHES += [("dense", summarised)]


@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_changing_the_last_token_moves_no_earlier_logit(pattern):
    model, ids = small_model(pattern), tokens()
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 1) % 11
    a, b = model(ids).logits, model(other).logits
    assert torch.allclose(a[:, :-1], b[:, :-1], atol=1e-6) and not torch.allclose(a[:, -1], b[:, -1], atol=1e-3)


@pytest.mark.parametrize("pattern, make", CACHES)
@torch.no_grad()
def test_causal_through_each_cache(pattern, make):
    model, ids = small_model(pattern), tokens()
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 1) % 11
    a, b = (model(t, caches=model.new_caches(make)).logits for t in (ids, other))
    assert torch.allclose(a[:, :-1], b[:, :-1], atol=1e-6) and not torch.allclose(a[:, -1], b[:, -1], atol=1e-3)


@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_decoding_step_by_step_equals_the_parallel_forward(pattern):
    model, ids = small_model(pattern), tokens()
    caches = model.new_caches()
    steps = torch.cat([model(piece, caches=caches).logits for piece in ids.split([10] + [1] * 14, 1)], 1)
    assert torch.allclose(steps, model(ids).logits, atol=2e-4)


@torch.no_grad()
def test_decoding_with_coded_tokens_comes_near():
    model, ids = small_model(), tokens()
    right = model(ids).logits
    errors = []
    for bits in (2, 4, 8):
        caches = model.new_caches(
            lambda x, b=bits: CompressedCache(HyperbolicCompressor(b, 12, manifold=x.manifold), 8)
        )
        out = torch.cat([model(piece, caches=caches).logits for piece in ids.split(1, 1)], 1)
        errors.append(((out - right).norm() / right.norm()).item())
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.01


@pytest.mark.parametrize("pattern, make", CACHES)
def test_generate(pattern, make):
    model, ids = small_model(pattern).train(), tokens(n=9)
    before = copy.deepcopy(model.state_dict())
    out = model.generate(ids, 6, make_cache=make)
    assert out.shape == (3, 15) and torch.equal(out[:, :9], ids) and model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    if make is None:
        model.eval()
        with torch.no_grad():
            assert torch.equal(out[:, 9], model(ids).logits[:, -1].argmax(-1))
            assert torch.equal(out[:, 14], model(out[:, :14]).logits[:, -1].argmax(-1))
    drawn = [
        model.generate(ids, 5, make_cache=make, temperature=1.0, generator=torch.Generator().manual_seed(s))
        for s in (0, 0, 1)
    ]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_only_the_training_loop_writes():
    model, ids = small_model(written=False), tokens()
    model(ids, ids)
    model.update_memory(torch.rand(3, 23))
    assert all(len(block.memory.pool) == 0 for block in model.blocks)
    model.train()
    out = model(ids, ids)
    again = model(ids, ids)
    assert torch.equal(out.logits, again.logits) and all(len(block.memory.pool) == 0 for block in model.blocks)
    model.update_memory(again.losses)
    assert all(int(block.memory.pool.steps) == 69 for block in model.blocks)
    with pytest.raises(ValueError, match="forward pass"):
        model.update_memory(again.losses)


def test_memory_counts_and_can_be_cut():
    model, ids = small_model(), tokens()
    whole, cut = model(ids, ids), model(ids, ids, use_memory=False)
    assert not torch.allclose(whole.logits, cut.logits, atol=1e-3)
    assert whole.gate.shape == (2,) and ((0 < whole.gate) & (whole.gate < 1)).all() and (whole.certificate > 0).all()
    without = small_model(memory_capacity=0)
    assert torch.equal(without(ids).logits, without(ids, use_memory=False).logits)
    without.update_memory(torch.zeros(3, 23))


def test_losses_by_hand():
    model, ids = small_model(), tokens()
    labels = ids.clone()
    labels[0, 5] = -100
    out = model(ids, labels)
    logs = out.logits.log_softmax(-1)
    assert torch.allclose(out.losses[1, 3], -logs[1, 3, ids[1, 4]]) and out.losses[0, 4] == 0
    assert torch.allclose(out.loss, out.losses.sum() / (3 * 23 - 1))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_parameter_has_a_gradient_and_curvatures_train(pattern):
    model, ids = small_model(pattern).train(), tokens()
    optimizer = hs.optim.RiemannianAdam(hs.optim.param_groups(model), lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        out = model(ids, ids)
        out.loss.backward()
        silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert not silent
        optimizer.step()
        model.update_memory(out.losses)
        losses.append(out.loss.item())
    assert losses[-1] < losses[0] - 0.3
    for block in model.blocks:
        assert (block.gate.ball.kappa + 1).abs().max() > 1e-3
        for name, p in block.named_parameters():
            if isinstance(p, hs.ManifoldParameter):
                p.manifold.assert_check_point_on_manifold(p), name


@pytest.mark.parametrize("pattern", PATTERNS)
def test_save_and_load(pattern, tmp_path):
    model, ids = small_model(pattern), tokens()
    model.save(tmp_path / "model.safetensors")
    loaded = GeoResolverLM.load(tmp_path / "model.safetensors").eval()
    assert loaded.config == model.config
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    with pytest.raises(FileNotFoundError):
        GeoResolverLM.load(tmp_path / "none.safetensors")


def test_capped_gate_has_a_positive_floor():
    model = small_model(cap_gate=True)
    block = model.blocks[0]
    x = block.norm(model.embedding(tokens()))
    assert (block.gate.gradient_floor(x) >= 0.0189).all()


def test_copies():
    model, ids = small_model(), tokens()
    copied = copy.deepcopy(model)
    assert torch.equal(copied(ids).logits, model(ids).logits)
    wide = copied.double()
    assert torch.allclose(wide(ids).logits.float(), model(ids).logits, atol=1e-3)


def test_bad_input_is_named_and_writes_nothing():
    for wrong in (
        {"vocab_size": 0},
        {"depth": 0},
        {"pattern": "sparse"},
        {"dim": 15},
        {"memory_top_k": 13},
        {"memory_capacity": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            GeoResolverConfig(**(SMALL | wrong))
    model, ids = small_model(), tokens()
    with pytest.raises(ValueError, match="ids"):
        model(ids.float())
    with pytest.raises(ValueError, match="ids"):
        model(ids[:, :0])
    with pytest.raises(ValueError, match="ids"):
        model(ids + 5)
    with pytest.raises(ValueError, match="labels"):
        model(ids, ids[:, 1:])
    with pytest.raises(ValueError, match="caches"):
        model(ids, caches=model.new_caches()[:1])
    with pytest.raises(ValueError, match="another layer"):
        caches = model.new_caches()
        model(ids, caches=caches)
        model(ids, caches=caches[::-1])
    with pytest.raises(ValueError, match="new_tokens"):
        model.generate(ids, -1)
    model.train()
    out = model(ids, ids)
    before = copy.deepcopy(model.state_dict())
    for wrong in (out.losses[0], out.losses[:2], torch.full((3, 23), torch.nan), torch.zeros(3, 30)):
        with pytest.raises(ValueError, match="losses"):
            model.update_memory(wrong)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

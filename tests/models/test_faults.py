"""Inputs on which the language models were seen to fail; the number is that of the collected case."""

import pytest
import torch

from horosphere.memory import DynamicMemory
from horosphere.models import FiberBundleConfig, FiberBundleLM, GeoResolverConfig, GeoResolverLM

MODELS = {
    "georesolver": lambda **o: GeoResolverLM(
        GeoResolverConfig(vocab_size=7, dim=8, depth=1, heads=2, memory_capacity=8, memory_dim=4, memory_top_k=2, **o)
    ),
    "fiber bundle": lambda **o: FiberBundleLM(FiberBundleConfig(vocab_size=7, dim=8, depth=1, heads=2, rank=1, **o)),
}


def text(batch, length):
    return torch.randint(7, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("written", [False, True], ids=["empty pool", "some prototypes"])
def test_32_trains_under_bf16_autocast(written):
    torch.manual_seed(0)
    model, ids = MODELS["georesolver"](), text(2, 6)
    if written:
        out = model(ids, labels=ids)
        model.update_memory(out.losses)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids)
    out.loss.backward()
    assert out.loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.update_memory(out.losses)


def test_34_tokens_without_a_label_are_not_written():
    """The pool and its thresholds are those of the scored tokens alone."""
    torch.manual_seed(0)
    model, ids = MODELS["georesolver"](), text(3, 6)
    labels = ids.clone()
    labels[1] = -100
    labels[2, 3:] = -100
    out = model(ids, labels=labels)
    model.update_memory(out.losses)
    (block,) = model.blocks
    pool = block.memory.pool
    assert int(pool.steps) == 5 + 2
    held = pool.recent[pool.recent != 0]
    torch.testing.assert_close(held, torch.cat((out.losses[0], out.losses[2, :2])).double())
    everything = model(ids, labels=ids)
    model.update_memory(everything.losses)
    assert int(pool.steps) == 7 + 15
    model(ids, labels=labels)
    model.update_memory(everything.losses, mask=torch.ones(3, 5, dtype=torch.bool))
    assert int(pool.steps) == 22 + 15


def test_34_what_the_mask_leaves_out_may_be_anything():
    generator = torch.Generator().manual_seed(0)
    keys, values = 0.1 * torch.randn(20, 3, generator=generator), torch.randn(20, 2, generator=generator)
    losses, mask = torch.rand(20, generator=generator), torch.rand(20, generator=generator) < 0.5
    pools = [DynamicMemory(3, 2, 8, window=4, chunk=3) for _ in range(2)]
    expected = pools[0].write(keys[mask], values[mask], losses[mask])
    for t in (keys, values, losses):
        t[~mask] = torch.nan
    found = pools[1].write(keys, values, losses, mask=mask)
    for name, t in pools[0].state_dict().items():
        assert torch.equal(pools[1].state_dict()[name], t), name
    assert torch.equal(found.slots[mask], expected.slots) and bool((found.slots[~mask] == -1).all())
    assert not found.surprising[~mask].any() and torch.equal(found.surprising[mask], expected.surprising)
    with pytest.raises(ValueError, match=r"mask must be bool of the shape of losses, \(20,\)"):
        pools[1].write(keys, values, losses, mask=mask[:3])


@pytest.mark.parametrize("name", MODELS)
def test_36_generates_in_evaluation_mode_and_restores_the_mode(name):
    torch.manual_seed(0)
    model = MODELS[name](dropout=0.5)
    first, second = (model.generate(text(2, 4), 6) for _ in range(2))
    assert torch.equal(first, second) and first.shape == (2, 10)
    assert model.training
    model.eval().generate(text(1, 2), 1)
    assert not model.training


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(text(2, 4)[:0]), r"ids must be whole numbers of shape \(B, N\).*\(0, 4\)"),
        (lambda m: m(text(2, 4)[:, :0]), r"ids must be whole numbers of shape \(B, N\).*\(2, 0\)"),
        (lambda m: m(text(2, 4)[0]), r"\(4,\)"),
        (lambda m: m(text(2, 4).double()), "float64"),
        (lambda m: m(text(2, 4) + 5), r"ids must lie in 0\.\.6; got"),
        (lambda m: m(text(2, 4), labels=text(2, 3)), "labels must have the shape of ids"),
        (lambda m: m(text(2, 1), labels=text(2, 1)), "N >= 2"),
        (lambda m: m.generate(text(2, 4), -1), "new_tokens and temperature must be at least 0; got -1"),
        (lambda m: m.generate(text(2, 4), 1, temperature=-0.5), "got 1 and -0.5"),
    ],
)
def test_37_clear_errors(name, call, message):
    with pytest.raises(ValueError, match=message):
        call(MODELS[name]())


@pytest.mark.parametrize("name", MODELS)
def test_37_the_loss_of_nothing_is_0(name):
    model, ids = MODELS[name](), text(2, 4)
    out = model(ids, labels=torch.full_like(ids, -100))
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_39_padded_sequences_are_those_alone(name):
    """Left padding moved logits by 3.4."""
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    short, long = text(1, 5), text(1, 9)
    padded = torch.cat((torch.cat((torch.full((1, 4), 3), short), 1), long))
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    alone = [model(ids).logits for ids in (short, long)]
    for given in (mask, mask.bool()):
        found = model(padded, attention_mask=given).logits
        torch.testing.assert_close(found[:1, 4:], alone[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[1:], alone[1], rtol=1e-9, atol=1e-9)
    unmasked = model(padded).logits[:1, 4:]
    assert (unmasked - alone[0]).abs().max() > 1e-3
    # the loss too: labels of padding are left out
    losses = [model(ids, labels=ids).loss * (ids.shape[1] - 1) for ids in (short, long)]
    right = sum(losses) / (4 + 8)
    shifted = padded.clone()
    shifted[0, 4] = -100  # the first real token follows nothing
    found = model(padded, labels=shifted, attention_mask=mask).loss
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_39_padded_prompts_go_on_as_alone(name):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    short, long = text(1, 5), text(1, 9)
    padded = torch.cat((torch.cat((torch.full((1, 4), 3), short), 1), long))
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    found = model.generate(padded, 8, attention_mask=mask)
    assert torch.equal(found[:1, 4:], model.generate(short, 8)) and torch.equal(found[1:], model.generate(long, 8))
    with pytest.raises(ValueError, match="pad shorter sequences on the left"):
        model.generate(padded, 1, attention_mask=mask.flip(-1))
    with pytest.raises(ValueError, match=r"attention_mask must hold bool or 0 and 1 in the shape of ids, \(2, 9\)"):
        model(padded, attention_mask=mask[:, :4])


def test_39_patterns_in_which_places_count_refuse_a_mask():
    model = MODELS["georesolver"](pattern="fixed")
    with pytest.raises(ValueError, match="attention_mask needs pattern='dense'"):
        model(text(2, 4), attention_mask=torch.ones(2, 4, dtype=torch.bool))

"""The plug-in against the real library: tiny random models, one with grouped-query heads and one without."""

import subprocess
import sys

import pytest
import torch

import horosphere as hs
from horosphere.integrations import transformers as plugin

NAME = "horosphere:test"
FAMILIES = ("llama", "gpt2")


@pytest.fixture(scope="module")
def library():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")


@pytest.fixture
def registered(library):
    plugin.register(NAME, hs.PoincareBall(), eps=1e-2)
    yield NAME
    if NAME in plugin._registered:
        plugin.unregister(NAME)


def config(library, family):
    if family == "llama":
        return library.LlamaConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
        )
    return library.GPT2Config(
        vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=None
    )


def model(library, family, name=NAME):
    torch.manual_seed(0)
    made = library.AutoModelForCausalLM.from_config(config(library, family), attn_implementation=name)
    with torch.no_grad():  # the library's small initial weights put all points at one place
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return made.eval()


def tokens(b=2, n=9, seed=0):
    return torch.randint(1, 40, (b, n), generator=torch.Generator().manual_seed(seed))


def close(a, b, tolerance=2e-4):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_54_a_causal_model_stays_causal(library, registered, family):
    """Fault 54: a new last token moves the last output and no other."""
    made, ids = model(library, family), tokens()
    other = ids.clone()
    other[:, -1] = (ids[:, -1] % 38) + 1
    with torch.no_grad():
        before, after = made(ids).logits, made(other).logits
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert (before[:, -1] - after[:, -1]).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_attention_is_the_one_registered(library, registered, family):
    """One layer's output from its own query, key and value; and not what sdpa gives."""
    made, ids = model(library, family), tokens()
    seen = {}
    interface = library.AttentionInterface()
    inner = interface[NAME]

    def record(module, query, key, value, mask, **kwargs):
        out = inner(module, query, key, value, mask, **kwargs)
        seen.setdefault("call", (query, key, value, mask, out[0]))
        return out

    interface.register(NAME, record)
    with torch.no_grad():
        logits = made(ids).logits
        query, key, value, mask, out = seen["call"]
        assert mask is None and key.shape[1] == (2 if family == "llama" else 4)
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        ball = hs.PoincareBall()
        q, k = (hs.attention.into_manifold(t.double(), ball) for t in (query, key))
        w = (1 / (ball.dist(q[:, :, :, None], k[:, :, None]) ** 2 + 1e-2)).tril()
        right = (w / w.sum(-1, keepdim=True)) @ value.double()
        close(out.double(), right.transpose(1, 2))
        made.set_attn_implementation("sdpa")
        assert (made(ids).logits - logits).abs().max() > 1e-2


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches(library, registered, family, side):
    made = model(library, family)
    long, short = tokens(1, 9), tokens(1, 6, seed=1)
    pad = torch.zeros(1, 3, dtype=torch.long)
    padded = torch.cat((pad, short) if side == "left" else (short, pad), 1)
    ids = torch.cat((long, padded))
    mask = (ids != 0).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        found = made(ids, attention_mask=mask, position_ids=positions).logits
        close(found[:1], made(long).logits)
        real = found[1:, 3:] if side == "left" else found[1:, :6]
        close(real, made(short).logits)
        unmasked = made(ids, position_ids=positions).logits
    if side == "left":
        assert (unmasked[1, 3:] - real).abs().max() > 1e-2
    assert found.isfinite().all()  # left padding has no keys at all to look at


def test_an_encoder_sees_both_ways_and_not_its_padding(library, registered):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
    made = library.BertModel._from_config(
        library.BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=16, initializer_range=0.3),
        attn_implementation=NAME,
    ).eval()
    ids = tokens(1, 6)
    other = torch.cat((ids[:, :5], ids[:, 5:] % 38 + 1), 1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    with torch.no_grad():
        before, after = (made(t).last_hidden_state for t in (ids, other))
        assert (before - after)[:, 0].abs().max() > 1e-3
        before, after = (made(t, attention_mask=mask).last_hidden_state for t in (ids, other))
        assert torch.equal(before[:, :5], after[:, :5])


def test_a_sliding_window_is_kept(library, registered):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
    made = library.MistralForCausalLM._from_config(
        library.MistralConfig(
            **sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=3, initializer_range=0.3
        ),
        attn_implementation=NAME,
    ).eval()
    ids = tokens(1, 8)
    other = torch.cat((ids[:, :1] % 38 + 1, ids[:, 1:]), 1)
    with torch.no_grad():
        moved = (made(ids).logits - made(other).logits).abs().amax(-1)[0]
    assert bool((moved[:3] > 1e-3).all()) and not moved[3:].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains(library, registered, family):
    made, ids = model(library, family).train(), tokens()
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = made(ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("beams", [1, 2])
def test_generate_with_its_cache_equals_the_whole_forward(library, registered, family, beams):
    made = model(library, family)
    ids = tokens(2, 5)
    ids[1, :2] = 0
    mask = (ids != 0).long()
    how = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "output_logits": True}
    made.generation_config.eos_token_id = None
    with_cache = made.generate(ids, attention_mask=mask, return_dict_in_generate=True, **how)
    without = made.generate(ids, attention_mask=mask, use_cache=False, return_dict_in_generate=True, **how)
    assert torch.equal(with_cache.sequences, without.sequences)
    if beams > 1:
        return
    whole = torch.cat((mask, torch.ones(2, 6, dtype=torch.long)), 1)
    positions = (whole.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = made(with_cache.sequences, attention_mask=whole, position_ids=positions).logits
    close(torch.stack(with_cache.logits, 1), logits[:, 4:-1])


def test_a_static_cache(library, registered):
    """Keys beyond the tokens seen are there and masked."""
    made = model(library, "llama")
    ids = tokens(2, 5)
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    made.generation_config.eos_token_id = None
    found = made.generate(ids, attention_mask=torch.ones_like(ids), **how)
    right = made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(found, right)


def test_names_are_registered_again_and_taken_back(library, registered):
    made, ids = model(library, "llama"), tokens()
    with torch.no_grad():
        first = made(ids).logits
        plugin.register(NAME, hs.Sphere(), eps=1e-2)
        assert (made(ids).logits - first).abs().max() > 1e-2  # the new meaning, for a model made before
        plugin.register(NAME, hs.PoincareBall(), eps=1e-2)
        assert torch.equal(made(ids).logits, first)
        plugin.unregister(NAME)
        with pytest.raises(KeyError, match=NAME):
            made(ids)
    with pytest.raises(ValueError, match="is not supported"):
        model(library, "llama")
    assert NAME not in library.AttentionInterface() and NAME not in library.AttentionMaskInterface()
    with pytest.raises(ValueError, match="not registered here"):
        plugin.unregister(NAME)
    for taken in ("sdpa", "eager"):
        with pytest.raises(ValueError, match="already an attention implementation"):
            plugin.register(taken, hs.Sphere())
        with pytest.raises(ValueError, match="not registered here"):
            plugin.unregister(taken)
    with pytest.raises(TypeError, match="PoincareBall"):
        plugin.register("horosphere:new", "ball")


def test_what_a_distance_cannot_do_is_refused(library, registered):
    attention = library.AttentionInterface()[NAME]
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="softcap"):
        attention(torch.nn.Module(), q, q, q, None, softcap=30.0)


def test_dot_is_the_librarys_own(library):
    """The same model through sdpa: with weight="dot" the two agree."""
    plugin.register("horosphere:dot", hs.PoincareBall(), weight="dot")
    try:
        ids = tokens()
        mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
        for family in FAMILIES:
            made, theirs = model(library, family, "horosphere:dot"), model(library, family, "sdpa")
            with torch.no_grad():
                close(
                    made(ids, attention_mask=mask).logits[:, 3:], theirs(ids, attention_mask=mask).logits[:, 3:], 1e-4
                )
    finally:
        plugin.unregister("horosphere:dot")


def test_importing_horosphere_does_not_import_transformers():
    code = "import sys, horosphere.integrations.transformers; assert 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_without_transformers_the_reason_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install"):
        plugin.register("horosphere:absent", hs.Sphere())

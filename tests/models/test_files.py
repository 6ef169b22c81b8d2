"""Files of language models: damage is told, and a small file cannot ask for a large model."""

import dataclasses

import pytest
import torch
from safetensors.torch import save as to_bytes

from horosphere import _files
from horosphere.models import FiberBundleConfig, FiberBundleLM, GeoResolverConfig, GeoResolverLM

GEO = {"vocab_size": 11, "dim": 8, "depth": 2, "heads": 2, "memory_capacity": 4, "memory_dim": 3, "memory_top_k": 2}
FIBER = {"vocab_size": 11, "dim": 8, "depth": 2, "heads": 2, "rank": 2, "max_length": 6, "planes": 1}


def make(name):
    torch.manual_seed(0)
    if name != "fiber":
        return GeoResolverLM(GeoResolverConfig(**GEO, landmarks=5, pattern="dense" if name == "geo" else name))
    return FiberBundleLM(FiberBundleConfig(**FIBER))


def save_with(path, model, **changes):
    """A file whose configuration is not that of its tensors; its checksum is right."""
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
    config = {**dataclasses.asdict(model.config), **changes}
    _files.save(path, type(model).__name__, tensors, {"config": config}, to_bytes)


@pytest.mark.parametrize("name", ["geo", "landmark", "summary", "fixed", "fiber"])
def test_a_file_of_the_same_configuration_is_read(tmp_path, name):
    model = make(name)
    save_with(tmp_path / "m", model)
    found = type(model).load(tmp_path / "m")
    assert all(torch.equal(value, found.state_dict()[key]) for key, value in model.state_dict().items())
    model.save(tmp_path / "n")
    assert (tmp_path / "m").read_bytes() == (tmp_path / "n").read_bytes()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("geo", {"vocab_size": 30_000_000}),
        ("geo", {"depth": 1_000_000_000}),
        ("geo", {"dim": 80_000, "heads": 2}),
        ("geo", {"heads": 4}),
        ("geo", {"memory_capacity": 1_000_000_000}),
        ("geo", {"memory_capacity": 0}),
        ("geo", {"memory_dim": 1_000_000_000}),
        ("geo", {"memory_window": 1_000_000_000}),
        ("geo", {"memory_window": -1}),
        ("geo", {"pattern": "landmark"}),
        ("landmark", {"pattern": "dense"}),
        ("landmark", {"landmarks": 1_000_000_000}),
        ("geo", {"vocab_size": 11.5}),
        ("geo", {"dim": "8"}),
        ("geo", {"depth": 2.5}),
        ("geo", {"depth": None}),
        ("geo", {"kappa": None}),
        ("geo", {"unknown": 1}),
        ("fiber", {"vocab_size": 30_000_000}),
        ("fiber", {"depth": 1_000_000_000}),
        ("fiber", {"dim": 80_000}),
        ("fiber", {"heads": 4}),
        ("fiber", {"rank": 1_000_000_000}),
        ("fiber", {"rank": 0}),
        ("fiber", {"feedforward": 1_000_000_000}),
        ("fiber", {"max_length": 1_000_000_000}),
        ("fiber", {"planes": 2}),
        ("fiber", {"planes": 0}),
        ("fiber", {"end": None}),
        ("fiber", {"power": None}),
    ],
)
def test_a_configuration_that_is_not_the_tensors_is_refused_before_a_large_one_is_built(
    tmp_path, monkeypatch, name, changes
):
    model = make(name)
    save_with(tmp_path / "m", model, **changes)
    if any(isinstance(value, int) and value >= 80_000 for value in changes.values()):
        monkeypatch.setattr(type(model), "__init__", lambda *_: pytest.fail("the model was built"))
    with pytest.raises(ValueError, match=r"m (has a configuration that|does not hold the tensors of)"):
        type(model).load(tmp_path / "m")


@pytest.mark.parametrize("about", [{}, {"config": None}, {"config": []}, {"config": {}}, {"config": "dim"}])
@pytest.mark.parametrize("name", ["geo", "fiber"])
def test_a_file_without_a_configuration_is_refused(tmp_path, name, about):
    model = make(name)
    tensors = {key: t.detach().clone() for key, t in model.state_dict().items()}
    _files.save(tmp_path / "m", type(model).__name__, tensors, about, to_bytes)
    with pytest.raises(ValueError, match="m has a configuration that"):
        type(model).load(tmp_path / "m")


@pytest.mark.parametrize("name", ["geo", "fiber"])
def test_a_flipped_bit_is_told(tmp_path, name):
    model = make(name)
    model.save(tmp_path / "m")
    good = (tmp_path / "m").read_bytes()
    size = int.from_bytes(good[:8], "little")
    for place in [*range(0, 8 + size, 97), *range(8 + size, len(good), len(good) // 40), len(good) - 1]:
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        (tmp_path / "m").write_bytes(bad)
        with pytest.raises(ValueError, match=r"m (is|has|holds) "):
            type(model).load(tmp_path / "m")

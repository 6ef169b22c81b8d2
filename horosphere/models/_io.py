"""Models in files: the tensors of a state_dict and the configuration, in one safetensors file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from safetensors.torch import save as to_bytes

from horosphere import _files

Model = TypeVar("Model", bound=torch.nn.Module)


class ModelConfig(Protocol):
    """A frozen dataclass of JSON-able fields, of a model of ``depth`` blocks."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def depth(self) -> int: ...


Config = TypeVar("Config", bound=ModelConfig)


def save_model(path: str | os.PathLike, model: torch.nn.Module, config: ModelConfig) -> None:
    """Write ``model.state_dict()`` and its configuration, whole or not at all.

    A tensor that several names share is written for each of them.
    """
    tensors = {
        name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in model.state_dict().items()
    }
    _files.save(path, type(model).__name__, tensors, {"config": dataclasses.asdict(config)}, to_bytes)


def load_model(
    path: str | os.PathLike,
    model_class: type[Model],
    config_class: type[Config],
    sizes: Callable[[Config], dict[str, tuple[int, ...]]],
) -> Model:
    """The model that :func:`save_model` wrote, ``model_class(config)`` with its numbers, on the CPU.

    Args:
        sizes: of a configuration, the shapes of the tensors that grow with it. They are compared with the file's, and
            ``config.depth`` with the file's blocks, before anything is built: a small file asks for little memory.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no whole file of this kind, or its configuration or tensors are not those of this class.
    """
    tensors, about = _files.load(path, model_class.__name__, "pt")
    try:
        config = config_class(**about["config"])
        _compare(tensors, config.depth, sizes(config))
        model = model_class(config)
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has a configuration that {config_class.__name__} does not take: {error}") from None
    for name, t in model.state_dict(keep_vars=True).items():
        if name in tensors:
            t.data = t.data.to(tensors[name].dtype)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{path} does not hold the tensors of a {model_class.__name__}: {error}") from None
    return model


def _compare(tensors: dict[str, torch.Tensor], depth: int, sizes: dict[str, tuple[int, ...]]) -> None:
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    if type(depth) is not int or len(blocks) != depth:
        raise ValueError(f"depth is {depth}, and the file holds {len(blocks)} blocks")
    for name, shape in sizes.items():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            raise ValueError(f"{name} would have the shape {shape}, and the file holds {found or 'none'}")

"""Files of embeddings: arrays and a JSON description in one safetensors file."""

import os
from typing import Any

import numpy as np
from safetensors.numpy import save as to_bytes

from horosphere import _files
from horosphere._files import write_atomically

__all__ = ["check_labels", "load_tensors", "save_tensors", "write_atomically"]


def save_tensors(path: str | os.PathLike, kind: str, tensors: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    """Write arrays by name and a JSON-able description, as :func:`horosphere._files.save`."""
    _files.save(path, kind, {name: np.ascontiguousarray(array) for name, array in tensors.items()}, about, to_bytes)


def load_tensors(path: str | os.PathLike, kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a file of `save_tensors`: (tensors, about); errors as :func:`horosphere._files.load`."""
    return _files.load(path, kind, "numpy")


def check_labels(nodes: list) -> list:
    """The labels as JSON keeps them: strings, integers, floats and booleans, numpy's scalars included.

    Raises:
        TypeError: naming the first label of another kind.
    """
    plain = [label.item() if isinstance(label, np.generic) else label for label in nodes]
    for label in plain:
        if not isinstance(label, str | int | float):
            raise TypeError(
                f"the label {label!r} ({type(label).__name__}) cannot be saved: use strings, integers or floats as "
                "labels, for instance networkx.convert_node_labels_to_integers(graph)"
            )
    return plain

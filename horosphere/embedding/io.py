"""Files of embeddings: arrays and a JSON description in one safetensors file."""

import math
import os
from collections.abc import Hashable, Iterable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from safetensors.numpy import save as to_bytes

from horosphere import _files
from horosphere._files import write_atomically

__all__ = ["from_json", "load_tensors", "save_tensors", "to_json", "unsaveable", "write_atomically"]


def save_tensors(path: str | os.PathLike, kind: str, tensors: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    """Write arrays by name and a JSON-able description, as :func:`horosphere._files.save`."""
    _files.save(path, kind, {name: np.ascontiguousarray(array) for name, array in tensors.items()}, about, to_bytes)


def load_tensors(
    path: str | os.PathLike, kind: str, dimensions: dict[str, int | None] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a file of `save_tensors`: (tensors, about); errors as :func:`horosphere._files.load`.

    Args:
        dimensions: of each array that has to be there, how many it has, None: any; edges are int32, all others float64.
    """
    tensors, about = _files.load(path, kind, "numpy")
    for name, dimension in (dimensions or {}).items():
        array = tensors.get(name)
        wanted = np.int32 if name == "edges" else np.float64
        if array is None or dimension not in (None, array.ndim) or array.dtype != wanted:
            found = "missing" if array is None else f"{array.dtype} of shape {array.shape}"
            raise ValueError(
                f"{os.fspath(path)} is not a whole saved {kind}: {name!r} is {found}; "
                f"expected {np.dtype(wanted)}{'' if dimension is None else f', {dimension}-dimensional'}"
            )
    return tensors, about


def to_json(nodes: Iterable[Hashable]) -> list:
    """The labels as JSON keeps them: strings, finite numbers and booleans (numpy's scalars included) as they are,
    tuples of them as ``{"tuple": [...]}``, paths as ``{"path": "..."}``.

    Raises:
        TypeError: naming the first label of another kind.
    """
    return [_encoded(label) for label in nodes]


def from_json(nodes: list) -> list[Hashable]:
    """The labels that `to_json` wrote: tuples are tuples again, paths `pathlib.Path` (pure paths included).

    Raises:
        ValueError: for anything that `to_json` does not write.
    """
    return [_decoded(label) for label in nodes]


def unsaveable(nodes: Iterable[Hashable]) -> str | None:
    """Why these labels cannot be saved, or None."""
    try:
        to_json(nodes)
    except TypeError as error:
        return str(error)
    return None


def _encoded(label: Any) -> Any:
    if isinstance(label, np.generic):
        label = label.item()
    # Exactly these types: an enumeration or another subclass would come back as a plain number or string.
    if type(label) in (str, int, bool) or (type(label) is float and math.isfinite(label)):
        return label
    if type(label) is tuple:
        return {"tuple": [_encoded(part) for part in label]}
    if isinstance(label, PurePath):
        return {"path": str(label)}
    raise TypeError(
        f"the label {label!r} ({type(label).__name__}) cannot be saved: use strings, finite numbers, paths or tuples "
        "of them as labels, for instance networkx.convert_node_labels_to_integers(graph)"
    )


def _decoded(label: Any) -> Hashable:
    match label:
        case str() | int() | float():
            return label
        case {"tuple": [*parts]}:
            return tuple(map(_decoded, parts))
        case {"path": str(path)}:
            return Path(path)
    raise ValueError(f"{label!r} is not a label")

"""Files: written whole or not at all, the same bytes for the same content, no pickle."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

__all__ = ["check_labels", "load_tensors", "save_tensors", "write_atomically"]

_KEY = "horosphere"
_VERSION = 1


def write_atomically(path: str | os.PathLike, data: bytes) -> None:
    """Replace the file by one with this content: after a crash or on a full disk the old file is still whole.

    The bytes go to a temporary file in the same folder, reach the disk, and take the name in one step.

    Raises:
        OSError: whatever the system reports (no space, no permission); the temporary file is removed.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder; a file name is needed")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        # The new name itself survives a power cut only once the folder has reached the disk.
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def save_tensors(path: str | os.PathLike, kind: str, tensors: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    """Write a safetensors file whose metadata holds one JSON text (one entry, because their order is not fixed).

    Args:
        kind: what the file is, e.g. ``"GraphEmbedding"``; checked when it is loaded.
        tensors: arrays by name.
        about: JSON-able description.
    """
    text = json.dumps({"kind": kind, "version": _VERSION, **about}, ensure_ascii=False, allow_nan=False, sort_keys=True)
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    write_atomically(path, to_bytes(contiguous, metadata={_KEY: text}))


def load_tensors(path: str | os.PathLike, kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a file of `save_tensors`: (tensors, about).

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if the file is not a whole safetensors file, not one of horosphere's, of another kind, or of a
            newer version.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; a file name is needed")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, TypeError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
    if _KEY not in metadata:
        raise ValueError(f"{path} is a safetensors file, but not one written by horosphere")
    try:
        about = json.loads(metadata[_KEY])
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} has a damaged description: {error}") from None
    if about.get("kind") != kind:
        raise ValueError(f"{path} holds a {about.get('kind')}, not a {kind}")
    if about.get("version", 0) > _VERSION:
        raise ValueError(f"{path} has format version {about['version']}; this horosphere reads up to {_VERSION}")
    return tensors, about


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

"""Files of tensors: written whole or not at all, the same bytes for the same content, no pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

KEY = "horosphere"
VERSION = 1


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


def save(path: str | os.PathLike, kind: str, tensors: dict, about: dict[str, Any], to_bytes: Callable) -> None:
    """Write a safetensors file whose metadata holds one JSON text (one entry, because their order is not fixed).

    Args:
        kind: what the file is, e.g. ``"GraphEmbedding"``; checked when it is loaded.
        tensors: by name, of the library that ``to_bytes``, its ``safetensors.*.save``, takes.
        about: JSON-able description.
    """
    text = json.dumps({"kind": kind, "version": VERSION, **about}, ensure_ascii=False, allow_nan=False, sort_keys=True)
    write_atomically(path, to_bytes(tensors, metadata={KEY: text}))


def load(path: str | os.PathLike, kind: str, framework: str) -> tuple[dict, dict[str, Any]]:
    """Read a file of :func:`save`: (tensors, about).

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
        with safe_open(path, framework=framework) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, TypeError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
    if KEY not in metadata:
        raise ValueError(f"{path} is a safetensors file, but not one written by horosphere")
    try:
        about = json.loads(metadata[KEY])
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} has a damaged description: {error}") from None
    if about.get("kind") != kind:
        raise ValueError(f"{path} holds a {about.get('kind')}, not a {kind}")
    if about.get("version", 0) > VERSION:
        raise ValueError(f"{path} has format version {about['version']}; this horosphere reads up to {VERSION}")
    return tensors, about

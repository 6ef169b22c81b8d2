"""Files of tensors: written whole or not at all, checked by a sum, the same bytes for the same content, no pickle."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from safetensors import SafetensorError, safe_open

KEY = "horosphere"
VERSION = 1
# In the place of the checksum while it is taken.
_BLANK = "0" * 64
# A temporary file of this age, in seconds, was left by a process that was killed: no write takes an hour.
_STALE = 3600


def write_atomically(path: str | os.PathLike, *parts: bytes | memoryview) -> None:
    """Replace the file by one with this content: after a crash or on a full disk the old file is still whole.

    The bytes go to a temporary file in the same folder, reach the disk, and take the name in one step. Any number of
    threads and processes may write to one path: the last one stays, whole. The temporary file is removed after an error
    and, in the main thread, on SIGTERM; one that a SIGKILL left is removed by the next write to the same path after
    an hour.

    Args:
        path: a regular file or a name that is free; of a link, what it leads to is replaced.
        parts: the content, in this order.

    Raises:
        ValueError: if the path is a device, a pipe or a socket.
        OSError: whatever the system reports (no space, no permission, a folder, a loop of links).
    """
    target = checked_target(path)
    # Temporary names are short whatever the length of the target's, and tell whose they are.
    prefix = f".horosphere-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:12]}-"
    _remove_stale(target.parent, prefix)
    temporary = target.with_name(f"{prefix}{secrets.token_hex(8)}.tmp")
    with _removed_on_sigterm(temporary):
        try:
            with open(temporary, "xb") as file:
                for part in parts:
                    file.write(part)
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


def checked_target(path: str | os.PathLike) -> Path:
    """Where a write to this path goes, links followed: a regular file or a free name; errors of `write_atomically`."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
    if target.exists():
        _check_regular(path, target.stat())
    return target


def _check_regular(path: str | os.PathLike, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(f"{os.fspath(path)} is a folder; a file name is needed")
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{os.fspath(path)} is a device, a pipe or a socket; a regular file is needed")


def _remove_stale(folder: Path, prefix: str) -> None:
    for left in folder.glob(f"{prefix}*.tmp"):
        try:
            if left.stat().st_mtime < time.time() - _STALE:
                left.unlink()
        except OSError:
            pass  # Another process was faster, or may and we may not: the write itself does not depend on it.


@contextmanager
def _removed_on_sigterm(temporary: Path) -> Iterator[None]:
    """Remove the file before SIGTERM ends the process, as it does where nobody else asked for the signal."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        temporary.unlink(missing_ok=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def save(path: str | os.PathLike, kind: str, tensors: dict, about: dict[str, Any], to_bytes: Callable) -> None:
    """Write a safetensors file whose metadata holds one JSON text (one entry, because their order is not fixed).

    The text begins with the SHA-256 of the whole file, taken with zeros in its own place.

    Args:
        kind: what the file is, e.g. ``"GraphEmbedding"``; checked when it is loaded.
        tensors: by name, of the library that ``to_bytes``, its ``safetensors.*.save``, takes.
        about: JSON-able description.
    """
    text = json.dumps({"kind": kind, "version": VERSION, **about}, allow_nan=False, sort_keys=True)
    data = memoryview(to_bytes(tensors, metadata={KEY: f'{{"sha256": "{_BLANK}", {text[1:]}'}))
    # Metadata comes first in a safetensors file, and the checksum first in it: no other zeros stand before it.
    start = 8 + bytes(data[8 : 8 + _header_size(data[:8])]).index(_BLANK.encode())
    checksum = hashlib.sha256(data).hexdigest().encode()
    write_atomically(path, data[:start], checksum, data[start + len(checksum) :])


def load(path: str | os.PathLike, kind: str, framework: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a file of :func:`save`: (tensors, about).

    Raises:
        FileNotFoundError: if there is none.
        OSError: if it cannot be read, is a folder or a loop of links.
        ValueError: if the file is not a whole safetensors file, not one of horosphere's, of another kind, of a newer
            version, or not what its checksum says.
    """
    path = Path(path)
    try:
        _check_regular(path, path.stat())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    try:
        with safe_open(path, framework=framework) as file:
            metadata = file.metadata() or {}
            names = list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
    if KEY not in metadata:
        raise ValueError(f"{path} is a safetensors file, but not one written by horosphere")
    about = _description(path, metadata[KEY])
    if about.get("kind") != kind:
        raise ValueError(f"{path} holds a {about.get('kind')}, not a {kind}")
    version = about.get("version", 0)
    if type(version) is not int or version > VERSION:
        raise ValueError(f"{path} has format version {version}; this horosphere reads up to {VERSION}")
    _check_sum(path, kind, about.pop("sha256", None))
    try:
        with safe_open(path, framework=framework) as file:
            return {name: file.get_tensor(name) for name in names}, about
    except (SafetensorError, AttributeError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} holds numbers of a type that cannot be read: {error}") from None


def _description(path: Path, text: str) -> dict[str, Any]:
    try:
        about = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged description: {error}") from None
    if not isinstance(about, dict):
        raise ValueError(f"{path} has a damaged description: it is a {type(about).__name__}, not an object")
    return about


def _header_size(start: bytes | memoryview) -> int:
    """Of a safetensors file, from its first 8 bytes."""
    return int.from_bytes(start, "little")


def _check_sum(path: Path, kind: str, checksum: Any) -> None:
    if not isinstance(checksum, str) or not re.fullmatch("[0-9a-f]{64}", checksum):
        raise ValueError(f"{path} is not a whole saved {kind}: it has no checksum")
    with open(path, "rb") as file:
        start = file.read(8)
        header = file.read(_header_size(start))
        digest = hashlib.sha256(start + header.replace(checksum.encode(), _BLANK.encode(), 1))
        while block := file.read(2**20):
            digest.update(block)
    if digest.hexdigest() != checksum:
        raise ValueError(f"{path} is damaged: its content is not what its checksum says; take another copy of it")

"""Files of tensors on a file system that others use too: whole, alone, and what they were."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save as numpy_bytes
from safetensors.torch import save as torch_bytes

from horosphere import _files

ABOUT = {"text": "dog 🙂", "number": 1.5, "nested": [{"a": None}], "zeros": "0" * 64}
TENSORS = {"a": np.arange(5.0), "b": np.arange(6, dtype=np.int32).reshape(2, 3)}


def write(path):
    _files.save(path, "Thing", TENSORS, ABOUT, numpy_bytes)


def test_round_trip(tmp_path):
    write(tmp_path / "f")
    tensors, about = _files.load(tmp_path / "f", "Thing", "numpy")
    assert all(np.array_equal(tensors[name], TENSORS[name]) for name in TENSORS) and tensors.keys() == TENSORS.keys()
    assert about == {**ABOUT, "kind": "Thing", "version": _files.VERSION}


def test_no_flipped_bit_is_loaded(tmp_path):
    """One bit of every byte: of the size, the header, the description, the checksum, the padding and the numbers."""
    path = tmp_path / "f"
    write(path)
    good = path.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"f (is|has|holds)"):
            _files.load(path, "Thing", "numpy")
    path.write_bytes(good + b"\0")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        _files.load(path, "Thing", "numpy")
    path.write_bytes(good)
    _files.load(path, "Thing", "numpy")


def test_a_changed_number_is_told_as_damage(tmp_path):
    write(tmp_path / "f")
    data = bytearray((tmp_path / "f").read_bytes())
    data[-1] ^= 1
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(ValueError, match="f is damaged: its content is not what its checksum says"):
        _files.load(tmp_path / "f", "Thing", "numpy")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_numbers_that_the_reader_does_not_know_are_a_value_error(tmp_path, dtype):
    _files.save(tmp_path / "f", "Thing", {"a": torch.zeros(3).to(dtype)}, {}, torch_bytes)
    with pytest.raises(ValueError, match="f holds numbers of a type that cannot be read"):
        _files.load(tmp_path / "f", "Thing", "numpy")


@pytest.mark.parametrize("length", [1, 200, 250, 255])
def test_a_name_as_long_as_the_system_takes(tmp_path, length):
    path = tmp_path / ("n" * length)
    write(path)
    write(path)
    assert list(tmp_path.iterdir()) == [path]


def test_threads_that_save_to_one_path(tmp_path):
    failed = []

    def many():
        try:
            for _ in range(25):
                _files.write_atomically(tmp_path / "f", b"x" * 1000)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and os.listdir(tmp_path) == ["f"] and (tmp_path / "f").read_bytes() == b"x" * 1000


def killed_while_saving(folder, number):
    """Leaves a process at the moment before its file takes its name, and sends it a signal."""
    code = (
        "import os, sys, time; from horosphere import _files\n"
        "def stop(*_): print('here', flush=True); time.sleep(60)\n"
        "_files.os.replace = stop\n"
        "_files.write_atomically(sys.argv[1], b'new')"
    )
    running = subprocess.Popen([sys.executable, "-c", code, folder / "f"], stdout=subprocess.PIPE)
    assert running.stdout.readline() == b"here\n"
    running.send_signal(number)
    assert running.wait() == -number
    running.stdout.close()


def test_sigterm_while_saving_leaves_nothing_and_still_ends_the_process(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    killed_while_saving(tmp_path, signal.SIGTERM)
    assert os.listdir(tmp_path) == ["f"] and (tmp_path / "f").read_bytes() == b"old"


def test_what_sigkill_left_is_removed_by_a_later_save_to_the_same_path(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    killed_while_saving(tmp_path, signal.SIGKILL)
    (left,) = (path for path in tmp_path.iterdir() if path.name != "f")
    assert (tmp_path / "f").read_bytes() == b"old"
    write(tmp_path / "f")
    assert left.exists()  # It may be of a process that is still writing.
    past = time.time() - 2 * 3600
    os.utime(left, (past, past))
    write(tmp_path / "other")
    assert left.exists()  # It is nobody's business but that of the same path.
    write(tmp_path / "f")
    assert sorted(os.listdir(tmp_path)) == ["f", "other"]


def test_a_handler_of_sigterm_stays(tmp_path):
    before = signal.signal(signal.SIGTERM, handler := lambda *_: None)
    try:
        write(tmp_path / "f")
        assert signal.getsignal(signal.SIGTERM) is handler
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        write(tmp_path / "f")
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def make_pipe(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def make_link_to_pipe(path):
    os.mkfifo("pipe")
    path.symlink_to("pipe")


@pytest.mark.parametrize("make", [make_pipe, make_socket, make_link_to_pipe])
def test_what_is_no_regular_file_is_neither_replaced_nor_read(tmp_path, make, monkeypatch):
    monkeypatch.chdir(tmp_path)  # The name of a socket must be short.
    path = Path("f")
    make(path)
    before, names = path.stat(), sorted(os.listdir())
    for act in (write, lambda path: _files.load(path, "Thing", "numpy")):
        with pytest.raises(ValueError, match="f is a device, a pipe or a socket; a regular file is needed"):
            act(path)
    assert path.stat() == before and sorted(os.listdir()) == names


def test_a_loop_of_links_is_an_os_error(tmp_path):
    (tmp_path / "f").symlink_to(tmp_path / "g")
    (tmp_path / "g").symlink_to(tmp_path / "f")
    for act in (write, lambda path: _files.load(path, "Thing", "numpy")):
        with pytest.raises(OSError, match="symbolic links"):
            act(tmp_path / "f")
    assert (tmp_path / "f").is_symlink()


def test_a_folder_is_an_os_error(tmp_path):
    for act in (write, lambda path: _files.load(path, "Thing", "numpy")):
        with pytest.raises(IsADirectoryError):
            act(tmp_path)

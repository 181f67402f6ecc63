"""Folders of measurements, if a signal comes at the worst moment."""

from __future__ import annotations

import os
import select
import signal
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from torchrl_dist.bench import command


@pytest.fixture
def interrupt() -> Any:
    """Send SIGINT to another thread. Its handler runs in this one, no matter what this blocks.

    The other thread may receive it late, so wait until it did: a later handler ends this process.
    """
    done = threading.Event()
    ours, its = socket.socketpair()
    for end in (ours, its):
        end.setblocking(False)
    before = signal.set_wakeup_fd(its.fileno(), warn_on_full_buffer=False)
    other = threading.Thread(target=done.wait, daemon=True)
    other.start()
    ident = other.ident
    assert ident is not None

    def send() -> None:
        signal.pthread_kill(ident, signal.SIGINT)
        assert select.select([ours], [], [], 30)[0], "no thread received SIGINT"
        ours.recv(4096)

    yield send
    signal.set_wakeup_fd(before)
    done.set()
    other.join(10)
    for end in (ours, its):
        end.close()


@pytest.mark.parametrize("at", ["made", "inside", "removed", "twice"])
def test_ctrl_c_leaves_no_folder(at: str, interrupt, tmp_path, monkeypatch) -> None:
    make, remove = tempfile.mkdtemp, command._remove

    def made(**options: Any) -> str:
        folder = make(**options)
        if at in ("made", "twice"):
            interrupt()
            for _ in range(1000):  # where Python looks for signals
                os.getpid()
        return folder

    def removed(folder: Path) -> None:
        if at in ("removed", "twice"):
            interrupt()
        remove(folder)

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    monkeypatch.setattr(command, "_remove", removed)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), command.folder_in(tmp_path):
        assert at in ("inside", "removed")  # else raised before
        if at == "inside":
            interrupt()
            for _ in range(1000):
                os.getpid()
            pytest.fail("not interrupted")
    assert list(tmp_path.iterdir()) == []
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_folder_is_made_and_removed_in_any_thread(tmp_path: Path) -> None:
    seen = []

    def use() -> None:
        with command.folder_in(tmp_path) as folder:
            seen.append(folder.is_dir())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(10)
    assert seen == [True] and list(tmp_path.iterdir()) == []

"""Tests that must run alone do; they wait for running tests and for none that starts later."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tests.turns import ALONE, Turns, is_alone


class Player(threading.Thread):
    """Take one turn, and keep it until ``leave``."""

    def __init__(self, folder: Path, *, alone: bool = False) -> None:
        super().__init__(daemon=True)
        self.turns, self.alone = Turns("x", str(folder)), alone
        self.inside, self.go = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self.turns.take(alone=self.alone):
            self.inside.set()
            self.go.wait(20)
        self.turns.close()

    def leave(self) -> None:
        self.go.set()
        self.join(20)


def test_a_test_that_must_run_alone_comes_next_and_runs_alone(tmp_path: Path) -> None:
    first, second = Player(tmp_path), Player(tmp_path)
    assert first.inside.wait(20) and second.inside.wait(20)
    alone = Player(tmp_path, alone=True)
    time.sleep(0.1)  # it waits at the door
    late = Player(tmp_path)
    first.leave()
    assert not alone.inside.wait(0.1) and not late.inside.is_set()
    second.leave()
    assert alone.inside.wait(20) and not late.inside.wait(0.1)
    alone.leave()
    assert late.inside.wait(20)
    assert os.listdir(tmp_path)
    late.leave()
    assert not os.listdir(tmp_path)  # the last one has removed the files


def test_a_turn_ends_although_a_child_goes_on(tmp_path: Path) -> None:
    turns, other = Turns("x", str(tmp_path)), Turns("x", str(tmp_path))
    read, write = os.pipe()
    with turns.take(alone=True):
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    try:
        taken = threading.Event()

        def take() -> None:
            with other.take(alone=True):
                taken.set()

        threading.Thread(target=take, daemon=True).start()
        assert taken.wait(20)
    finally:
        os.close(write)
        os.waitpid(child, 0)
    with pytest.raises(ValueError, match="boom"), turns.take(alone=True):
        raise ValueError("boom")
    with other.take(alone=True):
        pass


@pytest.mark.alone
def test_marked_tests_are_known_by_their_names(request: pytest.FixtureRequest) -> None:
    assert is_alone(request.node.nodeid)
    assert is_alone(f"a.py::test_x[1-{ALONE}]")
    for other in (f"a.py::test_{ALONE}", f"a.py::test_x[not_{ALONE}]", "a.py::test_x"):
        assert not is_alone(other)

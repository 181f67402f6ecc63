"""Stop signals: what they end, and which handlers of the program they leave alone."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests import warm
from torchrl_dist.runtime import ForkServer, current_session, local_cluster
from torchrl_dist.runtime.signals import STOP_SIGNALS, Latch, StopSignals

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    now = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert now == before


@pytest.fixture
def stop() -> Iterator[StopSignals]:
    said, latch = [], Latch()
    signals = StopSignals(latch, said.append)
    signals.said, signals.latch = said, latch
    signals.install()
    yield signals
    signals.restore()
    latch.close()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_a_request_and_is_printed_once(stop, number):
    signal.raise_signal(number)
    signal.raise_signal(signal.SIGUSR1)
    assert stop.latch.wait(0) and stop.received == number and stop.said == [number]


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        (signal.SIGINT, signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, signal.SIGTERM, SystemExit),
        (signal.SIGTERM, signal.SIGINT, KeyboardInterrupt),
        (signal.SIGHUP, signal.SIGHUP, SystemExit),
    ],
)
def test_a_second_signal_raises(stop, first, second, error):
    signal.raise_signal(first)
    if second != signal.SIGINT:
        signal.raise_signal(second)  # twice for one stop, as timeout(1) and Slurm do
        time.sleep(0.3)
    with pytest.raises(error):
        signal.raise_signal(second)
    stop.patient = True  # it serves, so the driver ends it
    signal.raise_signal(second)


@pytest.mark.parametrize("number", NOTICES)
def test_a_notice_never_raises_and_the_signal_that_it_announces_is_the_first(stop, number):
    for _ in range(3):
        signal.raise_signal(number)
        time.sleep(0.15)
    signal.raise_signal(signal.SIGTERM)
    assert stop.received == number


def test_a_programs_own_handlers_stay():
    called = []
    own = {number: (lambda n, _: called.append(n)) for number in (signal.SIGTERM, signal.SIGUSR1)}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    read, write = os.pipe()
    faulthandler.register(  # Python does not know this handler
        signal.SIGUSR2, os.fdopen(write, "w"), all_threads=False
    )
    latch = Latch()
    signals = StopSignals(latch)
    signals.install()
    try:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        assert not latch.is_set() and called == [signal.SIGUSR1]
        assert b"test_a_programs_own_handlers_stay" in os.read(read, 2**16)
        signal.raise_signal(signal.SIGTERM)
        assert latch.is_set() and called == [signal.SIGUSR1, signal.SIGTERM]
    finally:
        signals.restore()
        faulthandler.unregister(signal.SIGUSR2)
        assert {number: signal.getsignal(number) for number in own} == own
        for number, handler in before.items():
            signal.signal(number, handler)
        latch.close()
        os.close(read)


def test_a_handler_that_other_code_puts_back_afterwards_passes_signals_on():
    latch = Latch()
    signals = StopSignals(latch)
    signals.install()
    ours = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.restore()
    signal.signal(signal.SIGINT, ours)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not latch.is_set()
    latch.close()


WITH_A_STORAGE = """
import signal
from torchrl.data import LazyMemmapStorage
from torchrl_dist.runtime.signals import Latch, StopSignals

storage = LazyMemmapStorage(4)  # installs handlers that end the process
signals = StopSignals(Latch())
signals.install()
for number in (signal.SIGTERM, signal.SIGINT):
    signals._asked_at = None
    signal.raise_signal(number)
    print(number.name, flush=True)
try:
    signal.raise_signal(number)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_the_handlers_of_a_storage_of_torchrl_do_not_end_the_process_at_the_first_signal(tmp_path):
    out = tmp_path / "out"
    with out.open("w") as stdout:
        program = warm.start([sys.executable, "-c", WITH_A_STORAGE], stdout=stdout)
    assert program.wait(60) == 0
    assert out.read_text().split() == ["SIGTERM", "SIGINT", "interrupted"]


def test_a_forked_child_can_be_terminated_and_does_not_stop_its_parent(stop):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    time.sleep(0.3)
    for number in NOTICES:  # as Slurm sends them to every process of a step
        os.kill(child.pid, number)
    child.join(0.2)
    assert child.is_alive()
    child.terminate()
    child.join(20)
    assert child.exitcode == -signal.SIGTERM
    assert not stop.latch.wait(0)


def _terminate_a_child() -> int:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(20)
    return child.exitcode


def test_signals_to_all_other_processes_of_a_cluster_end_none_of_them():
    with ForkServer() as server:  # which gets them as soon as it runs
        for number in STOP_SIGNALS:
            os.kill(server.pid, number)
        with local_cluster({"a": 1, "b": 2}, timeout_s=60, fork_server=server) as me:
            others = psutil.Process().children(recursive=True)
            for number in STOP_SIGNALS:
                for process in others:
                    os.kill(process.pid, number)
                time.sleep(0.3)
            there = me.of_role("b")
            assert [me.call(peer, os.getpid) for peer in there] == [me.pid_of(p) for p in there]
            assert me.call(there[0], lambda: current_session().stop_signal) in ENDS
            # the signals still end programs that such a process starts
            assert me.call(there[0], _terminate_a_child) == -signal.SIGTERM
            assert not me.stop_requested
        assert me.lost() == ()

"""The parts of the runtime that need no second process."""

from __future__ import annotations

import importlib
import sys
import threading
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.runtime.helpers import Counter
from torchrl_dist.errors import ConfigurationError, DeadlineError
from torchrl_dist.runtime import session, transport, wire
from torchrl_dist.runtime.membership import Membership
from torchrl_dist.runtime.pool import DaemonPool
from torchrl_dist.runtime.signals import Latch, wait_any


def test_large_tensors_stay_outside_the_bytes_and_closures_go_inside():
    factor = 3
    data = TensorDict({"a": torch.arange(100_000), "b": {"c": torch.zeros(4, 2)}}, [])
    body, tensors = wire.dumps((lambda x: x * factor, data))
    assert len(body) < 4_000 and len(tensors) == 1
    triple, back = wire.loads(body, tensors)
    assert triple(2) == 6 and (back == data).all()
    data = TensorDict({"pixels": torch.randint(0, 255, (8, 4, 20, 20)), "x": torch.rand(8, 3)}, [8])
    for sent in (data, data[::2], data.consolidate()):
        back = wire.loads(*wire.dumps(sent))
        assert (back == sent).all() and back.batch_size == sent.batch_size


def test_nested_unpickling_keeps_the_outer_tensors():
    class Inner:
        def __reduce__(self):
            return wire.loads, wire.dumps("inner")

    large = torch.ones(100_000)
    one, inner, two = wire.loads(*wire.dumps((large, Inner(), 0 * large)))
    assert (one.sum().item(), inner, two.sum().item()) == (100_000, "inner", 0)


@pytest.mark.parametrize("size", [7, 100_000])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.arange(n)[::2],
        lambda n: torch.rand(n, 3, requires_grad=True).t(),
        lambda n: torch.rand(n, dtype=torch.complex64).conj(),
        lambda n: torch.rand(n, dtype=torch.complex64).conj().imag,
        lambda n: torch.rand(n).to(torch.bfloat16),
        lambda n: torch.rand(n) > 0.5,
        lambda n: torch.empty(0, n, dtype=torch.float16),
        lambda n: torch.tensor(float(n)),
    ],
)
def test_tensors_of_every_kind_come_back_as_they_were(make, size: int):
    sent = make(size)
    back = wire.loads(*wire.dumps(sent))
    assert back.dtype == sent.dtype and back.shape == sent.shape and not back.requires_grad
    assert torch.equal(back, sent)


@pytest.mark.parametrize("size", [7, 100_000])
def test_a_leaf_requires_grad_after_the_way_and_its_result_does_not(size: int):
    leaf = torch.rand(size, requires_grad=True)
    sent = {"leaf": leaf, "again": leaf, "result": 2 * leaf, "parameter": nn.Parameter(leaf)}
    back = wire.loads(*wire.dumps(sent))
    flags = {name: (each.requires_grad, each.is_leaf) for name, each in back.items()}
    assert back["leaf"] is back["again"] and type(back["parameter"]) is nn.Parameter
    assert flags == dict.fromkeys(sent, (True, True)) | {"result": (False, True)}
    assert all(torch.equal(back[name], each) for name, each in sent.items())


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_small_tensors_and_arrays_are_copies_that_may_be_changed(make):
    sent = make(100)
    body = wire.dumps(sent)
    sent += 1
    back = wire.loads(*body)
    back += 5
    assert back.tolist() == [5.0] * 100 and type(back) is type(sent)


@pytest.mark.parametrize("dtype", ["?", ">i4", "f2", "c16", "M8[s]", "O", "U3", "i4,f8"])
def test_arrays_of_every_kind_come_back_as_they_were(dtype: str):
    sent = np.zeros((4, 3), dtype).T[::2]
    back = wire.loads(*wire.dumps(sent))
    assert back.dtype == sent.dtype and back.shape == sent.shape and (back == sent).all()


def test_a_class_that_a_reload_has_replaced_is_sent_by_value(monkeypatch, tmp_path):
    (tmp_path / "reloaded.py").write_text("class Thing:\n    value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reloaded", raising=False)
    module = importlib.import_module("reloaded")
    old = module.Thing
    assert wire.loads(*wire.dumps(old)) is old
    importlib.reload(module)
    assert module.Thing is not old and wire.loads(*wire.dumps(old)).value == 1
    monkeypatch.delitem(sys.modules, "reloaded")


def test_two_dtypes_over_one_storage_are_sent_as_two_storages():
    whole = torch.zeros(400_000, dtype=torch.uint8)
    _, tensors = wire.dumps((whole, whole.view(torch.float32)))
    assert tensors[0].data_ptr() != tensors[1].data_ptr()


def test_a_tensor_outside_cpu_memory_is_refused_before_it_is_sent():
    with pytest.raises(TypeError, match="meta"):
        wire.dumps(torch.empty(1, device="meta"))


def test_the_pool_runs_calls_up_to_its_limit_and_queues_the_rest():
    pool = DaemonPool(2, "test")
    gate, started = threading.Event(), threading.Semaphore(0)

    def work():
        started.release()
        gate.wait(10)

    for _ in range(3):
        pool.submit(work)
    assert started.acquire(timeout=5) and started.acquire(timeout=5)
    assert not started.acquire(timeout=0.1)
    gate.set()
    assert started.acquire(timeout=5)
    pool.close()


def test_an_idle_thread_of_the_pool_is_used_again():
    pool = DaemonPool(8, "test")
    seen, done = set(), threading.Semaphore(0)
    for _ in range(5):
        pool.submit(lambda: (seen.add(threading.get_ident()), done.release()))
        assert done.acquire(timeout=5)
        time.sleep(0.02)  # let it count itself as idle
    pool.close()
    assert len(seen) == 1


def test_any_of_several_latches_ends_a_wait():
    first, second = Latch(), Latch()
    assert not wait_any((first, second), 0.01)
    threading.Timer(0.05, second.set).start()
    assert wait_any((first, second), 20) and second.is_set() and not first.is_set()
    for latch in (first, second):
        latch.close()


def test_a_barrier_waits_for_its_keeper_and_for_no_rank_that_serves_or_is_lost():
    members, released = Membership(4, me=0), []
    members.serve(1)
    members.arrive(0, 2, lambda: released.append(2))
    members.lose(3, "killed")
    assert not released
    members.arrive(0, 0, lambda: released.append(0))
    assert sorted(released) == [0, 2]
    members = Membership(3, me=0)
    members.arrive(0, 0, lambda: released.append(0))
    members.arrive(0, 1, lambda: released.append(1))
    assert members.missing(0) == {2}
    members.lose(2, "killed")
    assert sorted(released) == [0, 0, 1, 2]


def test_a_rank_that_left_cleanly_is_not_lost():
    members = Membership(3, me=0)
    members.leave(1)
    assert not members.lose(1, "gone") and members.lose(2, "gone")
    assert members.lost() == {2: "gone"} and members.wait_until_all_left(0) == set()


def test_a_single_process_calls_itself_directly():
    with session({"learner": 1, "collector": -1}, timeout_s=5) as me:
        assert me.of_role("collector") == () and me.lost() == () and me.role == "learner"
        counter = me.remote(me.me, Counter, 2)
        assert me.call(me.me, threading.get_ident) == threading.get_ident()
        me.barrier()
    with pytest.raises(ConfigurationError, match="not in a session"):
        counter.call("add", 1)
    with session(timeout_s=5), pytest.raises(ConfigurationError, match="has ended"):
        counter.call("add", 1)


def test_a_session_inside_another_is_refused():
    with session(timeout_s=5), pytest.raises(ConfigurationError, match="already"):
        with session(timeout_s=5):
            pass


def test_processes_that_do_not_all_connect_are_a_deadline_that_says_what_to_do(monkeypatch) -> None:
    def late(*_: object) -> None:
        raise RuntimeError("wait timeout after 100ms, keys: /init_rpc")

    monkeypatch.setattr(transport, "_init_rpc", late)
    with pytest.raises(DeadlineError, match="did not all connect: .*100ms.*or raise timeout_s"):
        transport.Transport(None, ["a0"], 0, one_node=True, timeout_s=0.1, handler=lambda *_: None)

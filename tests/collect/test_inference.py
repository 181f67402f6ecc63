"""The policy at the learner."""

from __future__ import annotations

import math
import os
import pickle
import socket
import threading
import time
from concurrent.futures import Future
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import OneHot
from torchrl.envs.utils import ExplorationType
from torchrl.modules import EGreedyModule, LSTMModule, QValueActor

from tests.collect.envs import Counter, mlp, q
from torchrl_dist.collect import Preempt, RPCBatchedCollector
from torchrl_dist.collect.learner.inference import RPCInferenceTransport
from torchrl_dist.collect.loop.groups import Inference
from torchrl_dist.collect.loop.one_thread import use_one_thread_if_small
from torchrl_dist.collect.node.relay import Array, NodeLearner, Relay, Window
from torchrl_dist.errors import ConfigurationError, DeadlineError, PeerLostError, RemoteError
from torchrl_dist.runtime import ForkServer, local_cluster

policy = partial(q, 2, 3)


class Sleeper(Counter):
    def step(self, action: Any) -> Any:
        time.sleep(0.02)
        return super().step(action)


class Own(Counter):
    """Its first observation follows from its seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode = int(self.np_random.integers(1000))
        return self._observe(), {}


@pytest.mark.parametrize(("groups", "processes"), [(1, 0), (2, 0), (2, 2)])
def test_the_data_are_those_of_a_policy_on_the_workers(fork_server, groups, processes) -> None:
    def batches(session: Any, num_envs: int = 4, **options: Any) -> list[TensorDict]:
        with RPCBatchedCollector(
            Own, policy(), session=session, frames_per_batch=48, total_frames=144,
            num_envs=num_envs, seed=0, exploration_type=ExplorationType.DETERMINISTIC, **options,
        ) as collector:  # fmt: skip
            whole = [collector.next(), collector.next()]
            collector.reset()
            lengths = collector.get_attr("length")
            assert np.ravel(lengths).tolist() == [5] * 8
            return [*whole, *collector]

    with local_cluster({"learner": 1, "collector": 2}, fork_server=fork_server) as session:
        ours = batches(
            session,
            inference="learner",
            env_groups=groups,
            env_processes=processes,
            num_envs=4 // max(1, processes),
        )
        theirs = batches(session)
    assert len(ours) == 3
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape == (8, 6)
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key in other.keys(True, True):
            if "action_value" in key:  # rounded by how many rows a product has
                assert torch.allclose(one[key], other[key], atol=1e-6), key
            elif "traj_ids" not in key or not processes:  # else numbered by process
                assert torch.equal(one[key], other[key]), key


def test_groups_may_be_vector_envs(collecting: Any) -> None:
    def single() -> SyncVectorEnv:
        return SyncVectorEnv([Counter] * 2, autoreset_mode=AutoresetMode.DISABLED)

    def of_arrays() -> VectorEnv:
        return gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")

    options = {"frames_per_batch": 16, "num_envs": 4, "inference": "learner", "env_groups": 2}
    with collecting(1, single, policy(), **options) as (collector, _):
        assert collector.next().shape == (4, 4)
        collector.set_attr("length", 6, env=2)
        assert collector.get_attr("length") == [5, 5, 6, 5]
        assert collector.get_attr("length", env=2) == [6]
    with collecting(1, of_arrays, q(4, 2), **options) as (collector, _):
        assert collector.next().shape == (4, 4)
        assert collector.get_attr("num_envs") == [2, 2]
        with pytest.raises(RemoteError, match="cannot be accessed one by one"):
            collector.get_attr("num_envs", env=0)


def test_weights_are_used_from_the_next_step_on_and_stamped(collecting: Any) -> None:
    module = policy()
    options = {"frames_per_batch": 16, "num_envs": 2, "inference": "learner"}
    with collecting(2, Counter, module, **options) as (collector, _):
        for version in range(3):
            batch = collector.next()
            assert batch["policy_version"].eq(version).all()
            expected = module(batch.select("observation"))["action_value"]
            assert torch.allclose(batch["action_value"], expected, atol=1e-6)
            module.load_state_dict(policy(version + 1).state_dict())
            collector.update_policy_weights_()


def test_env_processes_time_their_steps_with_the_learners_policy(collecting: Any) -> None:
    options = {"inference": "learner", "env_processes": 2, "num_envs": 2}
    with collecting(1, Sleeper, policy(), **options) as (collector, _):
        assert 2 * 2 <= collector.frames_per_batch <= 2 * 2 * 0.5 / 0.02
        assert collector.next().numel() == collector.frames_per_batch


def test_the_learner_explores_in_one_thread(collecting: Any) -> None:
    """The server uses one core, so that envs have the others."""
    threads: list[int] = []

    class Watched(torch.nn.Linear):
        def forward(self, observation: Any) -> Any:
            threads.append(torch.get_num_threads())
            return super().forward(observation)

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    actor = QValueActor(Watched(2, 3), in_keys=["observation"], spec=OneHot(3))
    module = TensorDictSequential(actor, EGreedyModule(OneHot(3), eps_init=1.0, eps_end=1.0))
    options = {"frames_per_batch": 60, "num_envs": 2, "inference": "learner"}
    with collecting(1, Counter, module, **options) as (collector, _):
        assert collector.next()["action"].flatten(0, 1).sum(0).gt(0).all()
    assert threads and set(threads) == {1}


def slow_policy(step_s: float) -> QValueActor:
    class Slow(torch.nn.Module):
        def forward(self, observation: Any) -> Any:
            time.sleep(step_s)
            return torch.zeros(*observation.shape[:-1], 3)

    return QValueActor(Slow(), in_keys=["observation"], spec=OneHot(3))


@pytest.mark.alone
def test_with_two_groups_a_worker_steps_while_it_waits(fork_server: ForkServer) -> None:
    slow = slow_policy(0.02)

    def steps_per_s(session: Any, groups: int) -> float:
        with RPCBatchedCollector(
            lambda: Sleeper(100), slow, session=session, frames_per_batch=20 * groups,
            num_envs=groups, inference="learner", env_groups=groups,
        ) as collector:  # fmt: skip
            collector.next()
            begun = time.perf_counter()
            frames = sum(collector.next().numel() for _ in range(2))
            return frames / (time.perf_counter() - begun)

    with local_cluster({"learner": 1, "collector": 1}, fork_server=fork_server) as session:
        assert steps_per_s(session, 2) > 1.3 * steps_per_s(session, 1)


@pytest.mark.parametrize("processes", [0, 2])
def test_an_error_of_the_policy_reaches_the_learner(collecting: Any, processes: int) -> None:
    class Broken(torch.nn.Module):
        def forward(self, observation: Any) -> Any:
            raise ZeroDivisionError("no value today")

    broken = QValueActor(Broken(), in_keys=["observation"], spec=OneHot(3))
    options = {"frames_per_batch": 8, "num_envs": 2, "inference": "learner"}
    with (
        collecting(1, Counter, broken, env_processes=processes, **options) as (collector, _),
        pytest.raises(RemoteError, match="no value today"),
    ):
        collector.next()


class Learner:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict, Future]] = []

    def submit(self, method: str, values: dict, *, timeout_s: float) -> Future:
        self.sent.append((values, Future()))
        return self.sent[-1][1]


def pair() -> tuple[Connection, Connection]:
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())


def test_a_node_worker_sends_in_one_message_what_waits_meanwhile() -> None:
    learner = Learner()
    relay = Relay(Inference(learner, ("observation",), groups=1, timeout_s=5.0))
    links = [pair() for _ in range(6)]
    answers = []
    for index, (ours, theirs) in enumerate(links):
        rows = torch.full((index + 1, 2), float(index))
        answers.append(NodeLearner(theirs).submit("submit", {"observation": rows}))
        relay.ask(ours, pickle.loads(ours.recv_bytes())[1])
        assert relay.flush(most=6) == math.inf
    assert [len(values["observation"]) for values, _ in learner.sent] == [1, 2]  # under way
    for values, future in list(learner.sent):
        future.set_result({"action": values["observation"] * 10})
    assert wait([relay], 5.0) == [relay]
    relay.deliver()
    relay.flush(most=1)
    values, future = learner.sent[2]
    assert values["observation"][:, 0].tolist() == [2] * 3 + [3] * 4 + [4] * 5 + [5] * 6
    links[4][0].close()  # its process is replaced meanwhile
    future.set_result({"action": values["observation"] * 10})
    relay.deliver()
    for index in (0, 1, 2, 3, 5):
        assert answers[index].result(5.0)["action"][:, 0].tolist() == [10.0 * index] * (index + 1)
    relay.close()
    relay.close()


def test_with_two_groups_a_question_waits_for_others_as_long_as_it_may() -> None:
    learner = Learner()
    relay = Relay(Inference(learner, ("observation",), groups=2, timeout_s=5.0))
    links = [pair() for _ in range(3)]
    processes = [NodeLearner(theirs) for _, theirs in links]

    def ask(index: int) -> None:
        ours = links[index][0]
        processes[index].submit("submit", {"observation": torch.zeros(1, 2)})
        relay.ask(ours, pickle.loads(ours.recv_bytes())[1])

    ask(0)
    assert relay.flush(most=3) == math.inf and len(learner.sent) == 1  # nothing is known yet
    learner.sent[0][1].set_result({"action": torch.zeros(1, 1)})
    relay.deliver()
    relay._window.note_question(learner, 0.0)
    relay._window.note_question(learner, 1000.0)  # seconds between two questions
    ask(0)
    assert 10 < relay.flush(most=3) < 100 and len(learner.sent) == 1
    ask(1)
    ask(2)  # no process is left to wait for
    assert relay.flush(most=3) == math.inf and len(learner.sent[1][0]["observation"]) == 3
    ask(1)
    assert 10 < relay.flush(most=3) < 100
    relay._oldest_s -= 100
    assert relay.flush(most=3) == math.inf and len(learner.sent) == 3
    relay.close()


def test_questions_wait_for_a_part_of_the_time_that_other_groups_take() -> None:
    askers = [Learner(), Learner()]
    windows = {groups: Window(groups) for groups in (1, 2, 4)}
    for step in range(200):
        for asker in askers:
            for window in windows.values():
                window.note_question(asker, step * 0.01 + 0.003 * askers.index(asker))
    assert windows[1].length_s == 0
    assert 0.002 < windows[2].length_s < 0.005
    assert windows[4].length_s == pytest.approx(3 * windows[2].length_s)
    for _ in range(100):
        windows[2].note_answer(0.01)  # messages take as long as the other group
        windows[4].note_answer(0.01)
    assert windows[2].length_s == 0 < windows[4].length_s < 0.006


def test_a_call_that_comes_while_a_process_waits_is_kept() -> None:
    ours, theirs = Pipe()
    process = NodeLearner(theirs)
    answer = process.submit("submit", {"observation": torch.zeros(2, 2)})
    ours.send_bytes(pickle.dumps(("collect", (), {"steps": 3})))
    ours.send_bytes(pickle.dumps((None, 0, [Array.of("action", np.ones((2, 1), np.int64))])))
    assert answer.result(5.0)["action"].tolist() == [[1], [1]]
    assert list(process.calls) == [("collect", (), {"steps": 3})]


@pytest.mark.parametrize(("width", "threads"), [(8, 1), (1024, 3)])
def test_small_policies_run_in_one_thread_and_others_in_all(width: int, threads: int) -> None:
    seen = []
    policy = torch.nn.Linear(width, width)
    before = torch.get_num_threads()

    def count() -> int:
        seen.append(torch.get_num_threads())
        return seen[-1]

    def run_policy() -> None:
        for _ in range(2):
            use_one_thread_if_small(policy)
            count()

    torch.set_num_threads(3)
    try:
        for target in (run_policy, count):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        assert seen == [threads, threads, 3] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_process_that_waits_for_a_slow_policy_does_not_hang(collecting: Any) -> None:
    options = {"frames_per_batch": 4, "inference": "learner", "env_processes": 2, "num_envs": 2}
    with collecting(1, Counter, slow_policy(1.5), step_timeout_s=1.0, **options) as (collector, _):
        assert collector.next().numel() == 4
        assert collector.report.replaced == ()


def test_shutdown_does_not_wait_for_a_stuck_policy(collecting: Any) -> None:
    gate = threading.Event()

    class Stuck(torch.nn.Module):
        def forward(self, observation: Any) -> Any:
            gate.wait(60)
            return torch.zeros(*observation.shape[:-1], 3)

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    stuck = QValueActor(Stuck(), in_keys=["observation"], spec=OneHot(3))
    options = {"frames_per_batch": 8, "num_envs": 2, "inference": "learner", "timeout_s": 0.3}
    with collecting(1, Counter, stuck, **options) as (collector, _):
        try:
            # of the learner or of the worker, whichever is first
            with pytest.raises((DeadlineError, RemoteError), match="0.3 s"):
                collector.next()
            begun = time.monotonic()
            collector.shutdown(timeout=0.5)
            assert time.monotonic() - begun < 20
        finally:
            gate.set()


def test_options_that_do_not_go_with_a_policy_at_the_learner_are_refused(fork_server) -> None:
    with pytest.raises(ConfigurationError, match="session"):
        RPCBatchedCollector(Counter, policy(), frames_per_batch=8, inference="learner")
    memory = LSTMModule(input_size=2, hidden_size=4, in_key="observation", out_key="embedding")
    head = QValueActor(mlp(4, 3), in_keys=["embedding"], spec=OneHot(3))
    versions = TensorDictModule(mlp(2, 3), ["observation"], ["policy_version"])
    other_keys = QValueActor(mlp(2, 3), in_keys=["elsewhere"], spec=OneHot(3))
    with local_cluster({"learner": 1, "collector": 1}, fork_server=fork_server) as session:
        for arguments, message in (
            ({"policy": None}, "needs a module as policy="),
            ({"policy": other_keys}, "elsewhere"),
            ({"policy": TensorDictSequential(versions, policy())}, "is reserved for values"),
            ({"readiness": Preempt()}, "readiness"),
            ({"num_envs": 3}, "cannot be divided"),
            ({"policy": TensorDictSequential(memory, head)}, "recurrent"),
        ):
            with pytest.raises((ConfigurationError, RemoteError), match=message):
                RPCBatchedCollector(
                    **{"make_env": Counter, "policy": policy(), "session": session,
                       "frames_per_batch": 8, "inference": "learner", **arguments}
                )  # fmt: skip
    names = [thread.name for thread in threading.enumerate()]
    assert not any("nference" in name for name in names), (os.getpid(), names)


def test_a_closed_transport_refuses_what_waits_and_what_comes() -> None:
    transport = RPCInferenceTransport()
    values = {"observation": torch.zeros(2, 3)}
    first = transport.submit(values)
    transport.submit(values)
    inputs, _, times = transport.drain_with_timing(1)
    assert len(inputs) == len(times) == 1 and transport.drain(0) == ([], [])
    transport.resolve(first, values)
    transport.close()
    transport.wait_for_work(10)  # returns at once
    with pytest.raises(PeerLostError):
        transport.submit(values).result(1.0)

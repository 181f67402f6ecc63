"""Workers whose envs run in processes of the same node."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from torchrl.envs.utils import ExplorationType, exploration_type

from tests.collect.envs import (
    Counter,
    Node,
    Paced,
    node_config,
    nodes,
    q,
    trajectories_of,
    wait_for,
)
from tests.spawn import stop_self
from torchrl_dist.collect import Preempt, RPCBatchedCollector
from torchrl_dist.collect.loop.joining import MASK
from torchrl_dist.collect.node import process_pool
from torchrl_dist.collect.node.env_process import FIRST_PROGRESS, config_of_part
from torchrl_dist.collect.worker.worker import RolloutWorker
from torchrl_dist.errors import PeerLostError
from torchrl_dist.runtime import ForkServer
from torchrl_dist.weights import pack

KINDS = list(ExplorationType)
OPTIONS = {"frames_per_rollout": 40, "num_envs": 2}


cartpole_policy = partial(q, 4, 2)


@pytest.fixture
def build(fork_server: ForkServer) -> Iterator[Any]:
    with nodes(fork_server, **OPTIONS) as make:
        yield make


def is_first(file: Path) -> bool:
    """Whether this is the first call for that file, in any process."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class ByPid(Counter):
    """Observes its process's pid, and does to it what it is told at its seventh step."""

    task = 0

    def __init__(self, what: Any = None, flag: Any = None) -> None:
        super().__init__(10**6)
        self.what, self.flag = what, flag

    def _observe(self) -> Any:
        return super()._observe() * 0 + [os.getpid(), self.t]

    def step(self, action: Any) -> Any:
        if self.t == 7 and self.flag is not None and is_first(self.flag):
            self.what()
        return super().step(action)


def collect_until_complete(worker: Node, request: int) -> Any:
    """Return the first rollout to which all processes contributed."""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        rows, stats = worker.collect(request=request)
        if len(rows) == worker.num_envs:
            return rows, stats
        request += 1
        time.sleep(0.02)
    raise AssertionError("a process did not come back")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pause() -> None:
    stop_self()


def write_type(td: Any) -> Any:
    """A policy that writes the exploration type under which it is called."""
    kind = KINDS.index(exploration_type())
    return td.update({"action": torch.tensor([[1, 0, 0]]), "kind": torch.tensor([kind])})


@pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
def test_env_processes_call_the_policy_under_the_exploration_type(
    build: Any, kind: ExplorationType
) -> None:
    def postproc(rows: Any) -> Any:  # after the rollout, the type is no longer set
        return rows.set("after", torch.full(rows.shape, exploration_type() is kind))

    worker = build(
        Counter, policy=write_type, env_processes=2, num_envs=1, exploration_type=kind,
        postproc=postproc,
    )  # fmt: skip
    for request in range(2):
        rows, _ = collect_until_complete(worker, request)
        assert rows["kind"].eq(KINDS.index(kind)).all() and not rows["after"].any()


@pytest.mark.parametrize(("processes", "envs", "policy"), [(2, 2, cartpole_policy()), (4, 1, None)])
def test_the_data_do_not_depend_on_how_envs_are_split_into_processes(
    build: Any, processes: int, envs: int, policy: Any
) -> None:
    def make() -> gymnasium.Env:  # by its id, several envs would be one native vector env
        return gymnasium.make("CartPole-v1")

    split = build(make, policy=policy, env_processes=processes, num_envs=envs)
    whole = RolloutWorker(
        node_config(make, frames_per_rollout=40, policy=policy, env_processes=0, num_envs=4)
    )
    for number in range(4):  # the first travels by value, the others in shared memory
        ours, stats = split.collect(request=number)
        theirs, _ = whole.collect(request=number)
        assert stats.frames == 40 and ours.shape == theirs.shape == (4, 10)
        assert ours.names == theirs.names
        for key in theirs.exclude("collector").keys(True, True):
            if "action_value" in key:  # rounded by how many rows a product has
                assert torch.allclose(ours[key], theirs[key], atol=1e-6), key
            else:
                assert torch.equal(ours[key], theirs[key]), key
        assert ours["collector", "worker_index"].eq(0).all()
    assert split.set_seed(11) == whole.set_seed(11)
    ours, theirs = split.collect(request=4)[0], whole.collect(request=4)[0]
    assert torch.equal(ours["observation"], theirs["observation"])


def test_a_node_worker_measures_its_steps_and_begins_anew(build: Any) -> None:
    def rows(**options: Any) -> tuple[Any, torch.Tensor]:
        worker = build("CartPole-v1", policy=cartpole_policy(), num_envs=1, **options)
        info = worker.describe()
        worker.set_steps(20)
        observation = worker.collect(request=0)[0]["observation"].clone()
        worker.close()
        return info, observation

    measured, ours = rows(frames_per_rollout=None)
    given, theirs = rows()
    assert measured.step_s > 0 == given.step_s and measured.step_bytes > 0
    assert ours.shape == (2, 20, 4) and torch.equal(ours, theirs)


def test_trajectories_have_ids_of_their_own(build: Any) -> None:
    worker = build(lambda: Counter(3))
    for one in trajectories_of([worker.collect(request=n)[0].clone() for n in range(3)]):
        steps = one["next", "observation"][:, 0]
        assert len(steps) <= 3 and (steps[-1] - steps[0]) == len(steps) - 1


def test_weights_reach_all_processes_through_one_copy(build: Any) -> None:
    worker = build("CartPole-v1", policy=cartpole_policy(), num_envs=1)
    for version in range(1, 4):
        policy = cartpole_policy(version)
        rows, stats = worker.collect(request=version - 1, weights=pack(policy, version))
        assert rows["policy_version"].eq(version).all()
        assert (stats.oldest_version, stats.newest_version) == (version, version)
        expected = policy(rows.select("observation"))["action_value"]
        assert torch.allclose(rows["action_value"], expected, atol=1e-6)
    older = pack(cartpole_policy(0), 1)  # ignored
    assert worker.collect(request=3, weights=older)[0]["policy_version"].eq(3).all()


def test_new_episodes_begin_in_all_processes(build: Any) -> None:
    worker = build(lambda: Counter(10**6))
    old, new = (worker.collect(request=n, anew=n == 1)[0] for n in (0, 1))
    assert (new["observation"][:, 0, 0] % 100 == 0).all()
    ids = [set(rows["collector", "traj_ids"].flatten().tolist()) for rows in (old, new)]
    assert not ids[0] & ids[1]


@pytest.mark.parametrize("what", [die, pause])
def test_an_env_process_that_ends_or_hangs_is_replaced(build, what: Any, tmp_path) -> None:
    worker = build(lambda: ByPid(what, tmp_path / "flag"), num_envs=1, step_timeout_s=1.0)
    first, stats = worker.collect(request=0)
    assert stats.frames == 20 and first.shape == (1, 20)  # the other process's part
    (reason,) = stats.replaced
    assert ("SIGKILL" if what is die else "made no step for 1 s") in reason
    survivor = first["observation"][0, 0, 0].item()
    ids = set(first["collector", "traj_ids"].flatten().tolist())
    rows, stats = collect_until_complete(worker, 1)
    pids = rows["observation"][:, 0, 0].tolist()
    assert stats.frames == 40 and not stats.replaced
    assert survivor in pids and len(set(pids)) == 2
    new = rows[pids.index(survivor) - 1]
    assert not ids & set(new["collector", "traj_ids"].flatten().tolist())


class Rows:
    """A replay buffer as a file per trajectory and process that wrote of it; after the fourth
    ``extend`` its process ends, once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.extends = folder, 0

    def extend(self, rows: Any) -> None:
        for trajectory in rows["collector", "traj_ids"].unique().tolist():
            (self.folder / f"{trajectory}-{os.getpid()}").touch()
        self.extends += 1
        if self.extends == 4 and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            die()


def test_a_successor_repeats_no_trajectory_id_of_its_predecessor(build: Any, tmp_path: Any) -> None:
    rows = Rows(tmp_path)
    worker = build(lambda: Counter(1), env_processes=1, num_envs=1, frames_per_rollout=10,
                   replay_buffer=rows)  # fmt: skip
    for request in range(6):
        worker.collect(request=request)
    names = [name for name in os.listdir(tmp_path) if name != "died"]
    ids, pids = zip(*(name.split("-") for name in names), strict=True)
    assert len(set(pids)) == 2 and len(set(ids)) == len(ids) == 70


def test_a_worker_that_was_stopped_with_its_processes_does_not_take_them_for_hanging(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = build(lambda: Paced(5, 1.2), num_envs=1, step_timeout_s=2.0, frames_per_rollout=2)
    now = time.monotonic
    with ThreadPoolExecutor(1) as pool:
        rollout = pool.submit(worker.collect, request=0)
        time.sleep(0.2)
        monkeypatch.setattr(time, "monotonic", lambda: now() + 60)  # a minute later
        _, stats = rollout.result(20)
    assert stats.frames == 2 and not stats.replaced


class Held(Counter):
    """The first that is built makes no step after its fifth before it is released."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (4,), "float32")
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, folder: Any) -> None:
        super().__init__(10**6)
        self.go = folder / "go"
        self.held = is_first(folder / "held")

    def _observe(self) -> Any:
        return super()._observe().repeat(2)

    def step(self, action: Any) -> Any:
        while self.held and self.t == 5 and not self.go.exists():
            time.sleep(0.01)
        return super().step(action)


@pytest.mark.parametrize("ends", [False, True])
def test_a_process_begins_the_next_rollout_while_another_is_at_the_last(
    build: Any, tmp_path: Any, ends: bool
) -> None:
    def prefer(action: int, version: int) -> Any:
        policy = cartpole_policy()
        with torch.no_grad():
            policy.module[0].module[-1].weight.zero_()
            policy.module[0].module[-1].bias.copy_(torch.eye(2)[action])
        return pack(policy, version)

    worker = build(
        lambda: Held(tmp_path), policy=cartpole_policy(), num_envs=1, frames_per_rollout=20
    )
    worker.collect(weights=prefer(0, 1), request=0, steps=1)  # from now on in shared memory
    begun = worker._pool.words[FIRST_PROGRESS:].copy()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(worker.collect, weights=prefer(0, 2), request=1)
        second = pool.submit(worker.collect, weights=prefer(1, 3), request=2)

        def made_so_far() -> Any:
            return worker._pool.words[FIRST_PROGRESS:] - begun

        # One process makes both rollouts. The other one, which may be slow, comes to the step at
        # which it is held.
        wait_for(lambda: made_so_far().max() >= 20 and made_so_far().min() >= 4)
        made = made_so_far()
        held = int(made.argmin())
        assert made[held] == 4 and not first.done()
        if ends:
            os.kill(worker._pool.children.states[held].pid, signal.SIGKILL)
        else:
            (tmp_path / "go").touch()
        results = [first.result(60), second.result(60)]
    for (rows, stats), version, action in zip(results, (2, 3), (0, 1), strict=True):
        envs = 1 if ends else 2
        assert rows.shape == (envs, 10) and stats.frames == 10 * envs
        assert (rows["policy_version"] == version).all()
        assert (rows["action"].argmax(-1) == action).all()
        start = 1 + 10 * (version - 2)
        assert (rows["observation"][..., 0] % 100 == torch.arange(start, start + 10)).all()
    assert [len(stats.replaced) for _, stats in results] == [int(ends), 0]
    request = 3
    (tmp_path / "go").touch()
    while worker.collect(request=request)[1].frames < 20:
        request += 1


def test_when_all_processes_end_the_rollouts_under_way_are_made_by_their_successors(
    build: Any, tmp_path: Any
) -> None:
    policy = cartpole_policy()
    worker = build(lambda: Held(tmp_path), policy=policy, env_processes=1, num_envs=1,
                   frames_per_rollout=10)  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(worker.collect, weights=pack(policy, n + 1), request=n) for n in (0, 1)]
        wait_for(lambda: len(worker._under_way) == 2 and worker._pool.words[FIRST_PROGRESS] >= 5)
        os.kill(worker._pool.children.states[0].pid, signal.SIGKILL)
        results = [each.result(30) for each in both]
    assert [stats.frames for _, stats in results] == [10, 10]
    assert [len(stats.replaced) for _, stats in results] == [1, 0]
    ids = torch.cat([rows["collector", "traj_ids"].reshape(-1) for rows, _ in results])
    assert len(ids.unique()) == 1  # one episode: no rows of another, and none missing


def test_processes_that_hang_end_when_their_worker_is_closed(build: Any, tmp_path: Any) -> None:
    worker = build(lambda: Held(tmp_path), num_envs=1, frames_per_rollout=20)
    with ThreadPoolExecutor(1) as pool:
        rollout = pool.submit(worker.collect, request=0)
        wait_for(lambda: worker._pool.words[FIRST_PROGRESS:].max() >= 10)
        worker.close(step_limit_s=1.0)
        assert rollout.result(10)[1].frames == 10  # of the process that does not hang
    assert worker._pool.children.wait_gone(0)


def test_a_call_to_all_envs_waits_for_a_successor(build: Any, tmp_path: Any) -> None:
    flag = tmp_path / "flag"

    def make() -> Any:
        time.sleep(0.3 if flag.exists() else 0)
        return ByPid(die, flag)

    worker = build(make, num_envs=1)
    assert len(worker.collect(request=0)[1].replaced) == 1
    worker.visit_envs(None, "set", "task", (3,), {})
    assert worker.visit_envs(None, "get", "task", (), {}) == [3, 3]


def test_a_successor_is_not_blamed_for_the_deaths_before_it(build: Any, tmp_path: Any) -> None:
    def first(what: str, times: int) -> bool:
        """Whether this is one of the first ``times`` calls of all processes."""
        return any(is_first(tmp_path / f"{what} {number}") for number in range(times))

    class Mortal(Counter):
        def step(self, action: Any) -> Any:
            time.sleep(0.02)  # so that the second lives end before they are noticed
            if self.t == 7 and first("died", 2):
                die()
            return super().step(action)

    def make() -> Any:
        if not first("built", 3) and first("born dead", 2):
            die()
        return Mortal(10**6)

    worker = build(make, env_processes=3, num_envs=1, frames_per_rollout=180)
    assert worker.collect(request=0)[1].frames == 60
    wait_for((tmp_path / "born dead 1").exists)  # one process may take its time to start
    collect_until_complete(worker, 1)


def test_a_successor_that_is_never_ready_is_replaced_too(build, tmp_path, monkeypatch) -> None:
    stuck, died = tmp_path / "stuck", tmp_path / "died"

    def make() -> Any:
        if died.exists() and not stuck.exists():
            stuck.touch()
            time.sleep(60)
        return ByPid(die, died)

    worker = build(make, num_envs=1, call_timeout_s=0.5)
    assert len(worker.collect(request=0)[1].replaced) == 1
    for request in itertools.count(1):
        if stuck.exists():
            monkeypatch.setattr(process_pool, "_START_S", 0.5)
        _, stats = worker.collect(request=request)
        if stats.replaced:
            break
        time.sleep(0.02)
    assert "did not build its envs within 0.5 s" in stats.replaced[0]
    monkeypatch.undo()
    collect_until_complete(worker, request + 1)


def test_a_process_that_is_paused_in_the_middle_of_an_answer_is_replaced(build, tmp_path) -> None:
    def make() -> Any:
        env = Counter(10**6)
        send = Connection.send_bytes

        def send_half(self: Connection, message: bytes, *args: Any) -> None:
            if env.t and is_first(tmp_path / "flag"):  # the answer to ``collect``
                os.write(self.fileno(), struct.pack("!i", len(message)) + message[:10])
                pause()
            send(self, message, *args)

        Connection.send_bytes = send_half
        return env

    worker = build(make, num_envs=1, step_timeout_s=1.0)
    rows, stats = worker.collect(request=0)
    assert len(rows) == 1 and "in the middle of an answer" in stats.replaced[0]
    collect_until_complete(worker, 1)


def test_a_process_that_dies_three_times_in_a_row_is_an_error(build: Any) -> None:
    class Mortal(Counter):
        def step(self, action: Any) -> Any:
            die()

    with pytest.raises(PeerLostError, match="env process 0 .*SIGKILL; 3 consecutive env processes"):
        build(Mortal, env_processes=1).collect(request=0)


def test_a_cut_reaches_every_process(build: Any) -> None:
    worker = build(lambda: Paced(100, 0.01 + 0.002 * (os.getpid() % 2)), frames_per_rollout=8000)
    worker.cut(request=0, least=5)
    rows, stats = worker.collect(request=0)
    assert 4 * 5 <= stats.frames < 4 * 60
    assert rows["next", "truncated"].sum() == 4
    mask = rows.get(MASK, None)
    assert (rows.numel() if mask is None else mask.sum()) == stats.frames


def test_a_rollout_without_a_number_is_not_cut_by_what_cut_an_earlier_one(build: Any) -> None:
    worker = build(lambda: Counter(100))
    worker.cut(request=0, least=1)
    assert worker.collect(request=0)[1].frames == 4
    assert worker.collect()[1].frames == 40


def test_processes_that_were_cut_at_different_steps_make_one_masked_rollout(
    build: Any, tmp_path: Any
) -> None:
    class Uneven(Counter):
        def __init__(self) -> None:
            super().__init__(10**6)
            self.step_s = 0.02 if is_first(tmp_path / "slow") else 0.001

        def step(self, action: Any) -> Any:
            time.sleep(self.step_s)
            return super().step(action)

    worker = build(Uneven, num_envs=1, frames_per_rollout=20_000)
    with ThreadPoolExecutor(1) as pool:
        for request in range(2):  # the first travels by value, the second in shared memory
            begun = worker._pool.words[FIRST_PROGRESS:].copy()
            rollout = pool.submit(worker.collect, request=request)
            wait_for(lambda b=begun: (worker._pool.words[FIRST_PROGRESS:] - b).min() >= 4)
            worker.cut(request=request, least=2)
            rows, stats = rollout.result(20)
            lengths = rows[MASK].sum(-1)
            assert lengths.sum() == stats.frames and lengths.min() < lengths.max()
            for row, length in zip(rows, lengths.tolist(), strict=True):
                assert row["next", "observation"][:length, 0].diff().eq(1).all()
                assert row["next", "truncated"].flatten().nonzero().tolist() == [[length - 1]]


def test_rows_of_a_postproc_that_shortens_rollouts_are_as_it_made_them(build: Any) -> None:
    worker = build(lambda: Counter(10**6), postproc=lambda rows: rows[:, :-3])
    for request in range(3):
        rows, stats = worker.collect(request=request)
        assert stats.frames == 40 and rows.shape == (4, 7)
        expected = 201 + 10 * request + torch.arange(7.0)
        assert torch.equal(rows["next", "observation"][..., 0], expected.expand(4, 7))


def test_seeds_of_any_size_are_those_of_a_worker_without_processes() -> None:
    for seed in (0, 2**31, 2**32 + 5):
        assert config_of_part(node_config(Counter, seed=seed), index=1, generation=0).seed == seed
        assert config_of_part(node_config(Counter, seed=seed), index=1, generation=1).seed != seed


def test_a_closed_worker_gives_its_shared_memory_back(build: Any) -> None:
    def blocks() -> int:
        links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
        return sum("memfd:torchrl_dist" in link for link in links)

    gc.collect()
    before = blocks()
    worker = build("CartPole-v1", policy=cartpole_policy())
    worker.collect(weights=pack(cartpole_policy(), 1), request=0)
    assert blocks() >= before + 4  # two rollouts, one copy of the weights, progress
    worker.close()
    gc.collect()
    assert blocks() == before


def test_nodes_of_a_cluster_deliver_exactly_and_survive_deaths(collecting, tmp_path) -> None:
    flag = tmp_path / "flag"
    options = {"frames_per_batch": 120, "total_frames": 1001, "num_envs": 2, "max_policy_lag": 1}
    with collecting(2, lambda: ByPid(die, flag), env_processes=3, **options) as (collector, _):
        with pytest.warns(UserWarning, match="replaced env process .*SIGKILL"):
            batches = list(collector)
        assert sum(batch.numel() for batch in batches) == 1001 == collector.report.total_frames
    assert collector.report.lost_workers == ()
    assert all(len(batch) <= 12 for batch in batches)
    workers = torch.cat([batch["collector", "worker_index"].flatten() for batch in batches])
    assert {0, 1} == set(workers.tolist())
    for one in trajectories_of(batches):
        assert len(one["observation"][:, 0].unique()) == 1  # one process
        assert one["next", "observation"][:, 1].diff().eq(1).all()  # no step lost, in order


def test_in_the_callers_process_a_node_worker_runs_ahead_and_preempts(tmp_path: Any) -> None:
    with RPCBatchedCollector(
        lambda: Counter(5), None, frames_per_batch=40, total_frames=200, num_envs=2,
        env_processes=2, max_policy_lag=1, readiness=Preempt(),
    ) as collector:  # fmt: skip
        batches = list(collector)
        assert [batch.shape for batch in batches] == [(4, 10)] * 5
        assert all(batch[MASK].all() for batch in batches)
        copies = [batch["observation"].clone() for batch in batches[:2]]
    assert torch.equal(torch.stack(copies), torch.stack([b["observation"] for b in batches[:2]]))


@pytest.mark.alone
def test_sixteen_processes_start_in_less_than_three_times_the_time_of_one() -> None:
    with ForkServer() as server:

        def start_s(count: int) -> float:
            begun = time.monotonic()
            worker = Node(node_config("CartPole-v1", env_processes=count), server)
            started_s = time.monotonic() - begun
            worker.close()
            return started_s

        cold_s, sixteen_s = start_s(1), start_s(16)
    # A job starts from nothing, so the server's imports are part of both.
    assert sixteen_s < 2 * cold_s, (cold_s, sixteen_s)

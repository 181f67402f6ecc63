"""The collector with workers in other processes: which it waits for, and what a death costs."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.data import LazyTensorStorage, OneHot, TensorDictReplayBuffer
from torchrl.envs import GymWrapper
from torchrl.modules import QValueActor

from tests.collect.envs import Counter, Paced, Tally, q, steps_taken, trajectories_of, wait_for
from tests.spawn import stop
from torchrl_dist.collect import FirstReady, Preempt, Quorum, RPCBatchedCollector, WaitAll
from torchrl_dist.collect.learner.start import start_workers
from torchrl_dist.collect.worker.pinned import OwnThread, PinnedWorker
from torchrl_dist.collect.worker.worker import RolloutWorker, WorkerConfig
from torchrl_dist.errors import ConfigurationError, DeadlineError, PeerLostError, RemoteError
from torchrl_dist.replay import RateLimiter
from torchrl_dist.replay import replay_buffer as hosted_buffer
from torchrl_dist.runtime import ForkServer, Session, current_session, forkserver, local_cluster


class Rows:
    """As much of a replay buffer as a worker needs: a file per extend, in a shared directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def extend(self, rows: TensorDictBase) -> None:
        assert rows.ndim == 1
        name = f"{os.getpid()}-{time.monotonic_ns()}.npy"
        np.save(self.directory / name, rows["collector", "traj_ids"].numpy())

    def read(self) -> dict[int, int]:
        """Rows by the pid that wrote them."""
        counts: dict[int, int] = {}
        for path in self.directory.glob("*.npy"):
            pid = int(path.name.split("-")[0])
            counts[pid] = counts.get(pid, 0) + len(np.load(path))
        return counts


def kill(session: Session, index: int, sig: int = signal.SIGKILL) -> None:
    os.kill(session.pid_of(session.of_role("collector")[index]), sig)


def test_a_batch_joins_one_rollout_of_every_worker(collecting: Any) -> None:
    with collecting(
        3, lambda: GymWrapper(Counter(7)), frames_per_batch=120, total_frames=500, num_envs=2
    ) as (collector, _):
        batches = list(collector)
    full = batches[0]
    assert full.shape == (6, 20) and full.names == [None, "time"]
    assert full["collector", "worker_index"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert len(full["action"].unique(dim=0)) == 6, "workers have the same random numbers"
    assert sum(batch.numel() for batch in batches) == 500
    assert collector.report.total_frames_by_worker.keys() == {0, 1, 2}
    for one in trajectories_of(batches):
        assert len(set(one["collector", "worker_index"].tolist())) == 1
        assert len(one) <= 7


@pytest.mark.parametrize("lag", [1, 3])
def test_with_lag_k_a_worker_runs_k_rollouts_ahead_and_then_waits(collecting, lag: int) -> None:
    policy = q(2, 3)
    with collecting(1, lambda: Tally(10**6), policy, frames_per_batch=10, max_policy_lag=lag) as (
        collector,
        session,
    ):
        (peer,) = session.of_role("collector")
        for _ in range(4):
            collector.next()
            collector.update_policy_weights_()
        wait_for(lambda: session.call(peer, steps_taken) >= 40 + 10 * lag)
        time.sleep(0.1)  # room to go too far
        assert session.call(peer, steps_taken) == 40 + 10 * lag
        lags = []
        for _ in range(6):
            batch = collector.next()
            lags.append(collector.report.policy_lag)
            assert lags[-1] == collector.policy_version - batch["policy_version"].min()
            collector.update_policy_weights_()
        assert max(1, lag - 1) <= max(lags) <= lag


def test_first_ready_does_not_wait_for_the_slow(collecting: Any) -> None:
    options = {"frames_per_batch": 10, "total_frames": 300, "max_policy_lag": 1}
    with collecting(2, slow_second(0.05), readiness=FirstReady(), **options) as (collector, _):
        sources = [batch["collector", "worker_index"][0, 0].item() for batch in collector]
        shares = collector.report.total_frames_by_worker
    assert sum(shares.values()) == 300
    assert shares[0] > 4 * shares[1]
    assert sources[:3] == [0, 0, 0]


def test_workers_write_into_the_buffer_themselves(collecting: Any, tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    options = {"frames_per_batch": 40, "total_frames": 130, "num_envs": 4, "max_policy_lag": 1}
    with collecting(2, Counter, replay_buffer=rows, **options) as (collector, session):
        pids = {session.pid_of(peer) for peer in session.of_role("collector")}
        reports = list(collector)
    assert sum(report.frames for report in reports) == 130 == sum(rows.read().values())
    assert set(rows.read()) == pids
    assert sum(len(report.episode_returns) for report in reports) == 8 * 3


def test_an_exception_names_the_worker_and_its_host(collecting: Any) -> None:
    class Broken(Counter):
        def step(self, action: Any) -> Any:
            if is_second() and self.t == 3:
                raise ZeroDivisionError("the pole is gone")
            return super().step(action)

    with collecting(2, Broken, frames_per_batch=20) as (collector, session):
        with pytest.raises(RemoteError, match="the pole is gone") as caught:
            next(iter(collector))
        assert caught.value.peer == "collector1"
        assert caught.value.host == session.peers[2].host
        assert "in step" in caught.value.remote_traceback


class Late(Counter):
    """Its constructor waits for a file; another says that it was closed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        while not (folder / "go").exists():
            time.sleep(0.01)

    def close(self) -> None:
        (self.folder / "closed").touch()


def test_an_env_that_is_built_too_late_is_closed_then(fork_server: ForkServer, tmp_path) -> None:
    config = WorkerConfig(lambda: Late(tmp_path), own_process=True)
    with local_cluster({"learner": 1, "collector": 1}, fork_server=fork_server) as session:
        workers, lost, errors = start_workers(
            session, session.of_role("collector"), [config], max_ahead=0, limit_s=0.2
        )
        assert (workers, lost) == ([], []) and isinstance(errors[0], DeadlineError)
        assert "collector0" in str(errors[0]) and "raise timeout_s= of the coll" in str(errors[0])
        (tmp_path / "go").touch()
        wait_for((tmp_path / "closed").exists)


def test_a_worker_that_dies_before_the_start_is_missing_from_the_start(fork_server) -> None:
    with local_cluster({"learner": 1, "collector": 3}, fork_server=fork_server) as session:
        kill(session, 1)

        def build(min_workers: int) -> RPCBatchedCollector:
            return RPCBatchedCollector(
                Counter, None, session=session, frames_per_batch=30, total_frames=100,
                min_workers=min_workers,
            )  # fmt: skip

        with pytest.warns(UserWarning, match="lost before its first rollout: collector1") as warned:
            with pytest.raises(PeerLostError, match="2 of 3 workers .* min_workers=3"):
                build(3)
            assert {each.filename for each in warned if "before its" in str(each.message)} == {
                __file__
            }
            with build(2) as collector:
                assert sum(batch.numel() for batch in collector) == 100
                assert collector.report.lost_workers == ("collector1",)
                assert collector.report.frames_by_worker.keys() <= {0, 2}


@pytest.mark.parametrize(("readiness", "lag"), [(WaitAll(), 0), (FirstReady(), 2)])
def test_when_a_worker_is_killed_the_others_collect_its_frames(collecting, readiness, lag) -> None:
    options = {"frames_per_batch": 60, "total_frames": 601, "num_envs": 2, "max_policy_lag": lag}
    with (
        collecting(3, Paced, readiness=readiness, **options) as (collector, session),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        frames, frames_of_the_dead = 0, []
        for number, batch in enumerate(collector):
            if number == 1:
                kill(session, 1)
            frames += batch.numel()
            frames_of_the_dead.append(collector.report.frames_by_worker.get(1, 0))
        assert frames == 601 == collector.report.total_frames
        assert collector.report.lost_workers == ("collector1",)
        assert frames_of_the_dead[-3:] == [0, 0, 0]
        assert len([w for w in caught if "collector1" in str(w.message)]) == 1


def test_a_paused_worker_is_named_at_the_deadline_and_its_rows_come_later(collecting: Any) -> None:
    with collecting(
        2, lambda: Counter(10**6), frames_per_batch=20, total_frames=100, timeout_s=1.0
    ) as (collector, session):
        batches = [collector.next()]
        stop(session.pid_of(session.of_role("collector")[1]))
        try:
            with pytest.raises(DeadlineError, match="collector1") as caught:
                collector.next()
            assert "collector0" not in str(caught.value)
        finally:
            kill(session, 1, signal.SIGCONT)
        batches += list(collector)
        rows = torch.cat(batches, 1)
        assert rows.shape == (2, 50)
        for env in range(2):
            assert rows["next", "observation"][env, :, 0].tolist() == [201 + t for t in range(50)]


def test_shutdown_is_quick_while_a_rollout_runs_and_after_a_death(fork_server) -> None:
    with local_cluster({"learner": 1, "collector": 3}, fork_server=fork_server) as session:
        collector = RPCBatchedCollector(  # 100 s per rollout
            lambda: Paced(step_s=0.01), session=session, frames_per_batch=30_000, timeout_s=0.3
        )
        with pytest.raises(DeadlineError):
            collector.next()
        kill(session, 2)
        begun = time.monotonic()
        collector.shutdown()
        collector.shutdown()
        assert time.monotonic() - begun < 30
        again = RPCBatchedCollector(
            Counter, None, session=session, workers=session.of_role("collector")[:2],
            frames_per_batch=10, total_frames=20,
        )  # fmt: skip
        assert sum(batch.numel() for batch in again) == 20


def test_a_buffer_that_would_be_copied_to_the_workers_is_refused(fork_server: ForkServer) -> None:
    with local_cluster({"learner": 1, "collector": 1}, fork_server=fork_server) as session:
        private = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
        with pytest.raises(ConfigurationError, match="LazyTensorStorage, which belongs to this"):
            RPCBatchedCollector(
                "CartPole-v1", session=session, frames_per_batch=8, replay_buffer=private
            )
        for hosts in ([session.me], session.of_role("collector")):
            hosted = hosted_buffer(
                session, capacity=100, batch_size=8, hosts=hosts, name=hosts[0].name
            )
            for option, advice in (
                (
                    {"env_processes": 2, "trajs_per_batch": 2},
                    "Pass env_processes=0, with num_envs= .* or leave trajs_per_batch= out",
                ),
                ({"replace_lost": True}, "Pass replace_lost=False"),
            ):
                with pytest.raises(ConfigurationError, match=advice):
                    RPCBatchedCollector(
                        "CartPole-v1", session=session, frames_per_batch=8,
                        replay_buffer=hosted, **option,
                    )  # fmt: skip
            hosted.close()


@pytest.mark.parametrize("at", ["learner", "collector"])
@pytest.mark.parametrize("shortcut", [True, False])
def test_env_processes_write_to_a_buffer_over_hosts(
    fork_server: ForkServer, at: str, shortcut: bool
) -> None:
    with local_cluster({"learner": 1, "collector": 2}, fork_server=fork_server) as session:
        hosted = hosted_buffer(
            session, capacity=1_000, batch_size=8, hosts=session.of_role(at), shortcut=shortcut
        )
        with RPCBatchedCollector(
            lambda: Counter(5), session=session, num_envs=2, env_processes=2, seed=0,
            frames_per_batch=80, total_frames=240, replay_buffer=hosted,
        ) as collector:  # fmt: skip
            reports = list(collector)
        assert [report.frames for report in reports] == [80] * 3
        assert all(report.write_s[worker] > 0 for report in reports for worker in (0, 1))
        hosted.flush() if not shortcut else None
        rows = hosted[:]
        assert len(hosted) == 240 and rows.ndim == 1
        ids = rows["collector", "traj_ids"]
        assert rows["collector", "worker_index"].bincount().tolist() == [120, 120]
        for trajectory in ids.unique():  # in order, without gaps
            steps = rows["observation"][ids == trajectory, 0] % 100
            assert steps.equal(torch.arange(len(steps), dtype=steps.dtype))
        hosted.close()


def test_an_env_process_that_dies_leaves_no_gap_in_a_buffer_over_hosts(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    died = tmp_path / "died"

    class DiesOnce(Counter):
        def step(self, action: Any) -> Any:
            if self.t == 3 and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(action)

    with local_cluster({"learner": 1, "collector": 1}, fork_server=fork_server) as session:
        hosted = hosted_buffer(session, capacity=1_000, batch_size=8, shortcut=False)
        with (
            pytest.warns(UserWarning, match="replaced env process .*SIGKILL"),
            RPCBatchedCollector(
                lambda: DiesOnce(5), session=session, env_processes=2, frames_per_batch=20,
                total_frames=100, replay_buffer=hosted, timeout_s=60,
            ) as collector,
        ):  # fmt: skip
            assert sum(report.frames for report in collector) == 100
        hosted.flush()
        assert died.exists() and len(hosted) == 100
        rows = hosted[:]
        for trajectory in rows["collector", "traj_ids"].unique():
            steps = rows["observation"][rows["collector", "traj_ids"] == trajectory, 0] % 100
            assert steps.equal(torch.arange(len(steps), dtype=steps.dtype))
        hosted.close()


def test_env_processes_at_a_limiter_stop(fork_server: ForkServer) -> None:
    with local_cluster({"learner": 1, "collector": 1}, fork_server=fork_server) as session:
        limiter = RateLimiter(min_size_to_sample=8, samples_per_insert=1, error_buffer=16)
        hosted = hosted_buffer(
            session, capacity=100, batch_size=8, limiter=limiter, timeout_s=60, shortcut=False
        )
        collector = RPCBatchedCollector(
            lambda: Counter(5), session=session, env_processes=2, frames_per_batch=8,
            replay_buffer=hosted, max_policy_lag=1, timeout_s=60,
        )  # fmt: skip
        collector.start()
        wait_for(lambda: len(hosted) >= 16)
        begun = time.monotonic()
        collector.async_shutdown()
        assert time.monotonic() - begun < 20 and len(hosted) < 60
        hosted.close()


def is_second() -> bool:
    return current_session().me.name == "collector1"


def slow_second(slow_s: float) -> Any:
    """Makes envs that are slow on the second collector only."""
    return lambda: Paced(10**6, slow_s if is_second() else 0.0005)


def test_a_quorum_leaves_the_late_for_the_next_batch_and_loses_nothing(collecting: Any) -> None:
    rule = Quorum(min_workers=2, timeout_s=0.1)
    with collecting(
        3, slow_second(0.05), frames_per_batch=30, total_frames=301, readiness=rule
    ) as (collector, _):
        batches, sources = [], []
        for batch in collector:
            batches.append(batch)
            sources.append(sorted(set(batch["collector", "worker_index"].flatten().tolist())))
        shares = collector.report.shares
    assert sources[:3] == [[0, 2]] * 3 and any(1 in workers for workers in sources)
    assert sum(batch.numel() for batch in batches) == 301
    assert abs(sum(shares.values()) - 1) < 1e-9 and shares[1] < 0.5 * shares[0]
    for worker in range(3):  # every step of every env is there, once, in order
        rows = [
            batch["next", "observation"][batch["collector", "worker_index"] == worker][:, 0]
            for batch in batches
        ]
        steps = torch.cat(rows)
        assert torch.equal(steps, 201 + torch.arange(len(steps)).float())


@pytest.mark.parametrize("lag", [0, 1])
def test_stragglers_are_preempted_and_their_other_steps_come_later(collecting, lag: int) -> None:
    rule = Preempt(fraction=0.6, min_part=0.25)
    options = {"frames_per_batch": 120, "total_frames": 700, "max_policy_lag": lag}
    with collecting(3, slow_second(0.02), readiness=rule, **options) as (collector, _):
        batches = list(collector)
        report = collector.report
    masks = [batch["collector", "mask"] for batch in batches]
    assert sum(int(mask.sum()) for mask in masks) == 700 == report.total_frames
    assert all(batch.shape == (3, 40) for batch in batches[:5])
    for mask in masks[:5]:
        assert mask[0].all() and mask[2].all()
        assert 10 <= mask[1].sum() < 30  # at least a quarter, and far from all
    rows = torch.cat([batch[mask] for batch, mask in zip(batches, masks, strict=True)])
    steps = rows["next", "observation"][rows["collector", "worker_index"] == 1][:, 0]
    assert torch.equal(steps, 201 + torch.arange(len(steps)).float())
    assert report.shares[1] < report.shares[0]


def test_requests_that_come_together_run_in_their_order() -> None:
    config = WorkerConfig(lambda: Counter(10**6), frames_per_rollout=3)
    worker = PinnedWorker(RolloutWorker, config, OwnThread())
    answers = {number: worker.collect(request=number) for number in (3, 1, 2, 0)}
    for number, answer in answers.items():
        assert answer.result(10)[0]["observation"][0, 0, 0] == 100.0 + 3 * number
    worker.close().result(10)


def test_workers_that_die_are_replaced(collecting: Any) -> None:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.preference = nn.Parameter(torch.tensor([1.0, 0.0, 0.0]))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.preference.expand(*observation.shape[:-1], 3)

    policy = QValueActor(Weighed(), in_keys=["observation"], spec=OneHot(3))
    options = {"frames_per_batch": 40, "total_frames": 8000, "num_envs": 2, "timeout_s": 60}
    options |= {"replace_lost": True, "min_workers": 2, "max_frames_per_traj": 3}
    options["post_collect_hook"] = lambda rows: rows.set("pid", torch.full(rows.shape, os.getpid()))
    with (
        collecting(2, Paced, policy, init_random_frames=40, **options) as (collector, session),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        batches = []
        for number, batch in enumerate(collector):
            batches.append(batch)
            if number == 2:
                kill(session, 0)
                kill(session, 1)  # no worker is left until the successors are ready
                policy.module[0].module.preference.data = torch.tensor([0.0, 1.0, 0.0])
                collector.update_policy_weights_()
            if number > 8 and len(batch) == 4:  # both successors are ready
                break
        rows = torch.cat([batch.reshape(-1) for batch in batches])
        assert len(rows) == collector.report.total_frames < 8000
        assert collector.stats()["workers_alive"] == 2
        assert sorted(collector.report.lost_workers) == ["collector0", "collector1"]
        said = [str(w.message) for w in caught if "a successor is built" in str(w.message)]
        assert len(said) == 2
        last = batches[-1]
        assert len(last) == 4 and len(last["pid"].unique()) == 2
        assert not set(last["pid"].unique().tolist()) & {os.getpid(), session.pid_of(session.me)}
        assert not set(last["pid"].unique().tolist()) & set(batches[0]["pid"].unique().tolist())
        assert last["collector", "worker_index"][:, 0].tolist() == [0, 0, 1, 1]
        assert last["policy_version"].eq(1).all() and last["action"].argmax(-1).eq(1).all()
        assert batches[0]["action_value"].eq(0).all() and batches[1]["action_value"].any()
        ids = rows["collector", "traj_ids"]
        lengths = torch.unique(ids, return_counts=True)[1]
        assert lengths.max() == 3  # no trajectory of a dead worker goes on under its id
        assert rows["next", "step_count"].max() == 3


def test_a_successor_that_cannot_be_built_is_an_error_that_says_why(
    collecting: Any, fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "_address", fork_server.address)  # forks it at once

    class NoMore(Tally):
        def __init__(self) -> None:
            super().__init__(10**6)
            if (tmp_path / "used up").exists():
                raise OSError("no licence is left")

    options = {"frames_per_batch": 40, "replace_lost": True, "timeout_s": 60}
    with collecting(2, NoMore, **options) as (collector, session), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector.next()
        (tmp_path / "used up").touch()
        kill(session, 0)
        with pytest.raises(RemoteError, match="no licence is left"):
            while True:
                collector.next()
                time.sleep(0.02)


def _ids_of_my_trajectories() -> set[int]:
    me = current_session()
    collector = RPCBatchedCollector(
        "CartPole-v1", None, session=me, workers=[me.me], frames_per_batch=400, total_frames=400,
        num_envs=2,
    )  # fmt: skip
    (batch,) = collector
    collector.shutdown()
    return set(batch["collector", "traj_ids"].flatten().tolist())


def test_collectors_of_several_learners_number_trajectories_apart(fork_server) -> None:
    with local_cluster({"learner": 3}, fork_server=fork_server) as me:
        found = [me.call(peer, _ids_of_my_trajectories) for peer in me.peers[1:]]
        found.append(_ids_of_my_trajectories())
    assert all(len(ids) > 4 for ids in found)
    assert len(set.union(*found)) == sum(map(len, found))


def test_ranks_without_a_session_number_trajectories_apart(monkeypatch) -> None:
    found = []
    for rank in range(3):
        variables = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 3}
        for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))
        collector = RPCBatchedCollector(
            "CartPole-v1", None, frames_per_batch=400, total_frames=400, num_envs=2
        )
        (batch,) = collector
        collector.shutdown()
        found.append(set(batch["collector", "traj_ids"].flatten().tolist()))
    assert len(set.union(*found)) == sum(map(len, found))

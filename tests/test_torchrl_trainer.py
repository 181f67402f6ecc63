"""TorchRL's trainers over this package's collector, buffers and losses."""

from __future__ import annotations

import ast
import inspect
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
import torchrl.collectors
import torchrl.collectors.distributed
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torchrl.checkpoint import Checkpoint
from torchrl.data import Categorical
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.record.loggers import CSVLogger
from torchrl.record.loggers.monitoring import LoggerMonitor
from torchrl.trainers import (
    CountFramesLog,
    LogScalar,
    ReplayBufferTrainer,
    Trainer,
    UpdateWeights,
)
from torchrl.trainers.algorithms import DQNTrainer

from torchrl_dist import (
    ConfigurationError,
    DistributedLoss,
    RPCBatchedCollector,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedReplayBuffer,
    local_cluster,
    replay_buffer,
)
from torchrl_dist.runtime import Session

COLLECTORS = {
    cls
    for module in (torchrl.collectors, torchrl.collectors.distributed)
    for name, cls in vars(module).items()
    if name.endswith("Collector")
}
MISSING = {  # by the reason why RPCBatchedCollector does not have them
    "the envs are on the workers: getattr_env, get_attr, set_attr and call reach them": {
        "env", "n_env", "create_env_fn", "create_env_kwargs", "env_constructors",
    },
    "the session has the processes, and stats() counts those alive": {
        "IPAddr", "add_collectors", "backend", "collector_infos", "collector_kwargs",
        "collector_class", "collector_rrefs", "futures", "jobs", "launcher", "num_collectors",
        "num_workers_per_collector", "pipes", "procs", "remote_collectors", "slurm_kwargs",
        "stop_remote_collectors", "tcp_port", "tensorpipe_options", "visible_devices",
    },
    "weights reach all workers by update_policy_weights_(), without schemes or cached copies": {
        "get_cached_weights", "get_model", "get_weights_fn", "local_policy", "policy_weights",
        "max_weight_update_interval", "update_after_each_batch", "update_at_each_batch",
        "update_interval",
    },
    "update_policy_weights_() counts the version, and the workers stamp it": {
        "increment_version", "policy_version_tracker",
    },
    "the policy of each process is compiled or captured there": {
        "compiled_policy", "compiled_policy_kwargs", "cudagraphed_policy",
        "cudagraphed_policy_kwargs",
    },
    "frames_per_batch, total_frames and report.frames_by_worker say how frames are divided": {
        "collected_frames", "frames_per_batch_worker", "frames_per_worker",
        "total_frames_per_collector",
    },
    "batches are the caller's, and no buffer of the collector is used again": {
        "buffers", "out_buffer", "out_tensordicts", "queue_out",
    },
    "next() and iteration make the rollouts": {"rollout", "yield_completed_trajectories"},
    "other names say it: is_running(), readiness, inference='learner', policy and replay_buffer": {
        "local_init_rb", "policy_factory", "preemptive_threshold", "running", "server_backend",
        "server_stats",
    },
    "it has no effect here": {"no_cuda_sync", "num_sub_threads", "num_threads", "trust_policy"},
}  # fmt: skip


def public(cls: type) -> set[str]:
    """Return its public attributes, also those that its methods set."""
    names = {name for name in dir(cls) if not name.startswith("_")}
    for base in cls.__mro__:
        if base.__module__.startswith("torchrl."):
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    if isinstance(node.value, ast.Name) and node.value.id == "self":
                        names.add(node.attr)
    return {name for name in names if not name.startswith("_")}


def test_the_collector_has_the_public_attributes_of_torchrls() -> None:
    theirs = set[str]().union(*map(public, COLLECTORS))
    assert len(COLLECTORS) > 8 and {"env", "policy", "closed"} < theirs
    with RPCBatchedCollector("CartPole-v1", frames_per_batch=8, postproc=len) as collector:
        missing = theirs - {*dir(collector)}
        for name in theirs - missing - {"worker_idx"}:  # it raises, as in a collector of TorchRL's
            getattr(collector, name)
        assert not collector.closed and collector.num_workers == 1 and collector.postproc is len
    assert collector.closed
    reasons = [name for names in MISSING.values() for name in names]
    assert len(reasons) == len({*reasons})
    assert missing == {*reasons}, "mirror them, or give the reason above"


def test_arguments_are_read_only_because_the_workers_have_them() -> None:
    options = {"exploration_type": torchrl.envs.utils.ExplorationType.MODE, "set_truncated": True}
    policy = torch.nn.Linear(4, 2)
    with RPCBatchedCollector("CartPole-v1", frames_per_batch=8, **options) as collector:
        for name, value in options.items():
            assert getattr(collector, name) is value
            with pytest.raises(AttributeError):
                setattr(collector, name, value)
        collector.policy = policy
        assert collector.getattr_policy("in_features") == 4


# --- trainers ------------------------------------------------------------------------------------


@pytest.fixture
def job(fork_server: Any) -> Iterator[Session]:
    roles = {"learner": 1, "collector": 2}
    with local_cluster(roles, fork_server=fork_server, timeout_s=60) as session:
        yield session


MakeBuffer = Callable[[Session, Path], SharedReplayBuffer]


def shared(session: Session, folder: Path) -> SharedReplayBuffer:
    storage = SharedMemmapStorage(1_000, scratch_dir=folder / "replay")
    sampler = SharedPrioritizedSampler(1_000, alpha=0.6, beta=0.4)
    return SharedReplayBuffer(storage=storage, sampler=sampler, batch_size=16)


def hosted(session: Session, folder: Path) -> SharedReplayBuffer:
    return replay_buffer(session, capacity=1_000, batch_size=16, shortcut=False)


def parts() -> tuple[Any, Any, Any]:
    network = MLP(4, 2, num_cells=[16])
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    explore = EGreedyModule(Categorical(2), annealing_num_steps=1_000)
    loss = DQNLoss(actor, delay_value=True, action_space="categorical")
    loss.make_value_estimator(gamma=0.99)
    return TensorDictSequential(actor, explore), loss, torch.optim.Adam(loss.parameters())


def build(
    session: Session, buffer: Any, folder: Path, *, frames: int, writes: str, checkpoint: Any
) -> Trainer:
    policy, loss, optimizer = parts()
    collector = RPCBatchedCollector(
        "CartPole-v1", policy, session=session, num_envs=2, frames_per_batch=32,
        init_random_frames=64, total_frames=frames, categorical_action_encoding=True,
        replay_buffer=buffer if writes == "worker" else None,
    )  # fmt: skip
    trainer = Trainer(
        collector=collector, total_frames=frames, frame_skip=1, optim_steps_per_batch=2,
        loss_module=DistributedLoss(loss), optimizer=optimizer, seed=1, progress_bar=False,
        logger=CSVLogger("log", log_dir=folder), log_interval=1, checkpoint=checkpoint,
        save_trainer_file=folder / "saved", save_trainer_interval=100,
    )  # fmt: skip
    replay = ReplayBufferTrainer(buffer, flatten_tensordicts=True)
    if writes == "trainer":
        replay.register(trainer)
        LogScalar().register(trainer)
    else:
        trainer.register_op("process_optim_batch", replay.sample)
        trainer.register_op("post_loss", replay.update_priority)
        trainer.register_module("replay_buffer", replay)
    trainer.register_op("post_optim", SoftUpdate(trainer.loss_module, tau=0.01).step)
    UpdateWeights(collector, 1).register(trainer)
    CountFramesLog(1).register(trainer)
    return trainer


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make_buffer", "writes", "kind"),  # each pair of values once
    [
        pytest.param(shared, "trainer", Checkpoint, id="shared-trainer-checkpoint"),
        pytest.param(shared, "worker", lambda: None, id="shared-worker-legacy"),
        pytest.param(hosted, "trainer", lambda: None, id="hosted-trainer-legacy"),
        pytest.param(hosted, "worker", Checkpoint, id="hosted-worker-checkpoint"),
    ],
)
def test_a_trainer_trains_logs_saves_and_resumes(
    fork_server: Any, tmp_path: Path, make_buffer: MakeBuffer, writes: str, kind: Any
) -> None:
    weights: dict[str, torch.Tensor] = {}
    for frames, begin in ((160, 0), (320, 160)):
        folder = tmp_path / str(frames)  # the rows come from the checkpoint
        with local_cluster({"learner": 1, "collector": 2}, fork_server=fork_server) as session:
            buffer = make_buffer(session, folder)
            trainer = build(
                session, buffer, folder, frames=frames, writes=writes, checkpoint=kind()
            )
            if begin:
                trainer.load_from_file(tmp_path / str(begin) / "saved")
                for name, value in trainer.loss_module.state_dict().items():
                    if isinstance(value, torch.Tensor):
                        assert value.equal(weights[name]), name
                assert trainer.collector.policy_version >= begin // 32
            assert trainer.collected_frames == len(buffer) == begin
            trainer.train()
            assert trainer.collected_frames == len(buffer) == frames
            assert trainer._optim_count == 2 * (frames // 32 - 1)  # the first 32 frames only fill
            assert trainer.collector.stats()["frames"] == frames and trainer.collector.closed
            weights = {
                name: value.clone()
                for name, value in trainer.loss_module.state_dict().items()
                if isinstance(value, torch.Tensor)
            }
            assert not weights["value_network_params.module.0.module.0.bias"].eq(0).all()
            buffer.storage.close()
        logged = {path.stem for path in (folder / "log" / "scalars").iterdir()}
        assert {"n_frames", "loss", "optim_steps"} < logged
        assert ("('next', 'reward')" in logged) == (writes == "trainer")
        points = (folder / "log" / "scalars" / "n_frames.csv").read_text().split()
        assert points[-1] == f"{frames},{frames:.1f}"


class Waits(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that makes no more than 100 steps before a file exists."""

    def __init__(self, go: Path) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.go, self.steps = go, 0

    def step(self, action: Any) -> Any:
        while self.steps == 100 and not self.go.exists():
            time.sleep(0.01)
        self.steps += 1
        return super().step(action)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("make_buffer", [shared, hosted])
def test_a_trainer_learns_while_workers_collect(
    job: Session, tmp_path: Path, make_buffer: MakeBuffer
) -> None:
    policy, loss, optimizer = parts()
    buffer = make_buffer(job, tmp_path)
    learned = tmp_path / "learned"
    collector = RPCBatchedCollector(
        lambda: Waits(learned), policy, session=job, frames_per_batch=32, replay_buffer=buffer,
        categorical_action_encoding=True,
    )  # fmt: skip
    trainer = DQNTrainer(
        collector=collector, total_frames=300, frame_skip=1, optim_steps_per_batch=1,
        loss_module=DistributedLoss(loss), optimizer=optimizer, replay_buffer=buffer,
        target_net_updater=SoftUpdate(loss, tau=0.01), progress_bar=False, async_collection=True,
        greedy_module=policy[1], logger=CSVLogger("log", log_dir=tmp_path), log_interval=1,
        log_rewards=False,
    )  # fmt: skip
    # TorchRL's trainer looks at the buffer every 0.1 s before its first round, and fast workers
    # could write all frames in this time.
    trainer.register_op("post_optim", learned.touch)
    trainer.train()
    # the trainer counts at the start of a round, the workers write until its end
    assert 0 < trainer.collected_frames <= buffer.write_count and trainer._optim_count > 0
    assert buffer.write_count >= 300
    assert collector.closed and not collector.is_running()
    assert collector.policy_version == trainer._optim_count
    buffer.storage.close()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_hook_that_needs_rows_is_told_where_they_are(tmp_path: Path) -> None:
    buffer = shared(None, tmp_path)  # type: ignore[arg-type]  # it needs no session
    for register in (
        LogScalar().register,
        ReplayBufferTrainer(buffer, flatten_tensordicts=True).register,
    ):
        policy, loss, optimizer = parts()
        collector = RPCBatchedCollector(
            "CartPole-v1", policy, frames_per_batch=32, replay_buffer=buffer,
            categorical_action_encoding=True,
        )  # fmt: skip
        trainer = Trainer(
            collector=collector, total_frames=64, frame_skip=1, optim_steps_per_batch=1,
            loss_module=loss, optimizer=optimizer, progress_bar=False,
        )  # fmt: skip
        register(trainer)
        with pytest.raises(ConfigurationError, match="collector.report"):
            trainer.train()
        collector.shutdown()
    assert collector.report.numel() == collector.report.frames == 32
    assert not collector.report.keys(True) and collector.report.get("reward", None) is None
    buffer.storage.close()


# --- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_buffer", [shared, hosted])
def test_a_monitor_logs_the_counters_of_the_buffer_and_of_the_collector(
    job: Session, tmp_path: Path, make_buffer: MakeBuffer
) -> None:
    buffer = make_buffer(job, tmp_path)
    buffer.extend(TensorDict({"x": torch.arange(1_000)}, [1_000]))
    batch = buffer.sample(4)
    buffer.extend(TensorDict({"x": torch.arange(1_000)}, [1_000]))
    buffer.update_priority(batch["index"], torch.ones(4), generation=batch["index_generation"])
    getattr(buffer, "flush", lambda: None)()
    expected = super(SharedReplayBuffer, buffer).stats() | buffer.storage.counters
    assert buffer.stats() == expected and expected["stale_updates"] == 4
    logger = CSVLogger("log", log_dir=tmp_path)
    monitor = LoggerMonitor(logger, background=False, on_error="raise")
    monitor.watch(buffer, name="rows")
    with RPCBatchedCollector(
        "CartPole-v1", session=job, frames_per_batch=8, categorical_action_encoding=True
    ) as collector:
        monitor.watch(collector, name="collector", stats_kwargs={"workers": "both"})
        collector.next()
        logged = monitor.step()
    assert logged["rows"]["rows/write_count"] == 2_000
    assert logged["rows"]["rows/stale_updates"] == expected["stale_updates"]
    assert logged["collector"]["collector/frames"] == 8
    assert logged["collector"]["collector/worker_1/frames"] == 4
    buffer.storage.close()

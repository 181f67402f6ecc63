"""TorchRL's classes that take a buffer, a part of one or a collector, built over ours.

They give the same data as over TorchRL's own parts, or are refused at once.

Classes are found by reflection, so that one that a newer TorchRL adds fails the test until it has
its place in the tables at the end.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import re
import types
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl.collectors
import torchrl.data
import torchrl.envs.transforms
import torchrl.trainers
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import BaseCollector, Collector, MultiSyncCollector
from torchrl.data import (
    HERReplayBuffer,
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    PrioritizedReplayBuffer,
    RemoteTensorDictReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    StorageEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    WriterEnsemble,
    traj,
)
from torchrl.data.replay_buffers import samplers, writers
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase
from torchrl.data.replay_buffers.offline_to_online import prefill_replay_buffer
from torchrl.data.replay_buffers.sample_units import SampleUnit, Transition
from torchrl.data.replay_buffers.scheduler import LambdaScheduler, LinearScheduler, StepScheduler
from torchrl.data.replay_buffers.utils import _ReplayBoundaryIndex
from torchrl.envs import DoubleToFloat, GymWrapper, MultiStepTransform
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.trainers import ReplayBufferTrainer, Trainer, UpdateWeights
from torchrl.trainers.algorithms import DQNTrainer
from torchrl.trainers.algorithms.offline_to_online import OfflineToOnlineReplayBufferHook

from tests.collect.envs import Counter
from tests.replay.hosted_helpers import settle
from torchrl_dist import (
    RemoteStorage,
    RPCBatchedCollector,
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    SharedRandomSampler,
    SharedReplayBuffer,
    SharedSamplerWithoutReplacement,
    host_replay,
    session,
)
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.replay.parts.query import trajectories

CAPACITY = 12


class EveryRow(samplers.Sampler):
    """A user's sampler that needs no chance: the rows in their slots, again and again."""

    def __init__(self) -> None:
        self.drawn = 0

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        first, self.drawn = self.drawn, self.drawn + batch_size
        return torch.arange(first, self.drawn) % len(storage), {}

    def _empty(self) -> None:
        self.drawn = 0

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.drawn = state_dict["drawn"]

    def dumps(self, path: Any) -> None:
        pass

    loads = dumps


class Parts:
    """TorchRL's own parts of a buffer."""

    without_replacement: Callable[[], samplers.Sampler] = SamplerWithoutReplacement

    def storage(self) -> Any:
        return LazyTensorStorage(CAPACITY)

    def writer(self) -> Any:
        return RoundRobinWriter(track_generations=True)

    def buffer(self, kind: Any = TensorDictReplayBuffer, **options: Any) -> Any:
        options.setdefault("sampler", EveryRow())
        options.setdefault("batch_size", 4)
        return kind(storage=self.storage(), writer=self.writer(), **options)

    def settle(self, *buffers: Any) -> None:
        """Wait until the hosts have stored what was written."""
        for buffer in buffers:
            settle(buffer)


class Ours(Parts):
    without_replacement = SharedSamplerWithoutReplacement

    def __init__(self) -> None:
        self.built: list[Any] = []

    def storage(self) -> Any:
        path = Path("/dev/shm") / f"torchrl_dist-test-{uuid.uuid4().hex[:8]}"
        self.built.append(SharedMemmapStorage(CAPACITY, scratch_dir=path, job_id="test"))
        return self.built[-1]

    def writer(self) -> Any:
        return SharedCursorWriter()

    def close(self) -> None:
        for storage in self.built:
            storage.close()


class Hosted(Ours):
    def __init__(self, job: Any) -> None:
        super().__init__()
        self.job = job

    def storage(self) -> Any:
        name = f"meets-{uuid.uuid4().hex[:8]}"
        owner = host_replay(self.job, CAPACITY, name=name, shortcut=False, sampling=("uniform",))
        self.built.append(RemoteStorage(owner))
        return self.built[-1]

    def close(self) -> None:
        for storage in self.built:
            storage.close()
            storage.owner.release()


@pytest.fixture(scope="module")
def job() -> Iterator[Any]:
    with session() as me:
        yield me


@pytest.fixture(params=["shared", "hosted"])
def ours(request: pytest.FixtureRequest) -> Iterator[Ours]:
    parts = Hosted(request.getfixturevalue("job")) if request.param == "hosted" else Ours()
    yield parts
    parts.close()


@pytest.fixture
def local() -> Iterator[Ours]:
    parts = Ours()
    yield parts
    parts.close()


def rows(first: int, stop: int, length: int = 4) -> TensorDict:
    """Rows of episodes of that many steps."""
    number = torch.arange(first, stop)
    done = (number % length == length - 1)[:, None]
    return TensorDict(
        {
            "id": number,
            "episode": number // length,
            "obs": number[:, None].double(),
            "next": TensorDict({"done": done, "reward": number[:, None].float()}, [stop - first]),
        },
        [stop - first],
    )


def plain(value: Any) -> Any:
    """Convert to values that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, TensorDictBase):
        # generations are handles, which each kind of buffer counts in its own way
        found = {str(key): plain(each) for key, each in value.items(True, True)}
        return {key: found[key] for key in sorted(found) if key != "index_generation"}
    if hasattr(value, "data") and isinstance(value.data, TensorDictBase):
        return plain(value.data)  # a Trajectory
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


# --- the same data -------------------------------------------------------------------------------


def use_a_buffer(parts: Parts, kind: Any = TensorDictReplayBuffer) -> Any:
    rb = parts.buffer(kind)
    seen: list[Any] = []
    for first in (0, 5, 10):
        given = rows(first, first + 5)
        rb.extend(given)
        parts.settle(rb)
        rb.extend(given) if first == 10 else None  # a stock buffer has set "index" in it
        rb.add(rows(20 + first, 21 + first)[0])
        parts.settle(rb)
        seen += plain([len(rb), rb.write_count, rb[:], rb.sample(), rb.sample(3)])
    rb[torch.tensor([1, 4])] = rows(50, 52)
    rb[2] = rows(60, 61)[0]
    rb[3:5] = rows(70, 72)
    parts.settle(rb)
    seen += plain([rb[:], rb[1:6:2], rb[2], rb[-1], rb["id"], rb["next", "done"], rb[[3, 1]]])
    seen += plain([rb[torch.arange(CAPACITY) > 7], rb.read_all_in_order(end=4)])
    rb.write_all(rows(80, 92))
    rb.write_all(rows(95, 95 + CAPACITY))
    rb.append_transform(DoubleToFloat(in_keys=["obs"]))
    parts.settle(rb)
    seen += [str(rb.sample()["obs"].dtype), [each["id"] for each in rb.storage], 3 in rb.storage]
    seen += [99 in rb.storage, rb.storage.contains(torch.tensor([0, 11, 12])), rb.storage.shape]
    stats = rb.stats()
    seen += [stats["size"], stats["capacity"], rb.can_sample(4)]
    state = rb.state_dict()
    rb.empty()
    seen.append(len(rb))
    rb.load_state_dict(state)
    seen.append(rb[:])
    return seen


def use_a_plain_buffer(parts: Parts) -> Any:
    return use_a_buffer(parts, ReplayBuffer)


def use_a_remote_buffer(parts: Parts) -> Any:
    """Whose methods TorchRL lets others call by RPC."""
    return use_a_buffer(parts, RemoteTensorDictReplayBuffer)


def use_query(parts: Parts) -> Any:
    rb = parts.buffer(TensorDictReplayBuffer if type(parts) is Parts else SharedReplayBuffer)
    found: list[Any] = [rb.query()]
    for first in range(0, 35, 5):
        rb.extend(rows(first, first + 5))
        found.append(plain(rb.query()))
        found.append(plain(rb.query((traj.reward.sum() > 40) & (traj.length >= 3))))
        found.append(plain(rb.query(lambda each: each.length == 4, trajectory_key="episode")))
    rb.append_transform(DoubleToFloat(in_keys=["obs"]))
    found.append(rb.query(traj.obs.last() > 30))
    found.append([str(each.obs.dtype) for each in rb.query(traj.length > 1)])
    return found


def use_an_ensemble(parts: Parts) -> Any:
    members = [parts.buffer(), parts.buffer()]
    rb = ReplayBufferEnsemble(*members, batch_size=6, sample_from_all=True, routing_key="to")
    data = rows(0, 20)
    data["to"] = (torch.arange(20) % 3 > 0).long()
    seen = [rb.extend(data)["buffer_ids"]]
    parts.settle(*members)
    stats = rb.stats()
    seen += [stats["size"], stats["write_count"], stats["capacity"], rb[0][:], rb[1][:]]
    seen += [rb.sample()["id"], rb.sample()["id"], rb[:, 0]["id"], rb[1].sample()["id"]]
    return seen


def use_an_ensemble_of_parts(parts: Parts) -> Any:
    rb = ReplayBufferEnsemble(
        storages=StorageEnsemble(parts.storage(), parts.storage(), transforms=[None, None]),
        samplers=SamplerEnsemble(EveryRow(), EveryRow(), sample_from_all=True),
        writers=WriterEnsemble(parts.writer(), parts.writer()),
        batch_size=6,
    )
    members = [rb[0], rb[1]]
    for each in members:
        each.extend(rows(0, 8))
    parts.settle(*members)
    return [rb.sample()["id"], rb[0][:], rb[1][:]]


def use_prefill(parts: Parts) -> Any:
    dataset, rb = parts.buffer(ReplayBuffer), parts.buffer()
    dataset.extend(rows(0, 10))
    parts.settle(dataset)
    prefill_replay_buffer(rb, dataset, n_samples=9, chunk_size=4)
    parts.settle(rb)
    return rb[:]


def use_an_offline_buffer(parts: Parts) -> Any:
    """Ours as the data set."""
    dataset = parts.buffer(ReplayBuffer)
    dataset.extend(rows(0, 10))
    parts.settle(dataset)
    rb = OfflineToOnlineReplayBuffer(dataset, online_capacity=10, batch_size=4)
    hook = OfflineToOnlineReplayBufferHook(rb, batch_size=4)
    hook.extend(rows(20, 28))
    rb.online_buffer.set_sampler(EveryRow())
    return [hook.sample(None)["id"], len(rb), hook.sample(None)["id"]]


def use_a_transform(parts: Parts) -> Any:
    rb = parts.buffer(ReplayBuffer, transform=MultiStepTransform(n_steps=2, gamma=0.5))
    for first in (0, 5):
        data = rows(first, first + 5)
        data["next", "obs"] = data["obs"] + 1
        rb.extend(data)
    parts.settle(rb)
    return rb[:]


def policy() -> TensorDictModule:
    torch.manual_seed(0)
    net = nn.Linear(2, 3)
    return QValueActor(net, in_keys=["observation"], spec=env().action_spec)


class Steps(Counter):
    """Episodes that are all alike."""

    def _observe(self) -> Any:
        return super()._observe() % 100


def env() -> GymWrapper:
    return GymWrapper(Steps())


def collect_into(parts: Parts, **options: Any) -> Any:
    rb = parts.buffer()
    collector = Collector(
        env, policy(), frames_per_batch=6, total_frames=30, replay_buffer=rb, **options
    )
    for _ in collector:
        pass
    collector.shutdown()
    parts.settle(rb)
    return [rb[:], rb.write_count]


def collect_batches(parts: Parts) -> Any:
    return collect_into(parts)


def collect_rows(parts: Parts) -> Any:
    return collect_into(parts, extend_buffer=False)


def collect_trajectories(parts: Parts) -> Any:
    return collect_into(parts, trajs_per_batch=2)


def train_over(parts: Parts, kind: Any = Trainer, collector: Any = None) -> Any:
    """Weights after some updates."""
    actor = policy()
    loss = DQNLoss(actor, action_space=env().action_spec, delay_value=True)
    optimizer = torch.optim.SGD(loss.parameters(), 1e-3)
    rb = parts.buffer(batch_size=6)
    options: dict[str, Any] = {}
    if kind is DQNTrainer:
        options |= {"replay_buffer": rb, "target_net_updater": SoftUpdate(loss, eps=0.9)}
        options["enable_logging"] = False
    if collector is None:
        collector = Collector(env, actor, frames_per_batch=6, total_frames=18)
    trainer = kind(
        collector=collector,
        total_frames=18,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=loss,
        optimizer=optimizer,
        progress_bar=False,
        **options,
    )
    if kind is Trainer:
        hook = ReplayBufferTrainer(rb, batch_size=6, flatten_tensordicts=True)
        hook.register(trainer)
        UpdateWeights(collector, 1, lambda: TensorDict.from_module(actor).data).register(trainer)
    trainer.train()
    parts.settle(rb)
    if kind is Trainer:
        state = hook.state_dict()
        rb.empty()
        hook.load_state_dict(state)
    return [[p.detach() for p in actor.parameters()], rb["observation"], len(rb)]


def train_dqn(parts: Parts) -> Any:
    return train_over(parts, DQNTrainer)


def train_by_passes(parts: Parts) -> Any:
    """Go once through all rows per batch, like on-policy trainers."""
    rb = parts.buffer(sampler=parts.without_replacement(), batch_size=4)
    hook = ReplayBufferTrainer(rb, iterate=True)
    passes = []
    for first in (0, CAPACITY):
        hook.extend(rows(first, first + CAPACITY))
        parts.settle(rb)
        drawn: list[int] = []
        while True:
            try:
                drawn += hook.sample(None)["id"].tolist()
            except StopIteration:
                break
        passes.append(sorted(drawn))
    return passes


USES: list[Callable[[Parts], Any]] = [
    use_a_buffer, use_a_plain_buffer, use_a_remote_buffer, use_query, use_an_ensemble,
    use_an_ensemble_of_parts, use_prefill, use_an_offline_buffer, use_a_transform,
]  # fmt: skip
FEEDS: list[Callable[[Parts], Any]] = [
    collect_batches, collect_rows, collect_trajectories, train_over, train_dqn, train_by_passes,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_the_same_data_as_over_parts_of_torchrl(use: Callable[[Parts], Any], ours: Ours) -> None:
    assert plain(use(ours)) == plain(use(Parts()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("feed", FEEDS, ids=lambda feed: feed.__name__)
def test_collectors_and_trainers_do_the_same(feed: Callable[[Parts], Any], local: Ours) -> None:
    assert plain(feed(local)) == plain(feed(Parts()))


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_learns_the_same_from_our_collector(local: Ours) -> None:
    frames = {"frames_per_batch": 6, "total_frames": 18}
    mine = RPCBatchedCollector(Steps, policy(), **frames)
    theirs = Collector(env, policy(), **frames)
    assert mine.getattr_env("length") == 5
    assert plain(train_over(local, collector=mine)) == plain(train_over(Parts(), collector=theirs))


@pytest.mark.filterwarnings("ignore")
def test_schedulers_move_ours_as_they_move_theirs() -> None:
    class Stand(EveryRow):
        beta = 0.4

    def values(scheduled: Any) -> list[float]:
        schedulers = [
            LinearScheduler(scheduled, "beta", final_value=1.0, num_steps=4),
            StepScheduler(scheduled, "beta", gamma=0.5, n_steps=2),
            LambdaScheduler(scheduled, "beta", lambda step: 1 / (1 + step)),
        ]
        found = []
        for scheduler in schedulers:
            for _ in range(3):
                scheduler.step()
                found.append(round(float(scheduled.beta), 6))
            scheduler.load_state_dict(scheduler.state_dict())
        return found

    ours = SharedPrioritizedSampler(CAPACITY, alpha=0.6, beta=0.4)
    assert values(ours) == values(Stand())


# --- refused -------------------------------------------------------------------------------------


def classes_of(*roots: types.ModuleType) -> Iterator[type]:
    """Every class in these packages, wherever it can be imported."""
    for root in roots:
        below = pkgutil.walk_packages(root.__path__, f"{root.__name__}.", lambda name: None)
        names = [each.name for each in below]
        for name in [root.__name__, *names]:
            try:
                module = importlib.import_module(name)
            except Exception:  # it needs what is not installed, or does not load
                continue
            for each in vars(module).values():
                if inspect.isclass(each) and each.__module__ == name:
                    yield each


def subclasses(base: type, *but: type) -> list[type]:
    """TorchRL's, that can be built."""
    found = [each for each in classes_of(torchrl.data) if issubclass(each, base)]
    return [each for each in found if not inspect.isabstract(each) and each not in but]


def part_of(kind: type) -> Any:
    """One of TorchRL's; not built if its constructor wants arguments, because its class is enough
    to refuse it."""
    try:
        return kind()
    except TypeError:
        part = kind.__new__(kind)
    if isinstance(part, samplers.ConsumingSampler):
        part.max_sample_count = 1
    return part


_BUFFER_OPTIONS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "sampler": lambda: [{"sampler": part_of(each)} for each in subclasses(samplers.Sampler)],
    "writer": lambda: [
        {"writer": part_of(each)}
        for each in subclasses(writers.Writer, writers.ImmutableDatasetWriter, WriterEnsemble)
    ],
    "checkpointer": lambda: [
        {"checkpointer": part_of(each)} for each in subclasses(StorageCheckpointerBase)
    ],
    "sample_unit": lambda: [
        {"sample_unit": part_of(each)} for each in subclasses(SampleUnit, Transition)
    ],
    "options": lambda: [{"shared": True}, {"dim_extend": 1}, {"compilable": True}],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", _BUFFER_OPTIONS)
def test_parts_of_torchrl_are_refused_when_the_buffer_is_built(option: str, ours: Ours) -> None:
    storage = ours.storage()
    for given in _BUFFER_OPTIONS[option]():
        options = {"sampler": EveryRow(), "writer": SharedCursorWriter(), **given}
        for kind in (ReplayBuffer, TensorDictReplayBuffer):
            with pytest.raises(ConfigurationError):
                kind(storage=storage, batch_size=4, **options)
    assert not storage._attached_entities


@pytest.mark.filterwarnings("ignore")
def test_ours_refuse_storages_of_torchrl() -> None:
    with pytest.raises(ConfigurationError, match="SharedCursorWriter writes to"):
        Parts().buffer(ReplayBuffer, sampler=EveryRow()).set_writer(SharedCursorWriter())
    rb = Parts().buffer(sampler=SharedRandomSampler())
    rb.extend(rows(0, 4))
    with pytest.raises(ConfigurationError, match="SharedMemmapStorage"):
        rb.sample()


def test_buffers_of_torchrl_that_look_at_neighboring_slots(ours: Ours) -> None:
    with pytest.raises(ConfigurationError, match="relabel each episode before extend"):
        ours.buffer(HERReplayBuffer, reward_fn=print)
    storage = ours.storage()
    for kind in (PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer):
        # where TorchRL's trees do not load, its own error comes first
        with pytest.raises((ConfigurationError, RuntimeError), match="SegmentTree|shared rows"):
            kind(alpha=0.6, beta=0.4, storage=storage, batch_size=4)
    with pytest.raises(ConfigurationError, match="SharedCursorWriter"):
        OfflineToOnlineReplayBuffer(ours.buffer(), online_storage=storage)
    for kind in (ReplayBuffer, TensorDictReplayBuffer):
        rb = ours.buffer(kind)
        rb.extend(rows(0, 8))
        ours.settle(rb)
        with pytest.raises(ConfigurationError, match="build a SharedReplayBuffer"):
            rb.query(trajectory_key="episode")
        with pytest.raises(ConfigurationError, match="SharedSliceSampler"):
            _ReplayBoundaryIndex(
                end=rb["next", "done"][:, 0], at_capacity=False, storage=rb.storage,
                cursor=rb.storage._last_cursor,
            )  # fmt: skip
        new = torch.ones(8, 1).double()
        changes: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (rb.set_, ("obs", new)),
            (rb.set_at_, ("obs", new[:1], 0)),
            (rb.update_, ({"obs": new},)),
            (rb.__setitem__, ("obs", new)),
        ]
        for change, arguments in changes:
            with pytest.raises((ConfigurationError, RuntimeError), match="instead|locked"):
                change(*arguments)
        with pytest.raises(ConfigurationError, match="build a SharedReplayBuffer"):
            rb.update_if_present(
                index=torch.tensor([0]), generation=torch.tensor([1]), patch={"obs": new[:1]}
            )
        assert rb["obs"][:, 0].tolist() == list(range(8))
        assert rb.storage._rand_given_ndim(20).max() < 8


def test_collectors_that_share_a_buffer_with_their_processes(local: Ours) -> None:
    class Stub:
        _check_replay_buffer_init = MultiSyncCollector._check_replay_buffer_init
        _validate_policy_version_replay_schema = lambda self: None  # noqa: E731
        set_truncated = trajs_per_batch = None

        def __init__(self, rb: Any) -> None:
            self.replay_buffer = rb

    for kind in (SharedReplayBuffer, TensorDictReplayBuffer):
        rb = local.buffer(kind)
        MultiSyncCollector._setup_multi_replay_buffer(Stub(rb), rb, True)  # type: ignore[arg-type]
        assert rb.write_count == 0
        if kind is SharedReplayBuffer:
            assert not rb.shared and pickle.dumps(rb)
            continue
        with pytest.raises(ConfigurationError, match="SharedReplayBuffer"):
            rb.storage.__getstate__()


# --- query while others write --------------------------------------------------------------------


def pieces(rb: Any) -> list[tuple[int, list[int]]]:
    return [(int(each.episode[0]), each.id.tolist()) for each in rb.query()]


@pytest.mark.parametrize(("total", "taken"), [(31, 1), (24, 5), (40, 11)])
def test_query_gives_whole_trajectories_while_rows_are_being_written(
    total: int, taken: int, local: Ours
) -> None:
    rb = local.buffer(SharedReplayBuffer)
    rb.extend(rows(0, total, length=5))
    cursor = rb.storage._cursor
    claims = [cursor.reserve(1) for _ in range(taken)]  # as processes in the middle of an extend
    left = range(total - CAPACITY + taken, total)
    episodes = sorted({number // 5 for number in left})
    assert pieces(rb) == [(each, [n for n in left if n // 5 == each]) for each in episodes]
    for claim in claims:
        cursor.abandon(claim)


def test_query_joins_what_writers_cut_into_pieces(ours: Ours) -> None:
    rb = ours.buffer(SharedReplayBuffer)
    for first in (0, 20, 2, 22, 8):  # episodes 0 and 5 by turns
        rb.extend(rows(first, first + 2))
    assert pieces(rb) == [(0, [0, 1, 2, 3]), (5, [20, 21, 22, 23]), (2, [8, 9])]
    rb.extend(rows(0, 2))  # the id of one that has ended
    rb.extend(rows(10, 12))
    rb.extend(rows(2, 4))
    after = [(5, [22, 23]), (2, [8, 9, 10, 11]), (0, [0, 1, 2, 3])]
    assert pieces(rb)[-2:] == after[1:] and len(rb.query()) == 4


def test_query_wants_ids_that_are_unique(local: Ours) -> None:
    rb = local.buffer(SharedReplayBuffer)
    assert rb.query() == []
    rb.extend(rows(0, 8).exclude("episode"))
    with pytest.raises(ConfigurationError, match="pass trajectory_key="):
        rb.query()
    with pytest.raises(ConfigurationError, match="one number per row"):
        rb.query(trajectory_key="next")
    with pytest.raises(KeyError, match="nothing"):
        rb.query(trajectory_key="nothing")
    with pytest.raises(ConfigurationError, match="shards 0 and 1"):
        list(trajectories([*rb.storage.snapshot(), *rb.storage.snapshot()], "id"))


# --- columns that a sample would hide ------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer, SharedReplayBuffer])
def test_a_column_that_a_sample_would_hide_is_refused(kind: Any, ours: Ours) -> None:
    rb = ours.buffer(kind)
    data = rows(0, 4)
    names = ["index", "index_generation", "priority_weight", ("index", "frame")]
    for name in names:
        odd = data.clone().set(name, torch.arange(4) * 10)
        for write in (rb.extend, lambda odd: rb.add(odd[0]), rb.storage.append):
            with pytest.raises(ConfigurationError, match="rename the column with rows.rename_key_"):
                write(odd)
                ours.settle(rb)
    assert len(rb) == 0 and rb.write_count == 0
    rb.extend(data)  # a stock buffer sets "index" in it
    ours.settle(rb)
    rb.extend(data)
    ours.settle(rb)
    for name in names:
        odd = data.exclude("index").set(name, torch.arange(4) * 10)
        with pytest.raises(ConfigurationError, match="rename the column"):
            rb.extend(odd)
        with pytest.raises(ConfigurationError, match="rename the column"):
            rb[torch.arange(4)] = odd
    rb.extend(rb.sample())
    ours.settle(rb)
    assert rb["id"].tolist() == [*range(4)] * 3 and "index" not in rb[:].keys()


# --- every class has its place -------------------------------------------------------------------

_NAMES = re.compile(
    r"(^|_)(rbs?|replay_buffers?|storages?|samplers?|writers?|checkpointers?|collectors?)$"
)
_KINDS = re.compile(r"(ReplayBuffer|Storage|Sampler|Writer|Collector|StorageCheckpointerBase)\b")


def takes_parts(kind: type) -> bool:
    """Whether its constructor has an argument that is a buffer, a part of one or a collector."""
    if issubclass(kind, (ReplayBuffer, Trainer, BaseCollector)):
        return True
    given = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    return any(_NAMES.search(each.name) or _KINDS.search(str(each.annotation)) for each in given)


PLACES: dict[str, set[str]] = {
    "the same data, in a test above": {
        "BaseCollector", "Collector", "DQNTrainer", "LambdaScheduler", "LinearScheduler",
        "OfflineToOnlineReplayBuffer", "OfflineToOnlineReplayBufferHook", "ParameterScheduler",
        "RemoteTensorDictReplayBuffer", "ReplayBuffer", "ReplayBufferEnsemble",
        "ReplayBufferTrainer", "SamplerEnsemble", "StepScheduler", "StorageEnsemble",
        "TensorDictReplayBuffer", "Trainer", "UpdateWeights", "WriterEnsemble",
    },
    "refused, in a test above": {
        "HERReplayBuffer", "MultiAsyncCollector", "MultiCollector", "MultiSyncCollector",
        "PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer", "_ReplayBoundaryIndex",
    },
    "uses a buffer by ReplayBufferTrainer only": {
        "A2CTrainer", "CQLTrainer", "DDPGTrainer", "IQLTrainer", "OnPolicyTrainer", "PPOTrainer",
        "ReinforceTrainer", "SACTrainer", "TD3Trainer",
    },
    "takes an OfflineToOnlineReplayBuffer, and calls its methods": {
        "OfflineToOnlineAnnealHook", "OfflineToOnlineTrainer",
    },
    "has a storage of its own, which our parts refuse": {
        "AtariDQNExperienceReplay", "BaseDatasetExperienceReplay", "D4RLExperienceReplay",
        "GenDGRLExperienceReplay", "LeRobotExperienceReplay", "MinariExperienceReplay",
        "OpenMLExperienceReplay", "OpenXExperienceReplay", "RobosetExperienceReplay",
        "VD4RLExperienceReplay",
    },
    "extends the buffer as Collector does, from threads or processes": {
        "AsyncBatchedCollector", "AsyncCollector",
    },
    "builds TorchRL's collectors in other processes, by their class": {
        "DistributedCollector", "DistributedSyncCollector", "RPCCollector", "RPCWeightUpdater",
        "_ThreadEvalBackend",
    },
    "needs ray or a language model, which the tests do not have": {
        "GRPOTrainer", "LLMCollector", "RayCollector", "RayLLMCollector", "RayReplayBuffer",
        "RayWeightUpdater", "_Learner", "_RayTrainerExecution",
    },
    "takes none, by another meaning of the word": {
        "OffPolicyCollectorConfig", "OnPolicyCollectorConfig", "Storage", "TensorDictMap",
        "TensorStorage",
    },
}  # fmt: skip


def test_every_class_that_takes_a_buffer_a_part_or_a_collector_has_its_place() -> None:
    found = {
        each.__qualname__: each
        for each in classes_of(
            torchrl.data, torchrl.envs.transforms, torchrl.trainers, torchrl.collectors
        )
        if takes_parts(each)
    }
    placed = {name for names in PLACES.values() for name in names}
    assert not sorted({*found} - placed), "try these over our parts, and give them a place above"
    for name in PLACES["uses a buffer by ReplayBufferTrainer only"] & {*found}:
        sources = [inspect.getsource(each) for each in found[name].__mro__ if each is not object]
        assert any("ReplayBufferTrainer(" in source for source in sources), name
    for name in PLACES["has a storage of its own, which our parts refuse"] & {*found}:
        assert "storage" not in inspect.signature(found[name]).parameters, name

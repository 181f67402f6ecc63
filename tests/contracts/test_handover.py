"""Each public object is copied, sent, forked, closed and used elsewhere.

It works as its class says, or an error says at once why not. A new public name must be placed in
one of the tables here.
"""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import torchrl_dist as td
from tests.learn.losses import make_loss

pytestmark = pytest.mark.timeout(180)

CAPACITY = 100
BY_NAME = ("anneal_beta", "host_replay", "load_policy", "local_cluster", "replay_buffer", "session")
VALUES: dict[str, Callable[[], Any]] = {
    "__version__": lambda: td.__version__,
    "CollectReport": lambda: td.CollectReport(frames=3, episode_returns=(1.0,)),
    "FirstReady": td.FirstReady,
    "Peer": lambda: td.Peer("learner", 0, 0, "host"),
    "Preempt": lambda: td.Preempt(0.6),
    "Quorum": lambda: td.Quorum(2, timeout_s=1.0),
    "RateLimiter": lambda: td.RateLimiter(8, samples_per_insert=2.0, error_buffer=32.0),
    "WaitAll": td.WaitAll,
    "World": td.World.from_env,
}
ERRORS: dict[str, Callable[[], BaseException]] = {
    **{
        name: getattr(td, name)
        for name in (
            "CheckpointError",
            "ConfigurationError",
            "DeadlineError",
            "DirectoryError",
            "PeerLostError",
            "RateLimitError",
            "TorchRLDistError",
        )
    },
    "DriftError": lambda *text: td.DriftError(*text, names=("weight",)),
    "RemoteError": lambda *text: td.RemoteError(*text, peer="a", host="b", remote_traceback="c"),
}


def _rows(count: int) -> TensorDict:
    number = torch.arange(count)
    rows = {"id": number, "episode": number // 10, "td_error": torch.ones(count)}
    return TensorDict(rows, [count])


# how an object is used; ``near`` is what it needs in addition
def _sample(buffer: Any, near: Any) -> None:
    assert (buffer.sample()["id"] < 50).all()


def _draw(sampler: Any, near: Any) -> None:
    index = sampler.sample(near, 4)[0]
    index = index[0] if isinstance(index, tuple) else index
    assert 0 < index.numel() <= 4  # fewer at the end of a pass


def _write(writer: Any, near: Any) -> None:
    assert (writer.extend(_rows(2)) >= -1).all()


def _read(storage: Any, near: Any) -> None:
    assert storage[3]["id"] == 3


def _open(owner: Any, near: Any) -> None:
    _read(td.RemoteStorage(owner), near)


def _call(remote: Any, near: Any) -> None:
    assert remote.call("count", 1) == 0


def _ask(job: Any, near: Any) -> None:
    assert job.call(job.me, len, [1]) == 1


def _collect(collector: Any, near: Any) -> None:
    assert next(iter(collector)).numel() == 8


def _check(loss: Any, near: Any) -> None:
    loss.check_drift()


@dataclass
class Subject:
    """An object, how it is used, and the errors that are expected.

    Attributes:
        copied: of pickling and copying it.
        forked: of using it in a forked child.
        elsewhere: of using a copy in a process that was spawned.
        closed: of using it after it was closed.
    """

    thing: Any
    use: Callable[[Any, Any], None]
    near: Any = None
    copied: str | None = None
    forked: str | None = None
    elsewhere: str | None = None
    closed: str | None = None


_CLOSED = "DirectoryError: the storage over .* was closed in this process"
_FORKED = "ConfigurationError: process .* was forked from"
_NOT_IN = "ConfigurationError: This process is not in a session"
_WAS_CLOSED = "ConfigurationError: this buffer was closed in this process"


def _shared(folder: Path) -> Iterator[Subject]:
    samplers: list[Any] = [
        td.SharedRandomSampler(),
        td.SharedPrioritizedSampler(CAPACITY, 0.6, 0.4),
        td.SharedSamplerWithoutReplacement(),
        td.SharedSliceSampler(slice_len=2, traj_key="episode"),
        td.SharedPrioritizedSliceSampler(CAPACITY, 0.6, 0.4, slice_len=2, traj_key="episode"),
    ]
    buffers = []
    for number, sampler in enumerate(samplers):
        storage = td.SharedMemmapStorage(
            CAPACITY, scratch_dir=folder / str(number), job_id="test", timeout_s=20
        )
        buffer = td.SharedReplayBuffer(storage=storage, sampler=sampler, batch_size=4, prefetch=2)
        buffer.extend(_rows(50))
        buffer.sample()
        yield Subject(sampler, _draw, storage, closed=_CLOSED)
        yield Subject(buffer, _sample, closed=_CLOSED)
        if number == 0:
            yield Subject(storage, _read, closed=_CLOSED)
            yield Subject(buffer.writer, _write, closed=_CLOSED)
        buffers.append(buffer)
    storage = td.SharedMemmapStorage(
        CAPACITY, scratch_dir=folder / "best", job_id="test", timeout_s=20
    )
    ranked = td.SharedReplayBuffer(storage=storage, writer=td.SharedMaxValueWriter("td_error"))
    ranked.extend(_rows(50))
    yield Subject(ranked.writer, _write, closed=_CLOSED)
    parts = [td.SharedReplayBuffer(storage=each.storage) for each in buffers[:2]]
    mixed = td.SharedOfflineToOnlineReplayBuffer(*parts, batch_size=4)
    yield Subject(mixed, _sample, buffers[0].storage, closed=_CLOSED)


def _hosted(job: td.Session, folder: Path) -> Iterator[Subject]:
    owner = td.host_replay(job, CAPACITY, scratch_dir=folder, shortcut=False)
    storage = td.RemoteStorage(owner)
    storage.append(_rows(50))
    storage.flush()
    there: dict[str, Any] = {"forked": _FORKED, "elsewhere": _NOT_IN}
    yield Subject(owner, _open, **there)
    yield Subject(storage, _read, closed=_WAS_CLOSED, **there)
    slices: dict[str, Any] = {"slice_len": 2, "traj_key": "episode", "owner": owner}
    for sampler in (
        td.RPCRandomSampler(owner=owner),
        td.RPCPrioritizedSampler(CAPACITY, 0.6, 0.4, owner=owner),
        td.RPCSamplerWithoutReplacement(owner=owner),
        td.RPCSliceSampler(**slices),
        td.RPCPrioritizedSliceSampler(CAPACITY, 0.6, 0.4, **slices),
    ):
        yield Subject(sampler, _draw, storage, closed=_WAS_CLOSED, **there)
    options: dict[str, Any] = {"capacity": CAPACITY, "batch_size": 4, "scratch_dir": folder}
    far = td.replay_buffer(job, "far", shortcut=False, **options)
    near = td.replay_buffer(job, "near", **options)
    for buffer in (far, near):
        buffer.extend(_rows(50))
        buffer.flush()
        buffer.sample()
    yield Subject(far, _sample, closed=_WAS_CLOSED, **there)
    yield Subject(near, _sample, closed=_CLOSED, elsewhere=_NOT_IN)
    yield Subject(job.remote(job.me, list), _call, **there)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Subject], ExitStack]]:
    """One of each, in use, and what ends them."""
    folder = tmp_path_factory.mktemp("handover")
    refused = "ConfigurationError: a .* cannot be copied or pickled, because"
    with ExitStack() as stack:
        job = stack.enter_context(td.session(timeout_s=20))
        collector = stack.enter_context(td.RPCBatchedCollector("CartPole-v1", frames_per_batch=8))
        next(iter(collector))
        shared = list(_shared(folder / "shared"))
        for each in shared:
            stack.callback(_storage_of(each.thing, each.near).close)
        yield (
            [
                *shared,
                *_hosted(job, folder / "hosted"),
                Subject(job, _ask, copied=refused, forked=_FORKED),
                Subject(
                    collector, _collect, copied=refused, forked=_FORKED, closed="was shut down"
                ),
                Subject(td.DistributedLoss(make_loss("dqn")), _check, copied=refused),
            ],
            stack,
        )


@pytest.fixture
def subjects(stage: tuple[list[Subject], ExitStack]) -> list[Subject]:
    return stage[0]


def _storage_of(thing: Any, near: Any) -> Any:
    """The storage of a buffer, a sampler or a writer, or the storage itself."""
    if isinstance(thing, td.SharedReplayBuffer):
        return thing.storage
    if isinstance(thing, td.SharedCursorWriter):
        return thing._storage
    return thing if near is None else near


def _outcome(action: Callable[[], Any]) -> str:
    """Empty, or the error."""
    try:
        action()
    except BaseException as error:
        return "".join(traceback.format_exception_only(error)).strip()
    return ""


def _compare(subjects: list[Subject], outcomes: list[str], wanted: list[str | None]) -> None:
    wrong = [
        f"{type(each.thing).__name__}: {got[:300] or 'no error'}, expected {want or 'none'}"
        for each, got, want in zip(subjects, outcomes, wanted, strict=True)
        if (re.search(want, got) is None if want else got)
    ]
    assert not wrong, "\n".join(wrong)


def _saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "deepcopy": copy.deepcopy,
    "torch.save": _saved,
}


def test_every_public_name_is_placed(subjects: list[Subject]) -> None:
    names = {base.__name__ for each in subjects for base in type(each.thing).__mro__}
    placed = {*BY_NAME, *VALUES, *ERRORS, "DistributedLoss"}
    missing = set(td.__all__) - placed - names
    assert not missing, f"say in this file what becomes of {missing} that is copied or closed"


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_values_and_errors_are_equal(how: str) -> None:
    for name in BY_NAME:
        function = getattr(td, name)
        assert COPIES[how](function) is function
    for value in (make() for make in VALUES.values()):
        made = COPIES[how](value)
        assert type(made) is type(value) and vars_of(made) == vars_of(value)
    for name, make in ERRORS.items():
        error = make("what went wrong")
        made = COPIES[how](error)
        assert type(made) is getattr(td, name)
        assert (str(made), vars(made)) == (str(error), vars(error))


def vars_of(value: Any) -> Any:
    return vars(value) if hasattr(value, "__dict__") else value


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_object_in_use_works_or_is_refused(how: str, subjects: list[Subject]) -> None:
    def use_copy(each: Subject) -> None:
        thing, near = COPIES[how]((each.thing, each.near))
        each.use(thing, near)
        storage = _storage_of(thing, near)
        if type(storage) is td.SharedMemmapStorage:
            storage.close()

    outcomes = [_outcome(lambda each=each: use_copy(each)) for each in subjects]
    _compare(subjects, outcomes, [each.copied for each in subjects])


def test_another_thread_can_use_it_or_gets_an_error(subjects: list[Subject]) -> None:
    """A collector's envs live in the thread that built it."""
    outcomes: list[str] = []

    def use() -> None:
        outcomes.extend(_outcome(lambda e=e: e.use(e.thing, e.near)) for e in subjects)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(60)
    told = [isinstance(each.thing, td.RPCBatchedCollector) for each in subjects]
    _compare(subjects, outcomes, ["was built in" if each else None for each in told])


def test_a_forked_child_can_use_it_or_gets_an_error(subjects: list[Subject]) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        outcomes = [_outcome(lambda e=e: e.use(e.thing, e.near)) for e in subjects]
        with open(write, "wb") as pipe:
            pickle.dump(outcomes, pipe)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        text = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    _compare(subjects, pickle.loads(text), [each.forked for each in subjects])


def _use_there(pipe: Any, things: list[Any], packed: list[bytes]) -> None:
    """Runs in a spawned process: objects that came with it, then those that may not arrive."""
    outcomes = [_outcome(lambda e=e: e[1](e[0], e[2])) for e in things]

    def unpack_and_use(text: bytes) -> None:
        thing, use, near = pickle.loads(text)
        use(thing, near)

    outcomes += [_outcome(lambda text=text: unpack_and_use(text)) for text in packed]
    pipe.send(outcomes)


def test_a_spawned_process_can_use_it_or_gets_an_error(subjects: list[Subject]) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    arrive = [each for each in subjects if each.copied is None and each.elsewhere is None]
    others = [each for each in subjects if each.copied is None and each.elsewhere is not None]
    things = [(each.thing, each.use, each.near) for each in arrive]
    packed = [pickle.dumps((each.thing, each.use, each.near)) for each in others]
    process = spawn.Process(target=_use_there, args=(theirs, things, packed))
    process.start()
    theirs.close()
    assert ours.poll(150)
    outcomes = ours.recv()
    process.join(20)
    assert process.exitcode == 0
    sent = arrive + others
    _compare(sent, outcomes, [each.elsewhere for each in sent])
    for each in subjects:
        if each.copied is not None:  # refused before a process is started
            refused = spawn.Process(target=_use_there, args=(None, [each.thing], []))
            _compare([each], [_outcome(refused.start)], [each.copied])


def test_closed_objects_say_so(subjects: list[Subject]) -> None:
    """This and the next come last."""
    closed = [each for each in subjects if each.closed is not None]
    for each in closed:
        if isinstance(each.thing, td.RPCBatchedCollector):
            each.thing.shutdown()
        else:
            _storage_of(each.thing, each.near).close()
    used = [_outcome(lambda e=e: e.use(e.thing, e.near)) for e in closed]
    _compare(closed, used, [each.closed for each in closed])
    copied = [_outcome(lambda e=e: pickle.dumps((e.thing, e.near))) for e in closed]
    for each, got in zip(closed, copied, strict=True):
        # a handle to hosts holds none of this process's rows: a copy is made anew
        of_hosts = hasattr(_storage_of(each.thing, each.near), "owner")
        assert re.search(each.copied or each.closed or "", got) or (of_hosts and not got)


def test_objects_of_a_session_say_that_it_has_ended(
    stage: tuple[list[Subject], ExitStack],
) -> None:
    subjects, stack = stage
    stack.close()
    left = [each for each in subjects if not isinstance(each.thing, td.DistributedLoss)]
    used = [_outcome(lambda e=e: e.use(e.thing, e.near)) for e in left]
    ended = [_NOT_IN, _WAS_CLOSED, "was closed in this process", "session is closed", "shut down"]
    _compare(left, used, ["|".join(ended)] * len(left))

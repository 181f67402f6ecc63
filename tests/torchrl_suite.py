"""TorchRL's own tests of replay buffers and of its collector, run over this package's.

    git clone https://github.com/pytorch/rl
    python tests/torchrl_suite.py rl/test/rb rl/test/test_trainer.py [arguments of pytest]
    python tests/torchrl_suite.py --collector rl/test/test_collectors.py [arguments of pytest]

A ``SharedMemmapStorage`` replaces each ``LazyTensorStorage`` and ``LazyMemmapStorage`` that a test
builds, and in the buffers over it the shared writer and sampler replace TorchRL's. A buffer with
``sample_unit=Sequence(...)``, or a buffer of TensorDicts whose writer tracks generations, is a
``SharedReplayBuffer``, as the refusal of TorchRL's class says; ``Sequence.expand`` finds the
windows of this package. With ``--collector`` a test's ``Collector`` is an ``RPCBatchedCollector``
with its worker in the same process, whose batches ``[N, T]`` get the shape of the env, which yields
None instead of reports, and which raises the errors of env and policy themselves. Neither batches
nor the rows of a buffer have ``worker_index``. Tests that need TorchRL's other collectors, or
choose one by ``backend=``, are skipped.

A test that built nothing of ours does not count. The others *pass*, are *refused* (they
fail with an error of this package, which says that it does not do that), or *fail*; ``--list``
names those, and ``--reasons`` counts the refusals by their message.
"""

from __future__ import annotations

import atexit
import collections
import os
import re
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    here = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), here]))
    sys.path.append(here)
    options = "-p tests.torchrl_suite -p no:cacheprovider -q --no-header --tb=no -rN -W ignore"
    sys.exit(pytest.main([*options.split(), *sys.argv[1:]]))

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl import collectors
from torchrl.data import ReplayBuffer, Sequence
from torchrl.data.replay_buffers import replay_buffers, samplers, storages, writers
from torchrl.envs import EnvBase

import torchrl_dist
from torchrl_dist.collect.worker import worker as collect_worker
from torchrl_dist.errors import DeadlineError, PeerLostError, RemoteError, TorchRLDistError
from torchrl_dist.replay.parts.drawn import Drawn
from torchrl_dist.replay.parts.windows import Neighbours, Window
from torchrl_dist.replay.row.spec import ORDER, RowSpec

_FOLDER = Path("/dev/shm") / f"torchrl_dist-suite-{os.getpid()}-{uuid.uuid4().hex[:6]}"
_built = 0


class _Unsupported(TorchRLDistError):
    """An option of TorchRL's class that the shared one does not have."""


class SuiteStorage(torchrl_dist.SharedMemmapStorage):
    """With the arguments of TorchRL's lazy storages."""

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: Any = None,
        device: Any = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        auto_cleanup: bool | None = None,
        existsok: bool = False,
        **others: Any,
    ) -> None:
        global _built
        _built += 1
        if any(value not in (None, False) for value in others.values()):
            raise _Unsupported(f"no options {sorted(others)}")
        super().__init__(
            max_size,
            scratch_dir=_FOLDER / uuid.uuid4().hex[:8],
            job_id="suite",
            timeout_s=10,
            device="cpu" if device == "auto" else device,
            ndim=ndim,
            compilable=compilable,
        )
        self.directory.ask_for_numbers(ORDER)


class LazyTensorStorage(SuiteStorage):
    pass


class LazyMemmapStorage(SuiteStorage):
    pass


_SAMPLERS = {
    samplers.RandomSampler: torchrl_dist.SharedRandomSampler,
    samplers.SliceSampler: torchrl_dist.SharedSliceSampler,
    samplers.SamplerWithoutReplacement: torchrl_dist.SharedSamplerWithoutReplacement,
}
_WRITERS = {
    writers.RoundRobinWriter: torchrl_dist.SharedCursorWriter,
    writers.TensorDictRoundRobinWriter: torchrl_dist.SharedCursorWriter,
    writers.TensorDictMaxValueWriter: torchrl_dist.SharedMaxValueWriter,
}


def _note_arguments(cls: type) -> None:
    plain = cls.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if type(self) is cls:
            self._suite_arguments = args, kwargs

    cls.__init__ = init


def _in_place_of(part: Any, ours: dict[type, Any]) -> Any:
    shared = ours.get(type(part))
    if shared is None:
        return part
    args, kwargs = getattr(part, "_suite_arguments", ((), {}))
    if type(part) in _WRITERS:  # no shared part is compilable, but a storage says so
        kwargs = {name: kwargs[name] for name in ("rank_key", "reduction") if name in kwargs}
        args = ()
    return shared(*args, **kwargs)


def _substitute() -> None:
    make_sampler, make_writer = ReplayBuffer._maybe_make_sampler, {}

    def sampler(self: Any, given: Any) -> Any:
        part = make_sampler(self, given)
        shared = isinstance(self._storage, SuiteStorage)
        return _in_place_of(part, _SAMPLERS) if shared else part

    ReplayBuffer._maybe_make_sampler = sampler
    for cls in {ReplayBuffer, *_subclasses(ReplayBuffer)}:
        if "_maybe_make_writer" in vars(cls):
            make_writer[cls] = cls._maybe_make_writer

            def writer(self: Any, given: Any, make: Any = make_writer[cls]) -> Any:
                part = make(self, given)
                shared = isinstance(self._storage, SuiteStorage)
                return _in_place_of(part, _WRITERS) if shared else part

            cls._maybe_make_writer = writer
    for cls in (*_SAMPLERS, *_WRITERS):
        if "__init__" in vars(cls):
            _note_arguments(cls)
    instead = {"LazyTensorStorage": LazyTensorStorage, "LazyMemmapStorage": LazyMemmapStorage}
    for name in ("PrioritizedSampler", "PrioritizedSliceSampler"):
        ours = getattr(torchrl_dist, f"Shared{name}")
        instead[name] = type(name, (ours,), {"__module__": __name__})
        globals()[name] = instead[name]  # to be pickled
    for name, module in list(sys.modules.items()):
        public = name in ("torchrl.data", "torchrl.data.replay_buffers")
        if public or module in (storages, samplers, writers, replay_buffers):
            for each, cls in instead.items():
                if hasattr(module, each):
                    setattr(module, each, cls)
    for name in ("prioritized", "prioritized_tensordict"):  # whose buffers make the sampler
        module = sys.modules[f"{replay_buffers.__name__}.{name}"]
        module.PrioritizedSampler = instead["PrioritizedSampler"]


def _substitute_shared_buffer() -> None:
    """Build a ``SharedReplayBuffer`` where TorchRL's buffer over shared rows is refused."""
    public = [sys.modules[name] for name in ("torchrl.data", "torchrl.data.replay_buffers")]

    def instead_of(cls: Any) -> Any:
        def build(*args: Any, **kwargs: Any) -> Any:
            storage, writer = kwargs.get("storage"), kwargs.get("writer")
            asks = type(kwargs.get("sample_unit")) is Sequence
            tracks = getattr(writer, "tracks_generations", False)
            asks = asks or "alpha" in kwargs
            asks = asks or (tracks and cls is not ReplayBuffer)  # which takes rows of every kind
            if not (asks and isinstance(storage, SuiteStorage)):
                return cls(*args, **kwargs)
            kwargs.pop("writer", None)
            if "alpha" in kwargs:
                names = ("alpha", "beta", "eps", "reduction")
                exponents = {name: kwargs.pop(name) for name in names if name in kwargs}
                ours = torchrl_dist.SharedPrioritizedSampler
                kwargs["sampler"] = ours(storage.max_size, **exponents)
            elif kwargs.get("sampler") is not None:
                kwargs["sampler"] = _in_place_of(kwargs["sampler"], _SAMPLERS)
            return torchrl_dist.SharedReplayBuffer(*args, **kwargs)

        return build

    for name in ("ReplayBuffer", "TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer"):
        for module in public:
            setattr(module, name, instead_of(getattr(replay_buffers, name)))
    plain = Sequence.expand

    def expand(self: Sequence, index: Any, info: dict[str, Any], storage: Any) -> Any:
        if not isinstance(storage, SuiteStorage):
            return plain(self, index, info, storage)
        window = Window.of(self)
        neighbours = Neighbours(storage.directory, window.end_key)
        neighbours.refresh()
        places, valid = neighbours.windows(window, index.numpy())
        rows = torch.zeros(*valid.shape, 3, dtype=torch.int64)
        rows[..., 0], rows[..., 2] = index[:, None], torch.from_numpy(valid)
        nothing = torch.empty(0, dtype=torch.int64)
        found = Drawn(RowSpec(()), nothing, nothing, np.ones(len(index)), [])
        found.anchors = rows.reshape(-1, 3)
        entries = window.info(found)
        del entries["anchor_generation"]
        for name, value in info.items():
            tensor = torch.as_tensor(value)
            info[name] = tensor.repeat_interleave(window.size, 0) if tensor.ndim else value
        return torch.from_numpy(places.reshape(-1)), info | entries

    Sequence.expand = expand


def _subclasses(cls: type) -> set[type]:
    return {each for sub in cls.__subclasses__() for each in {sub, *_subclasses(sub)}}


atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)

# --- the collector -------------------------------------------------------------------------------


class Collector(torchrl_dist.RPCBatchedCollector):
    """With the defaults, shapes and errors of TorchRL's."""

    def __init__(
        self, create_env_fn: Any, policy: Any = None, *, frames_per_batch: int = 200, **others: Any
    ) -> None:
        global _built
        if any(others.get(name) is not None for name in ("backend", "num_collectors")):
            _needs_another()
        _built += 1
        others = {"track_policy_version": False, "timeout_s": 60, **others}
        super().__init__(create_env_fn, policy, frames_per_batch=frames_per_batch, **others)

    _use_buffers = True

    @property
    def env(self) -> Any:
        return self._crew.workers[0].handle._worker._rollout.target

    def iterator(self) -> Any:
        for batch in super().iterator():
            yield None if isinstance(batch, torchrl_dist.CollectReport) else batch

    def _next_batch(self) -> Any:
        try:
            batch = super()._next_batch()
        except RemoteError as error:
            raise error.__cause__ or error from None
        if not isinstance(batch, TensorDictBase):
            return batch
        batch = batch.exclude(("collector", "worker_index"))
        if not self.track_traj_ids:
            del batch["collector"]
        plain = self.trajs_per_batch is None and not self.split_trajs
        if plain and isinstance(self.env, EnvBase):
            batch = batch.reshape(*self.env.batch_size, batch.shape[-1])
        elif plain:
            batch = batch[0]
        batch.names = [None] * (batch.ndim - 1) + ["time"]
        return batch


def _needs_another(*_: Any, **__: Any) -> None:
    pytest.skip("of several workers")


def _substitute_collector() -> None:
    for name in vars(collectors):
        if name.endswith("Collector") and name not in ("BaseCollector", "LLMCollector"):
            setattr(collectors, name, Collector if name == "Collector" else _needs_another)
    write = collect_worker.write
    collect_worker.write = lambda rows, buffer: write(
        rows.exclude(("collector", "worker_index")), buffer
    )


# --- the count -----------------------------------------------------------------------------------

_outcomes: dict[str, tuple[str, str]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--collector", action="store_true", help="tests of collectors, not of buffers")
    parser.addoption("--list", action="store_true", help="name the tests that fail")
    parser.addoption("--reasons", action="store_true", help="count refusals by message")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--collector"):
        _substitute_collector()
    else:
        _substitute()
        _substitute_shared_buffer()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    global _built
    outcome = yield
    report = outcome.get_result()
    if call.when == "setup":
        _built = 0
    if call.when != "call" or report.skipped or not _built:
        return
    if report.passed:
        _outcomes[item.nodeid] = "pass", ""
        return
    error: BaseException | None = call.excinfo.value if call.excinfo else None
    text = f"{type(error).__name__}: {error}"
    refusal = _refusal(error)
    if refusal is None:
        _outcomes[item.nodeid] = "fail", text
    else:
        _outcomes[item.nodeid] = "refused", f"{type(refusal).__name__}: {refusal}"


def _refusal(error: BaseException | None) -> TorchRLDistError | None:
    """Return the refusal of this package that caused the error, if any."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        mishap = isinstance(error, RemoteError | DeadlineError | PeerLostError)
        if isinstance(error, TorchRLDistError) and not mishap:
            return error
        told = error.__cause__ or error.__context__
        error = error.__cause__ if isinstance(error, RemoteError) else told
    return None


def pytest_runtest_teardown() -> None:
    shutil.rmtree(_FOLDER, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    write = terminalreporter.write_line
    if config.getoption("--list"):
        for name, (kind, text) in _outcomes.items():
            if kind == "fail":
                write(f"{name}: {' '.join(text.split())[:200]}")
    if config.getoption("--reasons"):
        reasons = collections.Counter(
            re.sub(r"/dev/shm\S*|0x\w+|\d+", "#", text)[:160]
            for kind, text in _outcomes.values()
            if kind == "refused"
        )
        for reason, count in reasons.most_common():
            write(f"{count:5d} {' '.join(reason.split())}")
    count = collections.Counter(kind for kind, _ in _outcomes.values())
    write(
        f"{len(_outcomes)} tests over parts of ours: {count['pass']} pass, {count['refused']} "
        f"refused, {count['fail']} fail"
    )

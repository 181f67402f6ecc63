"""What does a replay buffer in other processes cost, if every row is sent by RPC?

    torchrl-dist bench remote --json remote.jsonl --plot remote.png

The buffer has 1,000,000 rows of 45 B. Learners sample batches of 256 (alpha 0.6) and send new
priorities back. Each measurement runs in new processes with one torch thread each, all on this
machine but without the shortcut through its memory. Rounds go over all cases in turn, and the table
shows medians.

- ``ours``: one host, two batches drawn ahead, which is the default. ``ours-4`` and ``ours-8``: at
  least that many batches per call.
- ``torchrl-rpc``: TorchRL's RemoteTensorDictReplayBuffer. ``ray``: its RayReplayBuffer.
- ``shards``: ours over 1, 2, 4 and 8 hosts, with one learner that asks all of them for each batch.
  ``cost`` is the time of an empty call, and ``bound`` is ``t(1) + (shards - 1) * cost``. The line
  ``32 nodes`` extrapolates the measured times linearly.

``messages`` and ``KiB`` are calls and payload per batch, in both directions together.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from torchrl_dist import own_files
from torchrl_dist.bench.command import (
    above_zero,
    add_figures,
    check_folders,
    counts,
    describe,
    in_rounds,
    names,
    say,
    until_stopped,
)
from torchrl_dist.bench.processes import Host
from torchrl_dist.bench.replay_cells import Tally, Window
from torchrl_dist.bench.replay_peers import (
    ALPHA,
    BETA,
    SAMPLE_BATCH,
    Peer,
    Ray,
    RPCWorker,
    TorchRLBuffer,
    TorchRLRemote,
    versions,
)
from torchrl_dist.bench.workloads import make_rows
from torchrl_dist.recipes.parts.plots import save_figure
from torchrl_dist.ui import show_table

_CALL_S = 60.0
_FILL_BATCH = 4096
_WARM_CALLS = 50
_EMPTY_CALLS = 300
_NODES = 32


class Ours(TorchRLBuffer):
    """A buffer of ``shards`` hosts, each in its own process, without the shortcut through
    memory."""

    name = "ours"
    ahead: ClassVar[tuple[int, int]] = (2, 1)
    """``prefetch`` and ``batches_per_call``."""
    shards = 1

    def open(self, workers: int) -> None:
        from torchrl_dist.runtime import local_cluster

        self._end = contextlib.ExitStack()
        roles = {"learner": 1, "owner": self.shards, "worker": workers}
        self.session = self._end.enter_context(local_cluster(roles, timeout_s=_CALL_S))
        self.join(self.session)
        for worker in self.session.of_role("worker"):
            view = type(self)(self.kind, self.capacity, self.folder)
            remote = self.session.remote(worker, _joined_view, view)
            self.workers.append(RPCWorker(remote))

    def join(self, session: Any) -> None:
        """Build this process's buffer."""
        from torchrl_dist.replay import replay_buffer

        prefetch, batches_per_call = self.ahead
        self.buffer = replay_buffer(
            session,
            capacity=self.capacity,
            batch_size=SAMPLE_BATCH,
            hosts=session.of_role("owner"),
            alpha=ALPHA,
            beta=BETA,
            prefetch=prefetch,
            batches_per_call=batches_per_call,
            shortcut=False,
            write_to="all",
            scratch_dir=self.folder,
        )

    def traffic(self) -> tuple[int, int]:
        """Return the messages and bytes since the buffer was built."""
        links = self.buffer.storage.client.links
        return (
            sum(link.messages for link in links),
            sum(link.bytes_sent + link.bytes_received for link in links),
        )

    def empty_call_s(self) -> float:
        """Return the median duration of a call that does nothing."""
        owner = self.session.of_role("owner")[0]
        durations = []
        for _ in range(_EMPTY_CALLS):
            begin = time.monotonic()
            self.session.call(owner, os.getpid)
            durations.append(time.monotonic() - begin)
        return statistics.median(durations)

    def close(self) -> None:
        self.buffer.close()
        self._end.close()


def _joined_view(view: Ours) -> Host:
    from torchrl_dist.runtime import current_session

    view.join(current_session())
    return Host(view)


class OursBy4(Ours):
    name = "ours-4"
    ahead = (8, 4)


class OursBy8(Ours):
    name = "ours-8"
    ahead = (16, 8)


PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (Ours, OursBy4, OursBy8, TorchRLRemote, Ray)
}


@dataclass(frozen=True)
class Case:
    """One measurement."""

    peer: str
    learners: int
    shards: int
    capacity: int
    seconds: float


@dataclass(frozen=True)
class Result:
    """``rate`` is batches/s of all learners. Milliseconds of one learner, and messages and bytes,
    are per batch. Figures that the peer does not count or that cannot be measured are None."""

    rate: float
    batch_ms: float
    messages: float | None
    bytes: float | None
    empty_call_ms: float | None


def measure(case: Case, folder: str) -> Result:
    """Measure one case, in a new process. Blocks for the filling and about ``seconds``."""
    import torch

    torch.set_num_threads(1)
    peer = PEERS[case.peer]("S", case.capacity, folder)
    if isinstance(peer, Ours):
        peer.shards = case.shards
    with contextlib.ExitStack() as stack:
        stack.callback(peer.close)
        peer.open(case.learners if case.learners > 1 else 0)
        rows = make_rows("S", min(_FILL_BATCH, case.capacity // (2 * case.shards)))
        for _ in range(-(-case.capacity // len(rows))):
            peer.extend(rows)
        learn(peer, Window(0.0, 0.0))
        empty_call_s = peer.empty_call_s() if isinstance(peer, Ours) else None
        window = Window.soon(case.seconds)
        if case.learners == 1:
            found = [learn(peer, window)]
        else:
            pending = [worker.submit(learn, window) for worker in peer.workers]
            found = [each.result(_CALL_S + case.seconds) for each in pending]
    steps = sum(each.steps for each in found)
    counted = all(each.messages is not None for each in found)
    return Result(
        rate=sum(each.tally.calls / each.tally.seconds for each in found),
        batch_ms=1e3 * statistics.mean(each.tally.seconds / each.tally.calls for each in found),
        messages=sum(each.messages for each in found) / steps if counted else None,
        bytes=sum(each.bytes for each in found) / steps if counted else None,
        empty_call_ms=None if empty_call_s is None else 1e3 * empty_call_s,
    )


@dataclass(frozen=True)
class Learned:
    """What a learner counted: ``tally`` in its window, and the rest over all ``steps`` since its
    start."""

    tally: Tally
    steps: int
    messages: Any
    bytes: Any


def learn(peer: Peer, window: Window) -> Learned:
    """Run a learner's loop, after a few calls that do not count."""
    import torch

    priorities = [torch.rand(SAMPLE_BATCH) for _ in range(16)]
    steps = 0

    def step() -> None:
        nonlocal steps
        batch = peer.sample()
        peer.update(batch, priorities[steps % 16])
        steps += 1

    if window.stop == 0:
        for _ in range(_WARM_CALLS):
            step()
        now = time.monotonic()
        window = Window(now, now)
    before: tuple[Any, Any] = peer.traffic() if isinstance(peer, Ours) else (None, None)
    steps = 0
    tally = window.count(step)
    after: tuple[Any, Any] = peer.traffic() if isinstance(peer, Ours) else (None, None)
    used = [None if a is None else b - a for a, b in zip(before, after, strict=True)]
    return Learned(tally, steps, *used)


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    describe(parser, __doc__, run)
    parser.add_argument(
        "--peers",
        type=names(list(PEERS)),
        default=list(PEERS),
        metavar="A,B",
        help=f"some of {','.join(PEERS)} (default: all)",
    )
    for option, default, text in (
        ("--learners", [1, 4], "concurrent learners, with one host (default: 1,4)"),
        ("--shards", [1, 2, 4, 8], "hosts, with one learner (default: 1,2,4,8)"),
    ):
        parser.add_argument(option, type=counts, default=default, metavar="N,M", help=text)
    parser.add_argument(
        "--capacity",
        type=above_zero(int),
        default=1_000_000,
        help="rows of the buffer (default: 1000000)",
    )
    add_figures(
        parser,
        rounds=3,
        seconds=2.0,
        timeout_s=120.0,
        timed="one measurement",
        line_per="case",
        plot="rates",
        scratch=True,
    )


def run(options: argparse.Namespace) -> int:
    """Measure, and print tables. Blocks for minutes. After Ctrl-C, prints what was found and ends.

    Returns:
        0; 1 if a measurement failed; 130 or 143 after SIGINT or SIGTERM.

    Raises:
        ConfigurationError: a file has no folder.
    """
    check_folders(options.json, options.plot)
    results: dict[Case, list[Result]] = {}
    status = until_stopped(lambda: _measure_all(options, results))
    medians = {case: _median(found) for case, found in results.items()}
    _print_rates(medians, options)
    if options.json is not None:
        _append_json(options.json, results, medians, versions(options.peers))
    if options.plot is not None:
        _plot(options.plot, medians)
    return status


def plan(options: argparse.Namespace) -> list[Case]:
    """Return what one round measures."""
    cases = []
    for peer in options.peers:
        reason = PEERS[peer].missing()
        if reason is not None:
            say(f"skipped {peer}: {reason}")
            continue
        for learners in options.learners:
            cases.append(Case(peer, learners, 1, options.capacity, options.seconds))
    if "ours" in options.peers:
        for shards in options.shards:
            cases.append(Case("ours", 1, shards, options.capacity, options.seconds))
    return list(dict.fromkeys(cases))


def _measure_all(options: argparse.Namespace, results: dict[Case, list[Result]]) -> int:
    def run_one(launcher: Any, case: Case, folder: Path) -> Result:
        return launcher.run(
            measure,
            case,
            str(folder),
            folder=folder,
            timeout_s=options.timeout_s,
            environment=PEERS[case.peer].environment,
        )

    def take(case: Case, result: Result) -> str:
        results.setdefault(case, []).append(result)
        return f"{result.rate:,.0f} batches/s"

    def label(case: Case) -> str:
        return f"{case.peer} x{case.learners}, {case.shards} shards"

    groups = [plan(options)]
    return in_rounds(options.rounds, groups, options.scratch_dir, run_one, label, take)


def _median(results: list[Result]) -> Result:
    columns = zip(*(asdict(result).values() for result in results), strict=True)
    medians: list[Any] = [None if None in each else statistics.median(each) for each in columns]
    return Result(*medians)


def shard_bound_ms(one: Result, shards: int) -> float:
    """Return ``t(1) + (shards - 1) * cost`` of one message, in milliseconds per batch."""
    assert one.empty_call_ms is not None
    return one.batch_ms + (shards - 1) * one.empty_call_ms


def extrapolated_ms(times_ms: dict[int, float], nodes: int) -> float:
    """Return the milliseconds per batch at ``nodes`` shards, by a fit of ``a + b * shards``."""
    import numpy as np

    slope, start = np.polyfit(list(times_ms), list(times_ms.values()), 1)
    return float(start + slope * nodes)


def _print_rates(medians: dict[Case, Result], options: argparse.Namespace) -> None:
    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    def sent(result: Result) -> list[str]:
        kib = None if result.bytes is None else result.bytes / 1024
        return [number(result.messages), number(kib, 1)]

    rows = []
    for case, result in medians.items():
        if case.shards != 1:
            continue
        base = medians.get(Case("torchrl-rpc", case.learners, 1, case.capacity, case.seconds))
        rows.append(
            [
                case.peer,
                str(case.learners),
                number(result.rate, 0),
                number(None if base is None else result.rate / base.rate),
                *sent(result),
            ]
        )
    columns = ["peer", "learners", "batches/s", "of torchrl-rpc", "messages", "KiB"]
    show_table("sample + update of 256 rows by RPC, one host", columns, rows, left=("peer",))
    times = {
        case.shards: result
        for case, result in sorted(medians.items(), key=lambda item: item[0].shards)
        if case.peer == "ours" and case.learners == 1
    }
    if 1 in times and len(times) > 1:
        bounds = {shards: number(shard_bound_ms(times[1], shards)) for shards in times}
        rows = [
            [str(shards), number(result.batch_ms), bounds[shards], *sent(result)]
            for shards, result in times.items()
        ]
        beyond = extrapolated_ms({s: result.batch_ms for s, result in times.items()}, _NODES)
        rows.append([f"{_NODES} nodes", number(beyond), "", "", ""])
        columns = ["shards", "ms per batch", "bound ms", "messages", "KiB"]
        show_table("ours over several hosts, one learner", columns, rows)
        print(f"cost of an empty call: {times[1].empty_call_ms:.3f} ms")


def _append_json(
    path: Path,
    results: dict[Case, list[Result]],
    medians: dict[Case, Result],
    of_packages: dict[str, str],
) -> None:
    import json

    with own_files.open_named(path, append=True) as file:
        for case, result in medians.items():
            line = {"bench": "remote", **asdict(case), **asdict(result), "batch": SAMPLE_BATCH}
            line["rates"] = [each.rate for each in results[case]]
            line |= {"cpus": os.cpu_count(), "versions": of_packages}
            file.write(json.dumps(line) + "\n")


def _plot(path: Path, medians: dict[Case, Result]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    rates, shards = figure.subplots(1, 2)
    one = {case: result for case, result in medians.items() if case.shards == 1}
    labels = [f"{case.peer}, {case.learners}" for case in one]
    rates.barh(labels, [result.rate for result in one.values()])
    rates.invert_yaxis()
    rates.set_xlabel("batches/s of all learners")
    rates.set_title("one host; peer, learners", fontsize=9)
    times = sorted(
        (case.shards, result.batch_ms)
        for case, result in medians.items()
        if case.peer == "ours" and case.learners == 1
    )
    shards.plot([each[0] for each in times], [each[1] for each in times], "o-")
    shards.set_ylim(bottom=0)
    shards.set_xlabel("shards")
    shards.set_ylabel("ms per batch")
    shards.set_title("ours, one learner", fontsize=9)
    save_figure(figure, path)

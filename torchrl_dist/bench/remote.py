"""What does a replay buffer in other processes cost, if every row is sent by RPC?

    torchrl-dist bench remote --json remote.jsonl --plot remote.png

The buffer has 1,000,000 rows of 45 B. Learners sample batches of 256 (alpha 0.6) and send new
priorities back. Each measurement runs in new processes with one torch thread each. All processes
run on this machine, but access the rows only by RPC, not through shared memory. Each round measures
all cases in turn, and the table shows medians.

- ``ours``: one host, from which two batches are drawn ahead (the default). ``ours-4`` and
  ``ours-8`` get at least 4 and 8 batches per call.
- ``torchrl-rpc``: TorchRL's RemoteTensorDictReplayBuffer. ``ray``: its RayReplayBuffer.
- ``shards``: ours over 1, 2, 4 and 8 hosts, with one learner that asks all of them for each batch.
  ``bound`` is ``t(1) + (shards - 1) * cost``, where ``t(1)`` is the time of a batch with one host,
  and ``cost`` the time of an empty call. The line ``32 nodes`` extrapolates the measured times
  linearly.

``messages`` and ``KiB`` are calls and payload per batch, in both directions together.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from torchrl_dist.bench import command
from torchrl_dist.bench.processes import Host
from torchrl_dist.bench.replay_cells import Tally, Window, learner_step
from torchrl_dist.bench.replay_peers import (
    ALPHA,
    BETA,
    SAMPLE_BATCH,
    Peer,
    Ray,
    RPCWorker,
    TorchRLBuffer,
    TorchRLRemote,
)
from torchrl_dist.bench.results import append_json, medians
from torchrl_dist.bench.workloads import make_rows
from torchrl_dist.recipes.parts.plots import save_figure
from torchrl_dist.ui import show_table

_CALL_S = 60.0
_FILL_BATCH = 4096
_WARM_CALLS = 50
_EMPTY_CALLS = 300
_NODES = 32


class Ours(TorchRLBuffer):
    """A buffer of ``shards`` hosts, each in its own process. The rows are accessed only by RPC, not
    through shared memory."""

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


_ALL: tuple[type[Peer], ...] = (Ours, OursBy4, OursBy8, TorchRLRemote, Ray)
PEERS = {peer.name: peer for peer in _ALL}


@dataclass(frozen=True)
class Case:
    """One measurement."""

    peer: str
    learners: int
    shards: int
    capacity: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.peer} x{self.learners}, {self.shards} shards"


@dataclass(frozen=True)
class Result:
    """``rate`` is batches/s of all learners. ``batch_ms`` is one learner's time per batch. Messages
    and bytes are per batch, too. Figures that the peer does not count or that cannot be measured
    are None."""

    rate: float
    batch_ms: float
    messages: float | None
    bytes: float | None
    empty_call_ms: float | None


def measure(case: Case, folder: str) -> Result:
    """Measure one case in this process. Blocks while it fills the buffer, and then for about
    ``seconds``.
    """
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
        step = learner_step(peer, update=True)
        for _ in range(_WARM_CALLS):
            step()
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
    """The counts of one learner. ``tally`` covers only the learner's measurement window. The other
    figures cover all ``steps`` since its start.
    """

    tally: Tally
    steps: int
    messages: Any
    bytes: Any


def learn(peer: Peer, window: Window) -> Learned:
    """Run a learner's loop."""
    step, steps = learner_step(peer, update=True), itertools.count()

    def counted() -> None:
        step()
        next(steps)

    if not isinstance(peer, Ours):
        return Learned(window.count(counted), next(steps), None, None)
    messages, size = peer.traffic()
    tally = window.count(counted)
    messages_then, size_then = peer.traffic()
    return Learned(tally, next(steps), messages_then - messages, size_then - size)


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    command.describe(parser, __doc__, run)
    command.add_names(parser, "--peers", PEERS)
    command.add_counts(parser, "--learners", "1,4", "concurrent learners, with one host")
    command.add_counts(parser, "--shards", "1,2,4,8", "hosts, with one learner")
    command.add_number(parser, "--capacity", int, 1_000_000, "rows of the buffer")
    command.add_figures(
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
    """Measure, and print tables. Blocks for minutes. After Ctrl-C, prints the results so far.

    Returns:
        0; 1 if a measurement failed; 130 or 143 after SIGINT or SIGTERM.

    Raises:
        ConfigurationError: a file has no folder, or no peer can be measured.
    """
    command.check_folders(options.json, options.plot)
    found: dict[Case, list[Result]] = {}
    status = command.in_rounds(
        options.rounds, [plan(options)], options.scratch_dir, measure, found,
        lambda case, result: f"{result.rate:,.0f} batches/s",
        timeout_s=lambda case: options.timeout_s,
        environment=lambda case: PEERS[case.peer].environment,
    )  # fmt: skip
    lines = [
        {
            **asdict(case),
            **medians([asdict(result) for result in results]),
            "batch": SAMPLE_BATCH,
            "rates": [result.rate for result in results],
        }
        for case, results in found.items()
    ]
    one_host = [line for line in lines if line["shards"] == 1]
    ours = [line for line in lines if line["peer"] == "ours" and line["learners"] == 1]
    ours.sort(key=lambda line: line["shards"])
    _print_rates(one_host)
    if len(ours) > 1 and ours[0]["shards"] == 1:
        _print_shards(ours)
    append_json(options.json, "remote", lines, options.peers)
    if options.plot is not None:
        _plot(options.plot, one_host, ours)
    return status


def plan(options: argparse.Namespace) -> list[Case]:
    """Return what one round measures."""
    peers = command.available(options.peers, lambda name: PEERS[name].missing())
    layouts = [(peer, learners, 1) for peer in peers for learners in options.learners]
    layouts += [("ours", 1, shards) for shards in options.shards if "ours" in peers]
    return [Case(*each, options.capacity, options.seconds) for each in dict.fromkeys(layouts)]


def shard_bound_ms(one: Mapping[str, Any], shards: int) -> float:
    """Return ``t(1) + (shards - 1) * cost`` in milliseconds per batch, as defined at the top of
    this module."""
    return one["batch_ms"] + (shards - 1) * one["empty_call_ms"]


def extrapolated_ms(times_ms: dict[int, float], nodes: int) -> float:
    """Return the milliseconds per batch at ``nodes`` shards, by a fit of ``a + b * shards``."""
    import numpy as np

    slope, start = np.polyfit(list(times_ms), list(times_ms.values()), 1)
    return float(start + slope * nodes)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _sent(line: Mapping[str, Any]) -> list[str]:
    kib = None if line["bytes"] is None else line["bytes"] / 1024
    return [_number(line["messages"]), _number(kib, 1)]


def _print_rates(lines: list[dict[str, Any]]) -> None:
    base = {line["learners"]: line["rate"] for line in lines if line["peer"] == "torchrl-rpc"}
    rows = []
    for line in lines:
        peer, learners, rate = line["peer"], line["learners"], line["rate"]
        ratio = rate / base[learners] if learners in base else None
        rows.append([peer, str(learners), _number(rate, 0), _number(ratio), *_sent(line)])
    columns = ["peer", "learners", "batches/s", "of torchrl-rpc", "messages", "KiB"]
    show_table("sample + update of 256 rows by RPC, one host", columns, rows, left=("peer",))


def _print_shards(lines: list[dict[str, Any]]) -> None:
    times = {line["shards"]: line["batch_ms"] for line in lines}
    rows = [
        [str(n), _number(times[n]), _number(shard_bound_ms(lines[0], n)), *_sent(line)]
        for n, line in zip(times, lines, strict=True)
    ]
    rows.append([f"{_NODES} nodes", _number(extrapolated_ms(times, _NODES)), "", "", ""])
    columns = ["shards", "ms per batch", "bound ms", "messages", "KiB"]
    show_table("ours over several hosts, one learner", columns, rows)
    print(f"cost of an empty call: {lines[0]['empty_call_ms']:.3f} ms")


def _plot(path: Path, one_host: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    rates, shards = figure.subplots(1, 2)
    labels = [f"{line['peer']}, {line['learners']}" for line in one_host]
    rates.barh(labels, [line["rate"] for line in one_host])
    rates.invert_yaxis()
    rates.set_xlabel("batches/s of all learners")
    rates.set_title("one host; peer, learners", fontsize=9)
    shards.plot([line["shards"] for line in ours], [line["batch_ms"] for line in ours], "o-")
    shards.set_ylim(bottom=0)
    shards.set_xlabel("shards")
    shards.set_ylabel("ms per batch")
    shards.set_title("ours, one learner", fontsize=9)
    save_figure(figure, path)

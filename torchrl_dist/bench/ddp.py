"""When does it pay to learn on several ranks?

    torchrl-dist bench ddp --json ddp.jsonl --plot ddp.png

Measures one update of TorchRL's DQN on a batch of B rows of 64 floats, with a network of two hidden
layers of width W. All ranks are processes of this machine. The update is made in four ways:

- ``one process``: by one process with one thread.
- ``threads``: by one process with as many threads as there are ranks.
- ``ours``: by ranks with B / ranks rows each. ``DistributedLoss`` averages their gradients.
- ``torch ddp``: by ranks with B / ranks rows each, with torch's DistributedDataParallel.

The time of an update has four parts: ``forward`` (the loss), ``backward`` (including the copies of
gradients to and from the buffer that is sent), ``averaging`` (the collective, including the wait
for the slowest rank; ``torch ddp`` averages within ``backward``), and ``step`` (optimizer and
target network). The last column says whether several ranks pay off, and if not, why. ``saved`` is
the time that one process saves with B / ranks rows instead of B, which is the most that ranks can
gain.

With ``--device cuda`` each rank has a GPU of this machine, and NCCL averages the gradients. The
ranks then wait for their GPUs at the end of each part, so that the time is attributed to the right
part.

The start has three parts: ``import`` (of TorchRL, in as many concurrent processes as there are
ranks), ``join`` (of torch.distributed, until all ranks have joined), and ``wrap`` (comparing losses
and copying rank 0's parameters).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchrl_dist.bench import command
from torchrl_dist.bench.results import append_json, by, medians
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.recipes.parts.plots import save_figure
from torchrl_dist.ui import show_table

ALONE, THREADS, OURS, TORCH = "one process", "threads", "ours", "torch ddp"
PEERS = {"threads": THREADS, "ours": OURS, "torch": TORCH}
PARTS = ("forward", "backward", "averaging", "step")
_OBSERVATION, _ACTIONS = 64, 8
_WARM_UP, _UPDATES_AT_ONCE = 3, 5
# If several ranks shorten an update by less than this fraction, the batch is too small.
_LITTLE = 0.1


@dataclass(frozen=True)
class Cell:
    """One measurement: ``peer`` with ``ranks`` processes (or threads) and ``batch`` rows in all."""

    peer: str
    ranks: int
    batch: int
    width: int
    seconds: float
    timeout_s: float
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.peer} x{self.ranks}, batch {self.batch}, width {self.width}"


@dataclass(frozen=True)
class Result:
    """Rank 0's times in milliseconds: the median update, and the start (join and wrap)."""

    update_ms: float
    parts_ms: dict[str, float]
    join_ms: float = 0.0
    wrap_ms: float = 0.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    command.describe(parser, __doc__, run)
    command.add_counts(parser, "--ranks", "2,4", "processes that learn together")
    command.add_counts(parser, "--batches", "128,1024,8192", "rows of all ranks together")
    command.add_counts(parser, "--widths", "64,256,1024", "widths of the hidden layers")
    text = f"some of {','.join(PEERS)}, in addition to one process"
    command.add_names(parser, "--peers", PEERS, text)
    text = "cuda: one GPU per rank (default: cpu)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=text)
    text = "do not measure how long imports take"
    parser.add_argument("--no-imports", action="store_true", help=text)
    command.add_figures(
        parser, rounds=3, seconds=1.0, timeout_s=120.0, timed="one measurement", plot="speed-ups"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, and print tables. Blocks for minutes. After Ctrl-C, prints the results so far.

    Returns:
        0; 1 if a measurement failed; 130 or 143 after SIGINT or SIGTERM.

    Raises:
        ConfigurationError: a batch cannot be divided among the ranks, there are fewer GPUs than
            ranks, or a file has no folder.
    """
    for batch, ranks in itertools.product(options.batches, options.ranks):
        if batch % ranks or ranks < 2:
            raise ConfigurationError(
                f"--batches {batch} and --ranks {ranks}: expected at least 2 ranks, and batches "
                "that can be divided equally among the ranks"
            )
    _check_device(options)
    command.check_folders(options.json, options.plot)
    found: dict[Cell, list[Result]] = {}
    imports: dict[int, float] = {}

    def all_of_it() -> int:
        if not options.no_imports:
            imports.update((n, _import_seconds(n)) for n in sorted({1, *options.ranks}))
        # one cell per group, so that every round measures the cells in the order of the plan
        return command.in_rounds(
            options.rounds, [[cell] for cell in plan(options)], Path(tempfile.gettempdir()),
            measure, found, lambda cell, result: f"{result.update_ms:.2f} ms per update",
            environment=lambda cell: {"GLOO_SOCKET_IFNAME": "lo", "RL_WARNINGS": "False"},
        )  # fmt: skip

    status = command.until_stopped(all_of_it)
    lines = to_lines(found)
    _print(lines, imports)
    append_json(options.json, "ddp", lines, import_s=imports, seconds=options.seconds)
    if options.plot is not None:
        _plot(options.plot, lines)
    return status


def plan(options: argparse.Namespace) -> list[Cell]:
    """Return the cells of one round, in the order of measuring. Cells that will be compared with
    each other are adjacent."""
    peers = [PEERS[name] for name in options.peers]
    if options.device != "cpu":
        peers = [peer for peer in peers if peer != THREADS]
    cells = []
    for width, batch in itertools.product(options.widths, options.batches):
        compared = [(ALONE, 1, batch)]
        for ranks in options.ranks:
            compared += [(ALONE, 1, batch // ranks), *((peer, ranks, batch) for peer in peers)]
        for each in compared:
            cells.append(Cell(*each, width, options.seconds, options.timeout_s, options.device))
    return list(dict.fromkeys(cells))


def _check_device(options: argparse.Namespace) -> None:
    import torch

    gpus = torch.cuda.device_count()
    if options.device == "cpu":
        if gpus:
            command.say(f"{gpus} GPU(s) are available but not measured: use --device cuda")
        return
    if gpus < max(options.ranks):
        raise ConfigurationError(
            f"--device cuda and --ranks {max(options.ranks)}: found {gpus} GPU(s), expected one "
            "per rank; choose smaller --ranks"
        )
    if "threads" in options.peers:
        command.say("threads are not measured, because they do not compute on a GPU")


def _import_seconds(processes: int) -> float:
    """Return the time until ``processes`` concurrent new processes have imported what a rank
    needs."""
    from torchrl_dist.bench.processes import import_path

    program = [sys.executable, "-c", "import torchrl.objectives, torchrl_dist.learn"]
    environment = os.environ | import_path()
    start = time.monotonic()
    started = [subprocess.Popen(program, env=environment) for _ in range(processes)]
    try:
        for process in started:
            process.wait(120)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return time.monotonic() - start


# ---- in the measured processes


def measure(cell: Cell, folder: str) -> Result:
    """Measure ``cell`` with this process as rank 0, and with forks of it as the other ranks."""
    import torchrl.objectives  # noqa: F401 (once, before the forks)

    from torchrl_dist.bench.processes import on_ranks

    ranks = 1 if cell.peer in (ALONE, THREADS) else cell.ranks
    return on_ranks(ranks, cell.timeout_s, _learn, cell, folder)


def _learn(rank: int, cell: Cell, folder: str) -> Result:
    import torch
    import torch.distributed as dist

    from torchrl_dist.learn import Ranks

    torch.set_num_threads(cell.ranks if cell.peer == THREADS else 1)
    if cell.device == "cuda":
        torch.cuda.set_device(rank)  # all ranks are on this node
    if cell.peer == TORCH:
        # DistributedDataParallel needs this import, which takes seconds. Import after the fork,
        # because the module may start threads, and a lock that a thread holds during a fork would
        # stay held in the child.
        import torch._dynamo
    joined = time.monotonic()
    distributed = cell.peer in (OURS, TORCH)
    if distributed:
        dist.init_process_group(
            "gloo" if cell.device == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=cell.ranks,
            timeout=timedelta(seconds=cell.timeout_s),
        )
    try:  # a rank that fails leaves the group, so that the others also fail instead of waiting
        ranks = Ranks(timeout_s=cell.timeout_s)
        wrapped = time.monotonic()
        update = _Update(cell, rank)
        for _ in range(_WARM_UP):
            update()
        update.times.clear()
        end = time.monotonic() + cell.seconds
        while not ranks.any(time.monotonic() > end and len(update.times) > 4):
            for _ in range(_UPDATES_AT_ONCE):
                update()
        times, wrap_s = update.times, update.wrap_s
        # Delete DistributedDataParallel first, because it refers to the process group. If its
        # reference were the last one, this thread would join the group's threads while holding the
        # GIL, for which one of those threads may be waiting (torch 2.13).
        del update
        gc.collect()
    finally:
        if distributed:
            dist.destroy_process_group()
    median = sorted(times, key=lambda t: sum(t.values()))[len(times) // 2]
    return Result(
        update_ms=1e3 * sum(median.values()),
        parts_ms={part: 1e3 * seconds for part, seconds in median.items()},
        join_ms=1e3 * (wrapped - joined) if distributed else 0.0,
        wrap_ms=1e3 * wrap_s,
    )


class _Update:
    """One timed DQN update of this rank on its part of a batch."""

    def __init__(self, cell: Cell, rank: int) -> None:
        import torch
        from torch import nn
        from torchrl.modules import MLP, QValueActor
        from torchrl.objectives import DQNLoss, SoftUpdate

        torch.manual_seed(rank)
        self._on_gpu = cell.device == "cuda"
        network = MLP(
            _OBSERVATION, _ACTIONS, depth=2, num_cells=cell.width, activation_class=nn.ReLU,
            device=cell.device,
        )  # fmt: skip
        actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
        loss = DQNLoss(actor, action_space="categorical", delay_value=True)
        loss.make_value_estimator(gamma=0.99)
        loss.to(cell.device)
        rows = cell.batch // (cell.ranks if cell.peer in (OURS, TORCH) else 1)
        self.times: list[dict[str, float]] = []
        self._batch = _rows(rows).to(cell.device)
        self._averaging_s = 0.0
        start = self._now()
        self._losses = self._wrap(cell.peer, loss)
        self.wrap_s = self._now() - start
        self._optimizer = torch.optim.Adam(loss.parameters(), lr=1e-4)
        self._target = SoftUpdate(loss, tau=0.01)

    def _wrap(self, peer: str, loss: Any) -> Any:
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        from torchrl_dist.learn import DistributedLoss

        if peer == TORCH:

            class Tensors(nn.Module):  # torch's DDP finds no tensors in the loss's TensorDict
                def __init__(self) -> None:
                    super().__init__()
                    self.loss = loss

                def forward(self, batch: Any) -> Any:
                    return self.loss(batch)["loss"]

            return DistributedDataParallel(Tensors(), broadcast_buffers=False)
        if peer == OURS:
            loss = DistributedLoss(loss)
            reduce = loss.ranks.all_reduce

            def timed(*args: Any, **kwargs: Any) -> None:
                start = self._now()
                reduce(*args, **kwargs)
                self._averaging_s = self._now() - start

            loss.ranks.all_reduce = timed
        return lambda batch: loss(batch)["loss"]

    def __call__(self) -> None:
        start = self._now()
        value = self._losses(self._batch)
        forward = self._now()
        self._optimizer.zero_grad()
        value.backward()
        backward = self._now()
        self._optimizer.step()
        self._target.step()
        end = self._now()
        self.times.append(
            {
                "forward": forward - start,
                "backward": backward - forward - self._averaging_s,
                "averaging": self._averaging_s,
                "step": end - backward,
            }
        )

    def _now(self) -> float:
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()


def _rows(count: int) -> Any:
    import torch
    from tensordict import TensorDict

    ended = torch.zeros(count, 1, dtype=torch.bool)
    seen, following = torch.randn(2, count, _OBSERVATION)
    after = {"observation": following, "reward": torch.randn(count, 1)}
    after |= {"terminated": ended, "done": ended.clone()}
    action = torch.randint(_ACTIONS, (count,))
    return TensorDict({"observation": seen, "action": action, "next": after}, [count])


# ---- results


def to_lines(found: Mapping[Cell, list[Result]]) -> list[dict[str, Any]]:
    """Return a JSON object per measured cell, with the speed-up over one process and the
    verdict."""
    update_ms = {c: statistics.median(each.update_ms for each in of) for c, of in found.items()}
    lines = []
    for cell, results in found.items():
        alone, part = (
            update_ms.get(dataclasses.replace(cell, peer=ALONE, ranks=1, batch=batch))
            for batch in (cell.batch, cell.batch // cell.ranks)
        )
        line = {
            **{name: getattr(cell, name) for name in ("peer", "device", "ranks", "batch", "width")},
            **medians([vars(result) for result in results], "update_ms", "join_ms", "wrap_ms"),
            "parts_ms": medians([result.parts_ms for result in results]),
            "rounds": len(results),
            "speed_up": alone / update_ms[cell] if alone else None,
            "part_alone_ms": part,
            "saved_ms": alone - part if alone and part and cell.ranks > 1 else None,
        }
        lines.append({**line, "verdict": verdict(line, os.cpu_count() or 1)})
    return lines


def verdict(line: dict[str, Any], cpus: int) -> str:
    """Return whether several ranks pay off in this line, and if not, the main reason."""
    if line["peer"] not in (OURS, TORCH) or line["speed_up"] is None or line["saved_ms"] is None:
        return ""
    if line["speed_up"] > 1.05:
        return "pays"
    alone, saved = line["update_ms"] * line["speed_up"], line["saved_ms"]
    if saved < _LITTLE * alone:
        return f"too small: only {max(0.0, saved):.2f} of {alone:.2f} ms depend on the batch"
    averaging = line["parts_ms"]["averaging"]
    computing, part = line["update_ms"] - averaging, line["part_alone_ms"]
    if line["peer"] == OURS and computing - part > max(averaging, saved / 2):
        return f"work of {part:.2f} ms takes {computing:.2f} ms while other ranks compute"
    if averaging > saved:
        return f"averaging ({averaging:.2f} ms) costs more than the {saved:.2f} ms that ranks save"
    if line["device"] == "cpu" and line["ranks"] > cpus:
        return f"{line['ranks']} ranks share {cpus} cores"
    return f"ranks add more time than the {saved:.2f} ms that they save"


def _print(lines: list[dict[str, Any]], imports: dict[int, float]) -> None:
    from rich.console import Console

    left = ("width", "batch", "peer", "ranks")
    rows = [
        [
            *(str(line[name]) for name in left),
            f"{line['update_ms']:.2f}",
            *(f"{line['parts_ms'][part]:.2f}" for part in PARTS),
            *("" if line[x] is None else f"{line[x]:.2f}" for x in ("speed_up", "saved_ms")),
            line["verdict"],
        ]
        for line in lines
    ]
    columns = (*left, "update", *PARTS, "speed-up", "saved", "verdict")
    show_table("one update, ms", columns, rows, left=(*left, "verdict"), width=150)
    console = Console(width=150)
    ours = [line for line in lines if line["peer"] == OURS]
    for _, of_ranks in sorted(by(ours, "ranks").items()):
        console.print(_summary(of_ranks))
    if imports:
        told = ", ".join(f"{s:.1f} s with {n} at once" for n, s in imports.items())
        console.print(f"import of TorchRL in new processes: {told}")
    if ours:
        join, wrap = medians(ours, "join_ms", "wrap_ms").values()
        console.print(f"join {join:.0f} ms, wrap {wrap:.0f} ms (medians of ours)")


def _summary(lines: list[dict[str, Any]]) -> str:
    """Return, for each width, the smallest batch for which several ranks pay off."""
    told = []
    for (width,), of_width in sorted(by(lines, "width").items()):
        pays = {line["batch"]: line["verdict"] == "pays" for line in of_width}
        paying = sorted(batch for batch, does in pays.items() if does)
        if not paying:
            point = "never here"
        elif all(does for batch, does in pays.items() if batch >= paying[0]):
            point = f"from batch {paying[0]} on"
        else:
            point = "at batch " + ", ".join(map(str, paying))
        told.append(f"width {width}: {point}")
    return f"{lines[0]['ranks']} ranks pay off with " + "; ".join(told)


def _plot(path: Path, lines: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    drawn = [line for line in lines if line["peer"] == OURS and line["speed_up"]]
    for (ranks, width), curve in sorted(by(drawn, "ranks", "width").items()):
        axis.plot(
            [x["batch"] for x in curve], [x["speed_up"] for x in curve],
            marker="o", label=f"{ranks} ranks, width {width}",
        )  # fmt: skip
    axis.axhline(1, color="gray", linewidth=1)
    axis.set(xscale="log", xlabel="rows per update", ylabel="speed-up over one process")
    where = "GPUs" if any(x["device"] == "cuda" for x in drawn) else f"{os.cpu_count()} cores"
    axis.set_title(f"DQN updates with DistributedLoss, {where}")
    if drawn:
        axis.legend(fontsize=8)
    save_figure(figure, path)

"""A rank that is killed or stopped is named, for each rank and each launcher.

There is one torchrun job. Its two ranks import everything once, and each forks one process per
case. The two processes of a case are ranks of their own job, whose store torchrun or rank 0 keeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
import traceback
from itertools import product
from pathlib import Path

import torch.distributed as dist

from tests.learn.losses import make_batch, make_loss
from tests.spawn import reserved_port, run_job, stop_self
from torchrl_dist import DistributedLoss, session

TIMEOUT_S = 6.0
CASES = list(product(("plain", "torchrun", "session"), ("SIGKILL", "SIGSTOP"), (0, 1)))


def in_a_rank(folder: str, ports: list[int]) -> None:
    rank = int(os.environ["RANK"])
    children = []
    for number, case in enumerate(CASES):
        child = os.fork()
        if not child:
            try:
                run_case(*case, number, ports[number], rank, Path(folder))
            except BaseException:
                print(case, traceback.format_exc(), flush=True)
            finally:
                os._exit(0)
        children.append((child, case))
    give_up = time.monotonic() + 60
    for child, (launcher, name, victim) in children:
        if name == "SIGSTOP" and victim == rank:
            told = Path(folder, f"{launcher} {name} {victim}.json")
            while not told.exists() and time.monotonic() < give_up:
                time.sleep(0.05)
            os.kill(child, signal.SIGKILL)
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > give_up:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.02)


def run_case(
    launcher: str, name: str, victim: int, number: int, port: int, rank: int, folder: Path
) -> None:
    if launcher != "torchrun":
        for variable in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
            del os.environ[variable]
        os.environ["MASTER_PORT"] = str(port)
    with contextlib.ExitStack() as stack:
        if launcher == "torchrun":
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.PrefixStore(str(number), dist.TCPStore(*address))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        elif launcher == "session":
            stack.enter_context(session({"learner": -1}, timeout_s=60, process_group="gloo"))
        else:
            dist.init_process_group("gloo")
        pid = [0, 0]
        try:
            with DistributedLoss(make_loss("dqn"), timeout_s=TIMEOUT_S) as loss:
                pid = [who.pid for who in loss.ranks.members]
                for update in range(4):
                    if update == 2 and rank == victim:
                        stop_self() if name == "SIGSTOP" else os.kill(os.getpid(), signal.SIGKILL)
                    loss(make_batch("dqn", 4))["loss"].backward()
        except Exception as error:
            told = [type(error).__name__, str(error), pid[victim]]
        else:
            told = ["nothing", "", 0]
        if rank != victim:
            path = folder / f"{launcher} {name} {victim}"
            path.write_text(json.dumps(told))
            path.rename(f"{path}.json")
            os._exit(0)


def test_a_killed_or_stopped_rank_is_named_under_each_launcher(tmp_path: Path) -> None:
    ports = [reserved_port() for _ in CASES]
    job = run_job(in_a_rank, {"folder": str(tmp_path), "ports": ports}, nproc=2, timeout_s=100)
    assert job.returncode == 0, str(job)
    for launcher, name, victim in CASES:
        case = f"{launcher} {name} {victim}"
        told = tmp_path / f"{case}.json"
        assert told.exists(), f"{case}: no rank told how it ended\n{job}"
        kind, text, pid = json.loads(told.read_text())
        expected = "PeerLostError" if name == "SIGKILL" else "DeadlineError"
        assert kind == expected, (case, kind, text)
        assert f"rank {victim} (pid {pid} on {socket.gethostname()})" in text, (case, text)
        assert ("died" if name == "SIGKILL" else "stopped") in text, (case, text)

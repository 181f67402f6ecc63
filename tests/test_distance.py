"""The cost of work over a long way: a round trip between two hosts (namespaces) takes 100 ms."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests import netns
from tests.learn.losses import make_batch, make_loss
from tests.netns import run_tasks, wait_until_all_are_up
from torchrl_dist import DistributedLoss, HostedReplayBuffer, replay_buffer, session

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(
        netns.missing(way_s=1e-3) is not None,
        reason=f"no far hosts here: {netns.missing(way_s=1e-3)}",
    ),
]
WAY_S = 0.05
BATCHES, STEPS = 30, 5


def least_s(function: Callable[[], object], count: int) -> float:
    """Return how long a call takes at least, because other work of the machine delays some."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def seconds_per_batch(buffer: HostedReplayBuffer) -> float:
    for _ in range(BATCHES):  # until it knows how far it is
        buffer.sample()
    began = time.perf_counter()
    for _ in range(BATCHES):
        batch = buffer.sample()
        batch["td_error"] = torch.ones(len(batch))
        buffer.update_tensordict_priority(batch)
    return (time.perf_counter() - began) / BATCHES


def take_steps() -> list[float]:
    """Return the seconds of an update, without and with the question whether to stop."""
    with DistributedLoss(make_loss("sac"), timeout_s=60) as loss:
        batch = make_batch("sac", 4)

        def step() -> None:
            losses = loss(batch)
            (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()

        def ask_and_step() -> None:
            assert not loss.ranks.any(False)
            step()

        return [least_s(step, STEPS), least_s(ask_and_step, STEPS)]


def far_apart(folder: str) -> None:
    wait_until_all_are_up(Path(folder))
    with session({"learner": 2}, timeout_s=60, process_group="gloo") as job:
        if not job.is_driver:
            job.serve()
            return
        far = job.peers[1]
        facts = {"call": least_s(lambda: job.call(far, abs, -1), 9)}
        for ahead in (4, None):
            with replay_buffer(
                job, f"ahead {ahead}", capacity=4096, batch_size=64, hosts=[far], prefetch=ahead
            ) as buffer:
                rows = torch.arange(2048)
                buffer.extend(TensorDict({"id": rows, "td_error": torch.ones(2048)}, [2048]))
                buffer.flush()
                facts[f"{ahead} ahead"] = seconds_per_batch(buffer)
                facts[f"of {ahead}"] = buffer.sampler.batches_ahead
        there = job.submit(far, take_steps, timeout_s=60)
        facts["step"], facts["ask and step"] = take_steps()
        there.result(60)
        Path(folder, "facts").write_text(json.dumps(facts))


def test_far_hosts_cost_neither_the_draw_its_rate_nor_an_update_more_than_two_round_trips(tmp_path):
    with netns.hosts(2, way_s=WAY_S) as network:
        job = run_tasks(network, far_apart, {"folder": str(tmp_path)}, tmp_path)
        assert job.wait(120) == [0, 0], str(job)
    assert netns.leftovers() == []
    facts = json.loads((tmp_path / "facts").read_text())
    assert facts["call"] > 2 * WAY_S, facts  # the way is as long as it should be
    # what the user has chosen stays; chosen by us, it hides the way
    assert facts["of 4"] == 4 and facts["of None"] > 16, facts
    assert facts["None ahead"] < facts["4 ahead"] / 3, facts
    # two round trips, three with the question, and the computation
    assert facts["step"] < 3.5 * 2 * WAY_S, facts
    assert facts["ask and step"] < 4.5 * 2 * WAY_S, facts

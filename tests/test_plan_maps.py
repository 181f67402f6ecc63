"""When deadlines pay, and how far a job grows: simulations compared with formulas."""

from __future__ import annotations

import heapq
import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.test_planner import COSTS
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.plan import growth, regimes
from torchrl_dist.plan.regimes import best_deadline, simulate
from torchrl_dist.planner import Costs, Layout, slowest


@pytest.mark.parametrize(("workers", "spread"), [(2, 0.03), (16, 0.3), (16, 1.0)])
def test_waiting_for_all_takes_as_long_as_the_slowest(workers: int, spread: float) -> None:
    found = simulate(workers, spread, batch_s=0.2, rows_s=0.3, replicas=200)
    assert found.workers == workers
    assert found.rate == pytest.approx(workers / (slowest(workers, spread) + 0.5), rel=0.03)


def test_a_deadline_that_no_worker_meets_takes_the_first_and_loses_nothing() -> None:
    hurried = simulate(8, 1.0, deadline_s=0.0, rounds=400)
    assert hurried.workers < 2  # and work on them takes no time, so no worker waits:
    assert hurried.rate == pytest.approx(8, rel=0.1)


def test_where_all_are_ready_at_once_no_deadline_pays() -> None:
    for work in ({"batch_s": 0.01}, {"batch_s": 0.5}):
        assert best_deadline(8, 0.001, **work).gain < 1.02


def test_more_envs_narrow_a_rollout_and_take_the_deadlines_gain_away() -> None:
    """With more envs the gap grows in seconds, but shrinks in parts of a rollout."""
    one_step = math.sqrt(2.02)  # one step in ten takes ten times as long
    few, some, many = (best_deadline(8, one_step / math.sqrt(n), batch_s=0.01).gain
                       for n in (1, 20, 4000))  # fmt: skip
    assert few > 2 and 1.2 < some < 1.6 and many < 1.05


def test_a_learner_gains_more_if_its_work_grows_with_the_rows() -> None:
    by_row, by_batch = (best_deadline(8, 0.3, **work).gain
                        for work in ({"rows_s": 0.5}, {"batch_s": 0.5}))  # fmt: skip
    assert by_row > 1.3 * by_batch


def test_the_map_is_printed_and_drawn(tmp_path, capsys, monkeypatch) -> None:
    for name, values in (("WORKERS", (2, 8)), ("SPREADS", (0.01, 1.0)), ("DEADLINES", (0.1, 1.0))):
        monkeypatch.setattr(regimes, name, values)
    picture, lines = tmp_path / "map.png", tmp_path / "map.jsonl"
    assert regimes.main(["--plot", str(picture), "--json", str(lines)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(found) == 4 * len(regimes.NETWORKS) and "gain of the best" in capsys.readouterr().out
    calm = [line["gain"] for line in found if line["spread"] == 0.01 and "batch" in line["network"]]
    wild = [line["gain"] for line in found if line["spread"] == 1.0]
    assert max(calm) < 1.05 and min(wild) > 1.1


# ---- growth


def simulated(costs: Costs, layout: Layout, step_s: float) -> float:
    """Simulate message by message, with a core for each process, and return the frames/s."""
    per_process = layout.processes if layout.node_workers else 1
    frames = layout.steps * layout.envs * per_process
    size = frames * costs.frame_bytes
    rollout_s = layout.steps * layout.envs * (step_s + costs.step_s(1))
    rollout_s += (costs.message_worker_s + size * costs.byte_worker_s) / per_process
    rollout_s += costs.process_s if layout.node_workers else 0.0
    intake_s = costs.message_learner_s + size * costs.byte_learner_s
    sources = layout.messages
    return frames * intake_rate(sources, rollout_s, intake_s, lag=layout.lag)


def intake_rate(
    sources: int, rollout_s: float, intake_s: float, *, lag: int = 1, spread: float = 0.05,
    messages_each: int = 40, seed: int = 0,
) -> float:  # fmt: skip
    """Simulate ``sources`` that send to one learner, and return the messages/s that it takes in.

    A source makes a message in ``rollout_s`` on average (lognormal, with relative spread
    ``spread``), and may be up to ``lag`` messages ahead of the learner. The learner spends
    ``intake_s`` on each message, in the order of arrival.
    """
    rng = np.random.default_rng(seed)
    sigma = math.sqrt(math.log1p(spread**2))
    ready = [(rollout_s * rng.random(), source) for source in range(sources)]
    heapq.heapify(ready)
    waiting: dict[int, list[float]] = {source: [] for source in range(sources)}
    free_at, taken, warm_at, total = 0.0, 0, 0.0, messages_each * sources
    while taken < total:
        arrived, source = heapq.heappop(ready)
        free_at = max(free_at, arrived) + intake_s
        taken += 1
        if taken == total // 4:
            warm_at = free_at
        # The source begins its next message now, unless it is too far ahead of the learner.
        ends = waiting[source]
        ends.append(free_at)
        begins = max(arrived, ends[-1 - lag]) if len(ends) > lag else arrived
        del ends[: -1 - lag]
        duration = rollout_s * math.exp(rng.normal(-(sigma**2) / 2, sigma))
        heapq.heappush(ready, (begins + duration, source))
    return (total - total // 4) / (free_at - warm_at)


def test_a_simulated_intake_is_the_learners_or_the_sources() -> None:
    idle = intake_rate(4, 1.0, 0.01)
    assert idle == pytest.approx(4, rel=0.05)
    full = intake_rate(400, 1.0, 0.01)
    assert full == pytest.approx(100, rel=0.01)
    waits = intake_rate(1, 1.0, 0.5, lag=0)
    assert waits == pytest.approx(1 / 1.5, rel=0.05)


def test_32_nodes_of_48_cores_model_and_simulation_agree() -> None:
    lines = growth.growth(COSTS)
    assert len(lines) == len(growth.NODES) * len(growth.STEPS_S) * 2
    for line in lines:
        step_s = line["step_s"]
        layout = growth.layout_of(line["nodes"], step_s, line["workers"] == "node")
        made = simulated(COSTS, layout, step_s) * step_s / layout.stepping
        assert line["efficiency"] == pytest.approx(made, rel=0.06), line
        if line["nodes"] == 32 and line["workers"] == "node":
            assert line["efficiency"] > 0.9 and line["efficiency"] > line["ray_efficiency"]
        if line["nodes"] == 32 and line["workers"] == "ranks" and line["step_s"] <= 0.1:
            assert line["bound_by"] == "messages"  # 1,536 of them in half a second
    ranks, node = (growth.full_at(COSTS, 0.01, joined) for joined in (False, True))
    assert 8 < ranks < 12 and node > 20 * ranks


def test_growth_reads_what_plan_prints(tmp_path: Path, capsys) -> None:
    measured = {name: value for name, value in vars(COSTS).items() if name != "step_cpu_s"}
    measured["step_cpu_s"] = {str(envs): s for envs, s in COSTS.step_cpu_s}
    settings = {"updates_per_frame": 0.0, "assumed_bytes_per_s": 1.25e9}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"measured": measured, "settings": settings}))
    assert growth.costs_of(json.loads(path.read_text())) == COSTS
    assert growth.main([str(path)]) == 0
    assert "learner is saturated" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="torchrl-dist plan --json"):
        growth.costs_of({"measured": {}})

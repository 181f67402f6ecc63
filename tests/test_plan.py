"""``torchrl-dist plan``: its measurements, and its recommendations."""

from __future__ import annotations

import json
import os
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests import netns
from tests.test_planner import COSTS
from torchrl_dist.cli import main
from torchrl_dist.ops.slurm import recipe_of
from torchrl_dist.plan import command
from torchrl_dist.plan.measure import Measured, Subject, envs_of, measure, small_policy
from torchrl_dist.plan.measure import _measure_update as measure_update
from torchrl_dist.planner import Layout, predict, rank
from torchrl_dist.recipes.catalog import RECIPES
from torchrl_dist.runtime import ForkServer

SLEEP_S = 0.02


class Sleepy(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(SLEEP_S)
        return np.zeros(4, np.float32), 1.0, False, False, {}


def measured(**changes: Any) -> Measured:
    """As if ``COSTS`` had been measured, with repeats a tenth apart."""
    costs = replace(COSTS, **changes)
    given = {"step_cpu_s", "bytes_per_s", "updates_per_frame"}
    figures = {
        name: [0.9 * value, value, 1.1 * value]
        for name, value in vars(costs).items()
        if name not in given
    }
    figures |= {"step_s": [costs.step_s(1) + costs.idle_s], "reset_s": [1e-4]}
    return Measured({n: [0.9 * s, s, 1.1 * s] for n, s in costs.step_cpu_s}, {}, figures)


SUBJECT = Subject(lambda envs: lambda: None, False, None)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute an interval from a fifth of the draws, in a fifth of the time."""
    monkeypatch.setattr(command, "_DRAWS", 20)


@pytest.mark.timeout(180)
def test_the_command_measures_a_sleeping_env_and_prints_how_many_processes_pay(capsys) -> None:
    """Check only what sleeping makes certain, because a busy machine distorts other figures."""
    arguments = ["--env", "tests.test_plan:Sleepy", "--cores", "2", "--seconds", "0.3", "--json"]
    assert main(["plan", *arguments, "--updates-per-frame", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert SLEEP_S <= found["measured"]["step_s"] < 5 * SLEEP_S
    assert 0.4 * SLEEP_S <= found["measured"]["idle_s"] < 5 * SLEEP_S
    assert found["verdict"] == "do not distribute across nodes"
    assert found["processes_that_pay"] > 4  # twice the cores: they sleep
    best, *others = found["predicted"]
    assert len(others) == 2 and best["start"].startswith("local_cluster(")
    low, high = found["interval"]
    assert 0 < low <= best["frames_per_s"] * 1.2 and high >= best["frames_per_s"] * 0.8
    assert best["frames_per_s"] > 3 / SLEEP_S and best["efficiency"] > 0.2
    assert best["seconds_to_frames"] > 1e6 / best["frames_per_s"]
    assert {"message_worker_s", "message_learner_s", "byte_worker_s", "broadcast_s", "update_s",
            "process_s", "request_s", "reset_s", "startup_s"} <= set(found["measured"])  # fmt: skip


@pytest.mark.timeout(180)
def test_cartpole_is_not_distributed_across_nodes(fork_server: ForkServer, capsys) -> None:
    make_env, native = envs_of("CartPole-v1")
    policy = small_policy(make_env(1))
    subject = Subject(make_env, native, policy, updates_per_frame=1 / 32)
    found = measure(subject, seconds=0.3, fork_server=fork_server)
    assert set(found.step_cpu) == {1, 8, 64, 512}
    per_env = {envs: np.median(times) / envs for envs, times in found.step_cpu.items()}
    assert per_env[512] < 0.2 * per_env[1]  # vectorized
    plan = command.plan(found, subject, 2, 4, 1e6, "CartPole-v1")
    assert plan["verdict"] in ("do not distribute", "do not distribute across nodes")
    assert "4 nodes" in plan["reason"] or "2 nodes" in plan["reason"]
    assert "RPCBatchedCollector(make_env, policy, " in plan["predicted"][0]["start"]
    command.show(plan)
    shown = capsys.readouterr().out
    assert "do not distribute" in shown and "bound by" in shown


def test_intervals_hold_the_prediction_and_shrink_with_the_repeats() -> None:
    def width(found: Measured) -> float:
        best = command.plan(found, SUBJECT, 8, 1, 1e6, "a:b")["predicted"][0]
        low, high = best["interval"]
        assert low <= best["frames_per_s"] <= high
        return high / low

    wide = measured(idle_s=0.01)
    certain = Measured(
        {n: [t[1]] for n, t in wide.step_cpu.items()}, {},
        {name: [t[len(t) // 2]] for name, t in wide.figures.items()},
    )  # fmt: skip
    assert width(certain) == pytest.approx(1.0)
    assert 1.05 < width(wide) < 1.5


def test_a_slow_env_is_spread_over_nodes_unless_the_learner_is_full() -> None:
    slow = measured(step_cpu_s=((1, 0.01), (8, 0.08)))
    plan = command.plan(slow, SUBJECT, 8, 4, 1e6, "a:b")
    assert plan["verdict"] == "distribute" and plan["predicted"][0]["layout"]["nodes"] == 4
    assert plan["predicted"][0]["start"].startswith("torchrl-dist slurm --collector-nodes 4")
    assert plan["processes_that_pay"] in (7, 8)
    sac = replace(SUBJECT, updates_per_frame=1.0)
    bound = command.plan(measured(update_s=0.02), sac, 8, 4, 1e6, "a:b")
    assert bound["verdict"] == "do not distribute" and "learner" in bound["reason"]
    assert bound["processes_that_pay"] == 1
    assert bound["predicted"][0]["start"].startswith("RPCBatchedCollector(make_env, policy, num_")


@pytest.mark.parametrize(
    ("step_s", "idle_s", "nodes"),
    [(1e-4, 0.0, 1), (1e-4, 1e-2, 4), (1e-2, 0.0, 4), (1e-2, 1e-2, 1)],
)
def test_a_recommended_layout_has_no_more_processes_than_pay(step_s, idle_s, nodes) -> None:
    """Where two pay, on two cores, a layout with 32 was faster by a hair."""
    found = measured(step_cpu_s=((1, step_s), (8, 8 * step_s)), idle_s=idle_s)
    plan = command.plan(found, SUBJECT, 2, nodes, 1e6, "a:b")
    layout = plan["predicted"][0]["layout"]
    if layout["nodes"] == 1:
        assert max(1, layout["processes"]) == plan["processes_that_pay"], plan["predicted"][0]
    costs = found.costs(SUBJECT)
    ranked = rank(costs, command.candidates(costs, 2, nodes), 2)
    for other in plan["predicted"]:
        each = Layout(**other["layout"])
        assert each.stepping <= command.processes_that_pay(ranked, each.nodes > 1), each
    alike = [
        predict(costs, each, 2).frames_per_s
        for each in command.candidates(costs, 2, nodes)
        if (each.nodes, each.alone) == (layout["nodes"], layout["processes"] == 0)
    ]
    assert plan["predicted"][0]["frames_per_s"] >= 0.9 * max(alike)
    if not idle_s and layout["processes"]:
        assert layout["processes"] <= 4


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - {"r2d2"}))
def test_a_recipe_is_planned_with_its_options_and_started_by_its_command(recipe: str) -> None:
    config = RECIPES[recipe].config()
    learning = command.learning_of(recipe)
    assert (learning.env, learning.hidden) == (config.env, config.hidden)
    expected = {
        "apex": (config.frames_per_batch, 32, 256), "ddppo": (1024, 16, 128),
        "impala": (40, 1, 40), "sac": (32, 32, 128),
    }[recipe]  # fmt: skip
    updates = learning.updates_per_frame * config.frames_per_batch
    assert (config.frames_per_batch, updates, learning.batch_size) == expected
    subject = replace(SUBJECT, updates_per_frame=learning.updates_per_frame)
    plan = command.plan(measured(), subject, 8, 4, 1e6, learning.env, recipe)
    assert plan["settings"]["recipe"] == recipe
    for each in plan["predicted"]:
        words = shlex.split(each["start"])
        assert recipe_of(words[words.index("train") :])[0].recipe == recipe
    starts = [each["start"] for each in plan["predicted"]]
    assert len(set(starts)) == len(starts)


def test_an_update_is_measured_with_the_networks_of_the_recipe() -> None:
    rows = TensorDict({"observation": torch.zeros(1, 4)}, [1])
    rows["next"] = rows.clone()

    def update_s(**fields: Any) -> float:
        found = Measured()
        measure_update(replace(SUBJECT, **fields), rows, found, 0.2)
        return float(np.median(found.figures["update_s"]))

    assert update_s(hidden=(256, 256), networks=3) > 1.5 * update_s()


def test_a_busy_machine_is_named_before_its_figures(monkeypatch, capsys) -> None:
    monkeypatch.setattr("torchrl_dist.plan.measure.measure", lambda *_, **__: measured())
    monkeypatch.setattr("torchrl_dist.plan.measure.usable_cores", lambda: 4)
    for load, busy in ((3.5, True), (0.4, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert main(["plan", "--env", "CartPole-v1"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("a busy machine: the load average was 3.5 on 4 cores" in said) == busy
    assert main(["plan", "--recipe", "sac", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["env"] == "Pendulum-v1" and found["settings"]["networks"] == 3
    assert found["load"] == {"average": 0.4, "cores": 4, "busy": False}


def test_candidates_use_up_to_all_nodes_and_messages_of_up_to_half_a_second() -> None:
    layouts = command.candidates(replace(COSTS, idle_s=0.01), 4, 6)
    assert {each.nodes for each in layouts} == {1, 2, 4, 6}
    assert sum(each.alone for each in layouts) == 2
    assert {each.groups for each in layouts} == {0, 1, 2}
    for each in layouts:
        seconds = each.steps * each.envs * 0.01
        assert each.alone or seconds < 0.5 * max(1, each.processes / 16) + 1e-9 or each.steps == 1
    assert len(set(layouts)) == len(layouts)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--env NoSuchEnv-v0", "NoSuchEnv-v0"),
        ("--env no_such_package:make", "no_such_package"),
        ("--env tests.test_plan:nothing", "nothing"),
        ("--env CartPole-v1 --cores 0", "--cores"),
        ("--env CartPole-v1 --seconds 0", "--seconds"),
        ("--env CartPole-v1 --updates-per-frame -1", "--updates-per-frame"),
        ("--env tests.test_plan:make_eight", "expected a single env"),
        ("--recipe apex --env Pendulum-v1", "Pendulum-v1"),
        ("", "--env"),
    ],
)
def test_a_wrong_argument_gets_one_line_that_names_it(arguments: str, named: str, capsys) -> None:
    assert main(["plan", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and named in captured.err


def make_eight() -> gymnasium.vector.VectorEnv:
    return gymnasium.vector.SyncVectorEnv([Sleepy] * 8)


def test_commands_start_the_planned_layout() -> None:
    def start(**fields: Any) -> str:
        return command.start_of(Layout(**fields), "CartPole-v1")

    def train(recipe: str, **fields: Any) -> str:
        return command.start_of(Layout(**fields), "CartPole-v1", recipe)

    assert train("apex", envs=8).endswith("--envs-per-collector 8 --collectors 0")
    three = {"processes": 3, "envs": 8}
    assert train("apex", **three, lag=1).endswith("--envs-per-collector 8 --collectors 3")
    assert train("apex", **three).endswith("collector 8 --max-policy-lag 0 --collectors 3")
    many = train("apex", nodes=4, processes=2)  # 8, and the learner
    assert "slurm --nodes 4 --tasks-per-node 3 -- train apex" in many
    assert "--collectors" not in many
    assert "slurm --nodes 4 --tasks-per-node 2 -- " in train("ddppo", nodes=4, processes=2)
    groups = start(processes=2, groups=2, envs=4, node_workers=True, lag=1, wait_all=False)
    assert "inference='learner', env_groups=2" in groups and "num_envs=8" in groups
    assert "env_processes=2" in groups and '"collector": 1' in groups


# ---- two nodes

PROCESSES, STEPS = 3, 8


def collect_over_nodes(folder: str) -> None:
    from tests.netns import wait_until_all_are_up
    from tests.test_plan import PROCESSES, STEPS, Sleepy
    from torchrl_dist import FirstReady, RPCBatchedCollector, session

    wait_until_all_are_up(Path(folder))
    with session({"learner": 1, "collector": -1}, timeout_s=60) as me:
        if me.me.role != "learner":
            me.serve()
            return
        with RPCBatchedCollector(
            Sleepy, None, session=me, readiness=FirstReady(), max_policy_lag=1,
            env_processes=PROCESSES, frames_per_batch=PROCESSES * STEPS,
            categorical_action_encoding=True,
        ) as collector:  # fmt: skip
            for _ in range(6):
                collector.next()
            frames, begun = 0, time.perf_counter()
            while time.perf_counter() - begun < 3:
                frames += collector.next().numel()
            rate = frames / (time.perf_counter() - begun)
        Path(folder, "rate").write_text(json.dumps(rate))


@pytest.mark.timeout(200)
@pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))
def test_two_nodes_collect_as_predicted(tmp_path: Path) -> None:
    with netns.hosts(3) as network:  # the learner has a host of its own
        job = netns.run_tasks(network, collect_over_nodes, {"folder": str(tmp_path)}, tmp_path)
        assert job.wait(150) == [0, 0, 0], str(job)
    measured = json.loads((tmp_path / "rate").read_text())
    costs = replace(COSTS, idle_s=SLEEP_S, spread=0.0)
    one, two = (
        predict(costs, Layout(n, PROCESSES, 1, STEPS, True, 1, False), 2).frames_per_s
        for n in (1, 2)
    )
    print(f"predicted {two:.0f} frames/s, measured {measured:.0f}")
    assert two == pytest.approx(2 * one, rel=0.05)
    assert 0.3 < measured / two < 1.2  # on a busy machine, sleepers wake late

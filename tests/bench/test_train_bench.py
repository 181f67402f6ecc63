"""The benchmark of training, at toy size."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.data import RandomSampler

from tests.bench.conftest import measured, run_bench
from torchrl_dist.bench import train, train_peers, train_torchrl
from torchrl_dist.bench.train_plan import (
    OURS,
    REASONS,
    ZOO,
    Case,
    Point,
    Run,
    as_line,
    band,
    config_of,
    gains,
    rows,
    up_to,
)
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.recipes.parts.environments import look_at
from torchrl_dist.recipes.parts.networks import PolicySpec
from torchrl_dist.recipes.training.loop import Start
from torchrl_dist.runtime import session

ENVS = {"apex": "CartPole-v1", "ddppo": "CartPole-v1", "impala": "CartPole-v1"} | {
    "sac": "Pendulum-v1"
}


def case(peer: str = "torchrl", algorithm: str = "apex", **options: Any) -> Case:
    plain = Case(algorithm, ENVS[algorithm], peer, 100.0, None, 60.0, 1)
    return replace(plain, **options)


def of(*points: tuple[int, float, float], seed: int = 0, waits: float | None = None) -> Run:
    made = up_to((Point(*point) for point in points), 100.0)
    ended = "threshold" if made[-1].mean >= 100 else "frames"
    return Run(seed, made, ended, 1.0, 0.5, {}, waits)


# ---- arithmetic


def test_a_run_that_never_reaches_the_threshold_counts_as_infinitely_long() -> None:
    soon, late, never = of((10, 1.0, 100.0)), of((20, 4.0, 5.0), (40, 8.0, 120.0)), of((50, 9.0, 9))
    for runs, reached, frames, seconds in (
        ([soon, late, never], 2, 40, 8.0),
        ([soon, late], 2, 25, 4.5),
        ([soon, never, never], 1, math.inf, math.inf),
        ([soon, never], 1, math.inf, math.inf),
    ):
        (row,) = rows({case(): runs})
        assert (row.runs, row.reached, row.frames, row.seconds) == (
            len(runs), reached, frames, seconds
        )  # fmt: skip
    (row,) = rows({case(): [late]})
    assert row.frames_per_s == 5


def test_ratios_are_seconds_of_ours_by_those_of_each_peer() -> None:
    fast, slow, never = of((10, 2.0, 100.0)), of((10, 8.0, 100.0)), of((10, 1.0, 0.0))

    def ratios(ours: Run, **peers: Run) -> dict[str, float | None]:
        found = rows({case("ours-2"): [ours]} | {case(p): [run] for p, run in peers.items()})
        assert all(row.ratios == {} for row in found[1:])
        return found[0].ratios

    assert ratios(fast, torchrl=slow, sb3=never) == {"torchrl": 0.25, "sb3": 0.0}
    assert ratios(never, torchrl=slow, sb3=never) == {"torchrl": math.inf, "sb3": None}
    assert ratios(slow) == {"torchrl": None, "sb3": None}
    elsewhere = {case("ours-2"): [fast], case("sb3", "ddppo"): [slow]}
    assert rows(elsewhere)[0].ratios == {"torchrl": None, "sb3": None}


def test_gains_are_shown_for_layouts_that_reached_the_threshold() -> None:
    results = {
        case("ours-0"): [of((100, 8.0, 100.0))],
        case("ours-1"): [of((150, 6.0, 100.0))],
        case("ours-2"): [of((200, 4.0, 100.0))],
        case("ours-4"): [of((100, 1.0, 0.0))],
        case("ours-1", "sac"): [of((100, 1.0, 100.0))],
    }
    (gain,) = gains(rows(results))
    assert (gain.fewest.peer, gain.best.peer) == ("ours-0", "ours-2")
    assert (gain.speed_up, gain.frames, gain.pace) == (2.0, 2.0, 4.0)


def test_a_curve_keeps_its_last_value_after_its_end() -> None:
    curve = band([[(1, 0.0), (3, 10.0)], [(2, 1.0), (5, 4.0)]])
    assert curve is not None
    x, low, middle, high = (list(each) for each in curve)
    assert x == [2, 3, 5]
    assert (low, middle, high) == ([1, 2, 4], [3, 6, 7], [5, 10, 10])
    assert band([]) is None


@pytest.mark.parametrize("algorithm", REASONS)
def test_the_job_is_the_same_for_any_number_of_collectors(algorithm: str) -> None:
    jobs = {peer: config_of(case(peer, algorithm), 3) for peer in (*OURS, "torchrl")}
    assert jobs["torchrl"] == jobs["ours-1"]
    layout = ("collectors", "envs_per_collector", "learners")
    (rest,) = {
        tuple((k, v) for k, v in job.as_plain().items() if k not in layout) for job in jobs.values()
    }
    assert dict(rest)["seed"] == 3
    for peer, job in jobs.items():
        learns_and_collects = algorithm == "ddppo"
        processes = job.learners if learns_and_collects else job.collectors
        assert processes == max(OURS.get(peer, 1), learns_and_collects)
        if algorithm == "impala":  # a rollout of one collector is a batch
            assert job.envs_per_collector == jobs["torchrl"].envs_per_collector
        else:
            assert max(1, processes) * job.envs_per_collector == jobs["torchrl"].envs_per_collector


# ---- TorchRL's peer


class Uniform(RandomSampler):
    """Replaces TorchRL's prioritized sampler, which does not work with every torch."""

    def __init__(self, capacity: int, alpha: float, beta: float) -> None:
        super().__init__()
        self.max_size, self.alpha, self.beta = capacity, alpha, beta


@pytest.fixture
def both(tmp_path: Path, monkeypatch) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Build our learner and TorchRL's for an algorithm."""
    monkeypatch.setattr(train_torchrl, "PrioritizedSampler", Uniform)
    with session({"learner": 1}) as job:
        made: list[Any] = []

        def build(algorithm: str, **settings: Any) -> tuple[Any, Any]:
            config = replace(
                config_of(case("ours-0", algorithm), 0),
                output_dir=str(tmp_path / "run"),
                **settings,
            )
            task = look_at(config.env, continuous=config.continuous)
            policy = PolicySpec.of(task, config.policy_kind, config.hidden, config.network)
            recipe = importlib.import_module(f"torchrl_dist.recipes.{algorithm}.recipe")
            torch.manual_seed(0)
            made.append(recipe.build(config, task, policy, job, Start()))
            torch.manual_seed(0)
            made.append(train_torchrl.LEARNERS[algorithm](config, task, policy))
            return made[0], made[1]

        try:
            yield build
        finally:
            for learner in made[:1]:
                learner.close()
            for learner in made[1:]:
                learner.collector.shutdown()


def weights(learner: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in learner.network.state_dict().items()}


def assert_learn_alike(ours: Any, theirs: Any, data: Any, frames: tuple[int, ...]) -> None:
    """Check that the same data lead to the same weights."""
    begun = weights(ours)
    torch.testing.assert_close(weights(theirs), begun, rtol=0, atol=0)
    data["policy_version"] = torch.zeros(data.shape, dtype=torch.int64)
    for so_far in frames:
        for learner in (ours, theirs):
            torch.manual_seed(1)
            learner.learn(data.clone(), so_far)
    torch.testing.assert_close(weights(theirs), weights(ours), rtol=1e-4, atol=1e-5)
    changed = [not torch.allclose(begun[k], v, atol=1e-4) for k, v in weights(ours).items()]
    assert any(changed)


@pytest.mark.parametrize("entropy", [0.001, 0.0])
def test_torchrls_impala_learns_what_ours_does(both, entropy: float) -> None:
    ours, theirs = both("impala", frames_per_batch=320, entropy_coef=entropy)
    data = next(iter(theirs.collector))
    assert data.shape == (8, 40)
    assert_learn_alike(ours, theirs, data, (320,))  # only then does the current policy make them


def test_torchrls_ppo_learns_what_ours_does(both) -> None:
    ours, theirs = both("ddppo", epochs=2, minibatches=1, frames_per_batch=256)
    assert_learn_alike(ours, theirs, next(iter(theirs.collector)), (256, 512))


def test_torchrls_dqn_learns_what_ours_does(both) -> None:
    ours, theirs = both("apex", learning_starts=64, updates_per_batch=3)
    data = next(iter(theirs.collector))
    assert data.shape == (32, 16)
    assert data["steps_to_next_obs"].max() == ours.config.n_steps == 5
    epsilons = theirs.actor.epsilons
    assert len(epsilons) == 32 and epsilons[0] == pytest.approx(ours.config.epsilon)
    drawn = data.select(*train_torchrl.TRANSITION, "steps_to_next_obs").reshape(-1)[:64]
    drawn["td_error"] = torch.rand(64, 1)
    ours.buffer.extend(drawn)
    drawn["priority_weight"] = torch.rand(64)
    drawn["index"] = drawn["index_generation"] = torch.arange(64)
    priorities: dict[Any, list[torch.Tensor]] = {ours: [], theirs: []}
    ours._feed._draw = theirs.buffer.sample = drawn.clone
    for learner, told in priorities.items():
        learner.buffer.update_tensordict_priority = lambda rows, told=told: told.append(
            rows["td_error"]
        )
    assert_learn_alike(ours, theirs, data, (512, 1024))
    assert len(priorities[ours]) == 6
    torch.testing.assert_close(priorities[theirs], priorities[ours], rtol=1e-3, atol=1e-4)
    sampler, config = theirs.buffer.sampler, ours.config
    assert theirs.buffer.batch_size == config.batch_size
    assert (sampler.max_size, sampler.alpha) == (config.capacity, config.alpha)
    assert sampler.beta == ours.buffer.sampler.beta > config.beta_start


def test_torchrls_sac_learns_what_ours_does(both) -> None:
    ours, theirs = both("sac", frames_per_batch=16, learning_starts=8)
    for params in (theirs.loss.qvalue_network_params, theirs.loss.target_qvalue_network_params):
        for layer, name in itertools.product("024", ("weight", "bias")):
            each = [getattr(critic[int(layer)], name) for critic in ours.loss.critics]
            params["module", layer, name].data.copy_(torch.stack(each))
    ours.loss.target.load_state_dict(ours.loss.critics.state_dict())
    data = next(iter(theirs.collector))
    drawn = data.select(*train_torchrl.TRANSITION).reshape(-1)
    turns = iter([True] * 16 + [False])
    ours.buffer.can_sample = lambda: next(turns)
    for learner in (ours, theirs):
        learner.buffer.sample = drawn.clone
    assert_learn_alike(ours, theirs, data, (16,))
    assert next(turns, None) is None
    assert theirs.loss.target_entropy == ours.loss.target_entropy
    torch.testing.assert_close(theirs.loss.log_alpha, ours.loss.log_alpha)
    assert theirs.buffer.batch_size == ours.config.batch_size


# ---- runs


def test_a_run_of_torchrl_stops_at_the_threshold_or_with_its_frames(tmp_path: Path) -> None:
    short = case(algorithm="impala", frames=4800)
    run = train_peers.measure(replace(short, threshold=5.0), 0, str(tmp_path))
    (point,) = run.points
    assert run.ended == "threshold" and point.mean >= 5
    assert point.frames == 2000
    run = train_peers.measure(replace(short, threshold=1e9), 0, str(tmp_path))
    assert run.ended == "frames" and [p.frames for p in run.points] == [2000, 4000, 4800]
    assert 0 < run.points[0].seconds < run.points[1].seconds
    run = train_peers.measure(replace(short, threshold=1e9, limit_s=1e-3), 0, str(tmp_path))
    assert run.ended == "time" and [p.frames for p in run.points] == [40]
    assert run.settings["env"] == "CartPole-v1"


def pendulum_in_float64() -> gymnasium.Env:
    return gymnasium.wrappers.TransformObservation(
        gymnasium.make("Pendulum-v1"),
        lambda seen: seen.astype(np.float64),
        gymnasium.spaces.Box(-8.0, 8.0, (3,), np.float64),
    )


def test_torchrl_learns_from_observations_in_double_precision(both) -> None:
    """Like MuJoCo's."""
    env = f"{__name__}:pendulum_in_float64"
    _, theirs = both("sac", env=env, frames_per_batch=16, learning_starts=8)
    before = weights(theirs)
    theirs.learn(next(iter(theirs.collector)), 16)
    assert any(not torch.equal(before[name], new) for name, new in weights(theirs).items())


def test_a_run_of_stable_baselines3_stops_at_the_threshold(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(train_peers, "EPISODES", 2)
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    toy = case("sb3", "impala", env="Acrobot-v1", threshold=-1000.0)
    run = train_peers.measure(toy, 1, str(tmp_path))
    (point,) = run.points
    assert run.ended == "threshold" and point.mean >= -1000
    assert run.settings["algorithm"] == ZOO["impala", "Acrobot-v1"].algorithm
    assert not list(temporary.iterdir())


def test_the_zoos_schedules_fall_to_nothing() -> None:
    schedule = train_peers._schedule("lin_0.2")
    assert [schedule(left) for left in (1.0, 0.5, 0.0)] == [0.2, 0.1, 0.0]
    assert train_peers._schedule(0.3) == 0.3


# ---- the command


class InThisProcess:
    """A launcher that starts nothing."""

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        return function(*args)


@pytest.fixture
def in_this_process(monkeypatch) -> None:
    monkeypatch.setattr("torchrl_dist.bench.processes.Launcher", InThisProcess)


def test_ours_is_stopped_at_the_threshold(in_this_process, tmp_path: Path, capsys) -> None:
    options = ["--peers", "ours-0", "--threshold", "5", "--seeds", "1", "--frames", "1000000"]
    (line,) = measured(train, ["--algorithms", "impala", *options], tmp_path)
    assert line["peer"] == "ours-0" and line["reached"] and line["ended"] == "threshold"
    assert 2000 <= line["frames"] < 1_000_000 and line["seconds"] > 0
    assert line["points"][-1][:2] == [line["frames"], line["seconds"]]
    assert line["points"][-1][2] >= 5
    assert line["settings"]["collectors"] == 0 and line["settings"]["total_frames"] == 1_000_000
    assert 0 <= line["learner_waits"] <= 1
    assert "1 of 1" in capsys.readouterr().out


TOLD = ["--algorithms", "impala", "--threshold", "100"]


@pytest.mark.usefixtures("in_this_process")
class TestWithGivenRuns:
    """The command, with given results of the runs."""

    @pytest.fixture(autouse=True)
    def told(self, monkeypatch) -> None:
        self.asked: list[tuple[str, int]] = []
        self.stop_after = 99

        def measure(case: Case, seed: int, folder: str) -> Run:
            if len(self.asked) == self.stop_after:
                raise KeyboardInterrupt
            self.asked.append((case.peer, seed))
            reached = case.peer == "ours-2" and seed != 1
            return of((2000, 1.0, 20.0), (4000, 2.0 + seed, 500.0 if reached else 99.0), seed=seed)

        monkeypatch.setattr(train_peers, "measure", measure)

    def test_peers_take_turns_and_runs_below_the_threshold_are_shown(
        self, tmp_path: Path, capsys
    ) -> None:
        found = measured(train, [*TOLD, "--peers", "torchrl,ours-2"], tmp_path)
        first = [("torchrl", 0), ("ours-2", 0)]
        assert self.asked == [*first, ("ours-2", 1), ("torchrl", 1), ("torchrl", 2), ("ours-2", 2)]
        out, err = capsys.readouterr()
        ours, theirs = (
            next(x for x in out.splitlines() if f"│ {p}" in x) for p in ("ours-2", "torchrl")
        )
        assert "2 of 3" in ours and "4,000" in ours and "only ours" in ours
        assert "0 of 3" in theirs and theirs.count("never") == 2
        assert "round 2: impala CartPole-v1 ours-2: never reached 100: out of frames" in err
        assert [(x["peer"], x["seed"]) for x in found] == self.asked
        assert [x["reached"] for x in found] == [False, True, False, False, False, True]
        assert all(x["cpus"] and x["versions"]["torch"] for x in found)

    def test_ctrl_c_leaves_what_was_measured(self, tmp_path: Path, capsys) -> None:
        self.stop_after = 1
        assert len(measured(train, [*TOLD, "--peers", "ours-2,torchrl"], tmp_path, code=130)) == 1
        assert "ours-2" in capsys.readouterr().out

    def test_a_peer_that_is_not_installed_is_named(self, monkeypatch, capsys) -> None:
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda n: None if n == "stable_baselines3" else found(n)
        )
        assert run_bench(train, [*TOLD, "--peers", "ours-2,sb3", "--seeds", "1"]) == 0
        assert self.asked == [("ours-2", 0)]
        assert "left out: impala sb3: not installed: pip install" in capsys.readouterr().err
        with pytest.raises(ConfigurationError, match="none of the peers"):
            run_bench(train, [*TOLD, "--peers", "sb3"])


def test_the_algorithms_are_those_that_fit_the_environment(monkeypatch) -> None:
    asked: list[list[Case]] = []
    monkeypatch.setattr(train, "_measure_all", lambda options, groups, _: asked.extend(groups) or 0)
    assert run_bench(train, ["--env", "Pendulum-v1", "--peers", "ours-0,ours-1"]) == 0
    assert [c.algorithm for group in asked for c in group] == ["sac", "sac"]
    assert {c.threshold for group in asked for c in group} == {-200.0}
    asked.clear()
    assert run_bench(train, ["--peers", "ours-0,ours-1"]) == 0
    assert [[c.peer for c in group] for group in asked] == [
        ["ours-0", "ours-1"], ["ours-1"], ["ours-0", "ours-1"]
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="Discrete"):
        run_bench(train, ["--algorithms", "apex", "--env", "Pendulum-v1"])
    with pytest.raises(ConfigurationError, match="--threshold"):
        run_bench(train, ["--env", "gymnasium.envs.classic_control:CartPoleEnv"])


def test_a_line_says_what_became_of_a_run() -> None:
    line = as_line(case(), of((10, 1.0, 5.0), (20, 2.0, 100.0), (30, 3.0, 200.0)))
    assert line["points"] == [[10, 1.0, 5.0], [20, 2.0, 100.0]]  # it stops there
    assert (line["frames"], line["seconds"], line["reached"]) == (20, 2.0, True)
    line = as_line(case(), of((10, 1.0, 5.0)))
    assert (line["frames"], line["seconds"], line["reached"]) == (None, None, False)
    assert json.loads(json.dumps(line)) == line

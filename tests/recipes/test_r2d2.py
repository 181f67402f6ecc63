"""R2D2: the loss against a plain model, the stored states, and a whole job."""

from __future__ import annotations

import math
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor, nn
from torchrl.data import Sequence
from torchrl.envs import GymEnv, InitTracker, TransformedEnv
from torchrl.modules.tensordict_module.rnn import set_recurrent_mode

from torchrl_dist import RPCBatchedCollector, load_policy, local_cluster
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.recipes.parts.environments import look_at
from torchrl_dist.recipes.parts.evaluate import evaluate
from torchrl_dist.recipes.parts.networks import CELL, HIDDEN, PolicySpec, RecurrentQNetwork
from torchrl_dist.recipes.parts.play import play
from torchrl_dist.recipes.r2d2.actor import RecurrentEpsilonGreedy, rows_with_states
from torchrl_dist.recipes.r2d2.config import R2D2Config
from torchrl_dist.recipes.r2d2.loss import R2D2Loss, squeezed, stretched
from torchrl_dist.replay import SharedMemmapStorage, SharedReplayBuffer
from torchrl_dist.runtime import ForkServer

from .jobs import finished_here

HIDDEN_CART = "torchrl_dist.recipes.tasks:cartpole_without_velocities"
GAMMA = 0.97
SIZE = 5


def test_the_values_are_squeezed_and_stretched_as_in_the_paper() -> None:
    value = torch.linspace(-300, 300, 601, dtype=torch.float64)
    assert torch.allclose(stretched(squeezed(value)), value, atol=1e-6)
    assert float(squeezed(torch.tensor(99.0))) == pytest.approx(9 + 0.099)
    assert float(squeezed(torch.tensor(-8.0))) == pytest.approx(-2 - 0.008)


# ---- the loss


def windows(units: int, unit: Sequence, generator: np.random.Generator) -> TensorDict:
    """Random windows [units * size] as the buffer samples them, with valid rows in the middle."""
    size = unit.burn_in + unit.length + unit.bootstrap
    rows = TensorDict(
        {
            "observation": torch.randn(units, size, 3),
            "action": torch.randint(0, 4, (units, size)),
            HIDDEN: torch.randn(units, size, 1, SIZE) / 2,
            CELL: torch.randn(units, size, 1, SIZE) / 2,
            "priority_weight": torch.rand(units, 1).expand(units, size),
            "next": {
                "observation": torch.randn(units, size, 3),
                "reward": torch.randn(units, size, 1),
                "terminated": torch.zeros(units, size, 1, dtype=torch.bool),
            },
        },
        [units, size],
    )
    valid = torch.ones(units, size, dtype=torch.bool)
    for each in range(units):
        first = int(generator.integers(0, unit.burn_in + 1))
        end = int(generator.integers(unit.burn_in + 1, size + 1))
        valid[each, :first] = valid[each, end:] = False
        rows["next", "terminated"][each, end - 1] = bool(generator.integers(2))
        rows["next", "observation"][each, first : end - 1] = rows["observation"][
            each, first + 1 : end
        ]
    rows["validity_mask"] = valid
    return rows.reshape(-1)


def step_by_step(network: RecurrentQNetwork, rows: TensorDict) -> list[Tensor]:
    """The values of valid rows [T] of one window, by TorchRL's module, one step at a time."""
    state = {HIDDEN: rows[0][HIDDEN][None], CELL: rows[0][CELL][None]}
    values = []
    observations = [*rows["observation"], rows[-1]["next", "observation"]]
    for observation in observations:
        step = TensorDict({**state, "is_init": torch.zeros(1, 1, dtype=torch.bool)}, [1])
        step["features"] = network.features(observation[None])
        step = network.memory(step)
        values.append(network.head(step["features"])[0])
        state = {key: step["next", key] for key in (HIDDEN, CELL)}
    return values


@pytest.mark.parametrize(("burn_in", "length", "n_steps"), [(3, 4, 3), (0, 5, 1), (4, 1, 2)])
def test_the_loss_is_that_of_a_plain_model(burn_in: int, length: int, n_steps: int) -> None:
    """Values step by step through TorchRL's LSTMModule, targets in plain Python."""
    torch.manual_seed(burn_in)
    unit = Sequence(length, burn_in=burn_in, bootstrap=n_steps - 1)
    batch = windows(40, unit, np.random.default_rng(burn_in))
    online, target = (RecurrentQNetwork(3, 4, (6,), SIZE) for _ in range(2))
    loss = R2D2Loss(online, gamma=GAMMA, n_steps=n_steps, burn_in=burn_in, length=length)
    loss.target.load_state_dict(target.state_dict())
    given = batch.clone()
    found = loss(batch)["loss"]
    size = burn_in + length + n_steps - 1
    errors = batch["td_error"].reshape(-1, size)
    total = 0.0
    for each, window in enumerate(given.reshape(-1, size)):
        there = window["validity_mask"].nonzero().flatten()
        first, end = int(there[0]), int(there[-1]) + 1
        rows = window[first:end]
        with torch.no_grad():
            values, targets = step_by_step(online, rows), step_by_step(target, rows)
        for place in range(size):
            step = place - first  # in ``rows``
            if not burn_in <= place < min(burn_in + length, end):
                assert errors[each, place] == 0
                continue
            goal = 0.0
            last = min(step + n_steps, len(rows))
            for later in range(step, last):
                goal += GAMMA ** (later - step) * float(rows["next", "reward"][later])
            if not (last == len(rows) and rows["next", "terminated"][-1]):
                best = int(values[last].argmax())
                goal += GAMMA ** (last - step) * float(stretched(targets[last][best]))
            error = float(squeezed(torch.tensor(goal)) - values[step][rows["action"][step]])
            assert float(errors[each, place]) == pytest.approx(abs(error), rel=1e-3, abs=1e-4)
            total += float(window["priority_weight"][0]) * error**2 / 2
        if first < burn_in:
            state = {key: rows[0][key][None] for key in (HIDDEN, CELL)}
            features = online.features(rows["observation"][None, : burn_in - first])
            pair = tuple(state[key].transpose(0, 1) for key in (HIDDEN, CELL))
            _, pair = online.memory.lstm(features, pair)
            for key, value in zip((HIDDEN, CELL), pair, strict=True):
                new = batch.reshape(-1, size)[each, burn_in][key]
                torch.testing.assert_close(new, value[:, 0].detach())
    assert float(found.detach()) == pytest.approx(total / (40 * length), rel=1e-3)


def test_no_gradient_flows_through_the_burn_in_and_the_target() -> None:
    torch.manual_seed(0)
    unit = Sequence(3, burn_in=4, bootstrap=1)
    batch = windows(8, unit, np.random.default_rng(0))
    batch["validity_mask"][:] = True
    network = RecurrentQNetwork(3, 4, (6,), SIZE)
    loss = R2D2Loss(network, gamma=GAMMA, n_steps=2, burn_in=4, length=3)
    seen = batch["observation"].reshape(8, 8, 3).clone().requires_grad_()
    copy = batch.clone()
    copy["observation"] = seen.reshape(-1, 3)
    loss(copy)["loss"].backward()
    by_row = seen.grad.abs().sum((0, 2))
    assert (by_row[:4] == 0).all() and (by_row[4:7] > 0).all() and (by_row[7:] == 0).all()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())
    assert all(p.grad is None for p in loss.target.parameters())


# ---- states


def test_collected_states_are_those_of_the_episode_from_its_beginning(tmp_path: Path) -> None:
    """Over rollouts and ends of episodes, in the rows of a buffer's windows."""
    torch.manual_seed(0)
    network = RecurrentQNetwork(2, 2, (6,), SIZE)
    unit = Sequence(6, burn_in=2, bootstrap=1, episode_boundary="stop")
    storage = SharedMemmapStorage(4_000, scratch_dir=tmp_path / "rows")
    with local_cluster({"learner": 1}) as session:
        buffer = SharedReplayBuffer(storage=storage, sample_unit=unit, batch_size=64)
        collector = RPCBatchedCollector(
            _hidden_cart,
            RecurrentEpsilonGreedy(network, torch.full((3,), 0.3)),
            session=session,
            workers=(session.me,),
            frames_per_batch=51,
            total_frames=1020,
            num_envs=3,
            replay_buffer=buffer,
            postproc=rows_with_states,
            seed=0,
            categorical_action_encoding=True,
        )
        for _ in collector:
            pass
        rows = storage[: len(storage)]
        batch = buffer.sample()
        collector.shutdown()
    trajectories = rows["collector", "traj_ids"].flatten()
    ended = 0
    for trajectory in trajectories.unique():
        steps = rows[trajectories == trajectory]
        assert (steps[0][HIDDEN] == 0).all() and (steps[0][CELL] == 0).all()
        seen, state = steps["observation"][None], None
        for step in range(len(steps) - 1):
            _, state = network(seen[:, step : step + 1], state)
            for key, value in zip((HIDDEN, CELL), state, strict=True):
                torch.testing.assert_close(steps[step + 1][key], value[0].detach())
        ended += bool(steps[-1]["next", "done"])
    assert ended > 10
    # and TorchRL's module returns the same over a whole window, from the state that is stored
    batch = batch.reshape(64, -1)
    whole = batch[batch["validity_mask"].all(1)]
    assert len(whole) > 10
    data = whole.select(HIDDEN, CELL).set("features", network.features(whole["observation"]))
    data["is_init"] = torch.zeros(*data.shape, 1, dtype=torch.bool)
    with set_recurrent_mode(True), torch.no_grad():
        theirs = network.head(network.memory(data)["features"])
        state = tuple(whole[key][:, 0].transpose(0, 1).contiguous() for key in (HIDDEN, CELL))
        torch.testing.assert_close(network(whole["observation"], state)[0], theirs)


def _hidden_cart() -> gymnasium.Env:
    from torchrl_dist.recipes.tasks import cartpole_without_velocities

    return cartpole_without_velocities()


# ---- a job, and its policy


def test_a_job_learns_resumes_and_its_policy_remembers(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    run = ["train", "r2d2", "--output-dir", "run"]
    small = ["--env", HIDDEN_CART, "--hidden", "8", "--lstm", "8", "--batch-size", "8"]
    small += ["--frames-per-batch", "64", "--learning-starts", "128", "--eval-episodes", "2"]
    small += ["--envs-per-collector", "2", "--refresh-states", "--updates-per-batch", "2"]
    result = finished_here([*run, *small, "--total-frames", "1280"], tmp_path, fork_server)
    assert result["frames"] == 1280
    assert 20 <= result["updates"] <= 40
    more = finished_here([*run, "--resume", "--total-frames", "1920"], tmp_path, fork_server)
    assert more["frames"] == 1920 and more["updates"] > result["updates"]

    policy = load_policy(tmp_path / "run")
    network = policy.module.network
    returns = play(tmp_path / "run", episodes=3, seed=5)["returns"]
    assert returns == evaluate(network.player(), HIDDEN_CART, episodes=3, seed=5)
    observations = np.random.default_rng(0).normal(size=(6, 2, 2)).astype(np.float32)
    values, _ = network(torch.from_numpy(observations.swapaxes(0, 1).copy()))
    expected = values.argmax(-1).T.numpy()
    for _ in range(2):
        policy.reset()
        assert np.array_equal([policy.predict(x) for x in observations], expected)
    with pytest.raises(ConfigurationError, match="call reset"):
        policy.predict(observations[0, 0])
    policy.reset()
    assert [policy.predict(x[0]).item() for x in observations] == expected[:, 0].tolist()
    with pytest.raises(ConfigurationError, match="explore=False"):
        policy.predict(observations[0, 0], explore=True)


def test_a_recurrent_policy_works_in_torchrls_environments() -> None:
    """The keys are those of TorchRL's LSTMModule, whose primer keeps the states."""
    from torchrl_dist.recipes.parts.trained import TrainedPolicy

    spec = PolicySpec.of(
        look_at("CartPole-v1", continuous="none"), "recurrent_values", (8,), None, 4
    )
    again = PolicySpec.from_plain(spec.as_plain())
    assert again == spec and again.state_size == 4
    policy = TrainedPolicy(spec, spec.network())
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), InitTracker())
    env.append_transform(policy.module.network.memory.make_tensordict_primer())
    env.set_seed(0)
    data = env.rollout(8, policy)
    assert np.array_equal(
        [policy.predict(x).item() for x in data["observation"]], data["action"].tolist()
    )
    with (
        set_interaction_type(InteractionType.RANDOM),
        pytest.raises(ConfigurationError, match="no distribution"),
    ):
        policy(data[0])


def test_each_environment_explores_at_its_own_rate() -> None:
    torch.manual_seed(0)
    network = RecurrentQNetwork(2, 2, (4,), SIZE)
    nn.init.zeros_(network.head.weight)
    network.head.bias.data = torch.tensor([1.0, 0.0])
    actor = RecurrentEpsilonGreedy(network, torch.tensor([0.0, 0.5]))
    step = TensorDict(
        {
            "observation": torch.randn(2, 2),
            HIDDEN: torch.zeros(2, 1, SIZE),
            CELL: torch.zeros(2, 1, SIZE),
            "is_init": torch.ones(2, 1, dtype=torch.bool),
        },
        [2],
    )
    with set_interaction_type(InteractionType.RANDOM):
        drawn = torch.stack([actor(step.clone())["action"] for _ in range(2000)]).float().mean(0)
    assert drawn[0] == 0
    assert float(drawn[1]) == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / 2000))


def test_options_of_sequences_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="--sequence: got 0"):
        R2D2Config(sequence=0)
    with pytest.raises(ConfigurationError, match="--eta"):
        R2D2Config(eta=1.5)

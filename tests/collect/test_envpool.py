"""Real EnvPools, where EnvPool is installed (it needs Python 3.11 and 700 MB)."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from torchrl_dist.collect import RPCBatchedCollector
from torchrl_dist.collect.loop.rollout import make_rollout
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.runtime import local_cluster

envpool = pytest.importorskip("envpool")
_ENVS, _LONGEST = 6, 30


def pool(seed: int | None = None, **options: Any) -> Any:
    seed = int(np.random.randint(2**31)) if seed is None else seed
    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=_ENVS, seed=seed,
                        max_episode_steps=_LONGEST, **options)  # fmt: skip


def test_its_transitions_are_those_of_gymnasium() -> None:
    rollout = make_rollout(
        functools.partial(pool, 3), None, frames=80 * _ENVS, categorical_action_encoding=True
    )
    rollout.seed(range(_ENVS))
    rows = rollout.run(80)
    rollout.close()
    assert rows.shape == (_ENVS, 80)
    done = rows["next", "done"].squeeze(-1)
    goes_on = (rows["observation"][:, 1:] == rows["next", "observation"][:, :-1]).all(-1)
    assert torch.equal(goes_on, ~done[:, :-1]) and done.sum() > _ENVS
    assert (rows["next", "truncated"] & ~rows["next", "terminated"]).any()
    env: Any = gymnasium.make("CartPole-v1").unwrapped
    for row in rows.reshape(-1):
        env.reset()
        env.state = row["observation"].double().numpy()
        observation, reward, terminated, _, _ = env.step(row["action"].item())
        np.testing.assert_allclose(row["next", "observation"].numpy(), observation, atol=1e-5)
        assert row["next", "reward"].item() == reward
        assert row["next", "terminated"].item() == terminated


@pytest.mark.parametrize("processes", [0, 2])
def test_seeds_differ_per_worker_and_follow_from_the_collectors(processes, fork_server) -> None:
    workers = 1 if processes else 2
    frames = 2 * _ENVS * 10

    def first_batch(session: Any, seed: int) -> Any:
        with RPCBatchedCollector(
            pool, None, session=session, frames_per_batch=frames, seed=seed,
            env_processes=processes, timeout_s=60,
        ) as collector:  # fmt: skip
            return collector.next()["observation"].reshape(-1, 10, 4)

    with local_cluster({"learner": 1, "collector": workers}, fork_server=fork_server) as session:
        batch, again, other = (first_batch(session, seed) for seed in (5, 5, 6))
    assert torch.equal(batch, again) and not torch.equal(batch, other)
    assert len(batch[:, 0].unique(dim=0)) == 2 * _ENVS


def test_pools_that_cannot_be_seeded_or_stepped_cause_a_warning_or_an_error() -> None:
    rollout = make_rollout(functools.partial(pool, 42), None, frames=_ENVS)
    with pytest.warns(UserWarning, match="np.random.randint"):
        rollout.seed(range(_ENVS))
    rollout.close()
    rollout = make_rollout(pool, None, frames=_ENVS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rollout.seed(range(_ENVS))
        rollout.seed(range(_ENVS))  # as where T is chosen
    with pytest.warns(UserWarning, match="np.random.randint"):
        rollout.seed(range(1, 1 + _ENVS))
    rollout.close()
    with pytest.raises(ConfigurationError, match="batch_size=3"):
        make_rollout(functools.partial(pool, 1, batch_size=3), None, frames=_ENVS)
    with pytest.raises(ConfigurationError, match="env_type='gymnasium'"):
        make_rollout(lambda: envpool.make("CartPole-v1", env_type="dm"), None, frames=_ENVS)

"""DQN on CartPole by several ranks with one prioritized buffer (pytorch/rl#1397).

    torchrun --nproc-per-node 4 -m torchrl_dist.recipes.ddp_dqn --updates 2500

Each update is that of one process with a batch of 128, in law: between two points at which all
ranks meet, first all draw, then all write priorities and rows. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from ..learn import DistributedLoss
from ..replay import (
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    anneal_beta,
)
from ..runtime import Session, session
from .evaluate import evaluate
from .q_network import QNetwork

CAPACITY, BATCH, STEPS_PER_UPDATE, LEARNING_STARTS = 50_000, 128, 8, 1_000


def train(job: Session, replay: Path, checkpoint: Path, updates: int, seed: int) -> dict:
    """Learn until ``updates`` or a stop signal; every rank calls it and gets the same metrics."""
    torch.set_num_threads(1)
    network = QNetwork(4, 2, (64, 64))
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    dqn = DQNLoss(actor, delay_value=True, double_dqn=True, action_space="categorical")
    dqn.make_value_estimator(gamma=0.99)
    with DistributedLoss(dqn, timeout_s=job.timeout_s) as loss:
        ranks = loss.ranks
        buffer = TensorDictReplayBuffer(
            storage=SharedMemmapStorage(CAPACITY, scratch_dir=replay),
            sampler=SharedPrioritizedSampler(CAPACITY, alpha=0.6, beta=0.4),
            writer=SharedCursorWriter(),
            batch_size=BATCH // ranks.size,
            priority_key="td_error",
        )
        optimizer = torch.optim.Adam(loss.parameters(), lr=2e-3)
        target = SoftUpdate(loss, tau=0.05)
        steps = Steps(network, seed=ranks.seed(seed))
        update = 0
        while not ranks.any(job.stop_requested or update >= updates):  # all ranks meet here
            if len(buffer) >= LEARNING_STARTS:
                anneal_beta(buffer.sampler, update, steps=updates)  # once for the job
                batch = buffer.sample()
                optimizer.zero_grad()
                loss(batch)["loss"].backward()  # and here
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 10.0)
                optimizer.step()
                target.step()
                buffer.update_tensordict_priority(batch)
                update += 1
            epsilon = max(0.05, 1 - 2 * update / updates)
            buffer.extend(steps.take(STEPS_PER_UPDATE // ranks.size or 1, epsilon))
        ranks.on_first(torch.save, loss.state_dict(), checkpoint)
        result = {"ranks": ranks.size, "updates": update, "rows": len(buffer)}
        result |= ranks.sums({"frames": steps.taken}) | {"checksum": loss.check_drift()}
        buffer.storage.close()
    returns = evaluate(network, "CartPole-v1", episodes=20, seed=seed)
    return result | {"return": sum(returns) / len(returns)}


class Steps:
    """One environment of this rank, and a network's steps in it."""

    def __init__(self, values: QNetwork, seed: int) -> None:
        self._values, self._env = values, gymnasium.make("CartPole-v1")
        self._observation, _ = self._env.reset(seed=seed)
        self.taken = 0

    @torch.no_grad()
    def take(self, count: int, epsilon: float) -> TensorDict:
        """``[count]`` transitions, epsilon-greedily."""
        rows = []
        for _ in range(count):
            if torch.rand(()) < epsilon:
                action = int(torch.randint(2, ()))
            else:
                action = int(self._values(torch.as_tensor(self._observation)).argmax())
            following, reward, terminated, truncated, _ = self._env.step(action)
            ended = terminated or truncated
            rows.append((self._observation, action, following, [reward], [terminated], [ended]))
            self._observation = self._env.reset()[0] if ended else following
        self.taken += count
        names = ("observation", "action", "next", "reward", "terminated", "done")
        columns = map(np.array, zip(*rows, strict=True))
        row = {name: torch.from_numpy(c) for name, c in zip(names, columns, strict=True)}
        following = {
            "observation": row["next"],
            "reward": row["reward"].float(),
            "terminated": row["terminated"],
            "done": row["done"],
        }
        start = {"observation": row["observation"], "action": row["action"]}
        return TensorDict({**start, "next": TensorDict(following, [count])}, [count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=2_500, help="(default: 2500)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--output", type=Path, default=Path("runs/ddp-dqn"), metavar="FOLDER")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with session({"learner": -1}, process_group="gloo", timeout_s=120) as job:
        result = train(
            job,
            options.output / "replay",
            options.output / "loss.pt",
            options.updates,
            options.seed,
        )
        if job.is_driver:
            print(json.dumps(result))


if __name__ == "__main__":
    main()

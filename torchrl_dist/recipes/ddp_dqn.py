"""DQN on CartPole with several ranks and one prioritized buffer (pytorch/rl#1397).

    torchrun --nproc-per-node 4 -m torchrl_dist.recipes.ddp_dqn --updates 2500

The rows of an update are drawn with the same probabilities as in a single process with a batch of
128. Ranks wait for each other after drawing, and again after writing priorities and rows, so that
no rank draws while another one writes. The program prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tensordict.nn import TensorDictSequential
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from .. import own_files
from ..learn import DistributedLoss
from ..replay import (
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
    anneal_beta,
)
from ..runtime import Session, session
from .parts.evaluate import evaluate
from .parts.networks import QNetwork

CAPACITY, BATCH, FRAMES_PER_UPDATE, LEARNING_STARTS = 50_000, 128, 8, 1_000


def train(job: Session, output: Path, updates: int, seed: int) -> dict:
    """Take ``updates`` steps, or fewer after a stop signal. Every rank calls this; rank 0 writes
    ``loss.pt``."""
    torch.set_num_threads(1)
    network = QNetwork(4, 2, (64, 64))
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    dqn = DQNLoss(actor, delay_value=True, double_dqn=True, action_space="categorical")
    with DistributedLoss(dqn, timeout_s=job.timeout_s) as loss:
        ranks = loss.ranks
        buffer = TensorDictReplayBuffer(
            storage=SharedMemmapStorage(CAPACITY, scratch_dir=output / "replay"),
            sampler=SharedPrioritizedSampler(CAPACITY, alpha=0.6, beta=0.4),
            writer=SharedCursorWriter(),
            batch_size=BATCH // ranks.size,
            priority_key="td_error",
        )
        optimizer = torch.optim.Adam(loss.parameters(), lr=2e-3)
        target = SoftUpdate(loss, tau=0.05)
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        env.set_seed(ranks.seed(seed) % 2**31)
        explore = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.05,
                                annealing_num_steps=updates // 2 or 1)  # fmt: skip
        policy = TensorDictSequential(actor, explore)
        state, frames, update = env.reset(), 0, 0
        # All ranks wait for each other here.
        while not ranks.any(job.stop_requested or update >= updates):
            # Do not use len(buffer): faster ranks may have added rows already, but all ranks must
            # make the same decision.
            if frames * ranks.size >= LEARNING_STARTS:
                # ``update`` counts the updates of the whole job
                anneal_beta(buffer.sampler, update, steps=updates)
                batch = buffer.sample()
                optimizer.zero_grad()
                loss(batch)["loss"].backward()  # the ranks wait for each other here, too
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 10.0)
                optimizer.step()
                target.step()
                # DQNLoss writes squared errors, but priorities are absolute errors (Schaul et al.
                # 2016).
                batch["td_error"] = batch["td_error"].sqrt()
                buffer.update_tensordict_priority(batch)
                explore.step()
                update += 1
            rows = []
            for _ in range(FRAMES_PER_UPDATE // ranks.size or 1):
                with torch.no_grad():
                    row, state = env.step_and_maybe_reset(policy(state))
                rows.append(row.select("observation", "action", "next"))
            buffer.extend(torch.stack(rows))
            frames += len(rows)
        ranks.on_first(torch.save, loss.state_dict(), output / "loss.pt")
        result = {"ranks": ranks.size, "updates": update, "rows": len(buffer)}
        result |= ranks.sums({"frames": frames}) | {"checksum": loss.check_drift()}
        buffer.storage.close()
    returns = evaluate(network.greedy, "CartPole-v1", episodes=20, seed=seed)
    return result | {"return": sum(returns) / len(returns)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=2_500, help="(default: 2500)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--output", type=Path, default=Path("runs/ddp-dqn"), metavar="FOLDER")
    options = parser.parse_args()
    if (options.output / "loss.pt").exists():
        parser.error(f"--output: {options.output}/loss.pt already exists; choose another folder")
    own_files.make_folder(options.output)
    with session({"learner": -1}, process_group="gloo", timeout_s=120) as job:
        result = train(job, options.output, options.updates, options.seed)
        if job.is_driver:
            print(json.dumps(result))


if __name__ == "__main__":
    main()

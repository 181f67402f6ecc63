"""A trained policy alone: torch and gymnasium, no other process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from ..checkpoint import load_checkpoint
from ..errors import CheckpointError, ConfigurationError
from .evaluate import evaluate, play_rendered
from .q_network import QNetwork


def play(
    path: str | os.PathLike[str], *, episodes: int, seed: int, render: bool = False
) -> dict[str, Any]:
    """Greedy episodes of a checkpoint's policy; returns plain values. Blocks.

    Raises:
        CheckpointError: the file is missing, damaged, or holds no value network.
        ConfigurationError: its environment cannot be built here.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "checkpoint.pt"
    checkpoint = load_checkpoint(path)
    info = checkpoint.policy_info
    try:
        env = info["env"]
        network = QNetwork(info["observation_size"], info["num_actions"], info["hidden"])
        network.load_state_dict(dict(checkpoint.policy))
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"the policy in {path} (recipe {checkpoint.recipe!r}) cannot be played: {error}"
        ) from error
    import gymnasium

    try:
        if render:
            returns = [
                play_rendered(network, env, seed=seed + episode) for episode in range(episodes)
            ]
        else:
            returns = evaluate(network, env, episodes=episodes, seed=seed)
    except gymnasium.error.Error as error:
        raise ConfigurationError(f"{env} cannot be played here: {error}") from error
    print(f"{env}: {episodes} episodes, {path}", file=sys.stderr)
    return {
        "mean_return": fmean(returns),
        "episodes": episodes,
        "lowest": min(returns),
        "highest": max(returns),
        "returns": returns,
        "env": env,
        "seed": seed,
        "checkpoint": str(path),
    }

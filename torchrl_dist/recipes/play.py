"""A trained policy alone: torch and gymnasium, no other process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from ..checkpoint import load_checkpoint
from ..errors import CheckpointError, ConfigurationError
from .evaluate import evaluate, play_rendered
from .networks import PolicySpec

_FPS = 50


def play(
    path: str | os.PathLike[str],
    *,
    episodes: int,
    seed: int,
    render: bool = False,
    video: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Greedy episodes of a checkpoint's policy; returns plain values. Blocks.

    Args:
        path: a checkpoint, or the folder of its run.
        episodes: how many.
        seed: of the environments.
        render: show them in a window.
        video: where to write them as a video, replacing the file; needs the extra ``video``.

    Raises:
        CheckpointError: the file is missing, damaged, or holds no policy of a recipe.
        ConfigurationError: its environment cannot be built or shown here, or no video written.
    """
    if render and video is not None:
        raise ConfigurationError("--render and --video: expected one of them")
    writer = None if video is None else _video_writer()
    path = Path(path)
    if path.is_dir():
        path = path / "checkpoint.pt"
    checkpoint = load_checkpoint(path)
    info = checkpoint.policy_info
    try:
        policy = PolicySpec.from_plain(info)
        network = policy.network()
        network.load_state_dict(dict(checkpoint.policy))
    except (KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the policy in {path} (recipe {checkpoint.recipe!r}) cannot be played: {error}"
        ) from error
    import gymnasium

    env, act = policy.env, network.greedy
    try:
        if render or writer is not None:
            mode = "human" if render else "rgb_array"
            shown = [
                play_rendered(act, env, seed=seed + episode, render_mode=mode)
                for episode in range(episodes)
            ]
            returns = [total for total, _ in shown]
            if writer is not None:
                writer(video, [picture for _, pictures in shown for picture in pictures], _FPS)
        else:
            returns = evaluate(act, env, episodes=episodes, seed=seed)
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


def _video_writer() -> Callable[[Any, list, int], None]:
    try:
        import imageio.v3 as imageio
        import imageio_ffmpeg  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "--video needs a package that is not installed: pip install 'torchrl-dist[video]'"
        ) from error

    def write(path: Any, pictures: list, fps: int) -> None:
        try:
            # Players want even sizes and 4:2:0; every codec has blocks of 2 x 2.
            even = [picture[: picture.shape[0] // 2 * 2, : picture.shape[1] // 2 * 2]
                    for picture in pictures]  # fmt: skip
            imageio.imwrite(path, even, fps=fps, macro_block_size=2)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--video: cannot write {path} ({error})") from error

    return write

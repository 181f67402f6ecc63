"""Play a trained policy with torch and gymnasium, in this process alone."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from ... import own_files
from ...errors import ConfigurationError
from .environments import MAX_EPISODE_STEPS, look_at, make_env, needs
from .evaluate import evaluate, play_rendered
from .networks import PolicySpec, checkpoint_in, saved_policy

_FPS = 50


def play(
    path: str | os.PathLike[str],
    *,
    episodes: int,
    seed: int,
    render: bool = False,
    video: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Play greedy episodes of a checkpoint's policy, and return plain values. Blocks.

    Args:
        path: a checkpoint, or the folder of its run.
        seed: seed of the environments.
        render: show the episodes in a window.
        video: file for a video of the episodes; an older file is replaced. Needs the extra
            ``video``.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or holds no policy of a recipe.
        ConfigurationError: the policy's environment cannot be built or shown here, its spaces have
            changed since the training, or the video cannot be written."""
    if render and video is not None:
        raise ConfigurationError(
            "--render and --video: got both, expected at most one; leave one of them out"
        )
    if video is not None:
        _require_video_writer()
    import gymnasium

    policy, network = saved_policy(path)
    env = policy.env
    try:
        task = look_at(env, continuous="any")
    except ConfigurationError as error:
        raise ConfigurationError(f"{env} cannot be played here: {error}") from error
    policy.check_task(task)
    try:
        if render or video is not None:
            with contextlib.nullcontext() if video is None else _written(video, _FPS) as keep:
                returns = [
                    play_rendered(network.player(), env, seed=seed + episode, keep=keep)
                    for episode in range(episodes)
                ]
        else:
            returns = evaluate(network.player(), env, episodes=episodes, seed=seed)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigurationError(f"{env} cannot be played here: {error}") from error
    print(
        f"{env}: {episodes} episode{'s' * (episodes > 1)}, {checkpoint_in(path)}", file=sys.stderr
    )
    return {
        "mean_return": fmean(returns),
        "episodes": episodes,
        "lowest": min(returns),
        "highest": max(returns),
        "returns": returns,
        "env": env,
        "seed": seed,
        "checkpoint": str(checkpoint_in(path)),
    }


def record(
    policy: PolicySpec,
    weights: Mapping[str, Tensor],
    path: Path,
    seed: int,
    max_steps: int = MAX_EPISODE_STEPS,
) -> None:
    """Write a video of one greedy episode of a policy with these weights. Blocks."""
    network = policy.network()
    network.load_state_dict(dict(weights))
    network.eval()
    with _written(path, _FPS) as keep:
        play_rendered(network.player(), policy.env, seed=seed, keep=keep, max_steps=max_steps)


def check_video(env: str) -> None:
    """Raise ConfigurationError unless videos of ``env`` can be written here."""
    _require_video_writer()
    try:
        with contextlib.closing(make_env(env, render_mode="rgb_array")) as made:
            made.reset(seed=0)
            picture: Any = made.render()
    except Exception as error:
        raise ConfigurationError(
            f"--video: {env} cannot be shown here: {error}. Correct the environment, or leave "
            "--video out"
        ) from error
    if not hasattr(picture, "shape"):
        raise ConfigurationError(
            f"--video: {env} cannot be shown here: its render() returned a "
            f"{type(picture).__name__}, expected an array [height, width, 3]. Correct the "
            "environment, or leave --video out"
        )


def _require_video_writer() -> None:
    with needs("video", "--video"):
        import imageio.v2  # noqa: F401
        import imageio_ffmpeg  # noqa: F401


@contextlib.contextmanager
def _written(path: str | os.PathLike[str], fps: int) -> Iterator[Callable[[Any], None]]:
    """Yield a function that writes one picture at a time, because all pictures may not fit in
    memory."""
    import imageio.v2 as imageio

    @contextlib.contextmanager
    def explained() -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"--video: cannot write {path} ({error}); choose another file"
            ) from error

    def append(picture: Any) -> None:
        # Video players need the format 4:2:0, whose 2 x 2 blocks need an even width and height.
        even = picture[: picture.shape[0] // 2 * 2, : picture.shape[1] // 2 * 2]
        with explained():
            film.append_data(even)

    with explained():
        target = own_files.resolved(path)
        beside = target.with_name(f".{target.stem}.tmp{target.suffix}")
        beside.unlink(missing_ok=True)
        os.close(own_files.open_new(beside))
        try:
            film = imageio.get_writer(beside, fps=fps, macro_block_size=2)
        except BaseException:
            beside.unlink()
            raise
    try:
        yield append
        with explained():
            film.close()
            os.replace(beside, target)
    except BaseException:  # an older video must stay
        with contextlib.suppress(Exception):
            film.close()
        beside.unlink(missing_ok=True)
        raise

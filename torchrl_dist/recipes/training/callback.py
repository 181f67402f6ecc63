"""A user's code that a run calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ..parts.environments import named_function
from ..parts.plots import Evaluation


class Callback:
    """What a run calls in the first learner's process. Override what you need.

    ``train RECIPE --callback package.module:make`` calls ``make()``, which returns a Callback. If a
    method returns True, the run ends after the next batch, with a checkpoint and its result. What a
    method raises ends the run as an error of the recipe does. The learners wait for each method.
    """

    def on_batch(self, frames: int, metrics: Mapping[str, Any]) -> bool | None:
        """Called after the updates on each batch.

        Args:
            frames: of the whole job so far.
            metrics: by the names in the logs; empty if there was no update. Tensors may be on the
                learner's device.
        """

    def on_evaluation(self, evaluation: Evaluation) -> bool | None:
        """Called when an evaluation during training has ended."""

    def on_checkpoint(self, path: Path) -> bool | None:
        """Called after each checkpoint was written to ``path``."""


def callback_of(name: str | None) -> Callback:
    """Return what the user's function returns, or a Callback that does nothing.

    Raises:
        ConfigurationError: there is no such function, or it returns no Callback.
    """
    if name is None:
        return Callback()
    try:
        function = named_function(name)
    except (ImportError, SystemExit) as error:
        raise ConfigurationError(f"--callback: cannot import {name!r} ({error})") from error
    if function is None:
        raise ConfigurationError(f"--callback: got {name!r}, expected package.module:function")
    made = function()
    if not isinstance(made, Callback):
        raise ConfigurationError(
            f"--callback: {name}() returned {type(made).__name__}, expected a "
            "torchrl_dist.recipes.training.callback.Callback"
        )
    return made

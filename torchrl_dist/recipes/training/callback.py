"""User code that a run calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ..parts.environments import function_of
from ..parts.plots import Evaluation


class Callback:
    """Methods that a run calls in the first learner's process. Override those that you need.

    ``train RECIPE --callback package.module:make`` calls ``make()``, which returns a Callback. If a
    method returns True (or a true value of NumPy or torch), the run ends after the next batch, with
    a checkpoint and its result. If a method returns None or False, the run continues. If a method
    raises or returns anything else, the run ends in the same way as after an error of the recipe.
    The learners wait while a method runs."""

    def on_batch(self, frames: int, metrics: Mapping[str, Any]) -> bool | None:
        """Called after the updates on each batch.

        Args:
            frames: frames of the whole job so far.
            metrics: metrics by their names in the logs; empty if there was no update. Tensors may
                be on the learner's device.
        """

    def on_evaluation(self, evaluation: Evaluation) -> bool | None:
        """Called when an evaluation during training has ended."""

    def on_checkpoint(self, path: Path) -> bool | None:
        """Called after each checkpoint has been written to ``path``."""


def callback_of(name: str | None) -> Callback:
    """Return the Callback that the user's function ``name`` makes. If ``name`` is None, return one
    that does nothing.

    Raises:
        ConfigurationError: there is no such function, or it returns no Callback.
    """
    if name is None:
        return Callback()
    made = function_of("--callback", name)()
    if not isinstance(made, Callback):
        raise ConfigurationError(
            f"--callback: {name}() returned {type(made).__name__}, expected a "
            "torchrl_dist.recipes.training.callback.Callback"
        )
    return made

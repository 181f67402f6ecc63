"""Check that all workers of a job have the same kind of env."""

from __future__ import annotations

from collections.abc import Mapping

from torchrl_dist.errors import ConfigurationError


def require_equal_specs(specs: Mapping[str, Mapping[str, str]]) -> None:
    """Compare the specs of each worker with the specs of the first worker.

    Args:
        specs: for each worker's name, a mapping from the name of a spec to its description.

    Raises:
        ConfigurationError: the specs of two workers differ. The message contains the names of both
            workers and both descriptions.
    """
    (first, expected), *others = specs.items()
    for name, found in others:
        for what in expected.keys() | found.keys():
            if expected.get(what) != found.get(what):
                raise ConfigurationError(
                    f"make_env gave different envs: the {what} is {expected.get(what)} on {first}, "
                    f"but {found.get(what)} on {name}. Let make_env return the same kind of env on "
                    "every worker"
                )

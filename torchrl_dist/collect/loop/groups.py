"""Divide a worker's envs into groups, for a policy in another process (double buffering).

While one group waits for its actions, the worker steps another group. A request for actions
therefore costs no time if its round trip is shorter than the steps of the other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from torchrl_dist.collect.loop.drivers import EnvListDriver, require_different
from torchrl_dist.collect.loop.rollout import GymnasiumRollout, Values, make_rollout, never
from torchrl_dist.collect.loop.spaces import Key
from torchrl_dist.errors import ConfigurationError

# At the deadline of a request for actions, the learner answers with an error. If the learner does
# not answer at all, the worker raises an error this many seconds after the deadline.
_LATE_S = 5.0


class PendingActions(Protocol):
    def result(self, timeout: float) -> Values:
        """Block until the policy's outputs arrive, and return the outputs."""


class Learner(Protocol):
    """A ``torchrl_dist.runtime.Remote`` to an ``RPCInferenceTransport``, or an object with the same
    method."""

    def submit(
        self, method: str, values: Values, *, timeout_s: float | None = None
    ) -> PendingActions: ...


@dataclass(frozen=True)
class Inference:
    """How a worker gets actions from the learner.

    Attributes:
        inputs: keys of the observations that the policy reads. The worker sends only these
            observations.
        groups: number of groups into which a worker, or an env process, divides its envs.
        timeout_s: the longest time to wait for actions, in seconds.
    """

    learner: Learner
    inputs: tuple[Key, ...]
    groups: int
    timeout_s: float


class GroupedRollout:
    """A :class:`~torchrl_dist.collect.loop.rollout.Rollout` that steps several groups of envs. Not
    thread-safe, except for ``stop``."""

    ragged = False

    def __init__(self, groups: Sequence[GymnasiumRollout], inference: Inference) -> None:
        self._groups = list(groups)
        self._inference = inference
        self.num_envs = sum(group.num_envs for group in groups)
        self.steps, self.specs = groups[0].steps, groups[0].specs
        self.one_seed_only = any(group.one_seed_only for group in groups)
        self.target = [group.target for group in groups]
        self.policy_version = 0  # not used: the learner's answers contain the version
        self.at_random = False  # has no effect, because the learner's policy chooses all actions

    def call_policy_once(self) -> None:
        pass  # nothing to call, because the policy is in the learner's process

    def seed(self, seeds: Sequence[int]) -> None:
        first = 0
        for group in self._groups:
            group.seed(seeds[first : first + group.num_envs])
            first += group.num_envs

    def run(self, steps: int, enough: Callable[[int], bool] = never) -> TensorDict:
        """Make a rollout as ``Rollout.run`` does. ``enough`` must always return false, because the
        rollouts of all groups must have the same length."""
        loops: list[Generator[Values, Values, TensorDict]] = []
        answers: list[PendingActions] = []
        for group in self._groups:
            loops.append(group.steps_one_by_one(steps, enough))
            answers.append(self._ask(next(loops[-1])))
        done: dict[int, TensorDict] = {}
        while len(done) < len(loops):
            for number, loop in enumerate(loops):
                actions = answers[number].result(self._inference.timeout_s + _LATE_S)
                try:
                    observations = loop.send(actions)
                except StopIteration as end:
                    done[number] = end.value
                else:
                    answers[number] = self._ask(observations)
        return torch.cat([done[number] for number in range(len(loops))], 0)

    def _ask(self, observations: Values) -> PendingActions:
        values = {key: observations[key] for key in self._inference.inputs if key in observations}
        inference = self._inference
        return inference.learner.submit("submit", values, timeout_s=inference.timeout_s)

    def reset(self, envs: Sequence[int] | None = None) -> None:
        size = self._groups[0].num_envs
        for number, group in enumerate(self._groups):
            group.reset(
                None if envs is None else [env % size for env in envs if env // size == number]
            )

    def resize(self, steps: int) -> None:
        self.steps = steps
        for group in self._groups:
            group.resize(steps)

    def stop(self) -> None:
        for group in self._groups:
            group.stop()

    def close(self) -> None:
        for group in self._groups:
            group.close()


def make_grouped_rollout(
    make_env: str | Callable[[], Any],
    inference: Inference,
    *,
    frames: int,
    num_envs: int,
    **options: Any,
) -> GroupedRollout:
    """Build ``num_envs`` envs in this process, in groups of equal size. ``options`` are those of
    :func:`~torchrl_dist.collect.loop.rollout.make_rollout`.

    Raises:
        ConfigurationError: ``num_envs`` is not a multiple of the number of groups; the envs are
            TorchRL envs or have next-step autoreset; or the envs have no key that the policy reads.
    """
    groups = inference.groups
    if num_envs % groups:
        raise ConfigurationError(
            f"num_envs={num_envs} cannot be divided into env_groups={groups} groups of equal size; "
            "pass a num_envs= that is a multiple of env_groups="
        )
    options |= {"frames": -(-frames // groups), "num_envs": num_envs // groups}
    built = [make_rollout(make_env, None, **options) for _ in range(groups)]
    fit = [each for each in built if isinstance(each, GymnasiumRollout)]
    for rollout in built:
        if not isinstance(rollout, GymnasiumRollout) or rollout.driver.valid is not None:
            for each in built:
                each.close()
            raise ConfigurationError(
                "the envs are TorchRL envs, or need TorchRL's GymWrapper, or are vector envs with "
                "next-step autoreset; inference='learner' supports only other gymnasium envs. "
                "Change make_env, or leave inference= out"
            )
    envs = [each for each in (rollout.driver for rollout in fit) if isinstance(each, EnvListDriver)]
    require_different(env for driver in envs for env in driver.envs)
    known = fit[0].observed
    if not any(key in known for key in inference.inputs):
        raise ConfigurationError(
            f"the policy reads the keys {list(inference.inputs)}, but the envs give the keys "
            f"{sorted(known, key=str)}; expected at least one common key. Change the policy's "
            "in_keys"
        )
    return GroupedRollout(fit, inference)

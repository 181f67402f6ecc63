"""The policy at the learner: workers send observations and get actions, a step at a time.

TorchRL's ``InferenceServer`` batches the requests of all workers over an RPC transport. While one
group of a worker's envs waits for its actions, the worker steps the other (double buffering), so
that a round trip costs nothing that is shorter than a step.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules.inference_server import InferenceServer, InferenceTransport

from torchrl_dist.collect.rollout import GymnasiumRollout, make_rollout, never
from torchrl_dist.errors import ConfigurationError, PeerLostError
from torchrl_dist.runtime import Remote, Session
from torchrl_dist.weights import PackedWeights, unpack

_IDLE_S = 0.5  # how long the server's thread sleeps at most before it looks whether it is to end
_MAX_BATCH = 256
_END_S = 5.0


class RPCInferenceTransport(InferenceTransport):
    """Requests of other processes, queued for the server of this one.

    An ``infer`` call of a :class:`Remote` to it is a request; it is answered when the server has
    run the policy. :meth:`submit` is the same for this process.
    """

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._queue: list[tuple[TensorDictBase, Future, float]] = []
        self._closed = False

    def submit(self, td: TensorDictBase) -> Future:
        future: Future = Future()
        with self._cond:
            if self._closed:
                future.set_exception(PeerLostError("the learner's inference has ended"))
            else:
                self._queue.append((td, future, time.monotonic()))
                self._cond.notify()
        return future

    def infer(self, td: TensorDictBase, timeout_s: float) -> TensorDictBase:
        """Called through RPC: what the policy makes of ``td``; blocks for it."""
        return self.submit(td).result(timeout_s)

    def drain_with_timing(self, max_items: int) -> tuple[list, list, list]:
        """Up to so many requests, their futures, and when they came."""
        with self._cond:
            taken, self._queue = self._queue[:max_items], self._queue[max_items:]
        inputs, futures, times = (list(x) for x in zip(*taken, strict=True)) if taken else ([],) * 3
        return inputs, futures, times

    def drain(self, max_items: int) -> tuple[list[TensorDictBase], list[Future]]:
        inputs, futures, _ = self.drain_with_timing(max_items)
        return inputs, futures

    def wait_for_work(self, timeout: float) -> None:
        with self._cond:
            self._cond.wait_for(lambda: self._queue or self._closed, timeout)

    def resolve(self, callback: Future, result: TensorDictBase) -> None:
        callback.set_result(result)

    def resolve_exception(self, callback: Future, exc: BaseException) -> None:
        callback.set_exception(exc)

    def close(self) -> None:
        """Refuse what waits and what comes; idempotent."""
        with self._cond:
            self._closed = True
            left, self._queue = self._queue, []
            self._cond.notify_all()
        for _, future, _ in left:
            future.set_exception(PeerLostError("the learner's inference has ended"))


class LearnerInference:
    """The learner's side: a server with its own copy of the policy.

    Attributes:
        handle: goes to the workers.
    """

    def __init__(
        self, session: Session, policy: nn.Module, exploration_type: ExplorationType
    ) -> None:
        outputs = {key if isinstance(key, str) else tuple(key) for key in policy.out_keys}
        if any(isinstance(key, tuple) and key[0] == "next" for key in outputs):
            raise ConfigurationError(
                "inference='learner' does not carry the state of a recurrent policy: leave it out, "
                "so that the workers have the policy"
            )
        self._policy = copy.deepcopy(policy).to("cpu")
        self._outputs = list(outputs)
        self._exploration_type = exploration_type
        self._version = 0
        self._lock = threading.Lock()
        self._transport = RPCInferenceTransport()
        self._server = InferenceServer(
            self._run,
            self._transport,
            max_batch_size=_MAX_BATCH,
            timeout=_IDLE_S,  # with batches of at least one it is no delay
            collate_fn=torch.stack,
            policy_version_key=None,
        )
        self._server.start()
        self.handle: Remote = session.remote(session.me, lambda: self._transport)

    def _run(self, batch: TensorDictBase) -> TensorDictBase:
        with self._lock, torch.no_grad(), set_exploration_type(self._exploration_type):
            out = self._policy(batch).select(*self._outputs)
            return out.set("policy_version", torch.full(out.batch_size, self._version))

    def take_weights(self, packed: PackedWeights) -> None:
        """From the next batch of requests on."""
        with self._lock:
            unpack(packed, self._policy)
            self._version = packed.version

    def close(self) -> None:
        """End the server; idempotent, blocks a few seconds at most."""
        self._transport.close()
        self._server.shutdown(timeout=_END_S)


class GroupedRollout:
    """A worker's envs in groups, of which one is stepped while the others wait for actions.

    As :class:`~torchrl_dist.collect.rollout.Rollout`. Not thread-safe, but for :meth:`stop`.
    """

    def __init__(
        self, groups: Sequence[GymnasiumRollout], learner: Remote, timeout_s: float
    ) -> None:
        self._groups = list(groups)
        self._learner = learner
        self._timeout_s = timeout_s
        self.num_envs = sum(group.num_envs for group in groups)
        self.steps = groups[0].steps
        self.policy_version = 0  # of no use: the learner stamps its own

    def seed(self, seeds: Sequence[int]) -> None:
        first = 0
        for group in self._groups:
            group.seed(seeds[first : first + group.num_envs])
            first += group.num_envs

    def run(self, steps: int, enough: Callable[[int], bool] = never) -> TensorDict:
        """As ``Rollout.run``; it is never ``enough``."""
        loops: list[Generator[TensorDictBase, Any, TensorDict]] = []
        answers: list[Future] = []
        for group in self._groups:
            loops.append(group.steps_one_by_one(steps))
            answers.append(self._ask(next(loops[-1])))
        done: dict[int, TensorDict] = {}
        while len(done) < len(loops):
            for number, loop in enumerate(loops):
                # Its own call has a deadline; this one is for the case that nobody keeps that.
                actions = answers[number].result(self._timeout_s + _END_S)
                try:
                    answers[number] = self._ask(loop.send(actions))
                except StopIteration as end:
                    done[number] = end.value
        return torch.cat([done[number] for number in range(len(loops))], 0)

    def _ask(self, observations: TensorDictBase) -> Future:
        return self._learner.submit(
            "infer", observations, self._timeout_s, timeout_s=self._timeout_s
        )

    def reset(self) -> None:
        for group in self._groups:
            group.reset()

    @property
    def specs(self) -> dict[str, str]:
        return self._groups[0].specs

    @property
    def target(self) -> Any:
        return [env for group in self._groups for env in group.target]

    def stop(self) -> None:
        for group in self._groups:
            group.stop()

    def close(self) -> None:
        for group in self._groups:
            group.close()


def make_grouped_rollout(
    make_env: str | Callable[[], Any],
    learner: Remote,
    *,
    frames: int,
    num_envs: int,
    groups: int,
    timeout_s: float,
    categorical_action_encoding: bool = False,
) -> GroupedRollout:
    """Build ``num_envs`` envs here, in ``groups`` of equal size.

    Raises:
        ConfigurationError: they cannot be divided so, or are stepped by TorchRL's loop, or drift
            apart.
    """
    if num_envs % groups:
        raise ConfigurationError(f"num_envs={num_envs} cannot be divided into {groups} env_groups")
    built = [
        make_rollout(
            make_env,
            None,
            frames=-(-frames // groups),
            num_envs=num_envs // groups,
            categorical_action_encoding=categorical_action_encoding,
        )
        for _ in range(groups)
    ]
    for rollout in built:
        if not isinstance(rollout, GymnasiumRollout) or rollout.driver.valid is not None:
            for each in built:
                each.close()
            raise ConfigurationError(
                "inference='learner' takes gymnasium envs that do not reset in steps of their own "
                "(no TorchRL env, no vector env with next-step autoreset)"
            )
    return GroupedRollout(built, learner, timeout_s)

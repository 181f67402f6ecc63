"""Run the policy at the learner: at each step, workers send observations and get actions.

The requests of all workers arrive by RPC, and TorchRL's ``InferenceServer`` batches them. Requests
and answers are dicts of plain tensors, because sending a TensorDict takes more time than a call of
a small network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn
from torchrl.envs.utils import ExplorationType
from torchrl.modules.inference_server import InferenceServer, InferenceTransport

from torchrl_dist.collect.loop.one_thread import use_one_thread_if_small
from torchrl_dist.collect.loop.policies import Compilation, Values, cpu_copy
from torchrl_dist.collect.loop.spaces import plain_key, refuse_stamps
from torchrl_dist.errors import ConfigurationError, PeerLostError
from torchrl_dist.forks import renewed
from torchrl_dist.runtime import Remote, Session
from torchrl_dist.weights import PackedWeights, unpack

_IDLE_S = 0.5  # interval at which the server's thread checks whether it must end
_MAX_BATCH = 256
_CLOSED = "the learner's inference server was closed, because its collector was shut down"


class RPCInferenceTransport(InferenceTransport):
    """Queue requests of other processes for the inference server of this process.

    Other processes call ``submit`` through a :class:`Remote`, with the observations ``[n, ...]`` of
    any number of envs. The call is answered when the server has run the policy.
    """

    def __init__(self) -> None:
        self._cond = renewed(self, "_cond", threading.Condition)
        self._queue: list[tuple[Values, Future, float]] = []
        self._closed = False

    def submit(self, values: Values) -> Future:
        future: Future = Future()
        with self._cond:
            if self._closed:
                future.set_exception(PeerLostError(_CLOSED))
            else:
                self._queue.append((values, future, time.monotonic()))
                self._cond.notify()
        return future

    def drain_with_timing(self, max_items: int) -> tuple[list, list, list]:
        """Take up to ``max_items`` requests. Return the requests, their futures, and their times of
        arrival."""
        with self._cond:
            taken, self._queue = self._queue[:max_items], self._queue[max_items:]
        inputs, futures, times = (list(x) for x in zip(*taken, strict=True)) if taken else ([],) * 3
        return inputs, futures, times

    def drain(self, max_items: int) -> tuple[list[Values], list[Future]]:
        inputs, futures, _ = self.drain_with_timing(max_items)
        return inputs, futures

    def wait_for_work(self, timeout: float) -> None:
        with self._cond:
            self._cond.wait_for(lambda: self._queue or self._closed, timeout)

    def resolve(self, callback: Future, result: Values) -> None:
        callback.set_result(result)

    def resolve_exception(self, callback: Future, exc: BaseException) -> None:
        callback.set_exception(exc)

    def close(self) -> None:
        """Let the waiting requests and all later requests fail. Idempotent."""
        with self._cond:
            self._closed = True
            left, self._queue = self._queue, []
            self._cond.notify_all()
        for _, future, _ in left:
            future.set_exception(PeerLostError(_CLOSED))


class LearnerInference:
    """An inference server at the learner, with its own copy of the policy.

    Attributes:
        handle: the handle by which the workers call the transport.
        inputs: keys of the observations that the policy reads.
    """

    def __init__(
        self,
        session: Session,
        policy: nn.Module,
        exploration_type: ExplorationType,
        compilation: Compilation,
    ) -> None:
        reads: Any = policy  # a TensorDictModule
        outputs = {key if isinstance(key, str) else tuple(key) for key in reads.out_keys}
        if any(isinstance(key, tuple) and key[0] == "next" for key in outputs):
            raise ConfigurationError(
                "inference='learner' does not keep the state of a recurrent policy. Leave "
                "inference= out, so that the workers run the policy"
            )
        refuse_stamps(outputs, "the policy")
        self._policy = cpu_copy(policy, travels=False)
        self._calls = compilation.calls(self._policy, exploration_type)
        self._outputs = [plain_key(key) for key in outputs]
        self.inputs = tuple(plain_key(key) for key in reads.in_keys)
        self._version = 0
        self._lock = renewed(self, "_lock", threading.Lock)
        self._transport = RPCInferenceTransport()
        self._server = InferenceServer(
            self._run,
            self._transport,
            max_batch_size=_MAX_BATCH,
            # This timeout does not delay requests, because a batch may consist of a single request.
            timeout=_IDLE_S,
            collate_fn=_Requests,
            policy_version_key=None,
        )
        self._server.start()
        self.handle: Remote = session.remote(session.me, lambda: self._transport)

    def _run(self, requests: _Requests) -> _Answers:
        use_one_thread_if_small(self._policy)
        values = requests.joined()
        with self._lock, torch.no_grad():
            self._calls.begin()
            made = self._calls.on_values(dict(values), requests.rows)
            out = {key: made[key] for key in self._outputs}
            out["policy_version"] = torch.full((requests.rows,), self._version)
        return _Answers(out, requests.sizes)

    def take_weights(self, packed: PackedWeights) -> None:
        """Use these weights from the next batch of requests on."""
        with self._lock:
            unpack(packed, self._policy)
            self._version = packed.version

    def close(self, limit_s: float) -> None:
        """End the server. If the policy is being called, wait for the end of this call, at most
        ``limit_s`` seconds. Idempotent."""
        self._transport.close()
        self._server.shutdown(timeout=max(0.0, limit_s))


class _Requests:
    """The batch that ``InferenceServer`` passes to the policy. The batch consists of requests of
    any sizes."""

    def __init__(self, requests: Sequence[Values]) -> None:
        self._requests = requests
        self.sizes = [len(next(iter(values.values()))) for values in requests]
        self.rows = sum(self.sizes)

    def joined(self) -> Values:
        if len(self._requests) == 1:
            return self._requests[0]
        keys = self._requests[0].keys()
        return {key: torch.cat([values[key] for values in self._requests]) for key in keys}

    def get(self, key: Any, default: Any = None) -> Any:
        """Return ``default``. The server asks each request for an exploration type, but all
        requests use the exploration type of the learner."""
        return default


class _Answers:
    """The policy's outputs, which the server splits into one answer per request."""

    def __init__(self, values: Values, sizes: Sequence[int]) -> None:
        self._values, self._sizes = values, sizes

    def unbind(self, dim: int) -> list[Values]:
        parts = {key: value.split(self._sizes) for key, value in self._values.items()}
        return [{key: part[i] for key, part in parts.items()} for i in range(len(self._sizes))]

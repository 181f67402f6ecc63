"""Measures the costs of a job on this node, with the collector itself, in under a minute.

The kernel counts how long a process waits for a core, and the measured wall-clock times exclude
this wait. Other work on the node therefore changes the results little. Each figure is measured
several times. ``Measured.costs`` takes the medians of these repeats. To find the interval of a
prediction, ``Measured.costs`` takes the medians of resampled repeats.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_dist.collect import FirstReady, RPCBatchedCollector
from torchrl_dist.collect.loop.one_thread import torch_threads
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.planner import Costs
from torchrl_dist.recipes.parts.environments import image_factory
from torchrl_dist.runtime import ForkServer, local_cluster, proc

ENVS, NATIVE_ENVS = (1, 8, 64), (1, 8, 64, 512)
_REPEATS = 5  # repeats of every measurement, for its median and its interval
# Size of a large message. To find the cost of a byte, large messages are compared with small ones.
_LARGE_BYTES = 4 << 20
_ASKING = 4  # number of env processes that send requests at the same time
_STAMP = "worker_cpu_s"


@dataclass(frozen=True)
class Subject:
    """The job to plan for.

    Attributes:
        make_env: a function that takes a number of envs, and returns a function that makes one env,
            or a vector env with that number of envs.
        native: whether ``make_env`` makes vector envs for more than one env.
        policy: a module, or None for random actions.
        update_s: seconds of one update of the learner, or None to measure an update of ``networks``
            networks with layers of the widths ``hidden``.
        updates_per_frame, batch_size: updates per frame, and rows of an update.
        bytes_per_s: bandwidth of the network between nodes.
    """

    make_env: Callable[[int], Callable[[], Any]]
    native: bool
    policy: nn.Module | None
    update_s: float | None = None
    updates_per_frame: float = 0.0
    batch_size: int = 128
    bytes_per_s: float = 1.25e9
    hidden: tuple[int, ...] = (64, 64)
    networks: int = 1


@dataclass
class Measured:
    """Repeated measurements by name, in seconds.

    Attributes:
        step_cpu: maps a number of envs to the CPU time of one step of that many envs, including
            the policy and the rollout loop.
        figures: by name, the fields of ``Costs`` and some figures that are only shown.
        policy: by number of rows, the CPU time of a call of the policy.
    """

    step_cpu: dict[int, list[float]] = field(default_factory=dict)
    policy: dict[int, list[float]] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)

    def costs(self, subject: Subject, rng: np.random.Generator | None = None) -> Costs:
        """Return the medians of the repeats or, with ``rng``, of repeats drawn with replacement."""

        def value(of: list[float]) -> float:
            chosen = of if rng is None else rng.choice(of, len(of)).tolist()
            return float(statistics.median(chosen))

        names = [name for name in Costs.__dataclass_fields__ if name in self.figures]
        return Costs(
            step_cpu_s=tuple((envs, value(of)) for envs, of in sorted(self.step_cpu.items())),
            updates_per_frame=subject.updates_per_frame,
            bytes_per_s=subject.bytes_per_s,
            **{name: value(self.figures[name]) for name in names},
        )

    def as_json(self) -> dict[str, Any]:
        medians = {name: statistics.median(of) for name, of in self.figures.items()}
        steps = {str(envs): statistics.median(of) for envs, of in self.step_cpu.items()}
        policies = {str(rows): statistics.median(of) for rows, of in self.policy.items()}
        return {"step_cpu_s": steps, "policy_s": policies, **medians}


def measure(
    subject: Subject,
    *,
    seconds: float = 1.0,
    timeout_s: float = 120.0,
    fork_server: ForkServer | None = None,
) -> Measured:
    """Measure all costs of ``subject``. Blocks until the processes that it starts have ended.

    Args:
        seconds: how long to measure each of about ten figures.
        timeout_s: the longest wait for processes to start and to answer.
        fork_server: the server that starts the processes (default: a new one).

    Raises:
        RemoteError, ConfigurationError: the env or the policy cannot be used.
    """
    found = Measured()
    with torch_threads(1):  # because a worker also uses one thread
        _measure_env(subject, found, seconds)
        rows = _measure_steps(subject, found, seconds)
        _measure_policy(subject, rows, found, seconds)
        _measure_update(subject, rows, found, seconds)
        _measure_messages(subject, rows, found, seconds, timeout_s, fork_server)
    return found


# ---- clocks


def _waited_s() -> float:
    """Return how long this thread has waited for a core, or 0 if the kernel does not count such
    waits.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Clock:
    """Measures two durations since its creation: the CPU time of this process, and the wall-clock
    time without this thread's waits for a core."""

    def __init__(self) -> None:
        self._waited, self._cpu = _waited_s(), time.process_time()
        self._begun = time.perf_counter()

    def read(self) -> tuple[float, float]:
        passed, cpu = time.perf_counter() - self._begun, time.process_time() - self._cpu
        return cpu, max(cpu, passed - (_waited_s() - self._waited))


def often(call: Callable[[], Any], seconds: float, least: int = 1) -> int:
    """Call ``call`` for ``seconds``, and at least ``least`` times. Return the number of calls."""
    until, calls = time.perf_counter() + seconds, 0
    while calls < least or time.perf_counter() < until:
        call()
        calls += 1
    return calls


def repeat(call: Callable[[], Any], seconds: float) -> Iterator[tuple[float, float]]:
    """Divide ``seconds`` into ``_REPEATS`` equal parts, and for each part yield the mean CPU time
    and the mean wall-clock time of a call."""
    call()
    for _ in range(_REPEATS):
        clock, calls = Clock(), often(call, seconds / _REPEATS)
        cpu, passed = clock.read()
        yield cpu / calls, passed / calls


# ---- in this process


def _measure_env(subject: Subject, found: Measured, seconds: float) -> None:
    """Measure how long a reset and a step of one env take, and the spread of the steps' times."""
    with contextlib.closing(subject.make_env(1)()) as env:
        resets = repeat(env.reset, seconds / 4)
        found.figures["reset_s"] = [passed for _, passed in resets]
        act, step = _actions(env)
        asleep = _is_idle(act, step)
        times: list[float] = []
        until = time.perf_counter() + seconds
        while len(times) < 3 or (time.perf_counter() < until and len(times) < 20_000):
            action = act()
            if asleep:
                waited = _waited_s()
                begun = time.perf_counter()
                ended = step(action)
                passed = time.perf_counter() - begun
                times.append(max(0.0, passed - (_waited_s() - waited)))
            else:  # without idle time, a step may be shorter than a call of _waited_s
                begun = time.thread_time()
                ended = step(action)
                times.append(time.thread_time() - begun)
            if ended:
                env.reset()
    part = -(-len(times) // _REPEATS)
    parts = [times[i : i + part] for i in range(0, len(times), part)]
    found.figures["step_s"] = [statistics.fmean(each) for each in parts]
    spread = statistics.pstdev(times) / max(1e-12, statistics.fmean(times))
    found.figures["spread"] = [spread]
    middle = statistics.median(times)
    found.figures["slowest_of_100"] = [float(np.quantile(times, 0.99)) / max(1e-12, middle)]


def _is_idle(act: Callable[[], Any], step: Callable[[Any], Any]) -> bool:
    """Whether a step takes longer than its CPU time, for example because the env sleeps."""
    clock = Clock()
    for _ in range(3):
        step(act())
    cpu, passed = clock.read()
    return passed > 1.2 * cpu


def _actions(env: Any) -> tuple[Callable[[], Any], Callable[[Any], bool]]:
    """Return a function that draws an action, and a function that steps ``env``, which
    may be of any kind."""
    if isinstance(env, gymnasium.Env | gymnasium.vector.VectorEnv):

        def step(action: Any) -> bool:
            *_, terminated, truncated, _ = env.step(action)
            alone = isinstance(env, gymnasium.Env)
            return bool(alone and (terminated or truncated))

        return env.action_space.sample, step
    state = {"now": env.reset()}

    def step_torchrl(action: TensorDictBase) -> bool:
        stepped = env.step(action)
        state["now"] = stepped["next"]
        return bool(stepped["next", "done"].any())

    return lambda: env.rand_action(state["now"].clone()), step_torchrl


def _measure_steps(subject: Subject, found: Measured, seconds: float) -> TensorDict:
    """Measure one process with more and more envs, and return a rollout ``[1, T]``.

    Stops at the first number of envs whose step takes too long to be repeated.
    """
    step_s = statistics.median(found.figures["step_s"])
    rows: TensorDict | None = None
    idle: list[float] = []
    for envs in NATIVE_ENVS if subject.native else ENVS:
        if rows is not None and envs * step_s * _REPEATS > 3 * seconds:
            break
        steps = max(1, min(64, int(seconds / _REPEATS / (envs * step_s))))
        with RPCBatchedCollector(
            subject.make_env(envs),
            subject.policy,
            num_envs=1 if subject.native else envs,  # a vector env counts as one
            frames_per_batch=envs * steps,
            categorical_action_encoding=True,
        ) as collector:
            batch = collector.next()
            rows = batch[:1].clone() if rows is None else rows
            repeats = list(repeat(collector.next, seconds))
        found.step_cpu[envs] = [cpu / steps for cpu, _ in repeats]
        idle = [max(0.0, passed - cpu) / steps / envs for cpu, passed in repeats]
        if envs == 1:
            first = idle
    # A vector env may step its envs concurrently, so the idle time with the most envs is used.
    found.figures["idle_s"] = idle if subject.native else first
    assert rows is not None
    found.figures["frame_bytes"] = [sum(v.nbytes for v in rows.values(True, True)) / rows.numel()]
    return rows


def _measure_policy(subject: Subject, rows: TensorDict, found: Measured, seconds: float) -> None:
    policy = subject.policy
    if policy is None:
        return
    for size in (1, 16, 256):
        batch = rows.reshape(-1)[:1].expand(size).clone().exclude("next", "action")
        with torch.no_grad():
            # Measure briefly, because this figure is only shown. Predictions do not use it, because
            # the times of steps include the policy.
            repeats = repeat(functools.partial(policy, batch), seconds / 10)
            found.policy[size] = [cpu for cpu, _ in repeats]


def _measure_update(subject: Subject, rows: TensorDict, found: Measured, seconds: float) -> None:
    """Measure a step of Adam for the subject's networks, unless the user stated its duration."""
    if subject.update_s is not None:
        found.figures["update_s"] = [subject.update_s]
        return
    flat = [v.reshape(len(v), -1) for v in _observations(rows.reshape(-1)[:1])]
    inputs = max(1, sum(v.shape[1] for v in flat))
    networks = nn.ModuleList(
        nn.Sequential(*_layers(inputs, subject.hidden, 8)) for _ in range(subject.networks)
    )
    batch = torch.randn(subject.batch_size, inputs)
    optimizer = torch.optim.Adam(networks.parameters())

    def update() -> None:
        optimizer.zero_grad()
        torch.stack([network(batch).square().mean() for network in networks]).sum().backward()
        optimizer.step()

    found.figures["update_s"] = [cpu for cpu, _ in repeat(update, seconds / 2)]


def _observations(rows: TensorDictBase) -> list[torch.Tensor]:
    """Return the values that exist both before and after a step, except flags."""
    following = rows["next"]
    return [
        value
        for key, value in rows.items(True, True)
        if key in following.keys(True) and value.dtype != torch.bool
    ]


# ---- with another process


class Blank(gymnasium.Env):
    """An env that returns observations of zeros without any delay."""

    def __init__(self, observations: gymnasium.Space, actions: gymnasium.Space) -> None:
        self.observation_space, self.action_space = observations, actions
        self._seen = gymnasium.vector.utils.create_empty_array(observations, n=1, fn=np.zeros)
        self._seen = next(iter(gymnasium.vector.utils.iterate(observations, self._seen)))

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return self._seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._seen, 0.0, False, False, {}


class Stamped:
    """A postproc that sends the same rows each time, with the CPU time that its process has
    used."""

    def __init__(self, rows: TensorDict) -> None:
        self._rows = rows

    def __call__(self, rollout: TensorDictBase) -> TensorDictBase:
        self._rows[_STAMP] = torch.full((*self._rows.shape, 1), time.process_time()).double()
        return self._rows


def _measure_messages(
    subject: Subject,
    rows: TensorDict,
    found: Measured,
    seconds: float,
    timeout_s: float,
    fork_server: ForkServer | None,
) -> None:
    """Measure what small messages, large messages, new weights and requests to the policy cost the
    worker and the learner."""
    begun = time.perf_counter()
    blank = functools.partial(
        Blank, gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(2)
    )
    roles = {"learner": 1, "collector": 1}
    with local_cluster(roles, timeout_s=timeout_s, fork_server=fork_server) as session:
        collect = functools.partial(
            RPCBatchedCollector, session=session, readiness=FirstReady(), timeout_s=timeout_s,
            frames_per_batch=1, categorical_action_encoding=True,
        )  # fmt: skip
        small = rows[:, :1].clone()
        with collect(blank, None, max_policy_lag=1, postproc=Stamped(small)) as collector:
            collector.next()
            found.figures["startup_s"] = [time.perf_counter() - begun]
            few = _messages(collector, seconds)
        frame_bytes = found.figures["frame_bytes"][0]
        count = int(max(2, min(_LARGE_BYTES // frame_bytes, 1 << 16)))
        large = small.expand(1, count).clone()
        with collect(blank, None, max_policy_lag=1, postproc=Stamped(large)) as collector:
            many = _messages(collector, seconds)
        size = (count - 1) * (frame_bytes + 8)  # each row also has a stamp of 8 bytes
        for side in ("worker", "learner"):
            found.figures[f"message_{side}_s"] = few[side]
            found.figures[f"byte_{side}_s"] = [
                max(0.0, b - a) / size for a, b in zip(few[side], many[side], strict=True)
            ]
        with collect(blank, _weights(subject), postproc=Stamped(small)) as collector:
            _measure_rounds(collector, few, found, seconds)
        options: dict[str, Any] = {
            "env_processes": _ASKING,
            "frames_per_batch": _ASKING,
            "max_policy_lag": 1,
        }
        with collect(blank, None, **options) as collector:
            _measure_processes(collector, found, seconds)
        _measure_requests(subject, collect, found, seconds)


def _messages(collector: RPCBatchedCollector, seconds: float) -> dict[str, list[float]]:
    """Return the CPU time per message, of the learner and of the worker."""
    sides: dict[str, list[float]] = {"learner": [], "worker": []}
    stamp = float(collector.next()[_STAMP].flatten()[0])
    for _ in range(_REPEATS):
        clock, until, messages = Clock(), time.perf_counter() + seconds / _REPEATS, 0
        while messages < 3 or time.perf_counter() < until:
            batch = collector.next()
            messages += 1
        sides["learner"].append(clock.read()[0] / messages)
        now = float(batch[_STAMP].flatten()[0])
        sides["worker"].append((now - stamp) / messages)
        stamp = now
    return sides


def _weights(subject: Subject) -> nn.Module:
    """Return a module that has as many weights as the policy, but computes almost nothing."""
    parameters = () if subject.policy is None else subject.policy.parameters()
    count = max(1, sum(each.numel() for each in parameters))
    return TensorDictModule(Heavy(count), in_keys=["observation"], out_keys=["action"])


class Heavy(nn.Module):
    """A module that has many weights and computes almost nothing."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(weights))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation[..., 0].long()


def _measure_rounds(
    collector: RPCBatchedCollector, few: dict[str, list[float]], found: Measured, seconds: float
) -> None:
    """Measure a round without policy lag, and the CPU time that new weights add to the round.

    The latency is the time of a round minus the CPU time of worker and learner.
    """
    plain = list(repeat(collector.next, seconds))
    both = [sum(parts) for parts in zip(few["learner"], few["worker"], strict=True)]
    found.figures["latency_s"] = [
        max(0.0, passed - own) for (_, passed), own in zip(plain, both, strict=True)
    ]

    def updated() -> None:
        collector.update_policy_weights_()
        collector.next()

    new = list(repeat(updated, seconds))
    found.figures["broadcast_s"] = [
        max(0.0, b - a) for (a, _), (b, _) in zip(plain, new, strict=True)
    ]


def _measure_processes(collector: RPCBatchedCollector, found: Measured, seconds: float) -> None:
    """Measure the CPU time that each env process adds to a message with one step per process."""
    sides = [found.figures[f"message_{side}_s"] for side in ("worker", "learner")]
    own = sum(statistics.median(side) for side in sides)
    found.figures["process_s"] = []
    collector.next()
    for _ in range(_REPEATS):
        begun, messages = _family_cpu_s(), often(collector.next, seconds / _REPEATS, least=3)
        each = ((_family_cpu_s() - begun) / messages - own) / _ASKING
        found.figures["process_s"].append(max(0.0, each))


def _family_cpu_s() -> float:
    """Return the CPU time so far of this process and all its living descendants."""
    parents, used = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if (words := proc.stat(pid)) is not None:
            parents[pid] = int(words[proc.PARENT])
            used[pid] = int(words[proc.USER]) + int(words[proc.SYSTEM])
    family, grown = {os.getpid()}, True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in family} - family
        family |= children
        grown = bool(children)
    return sum(used.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def _measure_requests(subject: Subject, collect: Any, found: Measured, seconds: float) -> None:
    """Measure requests to a policy at the learner. The envs step without delay, and each step sends
    one request.

    The latency of a request is measured with a single process. The CPU time of a request is
    measured with several env processes, whose requests the learner joins.
    """
    found.figures["request_s"] = found.figures["request_latency_s"] = [0.0]
    spaces = _spaces(subject.make_env(1))
    if spaces is None or subject.policy is None:
        return
    blank = functools.partial(Blank, *spaces)
    steps, own = 16, statistics.median(found.figures["message_learner_s"])
    both = own + statistics.median(found.figures["message_worker_s"])
    for processes in (0, _ASKING):
        frames = steps * max(1, processes)
        with collect(
            blank, subject.policy, frames_per_batch=frames, inference="learner", env_groups=1,
            env_processes=processes,
        ) as collector:  # fmt: skip
            repeats = list(repeat(collector.next, seconds))
        if processes:
            found.figures["request_s"] = [max(0.0, cpu - own) / frames for cpu, _ in repeats]
        else:
            found.figures["request_latency_s"] = [
                max(0.0, passed - both) / steps for _, passed in repeats
            ]


# ---- building the subject


def _layers(inputs: int, hidden: Sequence[int], outputs: int) -> list[nn.Module]:
    found: list[nn.Module] = []
    for width in hidden:
        found += [nn.Linear(inputs, width), nn.Tanh()]
        inputs = width
    return [*found, nn.Linear(inputs, outputs)]


def _spaces(make_env: Callable[[], Any]) -> tuple[gymnasium.Space, gymnasium.Space] | None:
    """Return the spaces of one env's observations and actions, or None for an env of TorchRL."""
    with contextlib.closing(make_env()) as env:
        if isinstance(env, gymnasium.vector.VectorEnv):
            return env.single_observation_space, env.single_action_space
        if isinstance(env, gymnasium.Env):
            return env.observation_space, env.action_space
    return None


def small_policy(make_env: Callable[[], Any], hidden: Sequence[int] = (64, 64)) -> nn.Module | None:
    """Return a few layers if observations are vectors, else None (random actions)."""
    seen, acts = _spaces(make_env) or (None, None)
    if not isinstance(seen, gymnasium.spaces.Box) or len(seen.shape) != 1:
        return None
    last: nn.Module
    if isinstance(acts, gymnasium.spaces.Discrete):
        outputs, last = int(acts.n), nn.Identity()
    elif isinstance(acts, gymnasium.spaces.Box) and len(acts.shape) == 1:
        outputs, last = acts.shape[0], nn.Tanh()
    else:
        return None
    layers = nn.Sequential(*_layers(seen.shape[0], hidden, outputs), last)
    acting = _Acting(layers, isinstance(acts, gymnasium.spaces.Discrete))
    return TensorDictModule(acting, in_keys=["observation"], out_keys=["action"])


class _Acting(nn.Module):
    def __init__(self, layers: nn.Module, discrete: bool) -> None:
        super().__init__()
        self.layers, self.discrete = layers, discrete

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        out = self.layers(observation.float())
        return out.argmax(-1) if self.discrete else out


def named(text: str) -> Any:
    """Return the object ``package:name``.

    Raises:
        ConfigurationError: there is no such object.
    """
    import importlib

    module, _, name = text.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"got {text!r}, expected package:name of an object that can be imported: {error}"
        ) from error


def envs_of(text: str) -> tuple[Callable[[int], Callable[[], Any]], bool]:
    """Return ``make_env`` and ``native`` for a :class:`Subject`.

    A gymnasium id that has its own vectorized form (such as CartPole) is used in that form.

    Raises:
        ConfigurationError: ``text`` is neither a gymnasium id nor ``package:make``.
    """
    images = image_factory(text)
    if images is not None:
        try:
            images().close()
        except Exception as error:
            raise ConfigurationError(
                f"--env: got {text!r}, which cannot be built here: {error}"
            ) from error
        return lambda envs: images, False
    spec, reason = None, ""
    try:
        spec = gymnasium.spec(text)
    except Exception as error:  # gymnasium raises many kinds of errors for an unknown name
        reason = f" ({error})"
    if spec is None and ":" in text:
        make = named(text)
        with contextlib.closing(make()) as env:
            if isinstance(env, gymnasium.vector.VectorEnv) and env.num_envs > 1:
                raise ConfigurationError(
                    f"--env {text}: the function returned a vector env of {env.num_envs} envs, "
                    "expected a single env: let the function make one env"
                )
        return lambda envs: make, False
    if spec is None:
        raise ConfigurationError(
            f"--env: got {text!r}, expected a gymnasium id or package:make{reason}"
        )
    if spec.vector_entry_point is not None:
        return functools.partial(_own_vector_env, text), True
    return lambda envs: functools.partial(gymnasium.make, text), False


def _own_vector_env(text: str, envs: int) -> Callable[[], Any]:
    """Return a function that makes a vector env, or a plain env if ``envs`` is 1, because a vector
    env pays only for several envs."""
    if envs == 1:
        return functools.partial(gymnasium.make, text)
    mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
    return functools.partial(gymnasium.make_vec, text, envs, mode)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))

"""The processes that learn together: which processes these are, what they agree on, and which are
missing."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    RemoteError,
    TorchRLDistError,
)
from ..runtime import World, current_session, proc
from ..runtime.awake import awake, check_timeout, start_clock
from ..runtime.store import AnsweringStore, StoreSilent
from ..runtime.world import is_seen_here, process_stamp

# After this many seconds, a waiting rank tells the other ranks that it waits, and checks whether
# they have failed.
_SLICE_S = 1.0
# In a meeting, the ranks of a group check that they make the same call (``Ranks._meet``). Each rank
# sends this many numbers: a checksum of its call, followed by values.
_BLOCK = 64
# Maps each group to the text on which its ranks agreed in their last meeting. This text determines
# the size of tensors. The ranks may sum tensors of this size without another meeting.
_agreed: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
# Maps each group whose ranks are on several nodes to a second group of the same ranks, for sums.
_groups_of_sums: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
# To sum a tensor between nodes, each rank sends each other rank either the whole tensor (one round
# trip) or a part of the tensor (two round trips). A rank sends a whole tensor of at most
# _MOST_DIRECT_BYTES if sending parts would save at most _DIRECT_BYTES.
_DIRECT_BYTES, _MOST_DIRECT_BYTES = 2**18, 2**24
# After a failed collective, a rank waits this long for the other ranks to report that they wait,
# too.
_GRACE_S = 3.0
_STOPPED = ", stopped"
# Part of errors that a missing call may have caused. A missing call is noticed only later, because
# calls of different ranks are matched only by their order.
_UNEQUAL = (
    "the ranks made different numbers of calls: a rank that skips an update or leaves its loop "
    "must ask the other ranks first, as in `if loss.ranks.any(len(buffer) < 1000): continue`"
)
_IF_ENDED = f". If a rank ended without an error, {_UNEQUAL}"


@dataclass(frozen=True)
class Rank:
    """One of the processes that learn together.

    Example:
        >>> Ranks().members[0].state()
        'running'
    """

    index: int
    host: str
    pid: int
    stamp: str

    def __str__(self) -> str:
        return f"rank {self.index} (pid {self.pid} on {self.host})"

    def state(self) -> str:
        """Return ``"running"``, ``"stopped"``, ``"gone"`` or ``"unknown"``.

        The state is unknown if the process runs on another node, or in another pid namespace (a
        container) of this node.
        """
        if self.host != socket.gethostname() or not is_seen_here(self.stamp):
            return "unknown"
        if process_stamp(self.pid) != self.stamp:
            return "gone"
        letter = proc.state(self.pid) or "Z"
        return {"T": "stopped", "t": "stopped", "Z": "gone"}.get(letter, "running")


class Ranks:
    """The ranks of a torch.distributed group, or this process alone. Use the object in one thread
    only.

    Every rank must build this object and call its methods in the same order. All methods except
    ``own``, ``seed`` and ``report`` block until every rank has made the same call, but no longer
    than ``timeout_s``. These methods raise:

    - DeadlineError after ``timeout_s`` (the error names the missing ranks, and the calls in which
      they wait instead),
    - PeerLostError if a process died,
    - RemoteError if a rank called :meth:`report` with an exception,
    - ConfigurationError if the ranks called different methods.

    If a process on another node dies while the other ranks average gradients, these ranks notice
    the death immediately. In other calls, the ranks notice such a death only at the deadline. On a
    GPU, averaging does not block the process. Instead, torch's watchdog enforces the group's own
    deadline, and its error does not name the missing ranks.

    Attributes:
        index: this process's rank in the group.
        size: how many ranks there are.
        members: all ranks, in order.
        timeout_s: the longest wait of every method.

    Raises:
        ConfigurationError: there are several processes, but no torch.distributed group.

    Example:
        >>> ranks = Ranks()  # this process alone
        >>> ranks.sums({"frames": 3.0}), ranks.any(False)
        ({'sum_over_ranks/frames': 3.0}, False)
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 300.0) -> None:
        check_timeout(timeout_s)
        if not dist.is_initialized():
            _require_one_process()
        self.timeout_s = timeout_s
        self.group = (group or dist.group.WORLD) if dist.is_initialized() else None
        self.index = 0 if self.group is None else dist.get_rank(self.group)
        self.size = 1 if self.group is None else dist.get_world_size(self.group)
        if self.index < 0:
            raise ConfigurationError(
                "this process is not a member of the group: build Ranks or DistributedLoss only on "
                "the group's ranks"
            )
        pid = os.getpid()
        me = Rank(self.index, socket.gethostname(), pid, process_stamp(pid))
        self.members: tuple[Rank, ...] = (me,)
        self._calls = self._exchanges = 0
        self._device = torch.device("cpu")
        if self.size > 1:
            start_clock()
            assert self.group is not None
            if "cpu" not in backends(self.group):
                self._device = torch.device("cuda", torch.cuda.current_device())
            store, meeting = self.group.get_group_store(), "the meeting of the ranks"
            try:
                own = f"torchrl_dist/ranks/{self.index}"
                number = AnsweringStore(store).add(own, 1, timeout_s)
            except dist.DistError as error:
                raise PeerLostError(f"{meeting}: {error}") from error
            store = dist.PrefixStore(f"torchrl_dist/ranks/number{number}", store)
            self._store = AnsweringStore(store)
            self.members = tuple(
                Rank(index, "an unknown host", 0, "") for index in range(self.size)
            )
            cards = self.exchange([me.host, me.pid, me.stamp], meeting)
            self.members = tuple(Rank(index, *card) for index, card in enumerate(cards))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes checkpoints and logs."""
        return self.index == 0

    # ---- agreement

    def exchange(self, value: Any, what: str = "an exchange") -> list[Any]:
        """Return every rank's ``value``, in rank order. Values must have JSON's types."""
        if self.size == 1:
            return [value]
        self._calls += 1
        self._exchanges += 1
        number = self._exchanges
        keys = [f"exchange/{number}/{index}" for index in range(self.size)]
        start = awake()

        def is_late() -> bool:
            return awake() - start > self.timeout_s

        def insist(function: Callable[..., Any], *args: Any) -> Any:
            while True:
                try:
                    return function(*args)
                except StoreSilent:
                    if is_late():
                        raise

        try:
            insist(self._store.set, keys[self.index], json.dumps([what, value]))
            with self._waiting(what) as say_so:
                while not self._store.wait(keys, _SLICE_S):
                    with contextlib.suppress(*(() if is_late() else (StoreSilent,))):
                        say_so()
                        self._raise_reported(what)
                        # Look for ended ranks first and for values afterwards, because a rank may
                        # set its value and then end.
                        gone = {who for who in self.members if who.state() == "gone"}
                        absent = self._absent(keys)
                        if gone.intersection(absent) or is_late():
                            raise self._missing_error(absent, what, late=True)
            told = [json.loads(text) for text in insist(self._store.multi_get, keys)]
            # Delete an earlier value. All ranks have read it, because all have begun this exchange.
            if number > 2:
                with contextlib.suppress(StoreSilent):
                    self._store.delete_key(f"exchange/{number - 2}/{self.index}")
        except dist.DistError as error:
            raise self._lost_error(what, error) from error
        for index, (place, _) in enumerate(told):
            if place != told[0][0]:
                raise ConfigurationError(_apart(0, told[0][0], index, place))
        return [value for _, value in told]

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on some rank. All ranks get the same answer.

        Call this before every update, for example ``if ranks.any(len(buffer) < 1000): continue``.
        Otherwise, if a rank skips an update or leaves its loop (for example after a signal), the
        other ranks wait for its gradients.
        """
        what = "a call of ranks.any()"
        if self._device.type != "cpu":  # a sum on the GPU would wait for all work queued there
            return any(self.exchange(bool(flag), what))
        return self.add_up(what, [bool(flag)])[0] > 0

    def on_first(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)`` on rank 0, for example to write a checkpoint.

        Returns:
            The result on rank 0, None on the other ranks.

        Raises:
            RemoteError: on the other ranks, if the function raised on rank 0. Rank 0 gets the
                exception itself.
        """
        what = "a call of ranks.on_first()"
        if not self.is_first:
            failure = self.exchange(None, what)[0]
            if failure is not None:
                raise self._remote_error(failure)
            return None
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            self.exchange(self._description(error), what)
            raise
        self.exchange(None, what)
        return result

    # ---- metrics

    def sums(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return each metric's sum over the ranks that have it, as ``"sum_over_ranks/NAME"``."""
        gathered = self._gathered(metrics)
        return {f"sum_over_ranks/{name}": sum(values) for name, values in gathered.items()}

    def means(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return each metric's mean over the ranks that have it, as ``"mean_over_ranks/NAME"``."""
        gathered = self._gathered(metrics)
        return {
            f"mean_over_ranks/{name}": sum(values) / len(values)
            for name, values in gathered.items()
        }

    def own(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return this rank's values, as ``"rank2/NAME"``."""
        return {f"rank{self.index}/{name}": value for name, value in metrics.items()}

    def _gathered(self, metrics: Mapping[str, float]) -> dict[str, list[float]]:
        plain = {name: float(value) for name, value in metrics.items()}
        gathered: dict[str, list[float]] = {}
        for told in self.exchange(plain, "the metrics"):
            for name, value in told.items():
                gathered.setdefault(name, []).append(value)
        return gathered

    def seed(self, seed: int) -> int:
        """Seed the generators of Python, NumPy and torch in this process.

        Each rank gets a different seed, because with equal seeds all ranks would draw the same
        random numbers. In every run with the same ``seed``, a rank gets the same seed.

        Returns:
            The seed of this rank, for environments.
        """
        own = int(np.random.SeedSequence([seed, self.index]).generate_state(1)[0])
        random.seed(own)
        np.random.seed(own)
        torch.manual_seed(own)
        return own

    # ---- failures

    def report(self, error: BaseException) -> None:
        """Send ``error`` to the ranks that wait for this rank. Does not block or raise."""
        if self.size > 1:
            with contextlib.suppress(dist.DistError):
                # Report only the first failure, because later errors are consequences of it.
                if not self._store.check("failure"):
                    self._store.set("failure", json.dumps(self._description(error)))

    def _description(self, error: BaseException) -> list[Any]:
        if type(error) in (DeadlineError, PeerLostError):
            # An error of these types is usually about a third rank, so this rank's traceback would
            # not help.
            return [self.index, str(error), type(error).__name__]
        message = traceback.format_exception_only(error)[-1].strip()
        return [self.index, message, "".join(traceback.format_exception(error))]

    def _remote_error(self, description: list[Any]) -> Exception:
        index, message, trace = description
        rank = self.members[index]
        for kind in (DeadlineError, PeerLostError):
            if trace == kind.__name__:
                return kind(f"{message} (reported by {rank})")
        return RemoteError(message, peer=f"rank {index}", host=rank.host, remote_traceback=trace)

    def _raise_reported(self, what: str = "") -> None:
        """Raise the failure that another rank has reported.

        Also raise if the next rank's call with the same number is not ``what``. Each rank checks
        only the next rank, because if any two ranks wait for different things, so do two
        neighbouring ranks.
        """
        reported = self._store.check("failure")
        other = (self.index + 1) % self.size
        theirs = self._store.found(self._waiting_key(other)) if what else None
        if theirs not in (None, "", what):
            raise ConfigurationError(_apart(self.index, what, other, str(theirs)))
        if reported:
            raise self._remote_error(json.loads(self._store.get("failure")))

    # ---- collectives

    def all_reduce(
        self,
        tensor: Tensor,
        what: str,
        *,
        details: str = "",
        compare: Callable[[], None] = lambda: None,
        agreed: str = "",
    ) -> None:
        """Sum ``tensor`` over the ranks, in place.

        Takes the arguments and raises the errors of :meth:`add_up`. The tensors of all ranks must
        have the same shape and type.

        Args:
            agreed: the ``agreed`` of an earlier ``add_up`` whose ``details`` determine the shape
                and type of ``tensor``. If the ranks have not met since that call, this call needs
                no meeting.
        """
        if self.group is None or self.size == 1:
            return
        if not agreed or _agreed.get(self.group) != agreed:
            # Meet first, because gloo would abort the process if the ranks' tensors had different
            # sizes.
            self._meet(what, f"{details} {tensor.numel()} {tensor.dtype}", [], compare)
            _agreed[self.group] = agreed
        self._sum(tensor, what)

    def add_up(
        self,
        what: str,
        values: Sequence[float],
        *,
        details: str = "",
        compare: Callable[[], None] = lambda: None,
        agreed: str = "",
    ) -> list[float]:
        """Return the sums of ``values`` over the ranks.

        Args:
            what: names this call in errors.
            details: a text that must be equal on all ranks. The number of values must be equal,
                too.
            compare: called on all ranks if ``details`` differ, to raise a more precise error.
            agreed: a part of ``details``. Pass the same text to a later ``all_reduce``, so that the
                ranks need not meet again.

        Raises:
            ConfigurationError: the ranks differ in ``what``, ``details`` or the number of values.
        """
        if self.group is None or self.size == 1:
            return list(values)
        sums: list[float] = []
        details += f" {len(values)}"
        for start in range(0, max(len(values), 1), _BLOCK - 1):
            part = values[start : start + _BLOCK - 1]
            sums += self._meet(what, details, part, compare)
        _agreed[self.group] = agreed
        return sums

    def _meet(
        self,
        what: str,
        details: str,
        values: Sequence[float],
        compare: Callable[[], None] = lambda: None,
    ) -> list[float]:
        """Sum a block of fixed size, after checking that all ranks make the same call.

        On the CPU, each rank sends its block directly to every other rank, so that the blocks
        arrive after one round trip. Between nodes, a round trip takes longer than sending the bytes
        of a small block. ``_sum`` uses another collective or another group, because gloo would
        otherwise mistake one rank's block for a part of another rank's tensor.
        """
        assert self.group is not None
        code = zlib.crc32(f"{what} {details}".encode())
        block = torch.zeros(_BLOCK, dtype=torch.float64, device="cpu")
        block[: 1 + len(values)] = torch.tensor([code, *values], dtype=torch.float64, device="cpu")
        _agreed.pop(self.group, None)
        codes, *sums = self._from_each(block, what).T.tolist()
        if any(other != code for other in codes):
            # All ranks see the difference, so all ranks call exchange().
            told = self.exchange(details, what)
            compare()
            other = next(index for index, theirs in enumerate(told) if theirs != details)
            raise ConfigurationError(
                f"at {what} this rank has {details}, and rank {other} has {told[other]}: all "
                "ranks must make the same calls in the same order"
            )
        return [sum(each) for each in sums[: len(values)]]

    def _from_each(self, block: Tensor, what: str) -> Tensor:
        """Return every rank's block, as [size, len(block)]."""
        assert self.group is not None
        blocks = block.repeat(self.size, 1)
        if self._device.type == "cpu":
            return self._to_each(blocks, what, self.group)
        self._calls += 1
        received = blocks.to(self._device)
        dist.all_gather_into_tensor(received, received[self.index].clone(), group=self.group)
        return received

    def _to_each(self, rows: Tensor, what: str, group: dist.ProcessGroup) -> Tensor:
        """Send row ``i`` of ``rows`` to rank ``i``, and return what the ranks sent to this rank."""
        received, options = torch.empty_like(rows), dist.AllToAllOptions()
        self._wait_for(lambda: group.alltoall_base(received, rows, [], [], options), options, what)
        return received

    def _sum(self, tensor: Tensor, what: str) -> None:
        assert self.group is not None
        group = self.group
        if tensor.device.type != "cpu":
            self._calls += 1
            dist.all_reduce(tensor, group=group)
        elif len({who.host for who in self.members}) > 1:
            self._sum_from_afar(tensor.view(-1), what)
        else:
            options = dist.AllreduceOptions()
            self._wait_for(lambda: group.allreduce([tensor], options), options, what)

    def _sum_from_afar(self, tensor: Tensor, what: str) -> None:
        """Sum the tensors of ranks on several nodes. The sum takes one round trip, or two for a
        large tensor. gloo's own ring algorithm would need two round trips per rank."""
        group, size = self._group_of_sums(what), self.size
        more_bytes = (size - 2) * tensor.nbytes
        if more_bytes <= _DIRECT_BYTES and tensor.nbytes <= _MOST_DIRECT_BYTES:
            received = self._to_each(tensor.expand(size, -1).contiguous(), what, group)
            torch.sum(received, 0, out=tensor)
            return
        parts = tensor.new_zeros(size, -(-tensor.numel() // size))
        parts.view(-1)[: tensor.numel()] = tensor
        own = self._to_each(parts, what, group).sum(0, dtype=tensor.dtype)
        received = self._to_each(own.expand(size, -1).contiguous(), what, group)
        tensor.copy_(received.view(-1)[: tensor.numel()])

    def _group_of_sums(self, what: str) -> dist.ProcessGroup:
        """Return a second group of the same ranks, for sums.

        If meetings and sums used the same group, gloo would confuse the block that a rank sends in
        a meeting with a part of another rank's tensor, and abort.
        """
        assert self.group is not None
        if self.group not in _groups_of_sums:
            try:
                _groups_of_sums[self.group] = dist.new_group(
                    dist.get_process_group_ranks(self.group),
                    timeout=timedelta(seconds=self.timeout_s),
                    backend="gloo",
                    use_local_synchronization=True,
                )
            except RuntimeError as error:  # a rank has died or stopped since the meeting
                raise self._explanation(what, error, late=True) from error
        return _groups_of_sums[self.group]

    def _wait_for(self, begin: Callable[[], dist.Work], options: Any, what: str) -> None:
        """Begin a collective on the CPU and wait for its end."""
        self._calls += 1
        options.timeout = timedelta(seconds=self.timeout_s)
        start = time.monotonic()  # gloo measures its own deadline on this clock
        try:
            work = begin()
            with self._waiting(what) as say_so:
                while not _done(work):
                    say_so()
                    with contextlib.suppress(dist.DistError):
                        self._raise_reported(what)
                work.wait()
        except TorchRLDistError:  # reported by another rank
            raise
        except RuntimeError as error:
            late = time.monotonic() - start >= self.timeout_s
            raise self._explanation(what, error, late=late) from error

    def _waiting_key(self, index: int) -> str:
        return f"waiting/{self._calls}/{index}"

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[Callable[[], None]]:
        """Yield a function that announces that this rank waits for ``what``.

        The announcement is withdrawn if the block ends without an error. The first rank that gives
        up reads the announcements of all ranks, to learn which ranks wait and which are missing.
        """
        keys = (f"place/{self.index}", self._waiting_key(self.index))
        said = False

        def say_so() -> None:
            nonlocal said
            said = True
            with contextlib.suppress(dist.DistError):
                for key in keys:
                    self._store.set(key, what)

        yield say_so
        if said:
            with contextlib.suppress(dist.DistError):
                for key in keys:
                    self._store.delete_key(key)

    def _explanation(self, what: str, error: Exception, *, late: bool) -> Exception:
        keys = [self._waiting_key(index) for index in range(self.size)]
        try:
            self._store.set(keys[self.index], "")
            give_up = awake() + _GRACE_S
            while not self._store.wait(keys, _SLICE_S / 4):
                self._raise_reported()
                absent = self._absent(keys)
                cannot_come = all(who.state() in ("stopped", "gone") for who in absent)
                if cannot_come or awake() > give_up:
                    break
            self._raise_reported()
            absent = self._absent(keys)
            if absent:
                return self._missing_error(absent, what, late=late)
        except TorchRLDistError as reported:
            return reported
        except dist.DistError as lost:
            return self._lost_error(what, lost)
        return PeerLostError(
            f"{what}: the connection between the ranks failed ({error}); see the "
            "output of the other ranks"
        )

    def _lost_error(self, what: str, error: dist.DistError) -> Exception:
        """Return the error to raise if the store's process has died, or does not answer because it
        is stopped. Without the store, only this node's kernel can tell which ranks died or are
        stopped."""
        give_up = awake() + _GRACE_S
        while True:
            states = {who: who.state() for who in self.members}
            stopped = [who for who, state in states.items() if state == "stopped"]
            gone = [who for who, state in states.items() if state == "gone"]
            if stopped or gone or awake() > give_up:
                break
            time.sleep(0.05)  # the connections of a dying process close before the process is gone
        if gone:
            return PeerLostError(
                f"{', '.join(map(str, gone))} died or left before {what} ({error}){_IF_ENDED}"
            )
        if stopped:
            return DeadlineError(
                f"{', '.join(map(str, stopped))} (stopped) did not reach {what} within "
                f"{self.timeout_s:g} s ({error}); continue these processes (SIGCONT), "
                "and start the job again"
            )
        return PeerLostError(
            f"{what}: {error}. The store is in the launcher or in {self.members[0]}: check whether "
            "both processes are alive"
        )

    def _absent(self, keys: list[str]) -> list[Rank]:
        pairs = zip(self.members, keys, strict=True)
        return [who for who, key in pairs if not self._store.check(key)]

    def _missing_error(self, absent: list[Rank], what: str, *, late: bool) -> Exception:
        states = [(who, who.state()) for who in absent]
        gone = [who for who, state in states if state == "gone"]
        if gone or not late:
            names = ", ".join(map(str, gone or absent))
            return PeerLostError(f"{names} died or left before {what}{_IF_ENDED}")
        # stopped ranks first, because they are the cause
        states.sort(key=lambda each: each[1] != "stopped")
        places = [self._place(who, state) for who, state in states]
        names = ", ".join(f"{who}{place}" for (who, _), place in zip(states, places, strict=True))
        may_be_ahead = any(place != _STOPPED for place in places)
        return DeadlineError(
            f"{names} did not reach {what} within {self.timeout_s:g} s; the other ranks wait there"
            + (f". Perhaps {_UNEQUAL}" if may_be_ahead else "")
        )

    def _place(self, who: Rank, state: str) -> str:
        if state == "stopped":
            return _STOPPED
        key = f"place/{who.index}"
        if not self._store.check(key):
            return ""
        return f", which waits at {self._store.get(key)},"


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of each device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
    config = str(dist.get_backend_config(group))
    return dict(entry.split(":") for entry in config.split(","))


def _apart(index: int, what: str, other: int, theirs: str) -> str:
    (index, what), (other, theirs) = sorted([(index, what), (other, theirs)])
    return (
        f"rank {index} is at {what} while rank {other} is at {theirs}: all ranks must make the "
        f"same calls in the same order. Perhaps {_UNEQUAL}"
    )


def _done(work: dist.Work) -> bool:
    """Wait for ``work``, at most _SLICE_S. Return whether it has ended, with or without an error.

    Python handles signals only between two such waits.
    """
    try:
        work.wait(timedelta(seconds=_SLICE_S))
    except RuntimeError:
        return work.is_completed()
    return True


def _require_one_process() -> None:
    try:
        session = current_session()
        count = len(session.of_role(session.role))
    except ConfigurationError:  # there is no session
        count = World.from_env().world_size
    if count > 1:
        raise ConfigurationError(
            f"{count} processes were started to learn together, but this process has no "
            "torch.distributed group. Call torch.distributed.init_process_group(), or enter "
            'session(..., process_group="gloo"), before the loss is distributed.'
        )

"""A message transport. Only this module uses torch.distributed.rpc.

A message consists of a kind, bytes and tensors. The answer is a tuple that RPC can send. Exceptions
of user code are sent inside answers, so an RPC error always means that the transport failed.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from ..errors import ConfigurationError, DeadlineError, PeerLostError
from .awake import awake, call_at, forget

Answer = tuple[Any, ...]
Handler = Callable[[str, bytes, list[Any], Callable[[Answer], None]], None]

_SCHEME = "torchrl-dist"
# Four threads suffice, because a request only passes work to a pool.
_SERVER_THREADS = 4
_LOG_ERRORS_ONLY = 2

_handler: Handler | None = None
_store_for_init: dist.Store | None = None


class Transport:
    """A TensorPipe agent with a fixed set of ranks. At most one per process.

    Args:
        store: a store that only this session uses (a ``PrefixStore``).
        names: the unique names of all ranks, different in every session of a process.
        handler: called as ``handler(kind, body, tensors, answer)`` in an RPC thread for every
            message. The handler must not block, and must call ``answer`` exactly once, in any
            thread.

    Blocks until every rank is connected, at most about ``timeout_s``.

    Raises:
        DeadlineError, PeerLostError: not every rank connected.
    """

    def __init__(
        self,
        store: dist.Store,
        names: Sequence[str],
        global_rank: int,
        *,
        one_node: bool,
        timeout_s: float,
        handler: Handler,
    ) -> None:
        global _handler
        if rpc._is_current_rpc_agent_set():
            raise ConfigurationError(
                "torch.distributed.rpc is already initialized in this process, but a session must "
                "initialize it itself; call torch.distributed.rpc.shutdown() first"
            )
        _handler = handler
        self._log_level = _find_log_level()
        self._logged: int | None = None
        try:
            _init_rpc(store, names, global_rank, one_node, timeout_s)
        except RuntimeError as error:
            self.close()
            known = _translate(error, timeout_s)
            if isinstance(known, DeadlineError):
                known = DeadlineError(
                    f"the processes of the session did not all connect: {known}; check that all "
                    "of them run, or raise timeout_s"
                )
            raise known from error
        except BaseException:
            self.close()
            raise
        self._workers = [rpc.get_worker_info(name) for name in names]

    def send(
        self,
        to_rank: int,
        kind: str,
        body: bytes,
        tensors: list[torch.Tensor],
        *,
        timeout_s: float | None,
        done: Callable[[Answer | None, Exception | None], None],
    ) -> None:
        """Send a message without waiting for the answer.

        ``done(answer, error)`` is called once, in an RPC thread, in the clock's thread or in this
        thread. ``error`` is a DeadlineError or a PeerLostError. With ``timeout_s=None`` there is no
        deadline.
        """
        try:
            future = rpc.rpc_async(
                self._workers[to_rank],
                _receive,
                args=(kind, body, tensors),
                # no timeout, because RPC's own timeouts keep running while this process is
                # stopped
                timeout=0,
            )
        except RuntimeError as error:
            done(None, _translate(error, timeout_s))
            return
        key: int | None = None
        if timeout_s is not None:
            late = DeadlineError(f"no answer within {timeout_s} s")
            key = call_at(awake() + timeout_s, lambda: done(None, late))

        def arrived(future: torch.futures.Future[Any]) -> None:
            if key is not None and not forget(key):
                return
            try:
                answer = future.wait()
            except Exception as error:  # a RuntimeError whose text is from C++
                done(None, _translate(error, timeout_s))
            else:
                done(answer, None)

        future.add_done_callback(arrived)

    def expect_broken_connections(self) -> None:
        """Let C++ log only errors from now until ``close``. Called when the job ends.

        TensorPipe warns twice about each peer whose agent closes before the agent of this process.
        A graceful shutdown would avoid the warnings, but would wait for dead peers and all running
        calls.
        """
        if self._log_level is not None and self._logged is None:
            self._logged, self._log_level.value = self._log_level.value, _LOG_ERRORS_ONLY

    def close(self) -> None:
        """Close all connections now, without waiting for other processes."""
        global _handler
        self.expect_broken_connections()
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
        _handler = None
        if self._log_level is not None and self._logged is not None:
            self._log_level.value, self._logged = self._logged, None


def _find_log_level() -> ctypes.c_int | None:
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # this build has another logger, so its warnings are printed
        return None


@rpc.functions.async_execution
def _receive(kind: str, body: bytes, tensors: list[Any]) -> torch.futures.Future[Any]:
    answer: torch.futures.Future[Any] = torch.futures.Future()
    handler = _handler
    if handler is None:
        raise ConnectionError("eof: the session of this process is closed")
    handler(kind, body, tensors, answer.set_result)
    return answer


def _translate(error: Exception, timeout_s: float | None) -> Exception:
    text = str(error)
    if any(words in text.lower() for words in ("set timeout", "timed out", "wait timeout")):
        return DeadlineError(f"no answer within {timeout_s} s: {text.splitlines()[0]}")
    return PeerLostError(text.splitlines()[0] if text else repr(error))


def _init_rpc(
    store: dist.Store, names: Sequence[str], global_rank: int, one_node: bool, timeout_s: float
) -> None:
    global _store_for_init
    _register_scheme()
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_SERVER_THREADS,
        rpc_timeout=timeout_s,
        init_method=f"{_SCHEME}://session",
        # Measured on two cores, torch 2.13. TensorPipe's shm transport is not used: it answers in
        # 350 us instead of 650 us, but its event loop uses a third of a core per idle process. With
        # only these transports and channels, 17 ranks start in 0.4 s instead of 1.4 s, and a
        # process has 9 threads instead of 28.
        _transports=["uv"],
        _channels=["basic"] if one_node else None,
    )
    # The agent first builds a gloo group, whose timeout would otherwise be 24 days.
    constants = rpc.constants
    pg_timeout = constants.DEFAULT_PROCESS_GROUP_TIMEOUT
    constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=timeout_s)
    # init_rpc counts its calls per process and puts the number into its keys. The number is reset,
    # so that a process with earlier sessions and one without find each other. Each session has a
    # new store, so no keys clash.
    rpc._init_counter = 0
    _store_for_init = store
    try:
        with warnings.catch_warnings():
            # a warning about the device of init_rpc's own gloo group
            warnings.simplefilter("ignore")
            rpc.init_rpc(
                names[global_rank],
                rank=global_rank,
                world_size=len(names),
                rpc_backend_options=options,
            )
    finally:
        _store_for_init = None
        constants.DEFAULT_PROCESS_GROUP_TIMEOUT = pg_timeout


_registered = False


def _register_scheme() -> None:
    """Let ``init_rpc`` find our store under a URL, because it accepts stores only as URLs."""
    global _registered
    if not _registered:
        dist.register_rendezvous_handler(_SCHEME, _our_store)
        _registered = True


def _our_store(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
    yield _store_for_init, rank, world_size

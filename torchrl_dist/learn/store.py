"""A torch.distributed store whose every operation has a deadline.

TCPStore's own deadlines are the server's: while the process that keeps the store is stopped, most
operations of the others block for ever. So a thread makes them here, and whoever asks waits for it
only so long.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_ANSWER_S = 1.0
# Where the operation before has not been answered either.
_AGAIN_S = 0.1


class StoreSilent(dist.DistError):
    """The store did not answer in time; it may answer later."""


class _Task:
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args
        self.result: Any = None
        self.error: BaseException | None = None
        self.done, self.is_dropped = threading.Event(), False


class AnsweringStore:
    """Operations of ``store``, each of which raises StoreSilent where it is not answered within
    about a second; one that was under way may still take effect. Errors are otherwise the store's.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._answers = True
        # A daemon: it may be in a call that never returns.
        threading.Thread(target=_work, args=(self._tasks,), daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def set(self, key: str, value: str) -> None:
        self._do(self._store.set, key, value)

    def get(self, key: str) -> str:
        return self._do(self._store.get, key).decode()

    def multi_get(self, keys: list[str]) -> list[str]:
        return [value.decode() for value in self._do(self._store.multi_get, keys)]

    def check(self, key: str) -> bool:
        return self._do(self._store.check, [key])

    def delete_key(self, key: str) -> None:
        self._do(self._store.delete_key, key)

    def add(self, key: str, amount: int, timeout_s: float) -> int:
        return self._do(self._store.add, key, amount, wait_s=timeout_s)

    def wait(self, keys: list[str], timeout_s: float) -> bool:
        """Whether all are there, within ``timeout_s``."""
        try:
            self._do(self._store.wait, keys, timedelta(seconds=timeout_s), wait_s=timeout_s)
        except (dist.DistStoreError, StoreSilent):  # the deadline; a lost store is another error
            return False
        return True

    def _do(self, function: Callable[..., Any], *args: Any, wait_s: float = 0.0) -> Any:
        task = _Task(function, args)
        self._tasks.put(task)
        if not task.done.wait(wait_s + (_ANSWER_S if self._answers else _AGAIN_S)):
            task.is_dropped, self._answers = True, False
            raise StoreSilent("the store of the ranks does not answer")
        self._answers = True
        if task.error is not None:
            raise task.error
        return task.result


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        if not task.is_dropped:
            try:
                task.result = task.function(*task.args)
            except BaseException as error:
                task.error = error
            task.done.set()

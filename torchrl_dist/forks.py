"""Renew locks in forked children, and import libraries so that a process stays safe to fork.

If another thread holds a lock during ``os.fork``, the child has a copy of the lock but not of that
thread, so the copy is never released. Each owner of locks registers a function here that makes new
locks. One handler calls these functions in every child, before anything else runs in the child.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")

# Environment variables for imports before a fork. Without the first four variables, the libraries
# start threads when they are imported, and torch asks CUDA's runtime whether CUDA is available,
# which makes CUDA unusable in forked children. The last variable silences TensorPipe's warnings
# about a lost peer, which would otherwise come from every child.
TO_BE_FORKED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

_renewals: dict[tuple[int, Callable[[Any], None]], weakref.ref[Any]] = {}


def now_and_in_children(owner: _T, renew: Callable[[_T], None]) -> None:
    """Call ``renew(owner)`` now, and again in every forked child while the owner lives.

    Args:
        owner: only a weak reference to the owner is kept.
        renew: a function of the class or module, not bound to the owner. The function makes new
            locks and repairs state that another thread may have left half changed. The function
            must not block.
    """
    key = (id(owner), renew)
    _renewals[key] = weakref.ref(owner, lambda _: _renewals.pop(key, None))
    renew(owner)


def renewed(owner: Any, name: str, make: Callable[[], _T]) -> _T:
    """Return ``make()``, such as a new lock. In every forked child, set the owner's attribute
    ``name`` to the result of another ``make()``."""

    def renew(owner: Any) -> None:
        setattr(owner, name, make())

    now_and_in_children(owner, renew)
    made: _T = getattr(owner, name)
    return made


def _renew_all() -> None:
    for key in list(_renewals):
        reference = _renewals.get(key)
        owner = None if reference is None else reference()
        if owner is None:
            continue
        try:
            key[1](owner)
        # continue, because the functions of the other owners must still run
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)


os.register_at_fork(after_in_child=_renew_all)


@contextlib.contextmanager
def imports_to_be_forked() -> Iterator[None]:
    """Within this context, set the variables of ``TO_BE_FORKED`` and hide the GPUs. Import the
    libraries within this context.

    The GPUs are hidden because TorchRL counts the GPUs when it is imported, and NVIDIA's libraries
    then start a thread."""
    variables = {**TO_BE_FORKED, "CUDA_VISIBLE_DEVICES": ""}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value

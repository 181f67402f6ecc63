"""What a forked child must not inherit as it is, such as locks that other threads hold; and how a
process imports libraries that is to be forked.

``os.fork`` copies a lock that another thread has taken, but not that thread: nobody ever gives it
back. Whoever owns one names here how to get new ones; one handler does so in every child, before
anything else runs there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")

# Libraries start their threads when they are imported, unless told otherwise; asking CUDA's runtime
# whether it is there would make it unusable in the children; TensorPipe's warnings about a lost
# peer are the parent's to print, not once more by every child.
TO_BE_FORKED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

_renewals: dict[tuple[int, Callable[[Any], None]], weakref.ref[Any]] = {}


def now_and_in_children(owner: _T, renew: Callable[[_T], None]) -> None:
    """Call ``renew(owner)`` at once, and again in every forked child while the owner lives.

    Args:
        owner: kept by weak reference only.
        renew: a function of the class or module, not bound to the owner; makes new locks, and
            brings in order what another thread may have been changing. Must not block.
    """
    key = (id(owner), renew)
    _renewals[key] = weakref.ref(owner, lambda _: _renewals.pop(key, None))
    renew(owner)


def _renew_all() -> None:
    for key in list(_renewals):
        reference = _renewals.get(key)
        owner = None if reference is None else reference()
        if owner is None:
            continue
        try:
            key[1](owner)
        except Exception as error:  # must not keep the others from theirs
            sys.excepthook(type(error), error, error.__traceback__)


os.register_at_fork(after_in_child=_renew_all)


@contextlib.contextmanager
def imports_to_be_forked() -> Iterator[None]:
    """What is imported in here reads ``TO_BE_FORKED`` in the environment, which stays as it was."""
    before = {name: os.environ.get(name) for name in TO_BE_FORKED}
    os.environ.update(TO_BE_FORKED)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value

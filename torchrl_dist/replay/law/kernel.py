"""Finds the optional C kernel: what tree, cursor and priorities do under the directory's lock."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import numpy as np

from torchrl_dist.errors import ConfigurationError

_VARIABLE = "TORCHRL_DIST_KERNEL"


@functools.cache
def _library() -> ctypes.PyDLL | None:
    path = Path(__file__).with_name("_kernel.abi3.so")  # for every Python from 3.10 on
    if not path.exists():
        return None
    library = ctypes.PyDLL(str(path))
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.torchrl_dist_refresh.argtypes = (pointer, pointer, integer, pointer, integer, pointer)
    library.torchrl_dist_refresh.restype = None
    library.torchrl_dist_draw.argtypes = (
        pointer, integer, integer, integer, pointer, integer, pointer, pointer,
    )  # fmt: skip
    library.torchrl_dist_draw.restype = ctypes.c_int
    library.torchrl_dist_sample.argtypes = (
        pointer, pointer, integer, pointer, integer, pointer, integer, integer,
        pointer, integer, pointer, pointer,
    )  # fmt: skip
    library.torchrl_dist_sample.restype = integer
    number = ctypes.c_double
    library.torchrl_dist_update.argtypes = (
        pointer, pointer, pointer, integer, pointer, pointer, pointer, integer,
        number, number, number, pointer, integer, pointer, pointer,
    )  # fmt: skip
    library.torchrl_dist_update.restype = ctypes.c_int
    state = (pointer, pointer, pointer, pointer, pointer, integer)
    library.torchrl_dist_reserve.argtypes = (*state, integer, integer, integer, integer)
    library.torchrl_dist_reserve.restype = ctypes.c_int
    library.torchrl_dist_publish.argtypes = (
        *state, integer, integer, integer, integer, number, pointer,
    )  # fmt: skip
    library.torchrl_dist_publish.restype = ctypes.c_int
    return library


def find_kernel() -> ctypes.PyDLL | None:
    """The library, or None where NumPy does the work.

    The environment variable ``TORCHRL_DIST_KERNEL`` forces ``c`` or ``numpy``.

    Raises:
        ConfigurationError: ``c`` is asked for but was not built, or the variable is something else.
    """
    wanted = os.environ.get(_VARIABLE, "")
    if wanted not in ("", "c", "numpy"):
        raise ConfigurationError(f"{_VARIABLE} must be 'c' or 'numpy', got {wanted!r}")
    library = None if wanted == "numpy" else _library()
    if wanted == "c" and library is None:
        raise ConfigurationError(
            f"{_VARIABLE}=c, but the kernel was not built; install a C compiler and Python's "
            "headers, then reinstall torchrl-dist"
        )
    return library


def address(array: np.ndarray) -> int:
    """Where the array's data lie, for the kernel; the caller keeps the array alive."""
    return array.__array_interface__["data"][0]

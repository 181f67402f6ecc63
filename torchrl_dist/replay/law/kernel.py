"""Find the optional C kernel, which changes the tree and the tables under the directory's lock."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from torchrl_dist.errors import ConfigurationError

_Library = TypeVar("_Library", ctypes.PyDLL, ctypes.CDLL)

_VARIABLE = "TORCHRL_DIST_KERNEL"
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}
_FUNCTIONS = {
    "refresh": (None, "p"),
    "draw": (ctypes.c_int64, "ppip"),
    "sample": (ctypes.c_int64, "ppipp"),
    "update": (ctypes.c_int, "ppppidpp"),
    "reserve": (ctypes.c_int, "piiiiii"),
    "publish": (ctypes.c_int, "piiiidp"),
    "append": (ctypes.c_int64, "piidipppp"),
}
"""For each function, the type of its result, and a letter for the type of each argument."""
_COPIERS = {
    "find_frames": (ctypes.c_int64, "piipipiipippp"),
    "keep_frames": (None, "piipiipi"),
}


_PATH = Path(__file__).with_name("_kernel.abi3.so")  # one file for every Python from 3.10 on


def _declared(library: _Library, functions: dict[str, tuple[Any, str]]) -> _Library:
    for name, (result, arguments) in functions.items():
        function = getattr(library, f"replay_{name}", None)
        if function is None:
            raise ConfigurationError(
                f"{_PATH} was built from another version of torchrl-dist; reinstall torchrl-dist, "
                f"or set {_VARIABLE}=numpy"
            )
        function.restype = result
        function.argtypes = [_TYPES[letter] for letter in arguments]
    return library


@functools.cache
def _library() -> ctypes.PyDLL | None:
    return _declared(ctypes.PyDLL(str(_PATH)), _FUNCTIONS) if _PATH.exists() else None


@functools.cache
def _copier() -> ctypes.CDLL | None:
    return _declared(ctypes.CDLL(str(_PATH)), _COPIERS) if _PATH.exists() else None


def find_kernel() -> ctypes.PyDLL | None:
    """Return the compiled kernel, or None if NumPy must do the work.

    The environment variable ``TORCHRL_DIST_KERNEL`` may require ``c`` or ``numpy``.

    Raises:
        ConfigurationError: the variable is ``c`` but the kernel was not built, or the variable has
            another value.
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


def find_copier() -> ctypes.CDLL | None:
    """Return the kernel's functions for frames, which run without the GIL, or None if
    :func:`find_kernel` returns None."""
    return None if find_kernel() is None else _copier()


def address(array: np.ndarray) -> int:
    """Return the address of the array's data. The caller keeps the array alive."""
    return array.__array_interface__["data"][0]

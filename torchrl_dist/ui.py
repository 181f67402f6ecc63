"""Functions that the commands share, to print tables and to parse numbers."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any


def table(
    title: str | None,
    columns: Iterable[str],
    rows: Iterable[Sequence[Any]],
    *,
    left: Collection[str] = (),
    folded: Collection[str] = (),
) -> Any:
    """Return a table of ``rich``. Without a title, the table has no box.

    Columns in ``left`` or ``folded`` are aligned to the left. All other columns contain figures.
    Figures are aligned to the right, and their lines are not broken.
    """
    from rich.table import Table

    made = Table(title=title) if title else Table(box=None, pad_edge=False)
    for name in columns:
        if name in folded:
            made.add_column(name, overflow="fold")
        elif name in left:
            made.add_column(name)
        else:
            made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def show_table(*what: Any, width: int | None = 100, **how: Any) -> None:
    """Print a table. The arguments are those of :func:`table`."""
    from rich.console import Console

    Console(width=width).print(table(*what, **how))


def at_least(least: int, kind: type = int) -> Callable[[str], Any]:
    """Return a parser of finite numbers that refuses numbers below ``least``."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if least <= kind(text) < math.inf:
                return kind(text)
        expected = f"expected a {'whole ' if kind is int else ''}number, at least {least}"
        raise argparse.ArgumentTypeError(f"got {text!r}, {expected}")

    return parse


def above_zero(kind: type) -> Callable[[str], Any]:
    """Return a parser of finite numbers above 0."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if 0 < kind(text) < math.inf:
                return kind(text)
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")

    return parse

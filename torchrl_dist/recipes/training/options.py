"""Derives the options of a command from the fields of a frozen dataclass.

Neither this module nor its imports import torch, so ``--help`` and errors appear without delay.

It uses argparse and PyYAML, because existing libraries for this task are less convenient.
jsonargparse 4.53 refuses ``--total-frames`` and ``--hidden 64 64``. tyro 1.0 has no groups of
options and reads no YAML files. Neither library accepts ``2e5`` as a number of frames.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ... import own_files
from ...errors import ConfigurationError

T = TypeVar("T")

_KEY = "torchrl_dist.option"


@dataclasses.dataclass(frozen=True)
class Option:
    """The meaning of a field and its valid values. ``minimum`` and ``maximum`` themselves are
    valid, but ``above`` is not. ``otherwise``, if given, is the default that ``--help`` shows
    instead of the field's default."""

    help: str
    unit: str = ""
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    group: str = "options"
    otherwise: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigurationError unless every number in ``value`` is finite and in range."""
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, bool) or not isinstance(item, int | float):
                continue
            if isinstance(item, float) and not math.isfinite(item):
                raise ConfigurationError(f"{name}: got {item}, expected a finite number")
            if self.minimum is not None and item < self.minimum:
                raise ConfigurationError(f"{name}: got {item}, expected at least {self.minimum}")
            if self.above is not None and item <= self.above:
                raise ConfigurationError(f"{name}: got {item}, expected more than {self.above}")
            if self.maximum is not None and item > self.maximum:
                raise ConfigurationError(f"{name}: got {item}, expected at most {self.maximum}")


def option(default: Any, help: str, **about: Any) -> Any:
    """Return a dataclass field with an :class:`Option`. ``about`` are further fields of Option."""
    return dataclasses.field(default=default, metadata={_KEY: Option(help, **about)})


def option_of(field: dataclasses.Field) -> Option:
    """Return the :class:`Option` of a field made by :func:`option`."""
    return field.metadata[_KEY]


def flag(name: str) -> str:
    """``total_frames`` -> ``--total-frames``."""
    return "--" + name.replace("_", "-")


def check_options(config: Any) -> None:
    """Check the type and range of every field of ``config``, whose ``__post_init__`` calls this.

    Raises:
        ConfigurationError: a value is invalid; the message names the option.
    """
    types = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _is_a(value, types[field.name]):
            raise ConfigurationError(
                f"{flag(field.name)}: got {value!r}, expected {_describe(types[field.name])}"
            )
        option_of(field).check(flag(field.name), value)


def add_options(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add one option per field. The parser sets no attribute for an option that is not given."""
    types = typing.get_type_hints(config_class)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(config_class):
        about = option_of(field)
        group = groups.get(about.group)
        if group is None:
            group = groups[about.group] = parser.add_argument_group(about.group)
        unit = f" [{about.unit}]" if about.unit else ""
        default = about.otherwise or _shown(field.default)
        text = f"{about.help}{unit}" + (f" (default: {default})" if default else "")
        group.add_argument(
            flag(field.name),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_argument(field.name, types[field.name]),
        )


def given_options(namespace: argparse.Namespace, config_class: type) -> dict[str, Any]:
    """Return the fields of ``config_class`` that the command line gives, with their types."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(namespace).items()
        if name in names
    }


def read_options(path: str | os.PathLike[str], config_class: type) -> dict[str, Any]:
    """Return the fields of ``config_class`` in a YAML file, converted to their types.

    Raises:
        ConfigurationError: the file cannot be read, is not a mapping, or names an unknown field.
    """
    import yaml

    try:
        text = _text_of(path)
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"--config: cannot read {path} ({error}); correct the file, or pass another one"
        ) from error
    types = typing.get_type_hints(config_class)
    names = [field.name for field in dataclasses.fields(config_class)]
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"--config: {path} contains no mapping of options to values; write one option per "
            "line, such as total_frames: 100000"
        )
    given = [key.value for key, _ in node.value]
    for name in content:
        if given.count(name) > 1:  # PyYAML would use the last value
            raise ConfigurationError(
                f"--config: {path} sets {name!r} twice; delete one of the lines"
            )
        if name not in names:
            raise ConfigurationError(
                f"--config: {path} sets {name!r}, which is not an option; choose from "
                f"{', '.join(names)}"
            )
    return {name: _from_yaml(name, value, types[name]) for name, value in content.items()}


def _text_of(path: str | os.PathLike[str]) -> str:
    """Return the text of a plain file, or of a file that a shell has opened for this process.

    The shell's file is, for example, ``/dev/fd/63``. Another user's pipe is refused, because it may
    never have a writer.
    """
    if Path(path).is_relative_to("/dev") and not Path(path).is_relative_to("/dev/shm"):
        return Path(path).read_text()
    return own_files.read_plain(path)


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Return fields of a config as arguments of the command line."""
    arguments = []
    for name, value in values.items():
        if isinstance(value, bool):
            arguments.append(flag(name) if value else flag("no_" + name))
        elif value is not None:
            several = value if isinstance(value, tuple) else (value,)
            arguments += [flag(name), *map(str, several)]
    return arguments


def as_yaml(config: Any) -> str:
    """Return all fields of ``config``, in a form that :func:`read_options` reads."""
    import yaml

    values = dataclasses.asdict(config)
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return yaml.safe_dump(plain, sort_keys=False)


def _from_yaml(name: str, value: Any, kind: Any) -> Any:
    """Convert a value of a YAML file to its field's type, because YAML 1.1 reads 1e-3 as text."""
    if isinstance(value, list):
        if any(isinstance(each, list) for each in value):  # a YAML alias may even contain itself
            raise ConfigurationError(
                f"{flag(name)}: got a list in a list, expected {_describe(kind)}"
            )
        item = (*typing.get_args(kind), str)[0]
        return tuple(_from_yaml(name, each, item) for each in value)
    base = _without_none(kind)
    if base is int and isinstance(value, float) and value.is_integer():  # such as 2.0e+5
        return int(value)
    if isinstance(value, str) and base in (int, float):
        try:
            return _converter(base)(value)
        except ValueError as error:
            raise ConfigurationError(
                f"{flag(name)}: got {value!r}, expected {_describe(kind)}"
            ) from error
    return value


def from_plain(config_class: type[T], values: Mapping[str, Any]) -> T:
    """Build a config from a checkpoint's plain values. Unknown fields are ignored."""
    names = {field.name for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]  # is one
    known = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    return config_class(**{key: value for key, value in known.items() if key in names})


def _argument(name: str, kind: Any) -> dict[str, Any]:
    if _without_none(kind) is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return {"type": _converter(item), "nargs": "+", "metavar": item.__name__.upper()}
    base = _without_none(kind)
    return {"type": _converter(base), "metavar": "TEXT" if base is str else base.__name__.upper()}


def _converter(kind: type) -> Any:
    """Return ``kind``, or for int a converter that also accepts ``50_000`` and ``2e5``."""
    if kind is not int:
        return kind

    def whole(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            number = float(text)
            if not number.is_integer():
                raise ValueError(text) from None
            return int(number)

    whole.__name__ = "int"
    return whole


def _without_none(kind: Any) -> Any:
    options = [item for item in typing.get_args(kind) if item is not type(None)]
    return options[0] if options else kind


def _is_a(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return isinstance(value, tuple) and len(value) > 0 and all(_is_a(v, item) for v in value)
    if type(None) in typing.get_args(kind):
        return value is None or _is_a(value, _without_none(kind))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return "one or more of " + typing.get_args(kind)[0].__name__
    return getattr(_without_none(kind), "__name__", str(kind))


def _shown(default: Any) -> str:
    if default is None:
        return ""
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)

"""A checkpoint is complete or refused, and reading one runs no code."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from torchrl_dist.checkpoint import (
    Checkpoint,
    load_checkpoint,
    rng_state,
    save_checkpoint,
    set_rng_state,
)
from torchrl_dist.errors import CheckpointError


def a_checkpoint(value: float = 1.0) -> Checkpoint:
    return Checkpoint(
        recipe="apex",
        config={"env": "CartPole-v1", "hidden": (64, 64), "lr": 1e-3},
        policy={"weight": torch.full((50, 50), value)},
        optimizer={"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"params": [0]}]},
        counters={"frames": 12, "history": [[1, 2.5], [2, 3.5]]},
        rng=rng_state(),
    )


def test_what_is_saved_comes_back_equal(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", a_checkpoint(2.0))
    loaded = load_checkpoint(tmp_path / "c.pt", recipe="apex")
    assert torch.equal(loaded.policy["weight"], torch.full((50, 50), 2.0))
    assert loaded.config == {"env": "CartPole-v1", "hidden": (64, 64), "lr": 1e-3}
    assert loaded.counters == {"frames": 12, "history": [[1, 2.5], [2, 3.5]]}
    assert loaded.optimizer["state"][0]["step"] == 3.0
    assert loaded.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]


class Colour(enum.IntEnum):
    RED = 3


class Word(str, enum.Enum):
    HELLO = "hello"


class Point(NamedTuple):
    x: int
    y: np.float64


ALMOST_PLAIN = {
    "float64": (np.float64(1.5), 1.5),
    "float32": (np.float32(0.5), 0.5),
    "longdouble": (np.longdouble(2.5), 2.5),
    "int64": (np.int64(7), 7),
    "bool": (np.bool_(True), True),
    "str": (np.str_("s"), "s"),
    "int enum": (Colour.RED, 3),
    "str enum": (Word.HELLO, "hello"),
    "flag": (signal.SIGTERM, 15),
    "named tuple": (Point(1, np.float64(2)), (1, 2.0)),
    "size": (torch.Size([2, 3]), (2, 3)),
    "ordered": (OrderedDict(a=[np.int8(1)]), {"a": [1]}),
    "keys": ({Colour.RED: 1, np.int64(4): 2, np.str_("k"): 3}, {3: 1, 4: 2, "k": 3}),
}


def test_nearly_plain_values_are_converted_and_can_be_read(tmp_path: Path) -> None:
    """All that is written can be read, even subclasses such as NumPy's float64 or an IntEnum."""

    def types(value: object) -> object:
        if isinstance(value, dict):
            return {(type(k), k): types(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value), [types(v) for v in value]
        return type(value), value

    extra = {name: value for name, (value, _) in ALMOST_PLAIN.items()}
    extra["parameter"] = nn.Parameter(torch.ones(2))
    save_checkpoint(tmp_path / "c.pt", Checkpoint("apex", config={}, policy={}, extra=extra))
    loaded = load_checkpoint(tmp_path / "c.pt").extra
    assert type(loaded.pop("parameter")) is torch.Tensor
    for name, (_, plain) in ALMOST_PLAIN.items():
        assert types(loaded[name]) == types(plain), name


@pytest.mark.parametrize("value", [enum.Enum("E", "a").a, object(), {torch.ones(1): 1}, {1}, 1j])
def test_a_value_that_could_not_be_read_is_not_written(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError):
        save_checkpoint(
            tmp_path / "c.pt", Checkpoint("apex", config={}, policy={}, extra={"v": value})
        )
    assert not list(tmp_path.iterdir())


def test_generators_continue_where_they_were(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", a_checkpoint())
    drawn = torch.rand(3), np.random.rand(3), random.random()
    set_rng_state(load_checkpoint(tmp_path / "c.pt").rng)
    again = torch.rand(3), np.random.rand(3), random.random()
    assert torch.equal(drawn[0], again[0])
    assert (drawn[1] == again[1]).all()
    assert drawn[2] == again[2]


def test_a_view_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    big = torch.zeros(1_000_000)
    save_checkpoint(tmp_path / "c.pt", Checkpoint(recipe="apex", config={}, policy={"w": big[:4]}))
    assert (tmp_path / "c.pt").stat().st_size < 20_000


@pytest.mark.parametrize("position", [0.1, 0.5, 0.9])
def test_a_changed_byte_is_noticed(tmp_path: Path, position: float) -> None:
    path = save_checkpoint(tmp_path / "c.pt", a_checkpoint())
    content = bytearray(path.read_bytes())
    content[int(len(content) * position)] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(path)


@pytest.mark.parametrize("kept", [0, 10, 1000, -1])
def test_a_cut_file_is_noticed(tmp_path: Path, kept: int) -> None:
    path = save_checkpoint(tmp_path / "c.pt", a_checkpoint())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(path)


def test_a_missing_file_a_directory_and_another_recipe_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="is a directory"):
        load_checkpoint(tmp_path)
    path = save_checkpoint(tmp_path / "c.pt", a_checkpoint())
    with pytest.raises(CheckpointError, match="'apex', expected 'ppo'"):
        load_checkpoint(path, recipe="ppo")


class Bomb:
    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["BOMB_DIRECTORY"],)


def test_a_hostile_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOMB_DIRECTORY", str(tmp_path / "exploded"))
    torch.save({"format": "torchrl_dist.checkpoint", "policy": Bomb()}, tmp_path / "zip.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Bomb()))
    for name in ("zip.pt", "raw.pt"):
        with pytest.raises(CheckpointError):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "exploded").exists()


def test_a_tensor_file_of_another_program_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="is not a torchrl_dist checkpoint"):
        load_checkpoint(tmp_path / "c.pt")


def test_an_unreadable_value_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "c.pt", a_checkpoint(1.0))
    with pytest.raises(CheckpointError, match=r"extra\.env is a PosixPath"):
        save_checkpoint(path, Checkpoint("apex", {}, {}, extra={"env": Path("x")}))
    assert load_checkpoint(path).policy["weight"][0, 0] == 1.0


@pytest.mark.parametrize("moment", ["save", "fsync", "replace"])
def test_a_kill_at_any_moment_leaves_the_previous_file(tmp_path: Path, moment: str) -> None:
    """The process dies (as by kill -9) inside, or right before, each step of the second save."""
    script = f"""
import os, sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_checkpoint import a_checkpoint
from torchrl_dist import checkpoint
checkpoint.save_checkpoint("c.pt", a_checkpoint(1.0))
def die(*args, **kwargs):
    if {moment!r} == "save":
        args[1].write(b"half a file")
        args[1].flush()
    os._exit(9)
if {moment!r} == "save":
    torch.save = die
else:
    setattr(os, {moment!r}, die)
checkpoint.save_checkpoint("c.pt", a_checkpoint(2.0))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=60)
    assert done.returncode == 9
    assert load_checkpoint(tmp_path / "c.pt").policy["weight"][0, 0] == 1.0


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Behave like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [4096, 2**18])  # the disk is full in the header or in a tensor
def test_a_full_disk_is_an_oserror_and_the_old_file_stays(tmp_path: Path, room: int) -> None:
    save_checkpoint(tmp_path / "c.pt", a_checkpoint(1.0))
    large = dataclasses.replace(a_checkpoint(), policy={"weight": torch.zeros(500, 500)})
    with files_of_at_most(room), pytest.raises(OSError, match="File too large"):
        save_checkpoint(tmp_path / "c.pt", large)
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]
    assert load_checkpoint(tmp_path / "c.pt").policy["weight"][0, 0] == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("recipe", 3), ("config", [1]), ("policy", None), ("counters", "x"), ("format_version", "1")],
)
def test_a_field_of_another_type_is_named(tmp_path: Path, field: str, value: object) -> None:
    path = save_checkpoint(tmp_path / "c.pt", a_checkpoint())
    content = torch.load(path, weights_only=True)
    torch.save(content | {field: value}, path)
    with pytest.raises(CheckpointError, match=f"damaged.*{field.replace('_', '.')}"):
        load_checkpoint(path)


def test_a_failed_write_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path / "c.pt", a_checkpoint())
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_changes_neither_values_nor_the_kind_of_error(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "c.pt", a_checkpoint())
    sound, values = path.read_bytes(), repr(load_checkpoint(path))
    places = random.Random(0).sample(range(len(sound)), 120)
    places += range(len(sound) - 200, len(sound), 2)  # the archive's directory
    for place in places:
        content = bytearray(sound)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        with contextlib.suppress(CheckpointError):
            assert repr(load_checkpoint(path)) == values, f"bit {place % 8} of byte {place}"


@pytest.mark.parametrize("field", ["policy", "extra", "format_version", "recipe"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    path = save_checkpoint(tmp_path / "c.pt", a_checkpoint())
    content = torch.load(path, weights_only=True)
    del content[field]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=f"lacks {field}"):
        load_checkpoint(path)

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
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.replay.faults import run_forked
from torchrl_dist import checkpoint
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


def test_a_loaded_checkpoint_equals_the_saved_one(tmp_path: Path) -> None:
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


def test_a_value_that_could_not_be_read_is_not_written_and_the_old_file_stays(tmp_path) -> None:
    path = save_checkpoint(tmp_path / "c.pt", a_checkpoint(1.0))
    for value in (enum.Enum("E", "a").a, object(), {torch.ones(1): 1}, {1}, 1j, Path("x")):
        with pytest.raises(CheckpointError, match=r"extra\.v"):
            save_checkpoint(path, Checkpoint("apex", {}, {}, extra={"v": value}))
    assert load_checkpoint(path).policy["weight"][0, 0] == 1.0
    assert list(tmp_path.iterdir()) == [path]


def test_generators_continue_where_they_were(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", a_checkpoint())
    drawn = torch.rand(3), np.random.rand(3), random.random()
    set_rng_state(load_checkpoint(tmp_path / "c.pt").rng)
    again = torch.rand(3), np.random.rand(3), random.random()
    assert torch.equal(drawn[0], again[0])
    assert (drawn[1] == again[1]).all()
    assert drawn[2] == again[2]


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    big = torch.zeros(1_000_000)
    save_checkpoint(tmp_path / "c.pt", Checkpoint(recipe="apex", config={}, policy={"w": big[:4]}))
    assert (tmp_path / "c.pt").stat().st_size < 20_000


def test_a_changed_byte_and_a_cut_file_are_noticed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "c.pt", a_checkpoint())
    sound = path.read_bytes()
    broken = [sound[:kept] for kept in (0, 10, 1000, -1)]
    for at in (len(sound) // 10, len(sound) // 2, len(sound) * 9 // 10):
        broken.append(sound[:at] + bytes([sound[at] ^ 0xFF]) + sound[at + 1 :])
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(path)


def test_ctrl_c_during_a_write_stays_ctrl_c_and_the_old_file_stays(tmp_path, monkeypatch) -> None:
    """torch raises a RuntimeError of its own if a write ends early."""
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, Checkpoint("apex", {}, {}))
    before = path.read_bytes()

    class Interrupted:
        def __init__(self, file: Any) -> None:
            self.file, self.writes = file, 0

        def write(self, data: Any) -> int:
            self.writes += 1
            if self.writes == 3:
                raise KeyboardInterrupt
            return self.file.write(data)

        def flush(self) -> None:
            self.file.flush()

    noting = checkpoint._Noting
    monkeypatch.setattr(checkpoint, "_Noting", lambda file: noting(Interrupted(file)))
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, Checkpoint("apex", {}, {}))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["checkpoint.pt"]


def test_a_missing_file_a_directory_and_a_foreign_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="is a directory"):
        load_checkpoint(tmp_path)
    path = save_checkpoint(tmp_path / "c.pt", a_checkpoint())
    with pytest.raises(CheckpointError, match="'apex', expected 'ppo'"):
        load_checkpoint(path, recipe="ppo")
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match="is not a torchrl_dist checkpoint"):
        load_checkpoint(path)


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


@pytest.mark.parametrize("moment", ["save", "fsync", "replace"])
def test_a_kill_at_any_moment_leaves_the_previous_file(tmp_path: Path, moment: str) -> None:
    """The process ends inside, or right before, each step of the second save."""
    path = save_checkpoint(tmp_path / "c.pt", a_checkpoint(1.0))

    def die(*args: Any, **kwargs: Any) -> None:
        if moment == "save":
            args[1].write(b"half a file")
            args[1].flush()
        os._exit(9)

    def save() -> None:
        setattr(torch if moment == "save" else os, moment, die)
        save_checkpoint(path, a_checkpoint(2.0))

    assert run_forked(save) == 9
    assert load_checkpoint(path).policy["weight"][0, 0] == 1.0


@pytest.mark.parametrize("room", [4096, 2**18])  # the disk is full in the header or in a tensor
def test_a_full_disk_is_an_oserror_and_the_old_file_stays(tmp_path: Path, room: int) -> None:
    save_checkpoint(tmp_path / "c.pt", a_checkpoint(1.0))
    large = dataclasses.replace(a_checkpoint(), policy={"weight": torch.zeros(500, 500)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(tmp_path / "c.pt", large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]
    assert load_checkpoint(tmp_path / "c.pt").policy["weight"][0, 0] == 1.0


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("recipe", 3), ("config", [1]), ("policy", None), ("extra", "x"), ("format_version", "1")],
)
def test_a_field_of_another_type_and_a_missing_one_are_named(tmp_path, field, wrong) -> None:
    path = save_checkpoint(tmp_path / "c.pt", a_checkpoint())
    content = torch.load(path, weights_only=True)
    torch.save(content | {field: wrong}, path)
    with pytest.raises(CheckpointError, match=f"damaged.*{field.replace('_', '.')}"):
        load_checkpoint(path)
    del content[field]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=f"lacks {field}"):
        load_checkpoint(path)


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

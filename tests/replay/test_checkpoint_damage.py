"""Damaged checkpoints, and folders in which other programs keep files."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.replay.faults import (
    assert_sound,
    at_step,
    attach,
    kill_self,
    rows_of,
    run_forked,
    start,
    wait_until,
)
from tests.replay.test_files import contents
from torchrl_dist.errors import CheckpointError
from torchrl_dist.replay import SharedReplayBuffer
from torchrl_dist.replay.node.tables import COUNTERS, Word
from torchrl_dist.replay.saving.disk import writing

CAPACITY = 80


@pytest.fixture
def rb(folder: Path) -> SharedReplayBuffer:
    stock = attach(folder, CAPACITY)
    buffer = SharedReplayBuffer(storage=stock.storage, sampler=stock.sampler, batch_size=8)
    buffer.set_rng(torch.Generator())
    buffer.extend(rows_of(range(100)))  # more than once round
    yield buffer
    stock.storage.close()


def state_of(rb: SharedReplayBuffer) -> dict[str, Any]:
    """Return everything that a refused checkpoint must leave unchanged."""
    directory = rb.storage.directory
    return {
        "keys": rb[:]["key"].tolist(),
        "words": directory.words.tolist(),
        "versions": directory.versions.tolist(),
        "leaves": directory.tree.leaves.tolist(),
        "beta": rb.sampler.beta,
        "rng": rb._rng.get_state().tolist(),
        "batch_size": rb._batch_size,
    }


NEXT_STEP = "(use|load) another|choose a folder|with the transforms|TorchRL storage"


def refused(
    rb: SharedReplayBuffer,
    load: Callable[[], object],
    words: str = NEXT_STEP,
) -> None:
    before = state_of(rb)
    with pytest.raises(CheckpointError, match=words):
        load()
    assert state_of(rb) == before


def test_any_flipped_bit_is_noticed(rb, tmp_path: Path) -> None:
    rb.dumps(tmp_path)
    rb.extend(rows_of(range(100, 110)))
    randomness = np.random.default_rng(0)
    flipped = 0
    for file in sorted(each for each in tmp_path.rglob("*") if each.is_file()):
        sound = file.read_bytes()
        places = {0, len(sound) - 1, *randomness.integers(0, len(sound), 12).tolist()}
        for place in places if sound else ():
            bad = bytearray(sound)
            bad[place] ^= 1 << int(randomness.integers(8))
            file.write_bytes(bad)
            if file.suffix == ".json" and _same(sound, bytes(bad)):
                continue  # white space between two values
            refused(rb, lambda: rb.loads(tmp_path))
            flipped += 1
        for size in {0, len(sound) // 2, len(sound) - 1} if sound else ():
            file.write_bytes(sound[:size])
            refused(rb, lambda: rb.loads(tmp_path))
        file.write_bytes(sound)
    assert flipped > 60
    rb.loads(tmp_path)
    assert rb[:]["key"].sort()[0].tolist() == list(range(20, 100))
    assert_sound(rb)


def _same(text: bytes, other: bytes) -> bool:
    try:
        return json.loads(text) == json.loads(other)
    except ValueError:
        return False


def _head(name: str, value: Any) -> Callable[[dict], object]:
    return lambda shard: shard["head"].__setitem__(name, value)


def _at(name: str, place: Any, value: float) -> Callable[[dict], object]:
    return lambda shard: shard[name].__setitem__(place, value)


_WRONG: dict[str, Callable[[dict], object]] = {
    **{
        f"{name} {value}": _head(name, value)
        for name, values in {
            "cursor": (-7, 2**63, 1.5, None),
            "capacity": (0, -1, "80", True),
            "high": (-1, CAPACITY + 1),
            "length": (-1, CAPACITY + 1),
            "write_count": (-1, 2**63),
            "alpha": (-1.0, math.nan, "x", None),
            "eps": (math.inf, None),
            "max_priority": (-1.0, math.nan),
            "counters": ({"repairs": -1}, {"repairs": "x"}, 7, None),
            "limiter": ([math.nan], [-1.0], 3),
            "spec": (None, {}, 7, {"leaves": [], "batch_dims": []}),
        }.items()
        for value in values
    },
    "a slot twice": _at("runs", (0, 0), 25),
    "a slot before the ring": _at("runs", (0, 0), -1),
    "a slot behind the ring": _at("runs", (0, 0), CAPACITY),
    "an odd version": _at("runs", (0, 1), 3),
    "a version below 0": _at("runs", (0, 1), -2),
    "no rows in a run": _at("runs", (0, 2), 0),
    "too many rows in a run": _at("runs", (0, 2), 79),
    "runs as int32": lambda shard: shard.update(runs=shard["runs"].int()),
    "runs of two columns": lambda shard: shard.update(runs=shard["runs"][:, :2].contiguous()),
    "runs in another order": lambda shard: shard.update(runs=shard["runs"].flip(0)),
    "priorities without rows": lambda shard: shard.update(runs=shard["runs"][:0], rows=[]),
    "a priority below 0": _at("leaf", 3, -1.0),
    "an endless priority": _at("leaf", 3, math.inf),
    "fewer priorities": lambda shard: shard.update(leaf=shard["leaf"][1:]),
    "priorities as float32": lambda shard: shard.update(leaf=shard["leaf"].float()),
    "no rows": lambda shard: shard.update(rows=[]),
    "fewer rows": lambda shard: shard.update(rows=[each[1:] for each in shard["rows"]]),
    "rows of another dtype": lambda shard: shard.update(rows=[each > 0 for each in shard["rows"]]),
    "no head": lambda shard: shard.pop("head"),
}


@pytest.mark.parametrize("what", _WRONG)
def test_a_state_that_no_buffer_had_changes_nothing(rb, what: str) -> None:
    state = copy.deepcopy(rb.storage.state_dict())
    rb.extend(rows_of(range(100, 110)))
    rb.storage.load_state_dict(copy.deepcopy(state))  # it was sound
    _WRONG[what](state["shards"][0])
    refused(rb, lambda: rb.storage.load_state_dict(state))


def test_an_unknown_counter_sets_nothing(rb) -> None:
    state = rb.storage.state_dict()
    counters = state["shards"][0]["head"]["counters"]
    others = {word.name.lower() for word in Word} - COUNTERS.keys()
    counters |= dict.fromkeys([*others, "of_a_later_version"], 2**40) | {"stale_updates": 5}
    rb.storage.load_state_dict(state)
    assert 2**40 not in list(rb.storage.directory.words)
    assert rb.storage.counters["stale_updates"] == 5
    assert_sound(rb)


def _manifest(text: str) -> Callable[[Path], object]:
    return lambda path: (path / "checkpoint.json").write_text(text)


def _version(version: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        entry = json.loads((path / "checkpoint.json").read_text())
        _manifest(json.dumps(entry | {"format_version": version}))(path)

    return change


_UNREADABLE: dict[str, Callable[[Path], object]] = {
    "is damaged: .*priority.bin": lambda path: next(path.rglob("priority.bin")).unlink(),
    "key.bin is damaged: it has 100 bytes": lambda path: os.truncate(
        next(path.rglob("key.bin")), 100
    ),
    "checkpoint.json is damaged": _manifest("{"),
    "has format version 99, but this version of torchrl_dist reads only 2": _version(99),
    "has format version 1, but this version of torchrl_dist reads only 2": _version(1),
    "was not written by a replay buffer": _manifest("{}"),
    "holds no checkpoint of a replay buffer": shutil.rmtree,
}


@pytest.mark.parametrize("words", _UNREADABLE)
def test_an_error_names_the_damage_of_a_checkpoint(rb, tmp_path: Path, words: str) -> None:
    rb.dumps(tmp_path / "saved")
    _UNREADABLE[words](tmp_path / "saved")
    refused(rb, lambda: rb.loads(tmp_path / "saved"), words)


@pytest.mark.parametrize("state", [{}, {"shards": 3}, {"shards": []}, {"shards": [{}]}, 7])
def test_something_else_than_a_state_changes_nothing(rb, state: Any) -> None:
    refused(rb, lambda: rb.storage.load_state_dict(state))


def _sign(manifest: dict) -> dict:
    """Add the right checksum, as a program with a bug would."""
    manifest.pop("checksum", None)
    text = json.dumps(manifest, sort_keys=True).encode()
    return manifest | {"checksum": zlib.crc32(text)}


_NONSENSE: dict[str, dict[str, Any]] = {
    "beta": {"extra": {"sampler": {"_alpha": 0.6, "_beta": "much", "_eps": 1e-8}}},
    "beta below 0": {"extra": {"sampler": {"_alpha": 0.6, "_beta": -1.0, "_eps": 1e-8}}},
    "beta missing": {"extra": {"sampler": {"_alpha": 0.6}}},
    "sampler": {"extra": {"sampler": [1]}},
    "batch size": {"extra": {"batch_size": -3}},
    "generator": {"extra": {"rng": {"device": "cpu", "state": 5}}},
    "device": {"extra": {"rng": {"device": "abacus", "state": 5}}},
    "transforms": {"extra": {"transforms": {"0.loc": 5}}},
    "extra": {"extra": []},
    "shards": {"shards": 5},
    "a shard": {"shards": [5]},
    "an empty shard": {"shards": [{}]},
    "folder elsewhere": {"folder": "../rows-0123456789ab"},
    "no folder": {"folder": None},
    "time": {"unix_time_s": "noon"},
}


@pytest.mark.parametrize("what", _NONSENSE)
def test_nonsense_with_a_right_checksum_changes_nothing(rb, tmp_path: Path, what: str) -> None:
    rb.dumps(tmp_path)
    file = tmp_path / "checkpoint.json"
    file.write_text(json.dumps(_sign(json.loads(file.read_text()) | _NONSENSE[what])))
    rb.extend(rows_of(range(100, 110)))
    refused(rb, lambda: rb.loads(tmp_path))


def test_a_stock_buffers_bad_beta_is_refused_before_alpha_changes(folder: Path) -> None:
    rb: TensorDictReplayBuffer = attach(folder, CAPACITY)
    rb.extend(rows_of(range(8)))
    with pytest.raises(CheckpointError, match="state is damaged"):
        rb.sampler.load_state_dict({"_alpha": 0.1, "_beta": "x", "_eps": 1e-8})
    assert rb.sampler.alpha != 0.1
    rb.storage.close()


# --- files of others -----------------------------------------------------------------------------


def test_files_of_others_next_to_a_checkpoint_stay(rb, tmp_path: Path) -> None:
    (tmp_path / "rows-backup").mkdir()
    (tmp_path / "rows-backup" / "a.bin").write_text("mine")
    (tmp_path / "rows-0123456789ab" / "shard-0").mkdir(parents=True)  # as ours are named
    (tmp_path / "rows-0123456789ab" / "shard-0" / "key.bin").write_text("mine")
    (tmp_path / "rows-notes.txt").write_text("mine")
    (tmp_path / "checkpoint.json.new").write_text("mine")
    (tmp_path / "shard-0").mkdir()
    before = contents(tmp_path)
    for _ in range(3):
        rb.dumps(tmp_path)
        now = contents(tmp_path)
        assert {name: now[name] for name in before} == before
    (own,) = {each.name for each in tmp_path.glob("rows-*")} - {
        "rows-backup", "rows-0123456789ab", "rows-notes.txt",
    }  # fmt: skip
    (tmp_path / own / "notes.txt").write_text("mine")
    rb.dumps(tmp_path)
    assert contents(tmp_path / own) == {"notes.txt": b"mine"}
    rb.loads(tmp_path)


def test_a_manifest_of_others_is_not_replaced(rb, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text('{"step": 7, "folder": "rows-0123456789ab"}')
    (tmp_path / "rows-0123456789ab").mkdir()
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="was not written by a replay buffer"):
        rb.dumps(tmp_path)
    assert contents(tmp_path) == before


def test_a_note_of_others_removes_nothing(rb, tmp_path: Path) -> None:
    """In the file that lists folders of killed writers, names of other folders are ignored."""
    outside = tmp_path / "outside" / "rows-0123456789ab"
    (outside / "shard-0").mkdir(parents=True)
    (outside / "shard-0" / "key.bin").write_text("mine")
    (target := tmp_path / "saved").mkdir()
    (target / "rows-aaaaaaaaaaaa").symlink_to(outside)
    (target / "keep").mkdir()
    (target / ".torchrl_dist-rows").write_text(
        "../outside/rows-0123456789ab\nkeep\nrows-aaaaaaaaaaaa\n/\n"
    )
    rb.dumps(target)
    assert (outside / "shard-0" / "key.bin").exists() and (target / "keep").is_dir()


def test_the_next_writer_removes_files_of_killed_writers(rb, tmp_path: Path) -> None:
    rb.dumps(tmp_path)

    def victim(step: int) -> None:
        with at_step(step, kill_self):
            rb.dumps(tmp_path)

    for step in (30, 60, 90, 120, 150, 180):
        run_forked(victim, step)
    shutil.copytree(tmp_path, tmp_path / "copy")
    rb.dumps(tmp_path)
    shutil.rmtree(tmp_path / "copy")
    assert sorted(each.name[:5] for each in tmp_path.iterdir()) == ["check", "rows-"]


def test_a_child_of_a_killed_writer_lets_others_write(rb, tmp_path: Path) -> None:
    ended, end = os.pipe()

    def writer() -> None:
        os.close(end)
        with writing(tmp_path):
            start(os.read, ended, 1)  # until the test lets go of the pipe
            kill_self()

    try:
        assert run_forked(writer) < 0
        wait_until(lambda: _writes(rb, tmp_path))  # the child may begin to run later
    finally:
        os.close(ended)
        os.close(end)


def _writes(rb: SharedReplayBuffer, target: Path) -> bool:
    try:
        rb.dumps(target)
    except CheckpointError:
        return False
    return True

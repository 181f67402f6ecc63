"""Read what ``torchrl-dist inspect`` shows about a replay directory or a checkpoint.

This module only reads. It does not join a directory, lock a file or change a file. It therefore
does not disturb a running job, and can inspect read-only files. The figures of a running job are
read at slightly different moments.
"""

from __future__ import annotations

import datetime
import math
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_dist import own_files
from torchrl_dist.errors import DirectoryError
from torchrl_dist.replay.law.placement import slot_ranges
from torchrl_dist.replay.node import files
from torchrl_dist.replay.node.directory import data_size, read_spec
from torchrl_dist.replay.node.files import damaged, read_header
from torchrl_dist.replay.node.lock import MEMBER_BYTES, byte_holder, is_held
from torchrl_dist.replay.node.tables import (
    CLAIM_DISCARDED,
    CLAIM_PUBLISHING,
    CLAIM_WRITING,
    MAX_MEMBERS,
    MEMBER_SERIAL,
    Word,
    counters_in,
)
from torchrl_dist.replay.row.spec import RowSpec
from torchrl_dist.replay.saving.disk import MANIFEST, read_dump, read_manifest
from torchrl_dist.replay.saving.snapshot import SavedShard
from torchrl_dist.runtime.proc import state
from torchrl_dist.ui import show_table

_QUANTILES = (0, 1, 10, 25, 50, 75, 90, 99, 100)
_BINS = 10
_STATES = {CLAIM_WRITING: "writing", CLAIM_PUBLISHING: "publishing", CLAIM_DISCARDED: "discarded"}
_COMMAND_CHARACTERS = 60


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return all facts about the replay directory or checkpoint in a folder, as plain values.

    Raises:
        DirectoryError: the folder holds neither a replay directory nor a checkpoint, or the content
            has another format, or another user could change the content.
        CheckpointError: the checkpoint is damaged.
    """
    folder = Path(os.path.abspath(path))
    for place in (folder, folder / "storage"):  # TorchRL's ``dumps`` writes to ``storage``
        if (place / MANIFEST).exists():
            _refuse_others(place)
            return _checkpoint(place)
    if (folder / files.HEADER).exists():
        _refuse_others(folder)
    try:
        return _directory(folder)
    except FileNotFoundError as error:
        if (folder / files.HEADER).exists():
            raise damaged(folder, f"{Path(error.filename).name} is missing") from error
        raise _not_one(folder) from error
    except OSError as error:
        raise DirectoryError(
            f"{folder} cannot be read: {error}; check that this user may read the folder"
        ) from error


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by None. Damaged files may have such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def _refuse_others(folder: Path) -> None:
    try:
        own_files.check_folder(folder)
    except own_files.NotOurs as error:
        raise DirectoryError(
            f"{error}; inspect only folders of this user, to which no other user can write"
        ) from error


def _not_one(folder: Path) -> DirectoryError:
    if not folder.is_dir():
        return DirectoryError(f"{folder} is not a folder; pass a replay directory or checkpoint")
    inside = [
        each.parent.name
        for pattern in ("*/header.json", f"*/{MANIFEST}")
        for each in sorted(folder.glob(pattern))
    ]
    hint = f"try these folders in it: {', '.join(inside)}" if inside else "pass one of these two"
    return DirectoryError(f"{folder} is neither a replay directory nor a checkpoint; {hint}")


# --- a directory ---------------------------------------------------------------------------------


def _directory(folder: Path) -> dict[str, Any]:
    header = read_header(folder)
    capacity = header.capacity
    words, claims, members = files.read_control(folder)
    floats = words.view(np.float64)
    versions = files.read_table(folder, "versions.bin", np.int64, capacity)
    leaf = files.read_table(folder, "tree.bin", np.float64, capacity)
    slots = np.flatnonzero((versions & 1 == 0) & (versions > 0))
    cursor, highest = int(words[Word.CURSOR]), float(floats[Word.MAX_PRIORITY])
    alpha, eps = floats[[Word.ALPHA, Word.EPS]].tolist() if words[Word.ALPHA_SET] else (None, None)
    spec = read_spec(folder) if words[Word.ROWS_READY] else None
    with open(own_files.open_ours(folder / files.LOCK), "rb") as lock:
        fd = lock.fileno()  # the locks on bytes of this file tell which processes are alive
        living = _members(members, fd)
        alive = {each["member"] for each in living if each["alive"]}
        lock_pids = [byte_holder(fd, byte) for byte in (1, 0)]
    return {
        "kind": "directory",
        "path": str(folder),
        "host": socket.gethostname(),
        "job_id": header.job_id,
        "removed_at_the_end": bool(alive) and not (words[Word.KEEP] or words[Word.INTERRUPTED]),
        "lock": {"holder_pid": lock_pids[0], "next_pid": lock_pids[1]},
        "members": living,
        "claims": _claims(claims, capacity, alive),
        "capacity": capacity,
        "length": int(words[Word.LENGTH]),
        "cursor": cursor,
        "write_count": int(words[Word.WRITE_COUNT]),
        "alpha": alpha,
        "eps": eps,
        "max_priority": None if highest != highest else highest,
        **_content(capacity, cursor, spec, slots, leaf[slots], alpha, eps),
        "counters": counters_in(words),
        "limiter": limiter_in(words, floats),
    }


def limiter_in(words: Any, floats: Any) -> dict[str, float | None] | None:
    """Return the rate limiter and its counts, or None if there is no limiter."""
    if words[Word.LIMITED] != 1:
        return None
    return {
        "min_size_to_sample": int(words[Word.MIN_SIZE_TO_SAMPLE]),
        "samples_per_insert": float(floats[Word.SAMPLES_PER_INSERT]) or None,
        "error_buffer": float(floats[Word.ERROR_BUFFER]) or None,
        "max_times_sampled": int(words[Word.MAX_TIMES_SAMPLED]) or None,
        "inserts": int(words[Word.WRITE_COUNT] - words[Word.INSERT_BASE]),
        "samples": int(words[Word.SAMPLED]),
    }


def _members(table: np.ndarray, fd: int) -> list[dict[str, Any]]:
    found = []
    for index in np.flatnonzero(table[:, MEMBER_SERIAL]).tolist():
        pid, serial = table[index].tolist()
        alive = is_held(fd, MEMBER_BYTES + index)
        found.append(
            {
                "member": serial * MAX_MEMBERS + index,
                "pid": pid,
                "alive": alive,
                "state": _process_state(pid) if alive else "dead",
                "command": _command(pid) if alive else "",
            }
        )
    return found


def _process_state(pid: int) -> str:
    """Return a process's state from /proc, or "elsewhere" if the process is in another pid
    namespace."""
    states = {"T": "stopped", "t": "traced", "Z": "zombie", "D": "disk wait", None: "elsewhere"}
    return states.get(state(pid), "alive")


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return ""
    return words.decode(errors="replace").strip()[:_COMMAND_CHARACTERS]


def _claims(table: np.ndarray, capacity: int, alive: set[int]) -> list[dict[str, Any]]:
    return [
        {
            "member": member,
            "alive": member in alive,
            "rows": count,
            "first_ticket": first,
            "slots": slot_ranges(first, count, capacity),
            "state": _STATES.get(state, str(state)),
        }
        for count, first, member, state in table.tolist()
        if 0 < count <= capacity
    ]


# --- a checkpoint --------------------------------------------------------------------------------


def _checkpoint(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    shards, extra = read_dump(folder, check_rows=False)
    written = datetime.datetime.fromtimestamp(manifest["unix_time_s"], datetime.timezone.utc)
    return {
        "kind": "checkpoint",
        "path": str(folder),
        "written": written.isoformat(timespec="seconds"),
        "bytes": sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()),
        "extra": sorted(extra),
        "shards": [None if shard is None else _shard(shard) for shard in shards],
    }


def _shard(saved: SavedShard) -> dict[str, Any]:
    head, leaf = saved.head, saved.leaf
    names = ("capacity", "cursor", "write_count", "alpha", "eps", "max_priority", "counters")
    return {
        **{name: getattr(head, name) for name in names},
        "length": leaf.size,
        **_content(head.capacity, head.cursor, head.spec, saved.slots, leaf, head.alpha, head.eps),
        "overwritten": saved.overwritten,
    }


# --- both ------------------------------------------------------------------------------


def _content(
    capacity: int,
    cursor: int,
    spec: RowSpec | None,
    slots: np.ndarray,
    leaf: np.ndarray,
    alpha: float | None,
    eps: float | None,
) -> dict[str, Any]:
    age = np.sort((cursor - 1 - slots) % capacity)
    priority = _priorities(leaf, alpha, eps)
    return {
        "row_bytes": None if spec is None else spec.row_bytes,
        "stored_row_bytes": None if spec is None else round(data_size(spec, capacity) / capacity),
        "row": None if spec is None else spec.as_json(),
        "priority": {
            "mass": float(leaf.sum()),
            "quantiles": _quantiles(priority),
            "histogram": _histogram(priority),
            "largest_1_percent_have": _share_of_largest(leaf),
        },
        "age": {"quantiles": _quantiles(age)},
    }


def _priorities(leaf: np.ndarray, alpha: float | None, eps: float | None) -> np.ndarray:
    """Return sorted priorities. If alpha and eps are unknown, return sorted leaves."""
    if alpha:
        leaf = np.maximum(leaf ** (1 / alpha) - (eps or 0.0), 0.0)
    return np.sort(leaf)


def _quantiles(ascending: np.ndarray) -> dict[str, float] | None:
    if not ascending.size:
        return None
    at = (np.array(_QUANTILES) / 100 * (ascending.size - 1)).round().astype(np.int64)
    return dict(zip([f"{each}%" for each in _QUANTILES], ascending[at].tolist(), strict=True))


def _histogram(ascending: np.ndarray) -> list[dict[str, float]]:
    """Return the number of rows per bin of priorities. Bins have equal widths on a logarithmic
    scale, and the first bin includes zeros."""
    positive = ascending[ascending > 0]
    if not positive.size:
        return []
    low, high = float(positive[0]), float(positive[-1])
    edges = np.geomspace(low, high, _BINS + 1) if high > low else np.array([low, high])
    counts = np.diff(np.searchsorted(ascending, edges[1:-1], side="left"), prepend=0)
    counts = np.append(counts, ascending.size - counts.sum())
    return [
        {"from": float(edges[i]), "to": float(edges[i + 1]), "rows": int(count)}
        for i, count in enumerate(counts)
    ]


def _share_of_largest(leaf: np.ndarray) -> float | None:
    """Return the share of draws that go to the 1 % of rows with the largest priorities."""
    total = float(leaf.sum())
    if not total:
        return None
    count = max(1, leaf.size // 100)
    return float(np.partition(leaf, leaf.size - count)[-count:].sum()) / total


# --- for people ----------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    """Print the result of :func:`inspect` as tables."""
    from rich.console import Console

    console = Console()
    console.print(f"[bold]{found['kind']}[/] {_shown(found['path'])}", highlight=False)
    if found["kind"] == "checkpoint":
        console.print(
            f"written {found['written']}, {found['bytes'] / 2**20:.1f} MiB, "
            f"{len(found['shards'])} shards"
            + (f", with {_shown(', '.join(found['extra']))}" if found["extra"] else "")
        )
        for number, shard in enumerate(found["shards"]):
            console.rule(f"shard {number}")
            if shard is None:
                console.print(
                    "this shard is missing, because its host did not answer when the checkpoint "
                    "was written"
                )
            else:
                _show_content(console, shard, {"overwritten meanwhile": shard["overwritten"]})
        return
    lock = found["lock"]
    holder = lock["holder_pid"]
    _show_content(
        console,
        found,
        {
            "job": found["job_id"],
            "host": found["host"],
            "after its last process": "removed" if found["removed_at_the_end"] else "kept",
            "lock": "free" if holder is None else f"held by process {holder}",
        },
    )
    _print_table("processes", found["members"], ("pid", "state", "member", "command"))
    claims = [
        {
            **claim,
            "by member": f"{claim['member']} ({'alive' if claim['alive'] else 'dead'})",
            "slots": ", ".join(f"{start} to {stop - 1}" for start, stop in claim["slots"]),
        }
        for claim in found["claims"]
    ]
    _print_table("rows being written", claims, ("by member", "rows", "state", "slots"))


def _show_content(console: Any, found: dict[str, Any], more: dict[str, Any]) -> None:
    row = found["row"]
    leaves = [] if row is None else row["leaves"]
    stored = ""
    if found["stored_row_bytes"] != found["row_bytes"]:
        stored = f", or {found['stored_row_bytes']:,} with each frame stored once"
    facts = {
        **more,
        "rows": f"{found['length']:,} of {found['capacity']:,}",
        "ever written": f"{found['write_count']:,}",
        "next ticket": f"{found['cursor']:,} (slot {found['cursor'] % found['capacity']:,})",
        "a row": "none yet" if row is None else f"{found['row_bytes']:,} bytes{stored}",
        "alpha, eps": f"{found['alpha']}, {found['eps']}",
        "largest priority": found["max_priority"],
        **{name.replace("_", " "): count for name, count in found["counters"].items()},
        **{
            f"limiter: {name.replace('_', ' ')}": value
            for name, value in (found.get("limiter") or {}).items()
            if value is not None
        },
    }
    _print_table("", [{"": name, " ": value} for name, value in facts.items()], ("", " "))
    spec = [{**leaf, "key": ".".join(leaf["key"])} for leaf in leaves]
    _print_table("a row", spec, ("key", "dtype", "shape"))
    priority, age = found["priority"]["quantiles"], found["age"]["quantiles"]
    if priority is None:
        return
    quantiles = [
        {"of the rows": name, "priority": f"{priority[name]:.4g}", "age": f"{age[name]:,}"}
        for name in priority
    ]
    _print_table("quantiles", quantiles, ("of the rows", "priority", "age"))
    console.print("age of a row: how many rows were written, or are being written, after it")
    bins = found["priority"]["histogram"]
    most = max(each["rows"] for each in bins)
    shown = [
        {
            "priority": f"{each['from']:.3g} to {each['to']:.3g}",
            "rows": f"{each['rows']:,}",
            "": "█" * round(30 * each["rows"] / most),
        }
        for each in bins
    ]
    share = found["priority"]["largest_1_percent_have"]
    title = f"priorities; the largest 1 % get {share:.1%} of the draws"
    _print_table(title, shown, ("priority", "rows", ""))


def _print_table(title: str, lines: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    if lines:
        rows = [[_shown(str(line[column])) for column in columns] for line in lines]
        show_table(title or None, columns, rows, left=columns, width=None)


def _shown(text: str) -> str:
    """Escape the text, so that neither rich nor a terminal interprets any of it."""
    from rich.markup import escape

    return escape(own_files.printable(text))

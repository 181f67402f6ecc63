"""The layout of a replay directory's control block, which consists of words and tables.

``directory`` defines which values are valid together, and when they may change.
"""

from __future__ import annotations

import enum
import platform
from collections.abc import Sequence

import numpy as np

MAX_MEMBERS = 1024
MAX_CLAIMS = 1024
CONTROL_WORDS = 80

# columns of the claim table, int64 [MAX_CLAIMS, 4]
CLAIM_COUNT, CLAIM_FIRST, CLAIM_MEMBER, CLAIM_STATE = range(4)
CLAIM_WRITING, CLAIM_PUBLISHING, CLAIM_DISCARDED = 1, 2, 3
# columns of the user table, int64 [MAX_MEMBERS, 5], see ``gate``: the member, and the number of
# rows that were admitted and counted for its samples, but have not been returned yet. The other
# columns are unused.
USER_MEMBER, USER_UNRETURNED = 0, 4
USER_COLUMNS = 5
# columns of the member table, int64 [MAX_MEMBERS, 2]
MEMBER_PID, MEMBER_SERIAL = range(2)

# A reader compares versions before and after its copy. This is safe if the CPU reorders neither
# loads with loads nor stores with stores, as on x86-64. On other machines, readers copy under the
# lock.
ORDERED_LOADS = platform.machine().lower() in ("x86_64", "amd64")


class Word(enum.IntEnum):
    """Index of each int64 of the control block. Words marked float64 hold the bits of a float64.

    Words from 68 on are free.
    """

    DIRTY = 0
    CURSOR = 1  # next ticket
    BASE = 2  # ticket at which the buffer was last emptied
    LENGTH = 3  # published rows
    WRITE_COUNT = 4  # rows ever published
    ROWS_READY = 5  # rows.json and the data files exist
    ALPHA_SET = 6
    ALPHA = 7  # float64
    EPS = 8  # float64
    MAX_PRIORITY = 9  # float64, raw; NaN before the first priority
    MAX_SLOT = 10  # the slot of MAX_PRIORITY, -1 if unknown
    JOINS = 11  # members that ever joined, for unique ids, because the member table reuses rows
    KEEP = 12  # keep the directory when the last member leaves
    CLAIM_ROWS = 13  # rows of the claim table that were ever used
    MAX_WITHIN = 14  # 1: MAX_PRIORITY is the largest of the current rows, 0: of all rows ever
    NEXT_WRITE_COUNT = 15  # WRITE_COUNT as it will be after the publication in progress
    # counters, see ReplayDirectory.counters
    REREAD_ROWS = 16
    LOCKED_READS = 17
    STALE_UPDATES = 18
    UNVERIFIED_UPDATES = 19
    TAKEN_OVER_CLAIMS = 20
    REPAIRS = 21
    RESCALING = 22  # alpha is being changed to NEXT_ALPHA, see ``priorities.finish_rescaling``
    NEXT_ALPHA = 23  # float64
    WAITING = 24  # a process waits for the lock, see ``FairLock``
    EMPTYING = 25  # the buffer is being emptied, see ``cursor.finish_emptying``
    IN_PLACE = 26  # 1 + the highest slot written in place since the buffer was emptied
    IDENTITY = 27  # a random number that identifies this directory
    JOURNAL = 28  # to 38: journal of ``ReplayDirectory.store_all``: a count, up to 5 (word, value)
    RESTORED_TIMES = 39  # ``max_times_sampled`` of the checkpoint that was restored last
    # the rate limiter, see ``gate``; four words as in ``RateLimiter``, 0 for None
    LIMITED = 40  # 1: limited by the next four words, 2: not limited, 0: not set yet
    MIN_SIZE_TO_SAMPLE = 41
    SAMPLES_PER_INSERT = 42  # float64
    ERROR_BUFFER = 43  # float64
    MAX_TIMES_SAMPLED = 44
    SAMPLED = 45  # rows returned by samples
    INSERT_BASE = 46  # the write count from which inserts are counted
    AVAILABLE = 47  # published rows that may be sampled; without MAX_TIMES_SAMPLED, all of them
    BELL_WAITED = 48
    BELL_RUNG = 49
    LIMITER_WAITS = 50  # a counter
    ERA = 51  # the era of a shard, see ``host.HostState``
    HIDDEN = 52  # a bit for each column of ``spec.HIDDEN`` that rows have
    RESTORES = 53  # how often a checkpoint was restored
    DRAWN = 54  # rows that samples drew without a limiter, see ``ReplayDirectory.count``
    INTERRUPTED = 55  # a member left after a stop signal or an exception; no files are removed
    # frames that are stored once, see ``frames``
    FRAME_CURSOR = 56  # the next ticket of a frame
    FRAME_LOW = 57  # no row that is published or being written has a smaller mark
    DROPPED_ROWS = 58  # a counter: rows dropped because new frames needed their frames' cells
    FRAMES_SET = 59  # frames.json exists
    PATCHES = 60  # grows by 1 when a patch begins and when it ends, see ``patches``
    STRUCTURE = 61  # a bit for each column by which rows are found or ranked
    FILLER = 62  # id + 1 of the member that fills a data set; 0: no member; -1: the set is complete
    RANKED = 63  # which column and reduction rank the rows, see ``ranking``; 0: none
    # rows that are too old, see ``times_sampled.retire``
    OLDEST_COLUMN = 64  # 1 + the number of the column that is compared; 0: no row is too old
    OLDEST = 65  # rows with a smaller number in that column are too old
    RETIRED_ROWS = 66  # a counter
    WIDTH = 67  # size of the rows' second dimension, see ``dimensions``; 0: one dimension


JOURNAL_ENTRIES = 5
SAVED_FLOAT_WORDS = frozenset({Word.ALPHA, Word.EPS, Word.MAX_PRIORITY})
LARGEST_COUNT = 2**62
"""Upper limit of tickets and counts. In practice, no buffer reaches it."""

COUNTERS = {
    word.name.lower(): word
    for word in (
        Word.REREAD_ROWS,
        Word.LOCKED_READS,
        Word.STALE_UPDATES,
        Word.UNVERIFIED_UPDATES,
        Word.TAKEN_OVER_CLAIMS,
        Word.REPAIRS,
        Word.LIMITER_WAITS,
        Word.DROPPED_ROWS,
        Word.RETIRED_ROWS,
    )
}


def control_tables(control: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return words, claims and members of the control block.

    They are int64 [CONTROL_WORDS], [MAX_CLAIMS, 4] and [MAX_MEMBERS, 2]."""
    words, claims, members = np.split(control, [CONTROL_WORDS, CONTROL_WORDS + 4 * MAX_CLAIMS])
    return words, claims.reshape(MAX_CLAIMS, 4), members.reshape(MAX_MEMBERS, 2)


def counters_in(words: Sequence[int] | np.ndarray) -> dict[str, int]:
    """Return the counters by name."""
    return {name: int(words[word]) for name, word in COUNTERS.items()}


def control_bytes() -> int:
    """Return the size of ``control.bin``."""
    return 8 * (CONTROL_WORDS + 4 * MAX_CLAIMS + 2 * MAX_MEMBERS)

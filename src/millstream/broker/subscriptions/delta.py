"""The events of a queue. The state of a queue is the fold of its deltas, on its leader and in the store alike."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class DeltaKind(IntEnum):
    """What happened to a range of messages."""

    START = 1
    """The queue starts at `first`."""
    SCANNED = 2
    """The range was scanned, and is available unless a following delta says otherwise."""
    FILTERED = 3
    """The filter excludes the range; with `extra`, the offsets whose bit is set."""
    ABSENT = 4
    """The range holds no messages: markers, aborted transactions, compacted records."""
    PARKED = 5
    """Delayed until `due_ms` when published."""
    DUE = 6
    """No longer parked; available again."""
    ACQUIRED = 7
    """Leased to `worker` until `due_ms`."""
    ACCEPTED = 8
    RELEASED = 9
    """Released by the worker, or because it is gone; parked until `due_ms` if that is later than `time_ms`."""
    EXPIRED = 10
    """The lease expired; parked until `due_ms`, or available again."""
    EXTENDED = 11
    """The lease was extended until `due_ms`."""
    REJECTING = 12
    """On its way to the dead letter topic, for `reason`."""
    PLANNED = 13
    """The planned dead letter is in `extra`; durable before the letter is written."""
    DEAD_LETTERED = 14
    """Written to the dead letter topic at the position in `extra`."""
    DROPPED = 15
    """Dropped for `reason` after the last attempt, without a dead letter topic."""
    SOUGHT = 16
    """The queue forgot everything and continues at `first`; `last` is where its scan had reached."""
    RETENTION_CUT = 17
    """The log no longer holds the range; unfinished messages in it end."""
    LEFT_BEHIND = 18
    """An unfinished message leaves the window, so that the start can advance; `extra` is its key."""
    REVIVED = 19
    """Dead letters are available again as if never delivered; `extra` holds the key and letter of each."""
    LETTER_CLOSED = 20
    """The letters by which messages were revived are closed and will not be used again."""
    WINDOW = 21
    """The scan has reached `first`, and `extra` holds the unfinished messages before it; only the ledger needs it."""


class Delta(NamedTuple):
    """One event about consecutive messages."""

    kind: DeltaKind
    first: int
    last: int
    attempt: int
    """The delivery that it concerns; 0 before the first."""
    due_ms: int
    worker: str
    """`protocol/member`; empty if no worker is involved."""
    time_ms: int
    reason: str = ""
    extra: bytes = b""

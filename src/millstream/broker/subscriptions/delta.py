"""What happens to the messages of a queue, as events. A queue is the fold of its deltas, and so is the ledger."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class DeltaKind(IntEnum):
    """What happened to a range of messages."""

    START = 1
    """The queue begins at `first`."""
    SCANNED = 2
    """These were read from the log, and are available unless the deltas that follow say otherwise."""
    FILTERED = 3
    """The filter leaves these out; with `extra`, those whose bit is set."""
    ABSENT = 4
    """No messages stand at these offsets: markers, aborted transactions, what compaction took."""
    PARKED = 5
    """Delayed until `due_ms` from the beginning."""
    DUE = 6
    """What was parked is available again."""
    ACQUIRED = 7
    """Leased to `worker` until `due_ms`."""
    ACCEPTED = 8
    RELEASED = 9
    """Given back by the worker, or because it has gone; parked until `due_ms` if that is later than `time_ms`."""
    EXPIRED = 10
    """The lease ran out; the message is parked until `due_ms`, or available again."""
    EXTENDED = 11
    """The lease lasts until `due_ms` now."""
    REJECTING = 12
    """Goes to the dead letter topic, for `reason`."""
    PLANNED = 13
    """How the dead letter will be produced, in `extra`; durable before it is."""
    DEAD_LETTERED = 14
    """It stands in the dead letter topic, at the place that `extra` names."""
    DROPPED = 15
    """It failed for good, for `reason`, and there is no dead letter topic."""
    SOUGHT = 16
    """Everything is forgotten, and the queue goes on at `first`; `last` is where it had looked to."""
    RETENTION_CUT = 17
    """The log no longer has these; what was not done of them never will be."""
    LEFT_BEHIND = 18
    """An unfinished message leaves the window, so that the window's start can move on; `extra` is its key."""
    REVIVED = 19
    """Dead letters are available again, as if they had never been delivered; `extra` has key and letter of each."""
    LETTER_CLOSED = 20
    """The letters by which messages were revived are closed, so nobody will revive them by these again."""


class Delta(NamedTuple):
    """One event about consecutive messages."""

    kind: DeltaKind
    first: int
    last: int
    attempt: int
    """The delivery that it is about; 0 before the first."""
    due_ms: int
    worker: str
    """`door/member`, empty where nobody is involved."""
    time_ms: int
    reason: str = ""
    extra: bytes = b""

"""The values of a queue: its deltas, and the leases, settlements and rejections that it exchanges with callers."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from millstream.core.errors import InvalidRecordState
from millstream.core.ids import Offset
from millstream.core.subscription import Verb


class DeltaKind(IntEnum):
    """The kind of an event in a range of messages."""

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
    """Rejected for `reason`, and not yet written to the dead letter topic."""
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


class Lease(NamedTuple):
    """Consecutive messages that one worker holds, all in the same attempt."""

    first: Offset
    last: Offset
    attempt: int
    """The number of this delivery, from 1."""
    deadline_ms: int


class Origin(NamedTuple):
    """The client through which a worker asks for messages; empty where it is not known."""

    client_id: str = ""
    address: str = ""


class HeldRange(NamedTuple):
    """Consecutive messages that one worker holds, and the client through which it asked."""

    first: Offset
    last: Offset
    attempt: int
    deadline_ms: int
    worker: str
    origin: Origin


class Settlement(NamedTuple):
    """A verb for consecutive messages, which applies to all of them or to none."""

    first: Offset
    last: Offset
    verb: Verb
    delay_ms: int | None = None
    """Release: the time until the next attempt, None for the declared backoff. Return: the same, None for immediately.
    Extend: the length of the lease from now on, None for the declared one.
    """
    reason: str = ""
    attempt: int | None = None
    """The delivery to settle, so that an old lease does not settle a newer one; None for any."""

    def not_held_by(self, worker: str) -> InvalidRecordState:
        """Build the error for a worker without a lease, or with one of another delivery."""
        what = f"message {self.first}" if self.first == self.last else f"messages {self.first} to {self.last}"
        return InvalidRecordState(f"{worker} does not hold {what} any more, or never did")


LETTER_BYTES: Final = 28
"""The id of the dead letter topic, the partition and the offset."""


POSITION: Final = struct.Struct(">iq")
"""The partition and offset of a dead letter, as a `DEAD_LETTERED` delta holds them before the topic's name."""


LOST_REASON: Final = "the log no longer has the message"
"""Why a rejected message is dropped that cannot be written to the dead letter topic any more."""


class RejectedMessage(NamedTuple):
    """A rejected message that is not yet written to the dead letter topic."""

    offset: Offset
    attempts: int
    reason: str
    first_ms: int
    """The time of the first delivery."""
    time_ms: int
    """The time of the rejection."""
    plan: bytes
    """The plan of the letter; empty until there is one."""


class Revival(NamedTuple):
    """A message to deliver again, and its dead letter."""

    offset: Offset
    key: int
    """The hash of the key; 0 without a key."""
    letter: bytes
    """The position of the letter, `LETTER_BYTES` long."""

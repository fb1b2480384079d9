"""Values that a queue exchanges with its callers: leases, settlements, rejected and revived messages."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from millstream.core.errors import InvalidRecordState
from millstream.core.ids import Offset
from millstream.core.verb import Verb


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
    """Why a message is released or rejected; the dead letter carries it."""
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


class Rejected(NamedTuple):
    """A message on its way to the dead letter topic."""

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

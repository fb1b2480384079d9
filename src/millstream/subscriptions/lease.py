"""What workers are given and what they say: leases, and the four verbs that settle them."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from millstream.model.errors import InvalidRecordState
from millstream.model.ids import Offset


class Lease(NamedTuple):
    """Consecutive messages that one worker holds, all in the same attempt."""

    first: Offset
    last: Offset
    attempt: int
    """The how manieth delivery this is, from 1."""
    deadline_ms: int


class Verb(IntEnum):
    """What a worker says of messages that it holds; the first four numbers are those of Kafka's acknowledgements."""

    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    EXTEND = 4
    RETURN = 5
    """Nobody has looked at it, so it goes to another worker as if it had never been given."""


class Settle(NamedTuple):
    """One verb about consecutive messages; it is carried out for all of them or for none."""

    first: Offset
    last: Offset
    verb: Verb
    delay_ms: int | None = None
    """Release: how long until the next attempt, None for the backoff that is declared. Extend: for how long from now
    on, None for the declared lease."""
    reason: str = ""
    """Release, reject: why; the dead letter carries it."""
    attempt: int | None = None
    """The delivery that the worker speaks of, so that an old lease of it does not settle a newer one; None for any."""

    def not_held_by(self, worker: str) -> InvalidRecordState:
        """Why it is refused when the worker has no lease, or one of another delivery."""
        what = f"message {self.first}" if self.first == self.last else f"messages {self.first} to {self.last}"
        return InvalidRecordState(f"{worker} does not hold {what}, or not any more")

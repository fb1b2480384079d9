"""What workers are given and what they say: leases, and what settles them."""

from __future__ import annotations

from typing import Final, NamedTuple

from millstream.core.errors import InvalidRecordState
from millstream.core.ids import Offset
from millstream.core.verb import Verb


class Lease(NamedTuple):
    """Consecutive messages that one worker holds, all in the same attempt."""

    first: Offset
    last: Offset
    attempt: int
    """The how manieth delivery this is, from 1."""
    deadline_ms: int


class Settlement(NamedTuple):
    """One verb about consecutive messages; it is carried out for all of them or for none."""

    first: Offset
    last: Offset
    verb: Verb
    delay_ms: int | None = None
    """Release: how long until the next attempt, None for the declared backoff. Return: the same, None for at once.
    Extend: for how long from now on, None for the declared lease."""
    reason: str = ""
    """Release, reject: why; the dead letter carries it."""
    attempt: int | None = None
    """The delivery that the worker speaks of, so that an old lease of it does not settle a newer one; None for any."""

    def not_held_by(self, worker: str) -> InvalidRecordState:
        """Why it is refused when the worker has no lease, or one of another delivery."""
        what = f"message {self.first}" if self.first == self.last else f"messages {self.first} to {self.last}"
        return InvalidRecordState(f"{worker} does not hold {what}, or not any more")


LETTER_BYTES: Final = 28
"""The id of the dead letter topic, the partition and the offset."""


class Rejected(NamedTuple):
    """A message on its way to the dead letter topic."""

    offset: Offset
    attempts: int
    reason: str
    first_ms: int
    """When it was delivered for the first time."""
    time_ms: int
    """When it was rejected."""
    plan: bytes
    """How it will be produced, as it was planned; empty until then."""


class Revival(NamedTuple):
    """A message that is to be delivered again, and the dead letter by which it is."""

    offset: Offset
    key: int
    """The hash of its key, 0 without one."""
    letter: bytes
    """Where the letter is, `LETTER_BYTES` long."""

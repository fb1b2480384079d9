"""Messages on their way to the dead letter topic, and on their way back."""

from __future__ import annotations

from typing import Final, NamedTuple

from millstream.core.ids import Offset

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

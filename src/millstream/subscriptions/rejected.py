"""A message that nobody wants any more, as whoever writes dead letters takes it over from the queue."""

from __future__ import annotations

from typing import NamedTuple

from millstream.model.ids import Offset


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

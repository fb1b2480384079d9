"""Where a message of a queue is. Each takes one byte in the window, so that the columns can be searched as bytes."""

from __future__ import annotations

from typing import Final

AVAILABLE: Final = 0
"""Waits for a worker."""
LEASED: Final = 1
"""With a worker, until its lease ends."""
PARKED: Final = 2
"""Waits for a time: it is delayed, or it failed and will be tried again."""
BLOCKED: Final = 3
"""Waits for an earlier message of its key. Only the leader of a queue knows this state; stored, it is available."""
REJECTING: Final = 4
"""On its way to the dead letter topic."""
DONE: Final = 5
"""Nothing more happens to it: accepted, dead-lettered, dropped, filtered out, or no message at all."""

STATES: Final = 6

"""The limits of one connection."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds on frame sizes and on slow clients."""

    frame_bytes_max: int
    stall_s: float = 60.0
    """A partly sent frame or an unread reply that makes no progress for this long ends the connection."""
    pressed_stall_s: float = 5.0
    """The same while others wait for memory."""
    pressed_frame_s: float = 60.0
    """While others wait for memory, a frame must be complete after this long, however steadily it arrives."""

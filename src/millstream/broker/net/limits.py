"""What one connection may do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds on frames, and on patience."""

    frame_bytes_max: int
    stall_s: float = 60.0
    """A half-sent frame or an unread reply that makes no progress for this long ends the connection."""
    pressed_stall_s: float = 5.0
    """The same while others wait for memory."""
    pressed_frame_s: float = 60.0
    """While others wait for memory, a frame has to be complete after this long, however steadily it drips in."""

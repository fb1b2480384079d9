"""Receive buffers that are reused, because fresh memory costs page faults for every megabyte."""

from __future__ import annotations

BUFFER_BYTES = 2 * 1024 * 1024
KEPT_MAX = 16


class FrameBuffers:
    """A bounded stack of buffers of one size; the last one used is the most likely to be in the cache."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self) -> bytearray:
        """Return a buffer with arbitrary content."""
        return self._free.pop() if self._free else bytearray(BUFFER_BYTES)

    def give_back(self, buffer: bytearray) -> None:
        """Keep a buffer for the next frame, unless enough are kept or it has another size."""
        if len(buffer) == BUFFER_BYTES and len(self._free) < KEPT_MAX:
            self._free.append(buffer)

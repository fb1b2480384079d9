"""A partly received frame, in a buffer that grows with the received bytes, never with the announced size; also the
frames that arrived together with the one that is being served.

Large buffers are reused, because fresh memory costs page faults for every megabyte.
"""

from __future__ import annotations

from millstream.broker.net.budget import Budget
from millstream.core.errors import ProtocolViolation

BUFFER_BYTES = 2 * 1024 * 1024
KEPT_MAX = 16


class FrameBuffers:
    """A bounded stack of buffers of one size; the last one used is the most likely to be in the cache."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def acquire(self) -> bytearray:
        """Return a buffer with arbitrary content."""
        return self._free.pop() if self._free else bytearray(BUFFER_BYTES)

    def release(self, buffer: bytearray) -> None:
        """Keep a buffer for the next frame, unless enough are kept or it has another size."""
        if len(buffer) == BUFFER_BYTES and len(self._free) < KEPT_MAX:
            self._free.append(buffer)


FRAME_COST_BYTES = 512
"""What a frame costs in addition to its bytes, so that a flood of tiny ones cannot escape the budget."""

FRAME_BYTES_MIN = 4 * 1024
LARGE_BYTES = 64 * 1024
"""A frame gets a buffer for large ones once a quarter of this has arrived."""

_TLS_HANDSHAKE = 0x1603
"""The first bytes of a TLS client."""

_buffers = FrameBuffers()


class PartialFrame:
    """A frame that is being received."""

    __slots__ = ("_budget", "_filled", "buffer", "since", "size")

    def __init__(self, budget: Budget, size: int, start: memoryview, now: float) -> None:
        self._budget = budget
        self._filled = len(start)
        self.size = size
        self.since = now
        self.buffer = self._allocate(may_grow=budget.has_room_to_grow)
        self.buffer[: self._filled] = start

    @property
    def space(self) -> memoryview:
        """Where the next bytes go."""
        return memoryview(self.buffer)[self._filled : self.size]

    @property
    def is_full(self) -> bool:
        """Whether it has filled its buffer and needs a larger one."""
        return self._filled == len(self.buffer)

    def fill(self, nbytes: int) -> bool:
        """Account for received bytes; return whether the frame is complete."""
        self._filled += nbytes
        return self._filled == self.size

    def grow(self) -> None:
        """Continue in a larger buffer; a new one, because the transport may still hold a view of this one."""
        before, self.buffer = self.buffer, self._allocate(may_grow=True)
        self.buffer[: self._filled] = before
        release_buffer(self._budget, before)

    def _allocate(self, *, may_grow: bool) -> bytearray:
        """Return a buffer for four times the received bytes, if there is memory for it."""
        filled = self._filled
        size = min(self.size, max(FRAME_BYTES_MIN, 4 * filled if may_grow else filled + 1))
        is_large = may_grow and size >= LARGE_BYTES and filled < BUFFER_BYTES
        room = _buffers.acquire() if is_large else bytearray(size)
        self._budget.reserve(len(room) + FRAME_COST_BYTES)
        return room


def release_buffer(budget: Budget, buffer: bytearray) -> None:
    _buffers.release(buffer)
    budget.release(len(buffer) + FRAME_COST_BYTES)


def invalid_size(size: int, bytes_max: int) -> ProtocolViolation:
    if size >> 16 == _TLS_HANDSHAKE:
        return ProtocolViolation("the client speaks TLS, but this listener does not")
    return ProtocolViolation(
        f"a request of {size} bytes was announced; 1 to {bytes_max} are allowed "
        "(is the client speaking the Kafka protocol without TLS?)"
    )


NO_BYTES = memoryview(b"")


class PipelinedRequests:
    """The bytes that arrived behind the request that is being served.

    A service may serve whole requests among them in the same step; the response that it returns is then for all.
    """

    __slots__ = ("at", "data", "served", "served_bytes")

    def __init__(self) -> None:
        self.data = NO_BYTES
        self.at = 0
        """Where the next request begins."""
        self.served = self.served_bytes = 0
        """How many requests among them were served."""

    @property
    def may_combine(self) -> bool:
        """Whether further requests may be served in the same step."""
        return self.at < len(self.data)

    def serve(self, count: int, end: int) -> None:
        """Record that the next requests were served, up to a position."""
        self.served += count
        self.served_bytes += end - self.at
        self.at = end

"""The budget of bytes in flight: the memory that all clients together may use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

ROOM_SHARE = 4
"""A response, or a piece of it, takes at most this fraction of the remaining memory."""


class Budget:
    """Counts bytes and queues those who wait for room.

    Partly received frames must not wait for memory that other partly received frames hold, or they would deadlock.
    Frames may therefore grow only up to three quarters of the budget, which leaves room for small requests, and beyond
    that one at a time: the holder of the pass may exceed the limits, finish, and release the pass.
    """

    __slots__ = ("_growing", "_pass", "_waiting", "limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._waiting: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._growing: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._pass: Hashable | None = None

    @property
    def has_room(self) -> bool:
        """Whether anything may be taken now. The last one may exceed the limit, so that no large request is stuck."""
        return self.used_bytes < self.limit_bytes

    @property
    def has_room_to_grow(self) -> bool:
        """Whether frames that are being received may take more."""
        return self.used_bytes < self.limit_bytes * 3 // 4

    @property
    def room_bytes(self) -> int:
        """How much may still be taken."""
        return max(0, self.limit_bytes - self.used_bytes)

    @property
    def share_bytes(self) -> int:
        """How much one response may take, so that clients that do not read leave some for others.

        At least one byte while there is room, otherwise 0.
        """
        return -(-self.room_bytes // ROOM_SHARE)

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._waiting) + len(self._growing)

    def reserve(self, size_bytes: int) -> None:
        """Count bytes as held; callers check `has_room` first."""
        self.used_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Count bytes as free again, and wake those that wait while there is room."""
        self.used_bytes -= size_bytes
        while self._waiting and self.has_room:
            self._waiting.popitem(last=False)[1]()
        while self._growing and self.has_room_to_grow:
            self._growing.popitem(last=False)[1]()

    def change(self, by_bytes: int) -> None:
        """Count more or fewer bytes as held."""
        if by_bytes > 0:
            self.reserve(by_bytes)
        elif by_bytes < 0:
            self.release(-by_bytes)

    def wait(self, who: Hashable, resume: Callable[[], None]) -> None:
        """Call `resume` once there is room; at most one wait per `who`."""
        self._waiting[who] = resume

    def wait_to_grow(self, who: Hashable, resume: Callable[[], None]) -> None:
        """Call `resume` once there is room to grow, or the pass is free."""
        self._growing[who] = resume

    def acquire_pass(self, who: Hashable) -> bool:
        """Let one at a time grow beyond the limits; return False while another one does."""
        if self._pass is None:
            self._pass = who
        return self._pass is who

    def release_pass(self, who: Hashable) -> None:
        """Release the pass and wake the next frame that waits for it."""
        if self._pass is who:
            self._pass = None
            if self._growing:
                self._growing.popitem(last=False)[1]()

    def stop_waiting(self, who: Hashable) -> None:
        """Forget a wait, for example because the connection closed."""
        self._waiting.pop(who, None)
        self._growing.pop(who, None)

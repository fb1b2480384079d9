"""Track which keys of an ordered queue are in use, and which messages wait behind them.

A key is in use from the time that one of its messages is leased or next in line until that message is done or rejected.
Later messages of the key are blocked in the order of their offsets; a delayed message queues up when it is due. Keys
are known by a 64-bit hash. 0 means no key, and messages without a key are never blocked.

After a restart the keys are read from the log again: first those of messages that hold their key, wherever they are,
which determines what is blocked; then the others in the order of their offsets, as far as messages are demanded.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterable, Sequence
from typing import Final

NO_KEY: Final = 0
_CONSUMED_MAX: Final = 64
_GAP_MAX: Final = 64
_SPAN_MAX: Final = 2000


class KeyOrder:
    """The keys of the window's messages, and which of them are in use."""

    __slots__ = ("_base", "_heads", "_holder_keys", "_holders_end", "_keys", "_unread_holders", "_waiting", "is_ready")

    def __init__(self, start: int, holding: Iterable[tuple[int, int]] = ()) -> None:
        """Start with no keys known from an offset on; `holding` are the ranges of messages that hold their key."""
        self._keys = array("q")
        self._base = start
        # The keys of holders beyond the known ones, and the ranges of holders still to be read, the last first.
        self._holder_keys: dict[int, int] = {}
        self._unread_holders = sorted(holding, reverse=True)
        self._holders_end = self._unread_holders[0][1] + 1 if self._unread_holders else 0
        # By key: the message whose turn it is; and behind it, the index of the next in this array, and all that queued
        # up.
        self._heads: dict[int, int] = {}
        self._waiting: dict[int, array[int]] = {}
        self.is_ready = False
        """Whether all messages that hold their key have entered."""

    @property
    def next_offset(self) -> int:
        """The offset whose key is learned next."""
        return self._base + len(self._keys)

    @property
    def next_scan_offset(self) -> int:
        """Return the offset from which the log must be read."""
        return self._unread_holders[-1][0] if self._unread_holders else self.next_offset

    @property
    def has_unread_holders(self) -> bool:
        """Return whether holders must be read first."""
        return bool(self._unread_holders)

    @property
    def scan_offsets_max(self) -> int:
        """How many offsets to read at once: holders that lie close together."""
        first, end = self._unread_holders[-1]
        for begin, last in reversed(self._unread_holders):
            if begin - end > _GAP_MAX or end - first > _SPAN_MAX:
                break
            end = last
        return end - first + 1

    @property
    def in_use(self) -> int:
        """The number of keys in use."""
        return len(self._heads)

    def learn(self, keys: bytes) -> None:
        """Add the keys of the following messages, 8 bytes each."""
        self._keys.frombytes(keys)
        if self._holder_keys and not self._unread_holders and self._holders_end <= self.next_offset:
            self._holder_keys = {}

    def learn_holders(self, first: int, keys: Sequence[int]) -> None:
        """Add the keys of holders in a range of the log; holders before it have no key."""
        after = first + len(keys)
        while self._unread_holders and self._unread_holders[-1][0] < after:
            begin, last = self._unread_holders.pop()
            for offset in range(begin, min(last + 1, after)):
                self._holder_keys[offset] = keys[offset - first] if offset >= first else NO_KEY
            if last >= after:
                self._unread_holders.append((after, last))

    def trim(self, base: int) -> None:
        """Forget the keys of messages before an offset."""
        if base > self._base:
            del self._keys[: base - self._base]
            self._base = base

    def key_of(self, offset: int) -> int:
        """Return the key of a message in the window that holds its key or has been reached."""
        index = offset - self._base
        return self._keys[index] if index < len(self._keys) else self._holder_keys[offset]

    def keys(self, first: int, last: int) -> array[int]:
        """Return the keys of messages in the window."""
        return self._keys[first - self._base : last + 1 - self._base]

    def try_enter(self, key: int, offset: int) -> bool:
        """Give a message its turn, or queue it behind its key; return whether it has its turn."""
        if key == NO_KEY:
            return True
        head = self._heads.setdefault(key, offset)
        if head == offset:
            return True
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = array("q", (1, offset))
        else:
            waiting.append(offset)
        return False

    def head_of(self, key: int) -> int | None:
        """Return the message whose turn it is for a key."""
        return self._heads.get(key)

    def insert_waiting(self, key: int, offset: int) -> None:
        """Queue a message behind its key, before all later ones."""
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = array("q", (1, offset))
        else:
            insort(waiting, offset, waiting[0])

    def set_head(self, key: int, offset: int) -> None:
        """Give a waiting message its turn."""
        self._heads[key] = offset

    def leave(self, key: int, offset: int) -> bool:
        """Free the key of a message; return whether it had its turn, so that another may follow."""
        if key == NO_KEY or self._heads.get(key) != offset:
            return False
        del self._heads[key]
        return True

    def next_waiting(self, key: int) -> int | None:
        """Remove and return the message that has waited longest behind a key; the caller decides whether it enters."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return None
        place = waiting[0]
        offset = waiting[place]
        if place + 1 == len(waiting):
            del self._waiting[key]
        elif place > _CONSUMED_MAX and place > len(waiting) >> 1:
            del waiting[1 : place + 1]
            waiting[0] = 1
        else:
            waiting[0] = place + 1
        return offset

    def heads_before(self, offset: int) -> list[tuple[int, int]]:
        """Return the keys whose current message lies before an offset, with that message."""
        return [(key, head) for key, head in self._heads.items() if head < offset]

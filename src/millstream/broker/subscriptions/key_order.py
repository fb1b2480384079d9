"""Which keys of an ordered queue are in use, and who waits behind them.

A key is in use from when one of its messages is leased, or is next in line, until that message is done or on its way
to the dead letter topic. Later messages of the key are blocked, in the order in which they came up, which is the order
of their offsets (a delayed message comes up when it is due). Keys are known by a 64-bit hash; 0 stands for no key,
and what has none waits for nobody.

After a restart the keys are read again from the log. First those of messages that hold their keys, wherever they stand:
then it is known who may not be given. The others follow in the order of their offsets, as far as messages are wanted.
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
    """The keys of the window's messages, and those in use."""

    __slots__ = ("_base", "_heads", "_holder_keys", "_holders_end", "_keys", "_unread_holders", "_waiting", "is_ready")

    def __init__(self, start: int, holding: Iterable[tuple[int, int]] = ()) -> None:
        """From an offset on nothing is known; `holding` are the ranges of messages that hold their keys already."""
        self._keys = array("q")
        self._base = start
        # The keys of those that hold them and lie beyond the others; and which of them are to be read, the last first.
        self._holder_keys: dict[int, int] = {}
        self._unread_holders = sorted(holding, reverse=True)
        self._holders_end = self._unread_holders[0][1] + 1 if self._unread_holders else 0
        # Whose turn it is, by key; and behind it, by key: where the next stands in this array, and all that came up.
        self._heads: dict[int, int] = {}
        self._waiting: dict[int, array[int]] = {}
        self.is_ready = False
        """Whether all messages that hold their keys have entered."""

    @property
    def next_offset(self) -> int:
        """The offset whose key is learned next."""
        return self._base + len(self._keys)

    @property
    def next_scan_offset(self) -> int:
        """The offset from which on the log is to be read."""
        return self._unread_holders[-1][0] if self._unread_holders else self.next_offset

    @property
    def has_unread_holders(self) -> bool:
        """Whether messages that hold their keys are to be read first."""
        return bool(self._unread_holders)

    @property
    def scan_offsets_max(self) -> int:
        """How many offsets are to be read of them at once: those that lie close together."""
        first, end = self._unread_holders[-1]
        for begin, last in reversed(self._unread_holders):
            if begin - end > _GAP_MAX or end - first > _SPAN_MAX:
                break
            end = last
        return end - first + 1

    @property
    def in_use(self) -> int:
        """How many keys are in use."""
        return len(self._heads)

    def learn(self, keys: bytes) -> None:
        """Add the keys of the messages that follow, 8 bytes each."""
        self._keys.frombytes(keys)
        if self._holder_keys and not self._unread_holders and self._holders_end <= self.next_offset:
            self._holder_keys = {}

    def learn_holders(self, first: int, keys: Sequence[int]) -> None:
        """Take what is wanted of the keys of a stretch of the log; what lies before it has none."""
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
        """The key of a message in the window, if it holds it or has been reached."""
        index = offset - self._base
        return self._keys[index] if index < len(self._keys) else self._holder_keys[offset]

    def keys(self, first: int, last: int) -> array[int]:
        """The keys of messages in the window."""
        return self._keys[first - self._base : last + 1 - self._base]

    def try_enter(self, key: int, offset: int) -> bool:
        """Whether it is the message's turn; otherwise it waits from now on."""
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
        """Whose turn it is, if anybody's."""
        return self._heads.get(key)

    def insert_waiting(self, key: int, offset: int) -> None:
        """Have a message wait among those behind its key, before all later ones."""
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = array("q", (1, offset))
        else:
            insort(waiting, offset, waiting[0])

    def set_head(self, key: int, offset: int) -> None:
        """It is the turn of a message that has waited."""
        self._heads[key] = offset

    def leave(self, key: int, offset: int) -> bool:
        """The message is done with; whether it was its turn, so that somebody else may be next."""
        if key == NO_KEY or self._heads.get(key) != offset:
            return False
        del self._heads[key]
        return True

    def next_waiting(self, key: int) -> int | None:
        """Who came up first behind a key; it is for the caller to let it enter, or to ask for the next."""
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
        """The keys whose turn is a message before an offset, with that message."""
        return [(key, head) for key, head in self._heads.items() if head < offset]

"""Which keys of an ordered queue are in use, and who waits behind them.

A key is in use from when one of its messages is leased, or is next in line, until that message is done or on its way
to the dead letter topic. Later messages of the key are blocked, in the order in which they came up, which is the order
of their offsets (a delayed message comes up when it is due). Keys are known by a 64-bit hash; 0 stands for no key,
and what has none waits for nobody.
"""

from __future__ import annotations

from array import array
from typing import Final

NO_KEY: Final = 0
_GONE_MAX: Final = 64


class KeyOrder:
    """The keys of the window's messages, and those in use."""

    __slots__ = ("_base", "_heads", "_keys", "_waiting", "is_ready")

    def __init__(self, start: int, *, is_ready: bool) -> None:
        self._keys = array("q")
        self._base = start
        # Whose turn it is, by key; and behind it, by key: where the next stands in this array, and all that came up.
        self._heads: dict[int, int] = {}
        self._waiting: dict[int, array[int]] = {}
        self.is_ready = is_ready
        """Whether the keys of the whole window are known. After a restart they have to be read again."""

    @property
    def next_offset(self) -> int:
        """The offset whose key is learned next."""
        return self._base + len(self._keys)

    @property
    def in_use(self) -> int:
        """How many keys are in use."""
        return len(self._heads)

    def learn(self, keys: bytes) -> None:
        """Add the keys of the messages that follow, 8 bytes each."""
        self._keys.frombytes(keys)

    def trim(self, base: int) -> None:
        """Forget the keys of messages before an offset."""
        if base > self._base:
            del self._keys[: base - self._base]
            self._base = base

    def key_of(self, offset: int) -> int:
        """The key of a message in the window."""
        return self._keys[offset - self._base]

    def keys(self, first: int, last: int) -> array[int]:
        """The keys of messages in the window."""
        return self._keys[first - self._base : last + 1 - self._base]

    def enter(self, key: int, offset: int) -> bool:
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

    def lead(self, key: int, offset: int) -> None:
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
        elif place > _GONE_MAX and place > len(waiting) >> 1:
            del waiting[1 : place + 1]
            waiting[0] = 1
        else:
            waiting[0] = place + 1
        return offset

    def heads_before(self, offset: int) -> list[tuple[int, int]]:
        """The keys whose turn is a message before an offset, with that message."""
        return [(key, head) for key, head in self._heads.items() if head < offset]

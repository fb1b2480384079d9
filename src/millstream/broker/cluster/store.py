"""The interface of the coordination store: a small ordered key-value store with compare-and-swap.

It has two back ends: `embedded_store` in the memory of the process, and `etcd_store`.

Keys are texts like `nodes/1`, relative to the part of the service that belongs to this cluster. Every change of the
store has a revision, higher than that of the change before; all changes of one call share it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from millstream.core.clock import Clock

_logger = logging.getLogger(__name__)

CHANGES_MAX = 64

EXPECTS_MAX = CHANGES_MAX + 16
"""How many keys one call may name a revision for: those it changes, and some that fence it."""

ABSENT = 0
"""The revision of a key that does not exist."""


class Entry(NamedTuple):
    key: str
    value: str
    revision: int
    """The revision of the last change of this key."""
    created: int
    """The revision of the change that created it."""


class Snapshot(NamedTuple):
    """All keys below a prefix at one revision of the store; a watch continues after it."""

    entries: Mapping[str, Entry]
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Set a key, whether it exists or not."""

    key: str
    value: str
    leased: bool = False
    """The key is removed when this store's session ends."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key; nothing happens if it does not exist."""

    key: str


Change = Put | Delete


class Expect(NamedTuple):
    """A condition: the key was last changed at this revision; `ABSENT` means that it must not exist."""

    key: str
    revision: int


class Event(NamedTuple):
    key: str
    value: str | None
    """None if the key was deleted, or removed with its session."""
    revision: int


class Session(Protocol):
    """A lease that is kept alive while the process is healthy; keys put with `leased` are removed when it ends."""

    @property
    def live(self) -> bool:
        """Return whether this node believes that it holds. Safety relies only on compare-and-swap."""

    @property
    def confirmed(self) -> bool:
        """Whether the store has confirmed it within its time to live; otherwise it may be over by now."""

    async def close(self) -> None:
        """End it, and with it its keys, at once if the store can be reached, otherwise when its time runs out.

        `on_lost` is not called for it. Never raises because the store is unavailable.
        """


class CoordinationStore(Protocol):
    """A node's access to the store. All methods are called on the event loop."""

    @property
    def available(self) -> bool:
        """Whether the store responded to the last call."""

    @property
    def unavailable_since_ms(self) -> int | None:
        """The wall-clock time since which it has not responded; None while it is available."""

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener`, on the event loop, each time `available` changes."""

    async def read(self, prefix: str) -> Snapshot:
        """Return every key that begins with `prefix`, including everything acknowledged before this call.

        Raises StoreUnavailable if no response came in time.
        """

    async def change(self, changes: Sequence[Change], expect: Sequence[Expect] = ()) -> int | None:
        """Carry out all changes in one step if every expectation holds; otherwise change nothing and return None.

        The result is the revision that the keys have now. A call changes at most `CHANGES_MAX` keys, each once.

        Raises StoreRefused if certainly nothing was changed, otherwise StoreUnavailable: then it may have been carried
        out, and the caller has to read back.
        """

    def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Sequence[Event], None]:
        """Yield every change below `prefix` with a revision above `after`, in order, none missing and none twice.

        All changes of one revision come in one batch; a batch may hold several revisions. It waits while the store is
        unavailable. Raises WatchLost if the store has forgotten that part of its history: read everything again. Close
        it (`contextlib.aclosing`) when leaving it early.
        """

    async def open_session(self, ttl_s: float, on_lost: Callable[[], None]) -> Session:
        """Begin a session; `Put(leased=True)` belongs to the last one opened, and the one before must have ended.

        It is lost if this process does not let its event loop run for `ttl_s`, and if the store says that it has ended,
        which it does after `ttl_s` without a renewal. `on_lost` is then called once, on the event loop. While the store
        is unavailable as a whole nothing is lost: its sessions do not expire.
        """

    async def close(self) -> None:
        """End the session, the watches and every connection."""


def check_changes(changes: Sequence[Change], expect: Sequence[Expect]) -> None:
    """Check the limits that all back ends share, so that a mistake fails with each of them."""
    if len(changes) > CHANGES_MAX or len(expect) > EXPECTS_MAX:
        raise ValueError(
            f"{len(changes)} changes (at most {CHANGES_MAX}), {len(expect)} expectations (at most {EXPECTS_MAX})"
        )
    if len({change.key for change in changes}) != len(changes):
        raise ValueError("one call changes each key at most once")


class StoreHealth:
    """The health of the store according to its last call; the common base of the back ends."""

    def __init__(self, clock: Clock, *, name: str = "etcd") -> None:
        self._health_clock = clock
        self._store_name = name
        self._health_listeners: list[Callable[[], None]] = []
        self._has_responded = False
        self.unavailable_since_ms: int | None = None

    @property
    def available(self) -> bool:
        return self.unavailable_since_ms is None

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time `available` changes."""
        self._health_listeners.append(listener)

    def responded(self) -> None:
        """Record that the store responded, with any result."""
        self._has_responded = True
        if self.unavailable_since_ms is None:
            return
        away_ms = self._health_clock.now_ms() - self.unavailable_since_ms
        self.unavailable_since_ms = None
        _logger.info("%s is available again", self._store_name, extra={"away_ms": away_ms})
        self._notify_health()

    def silent(self, reason: str) -> None:
        """Record that the store did not respond."""
        if self.unavailable_since_ms is not None:
            return
        self.unavailable_since_ms = self._health_clock.now_ms()
        if self._has_responded:
            # Until then, the task that waits for the first response reports it.
            _logger.warning(
                "%s is unavailable; the current leaders continue to serve clients, changes of the cluster wait",
                self._store_name,
                extra={"reason": reason},
            )
        self._notify_health()

    def _notify_health(self) -> None:
        for listener in self._health_listeners:
            listener()

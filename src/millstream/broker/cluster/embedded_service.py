"""A coordination service in the process's memory: what etcd does, without its network, disk and quorum.

Nodes reach it through an `EmbeddedStore` each. It lives as long as the process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millstream.broker.cluster.store import ABSENT, Change, Delete, Entry, Event, Expect, Put, Snapshot
from millstream.core.clock import Clock
from millstream.core.errors import StoreRefused, WatchLost

HISTORY_MAX = 10_000
"""How many revisions a watch may lie behind before it has to read anew."""

LEASES_MAX = 10_000


@dataclass(slots=True)
class _Lease:
    """One session as the service sees it."""

    ttl_s: float
    deadline: float
    keys: set[str] = field(default_factory=set)


class EmbeddedService:
    """Keys, their history and the leases that some of them hang on. Every call is done before it returns."""

    def __init__(self, clock: Clock, *, history_max: int = HISTORY_MAX) -> None:
        self._clock = clock
        self._history_max = history_max
        self._entries: dict[str, Entry] = {}
        self._history: deque[tuple[Event, ...]] = deque()
        self._leases: dict[int, _Lease] = {}
        self._lease_of: dict[str, int] = {}
        self._last_lease = 0
        self._timer: asyncio.TimerHandle | None = None
        self._watchers: set[Callable[[], None]] = set()
        self.revision = 1

    def read(self, prefix: str) -> Snapshot:
        """Every key that begins with `prefix`, in order."""
        self.expire()
        found = {key: self._entries[key] for key in sorted(self._entries) if key.startswith(prefix)}
        return Snapshot(found, self.revision)

    def change(self, changes: Sequence[Change], expect: Sequence[Expect], lease: int | None) -> int | None:
        """Carry out all changes if every expectation holds."""
        self.expire()
        if any(isinstance(change, Put) and change.leased for change in changes) and lease not in self._leases:
            raise StoreRefused("a leased key needs a live session")
        for key, revision in expect:
            entry = self._entries.get(key)
            if revision != (ABSENT if entry is None else entry.revision):
                return None
        self._carry_out(changes, lease)
        return self.revision

    def events(self, prefix: str, *, after: int) -> list[Event]:
        """What changed below `prefix` since a revision."""
        self.expire()
        first_kept = self.revision - len(self._history) + 1
        if after + 1 < first_kept:
            raise WatchLost(f"revision {after + 1} is forgotten; the oldest that is kept is {first_kept}")
        since = range(max(0, after + 1 - first_kept), len(self._history))
        return [event for number in since for event in self._history[number] if event.key.startswith(prefix)]

    def forget_history(self) -> None:
        """Forget every change so far, as etcd does when it compacts; watches that lie behind are lost."""
        self._history.clear()
        self._wake()

    def watch(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called after each change, until the function returned is called."""
        self._watchers.add(wake)
        return lambda: self._watchers.discard(wake)

    def grant(self, ttl_s: float) -> int:
        """Begin a lease."""
        if len(self._leases) >= LEASES_MAX:
            raise StoreRefused(f"there are {LEASES_MAX} sessions already")
        self._last_lease += 1
        self._leases[self._last_lease] = _Lease(ttl_s, self._clock.monotonic() + ttl_s)
        self._set_timer()
        return self._last_lease

    def renew(self, lease_id: int) -> bool:
        """A sign of life; False when the lease has ended."""
        self.expire()
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.deadline = self._clock.monotonic() + lease.ttl_s
        return True

    def revoke(self, lease_id: int) -> None:
        """End a lease, and with it its keys."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._carry_out(tuple(map(Delete, sorted(lease.keys))), None)

    def expire(self) -> None:
        """End every lease whose time has run out."""
        now = self._clock.monotonic()
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if lease.deadline <= now]:
            self.revoke(lease_id)

    def _carry_out(self, changes: Sequence[Change], lease: int | None) -> None:
        revision = self.revision + 1
        events = []
        for change in changes:
            event = (
                self._put(change, revision, lease) if isinstance(change, Put) else self._delete(change.key, revision)
            )
            if event is not None:
                events.append(event)
        if not events:
            return
        self.revision = revision
        self._history.append(tuple(events))
        if len(self._history) > self._history_max:
            self._history.popleft()
        self._wake()

    def _put(self, change: Put, revision: int, lease: int | None) -> Event:
        known = self._entries.get(change.key)
        created = revision if known is None else known.created
        self._entries[change.key] = Entry(change.key, change.value, revision, created)
        self._detach(change.key)
        if change.leased and lease is not None:
            self._lease_of[change.key] = lease
            self._leases[lease].keys.add(change.key)
        return Event(change.key, change.value, revision)

    def _delete(self, key: str, revision: int) -> Event | None:
        self._detach(key)
        return None if self._entries.pop(key, None) is None else Event(key, None, revision)

    def _detach(self, key: str) -> None:
        lease = self._leases.get(self._lease_of.pop(key, 0))
        if lease is not None:
            lease.keys.discard(key)

    def _wake(self) -> None:
        for wake in tuple(self._watchers):
            wake()

    def _set_timer(self) -> None:
        if self._timer is None and self._leases:
            next_s = min(lease.deadline for lease in self._leases.values()) - self._clock.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(next_s, 0), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.expire()
        self._set_timer()

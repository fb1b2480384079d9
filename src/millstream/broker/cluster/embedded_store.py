"""The coordination store in the memory of the process: the service, and each node's access to it.

Everything that would cross a network goes through `_ask` and `_deliver`; a store with faults overrides these two.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from millstream.broker.cluster.store import (
    ABSENT,
    Change,
    Delete,
    Entry,
    Event,
    Expect,
    HealthReporting,
    Put,
    Snapshot,
    check_changes,
)
from millstream.core.clock import Clock
from millstream.core.errors import StoreRefused, StoreUnavailable, WatchLost

HISTORY_MAX = 10_000
"""How many revisions a watch may lag before it must read everything again."""

LEASES_MAX = 10_000


@dataclass(slots=True)
class _Lease:
    """One session as the service sees it."""

    ttl_s: float
    deadline: float
    keys: set[str] = field(default_factory=set)


class EmbeddedService:
    """Keys, their history and the leases of some of them. Every call is done before it returns."""

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
        """Return every key that begins with `prefix`, in order."""
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
        """Return what changed below `prefix` since a revision."""
        self.expire()
        first_kept = self.revision - len(self._history) + 1
        if after + 1 < first_kept:
            raise WatchLost(f"revision {after + 1} is compacted; the oldest revision kept is {first_kept}")
        since = range(max(0, after + 1 - first_kept), len(self._history))
        return [event for number in since for event in self._history[number] if event.key.startswith(prefix)]

    def forget_history(self) -> None:
        """Forget all changes so far, as etcd does when it compacts; watches that lag are lost."""
        self._history.clear()
        self._wake()

    def watch(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after each change, until the returned function is called."""
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
        """Renew a lease; return False if it has ended."""
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


T = TypeVar("T")

RENEWALS = 3
"""How often a session is renewed within its time to live."""


class EmbeddedSession:
    """A lease, renewed by a task of the event loop: a loop that hangs loses it."""

    def __init__(self, store: EmbeddedStore, lease: int, ttl_s: float, on_lost: Callable[[], None]) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._on_lost = on_lost
        self._renewing = asyncio.create_task(self._renew(), name="store-session")
        self.lease = lease
        self.live = True
        self._unanswered = 0

    @property
    def confirmed(self) -> bool:
        """Whether the service has answered one of the last renewals."""
        return self.live and self._unanswered < RENEWALS

    async def close(self) -> None:
        """End the session and its keys."""
        if not self.live:
            return
        self.live = False
        self._renewing.cancel()
        with suppress(StoreUnavailable):
            await self._store.revoke(self.lease)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / RENEWALS)
            if not await self._holds():
                break
        if self.live:
            self.live = False
            self._on_lost()

    async def _holds(self) -> bool:
        try:
            holds = await self._store.renew(self.lease)
        except StoreUnavailable:
            self._unanswered += 1
            return True
        self._unanswered = 0
        return holds


class EmbeddedStore(HealthReporting):
    """The coordination store of a node in the same process as the service."""

    def __init__(self, service: EmbeddedService, clock: Clock) -> None:
        super().__init__(clock)
        self._service = service
        self._session: EmbeddedSession | None = None

    async def read(self, prefix: str) -> Snapshot:
        """Return every key that begins with `prefix`."""
        return await self._call(lambda: self._service.read(prefix))

    async def change(self, changes: Sequence[Change], expect: Sequence[Expect] = ()) -> int | None:
        """Carry out all changes in one step if every expectation holds."""
        check_changes(changes, expect)
        lease = self._session.lease if self._session is not None and self._session.live else None
        return await self._call(lambda: self._service.change(changes, expect, lease))

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Sequence[Event], None]:
        """Yield every change below `prefix` with a revision above `after`."""
        changed = asyncio.Event()
        stop = self._service.watch(changed.set)
        try:
            while True:
                changed.clear()
                seen = self._service.revision
                events = self._service.events(prefix, after=after)
                after = seen
                if events:
                    await self._deliver()
                    yield events
                else:
                    await changed.wait()
        finally:
            stop()

    async def open_session(self, ttl_s: float, on_lost: Callable[[], None]) -> EmbeddedSession:
        """Begin a session."""
        if self._session is not None and self._session.live:
            raise StoreRefused("the previous session has not ended")
        lease = await self._call(lambda: self._service.grant(ttl_s))
        self._session = EmbeddedSession(self, lease, ttl_s, on_lost)
        return self._session

    async def renew(self, lease: int) -> bool:
        """Renew a session; return False if it has ended."""
        return await self._call(lambda: self._service.renew(lease))

    async def revoke(self, lease: int) -> None:
        """End a session in the service."""
        await self._call(lambda: self._service.revoke(lease))

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()

    async def _call(self, request: Callable[[], T]) -> T:
        try:
            answer = await self._ask(request)
        except StoreRefused:
            raise
        except StoreUnavailable as error:
            self._health.silent(str(error))
            raise
        self._health.answered()
        return answer

    async def _ask(self, request: Callable[[], T]) -> T:
        """Carry a request to the service and its response back."""
        # As with a real store, other tasks run in between.
        await asyncio.sleep(0)
        return request()

    async def _deliver(self) -> None:
        """Wait until the events of a watch arrive."""

"""One node's door to the coordination service in the process's memory.

A store with faults derives from it and overrides `_ask` and `_hear`: everything that would cross a network goes through
these two.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from millstream.broker.cluster.embedded_service import EmbeddedService
from millstream.broker.cluster.store import Change, Event, Expect, Snapshot, check_changes
from millstream.broker.cluster.store_health import HealthTold
from millstream.core.clock import Clock
from millstream.core.errors import StoreRefused, StoreUnavailable

T = TypeVar("T")

RENEWALS = 3
"""How many signs of life a session gives in its time."""


class EmbeddedSession:
    """A lease, renewed by a task of the event loop: a loop that stands still loses it without more ado."""

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
        """Whether the service has answered to one of the last signs of life."""
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


class EmbeddedStore(HealthTold):
    """The coordination store of a node whose service is in the same process."""

    def __init__(self, service: EmbeddedService, clock: Clock) -> None:
        super().__init__(clock)
        self._service = service
        self._session: EmbeddedSession | None = None

    async def read(self, prefix: str) -> Snapshot:
        """Every key that begins with `prefix`."""
        return await self._call(lambda: self._service.read(prefix))

    async def change(self, changes: Sequence[Change], expect: Sequence[Expect] = ()) -> int | None:
        """Carry out all changes in one step if every expectation holds."""
        check_changes(changes, expect)
        lease = self._session.lease if self._session is not None and self._session.live else None
        return await self._call(lambda: self._service.change(changes, expect, lease))

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Sequence[Event], None]:
        """Every change below `prefix` with a revision above `after`."""
        changed = asyncio.Event()
        stop = self._service.watch(changed.set)
        try:
            while True:
                changed.clear()
                seen = self._service.revision
                events = self._service.events(prefix, after=after)
                after = seen
                if events:
                    await self._hear()
                    yield events
                else:
                    await changed.wait()
        finally:
            stop()

    async def open_session(self, ttl_s: float, on_lost: Callable[[], None]) -> EmbeddedSession:
        """Begin a session."""
        if self._session is not None and self._session.live:
            raise StoreRefused("the session before this one has not ended")
        lease = await self._call(lambda: self._service.grant(ttl_s))
        self._session = EmbeddedSession(self, lease, ttl_s, on_lost)
        return self._session

    async def renew(self, lease: int) -> bool:
        """A sign of life of a session; False when it has ended."""
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
        """Carry a request to the service and its answer back."""
        # As with a real store, other tasks run in between.
        await asyncio.sleep(0)
        return request()

    async def _hear(self) -> None:
        """Wait until what a watch has to tell arrives."""

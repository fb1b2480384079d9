"""The coordination store on etcd, version 3."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from random import Random
from typing import Any

import grpc
from aetcd import rpc

from millstream.broker.cluster import etcd_requests
from millstream.broker.cluster.etcd_address import EtcdAddress
from millstream.broker.cluster.etcd_members import EtcdMembers, NotConnected, wants_login
from millstream.broker.cluster.etcd_session import EtcdSession
from millstream.broker.cluster.store import Change, Entry, Event, Expect, Put, Snapshot, check_changes
from millstream.broker.cluster.store_health import HealthReporting
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock
from millstream.core.errors import StoreRefused, StoreUnavailable, WatchLost

_logger = logging.getLogger(__name__)


SILENCE_S_MAX = 900.0

"""etcd reports progress every ten minutes; a connection that is silent for longer is not trusted."""


_PAUSE_S_MIN = 0.05

_PAUSE_S_MAX = 1.0


class _Interrupted(Exception):
    """The connection has to be opened again."""


class EtcdWatch:
    """The changes below a prefix, from one revision on."""

    def __init__(self, members: EtcdMembers, namespace: bytes, prefix: str, after: int) -> None:
        self._members = members
        self._namespace = namespace
        self._prefix = namespace + prefix.encode()
        self._after = after
        self._backoff = Backoff(Random(), first_s=_PAUSE_S_MIN, max_s=_PAUSE_S_MAX)

    async def batches(self) -> AsyncGenerator[Sequence[Event], None]:
        """Yield batches of changes, forever."""
        while True:
            endpoint = self._members.endpoint
            try:
                async with aclosing(self._connection()) as answers:
                    async for answer in answers:
                        events = self._take(answer)
                        if events:
                            yield events
            except NotConnected as error:
                self._members.health.silent(str(error))
                self._members.move_on(endpoint)
            except grpc.aio.AioRpcError as error:
                if wants_login(error):
                    self._members.use_token("")
                self._members.move_on(endpoint)
            except _Interrupted as error:
                _logger.info("a watch on etcd was interrupted and continues", extra={"reason": str(error) or "moved"})
            await self._rest()

    async def _connection(self) -> AsyncGenerator[Any, None]:
        """Yield the responses of one connection until it breaks."""
        moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        member = await self._members.connected()
        stop = self._members.when_moved(lambda: None if moved.done() else moved.set_result(None))
        call = member.watches.Watch(metadata=self._members.metadata)
        try:
            await call.write(etcd_requests.watch(self._prefix, after=self._after))
            while True:
                yield await _next_unless(moved, call)
        finally:
            stop()
            call.cancel()

    def _take(self, answer: Any) -> list[Event]:
        if answer.compact_revision:
            raise WatchLost(f"etcd has forgotten the changes before revision {answer.compact_revision}")
        if answer.canceled:
            # Some versions of etcd say no more than that it is not permitted when a token is too old.
            self._members.use_token("")
            raise _Interrupted(answer.cancel_reason)
        self._members.health.answered()
        self._backoff.reset()
        events_read = (etcd_requests.event(self._namespace, event) for event in answer.events)
        events = [event for event in events_read if event.revision > self._after]
        if events:
            self._after = events[-1].revision
        elif not answer.created and not answer.events:
            # A progress report: everything up to the revision in its header has been sent.
            self._after = max(self._after, answer.header.revision)
        return events

    async def _rest(self) -> None:
        """Wait before the next connection, longer each time, and not in step with other nodes."""
        await self._backoff.pause()


async def _next_unless(moved: asyncio.Future[None], call: Any) -> Any:
    """Return the next response, unless the member is given up."""
    reading = asyncio.create_task(call.read())
    waiting: set[asyncio.Future[Any]] = {reading, moved}
    try:
        await asyncio.wait(waiting, timeout=SILENCE_S_MAX, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not reading.done():
            reading.cancel()
            await asyncio.wait({reading})
    if reading.cancelled():
        raise _Interrupted
    answer = reading.result()
    if answer is grpc.aio.EOF:
        raise _Interrupted
    return answer


REQUEST_S_MAX = 5.0

PAGE_KEYS = 1000

"""How many keys one response of a read holds, so that a large cluster does not block the loop."""


_READS_MAX = 5


class EtcdStore(HealthReporting):
    """One node's access to etcd. Its keys are below `/millstream/<cluster>/`."""

    def __init__(
        self, address: EtcdAddress, cluster: str, clock: Clock, *, request_s_max: float = REQUEST_S_MAX
    ) -> None:
        super().__init__(clock)
        self._namespace = f"/millstream/{cluster}/".encode()
        self._clock = clock
        self._members = EtcdMembers(address, self._health, request_s_max=request_s_max)
        self._session: EtcdSession | None = None

    async def read(self, prefix: str) -> Snapshot:
        """Return every key that begins with `prefix`, page by page, all as of the revision of the first page."""
        for _ in range(_READS_MAX):
            try:
                return await self._read(self._namespace + prefix.encode())
            except WatchLost:
                # etcd forgot the revision between two pages.
                continue
        raise StoreUnavailable("etcd forgets its history faster than it can be read")

    async def _read(self, prefix: bytes) -> Snapshot:
        entries: dict[str, Entry] = {}
        revision = 0
        first = prefix
        while True:
            request = etcd_requests.page(prefix, first=first, revision=revision, keys_max=PAGE_KEYS)
            answer = await self._members.ask(lambda member: member.keys.Range, request, repeatable=True)
            revision = revision or answer.header.revision
            for found in answer.kvs:
                entry = etcd_requests.entry(self._namespace, found)
                entries[entry.key] = entry
            if not answer.more or not answer.kvs:
                return Snapshot(entries, revision)
            first = answer.kvs[-1].key + b"\x00"

    async def change(self, changes: Sequence[Change], expect: Sequence[Expect] = ()) -> int | None:
        """Carry out all changes in one transaction if every expectation holds."""
        check_changes(changes, expect)
        lease = self._session.lease if self._session is not None and self._session.live else 0
        if not lease and any(isinstance(change, Put) and change.leased for change in changes):
            raise StoreRefused("a leased key needs a live session")
        request = etcd_requests.transaction(self._namespace, changes, expect, lease)
        answer = await self._members.ask(lambda member: member.keys.Txn, request, repeatable=False)
        return int(answer.header.revision) if answer.succeeded else None

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Sequence[Event], None]:
        """Yield every change below `prefix` with a revision above `after`."""
        async with aclosing(EtcdWatch(self._members, self._namespace, prefix, after).batches()) as batches:
            async for events in batches:
                yield events

    async def open_session(self, ttl_s: float, on_lost: Callable[[], None]) -> EtcdSession:
        """Begin a session. etcd counts in whole seconds, at least two."""
        if self._session is not None and self._session.live:
            raise StoreRefused("the session before this one has not ended")
        # A lease whose answer was lost ends by its time, so asking twice does no harm.
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        granted = await self._members.ask(lambda member: member.leases.LeaseGrant, request, repeatable=True)
        self._session = EtcdSession(self._members, granted.ID, granted.TTL, self._clock, on_lost)
        return self._session

    async def close(self) -> None:
        """End the session and every connection; watches end with the tasks that read them."""
        if self._session is not None:
            await self._session.close()
        await self._members.close()

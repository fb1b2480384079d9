"""The coordination store on etcd, version 3."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from aetcd import rpc

from millstream.broker.cluster import etcd_requests
from millstream.broker.cluster.etcd_address import EtcdAddress
from millstream.broker.cluster.etcd_members import EtcdMembers
from millstream.broker.cluster.etcd_session import EtcdSession
from millstream.broker.cluster.etcd_watch import EtcdWatch
from millstream.broker.cluster.store import Change, Entry, Event, Expect, Put, Snapshot, check_changes
from millstream.broker.cluster.store_health import HealthTold
from millstream.core.clock import Clock
from millstream.core.errors import StoreRefused, StoreUnavailable, WatchLost

REQUEST_S_MAX = 5.0
PAGE_KEYS = 1000
"""How many keys one answer of a read holds, so that a large cluster does not hold up the loop."""

_READS_MAX = 5


class EtcdStore(HealthTold):
    """One node's door to etcd. Its keys lie under `/millstream/<cluster>/`."""

    def __init__(
        self, address: EtcdAddress, cluster: str, clock: Clock, *, request_s_max: float = REQUEST_S_MAX
    ) -> None:
        super().__init__(clock)
        self._namespace = f"/millstream/{cluster}/".encode()
        self._clock = clock
        self._members = EtcdMembers(address, self._health, request_s_max=request_s_max)
        self._session: EtcdSession | None = None

    async def read(self, prefix: str) -> Snapshot:
        """Every key that begins with `prefix`, page by page, all as of the revision of the first page."""
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
        """Every change below `prefix` with a revision above `after`."""
        async with aclosing(EtcdWatch(self._members, self._namespace, prefix, after).batches()) as batches:
            async for events in batches:
                yield events

    async def open_session(self, ttl_s: float, on_lost: Callable[[], None]) -> EtcdSession:
        """Begin a session. etcd counts in whole seconds and has a least time of two."""
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

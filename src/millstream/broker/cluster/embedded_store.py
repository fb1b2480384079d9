"""The coordination store of one machine: the service, the file that makes it durable, and each node's access to it.

A change is in the file, synced, before any reader sees it. Keys of sessions are not stored, since sessions end with
their process: a node that restarts repeatedly on a full disk uses almost no space. So that no revision is used twice,
the file stores an upper bound of the revisions.

Everything that would cross a network goes through `_send` and `_deliver`; a store with faults overrides these two.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from crc32c import crc32c

from millstream.broker.cluster.store import (
    ABSENT,
    Change,
    Delete,
    Entry,
    Event,
    Expect,
    Put,
    Snapshot,
    StoreHealth,
    check_changes,
)
from millstream.broker.log.files import Files, write_fully
from millstream.broker.log.state import replace_file
from millstream.core.clock import Clock
from millstream.core.errors import CorruptState, StoreRefused, StoreUnavailable, WatchLost

_logger = logging.getLogger(__name__)

FILE_NAME = "coordination"
REWRITE_BYTES_MIN = 1024 * 1024
RESERVE_BYTES = 64 * 1024
"""Space is reserved ahead, so that a full disk can still record deletions, which make room again."""

REVISIONS_AHEAD = 1 << 20
"""How many revisions changes of sessions' keys may use before the file is written for them."""

_MAGIC = b"MSco"
_HEADER = struct.Struct(">4sII")
_ADVICE = "move the file out of the folder and start again: what it held is derived from the logs"


class _StoredChange(msgspec.Struct, frozen=True, array_like=True):
    key: str
    value: str | None
    """None deletes the key."""


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """The changes of one revision, or with `entries` all keys as of that revision.

    Without any, it only records that no higher revision has been used.
    """

    revision: int
    changes: list[_StoredChange]
    entries: list[Entry] | None = None


class CoordinationFile:
    """Every change of the store but those of sessions' keys, in one file, rewritten when most of it is out of date.

    A record that a crash has torn is the last one, was never acknowledged, and is ignored. A record that is bad and not
    the last was damaged on disk: `CorruptState`.
    """

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = folder
        self._path = f"{folder}/{FILE_NAME}"
        self._end = self._reserved = 0
        self._live_bytes = 0
        self._broken = False
        self.entries: dict[str, Entry] = {}
        """The stored entries; the service owns them once the file is open."""
        self._leased: set[str] = set()
        """The keys of sessions, which only this process knows."""
        self.revision = 1
        """The highest one in use."""
        self.is_new = not files.exists(self._path)
        self._descriptor = files.open(self._path, create=True)
        try:
            if self.is_new:
                files.sync_directory(folder)
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._files.close(self._descriptor)

    def append(self, revision: int, changes: Sequence[tuple[str, str | None, bool]]) -> None:
        """Store the changes of one revision (key, value, whether a session holds it), durably.

        Raise `OSError` if that failed: the state after a crash is then unknown.
        """
        stored = [
            _StoredChange(key, None if leased else value)
            for key, value, leased in changes
            if (value is not None and not leased) or self._is_in_file(key)
        ]
        if stored or revision > self.revision:
            record = _Record(revision if stored else revision + REVISIONS_AHEAD, stored)
            try:
                if self._broken or self._end > REWRITE_BYTES_MIN + 2 * self._live_bytes:
                    self._rewrite()
                self._write(_encode(record))
            except OSError:
                # The bytes of a failed sync cannot be trusted, so the next change goes into another file.
                self._broken = True
                raise
            self.revision = max(self.revision, record.revision)
        self._leased.difference_update(key for key, _, _ in changes)
        self._leased.update(key for key, _, leased in changes if leased)

    def _is_in_file(self, key: str) -> bool:
        return key in self.entries and key not in self._leased

    def _write(self, record: bytes) -> None:
        end = self._end + len(record)
        if end > self._reserved:
            try:
                self._files.allocate(self._descriptor, end + RESERVE_BYTES)
                self._reserved = end + RESERVE_BYTES
            except OSError as error:
                _logger.warning("no space is left to reserve for coordination", extra={"error": str(error)})
        write_fully(self._files, self._descriptor, record, self._end)
        self._files.sync(self._descriptor)
        self._end = end

    def _rewrite(self) -> None:
        entries = [entry for entry in self.entries.values() if entry.key not in self._leased]
        content = _encode(_Record(self.revision, [], entries))
        replace_file(self._files, self._folder, FILE_NAME, content)
        old, self._descriptor = self._descriptor, self._files.open(self._path)
        self._files.close(old)
        self._end = self._reserved = self._live_bytes = len(content)
        self._broken = False

    def _apply(self, changes: Sequence[_StoredChange], revision: int) -> None:
        for key, value in map(msgspec.structs.astuple, changes):
            known = self.entries.get(key)
            if value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = Entry(key, value, revision, revision if known is None else known.created)

    def _read(self) -> None:
        size = self._files.size(self._descriptor)
        content = memoryview(self._files.read_at(self._descriptor, size, 0) if size else b"")
        while (record := self._record_at(content, self._end)) is not None:
            parsed, self._end = record
            if parsed.entries is not None:
                self.entries = {entry.key: entry for entry in parsed.entries}
                self._live_bytes = self._end
            self._apply(parsed.changes, parsed.revision)
            self.revision = max(self.revision, parsed.revision)
        self._check_tail(bytes(content[self._end :]))
        self._reserved = size

    def _check_tail(self, tail: bytes) -> None:
        """Remove a torn record; raise if a valid one follows, since then this one was damaged."""
        if not tail.strip(b"\0"):
            return
        at = tail.find(_MAGIC, 1)
        while at > 0:
            if self._record_at(memoryview(tail), at) is not None:
                raise CorruptState(f"{self._path} is damaged at byte {self._end}; {_ADVICE}")
            at = tail.find(_MAGIC, at + 1)
        self._files.truncate(self._descriptor, self._end)

    def _record_at(self, content: memoryview, position: int) -> tuple[_Record, int] | None:
        if position + _HEADER.size > len(content):
            return None
        magic, checksum, length = _HEADER.unpack_from(content, position)
        start = position + _HEADER.size
        body = content[start : start + length]
        if magic != _MAGIC or len(body) != length or crc32c(body) != checksum:
            return None
        try:
            return msgspec.msgpack.decode(body, type=_Record), start + length
        except msgspec.DecodeError as error:
            raise CorruptState(f"{self._path} cannot be read at byte {position} ({error}); {_ADVICE}") from error


def _encode(record: _Record) -> bytes:
    body = msgspec.msgpack.encode(record)
    return _HEADER.pack(_MAGIC, crc32c(body), len(body)) + body


HISTORY_MAX = 10_000
"""How many revisions a watch may lag before it must read everything again."""

LEASES_MAX = 10_000


@dataclass(slots=True)
class _Lease:
    """A session as the service sees it."""

    ttl_s: float
    deadline: float
    keys: set[str] = field(default_factory=set)


class EmbeddedService:
    """Keys, their history and the leases of some of them. All calls are synchronous.

    Without a file it forgets everything with the process.
    """

    def __init__(self, clock: Clock, *, file: CoordinationFile | None = None, history_max: int = HISTORY_MAX) -> None:
        self._clock = clock
        self._file = file
        self._history_max = history_max
        self._entries: dict[str, Entry] = {}
        self._history: deque[tuple[Event, ...]] = deque()
        self._leases: dict[int, _Lease] = {}
        self._lease_of: dict[str, int] = {}
        self._last_lease = 0
        self._timer: asyncio.TimerHandle | None = None
        self._watchers: set[Callable[[], None]] = set()
        self.revision = 1
        if file is not None:
            self._entries, self.revision = file.entries, file.revision

    def close(self) -> None:
        """End all leases, without recording that in the file, and close it."""
        self._leases.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._file is not None:
            self._file.close()

    def read(self, prefix: str) -> Snapshot:
        self.expire()
        matching_keys = sorted(key for key in self._entries if key.startswith(prefix))
        return Snapshot({key: self._entries[key] for key in matching_keys}, self.revision)

    def change(self, changes: Sequence[Change], expect: Sequence[Expect], lease: int | None) -> int | None:
        self.expire()
        if any(isinstance(change, Put) and change.leased for change in changes) and lease not in self._leases:
            raise StoreRefused("a leased key needs a live session")
        for key, revision in expect:
            entry = self._entries.get(key)
            if revision != (ABSENT if entry is None else entry.revision):
                return None
        self._execute(changes, lease)
        return self.revision

    def events(self, prefix: str, *, after: int) -> list[Event]:
        self.expire()
        first_kept = self.revision - len(self._history) + 1
        if after + 1 < first_kept:
            raise WatchLost(f"revision {after + 1} is compacted; the oldest revision kept is {first_kept}")
        since = range(max(0, after + 1 - first_kept), len(self._history))
        return [event for number in since for event in self._history[number] if event.key.startswith(prefix)]

    def watch(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after each change, until the returned function is called."""
        self._watchers.add(wake)
        return lambda: self._watchers.discard(wake)

    def grant(self, ttl_s: float) -> int:
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
            self._execute(tuple(map(Delete, sorted(lease.keys))), None)

    def expire(self) -> None:
        now = self._clock.monotonic()
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if lease.deadline <= now]:
            self.revoke(lease_id)

    def _execute(self, changes: Sequence[Change], lease: int | None) -> None:
        revision = self.revision + 1
        changes = [change for change in changes if isinstance(change, Put) or change.key in self._entries]
        if changes and self._file is not None:
            self._store(self._file, revision, changes, lease)
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

    def _store(self, file: CoordinationFile, revision: int, changes: Sequence[Change], lease: int | None) -> None:
        stored = [
            (change.key, change.value, change.leased and lease is not None)
            if isinstance(change, Put)
            else (change.key, None, False)
            for change in changes
        ]
        try:
            file.append(revision, stored)
        except OSError as error:
            raise StoreUnavailable(f"a change could not be stored: {error.strerror or error}") from error

    def _put(self, change: Put, revision: int, lease: int | None) -> Event:
        known = self._entries.get(change.key)
        created = revision if known is None else known.created
        self._entries[change.key] = Entry(change.key, change.value, revision, created)
        self._detach_lease(change.key)
        if change.leased and lease is not None:
            self._lease_of[change.key] = lease
            self._leases[lease].keys.add(change.key)
        return Event(change.key, change.value, revision)

    def _delete(self, key: str, revision: int) -> Event | None:
        self._detach_lease(key)
        return None if self._entries.pop(key, None) is None else Event(key, None, revision)

    def _detach_lease(self, key: str) -> None:
        lease = self._leases.get(self._lease_of.pop(key, 0))
        if lease is not None:
            lease.keys.discard(key)

    def _wake(self) -> None:
        for wake in tuple(self._watchers):
            wake()

    def _set_timer(self) -> None:
        next_at = min((lease.deadline for lease in self._leases.values()), default=math.inf)
        if self._timer is None and next_at < math.inf:
            next_s = next_at - self._clock.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(next_s, 0), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.expire()
        self._set_timer()


T = TypeVar("T")

RENEWALS = 3
"""How often a session is renewed within its time to live."""


class EmbeddedSession:
    """A lease, renewed by a task of the event loop: a loop that hangs loses it. One without an end needs no renewal."""

    def __init__(self, store: EmbeddedStore, lease: int, ttl_s: float, on_lost: Callable[[], None]) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._on_lost = on_lost
        self._renewing = None if ttl_s == math.inf else asyncio.create_task(self._renew(), name="store-session")
        self.lease = lease
        self.live = True
        self._missed = 0

    @property
    def confirmed(self) -> bool:
        return self.live and self._missed < RENEWALS

    async def close(self) -> None:
        if not self.live:
            return
        self.live = False
        if self._renewing is not None:
            self._renewing.cancel()
        with suppress(StoreUnavailable):
            await self._store.revoke(self.lease)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / RENEWALS)
            if not await self._renew_lease():
                break
        if self.live:
            self.live = False
            self._on_lost()

    async def _renew_lease(self) -> bool:
        try:
            holds = await self._store.renew(self.lease)
        except StoreUnavailable:
            self._missed += 1
            return True
        self._missed = 0
        return holds


class EmbeddedStore(StoreHealth):
    """The coordination store of a node in the same process as the service.

    With `sessions_expire` off, a session lasts until it is closed: for a node that cannot die without the service.
    """

    def __init__(self, service: EmbeddedService, clock: Clock, *, sessions_expire: bool = True) -> None:
        super().__init__(clock, name="the coordination store")
        self._service = service
        self._sessions_expire = sessions_expire
        self._session: EmbeddedSession | None = None

    async def read(self, prefix: str) -> Snapshot:
        return await self._call(lambda: self._service.read(prefix))

    async def change(self, changes: Sequence[Change], expect: Sequence[Expect] = ()) -> int | None:
        check_changes(changes, expect)
        lease = self._session.lease if self._session is not None and self._session.live else None
        return await self._call(lambda: self._service.change(changes, expect, lease))

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Sequence[Event], None]:
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
        if self._session is not None and self._session.live:
            raise StoreRefused("the previous session has not ended")
        if not self._sessions_expire:
            ttl_s = math.inf
        lease = await self._call(lambda: self._service.grant(ttl_s))
        self._session = EmbeddedSession(self, lease, ttl_s, on_lost)
        return self._session

    async def renew(self, lease: int) -> bool:
        return await self._call(lambda: self._service.renew(lease))

    async def revoke(self, lease: int) -> None:
        await self._call(lambda: self._service.revoke(lease))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _call(self, request: Callable[[], T]) -> T:
        try:
            response = await self._send(request)
        except StoreRefused:
            raise
        except StoreUnavailable as error:
            self.silent(str(error))
            raise
        self.responded()
        return response

    async def _send(self, request: Callable[[], T]) -> T:
        """Carry a request to the service and its response back."""
        # As with a real store, other tasks run in between.
        await asyncio.sleep(0)
        return request()

    async def _deliver(self) -> None:
        """Wait until the events of a watch arrive."""

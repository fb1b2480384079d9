"""Fetch (key 1), versions 4 to 18: reads batches, with topic ids, sessions, and a long poll that wakes on append.

Encoded by hand, since this is the hot path: stored batches are sent to the socket unchanged. The parts of a large
response are read when they are sent, so a consumer costs the memory of one part, and receives one while the next is
read. Records that have to be verified are read before that, and kept until they are sent.

A request that finds fewer than `min_bytes` waits for its partitions' high watermarks to advance, or for `max_wait`. The
last stable offset advances only with the high watermark, so the same applies to `read_committed`.

Version notes: 7 adds sessions (KIP-227), 9 the leader epoch, 11 the rack, 12 is flexible, 13 names topics by id, 15
moves the replica id into a tag, 18 adds a tag that only followers send. `follower_fetch` handles requests of followers;
a client that may not follow gets TOPIC_AUTHORIZATION_FAILED for each partition.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, cast
from uuid import UUID

from kio.schema.errors import ErrorCode

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import ClientInfo, error_code
from millstream.broker.kafka.follower_fetch import FollowerFetch
from millstream.broker.kafka.quota_meter import QuotaMeter
from millstream.broker.log.segment_slice import SegmentSlice
from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import EventualResponse
from millstream.broker.net.response import Buffers, EncodedResponse, Piece, Stored, Stream
from millstream.broker.replication.partition import Partition
from millstream.broker.security.rights import Rights
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import MillstreamError
from millstream.core.ids import Offset
from millstream.core.metric import Metric, gauge
from millstream.protocol.messages.codec import RequestHeader, response_head
from millstream.protocol.messages.primitives import Reader, Writer
from millstream.protocol.wire.replica_fetch import OLDEST, is_replica_fetch

SESSIONLESS_EPOCH = -1

FIRST_EPOCH = 0

_EPOCH_MAX = 2**31 - 1

SESSIONS_MAX = 2000

PARTITIONS_MAX = 200_000
"""Partitions remembered in all sessions together."""

PartitionKey = tuple[str | UUID, int]


@dataclass(slots=True, eq=False)
class Position:
    """The fetch position of a client in one partition, and what it was last sent about it."""

    offset: Offset
    max_bytes: int
    leader_epoch: int
    sent_watermark: Offset | None = None
    sent_log_start: Offset | None = None


Identity = tuple[str, ...] | None
"""`Rights.identity`; None where clients do not authenticate."""


@dataclass(slots=True, eq=False)
class FetchSession:
    """The partitions of one client, in the order in which they are read next."""

    session_id: int
    owner: Identity
    """The owner of the session; others could learn the names of its topics, or disturb it."""
    by_id: bool = field(kw_only=True)
    epoch: int = 1
    positions: dict[PartitionKey, Position] = field(default_factory=dict)

    def update(self, positions: dict[PartitionKey, Position], forgotten: list[PartitionKey]) -> None:
        """Apply the changes of a request."""
        for key in forgotten:
            self.positions.pop(key, None)
        for key, position in positions.items():
            known = self.positions.get(key)
            if known is None:
                self.positions[key] = position
            else:
                known.offset = position.offset
                known.max_bytes = position.max_bytes
                known.leader_epoch = position.leader_epoch

    def move_to_back(self, key: PartitionKey) -> None:
        """Move a partition that was just read behind the others, so that none starves."""
        self.positions[key] = self.positions.pop(key)


class FetchSessions:
    """All sessions; the least recently used one is evicted first."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[int, FetchSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, positions: dict[PartitionKey, Position], owner: Identity, *, by_id: bool) -> FetchSession | None:
        """Return a new session, or None when the request has nothing or too much to remember."""
        if not positions or len(positions) > PARTITIONS_MAX // 10:
            return None
        self._make_room(len(positions))
        session_id = secrets.randbelow(2**31 - 1) + 1
        while session_id in self._by_id:
            session_id = secrets.randbelow(2**31 - 1) + 1
        session = FetchSession(session_id, owner, by_id=by_id)
        session.update(positions, [])
        self._by_id[session_id] = session
        return session

    def resume(self, session_id: int, epoch: int, owner: Identity, *, by_id: bool) -> FetchSession | ErrorCode:
        """Return the session that a request continues, or the error code that makes the client open a new one."""
        session = self._by_id.get(session_id)
        if session is None or session.owner != owner:
            return ErrorCode.fetch_session_id_not_found
        if session.epoch != epoch:
            return ErrorCode.invalid_fetch_session_epoch
        if session.by_id != by_id:
            return ErrorCode.fetch_session_topic_id_error
        session.epoch = 1 if epoch == _EPOCH_MAX else epoch + 1
        self._by_id.move_to_end(session_id)
        return session

    def close(self, session_id: int, owner: Identity) -> None:
        """Forget a session; an unknown one, and another client's, is ignored."""
        session = self._by_id.get(session_id)
        if session is not None and session.owner == owner:
            del self._by_id[session_id]

    def _make_room(self, partitions: int) -> None:
        held = sum(len(session.positions) for session in self._by_id.values())
        while self._by_id and (len(self._by_id) >= SESSIONS_MAX or held + partitions > PARTITIONS_MAX):
            _, evicted = self._by_id.popitem(last=False)
            held -= len(evicted.positions)


FIRST_WITH_LOG_START = 5

FIRST_WITH_SESSIONS = 7

FIRST_WITH_LEADER_EPOCH = 9

FIRST_WITH_RACK = 11

FIRST_WITH_LAST_EPOCH = 12

FIRST_FLEXIBLE = 12

FIRST_WITH_TOPIC_IDS = 13

FIRST_WITHOUT_REPLICA_ID = 15

MAX_WAIT_S_MAX = 300.0

READ_BYTES_MAX = 64 * 1024
"""Records of a partition up to this size are read at once; more are read while the response is being sent."""

READ_ALL_BYTES_MAX = 1024 * 1024
"""In a response of this size, everything else is."""

HELD_BYTES_MAX = 4 * 1024 * 1024
"""A response with this many bytes in memory gets no more records: verified bytes are kept until they are sent."""

READ_COMMITTED = 1

_NO_PREFERRED_REPLICA = -1

_PARTITION = struct.Struct(">iqi")

_PARTITION_WITH_START = struct.Struct(">iq8xi")

_PARTITION_WITH_EPOCH = struct.Struct(">iiq8xi")

_PARTITION_WITH_LAST_EPOCH = struct.Struct(">iiq4x8xi")

# A partition up to its records, with no aborted transactions and no preferred replica; the latter with compact lengths.
_PLAIN = struct.Struct(">ihqqqii")

_PLAIN_COMPACT = struct.Struct(">ihqqqBi")

_RESULT = struct.Struct(">ihqq")

_RESULT_WITH_START = struct.Struct(">ihqqq")


class _Request(NamedTuple):
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    session_id: int
    session_epoch: int
    positions: dict[PartitionKey, Position]
    forgotten: list[PartitionKey]
    read_committed: bool
    is_follower: bool


class _Result(NamedTuple):
    """The result for one partition."""

    key: PartitionKey
    code: ErrorCode
    high_watermark: int
    log_start: int
    records_slice: SegmentSlice | None
    last_stable: int = -1
    aborted: Sequence[tuple[int, int]] | None = None
    """The aborted transactions among the records, as producer id and first offset; None if not requested."""

    @property
    def size(self) -> int:
        """How many bytes of records there are."""
        return 0 if self.records_slice is None else self.records_slice.size


_ResultsByKey = dict[PartitionKey, _Result]


def _size_of(results: _ResultsByKey) -> int:
    return sum([result.records_slice.size for result in results.values() if result.records_slice is not None])


class _Context(NamedTuple):
    """A request with its partitions, which it names or its session holds."""

    request: _Request
    positions: dict[PartitionKey, Position]
    session: FetchSession | None
    incremental: bool
    client: ClientInfo
    bytes_max: int


class _Wait:
    """A long poll: woken when any of its partitions, or its last stable offset, advances."""

    __slots__ = ("_bounds", "_partitions", "moved", "woken")

    def __init__(self, *, committed: bool) -> None:
        self._bounds: dict[Partition, tuple[Offset, Offset]] | None = {} if committed else None
        self._partitions: dict[Partition, PartitionKey] = {}
        self.moved: dict[PartitionKey, None] = {}
        """The partitions to which something has happened."""
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def listen(self, partition: Partition, key: PartitionKey) -> None:
        self._partitions[partition] = key
        if self._bounds is not None:
            self._bounds[partition] = self._bounds_of(partition)
        partition.listen(self)

    def _bounds_of(self, partition: Partition) -> tuple[Offset, Offset]:
        return partition.log_start, partition.last_stable_offset

    def advanced(self, partition: Partition) -> None:
        self.moved[self._partitions[partition]] = None
        # Records after the start of an open transaction do not wake the request.
        if self._bounds is None or not partition.is_leader or self._bounds_of(partition) != self._bounds[partition]:
            self.finish()

    def finish(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)

    def rearm(self) -> list[PartitionKey]:
        """Wait again; return the partitions that have advanced."""
        moved, self.moved = list(self.moved), {}
        self.woken = asyncio.get_running_loop().create_future()
        if self._bounds is not None:
            self._bounds = {partition: self._bounds_of(partition) for partition in self._partitions}
        return moved

    def close(self) -> None:
        for partition in self._partitions:
            partition.forget(self)


class Fetch:
    key = 1
    versions = (4, 18)

    def __init__(self, topics: Topics, budget: Budget, quota: QuotaMeter, *, bytes_max: int) -> None:
        self._topics = topics
        self._quota = quota
        self._budget = budget
        self._bytes_max = bytes_max
        self._sessions = FetchSessions()
        self._followers = FollowerFetch(
            topics, budget, bytes_max=bytes_max, new_id=_new_session_id, may_follow=topics.may_follow
        )
        self._waits: set[_Wait] = set()
        self._stopping = False

    def metrics(self) -> Iterable[Metric]:
        yield gauge("millstream_fetch_waiting", "Fetches that wait for records.", len(self._waits))
        yield gauge("millstream_fetch_sessions", "Open fetch sessions.", len(self._sessions))
        yield gauge("millstream_fetch_followers", "Nodes that follow partitions of this one.", len(self._followers))

    def stop(self) -> None:
        """Respond to every long poll now and start no more: the broker is stopping."""
        self._stopping = True
        self._followers.stop()
        for wait in tuple(self._waits):
            wait.finish()

    def handle_frame(self, frame: memoryview, header: RequestHeader, client: ClientInfo) -> EventualResponse:
        """Respond at once when there is enough to send, else have the connection wait."""
        rights = client.rights
        is_replica = header.version >= FIRST_WITHOUT_REPLICA_ID and is_replica_fetch(frame)
        if is_replica and (rights is None or rights.cluster(Operation.CLUSTER_ACTION)):
            return self._followers.handle_frame(frame, header, client)
        request = _read(frame, header)
        if request.is_follower:
            may_follow = rights is None or rights.check(Operation.CLUSTER_ACTION, ResourceType.CLUSTER)
            if may_follow and header.version >= OLDEST:
                return self._followers.handle_frame(frame, header, client)
            if request.session_epoch not in (SESSIONLESS_EPOCH, FIRST_EPOCH):
                return _write(header, ErrorCode.fetch_session_id_not_found, 0, [])
            # Nodes never fetch in an older version, so this client is not a replica.
            code = ErrorCode.not_leader_or_follower if may_follow else ErrorCode.topic_authorization_failed
            return _write(header, ErrorCode.none, 0, [_Result(key, code, -1, -1, None) for key in request.positions])
        client.fetch_requests += 1
        context = self._begin_session_fetch(request, header, client)
        if isinstance(context, ErrorCode):
            return _write(header, context, 0, [])
        results = self._read_all(context)
        if self._is_complete(context, results):
            return self._build_response(header, context, results)
        return self._wait(header, context, results)

    # -- sessions -------------------------------------------------------------------------------------------

    def _begin_session_fetch(
        self, request: _Request, header: RequestHeader, client: ClientInfo
    ) -> _Context | ErrorCode:
        by_id = header.version >= FIRST_WITH_TOPIC_IDS
        owner = None if client.rights is None else client.rights.identity
        bytes_max = min(request.max_bytes, self._bytes_max)
        if self._quota.is_limiting:
            bytes_max = self._quota.allowance(client, bytes_max)
        if request.session_epoch in (SESSIONLESS_EPOCH, FIRST_EPOCH):
            self._sessions.close(request.session_id, owner)
            session = None
            if request.session_epoch == FIRST_EPOCH and header.version >= FIRST_WITH_SESSIONS:
                session = self._sessions.open(request.positions, owner, by_id=by_id)
            return _Context(request, request.positions, session, False, client, bytes_max)
        resumed = self._sessions.resume(request.session_id, request.session_epoch, owner, by_id=by_id)
        if isinstance(resumed, ErrorCode):
            return resumed
        resumed.update(request.positions, request.forgotten)
        return _Context(request, resumed.positions, resumed, True, client, bytes_max)

    # -- reading --------------------------------------------------------------------------------------------

    def _find_partition(self, key: PartitionKey) -> Partition:
        topic, index = key
        if isinstance(topic, str):
            return self._topics.partition(topic, index)
        return self._topics.partition_by_id(topic, index)

    def _read_all(self, context: _Context) -> _ResultsByKey:
        """Read all partitions, within the limits of the request and of the broker."""
        results: _ResultsByKey = {}
        self._read_some(context, results, context.positions)
        return results

    def _read_some(self, context: _Context, results: _ResultsByKey, keys: Iterable[PartitionKey]) -> None:
        """Read some partitions again; the results of the others are kept."""
        size = _size_of(results)
        held_bytes = 0
        share_bytes = self._budget.share_bytes
        left = min(context.bytes_max, share_bytes) - size
        committed = context.request.read_committed
        # The records of a single partition are one piece; reading them at once is faster than locating them first.
        at_once_max = READ_BYTES_MAX if len(context.positions) > 1 else READ_ALL_BYTES_MAX
        # As in Kafka, only the first partition with records may exceed the limits, by its first batch: the client makes
        # progress, and every other partition keeps to what is left of `max_bytes` and to its own.
        for key in keys:
            eager_bytes = at_once_max if size < READ_ALL_BYTES_MAX else 0
            result = self._read_partition(
                key,
                context.positions[key],
                left,
                context.client.rights,
                committed=committed,
                eager_bytes=eager_bytes,
                at_least_one=share_bytes > 0 and not size,
            )
            results[key] = result
            if result.records_slice is not None:
                left -= result.records_slice.size
                size += result.records_slice.size
                held_bytes += len(result.records_slice.data)
                if held_bytes >= HELD_BYTES_MAX:
                    left = 0

    def _read_partition(
        self,
        key: PartitionKey,
        position: Position,
        left: int,
        rights: Rights | None,
        *,
        committed: bool,
        eager_bytes: int,
        at_least_one: bool,
    ) -> _Result:
        try:
            if rights is not None:
                _check_readable(rights, key[0])
            partition = self._find_partition(key)
            partition.check_leader_epoch(position.leader_epoch)
            records_slice: SegmentSlice | None = None
            aborted: Sequence[tuple[int, int]] | None = () if committed else None
            max_bytes = max(0, min(position.max_bytes, left))
            watermark = partition.high_watermark
            if max_bytes or at_least_one or position.offset > watermark:
                if committed:
                    records_slice, aborted = partition.read_committed_slice(
                        position.offset, max_bytes=max_bytes, eager_bytes=eager_bytes, at_least_one=at_least_one
                    )
                else:
                    records_slice = partition.read_slice(
                        position.offset, max_bytes=max_bytes, eager_bytes=eager_bytes, at_least_one=at_least_one
                    )
            stable = partition.last_stable_offset
            return _Result(key, ErrorCode.none, watermark, partition.log_start, records_slice, stable, aborted)
        except MillstreamError as error:
            return _Result(key, error_code(error), -1, -1, None, -1, () if committed else None)

    def _is_complete(self, context: _Context, results: _ResultsByKey) -> bool:
        size = _size_of(results)
        return (
            size >= min(context.request.min_bytes, max(context.bytes_max, 1))
            or context.request.max_wait_ms <= 0
            or not context.positions
            or self._stopping
            or context.client.presence.has_left
            or any(result.code is not ErrorCode.none for result in results.values())
            or (size > 0 and _is_full(context, results))
        )

    # -- waiting --------------------------------------------------------------------------------------------

    async def _wait(self, header: RequestHeader, context: _Context, results: _ResultsByKey) -> EncodedResponse:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(context.request.max_wait_ms / 1000, MAX_WAIT_S_MAX)
        wait = _Wait(committed=context.request.read_committed)
        self._waits.add(wait)
        try:
            if self._subscribe(context, wait, results):
                results = self._read_all(context)
            while loop.time() < deadline and not self._is_complete(context, results):
                _release_large(results)
                is_short_of_memory = self._wait_for_memory(wait)
                context.client.presence.on_leave(wait.finish)
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await wait.woken
                moved = wait.rearm()
                if is_short_of_memory or not moved:
                    results = self._read_all(context)
                else:
                    self._read_moved(context, results, moved)
            return self._build_response(header, context, results)
        finally:
            context.client.presence.forget_on_leave(wait.finish)
            self._waits.discard(wait)
            self._budget.stop_waiting(wait)
            wait.close()

    def _wait_for_memory(self, wait: _Wait) -> bool:
        if self._budget.has_room:
            return False
        self._budget.wait(wait, wait.finish)
        return True

    def _read_moved(self, context: _Context, results: _ResultsByKey, moved: list[PartitionKey]) -> None:
        """Read the partitions that have advanced, and again those with records to send."""
        keys = dict.fromkeys(moved) | {key: None for key, result in results.items() if result.size}
        for key in keys:
            results.pop(key, None)
        self._read_some(context, results, [key for key in context.positions if key in keys])

    def _subscribe(self, context: _Context, wait: _Wait, results: _ResultsByKey) -> bool:
        """Subscribe to all partitions; return whether any has changed since it was read."""
        changed = self._stopping or context.client.presence.has_left
        for key in context.positions:
            try:
                partition = self._find_partition(key)
            except MillstreamError:
                # The next read reports a deleted topic to the client.
                changed = True
                continue
            wait.listen(partition, key)
            result = results.get(key)
            if (
                result is None
                or not partition.is_leader
                or (result.high_watermark, result.log_start, result.last_stable)
                != (
                    partition.high_watermark,
                    partition.log_start,
                    partition.last_stable_offset,
                )
            ):
                changed = True
        return changed

    def _build_response(
        self, header: RequestHeader, context: _Context, results_by_key: _ResultsByKey
    ) -> EncodedResponse:
        size = _size_of(results_by_key)
        results = list(results_by_key.values())
        if context.incremental:
            positions = context.positions
            results = [
                result for result in results if result.key in positions and _has_changed(result, positions[result.key])
            ]
        context.client.fetched_bytes += size
        throttle_ms = self._quota.charge(context.client, size) if self._quota.is_limiting else 0
        session = context.session
        if session is not None:
            for result in results:
                position = session.positions.get(result.key)
                if position is None:
                    continue
                position.sent_watermark = Offset(result.high_watermark)
                position.sent_log_start = Offset(result.log_start)
                if result.size:
                    session.move_to_back(result.key)
        session_id = 0 if session is None else session.session_id
        return _write(header, ErrorCode.none, session_id, results, throttle_ms=throttle_ms)


def _is_full(context: _Context, results: _ResultsByKey) -> bool:
    """Whether a partition has records that did not fit, so that waiting is pointless."""
    positions = context.positions
    return any(
        not result.size
        and result.key in positions
        and positions[result.key].offset < (result.high_watermark if result.aborted is None else result.last_stable)
        for result in results.values()
    )


def _has_changed(result: _Result, position: Position) -> bool:
    """Whether an incremental response has to mention the partition."""
    return (
        bool(result.size)
        or result.code is not ErrorCode.none
        or result.high_watermark != position.sent_watermark
        or result.log_start != position.sent_log_start
    )


def _read(frame: memoryview, header: RequestHeader) -> _Request:
    version = header.version
    reader = Reader(frame, header.body_at, flexible=header.flexible)
    is_follower = version < FIRST_WITHOUT_REPLICA_ID and _is_follower(reader.int32())
    max_wait_ms, min_bytes, max_bytes = reader.int32(), reader.int32(), reader.int32()
    read_committed = reader.int8() == READ_COMMITTED
    session_id, session_epoch = 0, SESSIONLESS_EPOCH
    if version >= FIRST_WITH_SESSIONS:
        session_id, session_epoch = reader.int32(), reader.int32()
    positions = _read_positions(reader, version)
    forgotten: list[PartitionKey] = []
    if version >= FIRST_WITH_SESSIONS:
        for _ in range(reader.array_length()):
            topic: str | UUID = reader.uuid() if version >= FIRST_WITH_TOPIC_IDS else reader.string()
            forgotten.extend((topic, index) for index in reader.int32_array())
            reader.skip_tags()
    if version >= FIRST_WITH_RACK:
        reader.string()
    for tag, content in reader.tags():
        if tag == 1 and version >= FIRST_WITHOUT_REPLICA_ID:
            is_follower = _is_follower(content.int32())
    return _Request(
        max_wait_ms, min_bytes, max_bytes, session_id, session_epoch, positions, forgotten, read_committed, is_follower
    )


def _is_follower(replica_id: int) -> bool:
    # -1 is a consumer and -2 a debugging tool.
    return replica_id not in (-1, -2)


def _release_large(results: _ResultsByKey) -> None:
    """Drop large verified records during a wait; they are read again when they are sent."""
    for result in results.values():
        records_slice = result.records_slice
        if records_slice is not None and len(records_slice.data) > READ_BYTES_MAX:
            records_slice.data = b""


def _new_session_id() -> int:
    return secrets.randbelow(2**31 - 1) + 1


def _position_layout(version: int) -> struct.Struct:
    """Return the layout of a requested partition; only followers use the last epoch and the log start."""
    if version >= FIRST_WITH_LAST_EPOCH:
        return _PARTITION_WITH_LAST_EPOCH
    if version >= FIRST_WITH_LEADER_EPOCH:
        return _PARTITION_WITH_EPOCH
    return _PARTITION_WITH_START if version >= FIRST_WITH_LOG_START else _PARTITION


def _read_positions(reader: Reader, version: int) -> dict[PartitionKey, Position]:
    positions: dict[PartitionKey, Position] = {}
    layout = _position_layout(version)
    for _ in range(reader.array_length()):
        topic: str | UUID = reader.uuid() if version >= FIRST_WITH_TOPIC_IDS else reader.string()
        for _ in range(reader.array_length()):
            if version >= FIRST_WITH_LEADER_EPOCH:
                index, leader_epoch, offset, max_bytes = reader.fields(layout)
            else:
                leader_epoch = -1
                index, offset, max_bytes = reader.fields(layout)
            positions[topic, index] = Position(offset, max_bytes, leader_epoch)
            reader.skip_tags()
        reader.skip_tags()
    return positions


def _write(
    header: RequestHeader,
    code: ErrorCode,
    session_id: int,
    results: list[_Result],
    *,
    throttle_ms: int = 0,
) -> EncodedResponse:
    """Encode the response in parts: records are sent from where they were read, or read when their turn comes."""
    version = header.version
    writer = Writer(flexible=header.flexible)
    writer.int32(throttle_ms)
    if version >= FIRST_WITH_SESSIONS:
        writer.int16(code)
        writer.int32(session_id)
    by_topic: dict[str | UUID, list[_Result]] = {}
    for result in results:
        by_topic.setdefault(result.key[0], []).append(result)
    writer.array_length(len(by_topic))
    pieces: list[Piece | Stored] = []
    for topic, of_topic in by_topic.items():
        if isinstance(topic, UUID):
            writer.uuid(topic)
        else:
            writer.string(topic)
        writer.array_length(len(of_topic))
        for result in of_topic:
            _write_result(writer, version, result)
            if result.records_slice is not None and result.records_slice.size:
                pieces += (writer.buffer, result.records_slice.data or result.records_slice)
                writer.buffer = bytearray()
            writer.no_tags()
        writer.no_tags()
    writer.no_tags()
    pieces.append(writer.buffer)
    size = sum(map(len, pieces))
    parts = [response_head(1, version, header.correlation_id, size), *pieces]
    unread = [part for part in parts if isinstance(part, SegmentSlice)]
    if not unread:
        return cast("Buffers", parts)
    for records_slice in unread:
        records_slice.hold()
    return Stream(parts)


def _write_result(writer: Writer, version: int, result: _Result) -> None:
    if version >= FIRST_WITH_RACK and result.aborted is None:
        # The common case, without a call for each field.
        is_flexible = version >= FIRST_FLEXIBLE
        writer.buffer += (_PLAIN_COMPACT if is_flexible else _PLAIN).pack(
            result.key[1],
            result.code,
            result.high_watermark,
            result.last_stable,
            result.log_start,
            0 if is_flexible else -1,
            _NO_PREFERRED_REPLICA,
        )
        writer.blob_length(result.size)
        return
    if version >= FIRST_WITH_LOG_START:
        writer.buffer += _RESULT_WITH_START.pack(
            result.key[1], result.code, result.high_watermark, result.last_stable, result.log_start
        )
    else:
        writer.buffer += _RESULT.pack(result.key[1], result.code, result.high_watermark, result.last_stable)
    # Only `read_committed` returns aborted transactions.
    writer.array_length(-1 if result.aborted is None else len(result.aborted))
    for producer_id, first_offset in result.aborted or ():
        writer.int64(producer_id)
        writer.int64(first_offset)
        writer.no_tags()
    if version >= FIRST_WITH_RACK:
        writer.int32(_NO_PREFERRED_REPLICA)
    writer.blob_length(result.size)


def _check_readable(rights: Rights, topic: str | UUID) -> None:
    """Raise `TopicNotAuthorized` unless a client may read a topic; an unknown id is looked up as usual."""
    name = topic if isinstance(topic, str) else rights.topic_name(topic)
    if name is not None:
        rights.require(Operation.READ, ResourceType.TOPIC, name)

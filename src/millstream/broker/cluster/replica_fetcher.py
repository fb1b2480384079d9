"""Following: one task per leader fetches the records that this node's replicas lack, and appends them.

All partitions of one leader share one fetch and one session, in which only changes are sent. A failure of one partition
suspends that one for a while, longer each time, and never delays the others. A failure of the link ends the session and
begins another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from millstream.broker.cluster.membership import Node
from millstream.broker.replication.in_sync import NOT_REGISTERED
from millstream.broker.replication.partition import Partition
from millstream.core.backoff import Backoff, delay_after
from millstream.core.errors import (
    BrokerUnreachable,
    LogUnavailable,
    MillstreamError,
    NotLeader,
    UnknownTopic,
    UnknownTopicId,
)
from millstream.core.ids import NO_EPOCH, NO_OFFSET, Epoch, NodeId, Offset
from millstream.protocol.wire.channel import Channel
from millstream.protocol.wire.error_codes import OFFSET_OUT_OF_RANGE, error_from_code
from millstream.protocol.wire.replica_fetch import (
    FETCH_KEY,
    FIRST_SESSION_EPOCH,
    NO_SESSION,
    VERSION,
    PartitionKey,
    ReplicaFetch,
    ReplicaPosition,
    ReplicaResponse,
    ReplicaResponses,
    next_session_epoch,
    read_replica_responses,
    write_replica_fetch,
)

_logger = logging.getLogger(__name__)

CONNECT_S = 3.0
RESPONSE_S = 10.0
"""How long a response may take beyond the time for which the leader was asked to wait."""

ROOM_BYTES_MAX = 12 * 1024 * 1024
"""The largest response whose memory is kept for the next one."""

SMALL_RESPONSES_MAX = 8
"""After this many responses in a row that need none, the memory is released."""


class ReplicaLink(Protocol):
    """A follower's link to one leader. It carries one fetch at a time."""

    async def fetch(self, fetch: ReplicaFetch) -> ReplicaResponses:
        """Send a fetch to the leader; raise a `MillstreamError` if there is no response. The next call reconnects.

        The records of the response are valid until the next call.
        """

    async def close(self) -> None:
        """Close the connection."""


class ReplicaLinks(Protocol):
    def open(self, node: NodeId) -> ReplicaLink:
        """Return a link to a node, which need not be reachable yet."""


class WireLink:
    """A link over its own connection, opened when it is first needed and again after it was lost.

    Responses reuse the same memory, because allocating it costs more than processing them.
    The records of a response are therefore valid until the next fetch.
    """

    def __init__(self, find: Callable[[], Node | None], *, client_id: str) -> None:
        self._find = find
        self._client_id = client_id
        self._channel: Channel | None = None
        self._room: bytearray | None = None
        self._small_responses = 0
        """How many responses in a row did not need the memory."""
        self._deadline = 0.0
        """When the response to the current fetch is due; 0 for none."""
        self._watch: asyncio.TimerHandle | None = None

    async def fetch(self, fetch: ReplicaFetch) -> ReplicaResponses:
        channel = self._channel
        if channel is None or not channel.is_open:
            channel = self._channel = await self._connect()
        self._small_responses += 1
        if self._small_responses > SMALL_RESPONSES_MAX:
            # Such responses are rare and small, so no memory is kept for them.
            self._room = None
        self._expect_response(fetch.max_wait_ms / 1000 + RESPONSE_S)
        try:
            return read_replica_responses(await channel.request(FETCH_KEY, VERSION, [write_replica_fetch(fetch)]))
        except BaseException:
            # A late response must not be mistaken for the response to the next request.
            await self.close()
            raise
        finally:
            self._deadline = 0.0

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        channel, self._channel = self._channel, None
        if channel is not None:
            await asyncio.shield(channel.close())

    def _expect_response(self, within_s: float) -> None:
        """Start the timeout. One timer serves many fetches, because each would be cancelled by its response."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + within_s
        if self._watch is None:
            self._watch = loop.call_at(self._deadline, self._check_timeout)

    def _check_timeout(self) -> None:
        self._watch = None
        if not self._deadline:
            return
        loop = asyncio.get_running_loop()
        if self._deadline > loop.time():
            self._watch = loop.call_at(self._deadline, self._check_timeout)
        elif self._channel is not None:
            self._channel.abort("a fetch got no response in time")

    def _room_for(self, size: int) -> memoryview:
        if size > ROOM_BYTES_MAX:
            return memoryview(bytearray(size))
        self._small_responses = 0
        if self._room is None or len(self._room) < size:
            self._room = bytearray(min(max(size, 2 * len(self._room or b"")), ROOM_BYTES_MAX))
        return memoryview(self._room)[:size]

    async def _connect(self) -> Channel:
        node = self._find()
        if node is None:
            raise BrokerUnreachable("the leader is not registered")
        channel = await Channel.open(node.host, node.port, client_id=self._client_id, timeout_s=CONNECT_S)
        channel.version_for(FETCH_KEY, newest=VERSION, oldest=VERSION)
        channel.room_for = self._room_for
        return channel


class WireLinks:
    """Links to nodes at the addresses that they registered."""

    def __init__(self, find: Callable[[NodeId], Node | None], *, me: NodeId) -> None:
        self._find = find
        self._client_id = f"replica-{me}"

    def open(self, node: NodeId) -> WireLink:
        return WireLink(lambda: self._find(node), client_id=self._client_id)


HOLD_FIRST_S = 0.05
HOLD_MAX_S = 5.0
GRACE_S = 5.0
"""How long a leader may be unaware of a partition, or of its leadership, before a warning is logged."""

BYTES_BETWEEN_YIELDS = 2 * 1024 * 1024
PARTITIONS_BETWEEN_YIELDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """The size and time limits of one fetch of a follower."""

    wait_ms: int = 500
    bytes_max: int = 10 * 1024 * 1024
    partition_bytes_max: int = 4096 * 1024


THROTTLE_CHECK_S = 0.5
"""How long a throttled partition waits at most before its throttle is asked again: it may have changed."""


class Throttle(Protocol):
    """Limits how fast partitions are fetched."""

    def bytes_max(self, key: PartitionKey, size: int) -> int:
        """Return how many of this many bytes one fetch of a partition may ask for."""

    def pause_after(self, key: PartitionKey, size: int) -> float:
        """Return for how many seconds a partition is not fetched, after a fetch that brought this many bytes."""


class Unthrottled:
    """Lets partitions be fetched as fast as possible."""

    def bytes_max(self, _key: PartitionKey, size: int) -> int:
        return size

    def pause_after(self, _key: PartitionKey, _size: int) -> float:
        return 0.0


@dataclass(slots=True, eq=False)
class _FetchedPartition:
    partition: Partition
    asked_epoch: Epoch = NO_EPOCH
    """The leader epoch of the last request, to which a response belongs."""
    is_damaged: bool = False
    """Whether damage was reported to the leader and is not repaired yet."""
    watermark: Offset = NO_OFFSET
    """The leader's high watermark when it was informed of damage; -1 before that."""
    failures: int = 0
    failing_since: float = 0.0
    is_reported: bool = False
    held: asyncio.TimerHandle | None = None
    """Set while it is suspended, after a failure or by the throttle."""

    @property
    def is_current(self) -> bool:
        """Whether a response is for the current leader epoch."""
        return self.asked_epoch == self.partition.leader_epoch and self.partition.follows is not None

    @property
    def is_stored(self) -> bool:
        """Whether the whole log is as durable as the topic requires, so that the leader may count it."""
        return self.partition.promised_offset >= self.partition.log.end_offset


class ReplicaFetcher:
    """Fetches from one leader, until `run` is cancelled."""

    def __init__(
        self,
        leader: NodeId,
        me: NodeId,
        link: ReplicaLink,
        *,
        limits: FetchLimits,
        random: Random,
        registration: Callable[[], int],
        throttle: Throttle | None = None,
    ) -> None:
        self.leader = leader
        self._me = me
        self._link = link
        self._limits = limits
        self._random = random
        self._registration = registration
        self._throttle = throttle or Unthrottled()
        self._backoff = Backoff(random)
        self._followed: dict[PartitionKey, _FetchedPartition] = {}
        self._changed: dict[PartitionKey, None] = {}
        """Partitions whose position the leader does not know yet."""
        self._forgotten: dict[PartitionKey, None] = {}
        self._session_id = NO_SESSION
        self._session_epoch = FIRST_SESSION_EPOCH
        self._session_registration = NOT_REGISTERED
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._followed)

    # -- followed partitions --------------------------------------------------------------------------------

    def follow(self, partition: Partition) -> None:
        """Fetch a partition from now on; a known one is requested again, because its epoch may differ."""
        key = (partition.topic.topic_id, partition.index)
        followed = self._followed.get(key)
        if followed is None or followed.partition is not partition:
            self.leave(key)
            followed = self._followed[key] = _FetchedPartition(partition)
        elif followed.asked_epoch == partition.leader_epoch and followed.held is None and not followed.is_damaged:
            return
        followed.failures = 0
        self._release(key, followed)

    def leave(self, key: PartitionKey) -> None:
        followed = self._followed.pop(key, None)
        if followed is not None:
            self._cancel_suspension(followed)
            self._changed.pop(key, None)
            self._forgotten[key] = None

    def _release(self, key: PartitionKey, followed: _FetchedPartition) -> None:
        self._cancel_suspension(followed)
        self._changed[key] = None
        self._forgotten.pop(key, None)
        self._wake.set()

    def _cancel_suspension(self, followed: _FetchedPartition) -> None:
        if followed.held is not None:
            followed.held.cancel()
            followed.held = None

    def _suspend_after_error(self, key: PartitionKey, followed: _FetchedPartition, error: MillstreamError) -> None:
        if self._followed.get(key) is not followed or followed.held is not None:
            return
        self._report(followed, error)
        pause_s = delay_after(followed.failures, first_s=HOLD_FIRST_S, max_s=HOLD_MAX_S, random=self._random)
        followed.failures += 1
        self._suspend(key, followed, pause_s, lambda: self._release(key, followed))

    def _suspend(
        self, key: PartitionKey, followed: _FetchedPartition, pause_s: float, then: Callable[[], None]
    ) -> None:
        followed.held = asyncio.get_running_loop().call_later(pause_s, then)
        self._changed.pop(key, None)
        self._forgotten[key] = None

    def _apply_throttle(self, key: PartitionKey, followed: _FetchedPartition, size: int = 0) -> bool:
        """Suspend a partition if its throttle requires it after a fetch of this size; return whether it did."""
        pause_s = self._throttle.pause_after(key, size)
        if pause_s > 0:
            self._suspend(key, followed, min(pause_s, THROTTLE_CHECK_S), lambda: self._check_throttle(key, followed))
        return pause_s > 0

    def _check_throttle(self, key: PartitionKey, followed: _FetchedPartition) -> None:
        if not self._apply_throttle(key, followed):
            self._release(key, followed)

    def _report(self, followed: _FetchedPartition, error: MillstreamError) -> None:
        """Log a failure once; a transient one, until every node knows of a change, only if it lasts."""
        now = asyncio.get_running_loop().time()
        if not followed.failures:
            followed.failing_since, followed.is_reported = now, False
        passes = isinstance(error, NotLeader | UnknownTopic | UnknownTopicId)
        is_new_failure = not followed.is_reported and (not passes or now - followed.failing_since > GRACE_S)
        followed.is_reported = followed.is_reported or is_new_failure
        extra = {"partition": str(followed.partition.log.partition), "leader": self.leader, "error": str(error)}
        level = logging.WARNING if is_new_failure else logging.DEBUG
        _logger.log(level, "a replica could not be followed; retrying", extra=extra)

    # -- the task -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            while True:
                if not self._changed and all(followed.held is not None for followed in self._followed.values()):
                    self._wake.clear()
                    await self._wake.wait()
                await self._fetch_once()
        finally:
            for followed in self._followed.values():
                self._cancel_suspension(followed)
            await self._link.close()

    async def _fetch_once(self) -> None:
        try:
            self._note_registration()
            await self._truncate_damage()
            await self._await_stored()
            responses = await self._link.fetch(self._next_fetch())
            await self._apply_responses(responses)
            self._backoff.reset()
        except MillstreamError as error:
            self._begin_session()
            _logger.info("a leader cannot be reached", extra={"leader": self.leader, "error": str(error)})
            await self._backoff.pause()
        except Exception:
            self._begin_session()
            _logger.exception("replication from a leader failed because of a bug", extra={"leader": self.leader})
            await self._backoff.pause()

    def _begin_session(self) -> None:
        self._session_id, self._session_epoch = NO_SESSION, FIRST_SESSION_EPOCH
        self._forgotten.clear()
        self._changed = {key: None for key, followed in self._followed.items() if followed.held is None}

    def _note_registration(self) -> None:
        """Begin a new session after a registration: the leader counts positions by registration."""
        registration = self._registration()
        if registration != self._session_registration:
            self._session_registration = registration
            self._begin_session()

    def resend_position(self, key: PartitionKey) -> None:
        """Send the leader the position of a partition again: it was damaged or repaired."""
        followed = self._followed.get(key)
        if followed is not None:
            followed.failures = 0
            self._release(key, followed)
            # The leader then sends its high watermark again, which a damaged replica applied only in part.
            self._forgotten[key] = None

    async def _truncate_damage(self) -> None:
        damaged = [(key, self._followed[key]) for key in self._changed if self._followed[key].partition.log.damage]
        for key, followed in damaged:
            if followed.watermark == NO_OFFSET:
                continue
            try:
                cut = followed.partition.truncate_damage(followed.watermark)
            except MillstreamError as error:
                self._suspend_after_error(key, followed, error)
            else:
                await self._await_done(key, followed, cut)

    async def _await_stored(self) -> None:
        """Wait until everything that will be reported as stored is durable: an earlier fetcher may not have waited."""
        while unstored := [(key, self._followed[key]) for key in self._changed if not self._followed[key].is_stored]:
            for key, followed in unstored:
                await self._await_done(key, followed, followed.partition.stored())

    async def _await_done(
        self, key: PartitionKey, followed: _FetchedPartition, done: asyncio.Future[None] | None
    ) -> None:
        try:
            if done is not None:
                await done
        except MillstreamError as error:
            self._suspend_after_error(key, followed, error)

    def _next_fetch(self) -> ReplicaFetch:
        changed, self._changed = self._changed, {}
        forgotten, self._forgotten = self._forgotten, {}
        positions: dict[PartitionKey, ReplicaPosition] = {}
        for key in changed:
            followed = self._followed[key]
            positions[key] = position = self._position(key, followed.partition)
            followed.asked_epoch = position.leader_epoch
            followed.is_damaged = position.offset < followed.partition.log.end_offset
        return ReplicaFetch(
            self._me,
            self._session_registration,
            self._limits.wait_ms,
            self._limits.bytes_max,
            positions,
            forgotten=tuple(forgotten) if self._session_id != NO_SESSION else (),
            session_id=self._session_id,
            session_epoch=self._session_epoch,
        )

    def _position(self, key: PartitionKey, partition: Partition) -> ReplicaPosition:
        """Return the position of a replica. A damaged one reports that and requests no records."""
        log, offset = partition.log, partition.intact_until
        is_whole = offset == log.end_offset
        return ReplicaPosition(
            offset=offset,
            last_epoch=log.latest_epoch if is_whole else log.epochs.epoch_at(offset - 1),
            leader_epoch=partition.leader_epoch,
            log_start=log.start_offset,
            max_bytes=self._throttle.bytes_max(key, self._limits.partition_bytes_max) if is_whole else 0,
        )

    # -- responses ------------------------------------------------------------------------------------------

    async def _apply_responses(self, responses: ReplicaResponses) -> None:
        """Apply a response, and wait until it is as durable as the next fetch will report."""
        if responses.code:
            raise error_from_code(responses.code, None, about=f"fetch from node {self.leader}")
        self._session_id = responses.session_id
        self._session_epoch = next_session_epoch(self._session_epoch)
        syncing: list[tuple[PartitionKey, _FetchedPartition, asyncio.Future[None]]] = []
        size = 0
        for number, (key, response) in enumerate(responses.partitions.items(), 1):
            followed = self._followed.get(key)
            if followed is None or followed.held is not None or not followed.is_current:
                continue
            stored = self._try_apply(key, followed, response)
            if stored is not None:
                syncing.append((key, followed, stored))
            size += len(response.records)
            if size >= BYTES_BETWEEN_YIELDS or number % PARTITIONS_BETWEEN_YIELDS == 0:
                size = 0
                await asyncio.sleep(0)
        for key, followed, stored in syncing:
            await self._await_done(key, followed, stored)

    def _try_apply(
        self, key: PartitionKey, followed: _FetchedPartition, response: ReplicaResponse
    ) -> asyncio.Future[None] | None:
        try:
            stored = self._apply_response(key, followed, response)
        except MillstreamError as error:
            self._suspend_after_error(key, followed, error)
            return None
        except Exception as error:
            _logger.exception(
                "a replica failed because of a bug", extra={"partition": str(followed.partition.log.partition)}
            )
            self._suspend_after_error(key, followed, LogUnavailable(f"a defect: {error!r}"))
            return None
        followed.failures = 0
        return stored

    def _apply_response(
        self, key: PartitionKey, followed: _FetchedPartition, response: ReplicaResponse
    ) -> asyncio.Future[None] | None:
        partition, epoch = followed.partition, followed.asked_epoch
        if response.code == OFFSET_OUT_OF_RANGE and response.log_start > partition.log.end_offset:
            cut = partition.restart_at(response.log_start, leader_epoch=epoch)
            self._changed[key] = None
            return cut
        if response.code:
            raise error_from_code(response.code, None, about=f"fetch of {partition.log.partition}")
        if response.diverging is not None:
            cut = partition.truncate(response.diverging, leader_epoch=epoch)
            self._changed[key] = None
            return cut
        if followed.is_damaged:
            followed.watermark = response.high_watermark
            partition.apply_high_watermark(response.high_watermark)
            raise LogUnavailable(f"{partition.log.partition} waits for the repair of its damage")
        followed.watermark = NO_OFFSET
        stored = partition.append_fetched(
            response.records, leader_epoch=epoch, high_watermark=response.high_watermark, log_start=response.log_start
        )
        # The end of a log is not delayed: a move must be able to end.
        is_near_end = partition.log.end_offset >= response.high_watermark
        if response.records and (is_near_end or not self._apply_throttle(key, followed, len(response.records))):
            self._changed[key] = None
        return stored

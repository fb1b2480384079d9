"""Publishes messages in batches, each message once and in order per partition.

A publisher is one idempotent producer. No task runs in normal operation: a publish writes its record into the batch of
its partition, the next turn of the loop sends what has accumulated, and the response completes the callers' futures.
When a node is gone or a leader has moved, one task finds the new leaders and resumes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from millstream.client.message import Receipt, check_integer
from millstream.client.node_sender import ACKS_NONE, NodeSender
from millstream.client.partition_queue import NOT_IDEMPOTENT, PartitionQueue, ProducerIdentity, SharedResult
from millstream.core.backoff import FIRST_S, Backoff, delay_after
from millstream.core.errors import (
    BrokerUnreachable,
    InvalidRequest,
    MillstreamError,
    NotLeader,
    PublishFailed,
    RequestTimedOut,
    UnknownTopic,
)
from millstream.core.headers import MESSAGE_ID
from millstream.core.ids import NO_TIMESTAMP_MS, NodeId, PartitionIndex
from millstream.core.tasks import cancel_and_wait
from millstream.core.topic import partition_for_key
from millstream.protocol.messages.primitives import Buffer
from millstream.protocol.records.record import Headers, NewRecord
from millstream.protocol.wire.client import BACKOFF_S_MAX, Client
from millstream.protocol.wire.cluster_metadata import TopicMetadata
from millstream.protocol.wire.error_codes import TRANSIENT, error_from_code

_logger = logging.getLogger(__name__)

_KEYS_MAX: Final = 10_000
"""The number of keys whose partition is cached, since hashing a key costs more than the rest of a publish."""


class TopicRoute:
    """The partitions of one topic: a key always maps to the same one; messages without a key fill one batch after
    another.
    """

    __slots__ = ("_by_key", "_sticky", "is_used", "name", "queues", "topic_id")

    def __init__(self, name: str, topic_id: str, queues: Sequence[PartitionQueue]) -> None:
        self.name = name
        self.topic_id = topic_id
        self.queues = list(queues)
        self.is_used = False
        """Whether something was published since the last check."""
        self._by_key: dict[bytes, PartitionQueue] = {}
        self._sticky = random.choice(self.queues)

    def choose(self, key: bytes | None, partition: int | None) -> PartitionQueue:
        self.is_used = True
        if partition is not None:
            return self._queue_of(partition)
        if key is None:
            return self._sticky_queue()
        queue = self._by_key.get(key)
        if queue is None:
            if len(self._by_key) >= _KEYS_MAX:
                self._by_key.clear()
            queue = self._by_key[bytes(key)] = self.queues[partition_for_key(bytes(key), len(self.queues))]
        return queue

    def extend(self, queues: Sequence[PartitionQueue]) -> None:
        """Add partitions, so that keys may map elsewhere from now on."""
        self.queues += queues
        self._by_key.clear()

    def _sticky_queue(self) -> PartitionQueue:
        queue = self._sticky
        if queue.waiting and len(queue.waiting) == 1 and queue.sender is not None:
            return queue
        if len(self.queues) > 1:
            # The last batch is sent or full, or its leader is unknown: continue with a partition that has a leader.
            at = queue.index
            turn = self.queues[at + 1 :] + self.queues[: at + 1]
            self._sticky = next((queue for queue in turn if queue.sender is not None), turn[0])
        return self._sticky

    def _queue_of(self, partition: int) -> PartitionQueue:
        check_integer("partition", partition)
        if not partition < len(self.queues):
            last = len(self.queues) - 1
            raise UnknownTopic(f"topic {self.name!r} has no partition {partition}; the last is {last}")
        return self.queues[partition]


ACKS_ALL: Final = -1

BATCH_BYTES: Final = 512 * 1024
"""Well below the default `max.message.bytes` of topics."""

BUFFER_BYTES: Final = 32 * 1024 * 1024

COMPRESSIONS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
"""In the order of Kafka's codec numbers."""

_CLOSE_S_MAX: Final = 30.0

_EXPIRY_S_MIN: Final = 0.02
"""All partitions are checked at once, so not for every batch separately."""

_TURN: Final = 2048
"""How many records are encoded before other tasks get a turn."""

_UNKNOWN_MAX: Final = 3
"""How often a known topic must be missing before it counts as deleted: a node may not know it yet."""

_REFRESH_S: Final = 5.0
"""How long after a publish its topic is checked for new partitions; nothing is asked while nothing is published."""

_RECORD_BYTES: Final = 32
"""The approximate size of a record without its key, value and headers."""


class Publisher:
    """An idempotent producer for any number of topics of one cluster. `close` it when done."""

    def __init__(
        self,
        client: Client,
        *,
        linger_s: float = 0.0,
        batch_bytes: int = BATCH_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
        compression: str = "none",
        acks: int = ACKS_ALL,
        timeout_s: float = 120.0,
    ) -> None:
        if compression not in COMPRESSIONS:
            raise InvalidRequest(f"compression must be one of {', '.join(COMPRESSIONS)}, not {compression!r}")
        if acks not in (ACKS_ALL, ACKS_NONE, 1):
            raise InvalidRequest(f"acks must be -1 (all), 1 or 0, not {acks}")
        self._client = client
        self._linger_s = linger_s
        self._batch_bytes = batch_bytes
        self._buffer_bytes = buffer_bytes
        self._compression = COMPRESSIONS.index(compression)
        self._acks = acks
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._identity: ProducerIdentity | None = None if acks == ACKS_ALL else NOT_IDEMPOTENT
        self._topics: dict[str, TopicRoute] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._senders: dict[NodeId, NodeSender] = {}
        self._troubled: dict[PartitionQueue, None] = {}
        self._recovering: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        """Runs while anything is in flight, and fails what takes too long."""
        self._refresh: asyncio.TimerHandle | None = None
        """Runs after a publish."""
        self._refreshing: asyncio.Task[None] | None = None
        self._buffered = 0
        self._waiting_for_room: deque[asyncio.Future[None]] = deque()
        self._closed = False

    # -- publishing -----------------------------------------------------------------------------------------

    async def publish(self, topic: str, record: NewRecord, *, partition: int | None = None) -> Receipt:
        """Publish a message; return when it is stored as the topic's settings require.

        Cancelling the caller does not withdraw the message.
        """
        key, value, headers, timestamp_ms = record
        return await self.send(topic, key, value, headers, timestamp_ms, partition)

    async def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
        timestamp_ms: int = NO_TIMESTAMP_MS,
        partition: int | None = None,
    ) -> Receipt:
        """Publish a message that is given in its parts."""
        route = self._topics.get(topic)
        if route is None or self._buffered >= self._buffer_bytes:
            route = await self._await_ready(topic)
        if partition is not None:
            route = await self._with_partition(route, partition)
        if type(value) is not bytes or type(key) is not bytes:
            key, value = _plain(key), _plain(value)
        queue = route.choose(key, partition)
        if timestamp_ms < 0:
            timestamp_ms = int(time.time() * 1000)
        batch = queue.room(self._loop.time(), _size(key, value, headers))
        position = batch.count
        self._buffered += queue.write(batch, key, value, headers, timestamp_ms)
        if self._expiry is None:
            self._expiry = self._loop.call_at(batch.deadline, self._expire)
        if self._refresh is None:
            self._refresh = self._loop.call_later(_REFRESH_S, self._begin_refresh)
        future: asyncio.Future[Receipt] = self._loop.create_future()
        batch.singles.append((position, future, timestamp_ms, _header_id(headers) if headers else None))
        if queue.sender is not None:
            queue.sender.notify(queue)
        try:
            return await future
        except UnknownTopic as error:
            if error is not queue.given_up:
                raise
        # The known topic is gone and this was not stored in it: publish it like any other message.
        return await self.send(topic, key, value, headers, timestamp_ms, partition)

    async def publish_many(
        self, topic: str, records: Sequence[NewRecord], *, partition: int | None = None
    ) -> list[Receipt]:
        """Publish messages and return their receipts, in the order given.

        Raises `PublishFailed`, with the outcome of each, if some could not be stored. If the topic is deleted
        meanwhile, the rest fails: it is not published to another topic of that name.
        """
        if not records:
            return []
        now_ms = int(time.time() * 1000)
        shared = SharedResult(
            self._loop.create_future(),
            [now_ms if record.timestamp_ms < 0 else record.timestamp_ms for record in records],
            [_header_id(record.headers) if record.headers else None for record in records],
        )
        route = await self._await_ready(topic)
        if partition is not None:
            route = await self._with_partition(route, partition)
            route.choose(None, partition)
        if self._refresh is None:
            self._refresh = self._loop.call_later(_REFRESH_S, self._begin_refresh)
        index = 0
        try:
            for index, (key, value, headers, _) in enumerate(records):
                if index % _TURN == _TURN - 1:
                    # Send what is encoded so far, and let other tasks run.
                    await asyncio.sleep(0)
                while self._buffered >= self._buffer_bytes and not self._closed:
                    await self._await_room()
                self._add(route.choose(key, partition), _plain(key), _plain(value), headers, shared, index)
        except MillstreamError as error:
            if index == 0 and error is not route.queues[0].given_up:
                raise
            # Earlier ones are in flight, and their outcomes are reported as well.
            shared.fail_from(index, error)
        await shared.future
        topic_error = route.queues[0].given_up
        if isinstance(topic_error, UnknownTopic) and all(outcome is topic_error for outcome in shared.receipts):
            # Nothing was stored in the topic that was known, so start again.
            return await self.publish_many(topic, records, partition=partition)
        return _receipts(shared)

    def _add(
        self,
        queue: PartitionQueue,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        shared: SharedResult,
        index: int,
    ) -> None:
        batch = queue.room(self._loop.time(), _size(key, value, headers))
        position = batch.count
        self._buffered += queue.write(batch, key, value, headers, shared.timestamps_ms[index])
        if self._expiry is None:
            self._expiry = self._loop.call_at(batch.deadline, self._expire)
        shares = batch.shares
        # While this caller waited for room, another caller may have published.
        if shares and shares[-1][1] is shared and shares[-1][0] + len(shares[-1][2]) == position:
            shares[-1][2].append(index)
        else:
            shares.append((position, shared, [index]))
        if queue.sender is not None:
            queue.sender.notify(queue)

    # -- the end --------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Send waiting messages, and return when everything published so far is acknowledged or has failed."""
        waiting: list[asyncio.Future[None]] = []
        for route in self._topics.values():
            for queue in route.queues:
                for batch in (*queue.sent, *queue.waiting):
                    if not batch.is_done:
                        waiting.append(self._loop.create_future())
                        batch.flushers.append(waiting[-1])
        for sender in self._senders.values():
            sender.send_now()
        for future in waiting:
            await future

    async def close(self) -> None:
        """Flush for at most half a minute, then give up the rest."""
        if self._closed:
            return
        try:
            async with asyncio.timeout(min(_CLOSE_S_MAX, self._timeout_s)):
                await self.flush()
        except TimeoutError:
            pass
        finally:
            self._closed = True
            self._topics, routes = {}, list(self._topics.values())
            await self._stop(routes)

    async def _stop(self, routes: Sequence[TopicRoute]) -> None:
        tasks = [*self._opening.values(), *(task for task in (self._recovering, self._refreshing) if task is not None)]
        await cancel_and_wait(*tasks)
        for timer in (self._expiry, self._refresh):
            if timer is not None:
                timer.cancel()
        for sender in self._senders.values():
            sender.close()
        given_up = RequestTimedOut("the publisher was closed before this was acknowledged")
        for route in routes:
            for queue in route.queues:
                queue.fail_all(given_up)
        self._on_freed(0)

    # -- room -----------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        """Fail messages that have waited too long: every publish gets a response by then."""
        now = self._loop.time()
        next_due: float | None = None
        for route in self._topics.values():
            for queue in route.queues:
                due = queue.expire(now)
                if due is not None and (next_due is None or due < next_due):
                    next_due = due
                if queue.troubled:
                    self._recover(queue)
        self._expiry = None
        if next_due is not None:
            self._expiry = self._loop.call_at(max(next_due, now + _EXPIRY_S_MIN), self._expire)

    async def _await_ready(self, topic: str) -> TopicRoute:
        """Wait until the topic is known and there is room in the buffer.

        The route is valid until the caller awaits: after that the topic may be gone, and its queues accept nothing.
        """
        while True:
            if self._closed:
                raise InvalidRequest("the publisher is closed")
            if self._buffered >= self._buffer_bytes:
                await self._await_room()
            elif (route := self._topics.get(topic)) is not None:
                return route
            else:
                await self._open_topic(topic)

    async def _await_room(self) -> None:
        """Wait until there may be room for more."""
        self._waiting_for_room.append(self._loop.create_future())
        await self._waiting_for_room[-1]

    def _on_freed(self, size: int) -> None:
        self._buffered -= size
        if self._waiting_for_room and (self._buffered < self._buffer_bytes or self._closed):
            # All may check again; those that find it full wait again, in the same order.
            waiting, self._waiting_for_room = self._waiting_for_room, deque()
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)

    # -- topics and leaders ---------------------------------------------------------------------------------

    async def _open_topic(self, topic: str) -> None:
        opening = self._opening.get(topic)
        if opening is None:
            opening = self._opening[topic] = self._loop.create_task(self._find_topic(topic))
            opening.add_done_callback(lambda done: self._on_opened(topic, done))
        # Several callers may wait, so cancelling one of them does not end it.
        await asyncio.wait([opening])
        if not opening.cancelled():
            opening.result()
        # Otherwise the publisher was closed, which the caller finds out next.

    def _on_opened(self, topic: str, opening: asyncio.Task[None]) -> None:
        self._opening.pop(topic, None)
        if not opening.cancelled():
            # Callers that still wait get the error; without any, it is ignored.
            opening.exception()

    async def _find_topic(self, topic: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._look_up(topic, self._loop.time() + self._timeout_s)
        except TimeoutError:
            raise RequestTimedOut(
                f"topic {topic!r} could not be looked up within {self._timeout_s:g} s; nothing was stored"
            ) from None

    async def _look_up(self, topic: str, deadline: float) -> None:
        """Learn everything first, so that a route is created once, and only when nothing can fail any more."""
        backoff = Backoff(max_s=BACKOFF_S_MAX)
        while True:
            try:
                metadata = await self._fetch_metadata(topic, create=True)
                senders = await self._senders_for(metadata)
                if self._identity is None:
                    self._identity = await self._new_identity(topic)
                break
            except (*TRANSIENT, RequestTimedOut):
                if self._loop.time() + backoff.next_s > deadline:
                    raise
            await backoff.pause()
        route = self._topics[topic] = TopicRoute(topic, str(metadata.topic_id), self._new_queues(metadata, 0))
        self._assign_queues(route.queues, metadata, senders)

    async def _fetch_metadata(self, topic: str, *, create: bool) -> TopicMetadata:
        metadata = await self._client.metadata([topic], create=create)
        if topic in metadata.topics:
            if not metadata.topics[topic].partitions:
                raise NotLeader(f"topic {topic!r} has no partitions yet")
            return metadata.topics[topic]
        needs = f"WRITE on topic {topic!r}"
        error = error_from_code(metadata.errors.get(topic, 3), None, about=f"publish to {topic!r}", needs=needs)
        if isinstance(error, UnknownTopic):
            hint = f"create it with: millstream topic create {topic}"
            raise UnknownTopic(f"topic {topic!r} does not exist and the broker does not create it; {hint}")
        raise error

    async def _with_partition(self, route: TopicRoute, partition: int) -> TopicRoute:
        """Return the route of a topic that has the partition, which may be new."""
        if not isinstance(partition, int) or partition < len(route.queues):
            return route
        self._renew(route.name, await self._fetch_metadata(route.name, create=False))
        return await self._await_ready(route.name)

    def _begin_refresh(self) -> None:
        """Look for new partitions in the background."""
        self._refresh = None
        used = [route for route in self._topics.values() if route.is_used]
        for route in used:
            route.is_used = False
        if used and self._refreshing is None:
            self._refreshing = self._loop.create_task(self._find_new_partitions([route.name for route in used]))
            self._refreshing.add_done_callback(self._on_refreshed)

    def _on_refreshed(self, task: asyncio.Task[None]) -> None:
        self._refreshing = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.warning("topic metadata could not be refreshed", exc_info=error)

    async def _find_new_partitions(self, topics: Sequence[str]) -> None:
        # If no broker responds, the next publish meets the same error and handles it.
        with suppress(MillstreamError):
            metadata = await self._client.metadata(topics)
            for name, topic in metadata.topics.items():
                route = self._topics.get(name)
                if route is not None and route.topic_id == str(topic.topic_id):
                    self._renew(name, topic)

    def _new_queues(self, metadata: TopicMetadata, first: int) -> list[PartitionQueue]:
        queues = [
            PartitionQueue(
                metadata.name,
                str(metadata.topic_id),
                index,
                batch_bytes=self._batch_bytes,
                compression=self._compression,
                timeout_s=self._timeout_s,
                freed=self._on_freed,
            )
            for index in range(first, len(metadata.partitions))
        ]
        for queue in queues:
            if self._identity is not None:
                queue.begin(self._identity)
        return queues

    def _assign_queues(
        self, queues: Sequence[PartitionQueue], metadata: TopicMetadata, senders: Mapping[int, NodeSender | None]
    ) -> None:
        """Assign every queue to its leader's sender; queues without a leader stay suspended."""
        leaders = {partition.partition: partition.leader_id for partition in metadata.partitions.values()}
        for queue in queues:
            if queue.given_up is not None:
                continue
            sender = senders.get(leaders.get(PartitionIndex(queue.index), NodeId(-1)))
            if queue.sender is not None and queue.sender is not sender:
                queue.sender.drop(queue)
            queue.sender = sender
            queue.troubled = sender is None or queue.identity is None
            if sender is None:
                queue.failures += 1
                queue.cause = "its partition has no leader that can be reached"
                self._recover(queue)
            elif queue.needs_identity:
                self._recover(queue)
            elif queue.can_send:
                sender.notify(queue)

    async def _senders_for(self, metadata: TopicMetadata) -> dict[int, NodeSender | None]:
        leaders = {partition.leader_id for partition in metadata.partitions.values() if partition.leader_id >= 0}
        return {leader: await self._sender_for(leader) for leader in leaders}

    async def _sender_for(self, node: NodeId) -> NodeSender | None:
        sender = self._senders.get(node)
        if sender is None:
            sender = self._senders[node] = NodeSender(
                node, acks=self._acks, linger_s=self._linger_s, timeout_s=self._timeout_s, recover=self._recover
            )
        if not sender.is_open:
            try:
                pool = await self._client.pool_for(node)
                sender.open(pool, await pool.shared())
            except (BrokerUnreachable, RequestTimedOut):
                return None
        return sender

    async def _new_identity(self, topic: str) -> ProducerIdentity:
        return ProducerIdentity(*await self._client.init_producer_id(topic))

    # -- trouble --------------------------------------------------------------------------------------------

    def _recover(self, queue: PartitionQueue) -> None:
        if queue.given_up is not None:
            return
        self._troubled[queue] = None
        if self._recovering is None and not self._closed:
            self._recovering = self._loop.create_task(self._recover_all())
            self._recovering.add_done_callback(self._on_recovered)

    def _on_recovered(self, task: asyncio.Task[None]) -> None:
        self._recovering = None
        if task.cancelled() or self._closed:
            return
        if (error := task.exception()) is not None:
            for topic in {queue.topic for queue in self._troubled}:
                self._forget(topic, _as_millstream_error(error))
        for queue in list(self._troubled):
            self._recover(queue)

    async def _recover_all(self) -> None:
        """Find the new leaders of failed batches, until they are in flight."""
        while self._troubled:
            tried = min(queue.failures for queue in self._troubled)
            max_s = min(BACKOFF_S_MAX, self._timeout_s / 4)
            await asyncio.sleep(delay_after(tried, first_s=FIRST_S / 2, max_s=max_s))
            for topic in {queue.topic for queue in self._troubled}:
                queues = [queue for queue in self._troubled if queue.topic == topic]
                try:
                    await self._recover_topic(topic, queues)
                except (*TRANSIENT, RequestTimedOut, UnknownTopic) as error:
                    if isinstance(error, UnknownTopic) and min(queue.failures for queue in queues) >= _UNKNOWN_MAX:
                        self._forget(topic, UnknownTopic(f"topic {topic!r} was deleted while this was published"))
                        continue
                    for queue in queues:
                        queue.failures += 1
                        queue.cause = str(error)
                except Exception as error:
                    # It would fail again; other topics may succeed.
                    self._forget(topic, _as_millstream_error(error))

    async def _recover_topic(self, topic: str, queues: Sequence[PartitionQueue]) -> None:
        """Resume the queues of one topic, which were suspended by a failure."""
        for queue in queues:
            if queue.needs_identity:
                queue.begin(NOT_IDEMPOTENT if self._acks != ACKS_ALL else await self._new_identity(topic))
        # Waiting messages are for the existing topic: it must not be created again after a deletion.
        metadata = await self._fetch_metadata(topic, create=False)
        senders = await self._senders_for(metadata)
        for queue in queues:
            self._troubled.pop(queue, None)
        self._renew(topic, metadata)
        self._assign_queues(queues, metadata, senders)

    def _renew(self, topic: str, metadata: TopicMetadata) -> None:
        """Update a topic that was recreated, or has new partitions."""
        route = self._topics.get(topic)
        if route is None:
            return
        if route.topic_id != str(metadata.topic_id):
            error = UnknownTopic(
                f"topic {topic!r} was deleted while this was published; another topic has its name now"
            )
            self._forget(topic, error)
        elif len(metadata.partitions) > len(route.queues):
            route.extend(added := self._new_queues(metadata, len(route.queues)))
            for queue in added:
                self._recover(queue)

    def _forget(self, topic: str, error: MillstreamError) -> None:
        """Fail everything that is published to a topic; the next publish looks it up again.

        Partitions may hold batches of this topic's producer id, so new queues get another one: sequences counted from 0
        again would look like duplicates of stored batches. Queues of other topics keep their id, which no partition of
        theirs gets twice.
        """
        route = self._topics.pop(topic, None)
        if route is None:
            return
        if self._acks == ACKS_ALL:
            self._identity = None
        for queue in route.queues:
            queue.fail_all(error)
            self._troubled.pop(queue, None)
            if queue.sender is not None:
                queue.sender.drop(queue)


def _as_millstream_error(error: BaseException) -> MillstreamError:
    return error if isinstance(error, MillstreamError) else InvalidRequest(f"the publisher failed: {error!r}")


def _receipts(shared: SharedResult) -> list[Receipt]:
    receipts = [receipt for receipt in shared.receipts if type(receipt) is Receipt]
    if len(receipts) < len(shared.receipts):
        raise PublishFailed(shared.receipts)
    return receipts


def _plain(field: Buffer | None) -> bytes | None:
    """Return a key or value as immutable bytes."""
    if field is None or type(field) is bytes:
        return field
    if not isinstance(field, bytes | bytearray | memoryview):
        raise InvalidRequest(f"a key and a value must be bytes, not {type(field).__name__}")
    return bytes(field)


def _header_id(headers: Headers) -> str | None:
    for name, value in headers:
        if name == MESSAGE_ID and value:
            return value.decode(errors="replace")
    return None


def _size(key: Buffer | None, value: Buffer | None, headers: Headers) -> int:
    size = _RECORD_BYTES + (0 if key is None else len(key)) + (0 if value is None else len(value))
    for name, content in headers:
        size += 8 + len(name) + (0 if content is None else len(content))
    return size

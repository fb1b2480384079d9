"""Sends batches to one node, those of all partitions that it leads together.

Batches that arrive while a request is in flight go with the next one, so batches grow under load and nothing waits for
a timer. Only when much has accumulated are more requests sent before the first gets a response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple
from uuid import UUID

from millstream.client.partition_queue import IN_FLIGHT_MAX, OutgoingBatch, PartitionQueue
from millstream.core.errors import MillstreamError, RequestTimedOut, UnknownTopic, UnknownTopicId
from millstream.core.ids import NO_OFFSET, NodeId, Offset
from millstream.protocol.messages.primitives import Buffer
from millstream.protocol.wire import produce
from millstream.protocol.wire.channel import Channel, Pool
from millstream.protocol.wire.error_codes import TRANSIENT
from millstream.protocol.wire.produce import Produced

REQUEST_S_MAX: Final = 30.0
_PATIENCE_S: Final = 5.0
"""How long to wait for a response beyond the broker's own timeout."""

_REQUEST_BYTES_MAX: Final = 4 * 1024 * 1024
_MUCH_BYTES: Final = 64 * 1024
_DUPLICATE_SEQUENCE: Final = 46
ACKS_NONE: Final = 0


class _SentBatch(NamedTuple):
    queue: PartitionQueue
    batch: OutgoingBatch


class NodeSender:
    def __init__(
        self, node: NodeId, *, acks: int, linger_s: float, timeout_s: float, recover: Callable[[PartitionQueue], None]
    ) -> None:
        self.node = node
        self._acks = acks
        self._request_s = min(REQUEST_S_MAX, timeout_s)
        self._patience_s = self._request_s + min(_PATIENCE_S, timeout_s)
        self._linger_s = linger_s
        self._recover = recover
        """Called with each partition to which nothing can be sent for now."""
        self._loop = asyncio.get_running_loop()
        self._pool: Pool | None = None
        self._channel: Channel | None = None
        self._version = 0
        self._ready: dict[PartitionQueue, None] = {}
        self._turn: asyncio.Handle | None = None
        self._requests: dict[asyncio.Future[Any], float] = {}
        self._watch: asyncio.TimerHandle | None = None
        self._muted_until = 0.0

    @property
    def is_open(self) -> bool:
        return self._channel is not None and self._channel.is_open

    @property
    def is_throttled(self) -> bool:
        """Whether it waits because the client has exceeded its quota."""
        return self._muted_until > self._loop.time()

    def open(self, pool: Pool, channel: Channel) -> None:
        """Send over this connection from now on."""
        self._pool, self._channel = pool, channel
        newest, oldest = produce.NEWEST_BY_ID, produce.OLDEST
        self._version = channel.version_for(produce.PRODUCE_KEY, newest=newest, oldest=oldest)

    def notify(self, queue: PartitionQueue) -> None:
        """Send the waiting batches of a partition of this node, together with others of this turn of the loop."""
        self._ready[queue] = None
        if self._turn is None:
            if self._linger_s and len(queue.waiting) < 2:
                self._turn = self._loop.call_later(self._linger_s, self._pump)
            else:
                self._turn = self._loop.call_soon(self._pump)

    def send_now(self) -> None:
        """Send the waiting batches, without lingering."""
        if self._turn is not None:
            self._turn.cancel()
        self._pump()

    def drop(self, queue: PartitionQueue) -> None:
        """Forget a partition that another node leads."""
        self._ready.pop(queue, None)

    def close(self) -> None:
        """Send nothing more; the connection belongs to the client."""
        for handle in (self._turn, self._watch):
            if handle is not None:
                handle.cancel()
        self._ready.clear()

    # -- sending --------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._turn = None
        pause = self._muted_until - self._loop.time()
        if pause > 0:
            self._turn = self._loop.call_later(pause, self._pump)
            return
        while self._ready and self._may_send():
            sent, topics = self._next_batches()
            if not sent:
                return
            self._send(sent, topics)

    def _may_send(self) -> bool:
        if not self._requests:
            return True
        if len(self._requests) >= IN_FLIGHT_MAX:
            return False
        return sum(queue.waiting_bytes for queue in self._ready) >= _MUCH_BYTES

    def _next_batches(self) -> tuple[list[_SentBatch], dict[str, list[tuple[int, Buffer]]]]:
        """Take one batch of each partition that may send, as many as fit into a request."""
        sent: list[_SentBatch] = []
        topics: dict[str, list[tuple[int, Buffer]]] = {}
        size = 0
        for queue in list(self._ready):
            if not queue.can_send:
                del self._ready[queue]
                continue
            batch = queue.take()
            sealed = queue.sealed(batch)
            size += len(sealed)
            sent.append(_SentBatch(queue, batch))
            topics.setdefault(queue.topic, []).append((queue.index, sealed))
            # A partition that had its turn is last the next time.
            del self._ready[queue]
            if queue.can_send:
                self._ready[queue] = None
            if size >= _REQUEST_BYTES_MAX:
                break
        return sent, topics

    def _send(self, sent: list[_SentBatch], topics: dict[str, list[tuple[int, Buffer]]]) -> None:
        body = produce.write_produce_many(
            self._version, topics, acks=self._acks, timeout_ms=int(self._request_s * 1000), ids=self._ids(sent)
        )
        response: asyncio.Future[Any]
        try:
            if self._channel is None:
                raise RequestTimedOut("there is no connection to the node")
            if self._acks == ACKS_NONE:
                response = self._loop.create_task(self._channel.send(produce.PRODUCE_KEY, self._version, body))
            else:
                response = self._channel.request(produce.PRODUCE_KEY, self._version, body)
        except MillstreamError as error:
            self._handle_failure(sent, error, maybe_stored=False)
            return
        self._requests[response] = self._loop.time() + self._patience_s
        if self._watch is None:
            self._watch = self._loop.call_later(self._patience_s, self._check_timeout)
        response.add_done_callback(lambda done: self._handle_response(done, sent))

    def _ids(self, sent: Sequence[_SentBatch]) -> dict[str, UUID]:
        if self._version < produce.NEWEST_BY_ID:
            return {}
        return {queue.topic: _as_id(queue.topic_id) for queue, _ in sent}

    def _check_timeout(self) -> None:
        """Break the connection if a response does not arrive; everything in flight is sent again."""
        self._watch = None
        if not self._requests:
            return
        due = min(self._requests.values())
        if due <= self._loop.time() and self._channel is not None:
            self._channel.abort("a publish got no response in time")
            return
        self._watch = self._loop.call_at(due, self._check_timeout)

    # -- responses ------------------------------------------------------------------------------------------

    def _handle_response(self, response: asyncio.Future[Any], sent: list[_SentBatch]) -> None:
        del self._requests[response]
        error: BaseException | None = (
            RequestTimedOut("the request was cancelled") if response.cancelled() else response.exception()
        )
        if error is None:
            try:
                self._read(response.result(), sent)
            except Exception as unreadable:
                # Whatever is wrong with a response, nothing may wait for it any longer.
                error = unreadable
        if error is not None:
            self._handle_failure(sent, error, maybe_stored=True)
        if self._ready:
            self._pump()

    def _read(self, frame: memoryview | None, sent: list[_SentBatch]) -> None:
        if frame is None:
            for queue, batch in sent:
                if not batch.is_done:
                    queue.stored(batch, Produced(Offset(NO_OFFSET), -1))
            self._settle(sent)
            return
        results, throttle_ms = produce.read_produce_responses(self._version, frame, ids=self._ids(sent))
        if throttle_ms > 0 and self._pool is not None:
            self._muted_until = self._loop.time() + throttle_ms / 1000
            self._pool.mute(throttle_ms / 1000)
        responses = {(result.topic, result.partition): result.response for result in results}
        for queue, batch in sent:
            response = responses.get((queue.topic, queue.index))
            if batch.is_done:
                # It was abandoned while in flight, and its caller has been notified.
                continue
            if isinstance(response, Produced):
                queue.stored(batch, response)
            else:
                _refuse(queue, batch, response)
        self._settle(sent)

    def _handle_failure(self, sent: list[_SentBatch], error: BaseException, *, maybe_stored: bool) -> None:
        for queue, batch in sent:
            if not batch.is_done and batch.in_flight:
                queue.failed_for_now(batch, maybe_stored=maybe_stored)
        self._settle(sent)

    def _settle(self, sent: list[_SentBatch]) -> None:
        for queue, _ in sent:
            if queue.troubled:
                self._recover(queue)
            elif queue.can_send and queue.sender is self:
                self._ready[queue] = None
            elif queue.can_send and queue.sender is not None:
                # It has moved meanwhile, and could not send there before this response arrived.
                queue.sender.notify(queue)


_as_id: Final = lru_cache(maxsize=1024)(UUID)


def _refuse(queue: PartitionQueue, batch: OutgoingBatch, error: MillstreamError | None) -> None:
    if error is None or isinstance(error, RequestTimedOut):
        # It may be in the log: only the acknowledgement is missing.
        queue.failed_for_now(batch, maybe_stored=True)
    elif isinstance(error, (*TRANSIENT, UnknownTopic, UnknownTopicId)):
        queue.cause = str(error)
        queue.failed_for_now(batch, maybe_stored=False)
    elif getattr(error, "code", None) == _DUPLICATE_SEQUENCE:
        queue.stored(batch, Produced(Offset(NO_OFFSET), -1))
    else:
        queue.refused(batch, error)

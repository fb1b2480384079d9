"""Produce (key 0), versions 3 to 13: appends batches, and answers once they are as durable as was asked for.

Versions 0 to 2 are advertised for old librdkafka, which needs to see them, and refused.

Hand-laid, since this is the hot path: the batches are patched and written to disk straight from the frame they
arrived in. All partitions of a request are appended before the first await, in the order of the request, so
requests of one connection are appended in the order they were sent, and the reply is a promise that is kept once
every partition is acknowledged as `acks` and the topic's `flush` say.

What only the internals of the broker may write is refused here: internal topics, and batches of a transaction that
the request does not name.

Version notes: 7 is the first that may send zstd, 8 adds the error message, 9 is flexible, 10 adds the current leader
(a tag we leave out), 13 names topics by id. With `acks=0` there is no reply; an error then closes the connection, as in
Kafka.
"""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from millstream.cluster.topics import Topics
from millstream.kafka.api import ClientInfo
from millstream.kafka.errors import error_code
from millstream.kafka.quota_meter import QuotaMeter
from millstream.log.log import AppendedRange
from millstream.model.errors import (
    CorruptBatch,
    InvalidBatch,
    InvalidTopicName,
    MillstreamError,
    ProtocolViolation,
    UnsupportedCompression,
)
from millstream.model.metric import Metric, counter, gauge
from millstream.net.connection import Answer, Buffers
from millstream.records.batch import (
    COMPRESSION_MASK,
    COMPRESSION_ZSTD,
    HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    TRANSACTIONAL_FLAG,
    read_header,
)
from millstream.replication.partition import Partition
from millstream.wire.codec import RequestHeader, response_head
from millstream.wire.primitives import Reader, Writer

FIRST_SERVED = 3
FIRST_WITH_LOG_START = 5
FIRST_WITH_ZSTD = 7
FIRST_WITH_MESSAGES = 8
FIRST_WITH_TOPIC_IDS = 13
ACKS_NONE = 0
_ACKS_VALID = (-1, 0, 1)
_PENDING_SWEEP_S = 0.25
_TIMEOUT_S_MAX = 600.0
# The lower byte of a batch's attributes, which holds the codec and all flags.
_FLAGS_AT = 22
_FIRST_FIELDS = struct.Struct(">qiib")
_OUTCOME = struct.Struct(">ihqq")
_OUTCOME_WITH_START = struct.Struct(">ihqqq")


class _Given(NamedTuple):
    topic: str | UUID
    partition: int
    records: memoryview | None


class _Request(NamedTuple):
    version: int
    transactional_id: str | None
    acks: int
    timeout_ms: int
    given: list[_Given]


class _Outcome:
    """What became of one partition of a request."""

    __slots__ = ("appended", "code", "given", "message", "partition")

    def __init__(self, given: _Given) -> None:
        self.given = given
        self.partition: Partition | None = None
        self.appended: AppendedRange | None = None
        self.code = ErrorCode.none
        self.message: str | None = None

    def fail(self, error: MillstreamError) -> None:
        self.code = error_code(error)
        self.message = str(error)
        self.appended = None


class _Pending:
    """A request whose reply waits for acknowledgements."""

    __slots__ = ("deadline", "header", "outcomes", "promise", "remaining", "throttle_ms")

    def __init__(self, header: RequestHeader, outcomes: list[_Outcome], deadline: float, throttle_ms: int) -> None:
        self.header = header
        self.outcomes = outcomes
        self.throttle_ms = throttle_ms
        self.deadline = deadline
        self.remaining: dict[_Outcome, asyncio.Future[None]] = {}
        self.promise: asyncio.Future[Buffers | None] = asyncio.get_running_loop().create_future()


class Produce:
    """Appends batches and answers once they are as durable as was asked for."""

    key = 0
    versions = (0, 13)

    def __init__(self, topics: Topics, quota: QuotaMeter) -> None:
        self._topics = topics
        self._quota = quota
        self._pending: OrderedDict[_Pending, None] = OrderedDict()
        self._sweep: asyncio.TimerHandle | None = None
        self.batches_rejected = 0

    def metrics(self) -> Iterable[Metric]:
        """What waits and what was refused."""
        yield gauge("millstream_produce_waiting", "Produce requests that wait for a sync.", len(self._pending))
        yield counter("millstream_batches_rejected_total", "Batches that were not stored.", self.batches_rejected)

    def handle_frame(self, frame: memoryview, header: RequestHeader, client: ClientInfo) -> Answer:
        """Append everything in the frame; the answer is ready, promised, or none."""
        if header.version < FIRST_SERVED:
            raise ProtocolViolation(f"Produce v{header.version} is not served; versions 3 and later are")
        request = _read(frame, header)
        outcomes = [self._append(given, request) for given in request.given]
        client.produce_requests += 1
        client.produced_bytes += len(frame)
        throttle_ms = self._quota.charge(client, len(frame)) if self._quota.is_limiting else 0
        if request.acks == ACKS_NONE:
            _check_unanswered(outcomes)
            return None
        return self._reply(header, request, outcomes, throttle_ms)

    def _append(self, given: _Given, request: _Request) -> _Outcome:
        outcome = _Outcome(given)
        if request.acks not in _ACKS_VALID:
            outcome.code = ErrorCode.invalid_required_acks
            outcome.message = f"acks must be -1, 0 or 1, not {request.acks}"
        elif request.transactional_id is not None:
            outcome.code = ErrorCode.invalid_producer_id_mapping
            outcome.message = "transactions are not available yet"
        elif _flags(given.records) & TRANSACTIONAL_FLAG:
            outcome.code = ErrorCode.transactional_id_authorization_failed
            outcome.message = "the record batch belongs to a transaction, but the request names none"
        else:
            try:
                if given.records is None:
                    raise CorruptBatch("the request holds no records for this partition")
                partition = self._partition(given)
                _check_allowed(partition, given.records, request.version)
                outcome.appended = partition.write(given.records, acks=request.acks)
                outcome.partition = partition
            except CorruptBatch as error:
                self.batches_rejected += 1
                outcome.fail(_as_told(error, given.records))
            except MillstreamError as error:
                self.batches_rejected += 1
                outcome.fail(error)
        return outcome

    def _partition(self, given: _Given) -> Partition:
        if isinstance(given.topic, UUID):
            return self._topics.partition_by_id(given.topic, given.partition)
        return self._topics.partition(given.topic, given.partition)

    def _reply(self, header: RequestHeader, request: _Request, outcomes: list[_Outcome], throttle_ms: int) -> Answer:
        pending: _Pending | None = None
        for outcome in outcomes:
            if outcome.appended is None or outcome.partition is None:
                continue
            acknowledged = outcome.partition.acknowledged(outcome.appended)
            if acknowledged is None:
                continue
            if pending is None:
                timeout_s = min(max(request.timeout_ms, 0) / 1000, _TIMEOUT_S_MAX)
                deadline = asyncio.get_running_loop().time() + timeout_s
                pending = _Pending(header, outcomes, deadline, throttle_ms)
            pending.remaining[outcome] = acknowledged
        if pending is None:
            return _write(header, outcomes, throttle_ms)
        self._wait(pending)
        return pending.promise

    def _wait(self, pending: _Pending) -> None:
        self._pending[pending] = None
        for outcome, acknowledged in pending.remaining.items():
            acknowledged.add_done_callback(
                lambda done, outcome=outcome: self._acknowledged(pending, outcome, done)  # type: ignore[misc]
            )
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_PENDING_SWEEP_S, self._time_out)

    def _acknowledged(self, pending: _Pending, outcome: _Outcome, done: asyncio.Future[None]) -> None:
        if pending.remaining.pop(outcome, None) is None:
            return
        error = None if done.cancelled() else done.exception()
        if isinstance(error, MillstreamError):
            outcome.fail(error)
        elif error is not None:
            outcome.code = ErrorCode.unknown_server_error
            outcome.message = str(error)
        if not pending.remaining:
            self._keep(pending)

    def _keep(self, pending: _Pending) -> None:
        self._pending.pop(pending, None)
        if not pending.promise.done():
            pending.promise.set_result(_write(pending.header, pending.outcomes, pending.throttle_ms))

    def _time_out(self) -> None:
        """Answer what has waited longer than its client is willing to; the records may still become durable."""
        self._sweep = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for pending in tuple(self._pending):
            if pending.deadline > now:
                continue
            for outcome in pending.remaining:
                outcome.code = ErrorCode.request_timed_out
                outcome.message = "the records were not acknowledged within the request's timeout"
                outcome.appended = None
            pending.remaining.clear()
            self._keep(pending)
        if self._pending:
            self._sweep = loop.call_later(_PENDING_SWEEP_S, self._time_out)


def _flags(records: memoryview | None) -> int:
    """Codec and flags of the first batch; what is too short to have them, the log refuses."""
    return 0 if records is None or len(records) <= _FLAGS_AT else records[_FLAGS_AT]


def _check_allowed(partition: Partition, records: memoryview, version: int) -> None:
    if partition.topic.is_internal:
        raise InvalidTopicName(f"topic {partition.topic.name!r} is internal; clients may not write to it")
    if version < FIRST_WITH_ZSTD and _flags(records) & COMPRESSION_MASK == COMPRESSION_ZSTD:
        raise UnsupportedCompression(f"zstd needs Produce v{FIRST_WITH_ZSTD} or later, not v{version}")


def _as_told(error: CorruptBatch, records: memoryview | None) -> MillstreamError:
    """What a client is told of a batch that cannot be read.

    As in Kafka, a wrong checksum, an impossible length or an impossible format is corruption on the way, and clients
    send the batch again; anything else in its frame is how they made it, and sending it again would not help.
    """
    if records is not None and len(records) >= _FIRST_FIELDS.size:
        _offset, length, _epoch, magic = _FIRST_FIELDS.unpack_from(records)
        if length < HEADER_BYTES - LOG_OVERHEAD_BYTES or not 0 <= magic <= MAGIC:
            return error
    try:
        read_header(records or b"")
    except CorruptBatch as framing:
        return InvalidBatch(str(framing))
    return error


def _check_unanswered(outcomes: list[_Outcome]) -> None:
    for outcome in outcomes:
        if outcome.code is not ErrorCode.none:
            # There is no reply that could carry the error, so the connection itself has to tell.
            raise ProtocolViolation(f"produce with acks=0 failed: {outcome.message}")


def _read(frame: memoryview, header: RequestHeader) -> _Request:
    """Read the whole request before anything is done, so that a malformed one leaves no trace."""
    reader = Reader(frame, header.body_at, flexible=header.flexible)
    by_id = header.version >= FIRST_WITH_TOPIC_IDS
    transactional_id = reader.nullable_string()
    acks = reader.int16()
    timeout_ms = reader.int32()
    given: list[_Given] = []
    for _ in range(reader.array_length()):
        topic: str | UUID = reader.uuid() if by_id else reader.string()
        for _ in range(reader.array_length()):
            partition = reader.int32()
            given.append(_Given(topic, partition, reader.blob()))
            reader.skip_tags()
        reader.skip_tags()
    reader.skip_tags()
    return _Request(header.version, transactional_id, acks, timeout_ms, given)


def _write(header: RequestHeader, outcomes: list[_Outcome], throttle_ms: int) -> Buffers:
    version = header.version
    writer = Writer(flexible=header.flexible)
    by_topic: dict[str | UUID, list[_Outcome]] = {}
    for outcome in outcomes:
        by_topic.setdefault(outcome.given.topic, []).append(outcome)
    writer.array_length(len(by_topic))
    for topic, of_topic in by_topic.items():
        if isinstance(topic, UUID):
            writer.uuid(topic)
        else:
            writer.string(topic)
        writer.array_length(len(of_topic))
        for outcome in of_topic:
            _write_outcome(writer, version, outcome)
        writer.no_tags()
    writer.int32(throttle_ms)
    writer.no_tags()
    return [response_head(0, version, header.correlation_id, len(writer.buffer)), writer.buffer]


def _write_outcome(writer: Writer, version: int, outcome: _Outcome) -> None:
    appended = outcome.appended
    base, time_ms, start = (
        (-1, -1, -1)
        if appended is None
        else (
            appended.base_offset,
            appended.append_time_ms,
            appended.log_start,
        )
    )
    if version >= FIRST_WITH_LOG_START:
        writer.buffer += _OUTCOME_WITH_START.pack(outcome.given.partition, outcome.code, base, time_ms, start)
    else:
        writer.buffer += _OUTCOME.pack(outcome.given.partition, outcome.code, base, time_ms)
    if version >= FIRST_WITH_MESSAGES:
        writer.array_length(0)
        writer.string(outcome.message)
    writer.no_tags()

"""Produce (key 0), versions 3 to 13: appends batches, and responds once they are as durable as requested.

Versions 0 to 2 are advertised for old librdkafka, which needs to see them, and refused.

Decoded by hand, since this is the hot path: the batches are patched and written to disk straight from the frame they
arrived in. All partitions of a request are appended before the first await, in the order of the request, so requests of
one connection are appended in the order they were sent, and the response is a promise that completes once every
partition is acknowledged as `acks` and the topic's `flush` require.

A batch that starts a transaction on a partition is appended once the coordinator of the transaction knows of it
(`TransactionStart`); the connection waits meanwhile. Later batches of the transaction are appended like any other.

Clients may not write to internal topics, nor send batches of a transaction that the request does not name.

A batch is stored as a whole or not at all. If some of its records are invalid, the response names them. Records of a
topic with a schema rule are checked first (`SchemaRules`), from any sender; where that needs a child process, the
connection waits.

A producer sends up to five batches without waiting for responses. If one of them is refused and is to be sent again,
for example because this node does not lead the partition yet, those behind it on the connection are refused in the same
way (`RefusedBatch`). Otherwise they would be stored before it, or leave a gap in the sequence, after which librdkafka
begins a new epoch and sends batches for other partitions again whose responses it has not received.

Version notes: 7 is the first that may send zstd, 8 adds the error message and the records to blame, 9 is flexible, 10
adds the current leader (a tag we leave out), 11 knows TRANSACTION_ABORTABLE, from 12 on a partition is added to the
transaction by writing to it, 13 names topics by id. With `acks=0` there is no response; an error then closes the
connection, as in Kafka.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, cast

from kio.schema.errors import ErrorCode

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import ClientInfo, RefusedBatch, error_code, log_fenced
from millstream.broker.kafka.produce_codec import (
    NOT_PLAIN,
    PipelinedReader,
    Portion,
    Request,
    read_any,
    read_plain,
    write,
    write_pipelined,
)
from millstream.broker.kafka.quota_meter import QuotaMeter
from millstream.broker.log.append import check_records, is_expensive_to_check
from millstream.broker.log.log import AppendedRange
from millstream.broker.log.transactions import Guard
from millstream.broker.net.connection import EventualResponse
from millstream.broker.net.response import Buffers, EncodedResponse, Promise
from millstream.broker.replication.acknowledgement import TransactionGate
from millstream.broker.replication.partition import Partition
from millstream.broker.schemas.rules import SchemaRules
from millstream.broker.security.rights import Rights
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import (
    BrokerUnreachable,
    ConcurrentTransactions,
    CoordinatorUnavailable,
    CorruptBatch,
    FencedProducer,
    InvalidBatch,
    InvalidProducerMapping,
    InvalidTimestamp,
    InvalidTopicName,
    InvalidTransactionState,
    MillstreamError,
    NotEnoughReplicas,
    ProducerFenced,
    ProtocolViolation,
    RequestTimedOut,
    TransactionAbortable,
    UnsupportedCompression,
)
from millstream.core.metric import Metric, counter, gauge
from millstream.core.topic import AUDIT, TopicPartition
from millstream.protocol.messages.codec import RequestHeader
from millstream.protocol.records.batch import (
    BATCH_HEADER,
    COMPRESSION_MASK,
    COMPRESSION_ZSTD,
    HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    PRODUCER_ID_AT,
    SEQUENCE_MASK,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    read_header,
)
from millstream.protocol.records.compression import check_declared_size

FIRST_WITH_ABORTABLE: Final = 11
FIRST_THAT_ADDS: Final = 12
"""From this version of Produce on, writing to a partition adds it to the transaction (KIP-890)."""

OPENING_TIMEOUT_S = 30.0
"""How long the coordinator may take; the timeout of the request only covers acknowledgements."""

OPENING_RETRY_S: Final = 0.02
OPENING_RETRIES_MAX: Final = 5
"""While the previous transaction is still being ended, a new one waits a moment, which is cheaper than a retry."""

BATCHES_BEHIND_MAX: Final = 4
"""How many batches a producer can have sent behind one that was refused: it has at most five in flight."""

REFUSED_PRODUCERS_MAX: Final = 1000
"""How many refused batches are remembered for a connection, each of another producer or partition."""

_PRODUCER: Final = struct.Struct(">qh")
_PartitionErrors = dict[TopicPartition, MillstreamError | None]


def is_open(topics: Topics, request: Request) -> bool:
    """Whether the transaction is open on every partition of a request, so that the coordinator need not be asked."""
    for portion in request.portions:
        records = portion.records
        if records is None or len(records) < HEADER_BYTES:
            return False
        try:
            partition = _partition(topics, portion)
        except MillstreamError:
            return False
        if not partition.has_open_transaction(*_PRODUCER.unpack_from(records, PRODUCER_ID_AT)):
            return False
    return True


def _partition(topics: Topics, portion: Portion) -> Partition:
    topic = portion.topic
    return (
        topics.partition(topic, portion.index)
        if isinstance(topic, str)
        else topics.partition_by_id(topic, portion.index)
    )


class _PartitionStart(NamedTuple):
    """A partition where the transaction is not open yet."""

    portion: Portion
    partition: Partition
    header: BatchHeader
    guard: Guard


class TransactionStart:
    """The partitions of one request on which a transaction starts, and the producer.

    Each partition issues a guard before the request to the coordinator and accepts the batch only under it, so that
    nothing begins on a partition whose marker was written in between. Under transaction version 2 the guard is taken
    after the response: only the marker of the previous transaction can come in between, for which the response may even
    have waited, while the marker of this one would have a later epoch and fence the batch. Refusals are translated for
    the version of the producer, as in Kafka: errors that it should simply retry become NOT_ENOUGH_REPLICAS, which older
    clients retry.
    """

    def __init__(self, topics: Topics, request: Request, version: int) -> None:
        self.guards: dict[Portion, Guard] = {}
        """The guards under which batches may be written."""
        self._version = version
        self._request = request
        self._partition_starts: list[_PartitionStart] = []
        self._producer = (-1, -1)
        heads = [
            (portion, header) for portion in request.portions if (header := _transactional_header(portion)) is not None
        ]
        producers = {(header.producer_id, header.producer_epoch) for _, header in heads}
        if len(producers) > 1:
            for portion, _ in heads:
                _refuse(portion, InvalidProducerMapping("a request may hold the batches of one producer only"))
            return
        for portion, header in heads:
            self._producer = (header.producer_id, header.producer_epoch)
            try:
                self._begin(topics, portion, header)
            except MillstreamError as error:
                _refuse(portion, error)

    def __bool__(self) -> bool:
        """Whether the coordinator has to be asked."""
        return bool(self._partition_starts)

    def _begin(self, topics: Topics, portion: Portion, header: BatchHeader) -> None:
        partition = _partition(topics, portion)
        if partition.topic.is_internal:
            # Nothing is appended to it, so the coordinator need not be asked.
            return
        guard = self._guard(partition, header)
        if guard is not None:
            self._partition_starts.append(_PartitionStart(portion, partition, header, guard))

    def _guard(self, partition: Partition, header: BatchHeader) -> Guard | None:
        return partition.start_transaction(
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
            bumps_epoch=self._version >= FIRST_THAT_ADDS,
        )

    async def request_admission(self, gate: TransactionGate) -> None:
        """Ask the coordinator; portions that it does not admit have failed on return."""
        errors = await self._admission_errors(gate)
        for partition_start in self._partition_starts:
            error = errors.get(partition_start.partition.log.partition)
            if error is None:
                self._admit(partition_start)
            else:
                _refuse(partition_start.portion, producer_error(error, self._version))

    def _admit(self, partition_start: _PartitionStart) -> None:
        guard: Guard | None = partition_start.guard
        if self._version >= FIRST_THAT_ADDS:
            try:
                guard = self._guard(partition_start.partition, partition_start.header)
            except MillstreamError as error:
                _refuse(partition_start.portion, error)
                return
        if guard is not None:
            self.guards[partition_start.portion] = guard

    async def _admission_errors(self, gate: TransactionGate) -> _PartitionErrors:
        for attempt in range(OPENING_RETRIES_MAX + 1):
            errors = await self._try_admission(gate)
            is_busy = any(isinstance(error, ConcurrentTransactions) for error in errors.values())
            if not is_busy or self._version < FIRST_THAT_ADDS or attempt == OPENING_RETRIES_MAX:
                break
            await asyncio.sleep(OPENING_RETRY_S)
        return errors

    async def _try_admission(self, gate: TransactionGate) -> _PartitionErrors:
        partitions = [partition_start.partition.log.partition for partition_start in self._partition_starts]
        add = self._version >= FIRST_THAT_ADDS
        try:
            async with asyncio.timeout(OPENING_TIMEOUT_S):
                named = self._request.transactional_id or ""
                return dict(await gate.admit(named, *self._producer, partitions, add=add))
        except TimeoutError:
            return dict.fromkeys(partitions, RequestTimedOut(f"no response within {OPENING_TIMEOUT_S:g} s"))
        except MillstreamError as error:
            return dict.fromkeys(partitions, error)


def producer_error(error: MillstreamError, version: int) -> MillstreamError:
    """Translate a coordinator's refusal for a producer of this version."""
    if isinstance(error, ProducerFenced):
        return FencedProducer(str(error))
    if isinstance(error, TransactionAbortable) and version < FIRST_WITH_ABORTABLE:
        return InvalidTransactionState(str(error))
    if isinstance(error, CoordinatorUnavailable | BrokerUnreachable | RequestTimedOut) or (
        isinstance(error, ConcurrentTransactions) and version < FIRST_THAT_ADDS
    ):
        return NotEnoughReplicas(f"the coordinator did not confirm that the transaction is open: {error}")
    return error


def _transactional_header(portion: Portion) -> BatchHeader | None:
    """Return the header of a transactional batch; the log rejects malformed ones."""
    header = _header(portion)
    return header if header is not None and header.attributes & TRANSACTIONAL_FLAG and header.producer_id >= 0 else None


def _header(portion: Portion) -> BatchHeader | None:
    records = portion.records
    if records is None or len(records) < HEADER_BYTES:
        return None
    return BatchHeader(0, *BATCH_HEADER.unpack_from(records))


def _refuse(portion: Portion, error: MillstreamError) -> None:
    portion.fail(error_code(error), str(error))


FIRST_SERVED = 3
FIRST_WITH_ZSTD = 7
ACKS_NONE = 0
_ACKS_VALID = (-1, 0, 1)
_ACKS_WAITING = (-1, 1)
_PENDING_SWEEP_S = 0.25
_TIMEOUT_S_MAX = 600.0
_MANY_RECORDS_BYTES = 8 * 1024
"""Smaller, uncompressed batches hold few records."""
_FIRST_FIELDS = struct.Struct(">qiib")
_TIMED_OUT = "the records were not acknowledged within the request's timeout"
_CLIENT_LEFT = "the client has closed the connection"
_NOT_ALLOWED = "the client may not write this"
_NO_TRANSACTION = "the record batch belongs to a transaction, but the request names none"


class _Waiting:
    """A partition of a request whose response waits for it to be acknowledged."""

    __slots__ = ("is_finished", "partition", "pending", "portion")

    def __init__(self, pending: _Pending, portion: Portion, partition: Partition) -> None:
        self.pending = pending
        self.portion = portion
        self.partition = partition
        self.is_finished = False

    def acknowledged(self, error: MillstreamError | None) -> None:
        """Called once by the partition."""
        if self.is_finished:
            return
        self.is_finished = True
        if error is not None:
            self.portion.fail(error_code(error), str(error))
            _remember_refused(self.portion, self.pending.client)
        self.pending.partition_acknowledged()


class _Pending(Promise):
    """A request whose response waits for acknowledgements."""

    __slots__ = ("_produce", "client", "deadline", "header", "portions", "throttle_ms", "unacknowledged", "waiting")

    def __init__(
        self, produce: Produce, header: RequestHeader, client: ClientInfo, portions: list[Portion], throttle_ms: int
    ) -> None:
        super().__init__()
        self._produce = produce
        self.client = client
        self.header = header
        self.portions = portions
        self.throttle_ms = throttle_ms
        self.deadline = 0.0
        self.waiting: list[_Waiting] = []
        self.unacknowledged = 0

    def partition_acknowledged(self) -> None:
        """Record that a partition is acknowledged, or never will be."""
        self.unacknowledged -= 1
        if not self.unacknowledged:
            self._produce.respond(self)

    def time_out(self) -> list[Partition]:
        """Fail every partition that is still unacknowledged with a timeout; return them."""
        unsettled = [waiting for waiting in self.waiting if not waiting.is_finished]
        for waiting in unsettled:
            waiting.is_finished = True
            waiting.portion.fail(ErrorCode.request_timed_out, _TIMED_OUT)
        return [waiting.partition for waiting in unsettled]

    def encode(self) -> Buffers:
        buffers = write(self.header, self.portions, self.throttle_ms)
        # Breaks the reference cycle with the request, so that both are freed without the garbage collector.
        self.waiting.clear()
        return buffers


class _PendingPipelined(Promise):
    """Requests that differ only in their records: their responses wait together, and leave together."""

    __slots__ = (
        "_base_offsets",
        "_correlation_ids",
        "_header",
        "_partition",
        "_portion",
        "_produce",
        "client",
        "deadline",
        "is_finished",
    )

    def __init__(
        self,
        produce: Produce,
        header: RequestHeader,
        client: ClientInfo,
        partition: Partition,
        portion: Portion,
        correlation_ids: Sequence[int],
        base_offsets: Sequence[int],
    ) -> None:
        super().__init__()
        self._produce = produce
        self._header = header
        self._partition = partition
        self._portion = portion
        """That of the first request."""
        self._correlation_ids = correlation_ids
        self._base_offsets = base_offsets
        self.client = client
        self.deadline = 0.0
        self.is_finished = False

    def acknowledged(self, error: MillstreamError | None) -> None:
        """Called once by the partition, for the last of the requests."""
        if self.is_finished:
            return
        self.is_finished = True
        if error is not None:
            self._portion.fail(error_code(error), str(error))
            _remember_refused(self._portion, self.client)
        self._produce.respond(self)

    def time_out(self) -> list[Partition]:
        """Fail every request with a timeout; return the partition."""
        self.is_finished = True
        self._portion.fail(ErrorCode.request_timed_out, _TIMED_OUT)
        return [self._partition]

    def encode(self) -> Buffers:
        if self._portion.message is None:
            return write_pipelined(self._header, self._portion, self._correlation_ids, self._base_offsets)
        return [
            buffer
            for correlation_id in self._correlation_ids
            for buffer in write(self._header._replace(correlation_id=correlation_id), [self._portion], 0)
        ]


class Produce:
    """Appends batches, and responds once they are as durable as requested."""

    key = 0
    versions = (0, 13)

    def __init__(
        self,
        topics: Topics,
        quota: QuotaMeter,
        gate: TransactionGate | None = None,
        rules: SchemaRules | None = None,
    ) -> None:
        self._topics = topics
        self._gate = gate
        self._rules = rules
        self._quota = quota
        self._pending: dict[_Pending | _PendingPipelined, None] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self.batches_rejected = 0

    def metrics(self) -> Iterable[Metric]:
        """Yield the numbers of waiting requests and rejected batches."""
        yield gauge("millstream_produce_waiting", "Produce requests that wait for acknowledgement.", len(self._pending))
        yield counter("millstream_batches_rejected_total", "Batches that were not stored.", self.batches_rejected)

    def handle_frame(self, frame: memoryview, header: RequestHeader, client: ClientInfo) -> EventualResponse:
        """Append everything in the frame; the response is ready, promised, or none."""
        if header.version < FIRST_SERVED:
            raise ProtocolViolation(f"Produce v{header.version} is not served; versions 3 and later are")
        plain = read_plain(frame, header)
        request = plain or read_any(frame, header)
        if client.rights is not None:
            self._authorize(request, client.rights)
        if plain is not None and client.pipelined.may_combine:
            responses = self._append_pipelined(frame, header, request, client)
            if responses is not None:
                return responses
        transaction_start = None
        if request.transactional_id is not None and not is_open(self._topics, request):
            transaction_start = TransactionStart(self._topics, request, header.version)
        is_large = len(frame) >= _MANY_RECORDS_BYTES
        heavy = [
            portion
            for portion in request.portions
            if (is_large or portion.flags & COMPRESSION_MASK) and self._is_heavy(portion)
        ]
        doubtful: list[Portion] = []
        if self._rules and self._topics.with_schema_rules:
            doubtful = [portion for portion in request.portions if self._is_doubtful(portion)]
        if transaction_start or heavy or doubtful:
            request.keep_records()
            return self._prepare(header, request, client, transaction_start or None, heavy, doubtful, len(frame))
        return self._respond(header, request, client, len(frame), None)

    def _append_pipelined(
        self, frame: memoryview, header: RequestHeader, request: Request, client: ClientInfo
    ) -> Buffers | Promise | None:
        """Append a plain request and those behind it that differ only in their records, in one write.

        Return None if there are none such, or if something about the first one needs a decision.
        """
        if len(request.portions) != 1:
            return None
        (portion,), acks = request.portions, request.acks
        records = portion.records
        if (
            records is None
            or request.transactional_id is not None
            or acks not in _ACKS_WAITING
            or portion.code is not ErrorCode.none
            or portion.flags & NOT_PLAIN
            or client.refused_batches
            or self._quota.is_limiting
        ):
            return None
        pipelined = client.pipelined
        try:
            partition = _partition(self._topics, portion)
            if (
                not partition.may_write_first
                or partition.topic.is_internal
                or (self._rules and partition.log.settings.validates_schemas)
            ):
                return None
            read = PipelinedReader(frame, header, len(records), pipelined.data, pipelined.at)
            run = partition.write_first(pipelined.data, read.ranges(), acks=acks)
        except MillstreamError:
            # The request is refused on its own.
            return None
        if run is None:
            return None
        count = len(run.base_offsets)
        pipelined.serve(count - 1, read.ends[count - 1])
        client.produce_requests += count
        client.produced_bytes += len(frame) + pipelined.served_bytes
        ids = read.correlation_ids[:count]
        portion.appended = run.appended
        if partition.is_acknowledged(run.appended, acks):
            return write_pipelined(header, portion, ids, run.base_offsets)
        portion.records = memoryview(bytes(records[:HEADER_BYTES]))
        pending = _PendingPipelined(self, header, client, partition, portion, ids, run.base_offsets)
        self._hold(pending, request.timeout_ms)
        partition.notify_acknowledged(run.appended, pending, acks)
        return pending

    def _authorize(self, request: Request, rights: Rights) -> None:
        """Refuse what the client may not write: a whole transaction, or single topics."""
        transactional_id = request.transactional_id
        write = Operation.WRITE
        may_use = transactional_id is None or rights.check(write, ResourceType.TRANSACTIONAL_ID, transactional_id)
        for portion in request.portions:
            portion.is_of_node = rights.node_id is not None
            name = portion.topic if isinstance(portion.topic, str) else rights.topic_name(portion.topic)
            if not may_use:
                portion.fail(ErrorCode.transactional_id_authorization_failed, _NOT_ALLOWED)
            elif name is not None and not rights.check(write, ResourceType.TOPIC, name):
                # A client that named the topic by its id may not know the name.
                what = f"topic {name!r}" if isinstance(portion.topic, str) else "this topic"
                portion.fail(ErrorCode.topic_authorization_failed, f"{rights.principal} may not write {what}")
            if portion.code is not ErrorCode.none:
                # So that neither the log nor the coordinator of the transaction sees them.
                portion.records = None

    async def _prepare(
        self,
        header: RequestHeader,
        request: Request,
        client: ClientInfo,
        transaction_start: TransactionStart | None,
        heavy: list[Portion],
        ruled: list[Portion],
        size: int,
    ) -> EncodedResponse | None:
        """Check heavy batches in a thread and schemas in a child, and ask the coordinator, before any is appended."""
        for portion in heavy:
            try:
                records, log = portion.records or b"", _partition(self._topics, portion).log
                await asyncio.to_thread(check_records, records, read_header(records), log.settings, log.clock.now_ms())
                portion.is_checked = True
            except MillstreamError as error:
                self._reject(portion, error)
        for portion in ruled:
            try:
                if self._rules is not None and portion.records is not None and portion.code is ErrorCode.none:
                    await self._rules.check(portion.records, _partition(self._topics, portion).log.settings)
            except CorruptBatch as error:
                self._reject(portion, _client_error(error, portion.records))
            except MillstreamError as error:
                self._reject(portion, error)
        if transaction_start is not None and self._gate is not None:
            await transaction_start.request_admission(self._gate)
        response = self._respond(
            header, request, client, size, None if transaction_start is None else transaction_start.guards
        )
        return await response if isinstance(response, Promise) else response

    def _is_heavy(self, portion: Portion) -> bool:
        """Whether checking the records, if the topic requires it, would block the loop."""
        records = portion.records
        if records is None or not (len(records) >= _MANY_RECORDS_BYTES or portion.flags & COMPRESSION_MASK):
            return False
        try:
            return _partition(self._topics, portion).log.settings.reads_records and is_expensive_to_check(records)
        except MillstreamError:
            # It is refused when it is appended.
            return False

    def _is_doubtful(self, portion: Portion) -> bool:
        """Whether the topic has a schema rule that cannot be checked quickly."""
        if self._rules is None or portion.records is None:
            return False
        try:
            partition = _partition(self._topics, portion)
        except MillstreamError:
            # It is refused when it is appended.
            return False
        settings = partition.log.settings
        if not (settings.validates_schemas and partition.is_leader):
            return False
        return not self._rules.conforms(portion.records, settings)

    def _respond(
        self,
        header: RequestHeader,
        request: Request,
        client: ClientInfo,
        size: int,
        guards: Mapping[Portion, Guard] | None,
    ) -> Buffers | Promise | None:
        version = header.version
        waiting: list[tuple[Partition, Portion]] = []
        if request.transactional_id is not None and client.presence.has_ended:
            # The client may have aborted this transaction through another connection since, and begun the next one with
            # the same epoch: nothing else would show that these batches do not belong to it.
            for portion in request.portions:
                portion.fail(ErrorCode.request_timed_out, _CLIENT_LEFT)
        for portion in request.portions:
            if client.refused_batches and self._is_behind_refused(portion, client):
                self.batches_rejected += 1
                continue
            partition = self._append(portion, request, version, guards)
            if partition is not None:
                waiting.append((partition, portion))
            elif portion.code is not ErrorCode.none:
                log_fenced(portion.code, portion.message or "", client, transactional_id=request.transactional_id)
                _remember_refused(portion, client)
        client.produce_requests += 1
        client.produced_bytes += size
        throttle_ms = self._quota.charge(client, size) if self._quota.is_limiting else 0
        if request.acks == ACKS_NONE:
            _check_acks_0(request.portions)
            return None
        if not waiting:
            return write(header, request.portions, throttle_ms)
        pending = _Pending(self, header, client, request.portions, throttle_ms)
        self._wait(pending, waiting, request)
        return pending

    def _append(
        self, portion: Portion, request: Request, version: int, guards: Mapping[Portion, Guard] | None
    ) -> Partition | None:
        """Append the records of one partition; return the partition if it is not acknowledged yet."""
        acks, flags = request.acks, portion.flags
        if acks not in _ACKS_VALID:
            portion.fail(ErrorCode.invalid_required_acks, f"acks must be -1, 0 or 1, not {acks}")
        elif portion.code is not ErrorCode.none:
            self.batches_rejected += 1
        elif flags & TRANSACTIONAL_FLAG and request.transactional_id is None:
            portion.fail(ErrorCode.transactional_id_authorization_failed, _NO_TRANSACTION)
        else:
            records = portion.records
            try:
                if records is None:
                    raise CorruptBatch("the request holds no records for this partition")
                partition = _partition(self._topics, portion)
                if partition.topic.is_internal or version < FIRST_WITH_ZSTD:
                    _check_allowed(partition, portion, version)
                if flags & COMPRESSION_MASK:
                    check_declared_size(flags & COMPRESSION_MASK, records[HEADER_BYTES:])
                guard = guards.get(portion) if guards else None
                appended = portion.appended = partition.write(
                    records, acks=acks, guard=guard, is_checked=portion.is_checked
                )
                if partition.is_acknowledged(appended, acks):
                    portion.records = None
                    return None
                # The memory belongs to the next request once the response to this one is promised.
                portion.records = memoryview(bytes(records[:HEADER_BYTES]))
                return partition
            except CorruptBatch as error:
                self._reject(portion, _client_error(error, records))
            except MillstreamError as error:
                self._reject(portion, error)
        return None

    def _is_behind_refused(self, portion: Portion, client: ClientInfo) -> bool:
        """Refuse a batch that was sent after a refused one, for the same reason; return whether it was."""
        header = _idempotent_header(portion)
        if header is None:
            return False
        key = (portion.topic, portion.index, header.producer_id)
        refused = client.refused_batches.get(key)
        if refused is None:
            return False
        is_behind = (
            header.producer_epoch == refused.epoch
            and _sequence_distance(refused.sequence, header.base_sequence) > 0
            and not self._is_stored(portion, header.producer_id, refused)
        )
        refused.behind += is_behind
        if not is_behind or refused.behind == BATCHES_BEHIND_MAX:
            del client.refused_batches[key]
        if is_behind and portion.code is ErrorCode.none:
            portion.fail(refused.code, f"a batch before it was refused: {refused.reason}")
        return is_behind

    def _is_stored(self, portion: Portion, producer_id: int, refused: RefusedBatch) -> bool:
        """Whether a refused batch has been stored since, through another connection or another leader."""
        try:
            known = _partition(self._topics, portion).log.producers.get(producer_id)
        except MillstreamError:
            return False
        if known is None or known.epoch != refused.epoch or not known.batches:
            return False
        return _sequence_distance(refused.sequence, known.batches[-1].last_sequence) >= 0

    def _reject(self, portion: Portion, error: MillstreamError) -> None:
        self.batches_rejected += 1
        portion.fail(error_code(error), str(error))
        if isinstance(error, InvalidBatch | InvalidTimestamp):
            portion.record_errors = error.records

    def _wait(self, pending: _Pending, waiting: list[tuple[Partition, Portion]], request: Request) -> None:
        pending.unacknowledged = len(waiting)
        for partition, portion in waiting:
            waiter = _Waiting(pending, portion, partition)
            pending.waiting.append(waiter)
            partition.notify_acknowledged(cast("AppendedRange", portion.appended), waiter, request.acks)
        self._hold(pending, request.timeout_ms)

    def _hold(self, pending: _Pending | _PendingPipelined, timeout_ms: int) -> None:
        """Hold a response until it is acknowledged, or times out."""
        loop = asyncio.get_running_loop()
        pending.deadline = loop.time() + min(max(timeout_ms, 0) / 1000, _TIMEOUT_S_MAX)
        self._pending[pending] = None
        if self._sweep is None:
            self._sweep = loop.call_later(_PENDING_SWEEP_S, self._time_out)

    def respond(self, pending: _Pending | _PendingPipelined) -> None:
        """Respond to requests that no longer wait."""
        del self._pending[pending]
        pending.resolve(pending.encode())

    def _time_out(self) -> None:
        """Respond to requests that exceed their timeout; their records may still become durable."""
        self._sweep = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        timed_out: dict[Partition, None] = {}
        for pending in tuple(self._pending):
            if pending.deadline <= now:
                timed_out.update(dict.fromkeys(pending.time_out()))
                self.respond(pending)
        for partition in timed_out:
            partition.discard_finished()
        if self._pending:
            self._sweep = loop.call_later(_PENDING_SWEEP_S, self._time_out)


def _remember_refused(portion: Portion, client: ClientInfo) -> None:
    """Remember a batch that its producer is to send again, unless it is behind one that is remembered."""
    header = _idempotent_header(portion)
    if header is None or not portion.code.retriable:
        return
    refused = client.refused_batches
    key = (portion.topic, portion.index, header.producer_id)
    known = refused.get(key)
    is_known = known is not None and known.epoch == header.producer_epoch
    if known is not None and is_known and _sequence_distance(known.sequence, header.base_sequence) > 0:
        return
    while len(refused) >= REFUSED_PRODUCERS_MAX:
        del refused[next(iter(refused))]
    refused[key] = RefusedBatch(
        epoch=header.producer_epoch, sequence=header.base_sequence, code=portion.code, reason=portion.message or ""
    )


def _sequence_distance(first: int, second: int) -> int:
    """Return how many sequence numbers the second is after the first, or a negative number if it is before it."""
    distance = (second - first) & SEQUENCE_MASK
    return distance if distance <= SEQUENCE_MASK // 2 else distance - SEQUENCE_MASK - 1


def _idempotent_header(portion: Portion) -> BatchHeader | None:
    """Return the header of an idempotent producer's batch; the log rejects malformed ones."""
    header = _header(portion)
    return header if header is not None and header.producer_id >= 0 and header.base_sequence >= 0 else None


def _check_allowed(partition: Partition, portion: Portion, version: int) -> None:
    if partition.topic.is_internal and not (portion.is_of_node and partition.topic.name == AUDIT):
        raise InvalidTopicName(f"topic {partition.topic.name!r} is internal; clients may not write to it")
    if version < FIRST_WITH_ZSTD and portion.flags & COMPRESSION_MASK == COMPRESSION_ZSTD:
        raise UnsupportedCompression(f"zstd needs Produce v{FIRST_WITH_ZSTD} or later, not v{version}")


def _client_error(error: CorruptBatch, records: memoryview | None) -> MillstreamError:
    """Return the error for a batch that cannot be read.

    As in Kafka, a wrong checksum, length or format counts as corruption in transit, and clients send the batch again;
    any other framing error is the client's, and sending it again would not help.
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


def _check_acks_0(portions: list[Portion]) -> None:
    for portion in portions:
        if portion.code is not ErrorCode.none:
            # No response could carry the error, so the connection is closed.
            raise ProtocolViolation(f"produce with acks=0 failed: {portion.message}")

"""The partitions of a Produce request on which a transaction is about to begin: the coordinator is asked first.

Each partition gives a guard before the question and takes the batch only under it, so that nothing begins on a
partition whose marker came in between. Under transaction version 2 the guard is taken after the answer: what comes in
between then is at most the marker of the transaction before, which the answer may even have waited for, while the
marker of this one would have a later epoch and fence the batch. Refusals are translated for the version of the
producer, as in Kafka: what it should simply try again is NOT_ENOUGH_REPLICAS, since older clients know to do so then.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final, NamedTuple

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.errors import error_code
from millstream.broker.kafka.produce_codec import Portion, Request
from millstream.broker.log.transactions import Guard
from millstream.broker.replication.acknowledgement import TransactionGate
from millstream.broker.replication.partition import Partition
from millstream.core.errors import (
    BrokerUnreachable,
    ConcurrentTransactions,
    CoordinatorUnavailable,
    FencedProducer,
    InvalidProducerMapping,
    InvalidTransactionState,
    MillstreamError,
    NotEnoughReplicas,
    ProducerFenced,
    RequestTimedOut,
    TransactionAbortable,
)
from millstream.core.topic import TopicPartition
from millstream.protocol.records.batch import (
    BATCH_HEADER,
    HEADER_BYTES,
    PRODUCER_ID_AT,
    TRANSACTIONAL_FLAG,
    BatchHeader,
)

FIRST_WITH_ABORTABLE: Final = 11
FIRST_THAT_ADDS: Final = 12
"""From this version of Produce on, writing to a partition adds it to the transaction (KIP-890)."""

TIMEOUT_S = 30.0
"""How long the coordinator may take; the timeout of the request only covers acknowledgements."""

RETRY_S: Final = 0.02
RETRIES_MAX: Final = 5
"""While the transaction before it is still being ended, a new one waits a moment; sending it all again costs more."""

_PRODUCER: Final = struct.Struct(">qh")
_Answers = dict[TopicPartition, MillstreamError | None]


def is_open(topics: Topics, request: Request) -> bool:
    """Whether the transaction is open on every partition of a request already, so that there is nothing to ask."""
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


class _Beginning(NamedTuple):
    """A partition where the transaction is not open yet."""

    portion: Portion
    partition: Partition
    header: BatchHeader
    guard: Guard


class Opening:
    """The partitions of one request on which a transaction starts, and the producer."""

    def __init__(self, topics: Topics, request: Request, version: int) -> None:
        self.guards: dict[Portion, Guard] = {}
        """The guards under which batches may be written."""
        self._version = version
        self._request = request
        self._beginnings: list[_Beginning] = []
        self._producer = (-1, -1)
        heads = [(portion, header) for portion in request.portions if (header := _transactional(portion)) is not None]
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
        return bool(self._beginnings)

    def _begin(self, topics: Topics, portion: Portion, header: BatchHeader) -> None:
        partition = _partition(topics, portion)
        if partition.topic.is_internal:
            # Nothing is appended to it, so there is nothing to ask.
            return
        guard = self._guard(partition, header)
        if guard is not None:
            self._beginnings.append(_Beginning(portion, partition, header, guard))

    def _guard(self, partition: Partition, header: BatchHeader) -> Guard | None:
        return partition.start_transaction(
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
            bumps_epoch=self._version >= FIRST_THAT_ADDS,
        )

    async def ask(self, gate: TransactionGate) -> None:
        """Ask the coordinator; portions that it does not admit have failed on return."""
        answers = await self._answers(gate)
        for beginning in self._beginnings:
            error = answers.get(beginning.partition.log.partition)
            if error is None:
                self._admit(beginning)
            else:
                _refuse(beginning.portion, producer_error(error, self._version))

    def _admit(self, beginning: _Beginning) -> None:
        guard: Guard | None = beginning.guard
        if self._version >= FIRST_THAT_ADDS:
            try:
                guard = self._guard(beginning.partition, beginning.header)
            except MillstreamError as error:
                _refuse(beginning.portion, error)
                return
        if guard is not None:
            self.guards[beginning.portion] = guard

    async def _answers(self, gate: TransactionGate) -> _Answers:
        for attempt in range(RETRIES_MAX + 1):
            answers = await self._ask_once(gate)
            is_busy = any(isinstance(error, ConcurrentTransactions) for error in answers.values())
            if not is_busy or self._version < FIRST_THAT_ADDS or attempt == RETRIES_MAX:
                break
            await asyncio.sleep(RETRY_S)
        return answers

    async def _ask_once(self, gate: TransactionGate) -> _Answers:
        partitions = [beginning.partition.log.partition for beginning in self._beginnings]
        add = self._version >= FIRST_THAT_ADDS
        try:
            async with asyncio.timeout(TIMEOUT_S):
                named = self._request.transactional_id or ""
                return dict(await gate.admit(named, *self._producer, partitions, add=add))
        except TimeoutError:
            return dict.fromkeys(partitions, RequestTimedOut(f"no answer within {TIMEOUT_S:g} s"))
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
        return NotEnoughReplicas(f"the coordinator did not say whether the transaction is open: {error}")
    return error


def _transactional(portion: Portion) -> BatchHeader | None:
    """Return the header of a transactional batch; the log rejects malformed ones."""
    records = portion.records
    if records is None or len(records) < HEADER_BYTES:
        return None
    header = BatchHeader(0, *BATCH_HEADER.unpack_from(records))
    return header if header.attributes & TRANSACTIONAL_FLAG and header.producer_id >= 0 else None


def _refuse(portion: Portion, error: MillstreamError) -> None:
    portion.fail(error_code(error), str(error))

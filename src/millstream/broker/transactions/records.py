"""The records of `__transaction_state`, in Kafka's own format, so that tools which read that topic understand it.

    key 0      (transactional id)   value: the producer of that id and its transaction
    key 7300   (query)              value: its last committed batch, and when; not Kafka's, see `transaction.py`.
                                    Tag 0: the last run that was aborted

Keys and values begin with a 16-bit number: the kind of record in a key, the version in a value. Transactions are
stored in version 1, which has tagged fields. Two tags are added to Kafka's (0 previous producer id, 1 next producer id,
2 version of the protocol): the last epoch, without which a producer that retries after a change of coordinator would be
fenced, and the flag of a prepared transaction, which Kafka's tools show as ongoing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from millstream.broker.coordination.state_machine import StateRecord, record_key
from millstream.broker.transactions.transaction import FIRST_VERSION, NO_EPOCH, LastBatch, Transaction, TransactionState
from millstream.core.errors import ProtocolViolation
from millstream.core.ids import NO_PRODUCER_ID, PartitionIndex, ProducerId
from millstream.core.topic import TopicPartition, by_topic
from millstream.protocol.messages.primitives import Reader, Writer

_TRANSACTION_KEY: Final = 0
_QUERY_KEY: Final = 7300
_VERSION: Final = 1
_QUERY_VERSION: Final = 0

_ENDED_RUN_TAG: Final = 0
_PREVIOUS_TAG: Final = 0
_NEXT_TAG: Final = 1
_PROTOCOL_TAG: Final = 2
_LAST_EPOCH_TAG: Final = 7300
_PREPARED_TAG: Final = 7301

_STATUS: Final = (
    TransactionState.EMPTY,
    TransactionState.ONGOING,
    TransactionState.PREPARE_COMMIT,
    TransactionState.PREPARE_ABORT,
    TransactionState.COMPLETE_COMMIT,
    TransactionState.COMPLETE_ABORT,
    TransactionState.DEAD,
    TransactionState.PREPARE_EPOCH_FENCE,
)


@dataclass(frozen=True, slots=True)
class TransactionKey:
    """Identifies a transactional id."""

    transactional_id: str


@dataclass(frozen=True, slots=True)
class QueryKey:
    """Identifies a query, whose batches are committed by many writers at once."""

    query: str


def transaction_record(transaction: Transaction) -> StateRecord:
    is_prepared = transaction.state is TransactionState.PREPARED
    status = TransactionState.ONGOING if is_prepared else transaction.state
    writer = Writer(flexible=True)
    writer.int16(_VERSION)
    writer.int64(transaction.producer_id)
    writer.int16(transaction.epoch)
    writer.int32(transaction.timeout_ms)
    writer.int8(_STATUS.index(status))
    _write_partitions(writer, transaction)
    writer.int64(transaction.updated_ms)
    writer.int64(transaction.started_ms)
    tags = [
        (_PREVIOUS_TAG, transaction.previous_producer_id.to_bytes(8, "big", signed=True), NO_PRODUCER_ID),
        (_NEXT_TAG, transaction.next_producer_id.to_bytes(8, "big", signed=True), NO_PRODUCER_ID),
        (_PROTOCOL_TAG, transaction.version.to_bytes(2, "big"), FIRST_VERSION),
        (_LAST_EPOCH_TAG, transaction.last_epoch.to_bytes(2, "big", signed=True), NO_EPOCH),
        (_PREPARED_TAG, b"\x01" if is_prepared else b"\x00", 0),
    ]
    writer.tags({tag: content for tag, content, absent in tags if _number(content) != absent})
    return StateRecord(record_key(_TRANSACTION_KEY, transaction.transactional_id), bytes(writer.buffer))


def transaction_tombstone(transactional_id: str) -> StateRecord:
    return StateRecord(record_key(_TRANSACTION_KEY, transactional_id), None)


def query_record(query: str, last: LastBatch) -> StateRecord:
    writer = Writer(flexible=True)
    writer.int16(_QUERY_VERSION)
    writer.int64(last.batch)
    writer.int64(last.updated_ms)
    writer.tags({_ENDED_RUN_TAG: last.ended_run.encode()} if last.ended_run else {})
    return StateRecord(record_key(_QUERY_KEY, query), bytes(writer.buffer))


def query_tombstone(query: str) -> StateRecord:
    return StateRecord(record_key(_QUERY_KEY, query), None)


def read_key(key: bytes) -> TransactionKey | QueryKey | None:
    """Parse the key of a record; return None for unknown kinds."""
    reader = Reader(key, flexible=False)
    kind = reader.int16()
    if kind == _TRANSACTION_KEY:
        return TransactionKey(reader.string())
    return QueryKey(reader.string()) if kind == _QUERY_KEY else None


def read_query(value: bytes) -> LastBatch:
    reader = Reader(value)
    version = reader.int16()
    if version != _QUERY_VERSION:
        raise ProtocolViolation(f"version {version} of a query's record is unknown")
    batch, updated_ms = reader.int64(), reader.int64()
    tags = {tag: bytes(content.rest()) for tag, content in reader.tags()}
    return LastBatch(batch, updated_ms, tags.get(_ENDED_RUN_TAG, b"").decode(errors="replace"))


def read_transaction(transactional_id: str, value: bytes) -> Transaction:
    reader = Reader(value)
    version = reader.int16()
    if version != _VERSION:
        raise ProtocolViolation(f"version {version} of a transaction's record is unknown")
    producer_id, epoch, timeout_ms = reader.int64(), reader.int16(), reader.int32()
    status = reader.int8()
    if not 0 <= status < len(_STATUS):
        raise ProtocolViolation(f"a transaction's record has the unknown status {status}")
    partitions = frozenset(_read_partitions(reader))
    updated_ms, started_ms = reader.int64(), reader.int64()
    tags = {tag: _number(bytes(content.rest())) for tag, content in reader.tags()}
    return Transaction(
        transactional_id=transactional_id,
        producer_id=ProducerId(producer_id),
        epoch=epoch,
        last_epoch=tags.get(_LAST_EPOCH_TAG, NO_EPOCH),
        previous_producer_id=ProducerId(tags.get(_PREVIOUS_TAG, NO_PRODUCER_ID)),
        next_producer_id=ProducerId(tags.get(_NEXT_TAG, NO_PRODUCER_ID)),
        timeout_ms=timeout_ms,
        state=TransactionState.PREPARED if tags.get(_PREPARED_TAG) else _STATUS[status],
        partitions=partitions,
        started_ms=started_ms,
        updated_ms=updated_ms,
        version=tags.get(_PROTOCOL_TAG, FIRST_VERSION),
    )


def _write_partitions(writer: Writer, transaction: Transaction) -> None:
    # Kafka writes null instead of an empty list before the first transaction.
    if transaction.state is TransactionState.EMPTY:
        writer.array_length(-1)
        return
    named = by_topic(transaction.partitions)
    writer.array_length(len(named))
    for topic, indexes in named.items():
        writer.string(topic)
        writer.int32_array(tuple(indexes))
        writer.no_tags()


def _read_partitions(reader: Reader) -> Iterable[TopicPartition]:
    for _ in range(reader.array_length(item_bytes_min=2)):
        topic, indexes = reader.string(), reader.int32_array()
        reader.skip_tags()
        for index in indexes:
            yield TopicPartition(topic, PartitionIndex(index))


def _number(content: bytes) -> int:
    return int.from_bytes(content, "big", signed=True)

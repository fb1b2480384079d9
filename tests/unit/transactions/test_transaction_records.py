"""Records of `__transaction_state` round trip, and Kafka's own format is understood."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.transactions.records import (
    QueryKey,
    TransactionKey,
    query_record,
    query_tombstone,
    read_key,
    read_query,
    read_transaction,
    transaction_record,
    transaction_tombstone,
)
from millstream.broker.transactions.transaction import LastBatch, Transaction, TransactionState
from millstream.core.errors import ProtocolViolation
from millstream.core.ids import PartitionIndex, ProducerId
from millstream.core.topic import TopicPartition

epochs = st.integers(-1, 2**15 - 1)
producer_ids = st.integers(-1, 2**62).map(ProducerId)
times = st.integers(-1, 2**60)
partitions = st.frozensets(
    st.builds(TopicPartition, st.text(min_size=1, max_size=9), st.integers(0, 99).map(PartitionIndex)), max_size=6
)


@st.composite
def transactions(draw: st.DrawFn) -> Transaction:
    state = draw(st.sampled_from(TransactionState))
    return Transaction(
        transactional_id=draw(st.text(min_size=1, max_size=20)),
        producer_id=draw(producer_ids),
        epoch=draw(epochs),
        last_epoch=draw(epochs),
        previous_producer_id=draw(producer_ids),
        next_producer_id=draw(producer_ids),
        timeout_ms=draw(st.integers(0, 2**31 - 1)),
        state=state,
        partitions=frozenset() if state is TransactionState.EMPTY else draw(partitions),
        started_ms=draw(times),
        updated_ms=draw(times),
        version=draw(st.integers(0, 2)),
    )


@given(transactions())
def test_records_round_trip(transaction: Transaction) -> None:
    record = transaction_record(transaction)
    assert record.value is not None
    assert read_key(record.key) == TransactionKey(transaction.transactional_id)
    assert read_transaction(transaction.transactional_id, record.value) == transaction
    assert transaction_tombstone(transaction.transactional_id) == (record.key, None, ())


@given(st.text(min_size=1, max_size=20), st.integers(-1, 2**63 - 1), st.integers(0, 2**63 - 1), st.text(max_size=20))
def test_the_last_batch_of_a_query(query: str, batch: int, updated_ms: int, run: str) -> None:
    record = query_record(query, LastBatch(batch, updated_ms, run))
    assert record.value is not None
    assert read_key(record.key) == QueryKey(query)
    assert read_query(record.value) == (batch, updated_ms, run)
    assert query_tombstone(query) == (record.key, None, ())


def test_the_encoding_is_that_of_kafka() -> None:
    transaction = Transaction(
        transactional_id="tx",
        producer_id=ProducerId(7),
        epoch=3,
        timeout_ms=60_000,
        state=TransactionState.ONGOING,
        partitions=frozenset({TopicPartition("t", PartitionIndex(1)), TopicPartition("t", PartitionIndex(0))}),
        started_ms=5,
        updated_ms=6,
    )
    key, value, _ = transaction_record(transaction)
    assert key.hex(" ") == "00 00 00 02 74 78"
    assert value is not None
    assert value.hex(" ") == (
        "00 01 00 00 00 00 00 00 00 07 00 03 00 00 ea 60 01 "
        "02 02 74 03 00 00 00 00 00 00 00 01 00 "
        "00 00 00 00 00 00 00 06 00 00 00 00 00 00 00 05 00"
    )


@pytest.mark.parametrize("value", ["0000", "0002", "0001 0000000000000007 0003 0000ea60 09", "0001 00"])
def test_undecodable_records_are_refused(value: str) -> None:
    with pytest.raises(ProtocolViolation):
        read_transaction("tx", bytes.fromhex(value))
    with pytest.raises(ProtocolViolation):
        read_query(b"\x00\x09")
    assert read_key(b"\x00\x63\x00\x01a") is None

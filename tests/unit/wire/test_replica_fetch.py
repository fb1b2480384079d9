"""Followers' fetches are encoded as by Kafka, and round trip."""

from __future__ import annotations

from contextlib import suppress
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import ProtocolViolation
from millstream.core.ids import Epoch, EpochEnd, NodeId, Offset, PartitionIndex
from millstream.protocol.messages.codec import read_request, read_response
from millstream.protocol.wire.replica_fetch import (
    FETCH_KEY,
    VERSION,
    PartitionKey,
    ReplicaFetch,
    ReplicaPosition,
    ReplicaResponse,
    ReplicaResponses,
    next_session_epoch,
    read_replica_fetch,
    read_replica_responses,
    write_replica_fetch,
    write_replica_responses,
)

KEYS = st.tuples(
    st.sampled_from([UUID(int=1), UUID(int=2**127 + 5)]),
    st.integers(0, 10_000).map(lambda index: PartitionIndex(index)),
)
OFFSETS = st.integers(0, 2**63 - 1).map(lambda offset: Offset(offset))
EPOCHS = st.integers(-1, 2**31 - 1).map(lambda epoch: Epoch(epoch))
POSITIONS = st.builds(ReplicaPosition, OFFSETS, EPOCHS, EPOCHS, OFFSETS, st.integers(1, 2**31 - 1))
FETCHES = st.builds(
    ReplicaFetch,
    node=st.integers(0, 2**31 - 1).map(lambda node: NodeId(node)),
    registration=st.integers(-1, 2**63 - 1),
    session_id=st.integers(0, 2**31 - 1),
    session_epoch=st.integers(-1, 2**31 - 1),
    max_wait_ms=st.integers(0, 60_000),
    min_bytes=st.integers(0, 100),
    max_bytes=st.integers(0, 2**31 - 1),
    positions=st.dictionaries(KEYS, POSITIONS, max_size=5),
    forgotten=st.lists(KEYS, unique=True, max_size=5),
)
RESPONSES = st.builds(
    ReplicaResponse,
    st.integers(0, 100),
    OFFSETS,
    OFFSETS,
    st.none() | st.builds(EpochEnd, EPOCHS, OFFSETS),
    st.binary(max_size=200),
)


@given(FETCHES)
def test_a_request_round_trips(fetch: ReplicaFetch) -> None:
    read = read_replica_fetch(write_replica_fetch(fetch), 0)
    assert read.positions == fetch.positions
    assert sorted(read.forgotten) == sorted(fetch.forgotten)
    for name in ("node", "registration", "session_id", "session_epoch", "max_wait_ms", "min_bytes", "max_bytes"):
        assert getattr(read, name) == getattr(fetch, name)


@given(st.dictionaries(KEYS, RESPONSES, max_size=5), st.integers(0, 2**31 - 1))
def test_a_response_round_trips(partitions: dict[PartitionKey, ReplicaResponse], session_id: int) -> None:
    pieces = write_replica_responses(VERSION, 5, ReplicaResponses(0, session_id, partitions))
    frame = memoryview(b"".join(map(bytes, pieces)))
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    read = read_replica_responses(frame[4:])
    assert (read.code, read.session_id) == (0, session_id)
    assert {key: (*response[:4], bytes(response.records)) for key, response in read.partitions.items()} == {
        key: tuple(response) for key, response in partitions.items()
    }


def test_the_encoding_is_that_of_kafka() -> None:
    key = (UUID(int=7), PartitionIndex(3))
    position = ReplicaPosition(Offset(40), Epoch(2), Epoch(5), Offset(10), 1000)
    fetch = ReplicaFetch(
        node=NodeId(9), registration=77, max_wait_ms=500, max_bytes=10_000, positions={key: position}, forgotten=[key]
    )
    request = read_request(FETCH_KEY, VERSION, write_replica_fetch(fetch), 0)
    assert (request.replica_state.replica_id, request.replica_state.replica_epoch) == (9, 77)
    (partition,) = request.topics[0].partitions
    assert (partition.fetch_offset, partition.last_fetched_epoch, partition.current_leader_epoch) == (40, 2, 5)
    assert request.forgotten_topics_data[0].partitions == (3,)
    partition_response = ReplicaResponse(0, Offset(50), Offset(10), EpochEnd(Epoch(4), Offset(44)), b"")
    pieces = write_replica_responses(VERSION, 5, ReplicaResponses(0, 8, {key: partition_response}))
    response = read_response(FETCH_KEY, VERSION, b"".join(map(bytes, pieces))[4:])
    (partition,) = response.responses[0].partitions
    assert response.session_id == 8
    assert (partition.high_watermark, partition.log_start_offset) == (50, 10)
    assert (partition.diverging_epoch.epoch, partition.diverging_epoch.end_offset) == (4, 44)


def test_a_request_without_a_node_id_is_not_a_followers() -> None:
    fetch = ReplicaFetch(node=NodeId(-1), registration=1, max_wait_ms=1, max_bytes=1, positions={})
    with pytest.raises(ProtocolViolation):
        read_replica_fetch(write_replica_fetch(fetch), 0)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_decoded_or_refused(data: bytes) -> None:
    for read in (lambda: read_replica_fetch(data, 0), lambda: read_replica_responses(memoryview(bytes(5) + data))):
        with suppress(ProtocolViolation):
            read()


def test_session_epochs_wrap() -> None:
    assert next_session_epoch(0) == 1
    assert next_session_epoch(2**31 - 1) == 1

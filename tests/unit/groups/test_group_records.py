from __future__ import annotations

import contextlib
import struct
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.coordination.state_machine import StateRecord
from millstream.broker.groups.group import subscribed_topics
from millstream.broker.groups.records import (
    CommittedOffset,
    GroupKey,
    OffsetKey,
    StoredGroup,
    StoredMember,
    group_record,
    group_tombstone,
    offset_record,
    offset_tombstone,
    read_group,
    read_key,
    read_offset,
)
from millstream.core.errors import ProtocolViolation

KEY = OffsetKey("g", "orders", 3)
MEMBER = StoredMember(
    member_id="m-1",
    instance_id=None,
    client_id="c",
    client_host="/h",
    rebalance_timeout_ms=60_000,
    session_timeout_ms=10_000,
    subscription=b"sub",
    assignment=b"as",
)
GROUP = StoredGroup(
    protocol_type="consumer",
    generation=7,
    protocol_name="range",
    leader_id="m-1",
    state_since_ms=1234,
    members=(MEMBER,),
)

texts = st.text(max_size=20)
int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
members = st.builds(
    StoredMember,
    member_id=texts,
    instance_id=st.none() | texts,
    client_id=texts,
    client_host=texts,
    rebalance_timeout_ms=st.integers(0, 2**31 - 1),
    session_timeout_ms=st.integers(0, 2**31 - 1),
    subscription=st.binary(max_size=20),
    assignment=st.binary(max_size=20),
)


def string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def test_a_commit_is_encoded_as_by_kafka() -> None:
    record = offset_record(KEY, CommittedOffset(offset=42, leader_epoch=5, metadata="note", commit_ms=1000))

    assert record.key == struct.pack(">h", 1) + string("g") + string("orders") + struct.pack(">i", 3)
    assert record.value == struct.pack(">hqi", 3, 42, 5) + string("note") + struct.pack(">q", 1000)
    assert record.headers == ()


def test_a_commit_with_its_own_retention_is_version_1() -> None:
    record = offset_record(KEY, CommittedOffset(offset=42, leader_epoch=5, commit_ms=1000, expire_ms=2000))

    assert record.value == struct.pack(">hq", 1, 42) + string("") + struct.pack(">qq", 1000, 2000)
    assert read_offset(record) == CommittedOffset(offset=42, commit_ms=1000, expire_ms=2000)


def test_a_generation_is_encoded_as_by_kafka() -> None:
    record = group_record("g", GROUP)

    assert record.key == struct.pack(">h", 2) + string("g")
    assert record.value == (
        struct.pack(">h", 3)
        + string("consumer")
        + struct.pack(">i", 7)
        + string("range")
        + string("m-1")
        + struct.pack(">qi", 1234, 1)
        + string("m-1")
        + struct.pack(">h", -1)
        + string("c")
        + string("/h")
        + struct.pack(">iii", 60_000, 10_000, 3)
        + b"sub"
        + struct.pack(">i", 2)
        + b"as"
    )


def test_tombstones() -> None:
    assert offset_tombstone(KEY) == StateRecord(offset_record(KEY, CommittedOffset(offset=1, commit_ms=1)).key, None)
    assert group_tombstone("g") == StateRecord(group_record("g", GROUP).key, None)


def test_versions_that_are_not_written_are_refused() -> None:
    for read, version in ((read_offset, 0), (read_offset, 4), (read_group, 2), (read_group, 4)):
        with pytest.raises(ProtocolViolation, match=f"unknown version {version}"):
            read(StateRecord(b"", struct.pack(">h", version) + bytes(100)))


@given(
    st.builds(
        CommittedOffset,
        offset=int64s,
        leader_epoch=int32s,
        metadata=texts,
        commit_ms=int64s,
        topic_id=st.none() | st.uuids(),
        is_transactional=st.booleans(),
    ),
    texts,
    texts,
    int32s,
)
def test_commits_round_trip(committed: CommittedOffset, group: str, topic: str, partition: int) -> None:
    record = offset_record(OffsetKey(group, topic, partition), committed)

    assert read_key(record.key) == OffsetKey(group, topic, partition)
    assert read_offset(record) == committed


@given(
    st.builds(
        StoredGroup,
        protocol_type=texts,
        generation=int32s,
        protocol_name=st.none() | texts,
        leader_id=st.none() | texts,
        state_since_ms=int64s,
        members=st.lists(members, max_size=3).map(tuple),
    )
)
def test_generations_round_trip(group: StoredGroup) -> None:
    record = group_record("g", group)

    assert read_key(record.key) == GroupKey("g")
    assert read_group(record) == group


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_decoded_or_refused(value: bytes) -> None:
    for read in (read_offset, read_group):
        with contextlib.suppress(ProtocolViolation):
            read(StateRecord(b"", value))
    with contextlib.suppress(ProtocolViolation):
        read_key(value)


def test_unknown_record_types_are_skipped() -> None:
    assert read_key(struct.pack(">h", 3) + string("g")) is None


def test_a_header_without_a_valid_id_is_ignored() -> None:
    record = offset_record(KEY, CommittedOffset(offset=1, commit_ms=1, topic_id=uuid4()))

    assert read_offset(record._replace(headers=(("topic-id", b"short"),))).topic_id is None


def test_the_topics_of_a_subscription_are_decoded() -> None:
    topics = struct.pack(">i", 2) + string("orders") + string("bills")

    assert subscribed_topics(struct.pack(">h", 0) + topics + struct.pack(">i", 0)) == frozenset({"orders", "bills"})
    assert subscribed_topics(struct.pack(">h", 3) + topics + b"whatever later versions add") == frozenset(
        {"orders", "bills"}
    )
    assert subscribed_topics(b"") is None
    assert subscribed_topics(struct.pack(">hi", 0, 2) + b"xx") is None

"""Records of consumer groups are encoded byte for byte as by Apache Kafka 4.3, and decoded."""

from __future__ import annotations

import importlib
import io
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.serial import entity_writer

from millstream.broker.coordination.state_machine import StateRecord
from millstream.broker.groups.consumer import records
from millstream.broker.groups.consumer.classic_member import (
    ProtocolSubscription,
    encode_assignment,
    parse_assignment,
    parse_subscription,
)
from millstream.broker.groups.consumer.group import ConsumerGroup
from millstream.broker.groups.consumer.member import ClassicSide, MemberState, Position, Subscription, assignment_of
from millstream.broker.groups.consumer.records import ConsumerKey, Kind, Resolved
from millstream.broker.groups.consumer.shard import apply, record_of
from millstream.core.errors import ProtocolViolation

ONE, TWO = UUID(int=1), UUID(int=2)
SUBSCRIPTION = Subscription(
    rack_id="r", client_id="c", client_host="/h", topics=frozenset("ab"), rebalance_timeout_ms=1000, assignor="range"
)
CLASSIC = Subscription(
    instance_id="i",
    client_id="c",
    client_host="/h",
    topics=frozenset("a"),
    expression="x.*",
    classic=ClassicSide(session_timeout_ms=45000, protocols=(("range", b"\1\2"), ("sticky", b""))),
)
TARGET = assignment_of([(ONE, [0, 2]), (TWO, [5])])
POSITION = Position(
    epoch=4,
    previous_epoch=3,
    state=MemberState.UNREVOKED,
    assigned=assignment_of([(ONE, [0, 2])]),
    pending=assignment_of([(TWO, [5])]),
)
RESOLVED = Resolved(frozenset({"a", "ab"}), 11, 12)

# The encoding of the same content by the message classes of Kafka 4.3.1.
WRITTEN = [
    (records.group_epoch_record("g", 7, 0), "0003000167", "00000000000700"),
    (records.group_epoch_record("g", 7, -2), "0003000167", "000000000007010008fffffffffffffffe"),
    (
        records.subscription_record("g", "m", SUBSCRIPTION),
        "000500016700016d",
        "00000002720263032f68030261026201000003e80672616e676500",
    ),
    (
        records.subscription_record("g", "m", CLASSIC),
        "000500016700016d",
        "00000269000263032f6802026104782e2affffffff0001001a010000afc8030672616e67650301020007737469636b79010000",
    ),
    (records.target_epoch_record("g", 9), "0006000167", "00000000000900"),
    (
        records.target_record("g", "m", TARGET),
        "000700016700016d",
        "00000300000000000000000000000000000001030000000000000002000000000000000000000000000000000202000000050000",
    ),
    (
        records.position_record("g", "m", POSITION),
        "000800016700016d",
        "000000000004000000030102000000000000000000000000000000010300"
        "0000000000000200020000000000000000000000000000000202000000050000",
    ),
    (
        records.expression_record("g", "a.*", RESOLVED),
        "00100001670003612e2a",
        "0000030261036162000000000000000b000000000000000c00",
    ),
]


@pytest.mark.parametrize(("record", "key", "value"), WRITTEN, ids=lambda value: "" if isinstance(value, str) else None)
def test_records_are_encoded_as_by_kafka(record: StateRecord, key: str, value: str) -> None:
    assert record.key.hex() == key
    assert record.value is not None
    assert record.value.hex() == value


def test_records_are_decoded() -> None:
    assert records.read_group_epoch(records.group_epoch_record("g", 7, 0)) == (7, 0)
    assert records.read_group_epoch(records.group_epoch_record("g", 7, -2)) == (7, -2)
    assert records.read_subscription(records.subscription_record("g", "m", SUBSCRIPTION)) == SUBSCRIPTION
    assert records.read_subscription(records.subscription_record("g", "m", CLASSIC)) == CLASSIC
    assert records.read_target_epoch(records.target_epoch_record("g", 9)) == 9
    assert records.read_target(records.target_record("g", "m", TARGET)) == TARGET
    assert records.read_position(records.position_record("g", "m", POSITION)) == POSITION
    assert records.read_expression(records.expression_record("g", "a.*", RESOLVED)) == RESOLVED


def test_keys_are_decoded() -> None:
    for kind in Kind:
        key = ConsumerKey(kind, "g", "name" if kind not in (Kind.GROUP, Kind.TARGET_EPOCH) else "")
        assert records.read_consumer_key(records.tombstone(key).key) == key
    for number in (0, 1, 2, 9, 15, 17, 99, -1):
        assert records.read_consumer_key(number.to_bytes(2, "big", signed=True) + b"\0\1g") is None


def test_newer_fields_are_skipped() -> None:
    """Kafka adds to these records in tagged fields: a creation time (4.3), epochs of partitions."""
    value = bytes.fromhex("000000000007020008fffffffffffffffe01080000000000000001")
    assert records.read_group_epoch(StateRecord(b"", value)) == (7, -2)
    tagged_topic = "000000000000000000000000000000010200000003010006020000000400"
    value = bytes.fromhex("000000000004000000030002" + tagged_topic + "0100")
    assert records.read_position(StateRecord(b"", value)).assigned == {ONE: frozenset({3})}


def test_undecodable_records_are_reported() -> None:
    for value in (b"", b"\0", b"\0\1\0\0\0\1\0", b"\0\0\0"):
        with pytest.raises(ProtocolViolation):
            records.read_group_epoch(StateRecord(b"", value))
    unknown_state = bytes.fromhex("0000000000040000000363010100")
    assert records.read_position(StateRecord(b"", unknown_state)).state is MemberState.UNKNOWN


names = st.text(max_size=8)
topics = st.dictionaries(st.uuids(), st.frozensets(st.integers(0, 2**31 - 1), min_size=1, max_size=5), max_size=4)
subscriptions = st.builds(
    Subscription,
    instance_id=st.none() | names,
    rack_id=st.none() | names,
    client_id=names,
    client_host=names,
    topics=st.frozensets(names, max_size=4),
    expression=names,
    rebalance_timeout_ms=st.integers(-1, 2**31 - 1),
    assignor=st.none() | names,
    classic=st.none()
    | st.builds(
        ClassicSide,
        session_timeout_ms=st.integers(0, 2**31 - 1),
        protocols=st.lists(st.tuples(names, st.binary(max_size=8)), max_size=3).map(tuple),
    ),
)
positions = st.builds(
    Position,
    epoch=st.integers(-2, 2**31 - 1),
    previous_epoch=st.integers(-1, 2**31 - 1),
    state=st.sampled_from(MemberState),
    assigned=topics,
    pending=topics,
)


@given(subscriptions, positions, topics, st.integers(-(2**63), 2**63 - 1))
def test_a_group_is_the_fold_of_its_records(
    subscription: Subscription, position: Position, target: dict[UUID, frozenset[int]], metadata_hash: int
) -> None:
    written = [
        records.group_epoch_record("g", 3, metadata_hash),
        records.subscription_record("g", "m", subscription),
        records.target_record("g", "m", target),
        records.target_epoch_record("g", 2),
        records.position_record("g", "m", position),
        records.expression_record("g", "x", RESOLVED),
    ]
    group = ConsumerGroup("g")
    for record in written:
        key = records.read_consumer_key(record.key)
        assert key is not None
        apply(group, key, record)
    again = [record_of(group, key) for key in group.keys()]  # noqa: SIM118 - not a mapping
    assert sorted(record.key for record in again if record) == sorted(record.key for record in written)
    assert {record.key: record.value for record in again if record} == {r.key: r.value for r in written}
    for record in written[1:3]:
        key = records.read_consumer_key(record.key)
        assert key is not None
        apply(group, key, records.tombstone(key))
    assert (group.members, group.targets, group.members_bytes, group.choices) == ({}, {}, 0, {})
    assert not group.is_owned(ONE, 0, by_other_than="somebody")


@given(st.binary(max_size=60))
def test_arbitrary_bytes_do_not_break_the_decoders(value: bytes) -> None:
    record = StateRecord(value, b"\0\0" + value)
    readers = (
        records.read_group_epoch,
        records.read_subscription,
        records.read_target_epoch,
        records.read_target,
        records.read_position,
        records.read_expression,
    )
    for reader in readers:
        with suppress(ProtocolViolation):
            reader(record)
    for embedded in (records.read_consumer_key, parse_subscription, parse_assignment):
        with suppress(ProtocolViolation):
            embedded(value)


def subscription_bytes(version: int) -> bytes:
    """A consumer's subscription, encoded by the classes of kio, which come from Kafka's schema."""
    module = importlib.import_module(f"kio.schema.consumer_protocol_subscription.v{version}.data")
    values: dict[str, Any] = {"topics": ("a", "b"), "user_data": b"data"}
    if version >= 1:
        values["owned_partitions"] = (module.TopicPartition(topic="a", partitions=(1, 2)),)
    if version >= 2:
        values["generation_id"] = 4
    if version >= 3:
        values["rack_id"] = "rack"
    buffer = io.BytesIO()
    entity_writer(module.ConsumerProtocolSubscription)(buffer, module.ConsumerProtocolSubscription(**values))
    return version.to_bytes(2, "big") + buffer.getvalue()


@pytest.mark.parametrize("version", range(4))
def test_subscriptions_of_classic_consumers_are_decoded(version: int) -> None:
    expected = ProtocolSubscription(
        version=version,
        topics=frozenset("ab"),
        owned=[("a", [1, 2])] if version >= 1 else (),
        rack_id="rack" if version >= 3 else None,
    )
    assert parse_subscription(subscription_bytes(version)) == expected
    newer = (9).to_bytes(2, "big") + subscription_bytes(3)[2:] + b"more"
    assert parse_subscription(newer).topics == {"a", "b"}


@pytest.mark.parametrize("version", range(5))
def test_assignments_of_classic_consumers_are_encoded(version: int) -> None:
    written = encode_assignment([("b", {3, 1}), ("a", [0])], version=version)
    assert int.from_bytes(written[:2], "big") == min(version, 3)
    assert parse_assignment(written) == ([("a", [0]), ("b", [1, 3])], False)
    with_data = written[:-4] + b"\0\0\0\1x"
    assert parse_assignment(with_data)[1]
    assert parse_assignment(b"") == ((), False)

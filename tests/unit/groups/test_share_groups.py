"""Share groups step by step: join, heartbeat, leave, epochs, timeouts, topic changes, failover."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.coordination.state_machine import Deferred, StateRecord
from millstream.broker.groups.requests import ConsumerGroupDescription, ConsumerHeartbeat, HeartbeatResult
from millstream.broker.groups.share.group import (
    ShareGroupState,
    ShareHeartbeat,
    ShareKey,
    ShareKind,
    ShareMember,
    group_record,
    member_record,
    read_group,
    read_member,
    read_share_key,
    tombstone,
)
from millstream.core.errors import (
    FencedMemberEpoch,
    GroupFull,
    GroupNotEmpty,
    InconsistentProtocol,
    InvalidRequest,
    PolicyViolation,
    ProtocolViolation,
    UnknownGroup,
    UnknownMember,
)
from millstream_testing.consumer_harness import ConsumerHarness, SimulatedConsumer
from millstream_testing.group_harness import GROUP

SESSION_MS = 45_000
HEARTBEAT_MS = 5_000


@dataclass
class Sharer:
    """A share consumer that a test steps by hand."""

    harness: ConsumerHarness
    member_id: str
    topics: frozenset[str] = frozenset({"orders"})
    epoch: int = 0
    assigned: Any = field(default_factory=dict)

    def send(self, epoch: int | None = None, *, group_id: str = GROUP, **arguments: Any) -> Deferred[HeartbeatResult]:
        sent = self.epoch if epoch is None else epoch
        values: dict[str, Any] = {"topics": self.topics if sent == 0 else None, "rack_id": None, "client_id": "client"}
        request = ShareHeartbeat(
            group_id=group_id,
            member_id=self.member_id,
            epoch=sent,
            **{
                **values,
                "client_host": "/127.0.0.1",
                "session_ms": SESSION_MS,
                "heartbeat_ms": HEARTBEAT_MS,
                **arguments,
            },
        )
        return self.harness.run(lambda shard: shard.shares.heartbeat(request))

    def send_heartbeat(self, **arguments: Any) -> HeartbeatResult:
        response = self.send(**arguments).result()
        self.epoch = response.epoch
        if response.assignment is not None:
            self.assigned = response.assignment
        return response


@pytest.fixture
def harness() -> ConsumerHarness:
    return new_trial()


def new_trial(**limits: Any) -> ConsumerHarness:
    made = ConsumerHarness(**limits)
    made.topics.clear()
    made.add_topic("orders", 4)
    made.add_topic("bills", 2)
    return made


def described(harness: ConsumerHarness, group_id: str = GROUP) -> ConsumerGroupDescription:
    return harness.run(lambda shard: shard.shares.describe(group_id)).result()


# Heartbeats


def test_the_first_member_gets_every_partition_once(harness: ConsumerHarness) -> None:
    one = Sharer(harness, "one")
    joined = one.send_heartbeat()
    assert joined == HeartbeatResult(
        member_id="one", epoch=1, heartbeat_ms=HEARTBEAT_MS, assignment=harness.partitions(orders={0, 1, 2, 3})
    )
    written = len(harness.log)
    lives = one.send_heartbeat()
    assert (lives.epoch, lives.assignment) == (1, None)
    assert len(harness.log) == written


def test_members_share_partitions_without_waiting_for_each_other(harness: ConsumerHarness) -> None:
    members = [Sharer(harness, f"m{number}") for number in range(6)]
    for member in members:
        member.send_heartbeat()
    for member in members:
        member.send_heartbeat()
    covered = [member.assigned[harness.id_of("orders")] for member in members]
    assert set().union(*covered) == {0, 1, 2, 3}
    assert all(covered)
    assert {member.epoch for member in members} == {6}


def test_a_rejoining_member_gets_its_full_assignment(harness: ConsumerHarness) -> None:
    one = Sharer(harness, "one")
    one.send_heartbeat()
    again = one.send_heartbeat(epoch=0)
    assert (again.epoch, again.assignment) == (1, harness.partitions(orders={0, 1, 2, 3}))


def test_a_subscription_is_changed_and_reverted(harness: ConsumerHarness) -> None:
    one = Sharer(harness, "one")
    one.send_heartbeat()
    more = one.send_heartbeat(topics=frozenset({"orders", "bills"}))
    assert (more.epoch, more.assignment) == (2, harness.partitions(orders={0, 1, 2, 3}, bills={0, 1}))
    less = one.send_heartbeat(topics=frozenset())
    assert (less.epoch, less.assignment) == (3, {})
    assert harness.shard.shares.get(GROUP) is not None


def test_created_grown_and_deleted_topics_are_noticed(harness: ConsumerHarness) -> None:
    one = Sharer(harness, "one", frozenset({"orders", "late"}))
    one.send_heartbeat()
    harness.add_topic("late", 1)
    assert one.send_heartbeat().assignment == harness.partitions(orders={0, 1, 2, 3}, late={0})
    harness.cluster.grow("late", 2)
    assert one.send_heartbeat().assignment == harness.partitions(orders={0, 1, 2, 3}, late={0, 1})
    harness.remove_topic("orders")
    assert one.send_heartbeat().assignment == harness.partitions(late={0, 1})
    assert one.epoch == 4


def test_a_changed_rack_or_client_id_does_not_start_a_new_epoch(harness: ConsumerHarness) -> None:
    one = Sharer(harness, "one")
    one.send_heartbeat()
    assert one.send_heartbeat(rack_id="cellar", client_id="other").epoch == 1
    (member,) = described(harness).members
    assert (member.rack_id, member.client_id) == ("cellar", "other")


def test_the_last_member_leaves_an_empty_group(harness: ConsumerHarness) -> None:
    one, two = Sharer(harness, "one"), Sharer(harness, "two")
    one.send_heartbeat()
    two.send_heartbeat()
    one.send_heartbeat()
    response = two.send_heartbeat(epoch=-1)
    assert (response.member_id, response.epoch, response.assignment) == ("two", -1, None)
    assert one.send_heartbeat().assignment == harness.partitions(orders={0, 1, 2, 3})
    one.send_heartbeat(epoch=-1)
    assert described(harness).state == ShareGroupState.EMPTY.value
    assert isinstance(one.send(1).error, UnknownMember)
    assert one.send_heartbeat(epoch=0).epoch == 5


# Refusals


def test_wrong_member_epochs_are_fenced(harness: ConsumerHarness) -> None:
    one, two = Sharer(harness, "one"), Sharer(harness, "two")
    one.send_heartbeat()
    two.send_heartbeat()
    one.send_heartbeat()
    # The response may have been lost, so the previous epoch is accepted too.
    assert one.send(1).error is None
    assert isinstance(one.send(7).error, FencedMemberEpoch)
    assert isinstance(two.send(1).error, FencedMemberEpoch)
    assert isinstance(Sharer(harness, "three").send(2).error, UnknownMember)
    assert isinstance(Sharer(harness, "three").send(-1).error, UnknownMember)


def test_requests_to_missing_groups_are_refused(harness: ConsumerHarness) -> None:
    one = Sharer(harness, "one")
    assert isinstance(one.send(3).error, UnknownGroup)
    assert isinstance(one.send(-1).error, UnknownGroup)
    assert isinstance(harness.run(lambda shard: shard.shares.describe(GROUP)).error, UnknownGroup)
    assert isinstance(one.send(topics=None).error, InvalidRequest)
    assert isinstance(one.send(topics=frozenset()).error, InvalidRequest)
    assert len(harness.shard.shares) == 0


def test_groups_of_another_type_are_unchanged(harness: ConsumerHarness) -> None:
    harness.send_heartbeat(SimulatedConsumer("consumer", "orders"))
    assert isinstance(Sharer(harness, "one").send().error, UnknownGroup)
    harness.leave(SimulatedConsumer("consumer", "orders"))
    one = Sharer(harness, "one")
    assert isinstance(one.send().error, UnknownGroup)
    one.send_heartbeat(group_id="shared")
    consumer = SimulatedConsumer("consumer", "orders").request(group_id="shared")
    assert isinstance(harness.run(lambda shard: shard.consumer_heartbeat(consumer)).error, UnknownGroup)
    assert isinstance(harness.join(group_id="shared").error, InconsistentProtocol)
    assert isinstance(harness.run(lambda shard: shard.describe("shared")).error, UnknownGroup)
    assert isinstance(harness.run(lambda shard: shard.fetch("shared", None)).error, UnknownGroup)


def test_full_groups_and_too_many_groups_are_refused() -> None:
    harness = new_trial(members_max=2)
    for name in ("one", "two"):
        Sharer(harness, name).send_heartbeat()
    assert isinstance(Sharer(harness, "three").send().error, GroupFull)
    # A current member may rejoin.
    assert Sharer(harness, "two").send_heartbeat().epoch == 2
    harness = new_trial(groups_max=2)
    Sharer(harness, "one").send_heartbeat()
    Sharer(harness, "one").send_heartbeat(group_id="second")
    assert isinstance(Sharer(harness, "one").send(group_id="third").error, PolicyViolation)


def test_a_group_is_created_without_members(harness: ConsumerHarness) -> None:
    made = harness.run(lambda shard: shard.shares.open(GROUP)).result()
    assert (made.state, made.epoch, made.members) == ("Empty", 0, ())
    assert described(harness) == made
    written = len(harness.log)
    assert harness.run(lambda shard: shard.shares.open(GROUP)).result() == made
    assert len(harness.log) == written
    harness.reload()
    assert described(harness) == made
    assert Sharer(harness, "one").send_heartbeat().epoch == 1


def test_only_an_empty_group_is_deleted(harness: ConsumerHarness) -> None:
    one = Sharer(harness, "one")
    one.send_heartbeat()
    assert isinstance(harness.run(lambda shard: shard.delete(GROUP)).error, GroupNotEmpty)
    one.send_heartbeat(epoch=-1)
    assert harness.run(lambda shard: shard.delete(GROUP)).result()
    assert isinstance(harness.run(lambda shard: shard.shares.describe(GROUP)).error, UnknownGroup)
    # Its id is free for groups of any kind.
    assert harness.send_heartbeat(SimulatedConsumer("consumer", "orders")).epoch == 1


# Timeouts and failover


def test_a_member_whose_session_expires_is_removed(harness: ConsumerHarness) -> None:
    one, two = Sharer(harness, "one"), Sharer(harness, "two")
    one.send_heartbeat()
    two.send_heartbeat(session_ms=10_000)
    harness.advance_ms(9_999)
    one.send_heartbeat()
    assert {member.member_id for member in described(harness).members} == {"one", "two"}
    harness.advance_ms(1)
    assert [member.member_id for member in described(harness).members] == ["one"]
    assert one.send_heartbeat().assignment is not None
    assert isinstance(two.send().error, UnknownMember)
    harness.advance_ms(SESSION_MS)
    assert described(harness).state == "Empty"


def test_another_node_continues_from_the_log(harness: ConsumerHarness) -> None:
    one, two = Sharer(harness, "one"), Sharer(harness, "two", frozenset({"bills"}))
    one.send_heartbeat()
    two.send_heartbeat(rack_id="cellar")
    one.send_heartbeat()
    before = described(harness)
    harness.reload()
    # The assignments that were sent are not in the log, so they are sent again.
    assert one.send_heartbeat() == HeartbeatResult(
        member_id="one", epoch=2, heartbeat_ms=HEARTBEAT_MS, assignment=harness.partitions(orders={0, 1, 2, 3})
    )
    assert two.send_heartbeat().assignment == harness.partitions(bills={0, 1})
    assert one.send_heartbeat().assignment is None
    assert described(harness) == before
    harness.reload()
    assert isinstance(one.send(9).error, FencedMemberEpoch)
    # A member that does not return is removed.
    harness.advance_ms(SESSION_MS)
    assert described(harness).members == ()


def test_a_member_that_sends_its_topics_again_gets_its_assignment_again(harness: ConsumerHarness) -> None:
    """It may have missed the response that said so."""
    one = Sharer(harness, "one")
    assigned = one.send_heartbeat().assignment
    assert one.send_heartbeat().assignment is None
    assert one.send_heartbeat(topics=one.topics).assignment == assigned == harness.partitions(orders={0, 1, 2, 3})


def test_a_member_whose_record_was_lost_rejoins(harness: ConsumerHarness) -> None:
    one, two = Sharer(harness, "one"), Sharer(harness, "two")
    one.send_heartbeat()
    two.send_heartbeat()
    harness.reload_without_last(1)
    assert isinstance(two.send().error, UnknownMember)
    assert two.send_heartbeat(epoch=0).epoch == 2
    harness.reload_without_last(2)
    assert isinstance(one.send().error, UnknownGroup)


def test_the_durable_records_are_those_that_were_written(harness: ConsumerHarness) -> None:
    for name in ("one", "two"):
        Sharer(harness, name).send_heartbeat()
    Sharer(harness, "one").send_heartbeat(group_id="other")
    shares = harness.shard.shares
    records = [shares.durable_record(key) for key in shares.durable_keys()]
    fresh = new_trial()
    fresh.cluster, fresh.topics = harness.cluster, harness.topics
    fresh.log = [record for record in records if record is not None]
    assert len(fresh.log) == len(records) == 5
    fresh.reload()
    for group_id in (GROUP, "other"):
        group, expected = fresh.shard.shares.get(group_id), shares.get(group_id)
        assert group is not None
        assert expected is not None
        assert (group.epoch, group.metadata_hash, group.members) == (
            expected.epoch,
            expected.metadata_hash,
            expected.members,
        )
    assert shares.durable_record(ShareKey(ShareKind.GROUP, "gone")) is None


def test_groups_are_listed_and_described(harness: ConsumerHarness) -> None:
    one = Sharer(harness, "one")
    one.send_heartbeat()
    (listing,) = harness.run(lambda shard: shard.list_groups()).result()
    assert (listing.group_id, listing.protocol_type, listing.state, listing.group_type) == (
        GROUP,
        "share",
        "Stable",
        "share",
    )
    reported = described(harness)
    (member,) = reported.members
    assert (reported.state, reported.epoch, member.epoch) == ("Stable", 1, 1)
    assert member.assigned == [(harness.id_of("orders"), "orders", (0, 1, 2, 3))]


# Records

_texts = st.text(max_size=20)
_member_of_any_kind = st.builds(
    ShareMember,
    member_id=_texts,
    rack_id=st.none() | _texts,
    client_id=_texts,
    client_host=_texts,
    topics=st.frozensets(_texts, max_size=5),
)


@given(_texts, _member_of_any_kind)
def test_a_member_record_round_trips(group_id: str, member: ShareMember) -> None:
    record = member_record(group_id, member)
    key = read_share_key(record.key)
    assert key == ShareKey(ShareKind.MEMBER, group_id, member.member_id)
    assert read_member(key, record) == member
    assert tombstone(key) == StateRecord(record.key, None)


@given(_texts, st.integers(0, 2**31 - 1), st.integers(-(2**63), 2**63 - 1))
def test_a_group_record_round_trips(group_id: str, epoch: int, rests_on: int) -> None:
    record = group_record(group_id, epoch, rests_on)
    assert read_share_key(record.key) == ShareKey(ShareKind.GROUP, group_id)
    assert read_group(record) == (epoch, rests_on)


def test_foreign_keys_are_skipped_and_unknown_versions_refused() -> None:
    assert read_share_key(b"\x00\x03\x00\x01g") is None
    record = group_record("g", 1, 2)
    with pytest.raises(ProtocolViolation):
        read_group(StateRecord(record.key, b"\x00\x01" + (record.value or b"")[2:]))
    with pytest.raises(ProtocolViolation):
        read_group(StateRecord(record.key, b"\x00\x00\x00"))


def test_a_refused_share_consumer_does_not_affect_a_consumer_group_of_the_same_id(harness: ConsumerHarness) -> None:
    consumer = SimulatedConsumer("consumer", "orders")
    harness.send_heartbeat(consumer)
    Sharer(harness, "one").send()
    heartbeat: ConsumerHeartbeat = consumer.request()
    assert harness.send(heartbeat).error is None

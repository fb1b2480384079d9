"""ConsumerGroupHeartbeat and ConsumerGroupDescribe in every version, and these groups as seen by other APIs."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, cast
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from kio.static.primitive import i32Timedelta

from millstream.broker.cluster.topics import Topics
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.api import GROUP_OPERATIONS, NOT_REQUESTED, Api
from millstream.broker.kafka.apis.delete_groups import DeleteGroups
from millstream.broker.kafka.apis.describe_groups import DescribeGroups
from millstream.broker.kafka.apis.group_descriptions import ConsumerGroupDescribe
from millstream.broker.kafka.apis.group_heartbeats import ConsumerGroupHeartbeat
from millstream.broker.kafka.apis.list_groups import ListGroups
from millstream.broker.kafka.apis.offset_commit import OffsetCommit
from millstream.broker.kafka.apis.offset_fetch import OffsetFetch
from millstream.broker.kafka.dispatch import RawApi
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.protocol.messages.codec import load_request_class
from millstream.protocol.messages.shape import default_of
from millstream_testing.api_requests import send_request
from millstream_testing.state_log import MemoryTopics

GROUP = "group"


class Broker:
    """The APIs on one coordinator."""

    def __init__(self) -> None:
        self.topics = MemoryTopics()
        self.orders = self.topics.add("orders", partitions=2).topic_id
        config = Config(group_consumer_heartbeat_ms=1234)
        self.groups = GroupCoordinator(self.topics, config, SystemClock())
        known = cast("Topics", self.topics)
        self.beat = ConsumerGroupHeartbeat(self.groups)
        self.describe = ConsumerGroupDescribe(self.groups)
        self.describe_classic = DescribeGroups(self.groups)
        self.list = ListGroups(self.groups)
        self.delete = DeleteGroups(self.groups)
        self.commit = OffsetCommit(self.groups, known)
        self.fetch = OffsetFetch(self.groups, known)

    async def send(self, version: int, **arguments: Any) -> Any:
        """Send a heartbeat of some version; by default one that joins."""
        values = {"group_id": GROUP, "member_id": "m0", "member_epoch": 0}
        if arguments.get("member_epoch", 0) == 0:
            values |= {
                "rebalance_timeout": 60_000,
                "subscribed_topic_names": ("orders",),
                "topic_partitions": (),
            }
        return await send_request(self.beat, message(self.beat, version, **{**values, **arguments}))


def message(api: Api[Any, Any] | RawApi, version: int, **arguments: Any) -> Any:
    """Build a request of one version; missing fields have their default, or null where there is none."""
    kind = load_request_class(api.key, version)
    values = {field.name: default_of(field) for field in dataclasses.fields(kind)}
    if "topic_partitions" in values:
        values["topic_partitions"] = None
    arguments = {name: value for name, value in arguments.items() if name in values}
    if isinstance(arguments.get("rebalance_timeout"), int):
        arguments["rebalance_timeout"] = i32Timedelta.parse(timedelta(milliseconds=arguments["rebalance_timeout"]))
    return kind(**{**values, **arguments})


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    made = Broker()
    await made.groups.start()
    yield made
    await made.groups.close()


def assigned(response: Any) -> dict[UUID, tuple[int, ...]]:
    return {topic.topic_id: topic.partitions for topic in response.assignment.topic_partitions}


@pytest.mark.parametrize("version", range(2))
async def test_a_member_joins_lives_and_leaves(broker: Broker, version: int) -> None:
    joined = await broker.send(version)
    assert (joined.error_code, joined.error_message) == (ErrorCode.none, None)
    assert (joined.member_id, joined.member_epoch) == ("m0", 1)
    assert joined.heartbeat_interval == timedelta(milliseconds=1234)
    assert assigned(joined) == {broker.orders: (0, 1)}
    lives = await broker.send(version, member_epoch=1)
    assert (lives.error_code, lives.member_epoch, lives.assignment) == (ErrorCode.none, 1, None)
    response = await broker.send(version, member_epoch=-1)
    assert (response.error_code, response.member_id, response.member_epoch) == (ErrorCode.none, "m0", -1)
    assert response.heartbeat_interval == timedelta(0)
    gone = await broker.send(version, member_epoch=1)
    assert gone.error_code == ErrorCode.unknown_member_id
    assert "m0" in gone.error_message
    assert gone.member_id is None


async def test_owned_partitions_are_reported_back(broker: Broker) -> None:
    await broker.send(1)
    request = load_request_class(68, 1)
    module: Any = importlib.import_module(request.__module__)
    partitions = (module.TopicPartitions(topic_id=broker.orders, partitions=(0, 1)),)
    await broker.send(1, member_id="m1")
    response = await broker.send(1, member_epoch=1, topic_partitions=partitions)
    assert assigned(response) == {broker.orders: (0,)}
    given_up = (module.TopicPartitions(topic_id=broker.orders, partitions=(0,)),)
    done = await broker.send(1, member_epoch=1, topic_partitions=given_up)
    assert (done.member_epoch, done.assignment) == (2, None)
    other = await broker.send(1, member_id="m1", member_epoch=2)
    assert assigned(other) == {broker.orders: (1,)}


async def test_version_0_assigns_member_ids_and_has_no_expressions(broker: Broker) -> None:
    joined = await broker.send(0, member_id="")
    assert joined.error_code == ErrorCode.none
    assert joined.member_id
    refused = await broker.send(1, member_id="")
    assert refused.error_code == ErrorCode.invalid_request
    assert not hasattr(load_request_class(68, 0), "subscribed_topic_regex")


async def test_a_regular_expression(broker: Broker) -> None:
    joined = await broker.send(1, subscribed_topic_names=None, subscribed_topic_regex="ord.*")
    assert assigned(joined) == {broker.orders: (0, 1)}
    wrong = await broker.send(1, member_id="m1", subscribed_topic_names=None, subscribed_topic_regex="(")
    assert wrong.error_code == ErrorCode.invalid_regular_expression
    assert "(" in wrong.error_message


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"member_id": " "}, ErrorCode.invalid_request),
        ({"group_id": ""}, ErrorCode.invalid_request),
        ({"instance_id": ""}, ErrorCode.invalid_request),
        ({"rack_id": " "}, ErrorCode.invalid_request),
        ({"instance_id": "i" * 2000}, ErrorCode.invalid_request),
        ({"group_id": "g" * 2000}, ErrorCode.invalid_request),
        ({"rebalance_timeout": -1}, ErrorCode.invalid_request),
        ({"topic_partitions": None}, ErrorCode.invalid_request),
        ({"subscribed_topic_names": None}, ErrorCode.invalid_request),
        ({"member_epoch": -2}, ErrorCode.invalid_request),
        ({"member_epoch": -3}, ErrorCode.invalid_request),
        ({"server_assignor": "sticky"}, ErrorCode.unsupported_assignor),
        ({"member_epoch": 5}, ErrorCode.group_id_not_found),
        ({"member_epoch": -1}, ErrorCode.group_id_not_found),
    ],
)
async def test_invalid_heartbeats_are_refused(broker: Broker, given: dict[str, Any], code: ErrorCode) -> None:
    refused = await broker.send(1, **given)
    assert refused.error_code == code
    assert refused.error_message
    assert (refused.member_epoch, refused.assignment) == (0, None)
    assert await broker.groups.list_groups() == []


async def test_a_member_is_fenced(broker: Broker) -> None:
    await broker.send(1, instance_id="static")
    assert (await broker.send(1, member_epoch=7)).error_code == ErrorCode.fenced_member_epoch
    taken = await broker.send(1, member_id="m1", instance_id="static")
    assert taken.error_code == ErrorCode.unreleased_instance_id
    away = await broker.send(1, member_epoch=-2, instance_id="static")
    assert (away.error_code, away.member_epoch) == (ErrorCode.none, -2)
    back = await broker.send(1, member_id="m1", instance_id="static")
    assert (back.error_code, back.member_epoch, assigned(back)) == (ErrorCode.none, 1, {broker.orders: (0, 1)})
    fenced = await broker.send(1, member_epoch=1, instance_id="static")
    assert fenced.error_code == ErrorCode.fenced_instance_id


async def test_a_full_group_refuses_another_member() -> None:
    made = Broker()
    made.groups = GroupCoordinator(made.topics, Config(group_members_max=1), SystemClock())
    made.beat = ConsumerGroupHeartbeat(made.groups)
    await made.send(1)
    assert (await made.send(1, member_id="m1")).error_code == ErrorCode.group_max_size_reached
    await made.groups.close()


@pytest.mark.parametrize("version", range(2))
async def test_groups_are_described(broker: Broker, version: int) -> None:
    await broker.send(1, instance_id="static", rack_id="rack", server_assignor="range")
    await broker.send(1, member_id="m1", subscribed_topic_names=None, subscribed_topic_regex="ord.*")
    for include, operations in ((True, GROUP_OPERATIONS), (False, NOT_REQUESTED)):
        request = message(broker.describe, version, group_ids=(GROUP, "nobody"), include_authorized_operations=include)
        described, missing = (await send_request(broker.describe, request)).groups
        assert (described.group_id, described.group_state) == (GROUP, "Reconciling")
        assert (described.group_epoch, described.assignment_epoch, described.assignor_name) == (2, 2, "range")
        assert described.authorized_operations == operations
    one, two = described.members
    assert (one.member_id, one.instance_id, one.rack_id, one.member_epoch) == ("m0", "static", "rack", 1)
    assert (one.client_id, one.client_host) == ("test", "/127.0.0.1")
    assert (one.subscribed_topic_names, one.subscribed_topic_regex) == (("orders",), "")
    (topic,) = one.assignment.topic_partitions
    assert (topic.topic_id, topic.topic_name, topic.partitions) == (broker.orders, "orders", (0, 1))
    (topic,) = one.target_assignment.topic_partitions
    assert topic.partitions == (0,)
    assert (two.subscribed_topic_names, two.subscribed_topic_regex) == ((), "ord.*")
    if version >= 1:
        assert (one.member_type, two.member_type) == (1, 1)
    assert (missing.error_code, missing.group_id) == (ErrorCode.group_id_not_found, "nobody")
    assert "nobody" in missing.error_message


async def test_other_apis_report_the_group_type(broker: Broker) -> None:
    await broker.send(1)
    for types, groups in (
        (("consumer",), [GROUP]),
        (("Consumer", "classic"), [GROUP]),
        (("classic",), []),
        ((), [GROUP]),
    ):
        response = await send_request(broker.list, message(broker.list, 5, types_filter=types))
        assert [group.group_id for group in response.groups] == groups
    for states, groups in ((("stable",), [GROUP]), (("Empty",), [])):
        response = await send_request(broker.list, message(broker.list, 5, states_filter=states))
        assert [group.group_id for group in response.groups] == groups
    (group,) = (await send_request(broker.list, message(broker.list, 5))).groups
    assert (group.group_type, group.protocol_type, group.group_state) == ("consumer", "consumer", "Stable")
    for version, code in ((5, ErrorCode.none), (6, ErrorCode.group_id_not_found)):
        request = message(broker.describe_classic, version, groups=(GROUP,))
        (described,) = (await send_request(broker.describe_classic, request)).groups
        assert (described.error_code, described.group_state) == (code, "Dead")
    for expected in (ErrorCode.non_empty_group, ErrorCode.none, ErrorCode.group_id_not_found):
        (result,) = (await send_request(broker.delete, message(broker.delete, 2, groups_names=(GROUP,)))).results
        assert result.error_code == expected
        await broker.send(1, member_epoch=-1)


@pytest.mark.parametrize("version", range(2, 11))
async def test_offsets_are_committed_with_the_epoch(broker: Broker, version: int) -> None:
    await broker.send(1)
    request = load_request_class(8, version)
    module: Any = importlib.import_module(request.__module__)

    async def commit(epoch: int, member_id: str = "m0") -> ErrorCode:
        by_id = {"topic_id": broker.orders} if version >= 10 else {"name": "orders"}
        partition = module.OffsetCommitRequestPartition(partition_index=0, committed_offset=3, committed_metadata="")
        topic = module.OffsetCommitRequestTopic(**by_id, partitions=(partition,))
        versioned = message(
            broker.commit,
            version,
            group_id=GROUP,
            member_id=member_id,
            generation_id_or_member_epoch=epoch,
            topics=(topic,),
        )
        response = await send_request(broker.commit, versioned)
        code: ErrorCode = response.topics[0].partitions[0].error_code
        return code

    supported = version >= 9
    assert await commit(1) == (ErrorCode.none if supported else ErrorCode.unsupported_version)
    assert await commit(2) == (ErrorCode.stale_member_epoch if supported else ErrorCode.unsupported_version)
    assert await commit(1, "nobody") == ErrorCode.unknown_member_id
    assert await commit(-1, "") == ErrorCode.unknown_member_id
    await broker.send(1, member_epoch=-1)
    assert await commit(-1, "") == ErrorCode.none


@pytest.mark.parametrize("version", [8, 9, 10])
async def test_offsets_are_fetched_with_the_epoch(broker: Broker, version: int) -> None:
    await broker.send(1)
    module: Any = importlib.import_module(load_request_class(9, version).__module__)

    async def fetch(**member: Any) -> ErrorCode:
        group = module.OffsetFetchRequestGroup(group_id=GROUP, topics=None, **member)
        response = await send_request(broker.fetch, message(broker.fetch, version, groups=(group,)))
        code: ErrorCode = response.groups[0].error_code
        return code

    assert await fetch() == ErrorCode.none
    if version >= 9:
        assert await fetch(member_id="m0", member_epoch=1) == ErrorCode.none
        assert await fetch(member_id="m0", member_epoch=2) == ErrorCode.stale_member_epoch
        assert await fetch(member_id="m9", member_epoch=1) == ErrorCode.unknown_member_id


async def test_a_group_survives_the_coordinator(broker: Broker) -> None:
    await broker.send(1)
    await broker.groups.close()
    broker.groups = GroupCoordinator(broker.topics.after_crash(), Config(), SystemClock())
    await broker.groups.start()
    await broker.groups.wait_loaded()
    broker.beat = ConsumerGroupHeartbeat(broker.groups)
    lives = await broker.send(1, member_epoch=1)
    assert (lives.error_code, lives.member_epoch, lives.assignment) == (ErrorCode.none, 1, None)
    (listing,) = await broker.groups.list_groups()
    assert listing.state == "Stable"

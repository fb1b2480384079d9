"""CreateTopics, DeleteTopics, CreatePartitions and DeleteRecords."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka import api as api_module
from millstream.broker.kafka.apis import create_topics, delete_topics
from millstream.broker.kafka.apis.create_partitions import CreatePartitions
from millstream.broker.kafka.apis.create_topics import CreateTopics
from millstream.broker.kafka.apis.delete_records import DeleteRecords
from millstream.broker.kafka.apis.delete_topics import DeleteTopics
from millstream.broker.kafka.apis.elect_leaders import ElectLeaders
from millstream.broker.kafka.apis.partition_reassignments import AlterPartitionReassignments
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.core.topic import Topic
from millstream.protocol.messages import codec
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.api_requests import send_in_version, send_request

SECOND = timedelta(seconds=1)
CREATE: Any = importlib.import_module("kio.schema.create_topics.v7.request")
DELETE: Any = importlib.import_module("kio.schema.delete_topics.v6.request")
GROW: Any = importlib.import_module("kio.schema.create_partitions.v3.request")
CUT: Any = importlib.import_module("kio.schema.delete_records.v2.request")
ELECT: Any = importlib.import_module("kio.schema.elect_leaders.v2.request")
MOVE: Any = importlib.import_module("kio.schema.alter_partition_reassignments.v1.request")


def topic(
    name: str,
    partitions: int = -1,
    replication: int = -1,
    assignments: dict[int, tuple[int, ...]] | None = None,
    **configs: str | None,
) -> Any:
    return CREATE.CreatableTopic(
        name=name,
        num_partitions=partitions,
        replication_factor=replication,
        assignments=tuple(
            CREATE.CreatableReplicaAssignment(partition_index=index, broker_ids=nodes)
            for index, nodes in (assignments or {}).items()
        ),
        configs=tuple(
            CREATE.CreatableTopicConfig(name=key.replace("_", "."), value=value) for key, value in configs.items()
        ),
    )


def create(*topics: Any, validate_only: bool = False) -> Any:
    return CREATE.CreateTopicsRequest(topics=topics, timeout=60 * SECOND, validate_only=validate_only)


class TestCreateTopics:
    @pytest.fixture
    def api(self, topics: Topics, membership: Membership) -> CreateTopics:
        return CreateTopics(topics, membership)

    @pytest.mark.parametrize("version", range(2, 8))
    async def test_topics_are_created(self, api: CreateTopics, topics: Topics, version: int) -> None:
        creation = create(topic("orders", 3, 1, retention_ms="5000"), topic("defaults"))
        response = await send_in_version(api, version, creation)
        assert [(topic.name, topic.error_code) for topic in response.topics] == [
            ("orders", ErrorCode.none),
            ("defaults", ErrorCode.none),
        ]
        orders, defaults = topics.get("orders"), topics.get("defaults")
        assert orders is not None
        assert defaults is not None
        assert (orders.partitions, dict(orders.overrides)) == (3, {"retention.ms": "5000"})
        assert defaults.partitions == 2
        first = response.topics[0]
        if version >= 5:
            assert (first.num_partitions, first.replication_factor) == (3, 1)
            configs = {config.name: (config.value, config.config_source) for config in first.configs}
            assert configs["retention.ms"] == ("5000", 1)
            assert configs["flush"] == ("always", 5)
            of_defaults = {config.name: (config.value, config.config_source) for config in response.topics[1].configs}
            assert of_defaults["retention.ms"] == ("3600000", 4)
        assert version < 7 or first.topic_id == orders.topic_id

    @pytest.mark.parametrize("version", [2, 7])
    async def test_validation_creates_nothing(self, api: CreateTopics, topics: Topics, version: int) -> None:
        response = await send_in_version(
            api, version, create(topic("orders", 3), topic("bad name"), validate_only=True)
        )
        codes = [topic.error_code for topic in response.topics]
        assert codes == [ErrorCode.none, ErrorCode.invalid_topic_exception]
        assert topics.all() == []

    @pytest.mark.parametrize(
        ("creation", "code", "says"),
        [
            (topic("bad name"), ErrorCode.invalid_topic_exception, "bad name"),
            (topic("t", 0), ErrorCode.invalid_partitions, "at least 1 partition"),
            (topic("t", -2), ErrorCode.invalid_partitions, "at least 1 partition"),
            (topic("t", 10**6), ErrorCode.invalid_partitions, "1000000"),
            (topic("t", 1, 0), ErrorCode.invalid_replication_factor, "at least 1 replica"),
            (topic("t", 1, 3), ErrorCode.invalid_replication_factor, "3"),
            (topic("t", retention_ms="soon"), ErrorCode.invalid_config, "retention.ms must be a whole number"),
            (topic("t", no_such="1"), ErrorCode.invalid_config, "no.such"),
            (topic("t", retention_ms=None), ErrorCode.invalid_config, "no value"),
            (topic("t", 2, assignments={0: (5,), 1: (5,)}), ErrorCode.invalid_request, "must both be -1"),
            (topic("t", -1, 1, assignments={0: (5,)}), ErrorCode.invalid_request, "must both be -1"),
            (topic("t", assignments={0: (5,), 2: (5,)}), ErrorCode.invalid_replica_assignment, "[0, 2]"),
            (topic("t", assignments={0: (7,)}), ErrorCode.invalid_replica_assignment, "nodes of this cluster are [5]"),
            (topic("t", assignments={0: ()}), ErrorCode.invalid_replica_assignment, "empty"),
            (topic("t", assignments={0: (5, 5)}), ErrorCode.invalid_replica_assignment, "twice"),
        ],
    )
    async def test_invalid_topics_are_refused_with_a_message(
        self, api: CreateTopics, topics: Topics, creation: Any, code: ErrorCode, says: str
    ) -> None:
        (refused,) = (await send_request(api, create(creation))).topics
        assert refused.error_code is code
        assert says in refused.error_message
        assert (refused.num_partitions, refused.replication_factor) == (-1, -1)
        assert topics.all() == []

    async def test_partitions_can_be_placed_by_hand(self, api: CreateTopics, topics: Topics) -> None:
        (made,) = (await send_request(api, create(topic("placed", assignments={1: (5,), 0: (5,), 2: (5,)})))).topics
        assert (made.error_code, made.num_partitions, made.replication_factor) == (ErrorCode.none, 3, 1)
        found_topic = topics.get("placed")
        assert found_topic is not None
        assert found_topic.partitions == 3

    async def test_an_existing_or_duplicate_topic_is_refused(self, api: CreateTopics, topics: Topics) -> None:
        await topics.create("orders")
        response = await send_request(api, create(topic("orders"), topic("twice"), topic("twice"), topic("fine")))
        assert [(topic.name, topic.error_code) for topic in response.topics] == [
            ("orders", ErrorCode.topic_already_exists),
            ("twice", ErrorCode.invalid_request),
            ("fine", ErrorCode.none),
        ]
        assert topics.get("twice") is None

    async def test_names_that_metrics_cannot_distinguish_are_refused_within_a_request(
        self, api: CreateTopics, topics: Topics
    ) -> None:
        first, second = (await send_request(api, create(topic("a.b"), topic("a_b")))).topics
        assert (first.error_code, second.error_code) == (ErrorCode.none, ErrorCode.invalid_topic_exception)
        assert "'a.b'" in second.error_message
        assert [topic.name for topic in topics.all()] == ["a.b"]

    async def test_many_topics_are_created_and_deleted_in_few_steps(self, api: CreateTopics, topics: Topics) -> None:
        names, before = [f"t{number}" for number in range(200)], topics.states_revision
        created = (await send_request(api, create(*map(topic, names)))).topics
        assert [(topic.name, topic.error_code) for topic in created] == [(name, ErrorCode.none) for name in names]
        agreed = topics.states_revision
        assert agreed - before < len(names) / 4
        named = tuple(DELETE.DeleteTopicState(name=name, topic_id=None) for name in names)
        gone = (
            await send_request(DeleteTopics(topics), DELETE.DeleteTopicsRequest(topics=named, timeout=60 * SECOND))
        ).responses
        assert [(topic.name, topic.error_code) for topic in gone] == [(name, ErrorCode.none) for name in names]
        assert topics.all() == []
        assert topics.states_revision - agreed < len(names)


class TestDeleteTopics:
    @pytest.fixture
    def api(self, topics: Topics) -> DeleteTopics:
        return DeleteTopics(topics)

    async def test_a_topic_that_is_created_meanwhile_is_not_deleted(self, topics: Topics) -> None:
        class Service:
            """Checks letters for so long that another client creates a topic."""

            async def check_no_open_letters(self, _topic: str) -> None:
                await topics.create("late")

            async def topic_deleted(self, _topic: str) -> None: ...

        await topics.create("early")
        named = tuple(DELETE.DeleteTopicState(name=name, topic_id=None) for name in ("early", "late"))
        api = DeleteTopics(topics, cast("SubscriptionService", Service()))
        response = await send_request(api, DELETE.DeleteTopicsRequest(topics=named, timeout=SECOND))
        codes = [result.error_code for result in response.responses]
        assert codes == [ErrorCode.none, ErrorCode.unknown_topic_or_partition]
        assert [topic.name for topic in topics.all()] == ["late"]

    @pytest.mark.parametrize("version", range(1, 7))
    async def test_topics_are_deleted_by_name(self, api: DeleteTopics, topics: Topics, version: int) -> None:
        await topics.create("orders")
        request_class = codec.load_request_class(20, version)
        if version < 6:
            creation = request_class(topic_names=("orders", "nope"), timeout=SECOND)
        else:
            named = tuple(DELETE.DeleteTopicState(name=name, topic_id=None) for name in ("orders", "nope"))
            creation = request_class(topics=named, timeout=SECOND)
        response = await send_request(api, creation)
        assert [(result.name, result.error_code) for result in response.responses] == [
            ("orders", ErrorCode.none),
            ("nope", ErrorCode.unknown_topic_or_partition),
        ]
        assert version < 5 or "'nope' does not exist" in response.responses[1].error_message
        assert topics.all() == []

    async def test_topics_are_deleted_by_id(self, api: DeleteTopics, topics: Topics) -> None:
        made, unknown = await topics.create("orders"), uuid.uuid4()
        named = tuple(DELETE.DeleteTopicState(name=None, topic_id=topic_id) for topic_id in (made.topic_id, unknown))
        gone, missing = (await send_request(api, DELETE.DeleteTopicsRequest(topics=named, timeout=SECOND))).responses
        assert (gone.name, gone.topic_id, gone.error_code) == ("orders", made.topic_id, ErrorCode.none)
        assert (missing.name, missing.topic_id) == (None, unknown)
        assert missing.error_code is ErrorCode.unknown_topic_id

    async def test_ambiguous_names_are_refused(self, api: DeleteTopics, topics: Topics) -> None:
        made = await topics.create("orders")
        await topics.create("other")
        named = (
            DELETE.DeleteTopicState(name=None, topic_id=None),
            DELETE.DeleteTopicState(name="other", topic_id=uuid.uuid4()),
            DELETE.DeleteTopicState(name="orders", topic_id=None),
            DELETE.DeleteTopicState(name=None, topic_id=made.topic_id),
        )
        response = await send_request(api, DELETE.DeleteTopicsRequest(topics=named, timeout=SECOND))
        assert {result.error_code for result in response.responses} == {ErrorCode.invalid_request}
        assert len(topics.all()) == 2

    async def test_internal_topics_are_not_deleted(self, api: DeleteTopics, topics: Topics) -> None:
        await topics.create("__consumer_offsets", internal=True)
        named = (DELETE.DeleteTopicState(name="__consumer_offsets", topic_id=None),)
        (refused,) = (await send_request(api, DELETE.DeleteTopicsRequest(topics=named, timeout=SECOND))).responses
        assert refused.error_code is ErrorCode.policy_violation


class TestCreatePartitions:
    @pytest.fixture
    async def api(self, topics: Topics, membership: Membership) -> CreatePartitions:
        await topics.create("orders", partitions=2)
        return CreatePartitions(topics, membership)

    def grow(
        self, *creation: tuple[str, int], assignments: list[tuple[int, ...]] | None = None, validate_only: bool = False
    ) -> Any:
        by_hand = None
        if assignments is not None:
            by_hand = tuple(GROW.CreatePartitionsAssignment(broker_ids=nodes) for nodes in assignments)
        topics = tuple(
            GROW.CreatePartitionsTopic(name=name, count=count, assignments=by_hand) for name, count in creation
        )
        return GROW.CreatePartitionsRequest(topics=topics, timeout=SECOND, validate_only=validate_only)

    @pytest.mark.parametrize("version", range(4))
    async def test_topics_grow(self, api: CreatePartitions, topics: Topics, version: int) -> None:
        (checked,) = (await send_in_version(api, version, self.grow(("orders", 4), validate_only=True))).results
        assert checked.error_code is ErrorCode.none
        assert [topic.partitions for topic in topics.all()] == [2]
        (grown,) = (await send_in_version(api, version, self.grow(("orders", 4)))).results
        assert (grown.name, grown.error_code, grown.error_message) == ("orders", ErrorCode.none, None)
        assert [topic.partitions for topic in topics.all()] == [4]
        assert topics.partition("orders", 3).index == 3

    @pytest.mark.parametrize(
        ("creation", "assignments", "code", "says"),
        [
            (("nope", 3), None, ErrorCode.unknown_topic_or_partition, "does not exist"),
            (("orders", 2), None, ErrorCode.invalid_partitions, "already"),
            (("orders", 1), None, ErrorCode.invalid_partitions, "not be an increase"),
            (("orders", 10**6), None, ErrorCode.invalid_partitions, "1000000"),
            (("orders", 4), [(5,)], ErrorCode.invalid_replica_assignment, "2 partitions are added"),
            (("orders", 3), [(9,)], ErrorCode.invalid_replica_assignment, "node 9"),
            (("orders", 3), [()], ErrorCode.invalid_replica_assignment, "empty"),
        ],
    )
    async def test_invalid_partition_counts_are_refused(
        self, api: CreatePartitions, creation: tuple[str, int], assignments: Any, code: ErrorCode, says: str
    ) -> None:
        (refused,) = (await send_request(api, self.grow(creation, assignments=assignments))).results
        assert refused.error_code is code
        assert says in refused.error_message

    async def test_a_mirrored_topic_grows_only_through_its_mirror(
        self, api: CreatePartitions, topics: Topics, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copy = dataclasses.replace(topics.all()[0], mirror="paris")
        monkeypatch.setattr(topics, "get", lambda _name: copy)
        (refused,) = (await send_request(api, self.grow(("orders", 4)))).results
        assert refused.error_code is ErrorCode.policy_violation
        assert "copy of mirror 'paris'" in refused.error_message
        assert [topic.partitions for topic in topics.all()] == [2]

    async def test_new_partitions_can_be_placed_by_hand(self, api: CreatePartitions, topics: Topics) -> None:
        (grown,) = (await send_request(api, self.grow(("orders", 3), assignments=[(5,)]))).results
        assert grown.error_code is ErrorCode.none

    async def test_a_topic_named_twice_is_refused(self, api: CreatePartitions, topics: Topics) -> None:
        (refused,) = (await send_request(api, self.grow(("orders", 3), ("orders", 4)))).results
        assert refused.error_code is ErrorCode.invalid_request

    async def test_internal_topics_keep_their_partitions(self, api: CreatePartitions, topics: Topics) -> None:
        await topics.create("__consumer_offsets", partitions=1, internal=True)
        (refused,) = (await send_request(api, self.grow(("__consumer_offsets", 3)))).results
        assert refused.error_code is ErrorCode.policy_violation


class TestDeleteRecords:
    @pytest.fixture
    async def api(self, topics: Topics) -> DeleteRecords:
        await topics.create("orders", partitions=1)
        for number in range(4):
            await topics.partition("orders", 0).append(encode_batch([NewRecord(None, b"%d" % number, (), 1)]))
        return DeleteRecords(topics)

    async def cut(self, api: DeleteRecords, offset: int, *, name: str = "orders", version: int = 2) -> tuple[Any, ...]:
        partition = CUT.DeleteRecordsPartition(partition_index=0, offset=offset)
        topic = CUT.DeleteRecordsTopic(name=name, partitions=(partition,))
        response = await send_in_version(api, version, CUT.DeleteRecordsRequest(topics=(topic,), timeout=SECOND))
        (result,) = response.topics[0].partitions
        return result.error_code, result.low_watermark

    @pytest.mark.parametrize("version", range(3))
    async def test_the_start_of_the_log_is_deleted(self, api: DeleteRecords, topics: Topics, version: int) -> None:
        assert await self.cut(api, 2, version=version) == (ErrorCode.none, 2)
        assert topics.partition("orders", 0).log_start == 2
        assert await self.cut(api, 1, version=version) == (ErrorCode.none, 2)
        assert await self.cut(api, -1, version=version) == (ErrorCode.none, 4)
        assert topics.partition("orders", 0).log_start == 4

    async def test_deleting_missing_records_is_refused(self, api: DeleteRecords, topics: Topics) -> None:
        assert await self.cut(api, 5) == (ErrorCode.offset_out_of_range, -1)
        assert await self.cut(api, -2) == (ErrorCode.offset_out_of_range, -1)
        assert await self.cut(api, 0, name="nope") == (ErrorCode.unknown_topic_or_partition, -1)

    async def test_records_of_internal_topics_are_not_deleted(self, api: DeleteRecords, topics: Topics) -> None:
        await topics.create("__consumer_offsets", partitions=1, internal=True)
        assert await self.cut(api, 0, name="__consumer_offsets") == (ErrorCode.invalid_topic_exception, -1)


async def test_a_disconnected_client_does_not_leave_a_partial_topic(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, may_go_on = asyncio.Event(), asyncio.Event()
    run = CatalogDeclarations.run

    async def run_slowly(declarations: CatalogDeclarations, ask: Callable[[Catalog], Any]) -> Any:
        response = await run(declarations, ask)
        stored.set()
        await may_go_on.wait()
        return response

    monkeypatch.setattr(CatalogDeclarations, "run", run_slowly)
    creating = asyncio.create_task(topics.create("left"))
    await stored.wait()
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    may_go_on.set()
    await topics.create("next")
    assert topics.get("left") is not None


NAMES = tuple(f"t{number}" for number in range(3))
INSTANT = timedelta(0)


async def request_many_changes(topics: Topics, membership: Membership, kind: str) -> list[ErrorCode]:
    """Request a change of three topics, or of the twenty partitions of one."""
    if kind == "create":
        made = await send_request(CreateTopics(topics, membership), create(*(topic(name) for name in NAMES)))
        return [topic.error_code for topic in made.topics]
    if kind == "grow":
        creation = tuple(GROW.CreatePartitionsTopic(name=name, count=9, assignments=None) for name in NAMES)
        grown = GROW.CreatePartitionsRequest(topics=creation, timeout=INSTANT, validate_only=False)
        return [
            result.error_code for result in (await send_request(CreatePartitions(topics, membership), grown)).results
        ]
    if kind == "delete":
        named = tuple(DELETE.DeleteTopicState(name=name, topic_id=None) for name in NAMES)
        deleted = DELETE.DeleteTopicsRequest(topics=named, timeout=INSTANT)
        return [response.error_code for response in (await send_request(DeleteTopics(topics), deleted)).responses]
    indexes = tuple(range(20))
    if kind == "elect":
        partitions = ELECT.TopicPartitions(topic="wide", partitions=indexes)
        elected = ELECT.ElectLeadersRequest(election_type=0, topic_partitions=(partitions,), timeout=INSTANT)
        (result,) = (await send_request(ElectLeaders(topics), elected)).replica_election_results
        return [partition.error_code for partition in result.partition_result]
    places = tuple(MOVE.ReassignablePartition(partition_index=index, replicas=(5,)) for index in indexes)
    moved = MOVE.AlterPartitionReassignmentsRequest(
        timeout=INSTANT,
        allow_replication_factor_change=True,
        topics=(MOVE.ReassignableTopic(name="wide", partitions=places),),
    )
    (responded,) = (await send_request(AlterPartitionReassignments(topics, membership), moved)).responses
    return [partition.error_code for partition in responded.partitions]


@pytest.mark.parametrize(
    ("kind", "method", "begun_at_once"),
    [
        ("create", "create_all", 2),
        ("grow", "add_partitions", 1),
        ("delete", "delete_all", 2),
        ("elect", "elect", 16),
        ("move", "reassign", 1),
    ],
)
async def test_the_timeout_of_a_request_covers_all_of_its_items(
    topics: Topics, membership: Membership, monkeypatch: pytest.MonkeyPatch, kind: str, method: str, begun_at_once: int
) -> None:
    """Items not started when the timeout expires are not started, so that the response is not late."""
    await topics.create("wide", partitions=20)
    if kind != "create":
        for name in NAMES:
            await topics.create(name)
    begun, passed_s = 0, 0.0
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + passed_s)

    async def use_up_timeout(first: Any, *_others: Any, **_options: Any) -> Topic | list[Topic | None] | None:
        nonlocal begun, passed_s
        begun += len(first) if isinstance(first, list) else 1
        # Everything that starts concurrently has started when the time passes.
        await asyncio.sleep(0)
        passed_s += 2 * api_module._DEADLINE_S_MAX
        wide = topics.get("wide")
        return [wide] * len(first) if isinstance(first, list) else wide

    monkeypatch.setattr(topics, method, use_up_timeout)
    for together in (create_topics, delete_topics):
        monkeypatch.setattr(together, "_AT_ONCE_MAX", 2)
    codes = await request_many_changes(topics, membership, kind)
    assert begun == begun_at_once
    assert codes == [ErrorCode.none] * begun + [ErrorCode.request_timed_out] * (len(codes) - begun)
    assert len(codes) > begun

"""Every bound that a request sets on its response is kept: bytes, records, entries, and how long it may wait.

The first test looks for such fields in all requests: Kafka's, private ones and those over HTTP. Each is named below,
with the test that holds a response to it, or with the reason why it does not bound the response.
"""

from __future__ import annotations

import dataclasses
import re
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import httpx
import msgspec
import pytest
from conformance.question import Broker, KeptConnection
from kafka import KafkaConsumer
from kafka.structs import TopicPartition

from millstream.broker.kafka import served_apis
from millstream.broker.kafka.api import PrivateApi
from millstream.client.admin.browse import topics_page
from millstream.gateway.app import ROUTES
from millstream.protocol.messages.codec import PRIVATE_KEY_MIN, load_request_class
from millstream.protocol.messages.shape import is_entity, item_of, unwrapped
from millstream.protocol.private.subscriptions import SubscriptionClient, delivery_state
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.protocol_reference import api_entries
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

PRODUCE, FETCH, CREATE_TOPICS, INCREMENTAL_ALTER_CONFIGS = 0, 1, 19, 44
SHARE_GROUP_HEARTBEAT, SHARE_FETCH = 76, 78
GROUP_RESOURCE = 32
BOUND: Final = re.compile(r"(^|_)(max|min|limit|wait|timeout|interval|size)(_|$)")
TESTS: Final = Path(__file__).parents[1]
HERE: Final = "integration/test_response_bounds.py::"
ADMINISTRATION: Final = "unit/kafka/test_topic_administration.py::test_the_timeout_of_a_request_covers_all_of_its_items"
JOBS: Final = (
    "unit/pipelines/test_jobs_child.py::test_a_job_runs_once_and_again_on_request_with_its_progress_and_its_log"
)

KEPT: Mapping[str, str] = {
    "Fetch.max_bytes": HERE + "test_a_fetch_keeps_to_its_bytes",
    "Fetch.partition_max_bytes": HERE + "test_a_fetch_keeps_to_its_bytes",
    "Fetch.max_wait": HERE + "test_a_fetch_waits_no_longer_than_it_may",
    "ShareFetch.max_bytes": "unit/kafka/test_share_apis.py::test_the_requested_bytes_are_not_exceeded",
    "ShareFetch.max_records": (
        "unit/kafka/test_share_apis.py::test_batches_are_delivered_whole_unless_records_are_limited"
    ),
    "ShareFetch.max_wait": "unit/kafka/test_share_apis.py::test_a_request_waits_for_new_messages",
    "DescribeTopicPartitions.response_partition_limit": (
        "unit/kafka/test_describe_topic_partitions.py::test_the_pages_cover_everything_once"
    ),
    "Produce.timeout": (
        "unit/kafka/test_produce_given_up.py::"
        "test_timed_out_requests_get_a_response_and_are_freed_while_the_high_watermark_stands_still"
    ),
    "CreateTopics.timeout": ADMINISTRATION,
    "CreatePartitions.timeout": ADMINISTRATION,
    "DeleteTopics.timeout": ADMINISTRATION,
    "ElectLeaders.timeout": ADMINISTRATION,
    "AlterPartitionReassignments.timeout": ADMINISTRATION,
    "SubscriptionReceive.max_records": HERE + "test_a_receive_keeps_to_its_records_and_bytes",
    "SubscriptionReceive.max_bytes": HERE + "test_a_receive_keeps_to_its_records_and_bytes",
    "SubscriptionReceive.wait_ms": HERE + "test_a_receive_waits_no_longer_than_it_may",
    "DeliveryState.wait_ms": HERE + "test_a_delivery_is_not_waited_for_beyond_the_wait",
    "SubscriptionList.leases_max": HERE + "test_described_leases_keep_to_their_limit",
    "TopicList.limit": HERE + "test_pages_of_topics_keep_to_their_limit",
    "SchemaList.limit": HERE + "test_pages_of_the_registry_keep_to_their_limit",
    "PublishOnce.timeout_ms": (
        "unit/kafka/test_publish_once.py::test_a_duplicate_is_acknowledged_together_with_the_original"
    ),
    "PipelineRuns.limit": JOBS,
    "PipelineRunLog.bytes_max": JOBS,
    "POST /subscriptions/{subscription}/messages:pull max": HERE + "test_a_pull_keeps_to_its_records_and_bytes",
    "POST /subscriptions/{subscription}/messages:pull max_bytes": HERE + "test_a_pull_keeps_to_its_records_and_bytes",
    "POST /subscriptions/{subscription}/messages:pull wait_ms": HERE + "test_a_pull_waits_no_longer_than_it_may",
    "GET /subscriptions/{subscription}/events max": HERE + "test_a_stream_leases_no_more_at_once_than_it_may",
    "GET /subscriptions/{subscription}/leases limit": HERE + "test_leases_keep_to_their_limit",
    "GET /dead-letters/{name} limit": HERE + "test_dead_letters_keep_to_their_limit",
    "POST /dead-letters/{name}/redrive limit": HERE + "test_dead_letters_keep_to_their_limit",
    "POST /dead-letters/{name}/purge limit": HERE + "test_dead_letters_keep_to_their_limit",
    "GET /pipelines/{pipeline}/runs limit": JOBS,
}
_MEMBER: Final = "how long the group waits for the member, not for the response"
_RECORDS_ARRIVE: Final = "less than that makes the response wait; it limits nothing"
_SETTING: Final = "a setting that is stored"
_NO_WAIT: Final = "the response waits for nothing"
NO_BOUND: Mapping[str, str] = {
    "Fetch.min_bytes": _RECORDS_ARRIVE,
    "ShareFetch.min_bytes": _RECORDS_ARRIVE,
    "ShareFetch.batch_size": "how acquired records are divided into batches in the response",
    "JoinGroup.session_timeout": _MEMBER,
    "JoinGroup.rebalance_timeout": _MEMBER,
    "ConsumerGroupHeartbeat.rebalance_timeout": _MEMBER,
    "InitProducerId.transaction_timeout": "how long a transaction may last",
    "UpdateFeatures.max_version_level": "the level that is asked for",
    "UpdateFeatures.timeout": _NO_WAIT,
    "DeleteRecords.timeout": _NO_WAIT,
    "ListOffsets.timeout": _NO_WAIT,
    "ListPartitionReassignments.timeout": _NO_WAIT,
    "MirrorExpose.wait_ms": "between nodes; the wait ends a node's own turn",
    "MirrorReverse.timeout_ms": "the way back is declared at once; the time is that of a switch",
    "MirrorSwitch.timeout_ms": "between clusters: integration/test_mirror.py switches within it or refuses",
    "GET /clients interval_ms": "over how long rates are measured",
    **{
        f"{method} {field}": _SETTING
        for method in ("POST /subscriptions", "PATCH /subscriptions/{subscription}")
        for field in (
            *("leases_max", "backoff_min_ms", "backoff_max_ms", "in_flight_max"),
            *("push_timeout_ms", "push_in_flight_max"),
        )
    },
}


def _kafka_fields(entity: type[Any]) -> Iterator[str]:
    for field in dataclasses.fields(entity):
        yield field.name
        kind, _ = unwrapped(field.type)
        inner = item_of(kind) or kind
        if is_entity(inner):
            yield from _kafka_fields(inner)


def _private_apis(parent: type[Any] = PrivateApi) -> Iterator[type[Any]]:
    for api in parent.__subclasses__():
        if hasattr(api, "request_type"):
            yield api
        yield from _private_apis(api)


def _bounds() -> Iterator[str]:
    """Every field of a request that looks like a bound."""
    for entry in api_entries():
        if entry.key < PRIVATE_KEY_MIN:
            for name in _kafka_fields(load_request_class(entry.key, entry.newest)):
                yield f"{entry.name}.{name}"
    for api in _private_apis():
        for field in msgspec.structs.fields(api.request_type):
            yield f"{api.__name__}.{field.name}"
    for route in ROUTES:
        for kind in (route.query, route.body):
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                for field in msgspec.structs.fields(kind):
                    yield f"{route.method} {route.path} {field.name}"


def test_every_bound_of_a_request_has_a_test() -> None:
    assert served_apis  # Imports every API.
    names = {name for name in _bounds() if BOUND.search(re.split(r"[. ]", name)[-1])}
    assert names == KEPT.keys() | NO_BOUND.keys()
    assert not KEPT.keys() & NO_BOUND.keys()
    for reference in KEPT.values():
        path, _, name = reference.partition("::")
        assert f"def {name}(" in (TESTS / path).read_text(), reference


# -- Kafka's requests ---------------------------------------------------------------------------------------------

BATCH: Final = 40_000
PARTITIONS: Final = 4


@pytest.fixture(scope="module")
def filled(server: Server) -> tuple[str, str]:
    """A topic with three batches of about 40 kB in each of its partitions, and its id."""
    name = "bounds-of-fetches"
    broker = Broker(server.kafka)
    topic = {"name": name, "num_partitions": PARTITIONS, "replication_factor": 1}
    (created,) = broker.ask(CREATE_TOPICS, 7, {"topics": [topic], "timeout": 30_000})["topics"]
    batch = bytes(encode_batch([NewRecord(None, b"x" * BATCH, (), 0)]))
    for partition in range(PARTITIONS):
        for _ in range(3):
            data = {"index": partition, "records": batch}
            produced = {"acks": -1, "timeout": 30_000, "topic_data": [{"name": name, "partition_data": [data]}]}
            (response,) = broker.ask(PRODUCE, 9, produced)["responses"]
            assert response["partition_responses"][0]["error_code"] == "none"
    return name, created["topic_id"]


def _fetch(server: Server, filled: tuple[str, str], version: int, **overrides: Any) -> list[int]:
    """Fetch all partitions from the start, or another offset; how many bytes of records each has in the response."""
    name, topic_id = filled
    partition_max_bytes, offset = overrides.pop("partition_max_bytes", 1 << 20), overrides.pop("offset", 0)
    partitions = [
        {"partition": index, "fetch_offset": offset, "partition_max_bytes": partition_max_bytes}
        for index in range(PARTITIONS)
    ]
    topic = {"topic_id": UUID(topic_id)} if version >= 13 else {"topic": name}
    request = {"max_wait": 0, "min_bytes": 0, "isolation_level": 0, **overrides}
    response = Broker(server.kafka).ask(FETCH, version, request | {"topics": [topic | {"partitions": partitions}]})
    assert isinstance(response, dict), response
    return [len(partition["records"] or b"") for topic in response["responses"] for partition in topic["partitions"]]


@pytest.mark.parametrize("version", [4, 7, 12, 13, 18])
@pytest.mark.parametrize("max_bytes", [0, 1, 50_000, 90_000, 200_000])
@pytest.mark.parametrize("partition_max_bytes", [0, 1, 50_000, 100_000])
def test_a_fetch_keeps_to_its_bytes(
    server: Server, filled: tuple[str, str], version: int, max_bytes: int, partition_max_bytes: int
) -> None:
    """Only the first partition that has records may exceed both bounds, by its first batch."""
    sizes = _fetch(server, filled, version, max_bytes=max_bytes, partition_max_bytes=partition_max_bytes)
    first, *others = [size for size in sizes if size]
    assert first < BATCH * 1.1 or first <= min(max_bytes, partition_max_bytes)
    assert not others or first + sum(others) <= max_bytes
    assert all(size <= partition_max_bytes for size in others)


@pytest.mark.parametrize("max_wait", [0, 1, 50])
def test_a_fetch_waits_no_longer_than_it_may(server: Server, filled: tuple[str, str], max_wait: int) -> None:
    """There is nothing to wait for: without its bound, the request would get no response."""
    assert not any(_fetch(server, filled, 12, max_bytes=1 << 20, offset=3, min_bytes=1, max_wait=max_wait))


# -- small responses from many partitions that always have more: none starves -------------------------------------


def _served(response: Any) -> list[int]:
    """The partitions of which a response has records."""
    partitions = [
        (partition["partition_index"], partition["records"])
        for topic in response["responses"]
        for partition in topic["partitions"]
    ]
    return [index for index, records in partitions if records]


def test_a_session_of_small_fetches_gets_every_partition(server: Server, filled: tuple[str, str]) -> None:
    """The client never moves on, so every partition has more records each time."""
    broker, (_, topic_id) = Broker(server.kafka), filled
    partitions = [{"partition": index, "fetch_offset": 0, "partition_max_bytes": 1} for index in range(PARTITIONS)]
    topics = [{"topic_id": UUID(topic_id), "partitions": partitions}]
    request: dict[str, Any] = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1, "session_id": 0}
    served: list[int] = []
    for epoch in range(2 * PARTITIONS):
        response = broker.ask(FETCH, 16, request | {"session_epoch": epoch, "topics": topics})
        request, topics = request | {"session_id": response["session_id"]}, []
        served += _served(response)
    assert served == [*range(PARTITIONS)] * 2


@pytest.mark.parametrize("enable_incremental_fetch_sessions", [False, True])
def test_a_client_of_small_fetches_gets_every_partition(
    server: Server, filled: tuple[str, str], *, enable_incremental_fetch_sessions: bool
) -> None:
    name, _ = filled
    consumer = KafkaConsumer(
        bootstrap_servers=server.kafka,
        fetch_max_bytes=1,
        max_partition_fetch_bytes=1,
        enable_incremental_fetch_sessions=enable_incremental_fetch_sessions,
    )
    with closing(consumer):
        places = [TopicPartition(name, index) for index in range(PARTITIONS)]
        consumer.assign(places)
        consumer.seek_to_beginning()
        # No partition is read to its end before each had its turn.
        seen = [next(consumer).partition for _ in range(PARTITIONS)]
    assert sorted(seen) == [*range(PARTITIONS)]


def test_small_share_fetches_get_every_partition(server: Server, filled: tuple[str, str], topic: str) -> None:
    """Even if the session is opened by a request for no bytes, which gets none."""
    name, topic_id = filled
    broker = KeptConnection(server.kafka)
    earliest = {"name": "share.auto.offset.reset", "config_operation": 0, "value": "earliest"}
    group = {"resource_type": GROUP_RESOURCE, "resource_name": topic, "configs": [earliest]}
    broker.ask(INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [group], "validate_only": False})
    who = {"group_id": topic, "member_id": urlsafe_b64encode(uuid4().bytes)[:22].decode()}
    joined = broker.ask(SHARE_GROUP_HEARTBEAT, 1, who | {"member_epoch": 0, "subscribed_topic_names": [name]})
    assert joined["error_code"] == "none"
    partitions = [{"partition_index": index, "acknowledgement_batches": []} for index in range(PARTITIONS)]
    topics = [{"topic_id": UUID(topic_id), "partitions": partitions}]
    limits = {"max_wait": 30_000, "min_bytes": 1, "max_bytes": 1, "max_records": 1, "batch_size": 1}
    request: dict[str, Any] = who | limits | {"forgotten_topics_data": []}
    served: list[int] = []
    with closing(broker):
        opened = request | {"share_session_epoch": 0, "topics": topics, "max_wait": 0, "max_bytes": 0}
        assert _served(broker.ask(SHARE_FETCH, 2, opened)) == []
        for epoch in range(1, 2 * PARTITIONS + 1):
            served += _served(broker.ask(SHARE_FETCH, 2, request | {"share_session_epoch": epoch, "topics": []}))
    assert sorted(served[:PARTITIONS]) == sorted(served[PARTITIONS:]) == [*range(PARTITIONS)]


@pytest.mark.parametrize("wait_ms", [0, 30_000])
async def test_small_receives_get_every_partition_whatever_others_ask_for(
    server: Server, filled: tuple[str, str], topic: str, wait_ms: int
) -> None:
    """Requests for another subscription come between them, as many as make a common count of turns stand still."""
    name, _ = filled
    async with Client.connect(server.kafka) as client:
        subscriptions = await _subscribe(client, topic, name)
        await _subscribe(client, f"{topic}-2", name)
        served: list[int] = []
        for _ in range(2 * PARTITIONS):
            for _ in range(PARTITIONS - 1):
                await subscriptions.receive(f"{topic}-2", "w", max_records=1, max_bytes=1, wait_ms=0)
            (message,) = await subscriptions.receive(topic, "w", max_records=1, max_bytes=1, wait_ms=wait_ms)
            served.append(message.partition)
    assert sorted(served[:PARTITIONS]) == sorted(served[PARTITIONS:]) == [*range(PARTITIONS)]


def test_small_pulls_get_every_partition(http: httpx.Client, filled: tuple[str, str], topic: str) -> None:
    body = {"name": topic, "topics": [filled[0]], "start": "start"}
    assert http.post("/v1/subscriptions", json=body).status_code == 201
    served = [_pull(http, topic, max=1, max_bytes=1, wait_ms=30_000)[0]["partition"] for _ in range(2 * PARTITIONS)]
    assert sorted(served[:PARTITIONS]) == sorted(served[PARTITIONS:]) == [*range(PARTITIONS)]


def test_a_pull_from_several_partitions_keeps_to_its_bytes(
    http: httpx.Client, filled: tuple[str, str], topic: str
) -> None:
    body = {"name": topic, "topics": [filled[0]], "start": "start"}
    assert http.post("/v1/subscriptions", json=body).status_code == 201
    for max_bytes in (1, 50_000, 50_000, 90_000):
        pulled = _pull(http, topic, max=100, max_bytes=max_bytes, wait_ms=30_000)
        assert len(pulled) == 1 or len(pulled) * BATCH <= max_bytes


# -- private requests ---------------------------------------------------------------------------------------------


async def _publish(client: Client, topic: str, count: int, size: int = 1000) -> None:
    for number in range(count):
        batch = encode_batch([NewRecord(None, bytes([number]) * size, (), 0)])
        await client.metadata([topic], create=True)
        await client.produce(topic, 0, batch)


async def _subscribe(client: Client, name: str, topic: str) -> SubscriptionClient:
    subscriptions = SubscriptionClient(client)
    await subscriptions.create(name, [topic], {"share.auto.offset.reset": "earliest"})
    return subscriptions


@pytest.mark.parametrize(
    ("max_records", "max_bytes", "expected"), [(3, 1 << 20, 3), (100, 2500, 2), (100, 1, 1), (1, 1, 1)]
)
async def test_a_receive_keeps_to_its_records_and_bytes(
    server: Server, topic: str, max_records: int, max_bytes: int, expected: int
) -> None:
    async with Client.connect(server.kafka) as client:
        await _publish(client, topic, 10)
        subscriptions = await _subscribe(client, topic, topic)
        for _ in range(3):
            messages = await subscriptions.receive(topic, "w", max_records=max_records, max_bytes=max_bytes)
            assert len(messages) == expected


async def test_a_receive_waits_no_longer_than_it_may(server: Server, topic: str) -> None:
    async with Client.connect(server.kafka) as client:
        await _publish(client, topic, 1)
        subscriptions = await _subscribe(client, topic, topic)
        assert len(await subscriptions.receive(topic, "w", max_records=10)) == 1
        for wait_ms in (0, 1, 50):
            assert await subscriptions.receive(topic, "w", max_records=10, wait_ms=wait_ms) == []


async def test_a_delivery_is_not_waited_for_beyond_the_wait(server: Server, topic: str) -> None:
    async with Client.connect(server.kafka) as client:
        await _publish(client, topic, 1)
        await _subscribe(client, topic, topic)
        for wait_ms in (0, 50):
            assert (await delivery_state(client, topic, topic, 0, 0, wait_ms=wait_ms)).state == "waiting"


async def test_described_leases_keep_to_their_limit(server: Server, topic: str) -> None:
    async with Client.connect(server.kafka) as client:
        await _publish(client, topic, 5)
        subscriptions = await _subscribe(client, topic, topic)
        for number in range(5):
            assert len(await subscriptions.receive(topic, f"worker-{number}", max_records=1)) == 1
        for leases_max in (0, 1, 3, 100):
            (described,) = await subscriptions.describe([topic], leases_max=leases_max)
            assert len(described.get("leases", ())) == min(leases_max, 5)


async def test_pages_of_topics_keep_to_their_limit(server: Server, topic: str) -> None:
    async with Client.connect(server.kafka) as client:
        for number in range(4):
            await _publish(client, f"{topic}-{number}", 1)
        for limit in (0, 1, 3, 10):
            page = await topics_page(client, search=topic, limit=limit)
            assert (len(page.topics), page.total) == (min(limit, 4), 4)


# -- over HTTP ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http}", timeout=60.0) as client:
        yield client


def test_pages_of_the_registry_keep_to_their_limit(http: httpx.Client, topic: str) -> None:
    for number in range(4):
        body = {"schema": '{"type": "string"}'}
        assert http.post(f"/registry/subjects/{topic}-{number}/versions", json=body).status_code == 200
    for limit in (0, 1, 3, 10):
        overrides: dict[str, str | int] = {"subjectPrefix": topic, "offset": 0, "limit": limit}
        # As in Confluent's registry, 0 is no limit.
        most = limit or 10
        assert len(http.get("/registry/subjects", params=overrides).json()) == min(most, 4)
        assert len(http.get("/registry/schemas", params=overrides).json()) == min(most, 4)
        assert len(http.get(f"/registry/subjects/{topic}-0/versions", params=overrides).json()) == min(most, 1)
    for wrong in ("many", "--1", "9" * 30):
        refused = http.get("/registry/subjects", params={"limit": wrong})
        assert (refused.status_code, refused.json()["message"]) == (400, f"limit must be a whole number, not {wrong!r}")


def _messages(http: httpx.Client, topic: str, count: int, *, size: int = 1000, **settings: Any) -> None:
    """A topic and a subscription with messages of a thousand bytes each, or of another size."""
    for _ in range(count):
        assert http.post(f"/v1/topics/{topic}/messages", content=b"x" * size).status_code == 201
    body = {"name": topic, "topics": [topic], "start": "start", **settings}
    assert http.post("/v1/subscriptions", json=body).status_code == 201


def _pull(http: httpx.Client, name: str, **overrides: Any) -> list[Any]:
    response = http.post(f"/v1/subscriptions/{name}/messages:pull", json=overrides)
    assert response.status_code == 200, response.text
    messages: list[Any] = response.json()["messages"]
    return messages


def test_a_pull_keeps_to_its_records_and_bytes(http: httpx.Client, topic: str) -> None:
    _messages(http, topic, 12)
    assert len(_pull(http, topic, max=3)) == 3
    for max_bytes in (1, 1500, 3000):
        pulled = _pull(http, topic, max=100, max_bytes=max_bytes)
        assert len(pulled) == 1 or sum(len(message["value"]) for message in pulled) <= max_bytes
        assert pulled


def test_a_pull_waits_no_longer_than_it_may(http: httpx.Client, topic: str) -> None:
    _messages(http, topic, 1)
    assert len(_pull(http, topic, max=10)) == 1
    for wait_ms in (0, 1, 50):
        assert _pull(http, topic, max=10, wait_ms=wait_ms) == []


def test_a_stream_leases_no_more_at_once_than_it_may(http: httpx.Client, topic: str) -> None:
    # Encoding large messages takes longer than a millisecond, and leases of one millisecond are listed as one range.
    _messages(http, topic, 5, size=900_000)
    with http.stream("GET", f"/v1/subscriptions/{topic}/events", params={"max": 2}) as stream:
        events = (line for line in stream.iter_lines() if line.startswith("data: "))
        assert [next(events), next(events)]
        # It goes on leasing while its client reads.
        leases = http.get(f"/v1/subscriptions/{topic}/leases").json()["leases"]
        assert leases
        assert all(lease["end"] - lease["start"] <= 2 for lease in leases)


def test_leases_keep_to_their_limit(http: httpx.Client, topic: str) -> None:
    _messages(http, topic, 5)
    for worker in range(5):
        assert len(_pull(http, topic, max=1, worker=f"worker-{worker}")) == 1
    for limit in (1, 3, 100):
        leases = http.get(f"/v1/subscriptions/{topic}/leases", params={"limit": limit}).json()["leases"]
        assert len(leases) == min(limit, 5)


def test_dead_letters_keep_to_their_limit(http: httpx.Client, topic: str) -> None:
    _messages(http, topic, 6)
    settle = {"reject": [message["lease"] for message in _pull(http, topic, max=6)]}
    assert http.post(f"/v1/subscriptions/{topic}/messages:settle", json=settle).json()["failed"] == 0
    letters = f"/v1/dead-letters/{topic}-dlq"
    # A message that is rejected is moved to its topic after the response.
    wait_until(lambda: len(http.get(letters, params={"limit": 100}).json().get("letters", ())) == 6)
    assert len(http.get(letters, params={"limit": 2}).json()["letters"]) == 2
    assert http.post(f"{letters}/redrive", json={"limit": 2}).json()["done"] == 2
    assert http.post(f"{letters}/purge", json={"limit": 1}).json()["done"] == 1
    assert len(http.get(letters, params={"limit": 100}).json()["letters"]) == 3

"""The lag of pipelines on a real server, including pipelines that no node runs."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import uuid
from collections import Counter
from typing import Any, ClassVar

import httpx
import pytest
from confluent_kafka import Producer

from millstream.client.admin.backlog import Backlogs, reader_of
from millstream.client.admin.topics import find_topic
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.pipeline import Pipeline, PipelineKind, Rule
from millstream.core.topic import TopicPartition
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.group_offsets import commit_offsets
from millstream_testing.command import CommandLine
from millstream_testing.pipeline_script import landing
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

WAIT_S = 60.0


@pytest.fixture
def topic(server: Server) -> str:
    """A topic with three messages in one of its two partitions."""
    millstream = CommandLine(server.kafka)
    name = f"lag-{uuid.uuid4().hex[:8]}"
    assert millstream("topic", "create", name, "--partitions", "2").code == 0
    for value in "abc":
        assert millstream("publish", name, value, "--key", "k").code == 0
    return name


async def lags(client: Client, *pipelines: Pipeline) -> dict[str, int]:
    return await Backlogs(client).lags(
        [reader for pipeline in pipelines if (reader := reader_of(pipeline)) is not None]
    )


def of_kinds(topic: str) -> list[Pipeline]:
    route = Pipeline(
        pipeline_id=uuid.uuid4(),
        name=f"{topic}-route",
        kind=PipelineKind.ROUTE,
        rules=(Rule(name="all", topic=topic, targets=("others",)),),
    )
    sql = {"sql": f"SELECT * FROM `{topic}`", "into": "others"}
    transform = dataclasses.replace(route, name=f"{topic}-sql", kind=PipelineKind.TRANSFORM, overrides=sql, rules=())
    return [landing(f"{topic}-land", topics=topic), route, transform]


async def test_the_lag_is_the_distance_between_the_group_and_the_end(server: Server, topic: str) -> None:
    kinds = of_kinds(topic)
    newest = landing(f"{topic}-newest", topics=topic, **{"from": "latest"})
    fitting = Pipeline(
        pipeline_id=uuid.uuid4(), name="fit", kind=PipelineKind.LAND, overrides={"pattern": f"{topic}.*"}
    )
    missing, odd = landing("missing", topics="nowhere"), landing("odd", topics="a", every="x")
    async with Client.connect(server.kafka) as client:
        lag_by_name = await lags(client, *kinds, newest, fitting, missing, odd)
        assert lag_by_name == {**{kind.name: 3 for kind in kinds}, newest.name: 0, "fit": 3}
        (used,) = [number for number in range(2) if (await client.list_offsets(topic, {number: -1}))[number].offset]
        for pipeline, offset in zip((*kinds, newest), (1, 3, 9, 2), strict=True):
            await commit_offsets(client, pipeline.group, {TopicPartition(topic, PartitionIndex(used)): offset})
        assert list((await lags(client, *kinds, newest)).values()) == [2, 0, 0, 1]


async def test_uncommitted_messages_do_not_count(server: Server, topic: str) -> None:
    producer = Producer({"bootstrap.servers": server.kafka, "transactional.id": topic})
    producer.init_transactions(WAIT_S)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.produce(topic, b"open", partition=1)
    producer.flush(WAIT_S)
    reader = reader_of(landing("mine", topics=topic))
    assert reader is not None
    async with Client.connect(server.kafka) as client:
        backlogs, topic_entry = Backlogs(client), await find_topic(client, topic)
        assert await backlogs.lags([reader]) == {"mine": 3}
        assert await backlogs.in_topic([reader], topic_entry) == {"mine": (0, 3)}
        producer.commit_transaction(WAIT_S)
        # The markers, which have offsets too, may arrive a moment later.
        async with asyncio.timeout(WAIT_S):
            while await backlogs.lags([reader]) != {"mine": 7}:
                await asyncio.sleep(0.05)
        offsets = await client.list_offsets(topic, {0: -1, 1: -1})
        ends = {
            TopicPartition(topic, PartitionIndex(number)): partition.offset for number, partition in offsets.items()
        }
        await commit_offsets(client, reader.group, ends)
        assert await backlogs.lags([reader]) == {"mine": 0}
        assert await backlogs.in_topic([reader], topic_entry) == {"mine": (7, 0)}


class CountingClient(Client):
    """Counts requests by message type."""

    sent: ClassVar[Counter[str]] = Counter()

    async def send(self, node: NodeId | None, request: Any, *, timeout_s: float | None = None) -> Any:
        """Send it, and count it."""
        self.sent[type(request).__name__] += 1
        return await super().send(node, request, timeout_s=timeout_s)


async def test_many_pipelines_share_requests(server: Server, topic: str) -> None:
    fitting = landing("fit", topics="", pattern=f"{topic}.*", **{"from": "latest"})
    others = [landing(f"{topic}-{at}", topics=topic) for at in range(30)]
    async with CountingClient.connect(server.kafka) as client:
        assert await lags(client, fitting, *others) == {"fit": 0, **{other.name: 3 for other in others}}
    assert client.sent == {"MetadataRequest": 1, "FindCoordinatorRequest": 1, "OffsetFetchRequest": 1}


def test_a_stopped_pipeline_has_a_lag_in_lists_and_metrics(server: Server, topic: str) -> None:
    millstream = CommandLine(server.kafka)
    assert millstream("pipeline", "create", "land", topic, "--topic", topic, "--stopped").code == 0
    sample = re.compile(rf'^millstream_pipeline_lag\{{pipeline="{topic}"\}} 3(?:\.0)?$', re.MULTILINE)
    # After a slow measurement, the next one comes half a minute later.
    wait_until(lambda: sample.search(server.metrics()))
    shown = httpx.get(f"http://{server.http}/v1/pipelines/{topic}", timeout=WAIT_S).json()
    assert (shown["state"], shown["lag"], shown["report"]) == ("stopped", 3, None)
    (pipeline_row,) = [
        pipeline
        for pipeline in millstream("pipeline", "list", "--json").document["pipelines"]
        if topic in pipeline.values()
    ]
    assert pipeline_row["lag"] == 3
    assert millstream("pipeline", "delete", topic, "--yes").code == 0

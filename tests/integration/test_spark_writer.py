"""The requests of Spark tasks and drivers to a real broker when rows are written, without Spark."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark import TaskContext
from pyspark.sql.types import StringType, StructField, StructType

from millstream.client.admin.transactions import ONGOING, PREPARED, list_transactions
from millstream.core.errors import BrokerUnreachable, ProducerFenced, UnknownTopic
from millstream.core.ids import NodeId
from millstream.pipelines.source import link as links
from millstream.pipelines.source import target_topic
from millstream.pipelines.source.batch_commit import Batch, Part
from millstream.pipelines.source.link import Link, link_to
from millstream.pipelines.source.options import WriteOptions, write_options
from millstream.pipelines.source.row_producer import RowProducer
from millstream.pipelines.source.source import MillstreamSource
from millstream.pipelines.source.writer import TopicStreamWriter, TopicWriter
from millstream.protocol.private.transactions import Transactions
from millstream.protocol.wire import channel
from millstream.protocol.wire.channel import Pool
from millstream.protocol.wire.client import Client
from millstream_testing.server import Server

WAIT_S = 60.0
ROWS = pa.RecordBatch.from_pydict({"value": ["one", "two", "three"]})
SCHEMA = StructType([StructField("value", StringType())])


@pytest.fixture
def options(server: Server, topic: str) -> WriteOptions:
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(WAIT_S)
    given_options = {
        "kafka.bootstrap.servers": server.kafka,
        "topic": topic,
        "checkpointLocation": f"checkpoints/{topic}",
    }
    return write_options(given_options)


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A broker without Millstream's private requests: it advertises them to no client."""
    monkeypatch.setattr(channel, "_API_VERSIONS_SENT", 2)
    monkeypatch.setattr(links, "_links", {})
    target_topic._check.cache_clear()
    yield
    links._close_all()
    target_topic._check.cache_clear()


def of_task(monkeypatch: pytest.MonkeyPatch, query: str, batch: int, run: str) -> None:
    """Make this process look like a task of a stream."""
    reported = {"sql.streaming.queryId": query, "streaming.sql.batchId": str(batch), "spark.jobGroup.id": run}
    context = SimpleNamespace(getLocalProperty=reported.get, partitionId=lambda: 0)
    monkeypatch.setattr(TaskContext, "get", lambda: context)


def left_open(options: WriteOptions, batch: Batch) -> None:
    """Write as a task that is killed midway."""
    link = _link(options)
    identity = link.call(Transactions(link.client).begin(batch.new_attempt(0)))
    producer = RowProducer(link, options, identity, transactional=True)
    producer.write(ROWS)
    producer.flush()


def _link(options: WriteOptions) -> Link:
    return link_to(options.brokers, client_id=options.client_id, timeout_s=options.timeout_s)


def open_transactions(options: WriteOptions, query: str) -> list[str]:
    async def find() -> list[str]:
        async with Client.connect(options.brokers) as client:
            transactions = await list_transactions(client, matching=f"spark/{query}/.*")
            return [
                transaction.transactional_id for transaction in transactions if transaction.state in (ONGOING, PREPARED)
            ]

    return asyncio.run(find())


def values(options: WriteOptions, count: int) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": options.brokers, "group.id": "g", "log_level": 0})
    consumer.assign([TopicPartition(options.topic or "", 0, 0)])
    messages = consumer.consume(count, WAIT_S)
    consumer.close()
    return [message.value() or b"" for message in messages]


@pytest.mark.parametrize("is_returned", [False, True])
def test_a_failed_batch_of_a_stream_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, options: WriteOptions, topic: str, is_returned: bool
) -> None:
    query = f"query-of-{topic}"
    writer, of_driver = TopicStreamWriter(options), TopicStreamWriter(options)
    other = Batch(f"{query}-other", 3, "another", TopicStreamWriter(options)._stream + "0")
    killed = Batch(query, 3, "thisrun", writer._stream)
    for batch in (Batch(query, 3, "before", writer._stream), killed, other):
        left_open(options, batch)
    # All that a driver receives: the number of the batch, and the parts of the finished tasks.
    of_driver.abort([None, Part(killed, 3, None) if is_returned else None], 3)
    assert open_transactions(options, query) == []
    assert len(open_transactions(options, other.query)) == 1
    of_driver.abort([None], 7)
    of_task(monkeypatch, query, 3, "this-run")
    with pytest.raises(ProducerFenced):
        writer.write(iter([ROWS]))
    # The batch is resumed by another run.
    of_task(monkeypatch, query, 3, "next-run")
    of_driver.commit([writer.write(iter([ROWS]))], 3)
    again = writer.write(iter([ROWS]))
    assert isinstance(again, Part)
    assert (again.rows, again.member) == (3, None)
    link = _link(options)
    link.call(Transactions(link.client).abort_batch(other.query, 3))


def test_streams_are_distinguished_by_their_checkpoint_locations(topic: str) -> None:
    names = [TopicStreamWriter(write_options({"checkpointLocation": place}))._stream for place in ("a", "a", "b")]
    assert names[0] == names[1] != names[2]
    assert TopicStreamWriter(write_options({}))._stream == ""


@pytest.mark.usefixtures("stranger")
def test_a_broker_without_the_batch_commit_gets_rows_at_least_once_and_that_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, options: WriteOptions, topic: str
) -> None:
    source = MillstreamSource({"kafka.bootstrap.servers": options.brokers, "topic": topic})
    with caplog.at_level(logging.WARNING):
        writer, stream = source.writer(SCHEMA, False), source.streamWriter(SCHEMA, False)
    assert "rows are written at least once, and rows of a batch that fails stay visible" in caplog.text
    assert isinstance(writer, TopicWriter)
    assert isinstance(stream, TopicStreamWriter)
    writer.commit([writer.write(iter([ROWS]))])
    of_task(monkeypatch, f"query-of-{topic}", 0, "run")
    parts = [stream.write(iter([ROWS])) for _ in range(2)]
    stream.abort([None], 0)
    stream.commit(list(parts), 0)
    assert values(options, 9) == [b"one", b"two", b"three"] * 3


def test_an_invalid_target_is_refused_before_any_task_runs(server: Server, topic: str) -> None:
    nowhere = MillstreamSource({"kafka.bootstrap.servers": "127.0.0.1:1", "topic": topic})
    with pytest.raises(
        BrokerUnreachable, match=r"check that it is running and that the option kafka\.bootstrap\.servers is right"
    ):
        nowhere.writer(SCHEMA, False)


def test_a_missing_topic_is_reported_before_any_task_runs(
    monkeypatch: pytest.MonkeyPatch, server: Server, topic: str
) -> None:
    async def never_created(self: Client, topics: list[str], *, create: bool = False) -> object:
        return await ask(self, topics)

    ask = Client.metadata
    monkeypatch.setattr(Client, "metadata", never_created)
    source = MillstreamSource({"kafka.bootstrap.servers": server.kafka, "topic": topic})
    with pytest.raises(UnknownTopic, match=f"create it with: millstream topic create {topic}"):
        source.writer(SCHEMA, False)


def test_a_task_starts_when_the_broker_is_available_again(
    monkeypatch: pytest.MonkeyPatch, options: WriteOptions
) -> None:
    away = [1, 2, 3]

    async def reach(self: Client, node: NodeId | None) -> Pool:
        if away:
            away.pop()
            raise BrokerUnreachable("it is just started again")
        return await found_reach(self, node)

    found_reach = Client._reach
    link = _link(options)
    monkeypatch.setattr(Client, "_reach", reach)
    assert target_topic.supports_batch_commit(link)
    assert not away

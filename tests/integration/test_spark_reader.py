"""The requests of Spark drivers and tasks to a real broker when a stream is read, without Spark."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from millstream.core.errors import FilterError, LostData
from millstream.pipelines.source.options import read_options
from millstream.pipelines.source.reader import TopicStreamReader
from millstream.pipelines.source.shape import default_schema, shape_of
from millstream.pipelines.source.source import MillstreamSource
from millstream_testing.command import CommandLine
from millstream_testing.server import Server

WAIT_S = 60.0
MakeReader = Callable[..., TopicStreamReader]


class Topics:
    """Changes of topics during a test."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})

    def make(self, name: str, values: int) -> None:
        self._admin.create_topics([NewTopic(name, 1, 1)])[name].result(WAIT_S)
        self.produce(name, values)

    def produce(self, name: str, values: int) -> None:
        producer = Producer({"bootstrap.servers": self.server.kafka, "log_level": 0})
        for number in range(values):
            producer.produce(name, b"%d" % number, partition=0)
        assert producer.flush(WAIT_S) == 0

    def cut(self, name: str, offset: int) -> None:
        """Delete the records before an offset, as retention does."""
        (cut,) = self._admin.delete_records([TopicPartition(name, 0, offset)]).values()
        cut.result(WAIT_S)

    def delete(self, name: str) -> None:
        self._admin.delete_topics([name])[name].result(WAIT_S)


@pytest.fixture
def topics(server: Server) -> Topics:
    return Topics(server)


@pytest.fixture
def reader(server: Server, topic: str) -> MakeReader:
    def make(**given_options: str) -> TopicStreamReader:
        what = {} if "subscribePattern" in given_options else {"subscribe": topic}
        options = read_options(
            {"kafka.bootstrap.servers": server.kafka, "columns": "value,offset", **what, **given_options}
        )
        return TopicStreamReader(options, shape_of(default_schema(options), options))

    return make


def at(topic: str, offset: int) -> dict[str, Any]:
    return {topic: {"0": offset}}


def offsets(reader: TopicStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    found_offsets: list[int] = []
    for partition in reader.partitions(start, end):
        for batch in reader.read(partition):
            found_offsets += batch.column("offset").to_pylist()
    return found_offsets


def test_records_deleted_by_retention_from_a_running_stream_are_reported_once(
    caplog: pytest.LogCaptureFixture, topics: Topics, topic: str, reader: MakeReader
) -> None:
    topics.make(topic, 40)
    strict, lenient = reader(), reader(failOnDataLoss="false")
    assert offsets(strict, at(topic, 0), at(topic, 10)) == list(range(10))
    topics.cut(topic, 25)
    with pytest.raises(LostData, match=f"{topic}-0: offsets 10 to 19;") as reported:
        strict.partitions(at(topic, 10), at(topic, 20))
    assert reported.value.lost == [(topic, 0, 10, 20)]
    with pytest.raises(LostData) as reported:
        strict.partitions(at(topic, 20), at(topic, 30))
    assert reported.value.lost == [(topic, 0, 20, 25)]
    with caplog.at_level(logging.WARNING):
        assert offsets(lenient, at(topic, 10), at(topic, 20)) == []
        assert offsets(lenient, at(topic, 20), at(topic, 30)) == [25, 26, 27, 28, 29]
        assert offsets(lenient, at(topic, 30), at(topic, 40)) == list(range(30, 40))
    lost = [record.getMessage().partition("reader: ")[2].partition(";")[0] for record in caplog.records]
    assert lost == [f"{topic}-0: offsets 10 to 19", f"{topic}-0: offsets 20 to 24"]


def test_records_deleted_between_plan_and_task_are_reported_too(
    caplog: pytest.LogCaptureFixture, topics: Topics, topic: str, reader: MakeReader
) -> None:
    topics.make(topic, 40)
    strict, lenient = reader(), reader(failOnDataLoss="false")
    planned = {reader: reader.partitions(at(topic, 10), at(topic, 30)) for reader in (strict, lenient)}
    topics.cut(topic, 17)
    with pytest.raises(LostData) as reported:
        list(strict.read(planned[strict][0]))
    assert reported.value.lost == [(topic, 0, 10, 17)]
    with caplog.at_level(logging.WARNING):
        found_offsets = [
            number for batch in lenient.read(planned[lenient][0]) for number in batch.column("offset").to_pylist()
        ]
    assert found_offsets == list(range(17, 30))
    assert f"{topic}-0: offsets 10 to 16" in caplog.text


def test_a_deleted_topic_of_a_pattern_is_reported_and_the_others_continue(
    caplog: pytest.LogCaptureFixture, topics: Topics, topic: str, reader: MakeReader
) -> None:
    gone, kept = f"{topic}-gone", f"{topic}-kept"
    topics.make(gone, 5)
    topics.make(kept, 5)
    strict = reader(subscribePattern=f"{topic}-.*", startingOffsets="earliest")
    lenient = reader(subscribePattern=f"{topic}-.*", failOnDataLoss="false")
    start = strict.initialOffset()
    end = strict.latestOffset(start, ReadAllAvailable())
    assert end == {**at(gone, 5), **at(kept, 5)}
    topics.delete(gone)
    topics.produce(kept, 3)
    with pytest.raises(LostData, match=f"{gone}-0: offsets 0 to 4"):
        strict.latestOffset(end, ReadAllAvailable())
    with caplog.at_level(logging.WARNING):
        last = lenient.latestOffset(end, ReadAllAvailable())
    assert f"{gone}-0: offsets 0 to 4" in caplog.text
    assert last == {**at(gone, 5), **at(kept, 8)}
    assert offsets(lenient, end, last) == [5, 6, 7]


@pytest.mark.parametrize("limit", [ReadAllAvailable(), ReadMaxRows(4)])
def test_progress_is_visible_as_the_lag_of_a_group(
    topics: Topics, topic: str, server: Server, reader: MakeReader, limit: ReadLimit
) -> None:
    topics.make(topic, 10)
    millstream = CommandLine(server.kafka)
    group = f"readers-of-{topic}"
    stream = reader(groupId=group, startingOffsets="earliest")
    end = stream.latestOffset(stream.initialOffset(), limit)
    stream.commit(end)
    described = millstream("group", "describe", group, "--json").document
    assert described["lag"] == 10 - end[topic]["0"]
    topics.produce(topic, 7)
    (progress,) = millstream("group", "describe", group, "--json").document["offsets"]
    assert (progress["topic"], progress["committed"], progress["lag"]) == (topic, end[topic]["0"], 17 - end[topic]["0"])


def test_the_error_of_a_task_has_no_internals(topics: Topics, topic: str, reader: MakeReader) -> None:
    topics.make(topic, 20)
    stream = reader()
    (planned,) = stream.partitions(at(topic, 0), at(topic, 20))
    topics.cut(topic, 10)
    with pytest.raises(LostData) as reported:
        list(stream.read(planned))
    frames = [Path(frame.path).name for frame in reported.traceback if "millstream" in str(frame.path)]
    assert frames[-1] == "spark_errors.py"
    assert "rows.py" not in frames


def test_an_invalid_filter_is_reported_on_the_driver(topic: str) -> None:
    source = MillstreamSource({"subscribe": topic, "filter": "payload.total >"})
    for make in (source.reader, source.streamReader):
        with pytest.raises(FilterError, match=r"payload\.total >"):
            make(source.schema())

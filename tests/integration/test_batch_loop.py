"""Offsets and batch numbers on a real server, without Spark: these batches have no rows."""

from __future__ import annotations

import json
import uuid
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from millstream.core.errors import InvalidBatch, MillstreamError, OffsetOutOfRange, ProducerFenced
from millstream.core.pipeline import SKIP, Pipeline, PipelineKind, RouteSettings, TransformSettings
from millstream.pipelines.jobs import batch_loop
from millstream.pipelines.jobs.batch_loop import BatchLoop, Plan, small_batch_slot, stream_of
from millstream.pipelines.jobs.job import JobContext
from millstream.pipelines.jobs.transform.job import StreamLoop
from millstream.pipelines.source.batch_commit import Batch
from millstream.pipelines.source.ranges import commit_offsets, stable_offsets
from millstream.protocol.wire.group_offsets import GroupMember
from millstream_testing.committed_messages import committed_messages
from millstream_testing.server import Server

WAIT_S = 60.0


class Trial:
    """A topic, and independent loops over it."""

    def __init__(self, server: Server, topic: str) -> None:
        self.server = server
        self.topic = topic
        self.id = uuid.uuid4()
        self.admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
        self.admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(WAIT_S)

    def publish(self, count: int, partition: int = 0) -> None:
        producer = Producer({"bootstrap.servers": self.server.kafka, "log_level": 0})
        for number in range(count):
            producer.produce(self.topic, b"%d" % number, partition=partition)
        assert producer.flush(WAIT_S) == 0

    def loop(self, member: GroupMember | None = None, **settings: Any) -> BatchLoop:
        pipeline = Pipeline(pipeline_id=self.id, name=self.topic[:100], kind=PipelineKind.ROUTE)
        nothing: Any = None
        context = JobContext(
            spark=nothing, brokers=self.server.kafka, lake="", folder="", member=lambda: member or GroupMember()
        )
        return BatchLoop(pipeline, context, RouteSettings(**settings))

    def plan(self, loop: BatchLoop) -> Plan:
        return loop.plan([self.topic])

    def ranges(self, loop: BatchLoop) -> list[tuple[int, int, int]]:
        return [
            (offset_range.partition, offset_range.start, offset_range.end) for offset_range in self.plan(loop).ranges
        ]


@pytest.fixture
def trial(server: Server, topic: str) -> Trial:
    return Trial(server, topic)


def test_a_batch_continues_where_the_last_one_ended(trial: Trial) -> None:
    trial.publish(10)
    trial.publish(4, partition=1)
    loop = trial.loop(batch_max=7)
    plan = trial.plan(loop)
    assert (plan.rows, plan.lag, plan.batch.number) == (7, 7, 0)
    assert loop.commit(plan) == 0
    again = trial.plan(trial.loop(batch_max=100))
    assert (again.rows, again.lag, again.batch.number) == (7, 0, 1)
    assert trial.plan(loop).rows == 7


def test_unread_messages_deleted_by_retention_are_skipped_and_counted_on_request(trial: Trial) -> None:
    trial.publish(10)
    trial.publish(4, partition=1)
    loop = trial.loop(batch_max=4, on_lost=SKIP)
    assert loop.commit(trial.plan(loop)) == 0
    gone = TopicPartition(trial.topic, 0, 8)
    trial.admin.delete_records([gone])[gone].result(WAIT_S)
    assert trial.plan(trial.loop()).lost == 0
    plan = trial.plan(trial.loop(on_lost=SKIP))
    first = {offset_range.partition: offset_range.start for offset_range in plan.ranges}
    assert (first[0], plan.lost, plan.counts(routed=1)) == (8, 6, {"routed": 1, "lost": 6})
    assert loop.commit(trial.plan(loop)) == 0
    assert trial.plan(loop).counts(routed=1) == {"routed": 1}


def test_a_stream_counts_unread_messages_deleted_by_retention(trial: Trial, tmp_path: Path) -> None:
    trial.publish(10)
    for deleted in trial.admin.delete_records([TopicPartition(trial.topic, 0, 8)]).values():
        deleted.result(WAIT_S)
    pipeline = Pipeline(pipeline_id=trial.id, name=trial.topic[:100], kind=PipelineKind.TRANSFORM)
    nothing: Any = None
    context = JobContext(spark=nothing, brokers=trial.server.kafka, lake="", folder="")
    prepared: Any = SimpleNamespace(stream_folder=tmp_path)
    stream = StreamLoop(pipeline, context, TransformSettings(on_lost=SKIP), prepared)
    first = {trial.topic: {0: 2, 1: 0}}
    # Only messages before the end of the batch are lost with it; a partition added with it has lost nothing.
    assert stream._lost(first, 0, {trial.topic: {0: 5, 1: 0, 2: 3}}) == 3
    offsets = tmp_path / "checkpoint" / "offsets"
    offsets.mkdir(parents=True)
    offsets.joinpath("0").write_text("v1\n{}\n" + json.dumps({trial.topic: {"0": 5, "1": 0}}))
    assert stream._lost(first, 1, {trial.topic: {0: 10, 1: 0}}) == 3
    assert stream._lost({trial.topic: {0: 8, 1: 0}}, 0, {trial.topic: {0: 10, 1: 0}}) == 0


def test_undecided_batches_of_a_dead_stream_are_aborted(trial: Trial) -> None:
    trial.publish(5)
    dead = trial.loop()
    plan = trial.plan(dead)
    batch = Batch("the-checkpoint", 3, "run", stream_of(trial.id))
    dead.link.call(dead.prepare_offsets(batch, plan.end))
    assert trial.ranges(trial.loop()) == [(0, 0, 5)]
    # The leftovers of that run do not start again either.
    with pytest.raises(ProducerFenced):
        dead.link.call(dead.prepare_offsets(batch, plan.end))


def test_undecided_batches_of_a_dead_run_are_aborted(trial: Trial) -> None:
    trial.publish(5)
    dead = trial.loop()
    plan = trial.plan(dead)
    dead.link.call(dead.prepare_offsets(plan.batch, plan.end))
    loop = trial.loop()
    assert trial.ranges(loop) == [(0, 0, 5)]
    assert loop.commit(trial.plan(loop)) == 0
    assert trial.ranges(loop) == []
    assert trial.ranges(trial.loop()) == []


def test_of_two_runs_one_commits_a_batch(trial: Trial) -> None:
    trial.publish(5)
    first, second = trial.loop(), trial.loop()
    earlier = trial.plan(first)
    trial.publish(3)
    later = trial.plan(second)
    assert (earlier.batch.number, later.batch.number) == (0, 0)
    assert first.commit(earlier) == 0
    assert second.commit(later) is None
    assert trial.ranges(second) == [(0, 5, 8)]
    assert trial.plan(second).batch.number == 1


def test_rows_that_the_driver_writes_itself_are_one_transaction_with_the_offsets(trial: Trial) -> None:
    trial.publish(5)
    first, second = trial.loop(), trial.loop()
    into = f"{trial.topic}-into"
    rows = pa.RecordBatch.from_pydict({"key": [b"a", b"b"], "value": [b"1", b"2"]})
    earlier = trial.plan(first)
    trial.publish(3)
    later = trial.plan(second)
    assert first.commit_here(earlier, first.options_for(into), [rows]) == 2
    # Of two runs one commits a batch, and the other one leaves nothing behind.
    assert second.commit_here(later, second.options_for(into), [rows]) is None
    assert trial.ranges(second) == [(0, 5, 8)]
    assert sorted(committed_messages(trial.server.kafka, into)) == [b"1", b"2"]
    wrong = rows.append_column("partition", pa.array([None, 99], pa.int32()))
    with pytest.raises(InvalidBatch, match="partition 99"):
        second.commit_here(trial.plan(second), second.options_for(into), [wrong])
    assert trial.ranges(second) == [(0, 5, 8)]
    assert second.commit_here(trial.plan(second), second.options_for(into), []) == 0
    assert trial.ranges(trial.loop()) == []
    assert len(committed_messages(trial.server.kafka, into)) == 2


def test_a_pipeline_that_hangs_in_the_driver_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_loop, "TURN_S_MAX", 0.001)
    with ExitStack() as stack:
        for _ in range(batch_loop.HERE_AT_ONCE + 2):
            stack.enter_context(small_batch_slot())
    # Only turns that were taken are returned.
    free = batch_loop._here
    assert [free.acquire(blocking=False) for _ in range(batch_loop.HERE_AT_ONCE + 1)].count(True) == (
        batch_loop.HERE_AT_ONCE
    )
    for _ in range(batch_loop.HERE_AT_ONCE):
        free.release()


def test_a_pipeline_that_starts_at_the_end_misses_nothing_from_then_on(trial: Trial) -> None:
    trial.publish(5)
    loop = trial.loop(start="latest")
    plan = trial.plan(loop)
    assert (plan.ranges, loop.is_new(plan)) == ((), True)
    assert loop.commit(plan) == 0
    assert not loop.is_new(trial.plan(loop))
    trial.publish(2)
    trial.admin.create_partitions([NewPartitions(trial.topic, 3)])[trial.topic].result(WAIT_S)
    trial.publish(1, partition=2)
    # Later runs continue there too, and a new partition is read from its start.
    assert trial.ranges(trial.loop(start="latest")) == [(0, 5, 7), (2, 0, 1)]


def test_a_replaced_member_cannot_commit(trial: Trial) -> None:
    trial.publish(5)
    replaced = trial.loop(GroupMember("somebody", 3))
    with pytest.raises(MillstreamError, match="offset of group"):
        replaced.commit(trial.plan(replaced))
    loop = trial.loop()
    assert trial.ranges(loop) == [(0, 0, 5)]
    assert loop.commit(trial.plan(loop)) == 0


def test_a_topic_shorter_than_the_read_position_is_reported(trial: Trial) -> None:
    loop = trial.loop()
    group = trial.topic[:100]
    link = loop.link
    link.call(commit_offsets(link.client, f"pipeline-{group}", {trial.topic: {0: 7}}, GroupMember()))
    assert link.call(stable_offsets(link.client, f"pipeline-{group}")) == {trial.topic: {0: 7}}
    with pytest.raises(OffsetOutOfRange, match="read up to 7"):
        trial.plan(loop)

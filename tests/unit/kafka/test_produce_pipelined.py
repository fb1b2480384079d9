"""Produce requests that arrive together and differ only in their records, against the same requests one by one."""

from __future__ import annotations

import asyncio
import struct
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.declared_state import ClientQuotas
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.apis.produce import Produce
from millstream.broker.kafka.dispatch import Dispatch
from millstream.broker.kafka.produce_codec import PipelinedReader
from millstream.broker.kafka.quota_meter import QuotaMeter
from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import Connection, ConnectionLimits, Traffic
from millstream.broker.net.turns import Turns
from millstream.broker.replication.partition import Partition
from millstream.core.errors import NotEnoughReplicas, StorageFailure
from millstream.core.metric import Distribution
from millstream.core.quota import PRODUCER_BYTE_RATE
from millstream.protocol.messages.codec import load_request_class, read_response
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.api_requests import write_request
from millstream_testing.batches import encode_values
from millstream_testing.node_group import single_node
from millstream_testing.waiting import until

PARTITIONS = 2


class Wire:
    """A transport that collects what is sent."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def writelines(self, parts: Sequence[bytes]) -> None:
        self.sent += b"".join(parts)

    def get_extra_info(self, _name: str) -> None:
        return None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return 0


class Client:
    """A connection to the Produce API of a node."""

    def __init__(self, topics: Topics) -> None:
        quota = QuotaMeter(ClientQuotas(CatalogDeclarations(Catalog("sqlite://"))), PRODUCER_BYTE_RATE)
        self.dispatch = Dispatch()
        self.dispatch.serve([Produce(topics, quota)])
        self.traffic, self.wire = Traffic(), Wire()
        limits = ConnectionLimits(frame_bytes_max=1 << 20)
        # The turns' clock stands still, so that no request waits for a turn.
        turns = Turns(clock=lambda: 0.0)
        turns.spend = lambda *_arguments, **_options: False  # type: ignore[method-assign]
        self.connection = Connection(self.dispatch, limits, Budget(1 << 30), self.traffic, lambda _: None, turns)
        self.connection.connection_made(cast("Any", self.wire))

    def arrive(self, data: bytes) -> None:
        """Receive bytes in one piece."""
        self.connection.get_buffer(-1)[: len(data)] = data
        self.connection.buffer_updated(len(data))

    @property
    def observed(self) -> int:
        """How many requests the latency metric has counted."""
        (metric,) = self.dispatch.metrics()
        return sum(cast("Distribution", sample.value).observations for sample in metric.samples)

    def responses(self, version: int) -> list[tuple[int, int, int, int]]:
        """Decode what was sent: correlation id, error, base offset and log start of each response."""
        answers, at = [], 0
        while at < len(self.wire.sent):
            (size,) = struct.unpack_from(">i", self.wire.sent, at)
            frame = bytes(self.wire.sent[at + 4 : at + 4 + size])
            (topic,) = read_response(0, version, frame).responses
            (partition,) = topic.partition_responses
            start = getattr(partition, "log_start_offset", 0)
            answers.append(
                (int.from_bytes(frame[:4], "big"), int(partition.error_code), int(partition.base_offset), int(start))
            )
            at += 4 + size
        return answers


def frame(
    version: int,
    correlation_id: int,
    topic_id: UUID,
    records: bytes,
    *,
    partition: int = 0,
    acks: int = -1,
    client: str = "test",
    timeout_ms: int = 5000,
) -> bytes:
    cls = load_request_class(0, version)
    module = __import__(cls.__module__, fromlist=["*"])
    name = {"topic_id": topic_id} if version >= 13 else {"name": "t"}
    data = module.TopicProduceData(
        partition_data=(module.PartitionProduceData(index=partition, records=records),), **name
    )
    request = cls(transactional_id=None, acks=acks, timeout=timedelta(milliseconds=timeout_ms), topic_data=(data,))
    return write_request(correlation_id, client, request)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives how many requests were read together each time."""
    reads: list[int] = []

    class Counted(PipelinedReader):
        def ranges(self) -> Iterator[tuple[int, int]]:
            reads.append(0)
            for offset_range in super().ranges():
                reads[-1] += 1
                yield offset_range

    monkeypatch.setattr("millstream.broker.kafka.apis.produce.PipelinedReader", Counted)
    return reads


@st.composite
def requests(draw: st.DrawFn, version: int, topic_id: UUID) -> list[bytes]:
    """Requests of one client that differ little."""
    frames: list[bytes] = []
    sequence = 0
    is_idempotent = draw(st.booleans())
    for correlation_id in range(draw(st.integers(2, 12))):
        kind = draw(
            st.sampled_from(
                ["plain"] * 12 + ["partition", "acks", "client", "broken", "skips", "repeats", "long", "marked"]
            )
        )
        if kind == "skips":
            sequence += 1
        elif kind == "repeats" and sequence:
            sequence -= 1
        count = draw(st.sampled_from([1, 1, 3]))
        batch = encode_values(
            *[b"x" * draw(st.sampled_from([0, 1, 40, 200])) + bytes(3000 * (kind == "long"))] * count,
            producer_id=7 if is_idempotent else -1,
            producer_epoch=0 if is_idempotent else -1,
            sequence=sequence if is_idempotent else -1,
            transactional=kind == "marked",
        )
        if kind == "broken":
            batch[draw(st.integers(0, len(batch) - 1))] ^= 1 << draw(st.integers(0, 7))
        partition, acks = int(kind == "partition"), 1 if kind == "acks" else -1
        if partition == 0:
            sequence += count
        frames.append(
            frame(
                version,
                correlation_id,
                topic_id,
                bytes(batch),
                partition=partition,
                acks=acks,
                client="other" if kind == "client" else "test",
            )
        )
    return frames


async def outcome(
    folder: Path, flush: str, version: int, data: st.DataObject | None, frames: list[bytes] | None, *, together: bool
) -> tuple[list[bytes], Any]:
    """Send requests to a new node; return them, and everything that shows what they did."""
    async with single_node(folder) as topics:
        topic = await topics.create("t", partitions=PARTITIONS, overrides={"flush": flush})
        if frames is None:
            assert data is not None
            # Topic ids differ between the nodes, so version 13 is tested elsewhere.
            frames = data.draw(requests(version, topic.topic_id))
        client = Client(topics)
        for piece in [b"".join(frames)] if together else frames:
            client.arrive(piece)
        await until(lambda: len(client.responses(version)) == len(frames))
        logs = [topics.partition("t", index).log for index in range(PARTITIONS)]
        stored = [bytes(log.read(0, max_bytes=1 << 20, up_to=log.end_offset)) for log in logs]
        counts = [
            (partition.bytes_in, partition.records_in) for partition in map(topics.partition, "tt", range(PARTITIONS))
        ]
        effects = (
            client.responses(version),
            stored,
            counts,
            client.traffic.frames_in,
            client.observed,
        )
        return frames, effects


@given(data=st.data(), flush=st.sampled_from(["os", "always"]), version=st.sampled_from([3, 5, 7, 8, 9, 12]))
@settings(deadline=None, max_examples=40)
def test_requests_that_arrive_together_have_the_same_effect(data: st.DataObject, flush: str, version: int) -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        frames, expected = asyncio.run(outcome(Path(first), flush, version, data, None, together=False))
        _, effects = asyncio.run(outcome(Path(second), flush, version, None, frames, together=True))
    assert effects == expected


@pytest.mark.parametrize("version", [7, 9, 13])
@pytest.mark.parametrize("flush", ["os", "always"])
async def test_pipelined_requests_are_appended_in_one_write(
    tmp_path: Path, flush: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", partitions=1, overrides={"flush": flush})
        log = topics.partition("t", 0).log
        client = Client(topics)
        sizes: list[int] = []
        write = log.write

        def count(segment: Any, batches: Any) -> Any:
            sizes.append(len(batches))
            return write(segment, batches)

        monkeypatch.setattr(log, "write", count)
        batch = bytes(encode_values(b"v"))
        frames = [frame(version, number, topic.topic_id, batch) for number in range(300)]
        client.arrive(frames[0])
        client.arrive(b"".join(frames[1:]))
        await until(lambda: len(client.responses(version)) == 300)
        assert client.responses(version) == [(number, 0, number, 0) for number in range(300)]
        # At most 128 are handled in one step.
        assert sizes == [len(batch) * count for count in (1, 128, 128, 43)]
        assert client.observed == client.traffic.frames_in == 300


async def test_if_the_disk_refuses_them_together_they_are_written_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", partitions=1, overrides={"flush": "os"})
        log = topics.partition("t", 0).log
        client = Client(topics)
        batch = bytes(encode_values(b"v"))
        frames = [frame(9, number, topic.topic_id, batch) for number in range(4)]
        client.arrive(frames[0])
        write = log.write

        def refuse_large(segment: Any, batches: Any) -> Any:
            if len(batches) > len(batch):
                raise StorageFailure("no room for that")
            return write(segment, batches)

        monkeypatch.setattr(log, "write", refuse_large)
        client.arrive(b"".join(frames[1:]))
        assert client.responses(9) == [(number, 0, number, 0) for number in range(4)]


async def test_requests_without_enough_replicas_are_not_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", partitions=1, overrides={"flush": "os"})
        client = Client(topics)
        frames = [frame(9, number, topic.topic_id, bytes(encode_values(b"v"))) for number in range(50)]
        client.arrive(frames[0])

        def refuse(_partition: Partition, _acks: int) -> None:
            raise NotEnoughReplicas("one replica is in sync, two are required")

        monkeypatch.setattr(Partition, "_check_in_sync", refuse)
        reads = count_reads(monkeypatch)
        client.arrive(b"".join(frames[1:]))
        assert [code for _, code, _, _ in client.responses(9)] == [0] + [int(ErrorCode.not_enough_replicas)] * 49
        assert not any(reads)


@pytest.mark.parametrize("error", [ErrorCode.kafka_storage_error, ErrorCode.request_timed_out])
async def test_pipelined_requests_fail_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: ErrorCode
) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", partitions=1, overrides={"flush": "always"})
        partition = topics.partition("t", 0)
        client = Client(topics)
        batch = bytes(encode_values(b"v"))
        client.arrive(frame(9, 0, topic.topic_id, batch))
        await until(lambda: len(client.responses(9)) == 1)
        with monkeypatch.context() as patch:
            patch.setattr(partition._store, "sync_soon", lambda _log: None)
            timeout_ms = 0 if error is ErrorCode.request_timed_out else 5000
            frames = [frame(9, number, topic.topic_id, batch, timeout_ms=timeout_ms) for number in (1, 2, 3)]
            client.arrive(b"".join(frames))
            assert partition.waiting == 1
            if timeout_ms:
                partition._waiting.fail(StorageFailure("the disk is gone"))
            await until(lambda: len(client.responses(9)) == 4)
        assert client.responses(9)[1:] == [(number, int(error), -1, -1) for number in (1, 2, 3)]
        assert not partition.waiting


@pytest.mark.parametrize("behind", ["other producer", "wrong checksum"])
async def test_a_write_that_the_disk_refuses_is_reported_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", partitions=1, overrides={"flush": "os"})
        client = Client(topics)
        batches = [
            encode_values(b"v", producer_id=7, producer_epoch=0, sequence=0),
            encode_values(b"v", producer_id=7, producer_epoch=0, sequence=1),
            encode_values(b"v", producer_id=8 if behind == "other producer" else 7, producer_epoch=0, sequence=2),
        ]
        batches[2][-1] ^= behind == "wrong checksum"
        frames = [frame(9, number, topic.topic_id, bytes(batch)) for number, batch in enumerate(batches)]
        client.arrive(frames[0])

        def refuse(*_: object) -> None:
            raise StorageFailure("the disk is full")

        monkeypatch.setattr(topics.partition("t", 0).log, "write", refuse)
        client.arrive(b"".join(frames[1:]))
        assert client.responses(9)[1][1] == ErrorCode.kafka_storage_error


async def test_a_request_with_unknown_tags_is_served_before_others(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", partitions=1, overrides={"flush": "os"})
        client = Client(topics)
        frames = [frame(9, number, topic.topic_id, bytes(encode_values(b"v"))) for number in range(3)]
        # One tag, number 99, with one byte, in place of none.
        tagged = frames[0][4:-1] + b"\x01\x63\x01\x00"
        client.arrive(struct.pack(">i", len(tagged)) + tagged + b"".join(frames[1:]))
        assert client.responses(9) == [(number, 0, number, 0) for number in range(3)]


async def test_records_beyond_the_end_of_a_request_are_not_stored(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", partitions=1, overrides={"flush": "os"})
        client = Client(topics)
        frames = [frame(7, number, topic.topic_id, bytes(encode_values(bytes(100)))) for number in range(3)]
        client.arrive(frames[0])
        cut = struct.pack(">i", len(frames[2]) - 12) + frames[2][4:]
        client.arrive(frames[1] + cut)
        assert topics.partition("t", 0).log.end_offset == 2
        assert client.wire.is_aborted


@pytest.mark.parametrize("setting", [{"message.timestamp.type": "LogAppendTime"}, {"cleanup.policy": "compact"}])
async def test_requests_that_cannot_be_appended_together_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, str]
) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", partitions=1, overrides={"flush": "os", **setting})
        monkeypatch.setattr("millstream.broker.kafka.apis.produce.PipelinedReader", None)
        keyed = bytes(encode_batch([NewRecord(b"k", b"v", (), 1000)]))
        client = Client(topics)
        frames = [frame(9, number, topic.topic_id, keyed) for number in range(3)]
        client.arrive(b"".join(frames))
        assert client.responses(9) == [(number, 0, number, 0) for number in range(3)]


async def test_requests_of_two_producers_are_not_read_again_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", partitions=1, overrides={"flush": "os"})
        reads = count_reads(monkeypatch)
        client = Client(topics)
        frames = [
            frame(
                9,
                number,
                topic.topic_id,
                bytes(encode_values(b"v", producer_id=7 + number % 2, producer_epoch=0, sequence=number // 2)),
            )
            for number in range(101)
        ]
        client.arrive(frames[0])
        client.arrive(b"".join(frames[1:]))
        assert client.responses(9) == [(number, 0, number, 0) for number in range(101)]
        assert reads == [2] * 99

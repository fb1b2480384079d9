"""Bytes that change under a running broker after they were read once: never served, reported everywhere, skipped."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import confluent_kafka
import pytest

from millstream.broker.log.files import DiskFiles
from millstream.broker.log.scan import FRAME_BYTES, Frame, read_frame
from millstream.core.subscription import FILTER, ORDERED, START, Verb
from millstream.embedded import EmbeddedBroker
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.command import CommandLine
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

TOPIC = "harmed"
BATCHES = 120
RECORDS = 5
BATCH_OFFSETS = RECORDS * BATCHES

Harm = Callable[[int, Frame], None]


def value_of(offset: int) -> bytes:
    return b"%d:" % offset + b"%016d" % offset * 600


def keyed(offset: int) -> NewRecord:
    return NewRecord(b"key-%d" % (offset % 7), value_of(offset), (("kind", b"good"),), 1_700_000_000_000)


def frames(path: Path) -> Iterator[Frame]:
    content, position = path.read_bytes(), 0
    while len(content) - position >= FRAME_BYTES:
        frame = read_frame(content, position, position)
        yield frame
        position = frame.end_position


def flip(descriptor: int, position: int) -> None:
    (byte,) = os.pread(descriptor, 1, position)
    os.pwrite(descriptor, bytes([byte ^ 0x41]), position)


def flip_payload(descriptor: int, frame: Frame) -> None:
    flip(descriptor, frame.position + 9000)


def flip_base_offset(descriptor: int, frame: Frame) -> None:
    flip(descriptor, frame.position + 7)


def flip_length(descriptor: int, frame: Frame) -> None:
    flip(descriptor, frame.position + 10)


def flip_epoch(descriptor: int, frame: Frame) -> None:
    flip(descriptor, frame.position + 15)


def truncate(descriptor: int, frame: Frame) -> None:
    os.ftruncate(descriptor, frame.end_position - 100)


def harm(path: Path, how: Harm) -> range:
    """Damage one batch of a segment and return its offsets: the last for a truncated file, else the fourth."""
    batches = list(frames(path))
    frame = batches[-1 if how is truncate else 3]
    descriptor = os.open(path, os.O_RDWR)
    try:
        how(descriptor, frame)
    finally:
        os.close(descriptor)
    return range(frame.base_offset, frame.next_offset)


def consume(address: str, start: int, end: int) -> tuple[dict[int, bytes], int]:
    """The messages that a default consumer gets from an offset on, and the offset of the end or the error."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": "reader"})
    consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, start)])
    values: dict[int, bytes] = {}
    try:
        while max(values, default=start - 1) < end - 1:
            message = consumer.poll(60)
            assert message is not None
            error = message.error()
            if error is not None:
                assert error.code() == confluent_kafka.KafkaError.INVALID_MSG
                break
            values[message.offset() or 0] = message.value() or b""
        return values, max(values, default=start - 1) + 1
    finally:
        consumer.close()


async def fill(address: str) -> None:
    async with Client.connect(address) as client:
        for first in range(0, BATCH_OFFSETS, RECORDS):
            await client.produce(TOPIC, 0, encode_batch([keyed(first + number) for number in range(RECORDS)]))


def test_damage_under_a_running_broker_is_found_reported_and_skipped(tmp_path: Path) -> None:
    with Server(tmp_path / "data", settings={"log-format": "json"}) as server:
        millstream = CommandLine(server.kafka)
        millstream("topic", "create", TOPIC, "--set", "segment.bytes=1048576")
        asyncio.run(fill(server.kafka))
        values, end = consume(server.kafka, 0, BATCH_OFFSETS)
        assert end == BATCH_OFFSETS
        paths = sorted(server.data.glob("partitions/*/0/*.log"), key=lambda path: path.stem)
        closed = [path for path in paths if path.stat().st_size > 500_000][:-1]
        lost = [
            harm(path, how)
            for path, how in zip(
                closed, (flip_payload, flip_base_offset, flip_length, flip_epoch, truncate), strict=False
            )
        ]
        assert len(lost) == 5
        gone = {offset for lost_range in lost for offset in lost_range}

        # A consumer gets everything before a damaged range, an error there, and everything behind it.
        got: dict[int, bytes] = {}
        start = 0
        stops = []
        while start < BATCH_OFFSETS:
            values, start = consume(server.kafka, start, BATCH_OFFSETS)
            got |= values
            if start < BATCH_OFFSETS:
                stops.append(start)
                start = next(lost_range.stop for lost_range in lost if lost_range.start == start)
        assert stops == [lost_range.start for lost_range in lost]
        assert got == {offset: value_of(offset) for offset in range(BATCH_OFFSETS) if offset not in gone}

        # Subscriptions deliver the rest, each message once and at its first attempt.
        for name, settings in (
            ("plain", {}),
            ("sorted", {ORDERED: "true"}),
            ("sifted", {FILTER: "headers.kind = 'good'"}),
        ):
            asyncio.run(drain(server.kafka, name, settings, gone))

        # Every report of damage names the same ranges.
        reported = [
            f"{TOPIC}-0: the disk lost the offsets {lost_range.start} to {lost_range.stop - 1}" for lost_range in lost
        ]
        checked = millstream("doctor", "--json")
        details = [finding["detail"] for finding in checked.document["findings"] if finding["check"] == "damage"]
        assert (checked.code, details) == (1, reported)
        (partition,) = millstream("topic", "describe", TOPIC, "--json").document["partitions"]
        assert partition["damage"] == [{"start": lost_range.start, "end": lost_range.stop} for lost_range in lost]
        shown = millstream("tail", TOPIC, "--from", "start", "--json")
        assert [document["offset"] for document in shown.documents] == sorted(got)
        metrics = server.metrics()
        assert "\nmillstream_log_damaged_ranges 5.0\n" in metrics
        assert f'\nmillstream_subscription_damaged_total{{subscription="plain"}} {float(len(gone))}\n' in metrics
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        logged = [line for line in lines if line["message"] == "records are damaged on disk"]
        places = [(entry["topic"], entry["partition"], entry["first_offset"], entry["next_offset"]) for entry in logged]
        assert sorted(places) == [(TOPIC, 0, lost_range.start, lost_range.stop) for lost_range in lost]
        assert server.stop() == 0


def test_unreadable_sectors_are_found_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_at = DiskFiles.read_at
    bad: dict[str, range] = {}

    def fail_to_read(descriptor: int, size: int, at: int) -> bytes:
        unreadable = bad.get(os.readlink(f"/proc/self/fd/{descriptor}"), range(0))
        if at < unreadable.stop and unreadable.start < at + size:
            raise OSError(errno.EIO, "Input/output error")
        return read_at(descriptor, size, at)

    broker = EmbeddedBroker(tmp_path / "data", settings={"scrub-bytes-per-s": 0})
    broker.start_and_wait()
    try:
        millstream = CommandLine(broker.kafka_address)
        millstream("topic", "create", TOPIC, "--set", "segment.bytes=1048576")
        asyncio.run(fill(broker.kafka_address))
        paths = sorted(tmp_path.glob("data/partitions/*/0/*.log"), key=lambda path: path.stem)
        path = next(path for path in paths if path.stat().st_size > 500_000)
        frame = list(frames(path))[3]
        lost = range(frame.base_offset, frame.next_offset)
        bad[str(path)] = range(frame.position + 9000, frame.position + 9001)
        monkeypatch.setattr(DiskFiles, "read_at", staticmethod(fail_to_read))
        got, stop = consume(broker.kafka_address, 0, BATCH_OFFSETS)
        assert stop == lost.start
        rest, end = consume(broker.kafka_address, lost.stop, BATCH_OFFSETS)
        assert end == BATCH_OFFSETS
        assert {**got, **rest} == {offset: value_of(offset) for offset in range(BATCH_OFFSETS) if offset not in lost}
        asyncio.run(drain(broker.kafka_address, "plain", {}, set(lost)))
        (partition,) = millstream("topic", "describe", TOPIC, "--json").document["partitions"]
        assert partition["damage"] == [{"start": lost.start, "end": lost.stop}]
    finally:
        broker.stop_and_wait()


def test_the_scrub_finds_damage_in_unread_batches(tmp_path: Path) -> None:
    settings = {"scrub-interval-ms": 100, "scrub-bytes-per-s": 100_000_000}
    with Server(tmp_path / "data", settings=settings) as server:
        millstream = CommandLine(server.kafka)
        millstream("topic", "create", TOPIC, "--set", "segment.bytes=1048576")
        asyncio.run(fill(server.kafka))
        paths = sorted(server.data.glob("partitions/*/0/*.log"), key=lambda path: path.stem)
        first, second, *_ = [path for path in paths if path.stat().st_size > 500_000]
        lost = [harm(first, flip_payload), harm(second, flip_base_offset)]
        wait_for_damage(server, len(lost))
        checked = millstream("doctor", "--json")
        details = [finding["detail"] for finding in checked.document["findings"] if finding["check"] == "damage"]
        assert details == [
            f"{TOPIC}-0: the disk lost the offsets {lost_range.start} to {lost_range.stop - 1}" for lost_range in lost
        ]
        # Repaired data is served again.
        harm(first, flip_payload)
        wait_for_damage(server, 1)
        assert server.stop() == 0


def wait_for_damage(server: Server, ranges: int) -> None:
    wait_until(lambda: f"\nmillstream_log_damaged_ranges {float(ranges)}\n" in server.metrics())


async def drain(address: str, name: str, settings: dict[str, str], gone: set[int]) -> None:
    async with Client.connect(address) as client:
        subscriptions = SubscriptionClient(client)
        await subscriptions.create(name, [TOPIC], {**settings, START: "earliest"})
        seen: dict[int, int] = {}
        while len(seen) < BATCH_OFFSETS - len(gone):
            messages = await subscriptions.receive(name, "worker", max_records=50, wait_ms=60_000)
            assert messages
            for message in messages:
                assert message.record.offset not in {*seen, *gone}
                assert message.record.value == value_of(message.record.offset)
                seen[message.record.offset] = message.attempt
            assert set(await subscriptions.settle(name, "worker", messages, Verb.ACCEPT)) == {None}
        assert set(seen.values()) == {1}

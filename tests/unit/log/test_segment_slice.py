"""Slices of segments do not change while they are sent, or report that they cannot be read."""

from __future__ import annotations

from uuid import UUID

import pytest

from millstream.broker.log.files import OpenFiles
from millstream.broker.log.log import Log
from millstream.broker.log.segment import Segment
from millstream.broker.log.segment_slice import BrokenSegment, SegmentSlice
from millstream.broker.log.store import LogStore
from millstream.core.errors import DamagedRange, StorageFailure
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.record import decode_records
from millstream_testing.batches import encode_values
from millstream_testing.files import MemoryFiles

TOPIC_ID = UUID(int=5)
EPOCH = Epoch(0)
SETTINGS = TopicSettings(segment_bytes=2000, retention_bytes=1)


@pytest.fixture
def log(store: LogStore) -> Log:
    """About ten segments of ten batches each."""
    log = store.open_log(TOPIC_ID, TopicPartition("orders", PartitionIndex(0)), SETTINGS)
    for number in range(100):
        log.append(encode_values(b"%0100d" % number), leader_epoch=EPOCH)
    log.synced_offset = log.end_offset
    assert len(log.segments) > 5
    return log


def unread(log: Log, offset: int, max_bytes: int = 1 << 20) -> SegmentSlice:
    chunk = log.read_slice(offset, max_bytes=max_bytes, up_to=log.end_offset, eager_bytes=0)
    assert chunk is not None
    assert chunk.data == b""
    return chunk


def numbers(data: bytes) -> list[int]:
    return [int(record.value or b"") for record in decode_records(data)]


@pytest.mark.parametrize("max_bytes", [0, 1, 169, 500, 1000, 5000])
@pytest.mark.parametrize("offset", [0, 3, 9, 50])
def test_an_immediate_and_a_deferred_read_find_the_same(log: Log, offset: int, max_bytes: int) -> None:
    for up_to in (log.end_offset, offset + 1, offset + 5):
        eager = log.read_slice(offset, max_bytes=max_bytes, up_to=up_to)
        later = log.read_slice(offset, max_bytes=max_bytes, up_to=up_to, eager_bytes=0)
        assert eager is not None
        assert later is not None
        assert (later.size, later.next_offset, later.end_position) == (
            eager.size,
            eager.next_offset,
            eager.end_position,
        )
        assert later.read(0, later.size) == bytes(eager.data)
        assert numbers(bytes(eager.data))[0] == offset


def test_a_slice_can_be_read_in_pieces(log: Log) -> None:
    chunk = unread(log, 0)
    assert b"".join(chunk.read(at, 1) for at in range(chunk.size)) == log.read(
        0, max_bytes=1 << 20, up_to=log.end_offset
    )


def test_retention_cannot_remove_a_file_in_use(log: Log, files: MemoryFiles) -> None:
    held, loose = unread(log, 0), unread(log, 0)
    expected = held.read(0, held.size)
    held.hold()
    opened = files.open_descriptors
    assert log.delete_expired(1000) > 0
    # The files of deleted segments are removed in the background; this one now, in the worst moment.
    files.remove(held._segment.path)

    assert held.read(0, held.size) == expected
    assert loose.read(0, loose.size) == expected
    before = files.open_descriptors
    del held
    assert files.open_descriptors == before - 1 < opened
    with pytest.raises(StorageFailure, match="deleted or truncated"):
        loose.read(0, loose.size)


def test_the_file_is_kept_until_the_last_slice_is_released(log: Log, files: MemoryFiles) -> None:
    first, second = unread(log, 0), unread(log, 0)
    first.hold()
    second.hold()
    second.hold()
    log.delete_expired(1000)
    before = files.open_descriptors
    del first
    assert files.open_descriptors == before
    del second
    assert files.open_descriptors == before - 1


def test_truncated_records_are_not_read_even_if_others_replace_them(log: Log) -> None:
    log.append(encode_values(b"%0100d" % 100), leader_epoch=EPOCH)
    whole, cut = unread(log, 0), unread(log, log.end_offset - 1)
    expected = whole.read(0, whole.size)
    for chunk in (whole, cut):
        chunk.hold()
    log.truncate_to(log.end_offset - 1)
    log.append(encode_values(b"%0100d" % 200), leader_epoch=EPOCH)

    assert whole.read(0, whole.size) == expected
    with pytest.raises(StorageFailure, match="deleted or truncated"):
        cut.read(0, cut.size)


def test_a_restarted_log_returns_no_older_records(log: Log) -> None:
    chunk = unread(log, 0)
    chunk.hold()
    log.restart_at(0)
    log.append(encode_values(b"%0100d" % 7), leader_epoch=EPOCH)
    with pytest.raises(StorageFailure, match="deleted or truncated"):
        chunk.read(0, chunk.size)


def test_after_a_read_failed_in_mid_response_the_log_reports_the_reason(log: Log, files: MemoryFiles) -> None:
    chunk = unread(log, 0)
    segment = chunk._segment
    files.truncate(segment.descriptor, segment.size // 2)
    with pytest.raises(BrokenSegment):
        chunk.read(0, chunk.size)

    # Now no read is deferred: intact batches are returned, and the rest is reported as lost.
    again = log.read_slice(0, max_bytes=1 << 20, up_to=log.end_offset, eager_bytes=0)
    assert again is not None
    assert numbers(bytes(again.data)) == list(range(again.next_offset))
    with pytest.raises(DamagedRange):
        log.read_slice(again.next_offset, max_bytes=1 << 20, up_to=log.end_offset, eager_bytes=0)


def test_the_number_of_files_held_leaves_room_for_others() -> None:
    files = MemoryFiles()
    pool = OpenFiles(files, 4)
    segments = [Segment("/d", number) for number in range(4)]
    files.make_directory("/d")
    for segment in segments:
        files.close(files.open(segment.path, create=True))
    held = [SegmentSlice(pool, segment, 0, 0, 0) for segment in segments]
    for chunk in held:
        chunk.hold()
    assert [segment.pins for segment in segments] == [1, 1, 0, 0]
    del chunk
    held.clear()
    assert [segment.pins for segment in segments] == [0, 0, 0, 0]
    pool.close_all()
    assert files.open_descriptors == 0


def test_a_slice_released_after_closing_does_no_harm(log: Log) -> None:
    chunk = unread(log, 0)
    chunk.hold()
    log.delete_expired(1000)
    log.open_files.close_all()
    del chunk
    assert len(log.open_files) == 0

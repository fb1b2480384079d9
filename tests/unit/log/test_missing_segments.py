"""Segment files removed while the broker was stopped: damage with its range, not a log that hangs."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pytest

from millstream.broker.log.log import Log
from millstream.broker.log.segment import segment_path
from millstream.broker.log.store import LogStore
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import read_log

OpenStore = Callable[[], LogStore]

TOPIC_ID = UUID(int=1)
PARTITION = TopicPartition("t", PartitionIndex(0))
SETTINGS = TopicSettings(segment_bytes=300)


def open_log(store: LogStore) -> Log:
    return store.open_log(TOPIC_ID, PARTITION, SETTINGS)


def put(log: Log, number: int) -> None:
    value = b"%d" % number + b"." * 60
    log.append(encode_batch([NewRecord(None, value, (), 1000)]), leader_epoch=Epoch(0))


def filled(open_store: OpenStore) -> list[int]:
    """Write twelve records and stop cleanly; return the base offsets of the segments."""
    store = open_store()
    log = open_log(store)
    for number in range(12):
        put(log, number)
    bases = [segment.base_offset for segment in log.segments]
    store.close_now()
    assert len(bases) >= 4
    return bases


def remove_segments(files: MemoryFiles, *bases: int) -> None:
    for base in bases:
        files.remove(segment_path(f"/data/partitions/{TOPIC_ID}/0", base))


def read_all(log: Log) -> tuple[list[int], list[tuple[int, int]]]:
    """The offsets that are served, and the ranges that are reported as lost."""
    served, lost = read_log(log, max_bytes=10_000)
    return [int(record.offset) for record in decode_records(served)], lost


@pytest.mark.parametrize("which", [0, 1, -1], ids=["the first", "one in the middle", "the active one"])
def test_a_missing_segment_is_damage(open_store: OpenStore, files: MemoryFiles, which: int) -> None:
    bases = filled(open_store)
    first = bases[which]
    after = (*bases, 12)[bases.index(first) + 1]
    remove_segments(files, first)

    store = open_store()
    log = open_log(store)
    assert log.damaged_ranges == ((first, after),)
    assert [report.lost for report in store.recovery_reports] == [[(first, after)]]
    served, lost = read_all(log)
    assert lost == [(first, after)]
    assert served == [offset for offset in range(12) if not first <= offset < after]

    put(log, 12)
    assert read_all(log)[0][-1] == 12
    store.close_now()
    again = open_store()
    log = open_log(again)
    assert log.damaged_ranges == ((first, after),)
    assert again.recovery_reports == []
    assert read_all(log)[0][-1] == 12


def test_all_segments_missing(open_store: OpenStore, files: MemoryFiles) -> None:
    remove_segments(files, *filled(open_store))
    store = open_store()
    log = open_log(store)
    assert log.damaged_ranges == ((0, 12),)
    put(log, 12)
    store.sync_soon(log)
    assert store.commit_once()
    assert read_all(log) == ([12], [(0, 12)])


def test_deleted_segments_are_not_lost(open_store: OpenStore, files: MemoryFiles) -> None:
    bases = filled(open_store)
    store = open_store()
    open_log(store).delete_before(1)
    store.close_now()
    remove_segments(files, 0)
    assert open_log(open_store()).damaged_ranges == ((1, bases[1]),)


def test_a_missing_segment_after_a_crash(open_store: OpenStore, files: MemoryFiles) -> None:
    bases = filled(open_store)
    open_log(open_store())
    files.kill()
    remove_segments(files, bases[-1])
    store = open_store()
    assert open_log(store).damaged_ranges == ((bases[-1], 12),)


def test_damage_is_removed_by_retention(open_store: OpenStore, files: MemoryFiles) -> None:
    bases = filled(open_store)
    remove_segments(files, bases[0])
    log = open_log(open_store())
    log.delete_before(bases[1])
    assert log.damaged_ranges == ()
    assert log.start_offset == bases[1]

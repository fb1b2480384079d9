"""Compaction and vacuum do not change what readers see, whatever runs concurrently."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream.pipelines.lake import rewriting
from millstream.pipelines.lake.columns import RAW, extended
from millstream.pipelines.lake.delta_log import DeltaLog
from millstream.pipelines.lake.rewriting import CompactionResult
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable
from millstream.pipelines.lake.table_file import ActiveFile, WrittenFile
from millstream_testing.lake_rows import LANDED, TOPIC, delta_rows, land, once, rows, write, write_quarantine

HOUR_OVER = LANDED + timedelta(hours=1)


@pytest.fixture
def table(storage: Storage) -> LakeTable:
    """Five small files of two interleaved partitions."""
    table = LakeTable(storage)
    for start in range(0, 50, 10):
        files = write(table, [rows(0, range(start, start + 10)), rows(1, range(start, start + 5))])
        offsets = {(TOPIC, 0): (start, start + 10), (TOPIC, 1): (start, start + 10)}
        assert table.commit(files, offsets, schema=RAW)
    return table


def everything() -> object:
    return once(0, range(50)) + once(1, [offset for offset in range(50) if offset % 10 < 5])


def test_small_files_of_an_hour_become_one(table: LakeTable, storage: Storage) -> None:
    assert table.compact(before=LANDED) == CompactionResult()
    assert table.compact(before=HOUR_OVER) == CompactionResult(5, 1, 75)
    assert table.compact(before=HOUR_OVER) == CompactionResult()
    assert delta_rows(storage) == everything()
    assert len(deltalake.DeltaTable(storage.url).file_uris()) == 1
    assert land(table, 0, 50, 60)
    assert len(_active(storage)) == 2


def _active(storage: Storage) -> list[str]:
    log = DeltaLog(storage)
    log.refresh()
    return log.paths()


def test_compacted_rows_are_ordered_and_row_groups_have_one_partition(table: LakeTable, storage: Storage) -> None:
    table.compact(before=HOUR_OVER)
    (path,) = _active(storage)
    file = pq.ParquetFile(Path(storage.url) / path)
    assert file.metadata.num_row_groups == 2
    columns = file.read(columns=["partition", "offset"])
    pairs = list(zip(columns.column("partition").to_pylist(), columns.column("offset").to_pylist(), strict=True))
    assert pairs == sorted(pairs)


def test_two_concurrent_compactions_and_an_append(table: LakeTable, storage: Storage) -> None:
    barrier = threading.Barrier(3)
    done: list[CompactionResult] = []
    landed: list[bool] = []

    def compacting() -> None:
        mine = LakeTable(storage)
        barrier.wait()
        done.append(mine.compact(before=HOUR_OVER))

    def landing() -> None:
        mine = LakeTable(storage)
        barrier.wait()
        landed.extend(land(mine, 0, start, start + 10) for start in (50, 60, 70))

    threads = [threading.Thread(target=compacting), threading.Thread(target=compacting)]
    threads.append(threading.Thread(target=landing))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert landed == [True, True, True]
    assert len(done) == 2
    assert delta_rows(storage) == once(0, range(80)) + once(1, [at for at in range(50) if at % 10 < 5])


def test_a_stale_compaction_replaces_nothing(
    table: LakeTable, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewritten = rewriting._rewritten

    def meanwhile(
        log: DeltaLog, files: list[ActiveFile], schema: pa.Schema, progress: Callable[[], None]
    ) -> list[WrittenFile]:
        written = rewritten(log, files, schema, progress)
        with monkeypatch.context() as patched:
            patched.setattr(rewriting, "_rewritten", rewritten)
            assert LakeTable(storage).compact(before=HOUR_OVER).files_after == 1
        return written

    monkeypatch.setattr(rewriting, "_rewritten", meanwhile)
    assert table.compact(before=HOUR_OVER) == CompactionResult()
    assert delta_rows(storage) == everything()


def test_files_older_than_a_column_are_compacted_with_it(storage: Storage) -> None:
    table = LakeTable(storage)
    assert land(table, 0, 0, 2)
    wider = extended(RAW, pa.schema([("who", pa.struct([("name", pa.string())]))]))
    files = write(table, [rows(0, [2], wider, who=[{"name": "x"}])], wider)
    assert table.commit(files, {(TOPIC, 0): (2, 3)}, schema=wider)
    deeper = extended(wider, pa.schema([("who", pa.struct([("age", pa.int64())])), ("more", pa.float64())]))
    files = write(table, [rows(0, [3], deeper, who=[{"name": "y", "age": 3}], more=[0.5])], deeper)
    assert table.commit(files, {(TOPIC, 0): (3, 4)}, schema=deeper)
    before = pa.Table.from_batches(table.scan(TOPIC, 0, 0, 10)).to_pylist()
    assert table.compact(before=HOUR_OVER) == CompactionResult(3, 1, 4)
    after = pa.Table.from_batches(table.scan(TOPIC, 0, 0, 10)).to_pylist()
    assert after == before
    assert [row["who"] for row in after] == [None, None, {"name": "x", "age": None}, {"name": "y", "age": 3}]


def test_recreated_topics_of_the_same_name_are_not_mixed(table: LakeTable, storage: Storage) -> None:
    for start in (0, 10):
        writer = table.writer(RAW, "made-again", landed=LANDED)
        writer.write(rows(0, range(start, start + 10)))
        assert table.commit(writer.close(), {("made-again", 0): (start, start + 10)}, schema=RAW)
    assert table.compact(before=HOUR_OVER) == CompactionResult(7, 2, 95)
    assert sum(len(batch) for batch in table.scan("made-again", 0, 0, 100)) == 20
    assert sum(len(batch) for batch in table.scan(TOPIC, 0, 0, 100)) == 50


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_scan_returns_a_range_in_order(table: LakeTable, is_compacted: bool) -> None:
    if is_compacted:
        table.compact(before=HOUR_OVER)
    for partition, start, end in ((0, 0, 50), (0, 7, 33), (1, 3, 41), (0, 49, 60), (1, 5, 10), (2, 0, 50)):
        expected = [
            offset for offset in range(start, min(end, 50)) if partition == 0 or (partition == 1 and offset % 10 < 5)
        ]
        batches = list(table.scan(TOPIC, partition, start, end, ["offset", "value"]))
        assert [offset for batch in batches for offset in batch.column("offset").to_pylist()] == expected
        assert all(batch.schema.names == ["offset", "value"] for batch in batches)


def test_a_scan_sorts_files_written_by_other_programs(table: LakeTable, storage: Storage) -> None:
    deltalake.DeltaTable(storage.url).optimize.compact()
    offsets = [offset for batch in table.scan(TOPIC, 0, 5, 45) for offset in batch.column("offset").to_pylist()]
    assert offsets == list(range(5, 45))
    assert table.compact(before=HOUR_OVER) == CompactionResult()
    assert delta_rows(storage) == everything()


def test_vacuum_deletes_old_unreferenced_files(table: LakeTable, storage: Storage) -> None:
    old, young = write(table, [rows(0, range(50, 60))]), write(table, [rows(0, range(50, 60))])
    bad = write_quarantine(table, 0, [50])
    long_ago = time.time() - timedelta(days=8).total_seconds()
    os.utime(Path(storage.url) / old[0].path, (long_ago, long_ago))
    assert table.vacuum() == 1
    assert table.commit(young, {(TOPIC, 0): (50, 61)}, schema=RAW, quarantined=bad)
    assert delta_rows(storage) == once(0, range(60)) + once(1, [at for at in range(50) if at % 10 < 5])
    table.compact(before=HOUR_OVER)
    assert table.vacuum() == 0
    assert table.vacuum(grace=timedelta(0)) == 6
    assert delta_rows(storage.suffixed("__quarantine")) == once(0, [50])
    assert delta_rows(storage) == once(0, range(60)) + once(1, [at for at in range(50) if at % 10 < 5])


def test_a_reader_that_started_before_a_compaction_keeps_its_files(table: LakeTable, storage: Storage) -> None:
    reader = deltalake.DeltaTable(storage.url)
    long_ago = time.time() - timedelta(days=30).total_seconds()
    for path in Path(storage.url).rglob("*.parquet"):
        os.utime(path, (long_ago, long_ago))
    slow = table.scan(TOPIC, 0, 0, 100)
    first = next(slow)
    assert table.compact(before=HOUR_OVER).files_before == 5
    assert table.vacuum() == 0, "what was replaced just now stays, however old it is"
    assert len(first) + sum(map(len, slow)) == 50
    assert pa.table(reader.to_pyarrow_table(columns=["offset"])).num_rows == 75

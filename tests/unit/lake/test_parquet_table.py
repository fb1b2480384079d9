"""Tables of plain Parquet files: readers that list the folder see every committed row exactly once."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from millstream.pipelines.lake.columns import RAW
from millstream.pipelines.lake.parquet_table import ParquetTable
from millstream.pipelines.lake.rewriting import CompactionResult
from millstream.pipelines.lake.storage import Storage
from millstream_testing.lake_rows import (
    LANDED,
    TOPIC,
    files_rows,
    land,
    next_offset,
    once,
    rows,
    write,
    write_quarantine,
)


def test_files_are_visible_once_committed(storage: Storage) -> None:
    table = ParquetTable(storage)
    assert table.schema() is None
    assert next_offset(table) == 0
    files = write(table, [rows(0, range(10))])
    loser = write(ParquetTable(storage), [rows(0, range(10))])
    assert files_rows(storage) == once(0, [])
    assert table.commit(files, {(TOPIC, 0): (0, 10)}, schema=RAW)
    assert not ParquetTable(storage).commit(loser, {(TOPIC, 0): (0, 10)}, schema=RAW)
    assert files_rows(storage) == once(0, range(10))
    assert next_offset(table) == 10
    assert table.compact(before=LANDED + timedelta(days=1)) == CompactionResult()
    assert [path.name for path in Path(storage.url).iterdir()] == ["append_day=2026-11-15"]


def test_a_crash_before_files_are_moved_is_repaired(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    moved: list[str] = []
    publish = Storage.publish

    def killed_in_between(storage: Storage, path: str, shown: str) -> None:
        if moved:
            raise Killed
        publish(storage, path, shown)
        moved.append(path)

    table = ParquetTable(storage)
    files = [*write(table, [rows(0, range(10))]), *write(table, [rows(0, range(10, 20))])]
    bad = write_quarantine(table, 0, [20])
    with monkeypatch.context() as patched:
        patched.setattr(Storage, "publish", killed_in_between)
        with pytest.raises(Killed):
            table.commit(files, {(TOPIC, 0): (0, 21)}, schema=RAW, quarantined=bad)
    assert sum(files_rows(storage).values()) == 10
    assert next_offset(ParquetTable(storage)) == 21
    assert files_rows(storage) == once(0, range(20))
    assert files_rows(storage.suffixed("__quarantine")) == once(0, [20])


def test_uncommitted_files_are_deleted_and_deleted_files_stay_deleted(storage: Storage) -> None:
    table = ParquetTable(storage)
    assert land(table, 0, 0, 10)
    write(table, [rows(0, range(10, 20))])
    assert table.vacuum() == 0
    assert table.vacuum(grace=timedelta(0)) == 1
    assert files_rows(storage) == once(0, range(10))
    for path in Path(storage.url).rglob("*.parquet"):
        path.unlink()
    assert land(table, 0, 10, 20)
    assert files_rows(storage) == once(0, range(10, 20))


def test_a_scan_reads_the_visible_files(storage: Storage) -> None:
    table = ParquetTable(storage)
    assert land(table, 0, 0, 10)
    assert land(table, 0, 10, 20)
    batches = list(ParquetTable(storage).scan(TOPIC, 0, 5, 15, ["offset"]))
    assert [offset for batch in batches for offset in batch.column("offset").to_pylist()] == list(range(5, 15))

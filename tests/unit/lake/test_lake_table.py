"""Delta tables: every commit is stored exactly once, with concurrent writers and wherever a run dies."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream.core.errors import ColumnMismatch, StalePlan
from millstream.pipelines.lake.columns import RAW, extended
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable
from millstream.pipelines.lake.table_file import WrittenFile, from_json, to_json
from millstream_testing.lake_rows import (
    TOPIC,
    delta_rows,
    land,
    next_offset,
    once,
    rows,
    write,
    write_quarantine,
)


def test_a_table_begins_with_the_first_commit(storage: Storage) -> None:
    table = LakeTable(storage)
    assert table.schema() is None
    assert table.next_offsets([(TOPIC, 0)]) == {}
    assert land(table, 0, 5, 25)
    assert table.next_offsets([(TOPIC, 0), (TOPIC, 1), ("another", 0)]) == {(TOPIC, 0): 25}
    assert delta_rows(storage) == once(0, range(5, 25))
    schema = table.schema()
    assert schema is not None
    assert schema.names == RAW.names


def test_rows_round_trip(storage: Storage) -> None:
    table = LakeTable(storage)
    batch = rows(3, range(100))
    files = write(table, [batch.slice(0, 40), batch.slice(40)])
    assert table.commit(files, {(TOPIC, 3): (0, 100)}, schema=RAW)
    found_rows = deltalake.DeltaTable(storage.url).to_pyarrow_table(columns=batch.schema.names).sort_by("offset")
    assert found_rows.cast(batch.schema).equals(pa.Table.from_batches([batch]))


def test_repeating_a_step_changes_nothing(storage: Storage) -> None:
    assert land(LakeTable(storage), 0, 0, 10)
    assert not land(LakeTable(storage), 0, 0, 10)
    assert not land(LakeTable(storage), 0, 0, 5)
    assert delta_rows(storage) == once(0, range(10))


def test_a_plan_with_a_stale_start_is_refused(storage: Storage) -> None:
    table = LakeTable(storage)
    assert land(table, 0, 0, 10)
    for start, end in ((5, 20), (11, 20), (0, 20)):
        with pytest.raises(StalePlan):
            land(LakeTable(storage), 0, start, end)
    assert delta_rows(storage) == once(0, range(10))


def test_offsets_of_several_partitions_advance_all_or_none(storage: Storage) -> None:
    assert land(LakeTable(storage), 0, 0, 10)
    table = LakeTable(storage)
    files = write(table, [rows(0, range(10, 20)), rows(1, range(10))])
    with pytest.raises(StalePlan):
        table.commit(files, {(TOPIC, 0): (9, 20), (TOPIC, 1): (0, 10)}, schema=RAW)
    assert next_offset(table, 1) == 0
    assert table.commit(files, {(TOPIC, 0): (10, 20), (TOPIC, 1): (0, 10)}, schema=RAW)
    assert delta_rows(storage) == once(0, range(20)) + once(1, range(10))


def test_offsets_advance_without_rows(storage: Storage) -> None:
    table = LakeTable(storage)
    assert land(table, 0, 0, 10)
    assert table.commit([], {(TOPIC, 0): (10, 17)}, schema=RAW)
    assert next_offset(table) == 17


def test_of_two_runs_that_land_the_same_range_one_wins(storage: Storage) -> None:
    assert land(LakeTable(storage), 0, 0, 10)
    for start in range(10, 50, 10):
        done: list[bool] = []
        barrier = threading.Barrier(3)

        def run(start: int, done: list[bool], barrier: threading.Barrier) -> None:
            table = LakeTable(storage)
            files = write(table, [rows(0, range(start, start + 10))])
            barrier.wait()
            done.append(table.commit(files, {(TOPIC, 0): (start, start + 10)}, schema=RAW))

        threads = [threading.Thread(target=run, args=(start, done, barrier)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == [False, False, True]
    assert delta_rows(storage) == once(0, range(50))


def test_writers_and_their_results_are_picklable(storage: Storage) -> None:
    table = LakeTable(storage)
    writer = pickle.loads(pickle.dumps(table.writer(RAW, TOPIC)))
    writer.write(rows(0, range(3)))
    files = writer.close()
    assert from_json(to_json(files)) == files
    assert pickle.loads(pickle.dumps(files)) == files
    assert table.commit(files, {(TOPIC, 0): (0, 3)}, schema=RAW)


def test_row_groups_have_one_partition_and_correct_stats(storage: Storage) -> None:
    table = LakeTable(storage)
    mixed = pa.Table.from_batches([rows(0, range(5)), rows(1, range(7, 9))]).combine_chunks().to_batches()[0]
    (file,) = write(table, [mixed, rows(1, range(9, 12))])
    footer = pq.read_metadata(Path(storage.url) / file.path)
    assert [footer.row_group(at).num_rows for at in range(footer.num_row_groups)] == [5, 5]
    stats = json.loads(file.stats)
    assert (stats["numRecords"], file.rows) == (10, 10)
    assert (stats["minValues"]["offset"], stats["maxValues"]["offset"]) == (0, 11)
    assert (stats["minValues"]["partition"], stats["maxValues"]["partition"]) == (0, 1)
    assert stats["maxValues"]["timestamp"] == "2026-09-21T14:13:20.012Z"
    assert stats["nullCount"]["offset"] == 0


def test_columns_are_added_and_missing_ones_are_null(storage: Storage) -> None:
    table = LakeTable(storage)
    assert land(table, 0, 0, 2)
    wider = extended(RAW, pa.schema([("amount", pa.int32()), ("who", pa.struct([("name", pa.string())]))]))
    assert wider.field("amount").type == pa.int64()
    files = write(table, [rows(0, [2], wider, amount=[7], who=[{"name": "x"}])], wider)
    assert table.commit(files, {(TOPIC, 0): (2, 3)}, schema=wider)
    deeper = extended(wider, pa.schema([("who", pa.struct([("age", pa.int8())]))]))
    files = write(table, [rows(0, [3], deeper, who=[{"name": "y", "age": 3}])], deeper)
    assert table.commit(files, {(TOPIC, 0): (3, 4)}, schema=deeper)
    assert land(table, 0, 4, 5)
    found_rows = deltalake.DeltaTable(storage.url).scan(columns=["offset", "amount", "who"]).read_all()
    row_list = sorted(pa.table(found_rows).to_pylist(), key=lambda row: int(row["offset"]))
    assert [row["amount"] for row in row_list] == [None, None, 7, None, None]
    assert [row["who"] for row in row_list][2:] == [{"name": "x", "age": None}, {"name": "y", "age": 3}, None]


def test_a_column_of_another_type_is_refused(storage: Storage) -> None:
    table = LakeTable(storage)
    known = extended(RAW, pa.schema([("amount", pa.int64())]))
    assert table.commit([], {(TOPIC, 0): (0, 1)}, schema=known)
    assert extended(known, pa.schema([("amount", pa.float64())])) == known
    other = extended(RAW, pa.schema([("amount", pa.float64())]))
    with pytest.raises(ColumnMismatch, match="'amount' is int64 in the table"):
        table.commit([], {(TOPIC, 0): (1, 2)}, schema=other)


def test_concurrent_runs_create_the_table_or_add_a_column(storage: Storage) -> None:
    schemas = [extended(RAW, pa.schema([("a", pa.int64())])), extended(RAW, pa.schema([("b", pa.string())]))]
    barrier = threading.Barrier(2)
    failures: list[BaseException] = []

    def run(partition: int) -> None:
        try:
            table = LakeTable(storage)
            files = write(table, [rows(partition, range(4))])
            barrier.wait()
            assert table.commit(files, {(TOPIC, partition): (0, 4)}, schema=schemas[partition])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(partition,)) for partition in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert delta_rows(storage) == once(0, range(4)) + once(1, range(4))
    schema = LakeTable(storage).schema()
    assert schema is not None
    assert {"a", "b"} < set(schema.names)


def test_quarantined_rows_are_visible_with_the_commit(storage: Storage) -> None:
    table = LakeTable(storage)
    for start in (0, 10):
        files = write(table, [rows(0, range(start, start + 8))])
        bad = write_quarantine(table, 0, [start + 8, start + 9])
        assert table.commit(files, {(TOPIC, 0): (start, start + 10)}, schema=RAW, quarantined=bad)
        assert not table.commit(files, {(TOPIC, 0): (start, start + 10)}, schema=RAW, quarantined=bad)
    assert delta_rows(storage) == once(0, [*range(8), *range(10, 18)])
    assert delta_rows(storage.suffixed("__quarantine")) == once(0, [8, 9, 18, 19])


def test_a_crash_before_the_quarantine_keeps_its_rows(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object, **__: object) -> Sequence[WrittenFile]:
        raise Killed

    table = LakeTable(storage)
    files = write(table, [rows(0, range(8))])
    bad = write_quarantine(table, 0, [8, 9])
    with monkeypatch.context() as patched:
        patched.setattr("millstream.pipelines.lake.table._manifest", killed)
        with pytest.raises(Killed):
            table.commit(files, {(TOPIC, 0): (0, 10)}, schema=RAW, quarantined=bad)
    assert delta_rows(storage.suffixed("__quarantine")) == once(0, [])
    again = LakeTable(storage)
    assert next_offset(again) == 10
    assert delta_rows(storage.suffixed("__quarantine")) == once(0, [8, 9])
    assert next_offset(LakeTable(storage)) == 10
    assert delta_rows(storage.suffixed("__quarantine")) == once(0, [8, 9])


def test_a_deleted_table_is_rebuilt(storage: Storage) -> None:
    table = LakeTable(storage)
    assert land(table, 0, 0, 10)
    files = write(table, [rows(0, range(10, 20))])
    shutil.rmtree(storage.url)
    for _ in range(2):
        with pytest.raises(StalePlan, match="was deleted"):
            table.commit(files, {(TOPIC, 0): (10, 20)}, schema=RAW)
    assert next_offset(table) == 0
    assert land(table, 0, 0, 5)
    assert delta_rows(storage) == once(0, range(5))
    shutil.rmtree(storage.url)
    assert table.schema() is None
    assert next_offset(table) == 0
    assert land(table, 0, 0, 3)
    assert delta_rows(storage) == once(0, range(3))

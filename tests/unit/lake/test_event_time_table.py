"""Tables partitioned by event time: each row exactly once, in the folder of its day, also after scans and rewrites."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pandas  # type: ignore[import-untyped]
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.core.payload_columns import HOUR, EventTime
from millstream.pipelines.jobs.land.event_time import EventTimeRule
from millstream.pipelines.lake import task_writer
from millstream.pipelines.lake.columns import APPEND_DAY, EVENT_COLUMNS, EVENT_DAY, EVENT_HOUR, RAW, extended
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable, open_table
from millstream.pipelines.lake.task_writer import MERGED_BYTES, EventTimeWriter, RowGroup, streamed_group
from millstream_testing.lake_rows import LANDED, TOPIC, delta_rows, in_this_process, once, rows, write

FIRST = datetime(2026, 11, 10, tzinfo=UTC)
BY_DAY = EventTime("day", "created_at")
BY_HOUR = EventTime(HOUR, "created_at")
CREATED = pa.field("created_at", pa.timestamp("us", tz="UTC"))


def schema_of(event_time: EventTime, *more: pa.Field) -> pa.Schema:
    return extended(pa.schema([*RAW, *EVENT_COLUMNS[event_time.unit]]), pa.schema([CREATED, *more]))


def events(
    partition: int, times: dict[int, datetime], event_time: EventTime = BY_DAY, **columns: list[object]
) -> pa.RecordBatch:
    """Messages by offset with their event times."""
    made = rows(partition, times, extended(RAW, pa.schema([CREATED])), created_at=list(times.values()))
    for name, values in columns.items():
        made = made.append_column(name, pa.array(values))
    found_times, reasons = EventTimeRule(event_time).apply(made, pa.nulls(len(made), pa.string()))
    assert reasons.null_count == len(made)
    return found_times


def commit(table: LakeTable, batches: Sequence[pa.RecordBatch], start: int, end: int, schema: pa.Schema) -> None:
    assert table.commit(write(table, batches, schema), {(TOPIC, 0): (start, end)}, schema=schema)


def opened(place: Path, event_time: EventTime = BY_DAY, format: str = "delta") -> LakeTable:
    return open_table(str(place), format=format, event_time=str(event_time))


def spread(start: int, end: int, days: int = 3) -> dict[int, datetime]:
    """Times that cycle through some days."""
    return {offset: FIRST + timedelta(days=offset % days, minutes=offset % 1440) for offset in range(start, end)}


def test_each_row_is_in_the_folder_of_its_day(tmp_path: Path) -> None:
    table = opened(tmp_path / "orders")
    assert table.event_time() is None
    commit(table, [events(0, spread(0, 30))], 0, 30, schema_of(BY_DAY))
    late = FIRST - timedelta(days=400)
    commit(table, [events(0, {30: late})], 30, 31, schema_of(BY_DAY))
    assert opened(tmp_path / "orders").event_time() == "day(created_at)"
    folders = {path.name for path in (tmp_path / "orders").iterdir()} - {"_delta_log"}
    assert folders == {"event_day=2026-11-10", "event_day=2026-11-11", "event_day=2026-11-12", "event_day=2025-10-06"}
    table_rows = deltalake.DeltaTable(str(tmp_path / "orders")).to_pyarrow_table()
    assert all(row[EVENT_DAY] == row["created_at"].date() for row in table_rows.to_pylist())
    assert set(table_rows.column(APPEND_DAY).to_pylist()) == {LANDED.date()}
    assert delta_rows(Storage.at(str(tmp_path / "orders"))) == once(0, range(31))


def test_readers_see_the_partitions_and_prune_the_others(tmp_path: Path) -> None:
    delta, plain = tmp_path / "orders", tmp_path / "events"
    for place, format in ((delta, "delta"), (plain, "parquet")):
        table = opened(place, BY_HOUR, format)
        commit(table, [events(0, spread(0, 30), BY_HOUR)], 0, 30, schema_of(BY_HOUR))
    day = date(2026, 11, 11)
    expected = sorted(range(1, 30, 3))
    orders = deltalake.DeltaTable(str(delta))
    assert orders.metadata().partition_columns == [EVENT_DAY, EVENT_HOUR]
    assert sorted(orders.to_pandas(filters=[(EVENT_DAY, "=", day)])["offset"]) == expected
    assert len(orders.file_uris(file_pruning_predicate=[(EVENT_DAY, "=", "2026-11-11")])) < len(orders.file_uris())
    connection = duckdb.connect()
    connection.register("orders", orders.to_pyarrow_dataset())
    query = f"select \"offset\" from orders where {EVENT_DAY} = date '2026-11-11' order by 1"
    assert [offset for (offset,) in connection.sql(query).fetchall()] == expected
    day_offsets = polars.scan_delta(str(delta)).filter(polars.col(EVENT_DAY) == day).select("offset").collect()
    assert sorted(day_offsets["offset"]) == expected
    pattern = f"{plain}/*/*/*.parquet"
    query = f"select \"offset\" from read_parquet('{pattern}', hive_partitioning=true) where {EVENT_DAY} = '2026-11-11'"
    assert sorted(offset for (offset,) in duckdb.connect().sql(query).fetchall()) == expected
    frame = pandas.read_parquet(plain, filters=[(EVENT_DAY, "=", "2026-11-11")])
    assert sorted(frame["offset"]) == expected
    assert set(frame[EVENT_HOUR].astype(int)) == {0}


Times = st.lists(st.integers(-40 * 24, 40 * 24), min_size=1, max_size=60)


@settings(max_examples=settings().max_examples // 4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(Times, min_size=1, max_size=5), compacts=st.booleans(), by=st.sampled_from([BY_DAY, BY_HOUR]))
def test_ranges_are_read_in_order_with_any_event_times(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]], compacts: bool, by: EventTime
) -> None:
    place = tmp_path_factory.mktemp("lake") / "orders"
    table = opened(place, by)
    end = 0
    for hours in batches:
        times = {end + at: FIRST + timedelta(hours=hour) for at, hour in enumerate(hours)}
        commit(table, [events(0, times, by)], end, end + len(hours), schema_of(by))
        end += len(hours)
    if compacts:
        table.compact(before=datetime.now(UTC) + timedelta(hours=2))
        folders = {path.parent for path in place.rglob("*.parquet")}
        assert len(deltalake.DeltaTable(str(place)).file_uris()) == len(folders)
    start, stop = sorted(random.Random(end).choices(range(end + 1), k=2))
    assert offsets(table.scan(TOPIC, 0, 0, end)) == list(range(end))
    assert offsets(table.scan(TOPIC, 0, start, stop, ("offset",))) == list(range(start, stop))
    assert delta_rows(Storage.at(str(place))) == once(0, range(end))


def offsets(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


def test_merged_row_groups_hold_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.pipelines.lake.task_writer.MERGED_ROWS", 64)
    table = opened(tmp_path / "orders")
    commit(table, [events(0, spread(0, 5000, days=7))], 0, 5000, schema_of(BY_DAY))
    assert offsets(table.scan(TOPIC, 0, 0, 5000)) == list(range(5000))


def test_a_bounded_number_of_row_groups_is_merged_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_writer, "MERGED_ROWS", 64)
    monkeypatch.setattr(task_writer, "MERGED_MAX", 3)
    opened_now, most = 0, 0

    def streamed(*given: Any) -> Iterator[pa.RecordBatch]:
        nonlocal opened_now, most
        opened_now += 1
        most = max(most, opened_now)
        try:
            yield from read(*given)
        finally:
            opened_now -= 1

    read = task_writer.streamed_group
    monkeypatch.setattr(task_writer, "streamed_group", streamed)
    table = opened(tmp_path / "orders")
    commit(table, [events(0, spread(0, 5000, days=17))], 0, 5000, schema_of(BY_DAY))
    assert offsets(table.scan(TOPIC, 0, 0, 5000)) == list(range(5000))
    assert most == 3


def test_a_row_group_is_read_incrementally(tmp_path: Path) -> None:
    count = 8000
    texts = [random.Random(number).randbytes(1000) for number in range(count)]
    table = pa.table({"partition": [0] * count, "offset": range(count), "value": texts})
    pq.write_table(table, tmp_path / "rows.parquet", use_dictionary=False, compression="none")

    class Source(io.FileIO):
        taken = 0

        def readinto(self, buffer: Any) -> int:
            Source.taken += len(buffer)
            return super().readinto(buffer)

        def read(self, size: int | None = -1) -> bytes:
            Source.taken += size or 0
            return super().read(-1 if size is None else size)

    class Files:
        def open_input_file(self, path: str) -> pa.NativeFile:
            return pa.PythonFile(Source(tmp_path / path), mode="r")

    group = RowGroup("rows.parquet", 0, (0, 0), (0, count - 1))
    batches = streamed_group(Files(), group, table.schema)
    first = next(batches)
    assert 500 < len(first) < 2000
    assert first.nbytes < 2 * MERGED_BYTES
    assert Source.taken < 4 * MERGED_BYTES
    assert len(first) + sum(map(len, batches)) == count


def test_rewritten_files_stay_in_their_folders(tmp_path: Path) -> None:
    table = opened(tmp_path / "orders")
    schema = schema_of(BY_DAY, pa.field("total", pa.int64()))
    commit(table, [events(0, spread(0, 30), total=list(range(30)))], 0, 30, schema)
    assert table.widen([("total",)], run=in_this_process, bytes_max=2**40) == {}
    table_rows = deltalake.DeltaTable(str(tmp_path / "orders")).to_pyarrow_table()
    assert table_rows.schema.field("total").type == pa.float64()
    assert all(row[EVENT_DAY] == row["created_at"].date() for row in table_rows.to_pylist())
    assert sorted(table_rows.column("offset").to_pylist()) == list(range(30))


def test_rows_landed_since_a_time_are_identified(tmp_path: Path) -> None:
    table = opened(tmp_path / "orders")
    for number in range(3):
        landed = LANDED + timedelta(hours=number)
        batch = events(0, spread(10 * number, 10 * number + 10))
        files = write(table, [batch], schema_of(BY_DAY), landed=landed)
        assert table.commit(files, {(TOPIC, 0): (10 * number, 10 * number + 10)}, schema=schema_of(BY_DAY))
    table.compact(before=datetime.now(UTC) + timedelta(hours=2))
    offsets_by_hour: dict[datetime, list[int]] = {}
    for hour, batch in table.landed_since(LANDED + timedelta(hours=1), ["offset"]):
        offsets_by_hour.setdefault(hour, []).extend(batch.column("offset").to_pylist())
    first = LANDED.replace(minute=0)
    assert {hour: sorted(offsets) for hour, offsets in offsets_by_hour.items()} == {
        first + timedelta(hours=1): list(range(10, 20)),
        first + timedelta(hours=2): list(range(20, 30)),
    }


def test_the_buffers_and_open_files_of_a_writer_are_bounded(tmp_path: Path) -> None:
    storage = Storage.at(str(tmp_path / "orders"))
    schema = schema_of(BY_HOUR)
    writer = EventTimeWriter(storage, schema, TOPIC, landed=LANDED, held_bytes=20_000, open_files=3)
    for start in range(0, 4000, 200):
        times = {offset: FIRST + timedelta(hours=offset % 20) for offset in range(start, start + 200)}
        writer.write(events(0, times, BY_HOUR))
        assert sum(hour_writer.held_bytes for hour_writer in writer._writers.values()) <= 20_000
        assert sum(hour_writer.is_open for hour_writer in writer._writers.values()) <= 3
    written = writer.close()
    assert sum(file.rows for file in written) == 4000
    assert {file.path.rpartition("/")[0] for file in written} == {
        f"event_day=2026-11-10/event_hour={hour}" for hour in range(20)
    }
    table = open_table(str(tmp_path / "orders"), event_time=str(BY_HOUR))
    assert table.commit(written, {(TOPIC, 0): (0, 4000)}, schema=schema)
    assert offsets(table.scan(TOPIC, 0, 0, 4000)) == list(range(4000))


def test_an_aborted_writer_leaves_no_files(tmp_path: Path) -> None:
    storage = Storage.at(str(tmp_path / "orders"))
    writer = EventTimeWriter(storage, schema_of(BY_DAY), TOPIC, landed=LANDED, held_bytes=1000, open_files=2)
    writer.write(events(0, spread(0, 500)))
    assert list(storage.data_files())
    writer.abort()
    assert not list(storage.data_files())

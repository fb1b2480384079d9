"""Integer columns become double: every row is kept exactly once, and a late or killed writer changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream.core.errors import Conflict, StalePlan
from millstream.pipelines.lake.columns import ELEMENT, RAW, FieldPath
from millstream.pipelines.lake.delta_log import DeltaLog
from millstream.pipelines.lake.rewriting import FileWork, InexactIntegers, Rewrite, first_name, renamed
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable, open_table
from millstream.pipelines.lake.table_file import ActiveFile
from millstream_testing.lake_rows import (
    LANDED,
    TOPIC,
    delta_rows,
    files_rows,
    in_this_process,
    next_offset,
    once,
    rows,
    write,
    write_quarantine,
)

LARGE = 2**60
TOTAL: FieldPath = ("total",)
NARROW = RAW.append(pa.field("total", pa.int64()))
WIDE = RAW.append(pa.field("total", pa.float64()))
DEEP = pa.struct(
    [
        pa.field("age", pa.int64()),
        pa.field("marks", pa.list_(pa.field("element", pa.int64()))),
        pa.field("id", pa.int64()),
    ]
)
AGE: FieldPath = ("buyer", "age")
MARKS: FieldPath = ("buyer", "marks", ELEMENT)


class Killed(BaseException):
    """The process died here."""


@pytest.fixture(params=["delta", "parquet"])
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def land(table: LakeTable, start: int, totals: Sequence[Any], schema: pa.Schema = NARROW, **how: Any) -> bool:
    """Land messages with numbers in a column."""
    span = range(start, start + len(totals))
    files = write(table, [rows(0, span, schema, **{schema.names[-1]: list(totals)})], schema, **how)
    return table.commit(files, {(TOPIC, 0): (start, span.stop)}, schema=schema)


def widen(
    table: LakeTable, *places: FieldPath, run: Any = in_this_process, bytes_max: int = LARGE
) -> dict[FieldPath, str]:
    return table.widen(places or [TOTAL], run=run, bytes_max=bytes_max)


def totals(storage: Storage, format: str) -> dict[int, Any]:
    """The numbers of a table by offset, as read by any reader."""
    if format == "delta":
        stored_rows = pa.table(deltalake.DeltaTable(storage.url).to_pyarrow_table())
    else:
        stored_rows = pa.concat_tables(
            (pq.ParquetFile(path).read() for path in Path(storage.url).rglob("*.parquet")), promote_options="permissive"
        )
    assert stored_rows.schema.field("total").type == pa.float64()
    pairs = zip(stored_rows.column("offset").to_pylist(), stored_rows.column("total").to_pylist(), strict=True)
    count = delta_rows if format == "delta" else files_rows
    assert set(count(storage).values()) == {1}
    return dict(pairs)


def files_in(storage: Storage) -> set[str]:
    return {path.name for path in Path(storage.url).rglob("*.parquet")}


def test_integers_become_doubles(storage: Storage, format: str) -> None:
    table = open_table(storage.url, format=format)
    assert land(table, 0, [1, None, -(2**53)])
    assert land(table, 3, [2**53], landed=LANDED - timedelta(hours=3))
    assert table.commit(write(table, [rows(0, [4])]), {(TOPIC, 0): (4, 5)}, schema=RAW)
    bad = write_quarantine(table, 0, [5])
    assert table.commit([], {(TOPIC, 0): (5, 6)}, schema=RAW, quarantined=bad)
    assert widen(table) == {}
    assert table.schema() == WIDE
    assert next_offset(table) == 6
    assert land(table, 6, [5.5], WIDE)
    expected = {0: 1.0, 1: None, 2: -(2.0**53), 3: 2.0**53, 4: None, 6: 5.5}
    assert totals(storage, format) == expected
    again = open_table(storage.url, format=format)
    found_totals = {row["offset"]: row["total"] for batch in again.scan(TOPIC, 0, 0, 10) for row in batch.to_pylist()}
    assert found_totals == expected
    hours = {path.parent.name for path in Path(storage.url).rglob("*.parquet")}
    assert hours == {"append_hour=21", "append_hour=18"}
    assert widen(again) == {}


def test_common_readers_read_a_widened_table(storage: Storage) -> None:
    table = LakeTable(storage)
    assert land(table, 0, [1, 2])
    assert widen(table) == {}
    assert land(table, 2, [0.5], WIDE)
    assert polars.read_delta(storage.url).select("total").sum().item() == 3.5
    assert polars.scan_delta(storage.url).filter(polars.col("total") > 0.7).select("offset").collect().height == 2
    landed = deltalake.DeltaTable(storage.url)
    assert landed.to_pandas()["total"].sum() == 3.5
    assert landed.protocol().min_reader_version == 1
    orders = landed.to_pyarrow_dataset()
    with duckdb.connect() as database:
        database.register("orders", orders)
        assert database.execute("select sum(total), count(*) from orders where total < 2").fetchone() == (1.5, 2)


def test_struct_fields_and_array_elements_are_widened(storage: Storage, format: str) -> None:
    schema = RAW.append(pa.field("buyer", DEEP))
    table = open_table(storage.url, format=format)
    assert land(
        table, 0, [{"age": 1, "marks": [1, 2], "id": 2**60}, None, {"age": None, "marks": None, "id": 1}], schema
    )
    refused = widen(table, AGE, MARKS, ("buyer", "id"))
    assert refused == {("buyer", "id"): f"it has {2**60}, which doubles cannot hold exactly"}
    buyers = [row["buyer"] for batch in table.scan(TOPIC, 0, 0, 3, ["buyer"]) for row in batch.to_pylist()]
    assert buyers == [{"age": 1.0, "marks": [1.0, 2.0], "id": 2**60}, None, {"age": None, "marks": None, "id": 1}]
    kind = (table.schema() or RAW).field("buyer").type
    assert [str(field.type) for field in kind] == ["double", "list<element: double>", "int64"]


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 2**63 - 1])
def test_a_column_with_integers_that_doubles_cannot_represent_is_not_widened(
    storage: Storage, format: str, number: int
) -> None:
    table = open_table(storage.url, format=format)
    assert land(table, 0, [1, number])
    assert str(number) in widen(table)[TOTAL]
    assert table.schema() == NARROW


def test_files_without_bounds_are_read(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.pipelines.lake.task_writer.has_group_bounds", lambda _kind: False)
    table = LakeTable(storage)
    assert land(table, 0, [1, None, 2**53 + 1])
    assert str(2**53 + 1) in widen(table)[TOTAL]


def test_a_large_table_is_not_widened(storage: Storage) -> None:
    table = LakeTable(storage)
    assert land(table, 0, [1])
    before = files_in(storage)
    assert "raise widen.max.bytes" in widen(table, bytes_max=10)[TOTAL]
    assert table.schema() == NARROW
    assert files_in(storage) == before


def meanwhile(act: Callable[[], object], when: type = Rewrite) -> Any:
    """Run something else once, while files are processed."""
    pending = [act]

    def run(work: FileWork[ActiveFile], files: Sequence[ActiveFile]) -> Mapping[str, str]:
        done = in_this_process(work, files)
        if pending and isinstance(work, when):
            pending.pop()()
        return done

    return run


def test_rows_landed_meanwhile_are_widened_too(storage: Storage, format: str) -> None:
    table, other = (open_table(storage.url, format=format) for _ in range(2))
    assert land(table, 0, [1, 2])
    assert widen(table, run=meanwhile(lambda: land(other, 2, [3]))) == {}
    assert totals(storage, format) == {0: 1.0, 1: 2.0, 2: 3.0}
    # A step planned with the old columns is refused, and must be planned again.
    with pytest.raises(StalePlan):
        land(other, 3, [4])
    assert land(other, 3, [4.5], WIDE)
    assert totals(storage, format) == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.5}


def test_rows_compacted_meanwhile_are_not_duplicated(storage: Storage) -> None:
    table, other = LakeTable(storage), LakeTable(storage)
    for start in range(3):
        assert land(table, start, [start])
    compact = lambda: other.compact(before=LANDED + timedelta(hours=1))  # noqa: E731
    assert widen(table, run=meanwhile(compact)) == {}
    assert totals(storage, "delta") == {0: 0.0, 1: 1.0, 2: 2.0}
    assert len(DeltaLog(storage).refresh().file_uris()) == 1  # type: ignore[union-attr]


def test_a_stale_compaction_is_refused(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    table, other = LakeTable(storage), LakeTable(storage)
    for start in range(3):
        assert land(table, start, [start])
    commit = DeltaLog.commit

    def overtaken(log: DeltaLog, *arguments: Any, **named: Any) -> bool:
        monkeypatch.undo()
        assert widen(table) == {}
        return commit(log, *arguments, **named)

    monkeypatch.setattr(DeltaLog, "commit", overtaken)
    other.compact(before=LANDED + timedelta(hours=1))
    assert totals(storage, "delta") == {0: 0.0, 1: 1.0, 2: 2.0}


def test_of_two_concurrent_widenings_one_deletes_its_files(storage: Storage, format: str) -> None:
    table, other = (open_table(storage.url, format=format) for _ in range(2))
    assert land(table, 0, [1, 2])
    assert widen(table, run=meanwhile(lambda: widen(other))) == {}
    assert totals(storage, format) == {0: 1.0, 1: 2.0}
    staged = storage if format == "delta" else storage.staged()
    assert len(files_in(staged)) == (2 if format == "delta" else 0)
    table.vacuum(grace=timedelta(0))
    assert len(files_in(storage)) == 1


def test_a_number_landed_meanwhile_that_is_too_large_aborts_it(storage: Storage) -> None:
    table, other = LakeTable(storage), LakeTable(storage)
    assert land(table, 0, [1])
    with pytest.raises(pa.ArrowInvalid):
        widen(table, run=meanwhile(lambda: land(other, 1, [2**60]), InexactIntegers))
    assert str(2**60) in widen(table)[TOTAL]
    assert delta_rows(storage) == once(0, range(2))


def test_continuous_concurrent_commits_abort_it(storage: Storage) -> None:
    table, other = LakeTable(storage), LakeTable(storage)
    assert land(table, 0, [1])

    def run(work: FileWork[ActiveFile], files: Sequence[ActiveFile]) -> Mapping[str, str]:
        done = in_this_process(work, files)
        assert land(other, next_offset(other), [1])
        return done

    with pytest.raises(Conflict):
        widen(table, run=run)
    assert table.schema() == NARROW
    assert files_in(storage) == {Path(file).name for file in deltalake.DeltaTable(storage.url).file_uris()}


def test_unused_files_are_deleted_when_a_later_step_fails(storage: Storage) -> None:
    table, other = LakeTable(storage), LakeTable(storage)
    assert land(table, 0, [1])
    overtaken = meanwhile(lambda: land(other, 1, [2]))

    def run(work: FileWork[ActiveFile], files: Sequence[ActiveFile]) -> Mapping[str, str]:
        if isinstance(work, Rewrite) and len(files_in(storage)) > 1:
            raise OSError("full")
        return overtaken(work, files)  # type: ignore[no-any-return]

    with pytest.raises(OSError, match="full"):
        widen(table, run=run)
    assert files_in(storage) == {Path(file).name for file in deltalake.DeltaTable(storage.url).file_uris()}
    assert widen(table) == {}
    assert totals(storage, "delta") == {0: 1.0, 1: 2.0}


@pytest.mark.parametrize("is_after", [False, True])
def test_a_kill_around_the_commit_leaves_either_version(
    storage: Storage, format: str, is_after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_table(storage.url, format=format)
    assert land(table, 0, [1, 2])
    replace_all = DeltaLog.replace_all

    def killed(log: DeltaLog, *arguments: Any) -> bool:
        if is_after:
            replace_all(log, *arguments)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(DeltaLog, "replace_all", killed)
        with pytest.raises(Killed):
            widen(table)
    again = open_table(storage.url, format=format)
    assert next_offset(again) == 2
    assert again.schema() == (WIDE if is_after else NARROW)
    count = delta_rows if format == "delta" else files_rows
    assert count(storage) == once(0, range(2))
    assert widen(again) == {}
    assert land(again, 2, [0.5], WIDE)
    assert totals(storage, format) == {0: 1.0, 1: 2.0, 2: 0.5}
    again.vacuum(grace=timedelta(0))
    assert totals(storage, format) == {0: 1.0, 1: 2.0, 2: 0.5}
    assert len(files_in(storage)) == 2


def test_a_kill_before_plain_files_are_moved_is_repaired(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    table = open_table(storage.url, format="parquet")
    for start in range(3):
        assert land(table, start, [start])
    publish = Storage.publish
    moved: list[str] = []

    def killed(place: Storage, path: str, shown: str) -> None:
        if moved:
            raise Killed
        publish(place, path, shown)
        moved.append(path)

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "publish", killed)
        with pytest.raises(Killed):
            widen(table)
    assert files_rows(storage) == once(0, range(3))
    reader = open_table(storage.url, format="parquet")
    scanned = {row["offset"]: row["total"] for batch in reader.scan(TOPIC, 0, 0, 3) for row in batch.to_pylist()}
    assert scanned == {0: 0.0, 1: 1.0, 2: 2.0}
    assert next_offset(open_table(storage.url, format="parquet")) == 3
    assert totals(storage, "parquet") == {0: 0.0, 1: 1.0, 2: 2.0}


def test_deleted_plain_files_stay_deleted(storage: Storage) -> None:
    table = open_table(storage.url, format="parquet")
    assert land(table, 0, [0])
    (gone,) = Path(storage.url).rglob("*.parquet")
    assert land(table, 1, [1])
    gone.unlink()
    assert widen(table) == {}
    assert totals(storage, "parquet") == {1: 1.0}


def test_files_of_other_programs_keep_their_names() -> None:
    own = "append_day=2026-11-16/append_hour=3/a_b.parquet"
    again = renamed(own, "0123456789abcdef")
    assert (first_name(again), first_name(renamed(again, "f" * 16))) == (own, own)
    foreign = [f"part-00000-9d7f.c{number:03}.snappy.parquet" for number in range(3)]
    assert len({renamed(name, "0" * 16) for name in foreign}) == 3

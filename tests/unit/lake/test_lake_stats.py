"""Column bounds: no reader that prunes files by them misses a row, for any values."""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream.pipelines.lake.columns import RAW, extended
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable
from millstream_testing.lake_rows import TOPIC, land, rows, write

FIELDS = pa.schema(
    [
        ("whole", pa.int64()),
        ("part", pa.float64()),
        ("text", pa.string()),
        ("moment", pa.timestamp("us", tz="UTC")),
        ("day", pa.date32()),
        ("a.b", pa.int64()),
        ("a", pa.struct([("b", pa.int64())])),
    ]
)
SCHEMA = extended(RAW, FIELDS)
LONG = st.integers(-(2**63), 2**63 - 1)
MICROSECONDS = st.integers(-(2**62), 2**62)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "whole": st.none() | LONG,
            "part": st.none() | st.floats(allow_nan=False),
            "text": st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
            "moment": st.none() | MICROSECONDS,
            "day": st.none() | st.dates(),
            "a.b": st.none() | LONG,
            "a": st.none() | st.fixed_dictionaries({"b": LONG}),
        }
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=15, deadline=None)
@given(found=ROWS)
@example(found=[{"moment": 2**60, "a.b": 1, "a": {"b": 99}, "day": date(1, 1, 1)}])
@example(found=[{"moment": -62135596800_000_001, "part": float("inf"), "text": "x" * 33}])
def test_every_row_is_found_by_each_of_its_values(found: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        storage = Storage.at(folder + "/orders")
        table = LakeTable(storage)
        columns = {name: [row.get(name) for row in found] for name in FIELDS.names}
        files = write(table, [rows(0, range(len(found)), SCHEMA, **columns)], SCHEMA)
        assert table.commit(files, {(TOPIC, 0): (0, len(found))}, schema=SCHEMA)
        dataset = deltalake.DeltaTable(storage.url).to_pyarrow_dataset()
        for name in ("whole", "part", "text", "moment", "day"):
            values = pa.array(columns[name], FIELDS.field(name).type)
            for value in values:
                value_filter = pc.field(name) == value if value.is_valid else pc.field(name).is_null()
                assert dataset.count_rows(filter=value_filter) >= 1


def test_times_are_rounded_outwards(tmp_path: Path) -> None:
    table = LakeTable(Storage.at(str(tmp_path / "orders")))
    moments = [datetime(2026, 1, 2, 3, 4, 5, 678_900, tzinfo=UTC), datetime(26, 1, 2, 0, 0, 0, 1, tzinfo=UTC)]
    (file,) = write(table, [rows(0, range(2), timestamp=moments)])
    stats = json.loads(file.stats)
    assert stats["minValues"]["timestamp"] == "0026-01-02T00:00:00.000Z"
    assert stats["maxValues"]["timestamp"] == "2026-01-02T03:04:05.679Z"


@pytest.mark.parametrize("moment", [None, 2**60, -(2**60), 253402300799_999_999])
def test_unrepresentable_times_leave_a_file_without_bounds(tmp_path: Path, moment: int | None) -> None:
    table = LakeTable(Storage.at(str(tmp_path / "orders")))
    (file,) = write(table, [rows(0, range(3), timestamp=[0, moment, 0])])
    assert json.loads(file.stats) == {"numRecords": 3}
    assert table.commit([file], {(TOPIC, 0): (0, 3)}, schema=RAW)
    assert land(table, 0, 3, 5)
    assert sum(len(batch) for batch in table.scan(TOPIC, 0, 1, 4, ["offset"])) == 3
    dataset = deltalake.DeltaTable(table.storage.url).to_pyarrow_dataset()
    assert dataset.count_rows(filter=pc.field("offset") < 3) == 3
    zero = pa.scalar(0, pa.timestamp("us", tz="UTC"))
    assert dataset.count_rows(filter=pc.field("timestamp") == zero) == 2


FILTERS = {
    "text = 'short'": 1,
    f"text = '{'x' * 40}'": 1,
    "text IS NULL": 3,
    "n = 5": 1,
    "n > 5": 1,
    "n IS NULL": 3,
    "n IS NOT NULL": 2,
    "flag": 1,
    "NOT flag": 1,
    '"offset" > 1': 3,
    "timestamp_type = 0": 5,
    "append_hour = 21": 5,
}


@pytest.fixture(scope="module", params=[False, True], ids=["commits", "checkpoint"])
def grown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table that gained columns with its second commit; some values have no bounds."""
    more = extended(RAW, pa.schema([("text", pa.string()), ("n", pa.int64()), ("flag", pa.bool_())]))
    table = LakeTable(Storage.at(str(tmp_path_factory.mktemp("lake") / "orders")))
    assert land(table, 0, 0, 2)
    files = write(table, [rows(0, [2, 3], more, text=["x" * 40, None], n=[5, None], flag=[True, None])], more)
    assert table.commit(files, {(TOPIC, 0): (2, 4)}, schema=more)
    if request.param:
        deltalake.DeltaTable(table.storage.url).create_checkpoint()
    files = write(table, [rows(0, [4], more, text=["short"], n=[6], flag=[False])], more)
    assert table.commit(files, {(TOPIC, 0): (4, 5)}, schema=more)
    return table.storage.url


@pytest.mark.parametrize("condition", FILTERS)
def test_filters_find_the_same_rows_for_every_reader(grown: str, condition: str) -> None:
    table = deltalake.DeltaTable(grown)
    connection = duckdb.connect()
    connection.register("orders", table.to_pyarrow_dataset())
    counted = connection.execute(f"SELECT count(*) FROM orders WHERE {condition}").fetchall()
    lazy = polars.scan_delta(grown).sql(f"SELECT count(*) AS rows FROM self WHERE {condition}").collect()
    scanned = pa.table(table.scan(predicate=condition).read_all()).num_rows
    assert (counted[0][0], lazy["rows"][0], scanned) == (FILTERS[condition],) * 3

"""DuckDB, Polars and pandas read lake tables unmodified and offline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pandas  # type: ignore[import-untyped]
import polars
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from millstream.pipelines.lake.columns import RAW, extended
from millstream.pipelines.lake.table import open_table
from millstream_testing.lake_rows import TOPIC, land, rows, write

WIDER = extended(RAW, pa.schema([("amount", pa.int64()), ("customer", pa.struct([("name", pa.string())]))]))
DEEPER = extended(WIDER, pa.schema([("customer", pa.struct([("age", pa.int64())])), ("note", pa.string())]))

Reader = Callable[[str], list[tuple[int, int | None, str | None]]]
"""Gives offset, amount and name of the customer of all rows of a folder."""


def _landed(place: Path, format: str) -> str:
    """A table that gains columns with its second commit, and more columns and a nested field with its third."""
    table = open_table(str(place), format=format)
    assert land(table, 0, 0, 4)
    more = rows(0, range(4, 8), WIDER, amount=[40, 50, 60, 70], customer=[{"name": "x"}] * 4)
    assert table.commit(write(table, [more], WIDER), {(TOPIC, 0): (4, 8)}, schema=WIDER)
    deeper = rows(0, [8], DEEPER, amount=[80], customer=[{"name": "x", "age": 33}], note=["deeper"])
    assert table.commit(write(table, [deeper], DEEPER), {(TOPIC, 0): (8, 9)}, schema=DEEPER)
    return str(place)


def _duckdb_delta(place: str) -> Any:
    orders = deltalake.DeltaTable(place).to_pyarrow_dataset()
    connection = duckdb.connect()
    connection.register("orders", orders)
    return connection.sql('select "offset", amount, customer.name from orders').fetchall()


def _duckdb_parquet(place: str) -> Any:
    pattern = f"{place}/*/*/*.parquet"
    statement = 'select "offset", amount, customer.name from read_parquet(?, union_by_name=true)'
    return duckdb.connect().execute(statement, [pattern]).fetchall()


def _polars_delta(place: str) -> Any:
    frame = polars.scan_delta(place).select("offset", "amount", polars.col("customer").struct.field("name"))
    return frame.collect().rows()


def _polars_parquet(place: str) -> Any:
    newest = max(Path(place).rglob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    frame = polars.scan_parquet(
        f"{place}/*/*/*.parquet",
        schema=polars.read_parquet_schema(newest),
        missing_columns="insert",
        cast_options=polars.ScanCastOptions(missing_struct_fields="insert"),
        hive_partitioning=False,
    )
    return frame.select("offset", "amount", polars.col("customer").struct.field("name")).collect().rows()


def _pandas_delta(place: str) -> Any:
    return _from_pandas(deltalake.DeltaTable(place).to_pandas())


def _pandas_parquet(place: str) -> Any:
    return _from_pandas(pandas.read_parquet(place, schema=DEEPER))


def _from_pandas(frame: pandas.DataFrame) -> Any:
    assert {str(day) for day in frame["append_day"]} == {"2026-11-15"}
    assert set(frame["append_hour"]) == {21}
    return [
        (
            int(row["offset"]),
            None if pandas.isna(row["amount"]) else int(row["amount"]),
            row["customer"] and row["customer"]["name"],
        )
        for row in frame.to_dict("records")
    ]


@pytest.mark.parametrize(
    ("format", "reader"),
    [
        ("delta", _duckdb_delta),
        ("delta", _polars_delta),
        ("delta", _pandas_delta),
        ("parquet", _duckdb_parquet),
        ("parquet", _polars_parquet),
        ("parquet", _pandas_parquet),
    ],
)
def test_readers_see_the_current_table(tmp_path: Path, format: str, reader: Reader) -> None:
    place = _landed(tmp_path / "orders", format)
    stored_rows = sorted(reader(place))
    assert stored_rows == [
        *((offset, None, None) for offset in range(4)),
        *((offset, offset * 10, "x") for offset in range(4, 9)),
    ]


def test_duckdb_skips_files_of_other_days(tmp_path: Path) -> None:
    place = _landed(tmp_path / "orders", "parquet")
    statement = "select count(*) from read_parquet(?, hive_partitioning=true) where append_day = ?"
    pattern = f"{place}/*/*/*.parquet"
    assert duckdb.connect().execute(statement, [pattern, "2026-11-15"]).fetchall() == [(9,)]
    assert duckdb.connect().execute(statement, [pattern, "2026-11-16"]).fetchall() == [(0,)]


def test_arrow_reads_a_folder_of_files(tmp_path: Path) -> None:
    place = _landed(tmp_path / "orders", "parquet")
    assert ds.dataset(place, partitioning="hive").count_rows() == 9

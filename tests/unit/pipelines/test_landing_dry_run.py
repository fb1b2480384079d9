"""Dry runs of landing: the output per row is bounded."""

from __future__ import annotations

import json

import pyarrow as pa

from millstream.pipelines.jobs.land.dry_run import CHARACTERS_MAX, ROW_BYTES_MAX, SHOWN, SampleRows, shown_row
from millstream.pipelines.lake.merging import DELETED, KEY, ORDER


def test_a_row_is_shown_unchanged() -> None:
    row = {"offset": 7, "value": b'{"a": 1}', "order": {"id": [1, None]}, "is_new": True, "price": 1.5}
    assert shown_row(row) == {**row, "value": '{"a": 1}'}


def test_null_fields_and_map_entries_are_shown_as_in_the_payload() -> None:
    columns = {"labels": pa.array([[("a", "1")]], pa.map_(pa.string(), pa.string())), "tags": pa.array([{"x": None}])}
    sample = SampleRows()
    sample.write(pa.RecordBatch.from_pydict(columns))
    assert sample.shown == [{"labels": {"a": "1"}, "tags": {}}]


def test_upserts_are_shown_as_rows_and_deletes_are_counted() -> None:
    sample = SampleRows()
    columns = {"id": [1, 2], KEY: [b"1", b"2"], ORDER: [7, 8], DELETED: [False, True]}
    sample.write(pa.RecordBatch.from_pydict(columns))
    assert (sample.count, sample.deletes, sample.shown) == (2, 1, [{"id": 1}])


def test_long_values_are_truncated() -> None:
    shown = shown_row({"value": b"\xc3\xa4" * 500_000, "name": "x" * 2000, "tags": ["y" * 2000]})
    assert shown["value"] == "ä" * CHARACTERS_MAX + "…"
    assert shown["name"] == "x" * CHARACTERS_MAX + "…"
    assert shown["tags"] == ["y" * CHARACTERS_MAX + "…"]


def test_the_size_of_a_row_is_bounded() -> None:
    nested = shown_row({"numbers": list(range(1_000_000)), "id": 1})
    assert nested["numbers"].startswith("[0, 1, 2")
    assert nested["id"] == 1
    wide = shown_row({f"column_{number}": "x" * 500 for number in range(10_000)})
    assert wide["column_0"] == "x" * 500
    assert wide["…"] == f"{10_000 - len(wide) + 1} more columns"
    for shown in (nested, wide):
        assert len(json.dumps(shown)) < 2 * ROW_BYTES_MAX


def test_only_the_shown_rows_are_kept() -> None:
    sample = SampleRows()
    for _batch in range(3):
        sample.write(pa.RecordBatch.from_pydict({"value": [b"x" * 10_000] * 15, "reason": ["late"] * 15}))
    assert (sample.count, len(sample.shown), sample.reasons) == (45, SHOWN, {"late": 45})
    assert len(json.dumps(sample.shown)) < 2 * SHOWN * CHARACTERS_MAX

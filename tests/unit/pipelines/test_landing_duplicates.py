"""Duplicate messages are found by their ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.pipelines.jobs.land import duplicates
from millstream.pipelines.jobs.land.duplicates import RecentIds, find_repeated, ids_of, keep_bounded, select_in_ranges
from millstream.pipelines.jobs.land.inference import NewFields
from millstream.pipelines.jobs.land.task import Report, WideningNeed, from_rows, to_arrow
from millstream.pipelines.lake.table import LakeTable
from millstream.pipelines.lake.table_file import WrittenFile
from millstream.pipelines.source.ranges import Range

NOW = datetime(2026, 11, 15, 12, 30, tzinfo=UTC)
HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))


def headers(*rows: Sequence[tuple[str, bytes | None]] | None) -> pa.Array:
    return pa.array([None if row is None else [{"key": k, "value": v} for k, v in row] for row in rows], HEADERS)


def found(*rows: tuple[int, int, int, bytes]) -> pa.Table:
    columns = {"partition": pa.int32(), "offset": pa.int64(), "timestamp": pa.int64(), "id": pa.binary()}
    return pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows], pa.schema(columns.items()))


def test_the_first_header_of_the_name_is_the_id() -> None:
    rows = headers([("a", b"1"), ("id", b"x"), ("id", b"y")], None, [], [("b", b"2")], [("id", None)], [("id", b"z")])
    assert ids_of(rows, "id").to_pylist() == [b"x", None, None, None, None, b"z"]
    assert ids_of(rows.slice(4), "id").to_pylist() == [None, b"z"]
    assert ids_of(headers(), "id").to_pylist() == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from([b"a", b"b", b"c", b"d"])), max_size=12),
    st.sets(st.sampled_from([b"a", b"b", b"x"])),
)
def test_one_message_of_every_id_is_kept(messages: list[tuple[int, int, bytes]], known: set[bytes]) -> None:
    rows = [(partition, offset, time, name) for offset, (partition, time, name) in enumerate(messages)]
    chunks = pa.chunked_array([pa.array([identifier], pa.binary()) for identifier in known], pa.binary())
    left_out, remaining = find_repeated(found(*rows), chunks)
    dropped = {(partition, offset) for partition, offsets in left_out.items() for offset in offsets.to_pylist()}
    expected = set()
    seen = set(known)
    for partition, offset, _time, name in sorted(rows, key=lambda row: (row[2], row[0], row[1])):
        if name in seen:
            expected.add((partition, offset))
        seen.add(name)
    assert dropped == expected
    assert sorted(remaining.to_pylist()) == sorted(seen - known)


class Table:
    """The recent ids of a table."""

    def __init__(self, *hours: tuple[datetime, list[bytes]]) -> None:
        self.hours = hours
        self.asked = 0

    def landed_since(self, moment: datetime, columns: Sequence[str]) -> Iterator[tuple[datetime, Any]]:
        self.asked += 1
        for hour, ids in self.hours:
            rows = headers(*([("id", name)] for name in ids))
            yield hour, pa.RecordBatch.from_arrays([rows], names=["headers"])


def test_the_memory_for_known_ids_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "IDS_BYTES_MAX", 230)
    hours = [(NOW - timedelta(hours=number), [b"%d" % number * 10] * 5) for number in range(20)]
    recent = RecentIds(cast("LakeTable", Table(*hours)), "id", timedelta(days=1))
    other = RecentIds(cast("LakeTable", Table()), "id", timedelta(days=1))
    assert set(recent.known(NOW, {0: 5}).to_pylist()) == {b"0" * 10, b"1" * 10, b"2" * 10}
    assert other.known(NOW, {0: 5}).to_pylist() == []
    other.landed(NOW, pa.array([b"x" * 10] * 10), {0: 7})
    keep_bounded([recent, other])
    recent.landed(NOW, pa.array([], pa.binary()), {0: 5})
    assert set(recent.known(NOW, {0: 5}).to_pylist()) == {b"0" * 10}
    assert len(other.known(NOW, {0: 7})) == 10
    assert recent.bytes + other.bytes <= 230


def test_ids_are_read_from_the_table_once_and_again_after_another_run() -> None:
    table = Table((NOW - timedelta(minutes=90), [b"old"]), (NOW - timedelta(minutes=30), [b"new"]))
    recent = RecentIds(cast("LakeTable", table), "id", timedelta(minutes=20))
    assert recent.known(NOW, {0: 5}).to_pylist() == [b"new"]
    recent.landed(NOW, pa.array([b"now"]), {0: 9})
    assert recent.known(NOW + timedelta(minutes=1), {0: 9}).to_pylist() == [b"new", b"now"]
    assert recent.known(NOW + timedelta(minutes=21), {0: 9}).to_pylist() == []
    assert table.asked == 1
    recent.known(NOW, {0: 12})
    assert table.asked == 2


def test_reports_round_trip() -> None:
    reports = [
        Report(topic="a", rows=3, files=(WrittenFile("p", 2, 10, "{}", {"append_hour": "1"}),)),
        Report(topic="b", new_fields=(NewFields(1, 7, pa.schema([("x", pa.struct([("y", pa.int64())]))])),)),
        Report(topic="c", widening=WideningNeed(1, 7, [("x", "[]")]), large=frozenset({("x", "[]"), ("y",)})),
        Report(topic="d", fractions=frozenset({("x", "[]"), ("y",)})),
    ]
    rows = to_arrow(reports).to_pylist()
    assert from_rows(cast("Any", [tuple(row.values()) for row in rows])) == reports


def test_a_copy_beyond_the_end_of_a_batch_is_left_for_the_next() -> None:
    rows = found((0, 5, 20, b"x"), (1, 3, 10, b"x"), (0, 6, 30, b"y"), (1, 2, 30, b"y"))
    assert find_repeated(rows, pa.chunked_array([], pa.binary()))[0][0].to_pylist() == [5]
    # The batch now ends before the earlier message with the id x.
    shorter = select_in_ranges(rows, [Range("t", 0, 5, 7), Range("t", 1, 0, 3)])
    left_out, ids = find_repeated(shorter, pa.chunked_array([], pa.binary()))
    assert ({number: rows.to_pylist() for number, rows in left_out.items()}, sorted(ids.to_pylist())) == (
        {1: [2]},
        [b"x", b"y"],
    )
    assert not len(select_in_ranges(rows, []))

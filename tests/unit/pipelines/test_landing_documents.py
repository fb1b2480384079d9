"""Random documents in any order and batches: each is in the table or its quarantine, and none blocks the table.

Which of them, and in which columns, depends on the order of messages alone.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import polars
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.core.lake_url import QUARANTINE_SUFFIX
from millstream.pipelines.jobs.land.decoding import UndecodablePayload, parsed, value_for
from millstream.pipelines.jobs.land.decoding import documents as documents_in
from millstream.pipelines.jobs.land.inference import (
    Evolution,
    NewFields,
    column_of,
    decide,
    fields_of,
    payload_fields,
)
from millstream.pipelines.jobs.land.sources import Source, plans
from millstream.pipelines.jobs.land.task import Landing, Report, WideningNeed, from_rows, to_arrow
from millstream.pipelines.jobs.land.topic_batch import TopicBatch
from millstream.pipelines.lake.table import LakeTable, open_table
from millstream_testing.lake_rows import in_this_process

TOPIC_ID = "3f2b8c1e-0000-4000-8000-000000000001"
NOW = datetime(2026, 11, 15, 21, 30, tzinfo=UTC)
BIG = 2**53 + 1
LARGE = 1.2345678901234568e20
EXAMPLES = int(os.environ.get("LANDING_DOCUMENTS", "100"))
SPLIT_EXAMPLES = settings().max_examples // 4

NAMES = st.sampled_from(
    [
        *(
            "id",
            "Id",
            "ID",
            "a",
            "A",
            "a.b",
            "a b",
            "",
            " ",
            "`",
            '"',
            "'",
            "a=b",
            "ä",
            "Ä",
            "İ",
            "ß",
            "ſ",
            "名",
            "😀",
            "x" * 300,
        ),
        *(
            "key",
            "value",
            "partition",
            "offset",
            "Offset",
            "timestamp",
            "topic_id",
            "append_day",
            "append_hour",
            "headers",
        ),
        *(
            "payload_key",
            "payload_payload_key",
            "_delta_log",
            "__index_level_0__",
            "element",
            "list",
            "\\",
            "a/b",
            "a\nb",
        ),
        *("1", "-", "%20", "select", "null", "\u200b", "\x00", "a;b", "{a}"),
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(
        [10**400, 2**63, -(2**63), 1e308, 5e-324, -0.0, "2026-01-02T03:04:05Z", "NaN", "\u0000", "\ud800"]
    )
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
ODD = st.sampled_from(
    [
        *(
            b"",
            b" ",
            b"[]",
            b"null",
            b"7",
            b"{",
            b'{"id":1}{"id":2}',
            b"\xff\xfe",
            b'{"a":01}',
            b'{"id":1,"id":"x","ID":{}}',
        ),
        *(
            b'{"a":NaN,"b":-Infinity}',
            b'{"a":1e999}',
            b'{"a":"x\ny"}',
            b'\xef\xbb\xbf{"a":1}',
            b'{"a":1}\x00',
            b"{" + b" " * 99 + b"}",
        ),
        *(
            b'{"a":' * 30 + b"1" + b"}" * 30,
            b'{"a":' + b"[" * 150 + b"]" * 150 + b"}",
            b'{"a":' * 5000 + b"1" + b"}" * 5000,
        ),
        json.dumps({f"wide{number}": number for number in range(1100)}).encode(),
        json.dumps({"wide": {f"w{number}": {"x": number, "y": [number]} for number in range(700)}}).encode(),
    ]
)
PAYLOADS = (
    st.dictionaries(NAMES, VALUES, max_size=5).map(lambda document: json.dumps(document).encode()) | ODD | st.none()
)


Payloads = Sequence[bytes | None]


def land(
    table: LakeTable,
    partitions: Sequence[Payloads],
    ends: Sequence[int],
    *,
    sampled: int = 0,
    tasks: int = 1,
    piece: int = 3,
) -> list[tuple[int, int]]:
    """Land messages up to offsets as the job does, in this process; return their order.

    It may take several batches.
    """
    goal, order, first_partition = dict(enumerate(ends)), list[tuple[int, int]](), -1
    while True:
        landed = table.next_offsets([(TOPIC_ID, number) for number in goal])
        starts = {number: offset for (_, number), offset in landed.items()}
        if all(starts.get(number, 0) >= end for number, end in goal.items()):
            return order
        batch = batch_of(table, starts, goal, first_partition)
        if batch.schema is None:
            sample = documents_in(value for payloads in partitions for value in payloads[:sampled])
            decision = decide(sample, known=batch.fields, detects=False)
            batch.fields = decision.fields
            batch.fixed.update(decision.fixed)
            table.fix(decision.fixed)
        while not batch.take(reports_of(batch, partitions, tasks, piece)):
            batch.make_room()
            batch.widen(in_this_process, 2**60)
        assert batch.commit()
        order += [
            (offset_range.partition, offset)
            for offset_range in batch.topic_ranges()
            for offset in range(offset_range.start, offset_range.end)
        ]
        first_partition = batch.next_partition


def batch_of(table: LakeTable, starts: dict[int, int], ends: dict[int, int], first_partition: int = -1) -> TopicBatch:
    source = Source(topic="t", topic_id=TOPIC_ID, first=dict.fromkeys(ends, 0), end=ends)
    schema = table.schema()
    return TopicBatch(
        source=source,
        table=table,
        plans=plans(source, starts, from_latest=False),
        fields=payload_fields(schema),
        schema=schema,
        fixed=table.fixed(),
        first_partition=first_partition,
        refuses_rounding=True,
        decodes=True,
        evolves=True,
    )


def test_a_batch_is_not_repeated_for_each_new_column(tmp_path: Path) -> None:
    table = open_table(str(tmp_path / "t"))
    whole = [{f"a{number}": 0 for number in range(count + 1)} for count in range(20)]
    payloads = [json.dumps(document).encode() for document in [*whole, *({name: 0.5} for name in whole[-1])]]
    batch = batch_of(table, {}, {0: len(payloads)})
    repeated = 0
    while not batch.take(reports_of(batch, [payloads], tasks=3, piece=2)):
        repeated += 1
        batch.make_room()
        batch.widen(in_this_process, 0)
    assert batch.commit()
    # Once for the new columns, and once for those that are double.
    assert repeated == 2
    columns, rows, refused = outcome(tmp_path)
    assert (columns, len(rows), refused) == (dict.fromkeys(whole[-1], "double"), len(payloads), {})


def reports_of(batch: TopicBatch, partitions: Sequence[Payloads], tasks: int, piece: int) -> list[Report]:
    ranges = batch.topic_ranges()
    task_size = -(-sum(map(len, ranges)) // tasks)
    reports, landing, room = [], Landing("t", batch.work(NOW, "")), task_size
    for offset_range in ranges:
        at = offset_range.start
        while at < offset_range.end:
            # Tasks get the fetched records in pieces.
            end = min(offset_range.end, at + piece, at + room)
            landing.take(records(offset_range.partition, partitions[offset_range.partition][at:end], at))
            room -= end - at
            at = end
            if not room:
                reports.append(landing.report())
                landing, room = Landing("t", batch.work(NOW, "")), task_size
    return from_rows(tuple(row.values()) for row in to_arrow([*reports, landing.report()]).to_pylist())


def test_a_message_that_needs_a_wider_column_begins_the_next_batch(tmp_path: Path) -> None:
    table = open_table(str(tmp_path / "t"), format="delta", options={})
    fields = pa.schema([pa.field("n", pa.int64())])
    ends = {0: 110, 1: 110, 2: 120, 3: 120}
    source = Source(topic="t", topic_id=TOPIC_ID, first=dict.fromkeys(ends, 0), end=ends)
    starts = dict.fromkeys(ends, 100)
    batch = TopicBatch(
        source=source,
        table=table,
        plans=plans(source, starts, from_latest=False),
        fields=fields,
        schema=fields,
        widening=WideningNeed(2, 105, [("n",)]),
    )
    batch.make_room()
    assert [(offset_range.partition, offset_range.end) for offset_range in batch.topic_ranges()] == [
        (0, 110),
        (1, 110),
        (2, 105),
    ]
    assert str(batch.fields.field("n").type) == "int64"
    # Other partitions have new messages meanwhile, which must not delay it, and which it must precede.
    source = replace(source, end={0: 130, 1: 130, 2: 120, 3: 120})
    starts = {number: plan.end for number, plan in batch.plans.items()}
    batch = replace(
        batch,
        source=source,
        plans=plans(source, starts, from_latest=False),
        first_partition=batch.next_partition,
        widening=WideningNeed(2, 105, [("n",)]),
    )
    batch.make_room()
    assert [
        (offset_range.partition, offset_range.start, offset_range.end) for offset_range in batch.topic_ranges()
    ] == [
        *((2, 105, 120), (0, 110, 130), (1, 110, 130), (3, 100, 120)),
    ]
    assert str(batch.fields.field("n").type) == "double"


def test_a_declared_float_keeps_its_type_when_fields_are_found() -> None:
    known = pa.schema([pa.field("declared", pa.float32()), pa.field("unsigned", pa.uint64())])
    evolution = Evolution(known, [NewFields(0, 5, fields_of({"declared": 1.5, "unsigned": 3, "new": 3.0}))])
    assert [str(field.type) for field in evolution.fields] == ["float", "uint64", "double"]


def records(partition: int, payloads: Payloads, start: int) -> pa.RecordBatch:
    rows = len(payloads)
    return pa.RecordBatch.from_pydict(
        {
            "partition": pa.array([partition] * rows, pa.int32()),
            "offset": pa.array(range(start, start + rows), pa.int64()),
            "timestamp": pa.array([1_790_000_000_000_000] * rows, pa.timestamp("us", tz="UTC")),
            "timestamp_type": pa.array([0] * rows, pa.int32()),
            "key": pa.array([None] * rows, pa.binary()),
            "value": pa.array(payloads, pa.binary()),
            "headers": pa.array([[]] * rows, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        }
    )


def check(folder: Path, published: list[bytes | None]) -> None:
    """Check that every message is stored once, as published and as decoded, and that the others have a reason."""
    whole = deltalake.DeltaTable(str(folder / "t"))
    table = pa.table(whole.to_pyarrow_table()).sort_by("offset")
    odd = folder / f"t{QUARANTINE_SUFFIX}"
    refused = pa.table(deltalake.DeltaTable(str(odd)).to_pyarrow_table()).to_pylist() if odd.exists() else []
    fields = payload_fields(pa.schema(whole.schema().to_arrow()))
    there = [row["offset"] for row in refused]
    for row in refused:
        assert row["reason"]
        assert row["value"] == published[row["offset"]]
    for row in table.to_pylist():
        there.append(row["offset"])
        payload = published[row["offset"]]
        assert row["value"] == payload
        document = parsed(payload)
        for field in fields:
            assert same(row[column_of(field.name)], value_for(document.get(field.name), field.type, field.name))
    assert sorted(there) == list(range(len(published)))
    assert len({name.lower() for name in table.schema.names}) == len(table.schema.names)
    # Other programs can read it, too.
    assert polars.read_delta(str(folder / "t")).height == len(table)


def same(one: Any, other: Any) -> bool:
    """Whether a cell has a value; fields added later are null."""
    if isinstance(other, float) and isinstance(one, float) and math.isnan(other):
        return math.isnan(one)
    if isinstance(other, dict) and isinstance(one, dict):
        return all(same(one.get(key), other.get(key)) for key in one.keys() | other.keys())
    if isinstance(other, list) and isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.trial
@pytest.mark.timeout(7200)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(PAYLOADS, min_size=1, max_size=7), min_size=1, max_size=4))
def test_no_document_blocks_the_table(batches: list[list[bytes | None]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = open_table(f"{folder}/t")
        published: list[bytes | None] = []
        for payloads in batches:
            published += payloads
            land(table, [published], [len(published)])
            try:
                check(Path(folder), published)
            except UndecodablePayload as misfit:
                pytest.fail(f"the table has a message that does not fit: {misfit}")
        table.compact(before=NOW.replace(hour=23))
        check(Path(folder), published)


def test_unusual_documents_of_every_kind(tmp_path: Path) -> None:
    odd: list[bytes | None] = [
        *(b'{"id":1,"id":"x","ID":{}}', b'{"a.b":1,"a b":2,"":3,"key":4,"topic_id":5}', b"\xff", b'{"a":NaN}', None),
        *(b'{"l":[1,"x",{"y":1},null]}', b'{"l":[[1]]}', b'{"id":1e999}', b'{"deep":' * 5000, b'{"n":{"A":1,"a":2}}'),
    ]
    table = open_table(str(tmp_path / "t"))
    land(table, [odd], [len(odd)])
    land(table, [odd + odd[::-1]], [2 * len(odd)])
    check(tmp_path, odd + odd[::-1])


Outcome = tuple[dict[str, str], dict[tuple[int, int], dict[str, Any]], dict[tuple[int, int], str]]


def outcome(folder: Path) -> Outcome:
    """Return the columns, the rows by partition and offset, and the reasons of the quarantined ones."""
    whole = deltalake.DeltaTable(str(folder / "t"))
    fields = payload_fields(pa.schema(whole.schema().to_arrow()))
    rows = {
        (row["partition"], row["offset"]): {name: row[column_of(name)] for name in fields.names}
        for row in whole.to_pyarrow_table().to_pylist()
    }
    odd = folder / f"t{QUARANTINE_SUFFIX}"
    refused = deltalake.DeltaTable(str(odd)).to_pyarrow_table().to_pylist() if odd.exists() else []
    # A reason names the type at that time, or the double that the column becomes in the same batch.
    reasons = {
        (row["partition"], row["offset"]): row["reason"].replace("of type double", "of type long") for row in refused
    }
    return {field.name: str(ordered(field.type)) for field in fields}, rows, reasons


def ordered(kind: pa.DataType) -> pa.DataType:
    """Return a type with the fields of structs in the order of their names."""
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", ordered(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct(sorted(((field.name, ordered(field.type)) for field in kind), key=lambda entry: entry[0]))
    return kind


def landed(
    partitions: Sequence[Payloads], batches: Iterable[Sequence[int]], *, sampled: int, tasks: int = 1, piece: int = 100
) -> tuple[Outcome, list[tuple[int, int]]]:
    """Land batches up to these ends, and all that is left; return the outcome, and the order of messages."""
    with tempfile.TemporaryDirectory() as folder:
        order = []
        for ends in [*batches, list(map(len, partitions))]:
            # Each batch may be that of another process.
            order += land(open_table(f"{folder}/t"), partitions, ends, sampled=sampled, tasks=tasks, piece=piece)
        return outcome(Path(folder)), order


def singly(order: Iterable[tuple[int, int]], count: int) -> Iterator[list[int]]:
    """Return the ends of batches of one message each."""
    ends = [0] * count
    for partition, offset in order:
        ends[partition] = offset + 1
        yield list(ends)


FEW_NUMBERS = st.sampled_from(
    [0, 7, -3, 2**53, BIG, -BIG, 2**60, 2**63 - 1, 2**63, 2**70 + 1, 10**39, 1.5, -0.25, 3.0, 1e300]
)
FEW_SCALARS = FEW_NUMBERS | st.sampled_from([None, "x", "2026-01-02T03:04:05Z", True])
FEW_NAMES = st.sampled_from(["a", "A", "b", "a.b", "A.b"])
FEW_VALUES = st.recursive(
    FEW_SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["x", "X", "y", "x.y"]), inner, max_size=3)
    ),
    max_leaves=4,
)
FEW_DOCUMENTS = st.dictionaries(FEW_NAMES, FEW_NUMBERS | st.just({}) | FEW_VALUES, max_size=3)


@pytest.mark.parametrize(
    ("documents", "kind", "values", "refused"),
    [
        ([{"a": 1}, {"a": BIG}, {"a": 1.5}, {"a": BIG + 1}], "int64", [1, BIG, BIG + 1], [2]),
        ([{"z": 1}, {"a": BIG}, {"a": 1.5}], "int64", [None, BIG], [2]),
        ([{"z": 1}, {"a": 5}, {"a": 1.5}, {"a": 7}], "double", [None, 5.0, 1.5, 7.0], []),
        ([{"z": 1}, {"a": [BIG, 1.5]}, {"a": [2]}], "list<element: int64>", [None, [2]], [1]),
        ([{"a": [1]}, {"a": [BIG, 1.5]}, {"a": [2, 1.5]}], "list<element: double>", [[1.0], [2.0, 1.5]], [1]),
        ([{"z": 1}, {"a": 2**70 + 1}, {"a": 1.5}], "decimal128(38, 0)", [None, Decimal(2**70 + 1)], [2]),
        # Once a column is double, numbers that it would round do not fit; those that a double prints like this do.
        (
            [{"a": 1.5}, {"a": BIG}, {"a": 2**60}, {"a": 123456789012345680000}],
            "double",
            [1.5, 2.0**60, 1.2345678901234568e20],
            [1],
        ),
        # The message with the large number is not in the table, so nothing keeps the column long.
        ([{"a": 1, "z": 1}, {"a": BIG, "z": "x"}, {"a": 1.5}], "double", [1.0, 1.5], [1]),
        ([{"z": 1}, {"b": 1}, {"b": "x", "a": BIG}, {"a": 1.5}], "double", [None, None, 1.5], [2]),
        ([{"z": 1}, {"a": 5, "b": 1}, {"a": 1.5, "b": "x"}], "double", [None, 5.0], [2]),
        # Empty objects and arrays decide nothing, and are landed without the column that follows.
        ([{"z": 1}, {"a": {}}, {"a": 5}, {"a": {}}], "int64", [None, None, 5], [3]),
        ([{"z": 1}, {"a": []}, {"a": [5]}, {"a": []}], "list<element: int64>", [None, None, [5], []], []),
        ([{"z": 1}, {"a": {"x": {}}}, {"a": {"y": 1}}], "struct<y: int64>", [None, None, {"y": 1}], []),
        # Of several spellings in a message, the first decides.
        ([{"z": 1}, {"a": 5, "A": "x"}, {"A": "y"}, {"A": 6}], "int64", [None, 5, 6], [2]),
    ],
)
def test_a_whole_number_beyond_doubles_is_never_rounded(
    documents: list[Any], kind: str, values: list[Any], refused: list[int]
) -> None:
    payloads = [json.dumps(document).encode() for document in documents]
    (columns, rows, quarantined), _order = landed([payloads], [], sampled=1)
    assert columns["a"] == kind
    assert [rows[place]["a"] for place in sorted(rows)] == values
    assert [offset for _, offset in sorted(quarantined)] == refused


def test_numbers_in_a_column_of_whole_numbers_are_exact(tmp_path: Path) -> None:
    payloads = [b'{"n":1}', b'{"n":9007199254740993.0}', b'{"n":-9.223372036854775807e18}', b'{"n":3.00}']
    odd = [b'{"n":9007199254740992.5}', b'{"n":0.99999999999999999999}', b'{"n":1e-999999999}']
    (columns, rows, quarantined), _order = landed([[*payloads, *odd]], [], sampled=7)
    assert columns == {"n": "double"}
    with_large = [b'{"n":9007199254740993}', *payloads, *odd]
    (columns, rows, quarantined), _order = landed([with_large], [], sampled=8)
    assert columns == {"n": "int64"}
    assert [rows[place]["n"] for place in sorted(rows)] == [BIG, 1, BIG, -(2**63) + 1, 3]
    assert [offset for _, offset in sorted(quarantined)] == [5, 6, 7]


@settings(max_examples=SPLIT_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(FEW_DOCUMENTS, min_size=1, max_size=6), min_size=1, max_size=3), st.data())
def test_columns_rows_and_quarantine_do_not_depend_on_batches(
    documents: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    partitions = [[json.dumps(document).encode() for document in values] for values in documents]
    sampled = data.draw(st.integers(0, 3), "sampled")
    count = len(partitions)
    drawn = [
        sorted(data.draw(st.lists(st.integers(0, len(partition)), min_size=3, max_size=3), "ends"))
        for partition in partitions
    ]
    tasks, piece = data.draw(st.integers(1, 3), "tasks"), data.draw(st.integers(1, 3), "piece")
    for batches, how in [([], (1, 100)), (list(zip(*drawn, strict=True)), (tasks, piece))]:
        found_rows, order = landed(partitions, batches, sampled=sampled, tasks=how[0], piece=how[1])
        assert sorted(order) == sorted((number, at) for number in range(count) for at in range(len(partitions[number])))
        # Messages of different partitions are in the order in which they are landed.
        assert found_rows == landed(partitions, singly(order, count), sampled=sampled)[0]
        _columns, rows, reasons = found_rows
        assert rows.keys() | reasons.keys() == set(order)
        assert not rows.keys() & reasons.keys()
        for (partition, offset), row in rows.items():
            check_exact(documents[partition][offset], row)


def check_exact(document: Any, cell: Any) -> None:
    """Check that the whole numbers in a cell are those that were published."""
    if isinstance(cell, dict):
        by_lower = {name.lower(): value for name, value in sorted(document.items()) if value is not None}
        for name, value in cell.items():
            if value is not None:
                check_exact(document[name] if document.get(name) is not None else by_lower[name.lower()], value)
    elif isinstance(cell, list):
        for inner, value in zip(document, cell, strict=True):
            check_exact(inner, value)
    elif isinstance(document, int) and not isinstance(cell, str | None):
        assert cell == document or Decimal(repr(cell)) == document


PLAIN_DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.sampled_from([0, 7, 2**53, 1.5, -0.25, None]),
        "t": st.sampled_from(["x", "2026-01-02T03:04:05Z", None]),
        "o": st.fixed_dictionaries({"k": st.integers(0, 3)}, optional={"n": st.sampled_from([1, 2.5])}),
        "l": st.lists(st.sampled_from([1, 2.5]), min_size=1, max_size=2),
    },
)


@settings(max_examples=SPLIT_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(PLAIN_DOCUMENTS, min_size=1, max_size=4), min_size=2, max_size=3), st.data())
def test_messages_without_conflicts_make_the_same_table_in_any_order(
    documents: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    partitions = [[json.dumps(document).encode() for document in values] for values in documents]
    expected, _order = landed(partitions, [], sampled=0)
    order = data.draw(
        st.permutations([number for number, partition in enumerate(partitions) for _ in partition]), "order"
    )
    offsets = [0] * len(partitions)
    steps = []
    for number in order:
        offsets[number] += 1
        steps.append(list(offsets))
    steps = steps[:: data.draw(st.integers(1, 3), "messages per batch")]
    rows, _order = landed(partitions, steps, sampled=0)
    assert not rows[2]
    assert rows == expected

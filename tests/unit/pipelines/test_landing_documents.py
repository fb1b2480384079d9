"""Random documents in any order and batches: each is in the table or its quarantine, and none blocks the table.

Which of them, and in which columns, depends on the order of messages alone.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
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
from millstream.pipelines.jobs.land.inference import (
    STAYS_LONG,
    WHOLE_DOUBLE,
    column_of,
    decide,
    payload_fields,
    settled,
)
from millstream.pipelines.jobs.land.job import ROUNDS_MAX
from millstream.pipelines.jobs.land.sources import Source, plans
from millstream.pipelines.jobs.land.task import Landing, Report, WideningNeed, from_rows, to_arrow
from millstream.pipelines.jobs.land.topic_batch import TopicBatch
from millstream.pipelines.lake.delta_table import open_table
from millstream.pipelines.lake.table import LakeTable
from millstream_testing.lake_rows import in_this_process

TOPIC_ID = "3f2b8c1e-0000-4000-8000-000000000001"
NOW = datetime(2026, 11, 15, 21, 30, tzinfo=UTC)
BIG = 2**53 + 1
EXAMPLES = int(os.environ.get("LANDING_DOCUMENTS", "100"))

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
PAYLOADS = st.dictionaries(NAMES, VALUES, max_size=5).map(lambda one: json.dumps(one).encode()) | ODD | st.none()


def land(
    table: LakeTable,
    payloads: Sequence[bytes | None],
    end: int | None = None,
    *,
    sampled: int = 0,
    tasks: int = 1,
    piece: int = 3,
) -> None:
    """Land messages up to an offset as the job does, in this process; it may take several batches."""
    end = len(payloads) if end is None else end
    while (start := table.next_offsets([(TOPIC_ID, 0)]).get((TOPIC_ID, 0), 0)) < end:
        source = Source(topic="t", topic_id=TOPIC_ID, first={0: 0}, end={0: end})
        schema = table.schema()
        batch = TopicBatch(
            source=source,
            table=table,
            plans=plans(source, {} if schema is None else {0: start}, from_latest=False),
            fields=payload_fields(schema),
            schema=schema,
            fixed=table.fixed(),
            decodes=True,
            evolves=True,
        )
        if schema is None:
            found = decide(map(parsed, payloads[:sampled]), known=batch.fields, detects=False)
            batch.fields = found.fields
            batch.fixed.update(found.fixed)
            table.fix(found.fixed)
        for number in range(ROUNDS_MAX + 1):
            batch.evolves = number < ROUNDS_MAX
            (span,) = batch.topic_ranges()
            each = -(-len(span) // tasks)
            reports = [
                task(batch, payloads, at, min(span.end, at + each), piece) for at in range(span.start, span.end, each)
            ]
            if batch.take(from_rows(tuple(row.values()) for row in to_arrow(reports).to_pylist())):
                break
            batch.make_room()
            batch.widen(in_this_process, 2**60)
        assert batch.commit()


def test_new_messages_of_other_partitions_delay_no_message_that_needs_a_wider_column(tmp_path: Path) -> None:
    table = open_table(str(tmp_path / "t"), format="delta", options={})
    fields, cuts = pa.schema([pa.field("n", pa.int64())]), dict[int, int]()
    starts, reached = dict.fromkeys(range(4), 100), []
    for step in range(3):
        ends = {0: 110 + 10 * step, 1: 110 + 10 * step, 2: 120, 3: 120}
        source = Source(topic="t", topic_id=TOPIC_ID, first=dict.fromkeys(ends, 0), end=ends)
        planned = plans(source, starts, from_latest=False)
        batch = TopicBatch(source=source, table=table, plans=planned, fields=fields, cuts=cuts)
        batch.widening = WideningNeed(2, 105, [("n",)])
        is_cut = batch.make_room()
        starts = {number: plan.end for number, plan in batch.plans.items()}
        reached.append((is_cut, starts[2], str(batch.fields.field("n").type)))
        if not is_cut:
            break
    assert reached == [(True, 105, "int64"), (False, 120, "double")]
    # The end of a batch that was not committed does not count: its messages come before the one with the fraction.
    batch.plans = plans(source, dict.fromkeys(ends, 100), from_latest=False)
    cuts[2] = 105
    batch.widening = WideningNeed(2, 105, [("n",)])
    assert batch.make_room()


def test_a_declared_float_keeps_its_type_when_fields_are_found() -> None:
    known = pa.schema([pa.field("declared", pa.float32())])
    found = pa.schema([*known, pa.field("whole", WHOLE_DOUBLE), pa.field("large", STAYS_LONG)])
    assert [field.type for field in settled(found, known)] == [pa.float32(), pa.float64(), pa.int64()]


def task(batch: TopicBatch, payloads: Sequence[bytes | None], start: int, end: int, piece: int) -> Report:
    landing = Landing("t", batch.work(NOW, ""))
    for at in range(start, end, piece):
        # Tasks get the fetched records in pieces.
        landing.take(records(payloads[at : min(end, at + piece)], at))
    return landing.report()


def records(payloads: Sequence[bytes | None], start: int) -> pa.RecordBatch:
    rows = len(payloads)
    return pa.RecordBatch.from_pydict(
        {
            "partition": pa.array([0] * rows, pa.int32()),
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
            land(table, published)
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
    land(table, odd)
    land(table, odd + odd[::-1])
    check(tmp_path, odd + odd[::-1])


Outcome = tuple[dict[str, str], dict[int, dict[str, Any]], list[int]]


def outcome(folder: Path) -> Outcome:
    """Return the columns, the rows by offset, and the quarantined offsets."""
    whole = deltalake.DeltaTable(str(folder / "t"))
    fields = payload_fields(pa.schema(whole.schema().to_arrow()))
    rows = {row["offset"]: {name: row[name] for name in fields.names} for row in whole.to_pyarrow_table().to_pylist()}
    odd = folder / f"t{QUARANTINE_SUFFIX}"
    refused = deltalake.DeltaTable(str(odd)).to_pyarrow_table().to_pylist() if odd.exists() else []
    return {one.name: str(one.type) for one in fields}, rows, sorted(row["offset"] for row in refused)


def landed(payloads: list[bytes], ends: list[int], *, sampled: int, tasks: int = 1, piece: int = 100) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        for end in [*ends, len(payloads)]:
            # Each batch may be that of another process.
            land(open_table(f"{folder}/t"), payloads, end, sampled=sampled, tasks=tasks, piece=piece)
        return outcome(Path(folder))


FEW_NUMBERS = st.sampled_from(
    [0, 7, -3, 2**53, BIG, -BIG, 2**60, 2**63 - 1, 2**63, 2**70 + 1, 10**39, 1.5, -0.25, 3.0, 1e300]
)
FEW_SCALARS = FEW_NUMBERS | st.sampled_from([None, "x", "2026-01-02T03:04:05Z", True])
FEW_VALUES = (
    FEW_SCALARS
    | st.lists(FEW_NUMBERS, min_size=1, max_size=2)
    | st.dictionaries(st.sampled_from("xy"), FEW_NUMBERS, min_size=1)
)
# A message with several spellings of a new field may decide its type otherwise.
FEW_DOCUMENTS = st.dictionaries(st.sampled_from(["a", "A", "b"]), FEW_NUMBERS | FEW_VALUES, max_size=2).filter(
    lambda document: not {"a", "A"} <= document.keys()
)


@pytest.mark.parametrize(
    ("documents", "kind", "values", "refused"),
    [
        ([{"a": 1}, {"a": BIG}, {"a": 1.5}, {"a": BIG + 1}], "int64", [1, BIG, BIG + 1], [2]),
        ([{"z": 1}, {"a": BIG}, {"a": 1.5}], "int64", [None, BIG], [2]),
        ([{"z": 1}, {"a": 5}, {"a": 1.5}, {"a": 7}], "double", [None, 5.0, 1.5, 7.0], []),
        ([{"z": 1}, {"a": [BIG, 1.5]}, {"a": [2]}], "list<element: int64>", [None, [2]], [1]),
        ([{"a": [1]}, {"a": [BIG, 1.5]}, {"a": [2, 1.5]}], "list<element: double>", [[1.0], [2.0, 1.5]], [1]),
        ([{"z": 1}, {"a": 2**70 + 1}, {"a": 1.5}], "decimal128(38, 0)", [None, Decimal(2**70 + 1)], [2]),
        # The message with the large number is not in the table, so nothing keeps the column long.
        ([{"a": 1, "z": 1}, {"a": BIG, "z": "x"}, {"a": 1.5}], "double", [1.0, 1.5], [1]),
        ([{"z": 1}, {"b": 1}, {"b": "x", "a": BIG}, {"a": 1.5}], "double", [None, None, 1.5], [2]),
        ([{"z": 1}, {"a": 5, "b": 1}, {"a": 1.5, "b": "x"}], "double", [None, 5.0], [2]),
        # Empty objects decide nothing.
        ([{"z": 1}, {"a": {}}, {"a": 5}], "int64", [None, 5], [1]),
    ],
)
def test_a_whole_number_beyond_doubles_is_never_rounded(
    documents: list[Any], kind: str, values: list[Any], refused: list[int]
) -> None:
    payloads = [json.dumps(document).encode() for document in documents]
    columns, rows, quarantined = landed(payloads, [], sampled=1)
    assert columns["a"] == kind
    assert [rows[offset]["a"] for offset in sorted(rows)] == values
    assert quarantined == refused


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(FEW_DOCUMENTS, min_size=2, max_size=8), st.data())
def test_columns_rows_and_quarantine_do_not_depend_on_batches(documents: list[dict[str, Any]], data: Any) -> None:
    payloads = [json.dumps(document).encode() for document in documents]
    sampled = data.draw(st.integers(0, 3), "sampled")
    one_by_one = landed(payloads, list(range(1, len(payloads))), sampled=sampled)
    assert landed(payloads, [], sampled=sampled) == one_by_one
    ends = data.draw(st.lists(st.integers(1, len(payloads) - 1), unique=True, max_size=3).map(sorted), "ends")
    tasks, piece = data.draw(st.integers(1, 3), "tasks"), data.draw(st.integers(1, 3), "piece")
    assert landed(payloads, ends, sampled=sampled, tasks=tasks, piece=piece) == one_by_one

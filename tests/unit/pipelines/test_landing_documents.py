"""Random documents in any order and batches: each is in the table or its quarantine, and none blocks the table."""

from __future__ import annotations

import json
import math
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import deltalake
import polars
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.core.lake_url import QUARANTINE_SUFFIX
from millstream.pipelines.jobs.land.decoding import Misfit, parsed, value_for
from millstream.pipelines.jobs.land.inference import column_of, payload_fields
from millstream.pipelines.jobs.land.job import ROUNDS_MAX
from millstream.pipelines.jobs.land.sources import Source, plans
from millstream.pipelines.jobs.land.task import Landing
from millstream.pipelines.jobs.land.topic_batch import TopicBatch
from millstream.pipelines.lake.delta_table import open_table
from millstream.pipelines.lake.table import LakeTable
from millstream_testing.lake_rows import in_this_process

TOPIC_ID = "3f2b8c1e-0000-4000-8000-000000000001"
NOW = datetime(2026, 11, 15, 21, 30, tzinfo=UTC)
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


def land(table: LakeTable, payloads: list[bytes | None], start: int) -> None:
    """Land one batch as the job does, in this process."""
    end = start + len(payloads)
    source = Source(topic="t", topic_id=TOPIC_ID, first={0: 0}, end={0: end})
    landed = {number: offset for (_, number), offset in table.next_offsets([(TOPIC_ID, 0)]).items()}
    schema = table.schema()
    batch = TopicBatch(
        source=source,
        table=table,
        plans=plans(source, landed, from_latest=False),
        fields=payload_fields(schema),
        schema=schema,
        decodes=True,
        evolves=True,
    )
    for number in range(ROUNDS_MAX + 1):
        batch.evolves = batch.evolves and number < ROUNDS_MAX
        task = Landing("t", batch.work(NOW, ""))
        # Tasks get the fetched records in pieces.
        for at in range(0, len(payloads), 3):
            task.take(records(payloads[at : at + 3], start + at))
        if batch.take([task.report()]):
            break
        batch.widen(in_this_process, 2**60)
    assert batch.commit()


def records(payloads: list[bytes | None], start: int) -> pa.RecordBatch:
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
            land(table, payloads, len(published))
            published += payloads
            try:
                check(Path(folder), published)
            except Misfit as misfit:
                pytest.fail(f"the table has a message that does not fit: {misfit}")
        table.compact(before=NOW.replace(hour=23))
        check(Path(folder), published)


def test_unusual_documents_of_every_kind(tmp_path: Path) -> None:
    odd: list[bytes | None] = [
        *(b'{"id":1,"id":"x","ID":{}}', b'{"a.b":1,"a b":2,"":3,"key":4,"topic_id":5}', b"\xff", b'{"a":NaN}', None),
        *(b'{"l":[1,"x",{"y":1},null]}', b'{"l":[[1]]}', b'{"id":1e999}', b'{"deep":' * 5000, b'{"n":{"A":1,"a":2}}'),
    ]
    table = open_table(str(tmp_path / "t"))
    land(table, odd, 0)
    land(table, odd[::-1], len(odd))
    check(tmp_path, odd + odd[::-1])

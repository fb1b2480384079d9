"""Messages as changes: which key a message without a payload deletes, and when it needs an order value."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from millstream.core.pipeline import LandSettings
from millstream.pipelines.jobs.land import changes
from millstream.pipelines.jobs.land.changes import ChangeRule
from millstream.pipelines.jobs.land.decoding import Decoder
from millstream.pipelines.lake.merging import DELETED, KEY, ORDER

NUMBERS = pa.schema([pa.field("id", pa.int64()), pa.field("ver", pa.int64())])
TEXTS = pa.schema([pa.field("id", pa.string()), pa.field("ver", pa.int64())])


def changes_of(
    messages: list[tuple[bytes | None, bytes | None]], fields: pa.Schema, **settings: str
) -> tuple[pa.RecordBatch, list[str | None], list[bool]]:
    """Open, decode and apply messages, given as pairs of key and value."""
    batch = pa.RecordBatch.from_pydict(
        {
            "partition": pa.array([0] * len(messages), pa.int32()),
            "offset": pa.array(range(len(messages)), pa.int64()),
            "key": pa.array([key for key, _ in messages], pa.binary()),
            "value": pa.array([value for _, value in messages], pa.binary()),
        }
    )
    parsed = LandSettings.from_strings({"topics": "t", "mode": "upsert", "decode": "json", **settings})
    rule = ChangeRule.of(parsed, "t")
    opened = rule.open(batch)
    decoded = Decoder(fields, evolves=False).decode(opened.values)
    rows = pa.RecordBatch.from_arrays(
        [batch.column("key"), *decoded.columns.flatten()], names=["message_key", *fields.names]
    )
    changes, reasons, fits = rule.apply(rows, opened, decoded.reasons)
    return changes, reasons.to_pylist(), np.asarray(fits).tolist()


@pytest.mark.parametrize(
    ("fields", "key", "deleted"),
    [
        (NUMBERS, b"5", b"5"),
        (NUMBERS, b'{"id": 5}', b"5"),
        (TEXTS, b"5", b"5"),
        (TEXTS, b"ada", b"ada"),
        (TEXTS, b'"ada"', b"ada"),
        (TEXTS, b"007", b"007"),
    ],
)
def test_a_message_without_a_payload_deletes_the_key_in_its_message_key(
    fields: pa.Schema, key: bytes, deleted: bytes
) -> None:
    changes, reasons, fits = changes_of([(key, None)], fields, key="id")
    assert (reasons, fits) == ([None], [True])
    assert changes.column(KEY).to_pylist() == [deleted]
    assert changes.column(DELETED).to_pylist() == [True]


def test_a_plain_message_key_is_not_one_of_several_fields() -> None:
    for key in (b"5", None, b"null", b"[5]", b"\xff"):
        assert changes_of([(key, None)], NUMBERS, key="id,ver")[1] == ["the key id, ver is missing or null"]
    for key in (None, b"null", b"true", b"[5]", b"\xff"):
        assert changes_of([(key, None)], NUMBERS, key="id")[1] == ["the key id is missing or null"]


def test_only_a_message_without_a_payload_needs_no_order_value() -> None:
    deletes = json.dumps({"id": 5, "op": "d"}).encode()
    settings = {"key": "id", "order.by": "ver", "delete.when": "op = 'd'"}
    changes, reasons, fits = changes_of([(b"5", None), (b"5", deletes)], NUMBERS, **settings)
    assert reasons == [None, "ver, which orders the changes of a key, is missing or null"]
    assert fits == [True, False]
    assert changes.column(ORDER).to_pylist() == [None, None]


def test_with_an_order_only_the_tombstone_after_a_delete_event_of_debezium_is_ignored() -> None:
    def event(op: str, number: int) -> bytes:
        return json.dumps({"op": op, "before": {"id": number}, "after": {"id": number}, "source": {"lsn": 7}}).encode()

    fields = pa.schema([pa.field("id", pa.int64()), pa.field("__source_lsn", pa.int64())])
    settings = {"key": "id", "order.by": "source.lsn", "decode": "debezium"}
    five, six = b'{"id": 5}', b'{"schema": {}, "payload": {"id": 6}}'
    messages = [
        *((five, event("d", 5)), (six, event("c", 6)), (five, None), (five, None)),
        *((five, event("c", 5)), (five, None), (six, None), (None, None)),
    ]
    changes, reasons, fits = changes_of(messages, fields, **settings)
    assert fits == [True, True, False, False, True, True, True, False]
    assert reasons == [None] * 7 + ["the key id is missing or null"]
    assert changes.column(KEY).to_pylist() == [b"5", b"6", b"5", b"5", b"5", b"5", b"6", None]
    assert changes.column(DELETED).to_pylist() == [True, False, True, True, False, True, True, True]
    del settings["order.by"]
    assert changes_of(messages[:4], fields, **settings)[2] == [True] * 4


def test_a_tombstone_may_follow_a_delete_event_of_an_earlier_batch() -> None:
    rule = ChangeRule(topic="t", key=(("id",),), order=("at",), is_debezium=True)
    columns = {"key": pa.array([b"5"], pa.binary())}
    events = [json.dumps({"op": op, "before": {"id": 5}, "after": {"id": 5}}).encode() for op in ("d", "u")]
    deleted: set[bytes | None] = set()
    ignored = []
    for value in (None, events[0], None, events[1], None):
        batch = pa.RecordBatch.from_pydict({**columns, "value": pa.array([value], pa.binary())})
        ignored += rule.open(batch, deleted).ignored.tolist()
    assert ignored == [False, False, True, False, False]


def test_a_key_or_an_order_value_that_a_double_rounds_is_refused() -> None:
    fields = pa.schema([pa.field("id", pa.float64()), pa.field("ver", pa.float64())])
    pairs = [(1.5, 2), (2**53 - 1, 2), (2**60 + 1, 2), (1, -(2**64))]
    messages = [(None, json.dumps({"id": key, "ver": version}).encode()) for key, version in pairs]
    _, reasons, fits = changes_of([*messages, (str(2**60).encode(), None)], fields, key="id", **{"order.by": "ver"})
    assert fits == [True, True, False, False, False]
    assert [reason and reason.partition(":")[0] for reason in reasons] == [None, None, "id", "ver", "id"]


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"5", b"5"), (b"a-5", b'"a-5"'), (b"\0\0\0\0\0\0\0*", None), (b"\0\0\0\0\x07\x02a", None), (b"\xff", None)],
    ids=["a number", "text", "a binary number", "a schema id", "not text"],
)
def test_only_printable_message_keys_are_taken_for_text(key: bytes, value: bytes | None) -> None:
    assert changes._plain_value(key) == value

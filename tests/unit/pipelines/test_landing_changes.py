"""Messages as changes: which key a message without a payload deletes, and when it needs an order value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from millstream.core.pipeline import LandSettings
from millstream.pipelines.jobs.land import changes, task
from millstream.pipelines.jobs.land.changes import ChangeRule
from millstream.pipelines.jobs.land.decoding import Decoder
from millstream.pipelines.jobs.land.dry_run import SampleRows
from millstream.pipelines.jobs.land.task import Landing, TopicWork
from millstream.pipelines.lake.merging import DELETED, KEY, ORDER
from millstream.pipelines.source.options import ReadOptions
from millstream.pipelines.source.ranges import Range

NUMBERS = pa.schema([pa.field("id", pa.int64()), pa.field("ver", pa.int64())])
TEXTS = pa.schema([pa.field("id", pa.string()), pa.field("ver", pa.int64())])


def batch_of(messages: Sequence[tuple[bytes | None, bytes | None]], start: int = 0) -> pa.RecordBatch:
    """Messages, given as pairs of key and value, with offsets from `start`."""
    return pa.RecordBatch.from_pydict(
        {
            "partition": pa.array([0] * len(messages), pa.int32()),
            "offset": pa.array(range(start, start + len(messages)), pa.int64()),
            "timestamp": pa.array([0] * len(messages), pa.timestamp("us", "UTC")),
            "key": pa.array([key for key, _ in messages], pa.binary()),
            "value": pa.array([value for _, value in messages], pa.binary()),
            "headers": pa.nulls(len(messages), pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))),
        }
    )


def changes_of(
    messages: Sequence[tuple[bytes | None, bytes | None]], fields: pa.Schema, **settings: str
) -> tuple[pa.RecordBatch, list[str | None], list[bool]]:
    """Open, decode and apply messages."""
    batch = batch_of(messages)
    parsed = LandSettings.from_strings({"topics": "t", "mode": "upsert", "decode": "json", **settings})
    rule = ChangeRule.of(parsed, "t")
    opened = rule.open(batch)
    decoded = Decoder(fields, evolves=False).decode(opened.values)
    rows = pa.RecordBatch.from_arrays(
        [batch.column("key"), *decoded.columns.flatten()], names=["message_key", *fields.names]
    )
    changes, reasons, fits = rule.apply(batch, rows, opened, decoded.reasons, {})
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


def event(op: str, number: int, lsn: int | None = 7) -> bytes:
    """A change event of Debezium."""
    return json.dumps({"op": op, "before": {"id": number}, "after": {"id": number}, "source": {"lsn": lsn}}).encode()


EVENTS = pa.schema([pa.field("id", pa.int64()), pa.field("__source_lsn", pa.int64())])
BY_LSN = {"key": "id", "order.by": "source.lsn", "decode": "debezium"}


def test_with_an_order_only_the_tombstone_after_a_delete_event_of_debezium_is_ignored() -> None:
    five, six = b'{"id": 5}', b'{"schema": {}, "payload": {"id": 6}}'
    messages = [
        *((five, event("d", 5)), (six, event("c", 6)), (five, None), (five, None)),
        *((five, event("c", 5)), (five, None), (six, None), (None, None)),
    ]
    changes, reasons, fits = changes_of(messages, EVENTS, **BY_LSN)
    assert fits == [True, True, False, False, True, True, True, False]
    assert reasons == [None] * 7 + ["the key id is missing or null"]
    assert changes.column(KEY).to_pylist() == [b"5", b"6", b"5", b"5", b"5", b"5", b"6", None]
    assert changes.column(DELETED).to_pylist() == [True, False, True, True, False, True, True, True]
    assert changes_of(messages[:4], EVENTS, key="id", decode="debezium")[2] == [True] * 4


def test_the_tombstone_of_a_quarantined_delete_event_deletes() -> None:
    messages = [(b"5", event("d", 5, lsn=None)), (b"5", None)]
    changes, reasons, fits = changes_of(messages, EVENTS, **BY_LSN)
    assert reasons == ["__source_lsn, which orders the changes of a key, is missing or null", None]
    assert fits == [False, True]
    assert changes.column(DELETED).to_pylist() == [True, True]


class Log:
    """The messages of a partition, landed from an offset in given Arrow batches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, messages: Sequence[tuple[bytes | None, bytes | None]]) -> None:
        self.messages = messages
        self.read: list[Range] = []
        monkeypatch.setattr(task, "read_records", self._read)
        monkeypatch.setattr(task, "log_start", lambda _options: lambda _topic, _partition: 0)

    def _read(self, offset_range: Range, _options: object, _skip: object) -> Iterator[pa.RecordBatch]:
        self.read.append(offset_range)
        yield batch_of(self.messages[offset_range.start : offset_range.end], offset_range.start)

    def land(self, *starts: int, **settings: Any) -> tuple[SampleRows, Landing]:
        """Land the messages from the first offset; each offset starts an Arrow batch."""
        rows = SampleRows()
        rule = ChangeRule.of(LandSettings.from_strings({"topics": "t", "mode": "upsert", **BY_LSN}), "t")
        work = TopicWork(writer=rows, quarantine=SampleRows(), fields=EVENTS, decodes=True, changes=rule, **settings)
        landing = Landing("t", work, cast("ReadOptions", object()))
        landing.begin(Range("t", 0, starts[0], len(self.messages)))
        for start, end in pairwise([*starts, len(self.messages)]):
            landing.take(batch_of(self.messages[start:end], start))
        return rows, landing


@pytest.mark.parametrize("starts", [(0,), (0, 1), (1,), (1, 2), (1, 2, 3), (3,)])
def test_a_tombstone_follows_its_delete_event_however_messages_are_divided(
    monkeypatch: pytest.MonkeyPatch, starts: tuple[int, ...]
) -> None:
    log = Log(monkeypatch, [(b"5", event("d", 5)), (b"6", event("c", 6)), (b"7", event("c", 7)), (b"5", None)])
    rows, _ = log.land(*starts)
    assert rows.deletes == int(starts[0] == 0)


def test_an_event_of_the_range_replaces_a_delete_event_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch, [(b"5", event("d", 5)), (b"5", event("c", 5)), (b"6", event("c", 6)), (b"5", None)])
    assert log.land(1, 2)[0].deletes == 1


def test_a_delete_event_before_the_range_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch, [(b"5", event("d", 5)), (b"5", None)])
    rows, landing = log.land(1, expectations=["__source_lsn > 7"], on_violation="fail")
    assert (rows.deletes, landing.report().counts) == (0, {})


def test_delete_events_far_before_a_tombstone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [(b"6", event("c", 6))] * changes.TOMBSTONE_OFFSETS
    log = Log(monkeypatch, [(b"5", event("d", 5)), *others, (b"5", None)])
    for starts in ((0,), (0, 9), (9,), (9, 500)):
        rows, landing = log.land(*starts)
        assert rows.deletes == (2 if starts[0] == 0 else 1)
        assert landing._deleted == {}
    # Nothing before the range can matter to a tombstone so far from its start.
    log.read.clear()
    log.land(1)
    assert log.read == []


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

"""What tasks of landing tell the driver: the files they wrote, or the fields they found that have no column yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from millstream.pipelines.lake.written_file import Written, from_json, to_json

COLUMNS: Final = "topic string, rows long, lost long, files string, quarantined string, fields binary"
"""What a task yields, in Spark's notation."""

_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("lost", pa.int64()),
        pa.field("files", pa.string()),
        pa.field("quarantined", pa.string()),
        pa.field("fields", pa.binary()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one task did for one topic."""

    topic: str
    rows: int = 0
    """Messages that were read."""
    lost: int = 0
    """Offsets that were gone before they were read."""
    files: tuple[Written, ...] = ()
    quarantined: tuple[Written, ...] = ()
    fields: pa.Schema | None = None
    """The fields of payloads with those that no column is there for; then nothing was written that counts."""


def to_arrow(reports: Iterable[Report]) -> pa.RecordBatch:
    """Reports as rows."""
    rows = [
        {
            "topic": report.topic,
            "rows": report.rows,
            "lost": report.lost,
            "files": to_json(report.files),
            "quarantined": to_json(report.quarantined),
            "fields": None if report.fields is None else report.fields.serialize().to_pybytes(),
        }
        for report in reports
    ]
    return pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)


def from_rows(rows: Iterable[tuple[str, int, int, str, str, bytes | None]]) -> list[Report]:
    """The reports of such rows."""
    return [
        Report(
            topic=topic,
            rows=count,
            lost=lost,
            files=tuple(from_json(files)),
            quarantined=tuple(from_json(quarantined)),
            fields=None if fields is None else pa.ipc.read_schema(pa.py_buffer(fields)),
        )
        for topic, count, lost, files, quarantined, fields in rows
    ]
